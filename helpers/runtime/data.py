"""scikit-learn's digits as tensors: 1,797 real 8x8 images that need no download."""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits(train: int = 1440) -> tuple[TensorDataset, TensorDataset]:
    """The shuffled digits: (train set, validation set), of (float32 [64], int64 [])."""
    path = "sklearn/datasets/data/digits.csv.gz"  # importing sklearn takes seconds
    file = distribution("scikit-learn").locate_file(path)
    rows = torch.tensor(np.loadtxt(str(file), delimiter=","))  # [1797, 65]
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    whole = TensorDataset(rows[:, :64].float() / 16, rows[:, 64].long())
    return TensorDataset(*whole[:train]), TensorDataset(*whole[train:])
