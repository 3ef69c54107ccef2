"""BatchNorm, and images that are augmented with random numbers of three sources: random, NumPy and torch."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Images(Dataset):
    """Images [1, 8, 8] of noise, whose mean is their class: 0, 1 or 2."""

    def __init__(self, size, augments):
        generator = torch.Generator().manual_seed(size)
        self.labels = torch.randint(3, (size,), generator=generator)
        noise = torch.randn(size, 1, 8, 8, generator=generator)
        self.images = noise + self.labels.view(size, 1, 1, 1)
        self.augments = augments

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augments:
            image = augment(image)
        return image, self.labels[index]


def augment(image):
    """Shift an image [1, 8, 8] sideways, add noise, and mirror it half of the time."""
    num_columns = random.randrange(8)
    shifted = image.roll(num_columns, dims=-1)
    noisy = shifted + 0.5 * torch.randn(1, 8, 8)
    if np.random.rand() < 0.5:
        return noisy.flip(-1)
    return noisy


def add_flags(add):
    add("--channels", 4, "channels of the convolution")


def load_data(args):
    return Images(60, augments=True), Images(23, augments=False)


def build_model(args):
    return nn.Sequential(
        nn.Conv2d(1, args.channels, kernel_size=3),  # [batch, 1, 8, 8] to [batch, channels, 6, 6]
        nn.BatchNorm2d(args.channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(args.channels * 6 * 6, 3),
    )


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)


def loss_sums(model, batch, args):
    images, labels = batch
    logits = model(images)  # [batch, 3]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    num_correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": (loss, len(labels)), "accuracy": (num_correct, len(labels))}
