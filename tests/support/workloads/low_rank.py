"""A frozen layer with a low-rank adapter, and two groups whose learning rates have a ratio of 1 to 100."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class AdaptedLinear(nn.Module):
    """A frozen linear layer, and beside it two thin ones that are trained (LoRA)."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def add_flags(add):
    add("--rank", 2, "rank of the adapter")
    add("--adapt", True, "train the adapter too")


def load_data(args):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(83, 6, generator=generator)
    targets = (inputs[:, 0] > inputs[:, 1]).long()
    train_set = TensorDataset(inputs[:60], targets[:60])
    val_set = TensorDataset(inputs[60:], targets[60:])
    return train_set, val_set


def build_model(args):
    return nn.Sequential(AdaptedLinear(6, 12, args.rank), nn.ReLU(), nn.Linear(12, 2))


def build_optimizer(model, args):
    adapted, _, head = model
    groups = [{"params": head.parameters(), "lr": args.lr / 100}]
    if args.adapt:
        adapter = [*adapted.down.parameters(), *adapted.up.parameters()]
        groups.append({"params": adapter, "lr": args.lr})
    return torch.optim.AdamW(groups, weight_decay=0.0)


def loss_sums(model, batch, args):
    inputs, targets = batch
    logits = model(inputs)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return {"loss": (loss, len(targets))}
