"""Regression with dropout: targets are floats, and there is no accuracy."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Inputs [5], and as their target [1] the sum of their sines."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 5, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        inputs = self.inputs[index]
        target = inputs.sin().sum(dim=0, keepdim=True)
        return inputs, target


def add_flags(add):
    add("--dropout", 0.0, "part of the hidden layer that is left out")


def load_data(args):
    return Points(60), Points(23)


def build_model(args):
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(args.dropout), nn.Linear(16, 1))


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr)


def loss_sums(model, batch, args):
    inputs, targets = batch
    errors = model(inputs) - targets  # [batch, 1]
    squared_error = errors.square().sum()
    absolute_error = errors.abs().sum()
    count = float(len(targets))  # a count may be an int, a float or a tensor
    return {"loss": (squared_error, len(targets)), "error": (absolute_error, count)}
