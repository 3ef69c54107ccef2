"""Checkpoints: a kill at every operation, damage in every file, hostile files, another world size, several ranks."""

import contextlib
import dataclasses
import enum
import errno
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import Forked, forked, script_on_ranks
from scripting import ROOT, export, result, stand_alone
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.ranks.launch import RankError, launch
from helpers.runtime.checkpoint import (
    MANIFEST,
    BackgroundSaves,
    CheckpointError,
    finished,
    latest_good,
    load_file,
    new_checkpoint,
    on_rank0,
    replace_file,
    save_file,
    save_sharded,
    verify,
)
from helpers.runtime.untrusted import check_metadata, load_untrusted

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


def write(folder, step, size=10_000, keep=3):
    """Write a checkpoint of two files, each of which holds the step."""
    with new_checkpoint(folder, step, keep) as path:
        save_file({"weights": torch.full((size,), float(step)), "step": step}, path / "weights.pt")
        save_file({"plain": [step, 0.1, "text", None, (1, 2)]}, path / "plain.pt")


def step_of(path):
    """The step in a checkpoint's files. Fails if the files and the folder's name do not agree."""
    verify(path)
    step = load_file(path / "weights.pt")["step"]
    assert torch.equal(load_file(path / "weights.pt")["weights"], torch.full((10_000,), float(step)))
    assert load_file(path / "plain.pt")["plain"] == [step, 0.1, "text", None, (1, 2)]
    assert path.name == f"step_{step:08}"
    return step


def message(call, *arguments):
    """The message of the CheckpointError that a call has to raise."""
    with pytest.raises(CheckpointError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert 1 <= len(text.splitlines()) <= 2 and len(text) < 500
    return text


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


def test_a_copy_with_a_name_of_its_own_is_not_a_step(tmp_path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000001_copy")
    write(tmp_path, 2, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step_00000001_copy", "step_00000002"]
    assert step_of(latest_good(tmp_path)) == 2


def test_at_least_one_is_kept(tmp_path):
    for step in (1, 2):
        write(tmp_path, step, keep=0)
    assert [path.name for path in finished(tmp_path)] == ["step_00000002"]


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
    with pytest.raises(FileNotFoundError, match=".metadata"):
        load_untrusted({}, tmp_path)
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
        assert "damaged" in (said := message(verify, path)) or f"{name} has {length} bytes" in said
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


# ---- Hostile files: each makes a folder when it is executed


class Hostile:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)

    def __deepcopy__(self, memo):  # DCP copies what it saves
        return self


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


def hostile_metadata(folder, marker):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Hostile(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("where", ["metadata", "value", "value in place of a tensor"])
@pytest.mark.ranks
def test_a_hostile_dcp_checkpoint_is_not_executed(tmp_path, where):
    marker, folder = tmp_path / "executed", tmp_path / "step"

    def save_and_load(load):
        state = {"weights": torch.ones(2), "step": 1}  # made here: a Hostile is executed on its way to the rank
        if where == "value":
            state["step"] = Hostile(marker)
        elif where == "value in place of a tensor":
            state["weights"] = Hostile(marker)
        dcp.save(state, checkpoint_id=str(folder))
        if where == "metadata":
            hostile_metadata(folder, marker)
        try:
            load({"weights": torch.zeros(2), "step": 0})
        except Exception as error:
            return type(error).__name__, str(error), marker.exists()
        return "", "", marker.exists()

    kind, said, executed = launch(save_and_load, lambda state: load_untrusted(state, folder), nproc=1)[0]
    assert kind == "CheckpointError" and "mkdir, which was not executed" in said and not executed
    shutil.rmtree(folder)
    assert launch(save_and_load, lambda state: dcp.load(state, checkpoint_id=str(folder)), nproc=1)[0][2]


@pytest.mark.ranks
def test_every_type_that_dcp_writes_is_known(tmp_path):
    expected = {"list": [1, (2, 3)], "none": None, "text": "x"}

    def save_and_load(folder):
        state = {f"{dtype}": torch.zeros(3, 4, dtype=dtype) for dtype in DTYPES}
        state |= {
            "scalar": torch.tensor(1.0),
            "number": 0.5,
            "nested": {"list": [1, (2, 3)], "none": None, "text": "x"},
        }
        state["channels"] = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        dcp.save(state, checkpoint_id=folder)
        load_untrusted(state, folder)
        return state["nested"]

    assert launch(save_and_load, tmp_path / "a", nproc=2) == [expected, expected]


@pytest.mark.parametrize("kind", ["dataclass", "class", "enum"])
@pytest.mark.ranks
def test_a_newer_torch_may_have_other_dataclasses(tmp_path, kind):
    def read():
        made = enum.Enum("_NewStorage", ["A"]) if kind == "enum" else type("_NewStorage", (), {})
        made = dataclasses.dataclass(made) if kind == "dataclass" else made
        made.__module__ = "torch.distributed.checkpoint.filesystem"
        sys.modules[made.__module__]._NewStorage = made
        (tmp_path / ".metadata").write_bytes(pickle.dumps(made.A if kind == "enum" else made()))
        check_metadata(tmp_path)

    if kind == "class":  # whose construction may do anything
        with pytest.raises(RankError, match="asks for torch.distributed.checkpoint.filesystem._NewStorage"):
            launch(read, nproc=1)
    else:
        launch(read, nproc=1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("torch.distributed.checkpoint.filesystem", "Enum"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.hub", "load"),
        ("pathlib", "Path.unlink"),
        ("shutil", "os"),
    ],
)
def test_what_is_not_plain_is_not_even_looked_up(tmp_path, module, name):
    code = (
        pickle.PROTO
        + b"\x04"
        + b"".join(pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name))
    )
    (tmp_path / ".metadata").write_bytes(code + pickle.STACK_GLOBAL + pickle.STOP)
    said = message(check_metadata, tmp_path)
    assert f".metadata asks for {module}.{name}, which was not executed" in said


class Asks:
    """Its unpickling calls getattr with these arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_getattr_looks_up_members_of_an_enum_alone(tmp_path):
    """Python 3.11.2 pickles a member so, and other versions read what it has saved."""
    formats = dcp.metadata._MEM_FORMAT_ENCODING
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Asks(formats, "TORCH_CHANNELS_LAST")))
    check_metadata(tmp_path)
    for kind, name in ((Path, "unlink"), (formats, "__members__"), (torch.Size, "numel"), ("text", "format")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Asks(kind, name)))
        assert message(check_metadata, tmp_path).endswith("Use a checkpoint that you trust.")


# ---- Kills


fork = multiprocessing.get_context("fork")


def killed_at_operation(number, folder, work):
    """Fork a child that calls ``work`` and dies before the ``number``-th operation on the folder (see sys.audit)."""
    count = 0

    def hook(event, arguments):
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"):
            if str(arguments[0]).startswith(str(folder)):
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

    sys.addaudithook(hook)
    work()


def kill_everywhere(folder, keep):
    """([the state after a kill at each operation of a save], the number of operations)."""
    dist.destroy_process_group()  # a forked child must not use this rank's
    found = []
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        for step in (1, 2):
            write(folder, step, keep=keep)
        child = fork.Process(target=killed_at_operation, args=(number, folder, lambda: write(folder, 3, keep=keep)))
        child.start()
        child.join()
        found.append(step_of(latest_good(folder)))
        write(folder, 4, keep=keep)  # the next run is not disturbed by what is left
        names = sorted(os.listdir(folder))
        assert names == [path.name for path in finished(folder)] and len(names) == keep, names
        assert step_of(latest_good(folder)) == 4
        if child.exitcode == 0:
            return found
        assert child.exitcode == -signal.SIGKILL
    raise AssertionError("the save never ended")


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.ranks
def test_a_kill_at_every_operation_loses_nothing(tmp_path, keep):
    [found] = launch(kill_everywhere, tmp_path / "runs", keep, nproc=1, timeout=240)
    assert len(found) > 15  # operations
    assert found == sorted(found) and set(found) == {2, 3}  # the old one up to the rename, the new one from then on


def killed_while_writing(folder, step, weights, point):
    """Write a checkpoint, and die when this part of the weights is in the file."""

    class File(io.FileIO):
        def write(self, data):
            if len(data) < weights.nbytes:
                return super().write(data)
            super().write(data[: int(point * len(data))])
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch("io.FileIO", File), new_checkpoint(folder, step, 2) as path:
        save_file(weights, path / "weights.pt")


def kill_while_writing(folder, points):
    """[how many bytes of the weights are in the file after a kill, for each point]."""
    dist.destroy_process_group()
    size, found = 2_000_000, []

    def weights_of(step):
        return torch.full((size,), float(step))

    def save(step):
        with new_checkpoint(folder, step, 2) as path:
            save_file(weights_of(step), path / "weights.pt")

    def good():
        """The newest checkpoint's step."""
        newest = latest_good(folder)
        number = int(newest.name[5:])
        assert torch.equal(load_file(newest / "weights.pt"), weights_of(number))
        return number

    save(1)
    before = (latest_good(folder) / "weights.pt").read_bytes().index(weights_of(1).numpy().tobytes())
    for step, point in enumerate(points, start=2):
        # The weights are made here: a forked child has no threads of OpenMP.
        child = fork.Process(target=killed_while_writing, args=(folder, step, weights_of(step), point))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL and good() == 1
        [left] = folder.glob(".step_*.tmp/*")
        found.append(left.stat().st_size - before)
    save(step + 1)
    assert good() == step + 1 and not list(folder.glob(".*"))
    return found


@pytest.mark.ranks
def test_a_kill_in_the_middle_of_a_file_loses_nothing(tmp_path):
    chance = random.Random(1)
    points = [chance.uniform(0, 1) for _ in range(30)]
    [found] = launch(kill_while_writing, tmp_path / "runs", points, nproc=1, timeout=240)
    assert found == [int(point * 8_000_000) for point in points]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    replace_file(path, lambda file: file.write(b"old"))

    def interrupted(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, interrupted)
    assert path.read_bytes() == b"old"
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.ranks
def test_a_rank_killed_in_a_save_of_several(tmp_path):
    def save(step, victim):
        with new_checkpoint(tmp_path, step) as path:
            if dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            save_sharded({"weights": torch.full((4,), float(step))}, path)

    launch(save, 1, -1, nproc=2)
    for victim in (0, 1):
        with pytest.raises(RankError, match="SIGKILL"):
            launch(save, 2, victim, nproc=2)
        assert latest_good(tmp_path).name == "step_00000001"
    launch(save, 2, -1, nproc=2)
    assert latest_good(tmp_path).name == "step_00000002"


# ---- Several ranks


@pytest.mark.ranks
def test_all_ranks_agree(tmp_path):
    for step in (1, 2):
        write(tmp_path, step)
    (tmp_path / "step_00000002" / "plain.pt").unlink()
    assert {path.name for path in launch(latest_good, tmp_path, nproc=4)} == {"step_00000001"}

    def fails():
        try:
            latest_good(tmp_path / "gone")
        except CheckpointError as error:
            return str(error)

    said = launch(fails, nproc=4)
    assert len(set(said)) == 1 and "There is no folder" in said[0]


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
            for one, other in zip(weights, expected, strict=True):
                assert torch.allclose(one, other, atol=1e-6)


def committed(saves, steps=10_000):
    """(the step at which finished() returned a checkpoint, the checkpoint's name), within ``steps`` steps."""
    for step in range(steps):
        is_done = saves.saving.done()
        if saved := saves.finished():
            assert is_done  # so it did not wait
            return step, saved.name
        time.sleep(0.001)
    raise AssertionError("the save never ended")


@pytest.mark.ranks
def test_a_background_save_counts_at_the_same_step_on_all_ranks(tmp_path):
    def save():
        weights, saves = torch.ones(1000), BackgroundSaves()
        assert saves.finished() is None
        save = saves.save

        def later(*arguments):  # this rank's thread is late to tell that it is done
            saved = save(*arguments)
            time.sleep(0.3 * dist.get_rank())
            return saved

        saves.save = later
        saves.start({"weights": weights}, tmp_path, 1)
        weights.zero_()  # training goes on
        said = message(saves.start, {"weights": weights}, tmp_path, 2)
        first = committed(saves)
        saves.start({"weights": weights}, tmp_path, 2)
        second = committed(saves)
        saves.start({"weights": weights + 7}, tmp_path, 3)
        saves.wait()
        saves.wait()
        found = []
        for path in finished(tmp_path):
            verify(path)
            state = {"weights": torch.full((1000,), 5.0)}
            dcp.load(state, checkpoint_id=path)
            found.append(state["weights"].unique().tolist())
        return first, second, found, said

    one, other = launch(save, nproc=2)
    assert one == other
    (_, first), (_, second), found, said = one
    assert (first, second) == ("step_00000001", "step_00000002") and found == [[1.0], [0.0], [7.0]]
    assert "still running" in said


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


def write_on_rank0(folder, step):
    with new_checkpoint(folder, step) as path:
        if dist.get_rank() == 0:
            save_file({"step": step}, path / "run.pt")


# ---- What a save reads, syncs and sends


def watch_files(folder):
    """A list to which (name, mode) is added for each file of the folder that this process opens from now on."""
    opened = []

    def hook(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(folder)) and not os.path.isdir(arguments[0]):
            opened.append((os.path.basename(arguments[0]), arguments[1] or "r"))

    sys.addaudithook(hook)
    return opened


@pytest.mark.ranks
def test_each_rank_hashes_and_syncs_what_it_writes_and_nobody_reads_it(tmp_path):
    def save():
        opened, synced, sync = watch_files(tmp_path), {}, os.fsync

        def fsync(descriptor):
            synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
            sync(descriptor)

        rank = dist.get_rank()
        with mock.patch("os.fsync", fsync), new_checkpoint(tmp_path, 1) as path:
            model = fully_shard(nn.Linear(4, 4))
            save_sharded(get_model_state_dict(model), path)
            save_file(torch.rand(10), path / f"own_{rank}.pt")
            dist.barrier()  # then nobody renames a file that another rank lists
            mine = {file.name for file in path.iterdir() if synced.get(file.stat().st_ino) == file.stat().st_size}
        folders = {file.stat().st_ino in synced for file in (tmp_path, latest_good(tmp_path))}
        assert folders == {True} or rank == 1
        return mine, [(name, mode) for name, mode in opened if "w" not in mode]

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
    file = tmp_path / "step_00000002" / "weights.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert latest_good(tmp_path).name == "step_00000002"
    assert "weights.pt holds other bytes" in message(verify, tmp_path / "step_00000002")
    shutil.rmtree(tmp_path / "step_00000002")  # what the error says
    assert latest_good(tmp_path).name == "step_00000001"


@pytest.mark.ranks
def test_one_rank_reads_and_the_others_are_sent(tmp_path):
    dtypes = DTYPES[:-1]  # pickle cannot carry float8
    state = {f"{dtype}": torch.randn(3, 4).to(dtype) for dtype in dtypes}
    state |= {"empty": torch.zeros(0), "nested": [{"rng": (3, (1, None), "x")}, torch.get_rng_state()]}
    save_file(state, tmp_path / "run.pt")

    def load():
        opened = watch_files(tmp_path)
        loaded = on_rank0(load_file, tmp_path / "run.pt")
        loaded["torch.float32"] += 1  # not the file
        return {name for name, _ in opened}, loaded

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
    assert all(expected in said and not executed for said, executed in launch(load, nproc=2))


# ---- A full disk, at every operation of a save


@contextlib.contextmanager
def full_disk_after(operations):
    """A context in which the disk is full after ``operations`` writes, syncs, new folders and renames: a counter."""
    count = itertools.count()

    def full(function):
        def wrapped(*arguments, **options):
            if next(count) >= operations:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return wrapped

    class File(io.FileIO):
        write = full(io.FileIO.write)

    with (
        mock.patch("io.FileIO", File),
        mock.patch("os.fsync", full(os.fsync)),
        mock.patch("os.mkdir", full(os.mkdir)),
        mock.patch("os.replace", full(os.replace)),
    ):
        yield count


def fill_the_disk(folder, victim, save):
    """[what this rank heard of a save] with the victim's disk full after 0, 1, 2, … operations."""
    said = []
    for operations in range(200):
        full = full_disk_after(operations) if dist.get_rank() == victim else contextlib.nullcontext()
        try:
            with full:
                save(folder, 2)
        except CheckpointError as error:
            assert len(str(error).splitlines()) == 2
            said.append(str(error))
        except OSError as error:  # that of the new folder
            said.append(str(error))
        else:
            verify(latest_good(folder))
            assert latest_good(folder).name == "step_00000002"
            return said
        if latest_good(folder).name == "step_00000002":  # only the sync after the rename failed
            return said
        assert os.listdir(folder) == ["step_00000001"]
        verify(latest_good(folder))
        dist.barrier()
    raise AssertionError("the disk was always full")


def save_files(folder, step):
    with new_checkpoint(folder, step) as path:
        save_file(torch.arange(30_000.0), path / f"own_{dist.get_rank()}.pt")


def save_shards(folder, step):
    with new_checkpoint(folder, step) as path:
        save_sharded({"weights": torch.arange(30_000.0), "step": step}, path)


def save_behind(folder, step):
    global SAVES
    SAVES = SAVES or BackgroundSaves()
    SAVES.start({"weights": torch.arange(30_000.0), "step": step}, folder, step)
    committed(SAVES)


SAVES = None


@pytest.mark.parametrize("save", [save_files, save_shards, save_behind])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.ranks
def test_a_full_disk_leaves_the_last_good_one_and_no_half_file(tmp_path, save, victim):
    launch(save_files, tmp_path, 1, nproc=2)
    on0, on1 = launch(fill_the_disk, tmp_path, victim, save, nproc=2)
    assert on0 == on1  # each rank is told, and told the same
    assert all("No space left on device" in text for text in on0)
    assert len(on0) > (5 if victim == 0 else 2)
    wrote = [text for text in on0 if "was not saved" in text]
    assert len(wrote) >= len(on0) - 1


def test_a_full_disk_leaves_no_half_file_beside_another(tmp_path):
    save_file({"step": 1}, tmp_path / "a.pt")
    found = []
    for operations in itertools.count():
        with full_disk_after(operations):
            try:
                save_file({"step": 2, "weights": torch.rand(10_000)}, tmp_path / "a.pt")
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        assert os.listdir(tmp_path) == ["a.pt"]
        found.append(load_file(tmp_path / "a.pt")["step"])
    assert found[:-1] == [1] * (len(found) - 1) and len(found) > 4
    assert found[-1] == load_file(tmp_path / "a.pt")["step"] == 2  # renamed; the sync after that failed


# ---- Chapter 10's script


def kill_a_rank(script, environment, flags, folder, step):
    """Start a script on two ranks, and kill one of them when the folder holds a checkpoint of that step or a later."""
    agent = Forked(script_on_ranks(script, 2, *flags), environment)
    while not agent.ended() and not any(int(path.name[5:]) >= step for path in finished(folder)):
        time.sleep(0.001)
    rank = next(pid for pid in agent.session() if pid != agent.pid)
    os.kill(rank, signal.SIGKILL)
    status, _, errors, left = agent.end(120)
    assert status == 1 and "SIGKILL" in errors and not left, errors


@pytest.mark.ranks
def test_the_script_is_killed_and_goes_on(tmp_path):
    (tmp_path / "path").mkdir()
    alone = stand_alone(tmp_path / "path")
    script = export(ROOT / "notebooks" / "10_checkpointing.ipynb", tmp_path / "empty")
    settings = ["--noise", "0.3", "--save-every", "4"]
    status, out, errors, _ = forked(script_on_ranks(script, 2, *settings), alone)
    assert status == 0, errors
    through = result(out)
    settings += ["--checkpoint-dir", "runs/a"]
    status, _, errors, _ = forked(script_on_ranks(script, 1, *settings), alone)
    assert status == 1 and "Correct its name, or: mkdir -p runs/a" in errors
    runs = script.parent / "runs" / "a"
    runs.mkdir(parents=True)
    kill_a_rank(script, alone, settings, runs, 20)
    newest = latest_good(runs)
    assert 20 <= int(newest.name[5:]) < 120
    status, out, errors, _ = forked(script_on_ranks(script, 2, *settings), alone)
    assert status == 0 and f"going on from {newest.name}\n" in out, errors
    assert result(out) == through
    assert [path.name for path in finished(runs)] == ["step_00000112", "step_00000116", "step_00000120"]

    os.truncate(runs / "step_00000120" / "__0_0.distcp", 100)
    status, out, errors, _ = forked(script_on_ranks(script, 4, *settings, "--shard"), alone)
    assert status == 0 and "skipped: step_00000120/__0_0.distcp" in out, errors
    assert "going on from step_00000116\n" in out and result(out)["step"] == 120
    assert len([verify(path) for path in finished(runs)]) == 3
