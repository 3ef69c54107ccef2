"""Adapters on a model that somebody else has trained (--init-from), which knew fewer words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

NUM_WORDS = 41  # 29 in the foreign file, so the embedding does not fit and starts anew


class Adapted(nn.Module):
    """The body is frozen. Beside it is a low-rank adapter, which adds nothing before it is trained."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.body = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, words):
        x = self.words(words).mean(dim=1)  # [batch, words] to [batch, 8]
        hidden = self.body(x) + self.up(self.down(x))
        return self.head(hidden.tanh())


def load_data(args):
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(NUM_WORDS, (83, 5), generator=generator)
    targets = words.sum(dim=1) % 3
    train_set = TensorDataset(words[:60], targets[:60])
    val_set = TensorDataset(words[60:], targets[60:])
    return train_set, val_set


def build_model(args):
    return Adapted()


def build_optimizer(model, args):
    adapter = [*model.down.parameters(), *model.up.parameters()]
    new_layers = [*model.words.parameters(), *model.head.parameters()]
    groups = [
        {"params": adapter, "lr": args.lr / 10},
        {"params": new_layers, "lr": args.lr / 10},
    ]
    return torch.optim.AdamW(groups, eps=1e-3)


def loss_sums(model, batch, args):
    words, targets = batch
    logits = model(words)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return {"loss": (loss, len(targets))}
