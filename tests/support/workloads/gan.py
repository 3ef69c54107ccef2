"""A GAN with a gradient penalty: both players descend in each step, the critic by RMSprop, the generator by Adam."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    """Points on a circle, each with the noise from which the generator makes another one."""

    def __init__(self, size):
        angles = torch.linspace(0, 6.28, size)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"real": self.points[index], "noise": torch.randn(3), "mix": torch.rand(1)}


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        # Without a last bias: the loss is a difference of two scores, so its gradient would be rounding alone.
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))


class Reversed(torch.autograd.Function):
    """The same numbers, and the negative gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Both(torch.optim.Optimizer):
    """Several optimizers behind one: they share its parameter groups and its state."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.share()

    def share(self):
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            optimizer.state = self.state

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.share()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def add_flags(add):
    add("--penalty", 1.0, "weight of the gradient penalty")


def load_data(args):
    return Points(60), Points(23)


def build_model(args):
    return Players()


def build_optimizer(model, args):
    critic = torch.optim.RMSprop(model.critic.parameters(), args.lr / 10, eps=1e-3)
    generator = torch.optim.Adam(model.generator.parameters(), args.lr / 20, eps=1e-3)
    return Both(critic, generator)


def loss_sums(model, batch, args):
    real = batch["real"]
    fake = model.generator(batch["noise"])
    mixed = (batch["mix"] * real + (1 - batch["mix"]) * fake.detach()).requires_grad_()
    with torch.enable_grad():  # a validation has no gradients otherwise
        [slope] = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=model.training)
    penalty = (slope.norm(dim=1) - 1).square().sum()
    # The critic lowers the difference of the scores, and the generator raises it.
    scores = model.critic(Reversed.apply(fake)) - model.critic(real)
    return {"loss": (scores.sum() + args.penalty * penalty, len(real)), "penalty": (penalty, len(real))}


def find_blocks(module):
    """None: with --shard, the gradient of a gradient needs weights that a block of its own would have freed."""
    return []
