"""Sentences of different lengths, padded in collate, in batches of 13."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

NUM_WORDS = 9
IGNORED = -1  # the padding of the targets, which cross_entropy ignores
PAD = NUM_WORDS  # the padding of the inputs: one more row of the embedding


class Sentences(Dataset):
    """Sentences of 1 to 11 words that count upwards by 1, 2 or 3, modulo 9."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = 1 + (7 * index) % 11
        increment = 1 + index % 3
        return (increment * torch.arange(length)) % NUM_WORDS


def load_data(args):
    return Sentences(60), Sentences(23)


def collate(samples):
    """The padded sentences [batch, longest] and their lengths [batch]."""
    words = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(sentence) for sentence in samples])
    return words, lengths


def build_model(args):
    return nn.Sequential(nn.Embedding(NUM_WORDS + 1, 8), nn.Tanh(), nn.Linear(8, NUM_WORDS))


def build_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), args.lr, fused=True)


def loss_sums(model, batch, args):
    """Predict each word from the one before it. The first word of a sentence is no target."""
    words, lengths = batch
    inputs = words[:, :-1]
    inputs = torch.where(inputs == IGNORED, PAD, inputs)
    targets = words[:, 1:].flatten()
    logits = model(inputs).float().flatten(0, 1)  # [batch * (longest - 1), words]
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    num_targets = (lengths - 1).sum()
    return {"loss": (loss, num_targets), "sentences": (loss.detach(), len(lengths))}
