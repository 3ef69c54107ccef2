"""BatchNorm, and images that each worker shifts, flips and blurs by three sources of random numbers."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Images(Dataset):
    def __init__(self, size, augments):
        generator = torch.Generator().manual_seed(size)
        self.labels = torch.randint(3, (size,), generator=generator)
        self.images = torch.randn(size, 1, 8, 8, generator=generator) + self.labels[:, None, None, None]
        self.augments = augments

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augments:
            image = image.roll(random.randrange(8), -1) + 0.5 * torch.randn(1, 8, 8)
            image = image.flip(-1) if np.random.rand() < 0.5 else image
        return image, self.labels[index]


def add_flags(add):
    add("--channels", 4, "of the convolution")


def load_data(args):
    return Images(60, True), Images(23, False)


def build_model(args):
    convolution = nn.Conv2d(1, args.channels, 3), nn.BatchNorm2d(args.channels), nn.ReLU()
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(36 * args.channels, 3))


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def loss_sums(model, batch, args):
    images, labels = batch
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return {"loss": (loss, len(labels)), "accuracy": ((logits.argmax(1) == labels).sum(), len(labels))}
