"""A detector of up to five boxes in images of several sizes. Its loss is the sum of two means, over cells and boxes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

CELL = 4  # pixels: the model has an output for each cell of 4 x 4 pixels


class Images(Dataset):
    """Samples {"image": [1, height, width], "boxes": [n, 4]}. A box is (y, x, height, width) in pixels."""

    def __init__(self, size):
        self.seeds = [1000 * size + i for i in range(size)]

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seeds[index])
        image_size = CELL * torch.randint(2, 5, (2,), generator=generator)  # [2]: height and width
        height, width = image_size.tolist()
        image = 0.1 * torch.randn(1, height, width, generator=generator)

        num_boxes = int(torch.randint(6, (), generator=generator))
        boxes = torch.zeros(num_boxes, 4)
        for i in range(num_boxes):
            corner = image_size * torch.rand(2, generator=generator)
            box_size = 1 + 3 * torch.rand(2, generator=generator)
            boxes[i] = torch.cat([corner, box_size])
            # The pixel of the corner shows the model that a box is there, and how large it is.
            y, x = corner.long()
            image[0, y, x] += box_size.sum()
        return {"image": image, "boxes": boxes}


def load_data(args):
    return Images(60), Images(23)


def collate(samples):
    """Pad the images to one size, and mark the cells that are no padding.

    - ``images``: [batch, 1, height, width]
    - ``is_real``: [batch, height in cells, width in cells], 1 for a cell of an image and 0 for padding
    - ``boxes``: a list with the boxes [n, 4] of each image
    """
    height = max(sample["image"].shape[1] for sample in samples)
    width = max(sample["image"].shape[2] for sample in samples)
    images = torch.zeros(len(samples), 1, height, width)
    is_real = torch.zeros(len(samples), height // CELL, width // CELL)
    boxes = []
    for i, sample in enumerate(samples):
        image = sample["image"]
        _, own_height, own_width = image.shape
        images[i, :, :own_height, :own_width] = image
        is_real[i, : own_height // CELL, : own_width // CELL] = 1
        boxes.append(sample["boxes"])
    return {"images": images, "is_real": is_real, "boxes": boxes}


def build_model(args):
    """Five outputs for each cell: the logit of a box being there, and the box in units of a cell."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=CELL, stride=CELL),
        nn.ReLU(),
        nn.Conv2d(8, 5, kernel_size=1),
    )


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    """Two terms: whether a box is there, averaged over all cells, and where it is, averaged over all boxes."""
    outputs = model(batch["images"])  # [batch, 5, rows, columns]
    logits = outputs[:, 0]

    has_box = torch.zeros_like(logits)
    box_loss = outputs.new_zeros(())
    num_boxes = 0
    for i, boxes in enumerate(batch["boxes"]):
        rows, columns = (boxes[:, :2] / CELL).long().T  # the cell of each box's corner
        has_box[i, rows, columns] = 1
        predicted_boxes = outputs[i, 1:, rows, columns].T  # [n, 4]
        box_loss = box_loss + F.smooth_l1_loss(predicted_boxes, boxes / CELL, reduction="sum")
        num_boxes += len(boxes)

    is_real = batch["is_real"]
    cell_losses = F.binary_cross_entropy_with_logits(logits, has_box, reduction="none")
    cell_loss = (cell_losses * is_real).sum()

    term_of_cells = (cell_loss, is_real.sum())
    term_of_boxes = (box_loss, num_boxes)
    return {"loss": [term_of_cells, term_of_boxes], "boxes": term_of_boxes}
