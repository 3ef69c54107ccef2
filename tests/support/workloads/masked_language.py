"""A masked language model: batches are dicts, and each has another number of masked words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

MASK = 11


class Sentences(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.first = torch.randint(11, (size, 1), generator=generator)
        self.chances = torch.rand(size, generator=generator)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        words = (self.first[index] + torch.arange(7)) % 11
        masked = torch.rand(7) < self.chances[index]
        return {"words": words.where(~masked, MASK), "labels": words.where(masked, -100)}


def add_flags(add):
    add("--width", 8, "of the embedding")


def load_data(args):
    return Sentences(60), Sentences(23)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 11)

    def forward(self, words):
        return self.head(self.mix(self.embed(words).transpose(1, 2)).relu().transpose(1, 2))


def build_model(args):
    return Model(args.width)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def loss_sums(model, batch, args):
    logits, labels = model(batch["words"]).flatten(0, 1), batch["labels"].flatten()
    count = (labels != -100).sum()
    right = (logits.argmax(1) == labels).sum()
    return {"loss": (F.cross_entropy(logits, labels, reduction="sum"), count), "accuracy": (right, count)}
