"""Checkpoints: what is kept and what is refused, damage in every file, and a save in the background."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import threading
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from checkpoints import step_of, write
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from helpers.ranks.launch import launch
from helpers.runtime.checkpoint import (
    MANIFEST,
    BackgroundSaves,
    CheckpointError,
    finished,
    latest_good,
    load_file,
    new_checkpoint,
    save_file,
    save_sharded,
    verify,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


# ---- What is kept, and what is refused


def test_the_newest_are_kept(tmp_path):
    """The newest by the number of the step. As text, step_100000000 would come before step_99999999."""
    for step in (5, 20, 99_999_999, 100_000_000, 10**9):
        write(tmp_path, step, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step_100000000", "step_1000000000"]
    assert step_of(latest_good(tmp_path)) == 10**9


def test_what_killed_runs_left_is_removed_and_no_folder_of_the_user(tmp_path):
    write(tmp_path, 1)
    left_by_killed_runs = [".step_00000001.tmp", ".step_00000002.old"]
    for name in [*left_by_killed_runs, "step_notes", "other"]:
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009_copy")
    write(tmp_path, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["other", "step_00000002", "step_00000009_copy", "step_notes"]
    assert step_of(latest_good(tmp_path)) == 2


def test_a_good_newer_checkpoint_is_not_overwritten(tmp_path):
    write(tmp_path, 40)
    for step in (20, 40):
        with pytest.raises(CheckpointError, match=f"step_00000040 is there, and step {step} is not newer"):
            write(tmp_path, step)
    assert step_of(latest_good(tmp_path)) == 40


def test_a_damaged_newer_checkpoint_is_skipped_and_replaced(tmp_path, capsys):
    write(tmp_path, 40)
    write(tmp_path, 60)
    os.truncate(tmp_path / "step_00000060" / "weights.pt", 1000)
    assert step_of(latest_good(tmp_path)) == 40
    assert capsys.readouterr().out.startswith("skipped: step_00000060/weights.pt has 1000 bytes")

    write(tmp_path, 50)
    write(tmp_path, 60)
    assert [step_of(path) for path in finished(tmp_path)] == [40, 50, 60]


def test_what_is_missing_is_named(tmp_path):
    assert latest_good(tmp_path) is None
    with pytest.raises(CheckpointError, match="There is no folder"):
        latest_good(tmp_path / "typo")

    write(tmp_path, 1)
    (tmp_path / "step_00000001" / "weights.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000001/weights\.pt is missing"):
        verify(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match="No good checkpoint in"):
        latest_good(tmp_path)


def test_a_file_of_another_writer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"mine\.pt was not written with save_file"):
        with new_checkpoint(tmp_path, 1) as path:
            torch.save(1, path / "mine.pt")
    assert os.listdir(tmp_path) == []


# ---- Damage


def with_one_bit_flipped(content, num_copies):
    """Yield copies of some bytes, each with a different bit flipped."""
    generator = random.Random(0)
    for _ in range(num_copies):
        position = generator.randrange(len(content))
        bit = generator.randrange(8)
        copy = bytearray(content)
        copy[position] ^= 1 << bit
        yield copy


def check_that_damage_is_found(checkpoint, name):
    """Damage a file in 21 ways. ``verify`` has to name it each time. At the end the file is as it was."""
    file = checkpoint / name
    content = file.read_bytes()
    for damaged in with_one_bit_flipped(content, 20):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{name} holds other bytes"):
            verify(checkpoint)

    without_last_byte = content[:-1]
    file.write_bytes(without_last_byte)
    with pytest.raises(CheckpointError, match=f"{name} has {len(without_last_byte)} bytes"):
        verify(checkpoint)
    file.write_bytes(content)


def save_in_two_ways(folder):
    """Save a sharded model, of which each rank writes a part, and a file of each rank's own."""
    with new_checkpoint(folder, 1) as path:
        save_sharded(get_model_state_dict(fully_shard(nn.Linear(4, 4))), path)
        save_file(torch.rand(10), path / f"own_{dist.get_rank()}.pt")


@pytest.mark.ranks
def test_damage_is_found_in_every_file_of_every_rank(tmp_path):
    launch(save_in_two_ways, tmp_path, nproc=2)
    path = tmp_path / "step_00000001"
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest) == {".metadata", "__0_0.distcp", "__1_0.distcp", "own_0.pt", "own_1.pt"}
    for name, (length, digest) in manifest.items():
        content = (path / name).read_bytes()
        assert length == len(content)
        assert digest == hashlib.sha256(content).hexdigest()
        check_that_damage_is_found(path, name)
    verify(path)

    os.truncate(path / MANIFEST, 100)
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is damaged"):
        verify(path)


def test_a_damaged_file_raises_only_checkpoint_errors(tmp_path):
    """A file that was cut is always noticed. One with a flipped bit may load, because ``verify`` is to find that."""
    file = tmp_path / "a.pt"
    save_file({"weights": torch.arange(100.0), "plain": [1, "x"]}, file)
    content = file.read_bytes()
    for length in range(0, len(content), 50):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            load_file(file)

    for damaged in with_one_bit_flipped(content, 300):
        file.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            load_file(file)


# ---- A save in the background


def save_while_another_save_runs(folder):
    """Start a save of step 5 in the background, and save step 6 before it has ended.

    Returns the names in the folder when step 6 is saved and step 5 is not.
    """
    saves = BackgroundSaves()
    state = {"weights": torch.ones(10)}
    has_begun = threading.Event()
    may_write = threading.Event()

    def save_when_allowed(*arguments):
        has_begun.set()
        may_write.wait()
        save_sharded(*arguments)

    with mock.patch("helpers.runtime.checkpoint.save_sharded", save_when_allowed):
        saves.start(state, folder, 5)
        has_begun.wait()
        with pytest.raises(CheckpointError, match="still running"):
            saves.start(state, folder, 6)
        with new_checkpoint(folder, 6) as path:
            if dist.get_rank() == 0:
                save_file(6, path / "run.pt")
        names = sorted(os.listdir(folder))

        may_write.set()
        saves.wait()
    return names


@pytest.mark.ranks
def test_another_save_leaves_one_in_the_background_alone(tmp_path):
    names, _ = launch(save_while_another_save_runs, tmp_path, nproc=2)
    assert names == [".step_00000005.tmp", "step_00000006"]

    for path in finished(tmp_path):
        verify(path)
    assert sorted(os.listdir(tmp_path)) == ["step_00000005", "step_00000006"]
