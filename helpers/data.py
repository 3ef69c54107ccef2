"""scikit-learn's digits as tensors: 1,797 real 8x8 images, bundled, so nothing is downloaded.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits(train=1440):
    """The digits in a fixed shuffled order, split into (train set, validation set).

    Each is a TensorDataset of (images float32 [n, 64] in 0..1, labels int64 [n]); ``train`` is the number of
    images in the first, the other 1,797 - ``train`` are in the second.
    """
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32)[order] / 16  # pixels count from 0 to 16
    labels = torch.tensor(labels)[order]
    return TensorDataset(images[:train], labels[:train]), TensorDataset(images[train:], labels[train:])
