"""scikit-learn's digits as tensors: 1,797 real 8x8 images that need no download.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits(train=1440):
    """The shuffled digits: (train set, validation set), of (float32 [64], int64 [])."""
    path = "sklearn/datasets/data/digits.csv.gz"  # importing sklearn takes seconds
    table = np.loadtxt(distribution("scikit-learn").locate_file(path), delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(table)[order].split([64, 1], dim=1)
    images, labels = images.float() / 16, labels.flatten().long()
    train_set = TensorDataset(images[:train], labels[:train])
    return train_set, TensorDataset(images[train:], labels[train:])
