"""A masked language model. Its batches are dicts, and each has a different number of masked words."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

NUM_WORDS = 11
MASK = NUM_WORDS  # the word that takes the place of a masked one
IGNORED = -100  # the label of a word that is not masked; cross_entropy ignores it


class Sentences(Dataset):
    """Sentences of seven words that count upwards, such as 9 10 0 1 2 3 4, of which some are masked."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.first_words = torch.randint(NUM_WORDS, (size, 1), generator=generator)
        self.mask_probabilities = torch.rand(size, generator=generator)

    def __len__(self):
        return len(self.first_words)

    def __getitem__(self, index):
        words = (self.first_words[index] + torch.arange(7)) % NUM_WORDS
        is_masked = torch.rand(7) < self.mask_probabilities[index]
        return {
            "words": torch.where(is_masked, MASK, words),
            "labels": torch.where(is_masked, words, IGNORED),
        }


def add_flags(add):
    add("--width", 8, "width of the embedding")


def load_data(args):
    return Sentences(60), Sentences(23)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS + 1, width)
        self.mix = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, words):
        """Logits [batch, 7, words] for words [batch, 7]."""
        x = self.embed(words)  # [batch, 7, width]
        x = self.mix(x.transpose(1, 2)).relu()  # [batch, width, 7]
        return self.head(x.transpose(1, 2))


def build_model(args):
    return Model(args.width)


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def loss_sums(model, batch, args):
    logits = model(batch["words"]).flatten(0, 1)  # [batch * 7, words]
    labels = batch["labels"].flatten()  # [batch * 7]
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    num_masked = (labels != IGNORED).sum()
    num_correct = (logits.argmax(dim=1) == labels).sum()
    return {"loss": (loss, num_masked), "accuracy": (num_correct, num_masked)}
