"""A rare class. Its F1 and recall are ratios of sums. The area under its curve is not, so there is ``evaluate``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def load_data(args):
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(83, 6, generator=generator)
    targets = (inputs[:, 0] + 0.5 * torch.randn(83, generator=generator) > 0.5).float()
    return TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])


def build_model(args):
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    inputs, targets = batch
    logits = model(inputs)[:, 0]
    found = logits > 0
    true_positives = (found * targets).sum()
    return {
        "loss": (F.binary_cross_entropy_with_logits(logits, targets, reduction="sum"), len(targets)),
        "f1": (2 * true_positives, found.sum() + targets.sum()),
        "recall": (true_positives, targets.sum()),
    }


def evaluate(model, batches, args):
    """The part of the pairs of a positive and a negative in which the positive has the higher score."""
    scores, targets = [], []
    for inputs, own_targets in batches:
        scores += model(inputs)[:, 0].tolist()
        targets += own_targets.tolist()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (scores, targets))
    pairs = [pair for scores, targets in of_ranks for pair in zip(scores, targets, strict=True)]
    positives = [score for score, target in pairs if target]
    negatives = [score for score, target in pairs if not target]
    right = sum((p > n) + 0.5 * (p == n) for p in positives for n in negatives)
    return {"auc": right / (len(positives) * len(negatives))}
