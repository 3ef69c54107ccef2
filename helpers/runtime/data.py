"""scikit-learn's digits as tensors: 1,797 real 8x8 images that need no download."""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits, shuffled, as a training set and a validation set.

    An image is a float32 [64] between 0 and 1, and its label an int64 between 0 and 9.
    """
    # scikit-learn's file is read without its code, whose import takes seconds.
    path = "sklearn/datasets/data/digits.csv.gz"
    file = distribution("scikit-learn").locate_file(path)
    rows = torch.tensor(np.loadtxt(str(file), delimiter=","))  # [1797, 65]
    generator = torch.Generator().manual_seed(0)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    images = rows[:, :64].float() / 16  # the grey levels are 0 to 16
    labels = rows[:, 64].long()

    train_set = TensorDataset(images[:1440], labels[:1440])
    val_set = TensorDataset(images[1440:], labels[1440:])
    return train_set, val_set
