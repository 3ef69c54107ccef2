"""A detector: images of several sizes with 0 to 5 boxes. The classes of all cells count, and the boxes of some."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

CELL = 4  # pixels


class Images(Dataset):
    def __init__(self, size):
        self.seeds = [1000 * size + i for i in range(size)]

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seeds[index])
        height, width = (CELL * torch.randint(2, 5, (2,), generator=generator)).tolist()
        image = 0.1 * torch.randn(1, height, width, generator=generator)
        boxes = []
        for _ in range(int(torch.randint(6, (), generator=generator))):
            place = torch.rand(2, generator=generator) * torch.tensor([height, width])
            box = torch.cat([place, 1 + 3 * torch.rand(2, generator=generator)])
            y, x = box[:2].long()
            image[0, y, x] += box[2:].sum()
            boxes.append(box)
        return {"image": image, "boxes": torch.stack(boxes) if boxes else torch.zeros(0, 4)}


def load_data(args):
    return Images(60), Images(23)


def collate(samples):
    """Images padded to one size [batch, 1, height, width], the cells that are real, and a list of boxes [n, 4]."""
    height, width = (max(sample["image"].shape[i] for sample in samples) for i in (1, 2))
    images = torch.zeros(len(samples), 1, height, width)
    are_real = torch.zeros(len(samples), height // CELL, width // CELL)
    for i, sample in enumerate(samples):
        _, own_height, own_width = sample["image"].shape
        images[i, :, :own_height, :own_width] = sample["image"]
        are_real[i, : own_height // CELL, : own_width // CELL] = 1
    return {"images": images, "are_real": are_real, "boxes": [sample["boxes"] for sample in samples]}


def build_model(args):
    return nn.Sequential(nn.Conv2d(1, 8, CELL, stride=CELL), nn.ReLU(), nn.Conv2d(8, 5, 1))


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    outputs = model(batch["images"])
    targets = torch.zeros_like(outputs[:, 0])
    box_loss = outputs.new_zeros(())
    num_boxes = 0
    for i, boxes in enumerate(batch["boxes"]):
        y, x = (boxes[:, :2] / CELL).long().T
        targets[i, y, x] = 1
        box_loss = box_loss + F.smooth_l1_loss(outputs[i, 1:, y, x].T, boxes / CELL, reduction="sum")
        num_boxes += len(boxes)
    class_losses = F.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")
    classes = ((class_losses * batch["are_real"]).sum(), batch["are_real"].sum())
    return {"loss": [classes, (box_loss, num_boxes)], "boxes": (box_loss, num_boxes)}
