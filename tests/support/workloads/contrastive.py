"""A contrastive loss. Its negatives are from all ranks, so loss_sums has a collective; it calls the model twice."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.utils.data import Dataset


class Views(Dataset):
    """Each sample is a pair of noisy views of one image [6]."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 6, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        left = image + 0.3 * torch.randn(6)
        right = image + 0.3 * torch.randn(6)
        return left, right


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def embed(self, images):
        """Vectors [batch, 8] of length 1."""
        return F.normalize(self.body(images), dim=1)


def load_data(args):
    return Views(60), Views(24)


def build_model(args):
    return Model()


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    """Each left view has to find its right one among those of all ranks."""
    left_views, right_views = batch
    left = model.embed(left_views)  # [batch, 8]
    right = model.embed(right_views)
    all_right = all_gather_single_autograd(right, 0, dist.group.WORLD)  # [ranks * batch, 8]
    logits = model.scale.exp() * left @ all_right.T  # [batch, ranks * batch]

    first = dist.get_rank() * len(left)  # where this rank's views are in all_right
    targets = first + torch.arange(len(left), device=logits.device)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    num_correct = (logits.argmax(dim=1) == targets).sum()
    return {"loss": (loss, len(left)), "accuracy": (num_correct, len(left))}
