"""scikit-learn's digits as tensors: 1,797 real 8x8 images that need no download."""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The shuffled digits: (train set, validation set), of (float32 [64], int64 [])."""
    # The file is read without scikit-learn, whose import takes seconds.
    path = "sklearn/datasets/data/digits.csv.gz"
    file = distribution("scikit-learn").locate_file(path)
    rows = torch.tensor(np.loadtxt(str(file), delimiter=","))  # [1797, 65]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    rows = rows[order]
    images = rows[:, :64].float() / 16  # the grey levels are 0 to 16
    labels = rows[:, 64].long()
    train_set = TensorDataset(images[:1440], labels[:1440])
    val_set = TensorDataset(images[1440:], labels[1440:])
    return train_set, val_set
