"""Adapters on a model that somebody else has trained (--init-from), which knew fewer words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

WORDS = 41  # 29 in the foreign file


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, words):
        x = self.words(words).mean(1)
        return self.head((self.body(x) + self.up(self.down(x))).tanh())


def load_data(args):
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(WORDS, (83, 5), generator=generator)
    targets = words.sum(1) % 3
    return TensorDataset(words[:60], targets[:60]), TensorDataset(words[60:], targets[60:])


def build_model(args):
    return Adapted()


def build_optimizer(model, args):
    adapters = [*model.down.parameters(), *model.up.parameters()]
    others = [*model.words.parameters(), *model.head.parameters()]
    groups = [{"params": adapters}, {"params": others, "lr": args.lr / 10}]
    return torch.optim.AdamW(groups, args.lr / 10, eps=1e-3)


def loss_sums(model, batch, args):
    words, targets = batch
    return {"loss": (F.cross_entropy(model(words), targets, reduction="sum"), len(targets))}
