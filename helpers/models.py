"""The models that the chapters share.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

from torch import nn


def mlp(width=256):
    """A two-layer classifier of the digits: images [batch, 64] to logits [batch, 10]."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
