"""Checkpoints: what is kept and what is refused, damage in every file, another world size, several ranks."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sys
import threading
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import message, step_of, write
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
    on_rank0,
    save_file,
    save_sharded,
    verify,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


# ---- One process


def test_a_file_is_mapped_and_not_read(tmp_path):
    tensors = [torch.arange(5000.0), -torch.arange(5000.0)]
    save_file(tensors, tmp_path / "a.pt")
    assert os.listdir(tmp_path) == ["a.pt"]
    raw = (tmp_path / "a.pt").read_bytes()
    in_file = [raw.index(tensor.numpy().tobytes()) for tensor in tensors]
    loaded = load_file(tmp_path / "a.pt")
    assert all(torch.equal(*pair) for pair in zip(loaded, tensors, strict=True))
    in_memory = [tensor.data_ptr() for tensor in loaded]
    assert in_memory[1] - in_memory[0] == in_file[1] - in_file[0]


def test_the_newest_are_kept(tmp_path):
    for step in (5, 20, 99_999_999, 100_000_000, 10**9):
        write(tmp_path, step, keep=2)
    names = ["step_100000000", "step_1000000000"]
    assert [path.name for path in finished(tmp_path)] == names
    assert sorted(os.listdir(tmp_path)) == names
    assert step_of(latest_good(tmp_path)) == 10**9


def test_at_least_one_is_kept(tmp_path):
    write(tmp_path, 1, keep=0)
    write(tmp_path, 2, keep=0)
    assert os.listdir(tmp_path) == ["step_00000002"]


def test_what_killed_runs_left_is_removed_and_no_folder_of_the_user(tmp_path):
    write(tmp_path, 1)
    for name in (".step_00000001.tmp", ".step_00000002.old", "step_notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009_copy")
    write(tmp_path, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["other", "step_00000002", "step_00000009_copy", "step_notes"]
    assert step_of(latest_good(tmp_path)) == 2


@pytest.mark.parametrize("step", [20, 40])
def test_a_good_newer_checkpoint_is_not_overwritten(tmp_path, step):
    write(tmp_path, 40)
    assert f"step_00000040 is there, and step {step} is not newer" in message(write, tmp_path, step)
    assert step_of(latest_good(tmp_path)) == 40


def test_a_folder_of_the_user_with_that_name_is_not_overwritten(tmp_path):
    (tmp_path / "step_00000050").mkdir()
    (tmp_path / "step_00000050" / "mine").write_text("x")
    assert re.search("step_00000050 was not saved: .*not empty", message(write, tmp_path, 50))
    assert os.listdir(tmp_path / "step_00000050") == ["mine"]


def test_a_damaged_newer_checkpoint_is_skipped_and_replaced(tmp_path, capsys):
    write(tmp_path, 40)
    write(tmp_path, 60)
    os.truncate(tmp_path / "step_00000060" / "weights.pt", 1000)
    assert step_of(latest_good(tmp_path)) == 40
    assert re.fullmatch(r"skipped: step_00000060/weights.pt has 1000 bytes.*\n", capsys.readouterr().out)
    write(tmp_path, 50)
    write(tmp_path, 60)
    assert [step_of(path) for path in finished(tmp_path)] == [40, 50, 60]


def test_what_is_missing_is_named(tmp_path):
    assert latest_good(tmp_path) is None
    assert "manifest.json is missing" in message(verify, tmp_path)
    assert "There is no folder" in message(latest_good, tmp_path / "typo")
    write(tmp_path, 1)
    (tmp_path / "step_00000001" / "plain.pt").unlink()
    assert "step_00000001/plain.pt is missing" in message(verify, tmp_path / "step_00000001")
    assert "No good checkpoint in" in message(latest_good, tmp_path)


def test_a_file_of_another_writer_is_refused(tmp_path):
    def save():
        with new_checkpoint(tmp_path, 1) as path:
            torch.save(1, path / "mine.pt")

    assert "mine.pt was not written with save_file" in message(save)
    assert os.listdir(tmp_path) == []


# ---- Damage


def with_one_bit_flipped(data, number):
    """Yields the bytes ``number`` times, each time with another bit flipped."""
    chance = random.Random(0)
    for _ in range(number):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield damaged


def write_dcp(folder):
    with new_checkpoint(folder, 1) as path:
        save_sharded({"weights": torch.arange(1000.0), "step": 1}, path)


@pytest.mark.parametrize("name", ["weights.pt", "plain.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.ranks
def test_damage_is_found_in_every_file(tmp_path, name):
    if name in (".metadata", "__0_0.distcp"):
        launch(write_dcp, tmp_path, nproc=1)
    else:
        write(tmp_path, 1)
    path = tmp_path / "step_00000001"
    data = (path / name).read_bytes()
    for damaged in with_one_bit_flipped(data, 200):
        (path / name).write_bytes(damaged)
        assert f"{name} holds other bytes" in message(verify, path)
        assert latest_good(tmp_path) == path, "it looks at lengths alone"
    for length in {0, 1, len(data) // 2, len(data) - 1}:
        (path / name).write_bytes(data[:length])
        assert f"{name} has {length} bytes" in message(verify, path)
    (path / name).write_bytes(data)
    verify(path)


def test_a_damaged_manifest_raises_unless_it_still_says_the_same(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "step_00000001"
    manifest = (path / MANIFEST).read_bytes()
    for damaged in with_one_bit_flipped(manifest, 200):
        (path / MANIFEST).write_bytes(damaged)
        try:
            verify(path)
        except CheckpointError:
            continue
        assert json.loads(damaged) == json.loads(manifest)
    (path / MANIFEST).write_bytes(manifest[:-1])
    assert "manifest.json is damaged" in message(verify, path)


def test_a_damaged_file_raises_only_checkpoint_errors(tmp_path):
    assert "a.pt is missing" in message(load_file, tmp_path / "a.pt")
    save_file({"weights": torch.arange(100.0), "plain": [1, "x"]}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / "a.pt").write_bytes(data[:length])
        assert "is damaged" in message(load_file, tmp_path / "a.pt")
    for damaged in with_one_bit_flipped(data, 300):
        (tmp_path / "a.pt").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):  # a flip in the numbers is for verify to find
            load_file(tmp_path / "a.pt")


# ---- Several ranks


@pytest.mark.ranks
def test_another_save_leaves_one_in_the_background_alone(tmp_path):
    def save():
        saves = BackgroundSaves()
        may_go_on = threading.Event()
        begun = threading.Event()

        def save_later(*arguments):
            begun.set()
            may_go_on.wait(60)
            save_sharded(*arguments)

        (tmp_path / ".step_00000001.tmp").mkdir(parents=True, exist_ok=True)  # a killed run's
        dist.barrier()
        with mock.patch("helpers.runtime.checkpoint.save_sharded", save_later):
            weights = torch.ones(10)
            saves.start({"weights": weights}, tmp_path, 5)
            weights.zero_()  # training goes on
            assert saves.finished() is None
            assert saves.finished() is None
            assert begun.wait(60)
            assert "still running" in message(saves.start, {"weights": torch.ones(10)}, tmp_path, 6)
            with new_checkpoint(tmp_path, 6) as path:
                if dist.get_rank() == 0:
                    save_file(6, path / "run.pt")
            names = sorted(os.listdir(tmp_path))
            may_go_on.set()
            saves.wait()
        state = {"weights": torch.zeros(10)}
        dcp.load(state, checkpoint_id=tmp_path / "step_00000005")
        return names, state["weights"].sum().item()

    assert launch(save, nproc=2) == [([".step_00000005.tmp", "step_00000006"], 10)] * 2
    for path in finished(tmp_path):
        verify(path)
    assert [path.name for path in finished(tmp_path)] == ["step_00000005", "step_00000006"]


@pytest.mark.ranks
def test_the_manifest_has_the_length_and_hash_of_all_ranks_files(tmp_path):
    numbers = torch.rand(10)

    def save_and_load():
        with new_checkpoint(tmp_path, 1) as path:
            save_sharded(get_model_state_dict(fully_shard(nn.Linear(4, 4))), path)
            save_file(numbers, path / f"own_{dist.get_rank()}.pt")
        loaded = on_rank0(load_file, latest_good(tmp_path) / "own_1.pt")
        loaded += 1  # in memory, and not in the file
        return loaded

    for loaded in launch(save_and_load, nproc=2):
        assert torch.equal(loaded, numbers + 1)
    path = tmp_path / "step_00000001"
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest) == {".metadata", "__0_0.distcp", "__1_0.distcp", "own_0.pt", "own_1.pt"}
    for name, (length, digest) in manifest.items():
        data = (path / name).read_bytes()
        assert (length, digest) == (len(data), hashlib.sha256(data).hexdigest())
