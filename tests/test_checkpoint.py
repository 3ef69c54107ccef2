"""Checkpoints: what is kept and what is refused, damage in every file, another world size, several ranks."""

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys
import threading
import time
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import committed, message, step_of, write, write_on_rank0
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

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


def test_a_file_comes_back_on_the_cpu_and_from_the_disk(tmp_path):
    state = {"weights": torch.randn(100, 10), "step": 7, "names": ["a", "b"], "rng": (3, (1, 2), None)}
    save_file(state, tmp_path / "a.pt")
    loaded = load_file(tmp_path / "a.pt")
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["weights"].device.type == "cpu"
    assert {**loaded, "weights": None} == {**state, "weights": None}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_file_is_mapped_and_not_read(tmp_path):
    tensors = [torch.arange(5000.0), -torch.arange(5000.0)]
    save_file(tensors, tmp_path / "a.pt")
    raw = (tmp_path / "a.pt").read_bytes()
    places = [raw.index(tensor.numpy().tobytes()) for tensor in tensors]
    first, second = (tensor.data_ptr() for tensor in load_file(tmp_path / "a.pt"))
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


def test_a_copy_with_a_name_of_its_own_is_not_a_step(tmp_path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001_copy")
    write(tmp_path, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step_00000001_copy", "step_00000002"]
    assert step_of(latest_good(tmp_path)) == 2


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path):
    for name in (".step_00000001.tmp", ".step_00000002.old", "step_notes", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    write(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["other", "step_00000003", "step_notes"]


def test_an_exception_in_the_block_leaves_the_last_good_one(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), new_checkpoint(tmp_path, 2):
        raise ZeroDivisionError
    assert step_of(latest_good(tmp_path)) == 1
    write(tmp_path, 2)
    assert step_of(latest_good(tmp_path)) == 2


def test_a_good_newer_checkpoint_is_not_overwritten(tmp_path):
    write(tmp_path, 40)
    for step in (20, 40):
        assert "step_00000040 is there, and step" in message(write, tmp_path, step)
    assert step_of(latest_good(tmp_path)) == 40
    (tmp_path / "step_00000050").mkdir()
    (tmp_path / "step_00000050" / "mine").write_text("x")
    assert re.search("step_00000050 was not saved: .*not empty", message(write, tmp_path, 50))
    assert step_of(latest_good(tmp_path)) == 40


def test_a_damaged_newer_checkpoint_is_replaced(tmp_path, capsys):
    write(tmp_path, 40)
    write(tmp_path, 60)
    with open(tmp_path / "step_00000060" / "weights.pt", "r+b") as file:
        file.truncate(1000)
    assert step_of(latest_good(tmp_path)) == 40
    assert re.fullmatch(r"skipped: step_00000060/weights.pt has 1000 bytes.*\n", capsys.readouterr().out)
    write(tmp_path, 50)
    write(tmp_path, 60)
    assert [step_of(path) for path in finished(tmp_path)] == [40, 50, 60]


def test_what_is_missing_is_named(tmp_path):
    assert re.search(r"no folder .*gone\.\n.*mkdir -p .*gone", message(latest_good, tmp_path / "gone"))
    assert latest_good(tmp_path) is None
    assert "gone.pt is missing" in message(load_file, tmp_path / "gone.pt")
    assert "manifest.json is missing" in message(verify, tmp_path)
    write(tmp_path, 1)
    (tmp_path / "step_00000001" / "plain.pt").unlink()
    assert "step_00000001/plain.pt is missing" in message(verify, tmp_path / "step_00000001")
    assert "No good checkpoint in" in message(latest_good, tmp_path)


# ---- Damage


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
    whole, chance = (path / name).read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(damaged)
        if name == MANIFEST:  # a changed blank in a JSON text does no harm, but the list of files has to stay complete
            try:
                verify(path)
            except CheckpointError:
                continue
            assert len(re.findall(rb'"\w+\.pt": *\[', damaged)) == 2
        else:
            assert f"{name} holds other bytes" in message(verify, path)
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        (path / name).write_bytes(whole[:length])
        error = message(verify, path)
        assert "damaged" in error or f"{name} has {length} bytes" in error
    (path / name).write_bytes(whole)
    verify(path)


def test_a_damaged_file_raises_only_checkpoint_errors(tmp_path):
    save_file({"weights": torch.arange(100.0), "plain": [1, "x"]}, tmp_path / "a.pt")
    whole, chance = (tmp_path / "a.pt").read_bytes(), random.Random(0)
    for length in range(0, len(whole), 7):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        assert "is damaged" in message(load_file, tmp_path / "a.pt")
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        (tmp_path / "a.pt").write_bytes(damaged)
        try:
            load_file(tmp_path / "a.pt")  # a flip in the numbers is for verify to find
        except CheckpointError:
            pass


# ---- A hostile file makes a folder when it is executed


class Hostile:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_hostile_file_is_not_executed(tmp_path):
    marker = tmp_path / "executed"
    torch.save({"weights": torch.ones(2), "extra": Hostile(marker)}, tmp_path / "zip.pt")
    assert re.search(r"zip.pt asks for \w+\.mkdir, which was not executed", message(load_file, tmp_path / "zip.pt"))
    with open(tmp_path / "raw.pt", "wb") as file:
        pickle.dump(Hostile(marker), file)
    assert "is damaged" in message(load_file, tmp_path / "raw.pt")
    assert not marker.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert marker.exists()  # it would have worked


# ---- Several ranks


@pytest.mark.ranks
def test_all_ranks_agree(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "step_00000002" / "plain.pt").unlink()
    assert {path.name for path in launch(latest_good, tmp_path, nproc=4)} == {"step_00000001"}

    [error] = set(launch(lambda: message(latest_good, tmp_path / "gone"), nproc=4))
    assert "There is no folder" in error


def sharded(shard, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))  # 10 does not divide by 4
    model = fully_shard(model) if shard else DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def train_step(model, optimizer):
    generator = torch.Generator().manual_seed(5)
    model(torch.randn(8, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_and_save(folder, shard):
    model, optimizer = sharded(shard, seed=1)
    train_step(model, optimizer)
    with new_checkpoint(folder, 1) as path:
        weights, moments = get_state_dict(model, optimizer)
        save_sharded({"model": weights, "optimizer": moments}, path)
    train_step(model, optimizer)
    return [whole(parameter) for parameter in model.parameters()]


def resume_sharded(folder, shard):
    model, optimizer = sharded(shard, seed=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=latest_good(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train_step(model, optimizer)
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(("saved_on", "saved_sharded"), [(4, True), (1, True), (2, False)])
@pytest.mark.ranks
def test_saved_here_loaded_there(tmp_path, saved_on, saved_sharded):
    expected = launch(train_and_save, tmp_path, saved_sharded, nproc=saved_on)[0]
    for loaded_on, shard in [(4, True), (2, True), (1, True), (2, False)]:
        for weights in launch(resume_sharded, tmp_path, shard, nproc=loaded_on):
            for loaded, undisturbed in zip(weights, expected, strict=True):
                assert torch.allclose(loaded, undisturbed, atol=1e-6)


@pytest.mark.ranks
def test_a_background_save_counts_at_the_same_step_on_all_ranks(tmp_path):
    def save():
        weights, saves = torch.ones(1000), BackgroundSaves()
        assert saves.finished() is None
        save = saves.save

        def later(*arguments):  # this rank's thread is late to tell that it is done
            checkpoint = save(*arguments)
            time.sleep(0.3 * dist.get_rank())
            return checkpoint

        saves.save = later
        saves.start({"weights": weights}, tmp_path, 1)
        weights.zero_()  # training goes on
        error = message(saves.start, {"weights": weights}, tmp_path, 2)
        first = committed(saves)
        saves.start({"weights": weights}, tmp_path, 2)
        second = committed(saves)
        saves.start({"weights": weights + 7}, tmp_path, 3)
        saves.wait()
        saves.wait()
        values = []
        for path in finished(tmp_path):
            verify(path)
            state = {"weights": torch.full((1000,), 5.0)}
            dcp.load(state, checkpoint_id=path)
            values.append(state["weights"].unique().tolist())
        return first, second, values, error

    on0, on1 = launch(save, nproc=2)
    assert on0 == on1
    (_, first), (_, second), values, error = on0
    assert (first, second) == ("step_00000001", "step_00000002") and values == [[1.0], [0.0], [7.0]]
    assert "still running" in error


@pytest.mark.ranks
def test_a_save_in_the_background_is_left_alone(tmp_path):
    def save():
        saves, gate = BackgroundSaves(), threading.Event()
        began = threading.Event()

        def later(*arguments):
            began.set()
            return gate.wait(60) and save_sharded(*arguments)

        (tmp_path / ".step_00000001.tmp").mkdir(parents=True, exist_ok=True)  # a killed run's
        dist.barrier()
        with mock.patch("helpers.runtime.checkpoint.save_sharded", later):
            saves.start({"weights": torch.ones(10)}, tmp_path, 5)
            assert saves.finished() is saves.finished() is None  # and nobody waits for the save
            assert began.wait(60)
            write_on_rank0(tmp_path, 6)
            between = sorted(os.listdir(tmp_path))
            gate.set()
            committed(saves)
        return between

    assert launch(save, nproc=2) == [[".step_00000005.tmp", "step_00000006"]] * 2
    assert [verify(path) or path.name for path in finished(tmp_path)] == ["step_00000005", "step_00000006"]


# ---- What a save reads, syncs and sends


def watch_files(folder):
    """A list to which (name, mode) is added for each file of the folder that this process opens from now on."""
    files = []

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(folder)) and not os.path.isdir(arguments[0]):
            files.append((os.path.basename(arguments[0]), arguments[1] or "r"))

    sys.addaudithook(hook)
    return files


@pytest.mark.ranks
def test_each_rank_hashes_and_syncs_what_it_writes_and_nobody_reads_it(tmp_path):
    def save():
        files, sizes, sync = watch_files(tmp_path), {}, os.fsync

        def fsync(descriptor):
            sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
            sync(descriptor)

        rank = dist.get_rank()
        with mock.patch("os.fsync", fsync), new_checkpoint(tmp_path, 1) as path:
            model = fully_shard(nn.Linear(4, 4))
            save_sharded(get_model_state_dict(model), path)
            save_file(torch.rand(10), path / f"own_{rank}.pt")
            dist.barrier()  # then nobody renames a file that another rank lists
            mine = {file.name for file in path.iterdir() if sizes.get(file.stat().st_ino) == file.stat().st_size}
        folders = {file.stat().st_ino in sizes for file in (tmp_path, latest_good(tmp_path))}
        assert folders == {True} or rank == 1
        return mine, [(name, mode) for name, mode in files if "w" not in mode]

    (on0, read0), (on1, read1) = launch(save, nproc=2)
    assert (on0, on1) == ({".metadata", "__0_0.distcp", "own_0.pt"}, {"__1_0.distcp", "own_1.pt"})
    assert [name for name, _ in read0] == [MANIFEST] and read1 == []  # latest_good's, and no more
    manifest = json.loads((tmp_path / "step_00000001" / MANIFEST).read_text())
    assert set(manifest) == on0 | on1
    for name, note in manifest.items():
        data = (tmp_path / "step_00000001" / name).read_bytes()
        assert note == [len(data), hashlib.sha256(data).hexdigest()]


def test_a_file_of_another_writer_is_refused(tmp_path):
    def save():
        with new_checkpoint(tmp_path, 1) as path:
            torch.save(1, path / "mine.pt")

    assert "mine.pt was not written with save_file" in message(save)
    assert os.listdir(tmp_path) == []


def test_a_flipped_bit_is_for_verify_to_find(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    path = tmp_path / "step_00000002"
    data = bytearray((path / "weights.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "weights.pt").write_bytes(data)
    assert latest_good(tmp_path) == path
    assert "weights.pt holds other bytes" in message(verify, path)
    shutil.rmtree(path)  # what the error says
    assert step_of(latest_good(tmp_path)) == 1


@pytest.mark.ranks
def test_one_rank_reads_and_the_others_are_sent(tmp_path):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    state = {f"{dtype}": torch.randn(3, 4).to(dtype) for dtype in dtypes}
    state |= {"empty": torch.zeros(0), "nested": [{"rng": (3, (1, None), "x")}, torch.get_rng_state()]}
    save_file(state, tmp_path / "run.pt")

    def load():
        files = watch_files(tmp_path)
        loaded = on_rank0(load_file, tmp_path / "run.pt")
        loaded["torch.float32"] += 1  # not the file
        return {name for name, _ in files}, loaded

    (read0, loaded0), (read1, loaded1), _ = launch(load, nproc=3)
    assert read0 == {"run.pt"} and read1 == set()
    for loaded in (loaded0, loaded1):
        assert torch.equal(loaded["torch.float32"], state["torch.float32"] + 1) and loaded["empty"].shape == (0,)
        assert loaded["nested"][0] == state["nested"][0] and torch.equal(loaded["nested"][1], state["nested"][1])
        for dtype in dtypes[1:]:
            assert loaded[f"{dtype}"].dtype == dtype
            assert torch.equal(loaded[f"{dtype}"].float(), state[f"{dtype}"].float())


@pytest.mark.parametrize("kind", ["hostile", "damaged", "empty", "missing"])
@pytest.mark.ranks
def test_what_cannot_be_read_is_an_error_on_all_ranks(tmp_path, kind):
    path, marker = tmp_path / "run.pt", tmp_path / "executed"
    torch.save({"extra": Hostile(marker)}, path)
    if kind == "damaged":
        os.truncate(path, 500)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "missing":
        path.unlink()

    def load():
        return message(on_rank0, load_file, path), marker.exists()

    expected = {"hostile": "mkdir, which was not executed", "missing": "is missing"}.get(kind, "is damaged")
    assert all(expected in error and not executed for error, executed in launch(load, nproc=2))
