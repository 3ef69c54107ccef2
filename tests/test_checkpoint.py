"""Checkpoints: what is kept and what is refused, damage in every file, another world size, several ranks."""

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
    places = [raw.index(tensor.numpy().tobytes()) for tensor in tensors]
    loaded = load_file(tmp_path / "a.pt")
    assert all(torch.equal(*pair) for pair in zip(loaded, tensors, strict=True))
    first, second = (tensor.data_ptr() for tensor in loaded)
    assert second - first == places[1] - places[0]  # they lie in memory as they do in the file


def test_the_last_k_are_kept_in_order(tmp_path):
    for step in (5, 20, 99_999_999, 100_000_000, 10**9):
        write(tmp_path, step, keep=2)
    names = ["step_100000000", "step_1000000000"]
    assert [path.name for path in finished(tmp_path)] == names == sorted(os.listdir(tmp_path))
    assert step_of(latest_good(tmp_path)) == 10**9
    assert "step 999999999 is not newer" in message(write, tmp_path, 999_999_999)
    write(tmp_path, 2 * 10**9, keep=0)
    assert os.listdir(tmp_path) == ["step_2000000000"]  # at least one


def test_what_killed_runs_left_is_removed_and_no_folder_of_yours(tmp_path):
    write(tmp_path, 1)
    for name in (".step_00000001.tmp", ".step_00000002.old", "step_notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009_copy")
    write(tmp_path, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["other", "step_00000002", "step_00000009_copy", "step_notes"]
    assert step_of(latest_good(tmp_path)) == 2


def test_a_good_newer_checkpoint_is_not_overwritten(tmp_path):
    write(tmp_path, 40)
    for step in (20, 40):
        assert "step_00000040 is there, and step" in message(write, tmp_path, step)
    (tmp_path / "step_00000050").mkdir()
    (tmp_path / "step_00000050" / "mine").write_text("x")
    assert re.search("step_00000050 was not saved: .*not empty", message(write, tmp_path, 50))
    assert step_of(latest_good(tmp_path)) == 40


def test_a_damaged_newer_checkpoint_is_replaced(tmp_path, capsys):
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


def flips(whole, number):
    """Yields the bytes ``number`` times, each time with another bit flipped."""
    chance = random.Random(0)
    for _ in range(number):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        yield damaged


def write_dcp(folder):
    with new_checkpoint(folder, 1) as path:
        save_sharded({"weights": torch.arange(1000.0), "step": 1}, path)


@pytest.mark.parametrize("name", ["weights.pt", "plain.pt", ".metadata", "__0_0.distcp", MANIFEST])
@pytest.mark.ranks
def test_damage_is_found_in_every_file(tmp_path, name):
    if name in (".metadata", "__0_0.distcp"):
        launch(write_dcp, tmp_path, nproc=1)
    else:
        write(tmp_path, 1)
    path = tmp_path / "step_00000001"
    whole = (path / name).read_bytes()
    for damaged in flips(whole, 200):
        (path / name).write_bytes(damaged)
        if name == MANIFEST:  # a changed blank in a JSON text does no harm, but the list of files has to stay complete
            try:
                verify(path)
            except CheckpointError:
                continue
            assert len(re.findall(rb'"\w+\.pt": *\[', damaged)) == 2
        else:
            assert f"{name} holds other bytes" in message(verify, path)
            assert latest_good(tmp_path) == path  # which reads no file
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        (path / name).write_bytes(whole[:length])
        error = message(verify, path)
        assert "damaged" in error or f"{name} has {length} bytes" in error
    (path / name).write_bytes(whole)
    verify(path)


def test_a_damaged_file_raises_only_checkpoint_errors(tmp_path):
    assert "a.pt is missing" in message(load_file, tmp_path / "a.pt")
    save_file({"weights": torch.arange(100.0), "plain": [1, "x"]}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        assert "is damaged" in message(load_file, tmp_path / "a.pt")
    for damaged in flips(whole, 300):
        (tmp_path / "a.pt").write_bytes(damaged)
        try:
            load_file(tmp_path / "a.pt")  # a flip in the numbers is for verify to find
        except CheckpointError:
            pass


# ---- Several ranks


@pytest.mark.ranks
def test_a_save_in_the_background_is_left_alone(tmp_path):
    def save():
        saves, gate, began = BackgroundSaves(), threading.Event(), threading.Event()

        def later(*arguments):
            began.set()
            return gate.wait(60) and save_sharded(*arguments)

        (tmp_path / ".step_00000001.tmp").mkdir(parents=True, exist_ok=True)  # a killed run's
        dist.barrier()
        with mock.patch("helpers.runtime.checkpoint.save_sharded", later):
            weights = torch.ones(10)
            saves.start({"weights": weights}, tmp_path, 5)
            weights.zero_()  # training goes on
            assert saves.finished() is saves.finished() is None  # and nobody waits for the save
            assert began.wait(60)
            assert "still running" in message(saves.start, {"weights": torch.ones(10)}, tmp_path, 6)
            with new_checkpoint(tmp_path, 6) as path:
                if dist.get_rank() == 0:
                    save_file(6, path / "run.pt")
            between = sorted(os.listdir(tmp_path))
            gate.set()
            saves.wait()
        dcp.load(state := {"weights": torch.zeros(10)}, checkpoint_id=tmp_path / "step_00000005")
        return between, state["weights"].sum().item()

    assert launch(save, nproc=2) == [([".step_00000005.tmp", "step_00000006"], 10)] * 2
    assert [verify(path) or path.name for path in finished(tmp_path)] == ["step_00000005", "step_00000006"]


def watch_files(folder):
    """A list to which (name, mode) is added for each file of the folder that this process opens from now on."""
    files = []

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(folder)) and not os.path.isdir(arguments[0]):
            files.append((os.path.basename(arguments[0]), arguments[1] or "r"))

    sys.addaudithook(hook)
    return files


@pytest.mark.ranks
def test_each_rank_hashes_and_syncs_what_it_writes_and_one_rank_reads(tmp_path):
    numbers = torch.rand(10)

    def save_and_load():
        files, sizes, sync = watch_files(tmp_path), {}, os.fsync

        def fsync(descriptor):
            sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
            sync(descriptor)

        rank = dist.get_rank()
        with mock.patch("os.fsync", fsync), new_checkpoint(tmp_path, 1) as path:
            save_sharded(get_model_state_dict(fully_shard(nn.Linear(4, 4))), path)
            save_file(numbers, path / f"own_{rank}.pt")
            dist.barrier()  # then nobody renames a file that another rank lists
            mine = {file.name for file in path.iterdir() if sizes.get(file.stat().st_ino) == file.stat().st_size}
        newest = latest_good(tmp_path)
        assert rank == 1 or all(folder.stat().st_ino in sizes for folder in (tmp_path, newest))
        loaded = on_rank0(load_file, newest / "own_1.pt")
        loaded += 1  # not the file
        return mine, [name for name, mode in files if "w" not in mode], loaded

    (on0, read0, loaded0), (on1, read1, loaded1) = launch(save_and_load, nproc=2)
    assert (on0, on1) == ({".metadata", "__0_0.distcp", "own_0.pt"}, {"__1_0.distcp", "own_1.pt"})
    assert read0[0] == MANIFEST and {*read0[1:]} == {"own_1.pt"} and read1 == []  # to hash, nobody reads
    assert torch.equal(loaded0, numbers + 1) and torch.equal(loaded1, numbers + 1)
    verify(tmp_path / "step_00000001")
    manifest = json.loads((tmp_path / "step_00000001" / MANIFEST).read_text())
    assert set(manifest) == on0 | on1
    for name, note in manifest.items():
        data = (tmp_path / "step_00000001" / name).read_bytes()
        assert note == [len(data), hashlib.sha256(data).hexdigest()]
