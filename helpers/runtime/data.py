"""scikit-learn's digits as tensors: 1,797 real 8x8 images, bundled, so nothing is downloaded.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

from importlib.metadata import distribution

import numpy as np
import torch
from torch.utils.data import TensorDataset


def digits(train=1440):
    """The digits in a fixed shuffled order, split into (train set, validation set).

    Each is a TensorDataset of (images float32 [n, 64] in 0..1, labels int64 [n]); ``train`` is the number of
    images in the first, the other 1,797 - ``train`` are in the second.
    """
    # scikit-learn's file alone: to import the library takes a rank almost as long as to import torch.
    file = distribution("scikit-learn").locate_file(
        "sklearn/datasets/data/digits.csv.gz"
    )
    table = torch.tensor(
        np.loadtxt(file, delimiter=",", dtype=np.int64)
    )  # [1797, 65]: 64 pixels, the label
    table = table[
        torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    ]
    images, labels = (
        table[:, :64].float() / 16,
        table[:, 64].contiguous(),
    )  # pixels count from 0 to 16
    return TensorDataset(images[:train], labels[:train]), TensorDataset(
        images[train:], labels[train:]
    )
