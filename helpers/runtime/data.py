"""scikit-learn's digits as tensors: 1,797 real 8x8 images that need no download.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits(train=1440):
    """The digits in a fixed shuffled order, split into (train set, validation set).

    Each is a TensorDataset of (images float32 [n, 64] in 0..1, labels int64 [n]). The
    first has ``train`` images, the second the other 1,797 - ``train``.
    """
    # The file alone: to import scikit-learn takes almost as long as to import torch.
    package = distribution("scikit-learn")
    file = package.locate_file("sklearn/datasets/data/digits.csv.gz")
    table = torch.tensor(np.loadtxt(file, delimiter=",", dtype=np.int64))  # [1797, 65]
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    images = table[order, :64].float() / 16  # pixels count from 0 to 16
    labels = table[order, 64]
    train_set = TensorDataset(images[:train], labels[:train])
    return train_set, TensorDataset(images[train:], labels[train:])
