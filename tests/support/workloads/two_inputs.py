"""Two inputs, of which one is often absent, so that its branch gets no gradient. Needs --find-unused."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Pairs(Dataset):
    """Samples with an image [4] and a target; every ninth has a text [4] too, and the others have None."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 2, 4, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        image, text = self.inputs[index]
        target = image[0] - image[1]
        if index % 9 != 0:
            text = None
        return {"image": image, "text": text, "target": target}


def load_data(args):
    return Pairs(60), Pairs(23)


def collate(samples):
    """The images [batch, 4], the targets [batch], a list of the texts [4], and which sample each text is of."""
    texts = []
    samples_with_text = []
    for i, sample in enumerate(samples):
        if sample["text"] is not None:
            texts.append(sample["text"])
            samples_with_text.append(i)
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "targets": torch.stack([sample["target"] for sample in samples]),
        "texts": texts,
        "samples_with_text": torch.tensor(samples_with_text, dtype=torch.long),
        "kind": "pair",  # a batch may have something that is no tensor
    }


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(4, 8)
        self.text = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)


def build_model(args):
    return Model()


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    texts = batch["texts"]
    samples_with_text = batch["samples_with_text"]
    features = model.image(batch["images"])  # [batch, 8]
    if texts:
        text_features = model.text(torch.stack(texts))
        features = features.index_add(0, samples_with_text, text_features)
    predictions = model.head(features.tanh())[:, 0]  # [batch]

    squared_errors = (predictions - batch["targets"]).square()
    loss = squared_errors.sum()
    loss_with_text = squared_errors[samples_with_text].sum()
    return {"loss": (loss, len(squared_errors)), "with_text": (loss_with_text, len(texts))}
