"""What the tests of checkpoints share: writing small ones, reading them back, and the error that a call must raise."""

import sys

import cloudpickle
import pytest
import torch

from helpers.runtime.checkpoint import CheckpointError, load_file, new_checkpoint, save_file, verify

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import it

WEIGHTS = 10_000  # numbers; few enough for a forked child, which has no threads of OpenMP


def write(folder, step, keep=3):
    """Write a checkpoint of two files, each of which holds the step."""
    with new_checkpoint(folder, step, keep) as path:
        save_file({"weights": torch.full((WEIGHTS,), float(step)), "step": step}, path / "weights.pt")
        save_file({"plain": [step, 0.1, "text", None, (1, 2)]}, path / "plain.pt")


def step_of(path):
    """The step in a checkpoint's files. Fails if the files and the folder's name do not agree."""
    verify(path)
    step = load_file(path / "weights.pt")["step"]
    assert torch.equal(load_file(path / "weights.pt")["weights"], torch.full((WEIGHTS,), float(step)))
    assert load_file(path / "plain.pt")["plain"] == [step, 0.1, "text", None, (1, 2)]
    assert path.name == f"step_{step:08}"
    return step


def message(call, *arguments):
    """The message of the CheckpointError that a call has to raise."""
    with pytest.raises(CheckpointError) as raised:
        call(*arguments)
    text = str(raised.value)
    assert 1 <= len(text.splitlines()) <= 2 and len(text) < 500
    return text
