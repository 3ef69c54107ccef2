"""A rare class. Its F1 and recall are ratios of sums. The area under its ROC curve is not, so there is ``evaluate``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def load_data(args):
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(83, 6, generator=generator)
    noise = torch.randn(83, generator=generator)
    targets = (inputs[:, 0] + 0.5 * noise > 0.5).float()  # 1 for the rare class, 0 for the other
    train_set = TensorDataset(inputs[:60], targets[:60])
    val_set = TensorDataset(inputs[60:], targets[60:])
    return train_set, val_set


def build_model(args):
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    inputs, targets = batch
    logits = model(inputs)[:, 0]  # [batch]
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")

    is_predicted = logits > 0
    num_predicted = is_predicted.sum()
    num_positives = targets.sum()
    true_positives = (is_predicted * targets).sum()
    return {
        "loss": (loss, len(targets)),
        "f1": (2 * true_positives, num_predicted + num_positives),
        "recall": (true_positives, num_positives),
    }


def evaluate(model, batches, args):
    """The area under the ROC curve: in which part of all pairs of a positive and a negative the positive scores higher.

    A tie counts half. The two samples of a pair may be on different ranks, so the scores of all ranks are gathered.
    """
    scores = []
    targets = []
    for inputs, batch_targets in batches:
        logits = model(inputs)[:, 0]
        scores += logits.tolist()
        targets += batch_targets.tolist()

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (scores, targets))
    positives = []
    negatives = []
    for rank_scores, rank_targets in gathered:
        for score, target in zip(rank_scores, rank_targets, strict=True):
            if target == 1:
                positives.append(score)
            else:
                negatives.append(score)

    num_correct = 0.0
    for positive in positives:
        for negative in negatives:
            if positive > negative:
                num_correct += 1
            elif positive == negative:
                num_correct += 0.5
    num_pairs = len(positives) * len(negatives)
    return {"auc": num_correct / num_pairs}
