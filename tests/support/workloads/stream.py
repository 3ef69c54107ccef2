"""An endless stream that shuffles by the global generators, and a finite one that has ``__iter__`` alone."""

import random

import torch
from torch import nn
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        numbers = [*range(8)]
        while True:
            random.shuffle(numbers)
            for number in numbers:
                yield number, random.random()


def load_data(args):
    return Stream(), Rest()


class Rest:
    def __iter__(self):
        return iter([(number % 8, number / 23) for number in range(23)])


def collate(samples):
    numbers, offsets = zip(*samples, strict=True)
    inputs = torch.tensor(offsets)[:, None] + torch.eye(8)[list(numbers)]
    return {"inputs": inputs, "targets": torch.tensor(numbers).float()}


def build_model(args):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr / 10, fused=True)


def loss_sums(model, batch, args):
    errors = model(batch["inputs"])[:, 0] - batch["targets"]
    return {"loss": (errors.square().sum(), torch.tensor(len(errors))), "bias": (errors.sum(), len(errors))}
