"""What the tests of checkpoints share: writing small ones, and reading them back."""

import sys

import cloudpickle
import torch

from helpers.runtime.checkpoint import load_file, new_checkpoint, save_file, verify

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import it

NUMBERS = 10_000  # few enough for a forked child, which has no threads of OpenMP


def write(folder, step, keep=3):
    """Write a checkpoint of two files, each of which holds the step."""
    with new_checkpoint(folder, step, keep) as path:
        save_file(torch.full((NUMBERS,), float(step)), path / "weights.pt")
        save_file(step, path / "plain.pt")


def step_of(path):
    """The step in a checkpoint's files. Fails if the files and the folder's name do not agree."""
    verify(path)
    step = load_file(path / "plain.pt")
    assert torch.equal(load_file(path / "weights.pt"), torch.full((NUMBERS,), float(step)))
    assert path.name == f"step_{step:08}"
    return step
