"""A frozen backbone with low-rank adapters, and two groups with a hundredfold ratio of learning rates."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_flags(add):
    add("--rank", 2, "of the adapters")
    add("--adapt", True, "train adapters too")


def load_data(args):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(83, 6, generator=generator)
    targets = (inputs[:, 0] > inputs[:, 1]).long()
    return TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])


def build_model(args):
    return nn.Sequential(Block(6, 12, args.rank), nn.ReLU(), nn.Linear(12, 2))


def build_optimizer(model, args):
    groups = [{"params": model[2].parameters(), "lr": args.lr / 100}]
    if args.adapt:
        groups.append({"params": [*model[0].down.parameters(), *model[0].up.parameters()]})
    return torch.optim.AdamW(groups, args.lr, weight_decay=0.0)


def loss_sums(model, batch, args):
    inputs, targets = batch
    return {"loss": (F.cross_entropy(model(inputs), targets, reduction="sum"), len(targets))}
