"""A GAN with a gradient penalty. Both players learn in each step, the critic by RMSprop and the generator by Adam."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Circle(Dataset):
    """Points on a circle, each with the random numbers that the losses of its step need."""

    def __init__(self, size):
        angles = torch.linspace(0, 6.28, size)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)  # [size, 2]

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"real": self.points[index], "noise": torch.randn(3), "mix": torch.rand(1)}


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        # The last layer has no bias: the loss is a difference of two scores, in which a bias would cancel out, so
        # that its gradient would be rounding errors alone.
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))


class ReverseGradient(torch.autograd.Function):
    """Return the input as it is, and send its gradient back with the opposite sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class BothOptimizers(torch.optim.Optimizer):
    """One optimizer made of two, the critic's and the generator's. Each step is a step of both.

    The trainer schedules, saves and resumes a single optimizer, so this one has the parameter groups and the state
    of both.
    """

    def __init__(self, critic, generator):
        super().__init__(critic.param_groups + generator.param_groups, defaults={})
        self.critic = critic
        self.generator = generator
        self.share_groups_and_state()

    def share_groups_and_state(self):
        """Let both optimizers work with this one's parameter groups and state. Each has a single group."""
        critic_group, generator_group = self.param_groups
        self.critic.param_groups = [critic_group]
        self.generator.param_groups = [generator_group]
        self.critic.state = self.state
        self.generator.state = self.state

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)  # makes new groups and a new state
        self.share_groups_and_state()

    def step(self):
        self.critic.step()
        self.generator.step()


def add_flags(add):
    add("--penalty", 1.0, "weight of the gradient penalty")


def load_data(args):
    return Circle(60), Circle(23)


def build_model(args):
    return Players()


def build_optimizer(model, args):
    critic = torch.optim.RMSprop(model.critic.parameters(), args.lr / 10, eps=1e-3)
    generator = torch.optim.Adam(model.generator.parameters(), args.lr / 20, eps=1e-3)
    return BothOptimizers(critic, generator)


def loss_sums(model, batch, args):
    """The critic minimizes ``fake_scores - real_scores`` and the penalty. The generator maximizes the difference."""
    real = batch["real"]  # [batch, 2]
    fake = model.generator(batch["noise"])
    penalty = gradient_penalty(model, real, fake, batch["mix"])
    fake_scores = model.critic(ReverseGradient.apply(fake))  # [batch, 1]
    real_scores = model.critic(real)
    loss = (fake_scores - real_scores).sum() + args.penalty * penalty
    return {"loss": (loss, len(real)), "penalty": (penalty, len(real))}


def gradient_penalty(model, real, fake, mix):
    """How far the critic's slope is from 1 between real and fake points (Gulrajani et al. 2017), summed up."""
    between = mix * real + (1 - mix) * fake.detach()
    between.requires_grad_()
    with torch.enable_grad():  # a validation has no gradients otherwise
        scores = model.critic(between)
        [slopes] = torch.autograd.grad(scores.sum(), between, create_graph=model.training)  # [batch, 2]
    return (slopes.norm(dim=1) - 1).square().sum()


def find_blocks(module):
    """No blocks, so --shard gathers the whole model at once.

    A block of its own would be freed after the forward pass, and the gradient of a gradient needs its weights again.
    """
    return []
