"""A GAN whose optimizers take turns: two steps of the critic, then one of the generator."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

CRITIC_STEPS = 2  # for each step of the generator


class Circle(Dataset):
    """Points on a circle, each with the noise from which the generator makes a point of its own."""

    def __init__(self, size):
        angles = torch.linspace(0, 6.28, size)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)  # [size, 2]

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        noise = torch.randn(3)
        return self.points[index], noise


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        # It is a buffer, so it is in the checkpoints, and a resumed run goes on with the right player.
        self.register_buffer("num_steps", torch.tensor(0))

    def is_critics_turn(self):
        """Whether the next step is the critic's: true, true, false, true, true, false, ..."""
        return int(self.num_steps) % (CRITIC_STEPS + 1) < CRITIC_STEPS


class TurnOptimizer(torch.optim.Optimizer):
    """One optimizer made of two. Each step is one of the critic's optimizer or one of the generator's.

    The trainer schedules, saves and resumes a single optimizer, so this one has the parameter groups and the state
    of both.
    """

    def __init__(self, model, critic, generator):
        super().__init__(critic.param_groups + generator.param_groups, defaults={})
        self.model = model
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
        if self.model.is_critics_turn():
            self.critic.step()
        else:
            self.generator.step()
        self.model.num_steps += 1


def load_data(args):
    return Circle(60), Circle(23)


def build_model(args):
    return Players()


def build_optimizer(model, args):
    critic = torch.optim.RMSprop(model.critic.parameters(), args.lr / 10, eps=1e-3)
    generator = torch.optim.Adam(model.generator.parameters(), args.lr / 20, eps=1e-3)
    return TurnOptimizer(model, critic, generator)


def loss_sums(model, batch, args):
    real, noise = batch  # [batch, 2] and [batch, 3]
    fake = model.generator(noise)  # [batch, 2]
    fake_scores = model.critic(fake)  # [batch, 1]
    if model.is_critics_turn():
        real_scores = model.critic(real)
        losses = F.softplus(fake_scores) + F.softplus(-real_scores)
    else:
        losses = F.softplus(-fake_scores)
    return {"loss": (losses.sum(), len(real))}
