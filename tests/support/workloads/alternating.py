"""A GAN whose optimizers take turns: two steps of the critic, then one of the generator."""

import torch
from torch import nn
from torch.utils.data import Dataset

CRITIC_STEPS = 2


class Points(Dataset):
    def __init__(self, size):
        angles = torch.linspace(0, 6.28, size)
        self.points = torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], torch.randn(3)


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("turn", torch.tensor(0))  # so a checkpoint has it

    def is_critics_turn(self):
        return int(self.turn) % (CRITIC_STEPS + 1) < CRITIC_STEPS


class InTurn(torch.optim.Optimizer):
    """Two optimizers behind one, which share its parameter groups and its state. One of them steps."""

    def __init__(self, model, critic, generator):
        self.model = model
        self.optimizers = [critic, generator]
        super().__init__(critic.param_groups + generator.param_groups, {})
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
        self.optimizers[0 if self.model.is_critics_turn() else 1].step()
        self.model.turn += 1


def load_data(args):
    return Points(60), Points(23)


def build_model(args):
    return Players()


def build_optimizer(model, args):
    critic = torch.optim.RMSprop(model.critic.parameters(), args.lr / 10, eps=1e-3)
    generator = torch.optim.Adam(model.generator.parameters(), args.lr / 20, eps=1e-3)
    return InTurn(model, critic, generator)


def loss_sums(model, batch, args):
    real, noise = batch
    fake = model.generator(noise)
    if model.is_critics_turn():
        loss = nn.functional.softplus(model.critic(fake)) + nn.functional.softplus(-model.critic(real))
    else:
        loss = nn.functional.softplus(-model.critic(fake))
    return {"loss": (loss.sum(), len(real))}
