"""A contrastive loss over the views of all ranks: a collective in loss_sums, two calls of the model, a parameter."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.utils.data import Dataset


class Views(Dataset):
    def __init__(self, size):
        self.images = torch.randn(size, 6, generator=torch.Generator().manual_seed(size))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return [self.images[index] + 0.3 * torch.randn(6) for _ in range(2)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(6, 8), nn.Parameter(torch.tensor(1.0))

    def embed(self, images):
        return F.normalize(self.body(images), dim=1)


def load_data(args):
    return Views(60), Views(24)


def build_model(args):
    return Model()


def build_optimizer(model, args):
    return torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, fused=True)


def loss_sums(model, batch, args):
    left, right = (model.embed(images) for images in batch)
    every = all_gather_single_autograd(right, 0, dist.group.WORLD)
    logits = model.scale.exp() * left @ every.T
    targets = torch.arange(len(left), device=logits.device) + dist.get_rank() * len(left)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return {"loss": (loss, len(left)), "right": ((logits.argmax(1) == targets).sum(), len(left))}
