"""Checkpoints: killed at every operation, damaged in every file, hostile, resharded, and agreed on by all ranks."""

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_scripts import ROOT, export, result, stand_alone, torchrun
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.ranks.launch import RankError, launch
from helpers.runtime.checkpoint import (
    MANIFEST,
    CheckpointError,
    begin,
    commit,
    finished,
    latest_good,
    load_file,
    load_sharded,
    new_checkpoint,
    replace_file,
    save_file,
    sync,
    verify,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second


def write(folder, step, size=10_000, keep=3):
    """A checkpoint of two files whose content tells the step."""
    with new_checkpoint(folder, step, keep) as path:
        save_file({"weights": torch.full((size,), float(step)), "step": step}, path / "weights.pt")
        save_file({"plain": [step, 0.1, "text", None, (1, 2)]}, path / "plain.pt")


def step_of(path):
    """The step that a checkpoint's files tell, which must agree with each other and with its name."""
    verify(path)
    step = load_file(path / "weights.pt")["step"]
    assert torch.equal(load_file(path / "weights.pt")["weights"], torch.full((10_000,), float(step)))
    assert load_file(path / "plain.pt")["plain"] == [step, 0.1, "text", None, (1, 2)]
    assert path.name == f"step_{step:08}"
    return step


def message(call, *arguments):
    """What a call that must fail says."""
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
    for step in (5, 20, 100, 99_999_999):
        write(tmp_path, step, keep=2)
    assert [path.name for path in finished(tmp_path)] == ["step_00000100", "step_99999999"]
    assert sorted(os.listdir(tmp_path)) == ["step_00000100", "step_99999999"]
    assert step_of(latest_good(tmp_path)) == 99_999_999


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
        assert "holds step_00000040 already" in message(write, tmp_path, step)
    assert step_of(latest_good(tmp_path)) == 40
    (tmp_path / "step_00000050").mkdir()
    assert "Save to another folder" in message(write, tmp_path, 50)


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
    assert "There is no file" in message(load_file, tmp_path / "gone.pt")
    assert "no finished checkpoint" in message(verify, tmp_path)
    assert "no .metadata" in message(load_sharded, {}, tmp_path)
    write(tmp_path, 1)
    (tmp_path / "step_00000001" / "plain.pt").unlink()
    assert "step_00000001/plain.pt is missing" in message(verify, tmp_path / "step_00000001")
    assert "None of the 1 checkpoints" in message(latest_good, tmp_path)


# ---- Damage


def write_dcp(folder):
    with new_checkpoint(folder, 1) as path:
        dcp.save({"weights": torch.arange(1000.0), "step": 1}, checkpoint_id=str(path))


@pytest.mark.parametrize("name", ["weights.pt", "plain.pt", ".metadata", "__0_0.distcp", MANIFEST])
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
        if name == MANIFEST:  # a flip between the words of a JSON text can be harmless; it must not hide a file
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
        assert "truncated" in message(load_file, tmp_path / "a.pt")
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
    assert "nothing was loaded" in message(load_file, tmp_path / "raw.pt")
    assert not marker.exists()
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert marker.exists()  # it would have worked


def hostile_metadata(folder, marker):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Hostile(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("where", ["metadata", "value", "value in place of a tensor"])
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

    kind, said, executed = launch(save_and_load, lambda state: load_sharded(state, folder), nproc=1)[0]
    assert kind == "CheckpointError" and "mkdir, which was not executed" in said and not executed
    shutil.rmtree(folder)
    assert launch(save_and_load, lambda state: dcp.load(state, checkpoint_id=str(folder)), nproc=1)[0][2]


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
        load_sharded(state, folder)
        return state["nested"]

    assert launch(save_and_load, tmp_path / "a", nproc=2) == [expected, expected]


# ---- Kills


fork = multiprocessing.get_context("fork")


def killed_at_operation(number, folder, work):
    """In a child: call ``work`` and die before the folder's ``number``-th operation (see sys.audit)."""
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
    """(states that were found after a kill at each operation of a save, operations)."""
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
def test_a_kill_at_every_operation_loses_nothing(tmp_path, keep):
    [found] = launch(kill_everywhere, tmp_path / "runs", keep, nproc=1)
    assert len(found) > 20  # operations
    assert found == sorted(found) and set(found) == {2, 3}  # the old one up to the rename, the new one from then on


def written(folder):
    """Bytes in a folder's files, some of which may vanish while it looks."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def kill_while_writing(folder, points):
    dist.destroy_process_group()
    size, found, cut = 2_000_000, [], 0
    with new_checkpoint(folder, 1, 2) as path:
        save_file(torch.zeros(size), path / "weights.pt")
    whole = written(folder)

    def write_next(step, weights):  # computes nothing: a forked child has no threads of OpenMP
        with new_checkpoint(folder, step, 2) as path:
            save_file(weights, path / "weights.pt")

    good = 1
    for step, point in enumerate(points, start=2):
        before = written(folder)
        child = fork.Process(target=write_next, args=(step, torch.full((size,), float(step))))
        child.start()
        while child.is_alive() and written(folder) - before < point * whole:
            pass
        child.kill()
        child.join()
        newest = latest_good(folder)
        number = int(newest.name[5:])
        assert torch.equal(load_file(newest / "weights.pt"), torch.full((size,), float(number) if number > 1 else 0.0))
        assert number in (good, step)
        good = number
        found.append(good)
        cut += any(0 < written(left) < whole for left in folder.glob(".step_*.tmp"))
    return found, cut


def test_a_kill_in_the_middle_of_a_file_loses_nothing(tmp_path):
    chance = random.Random(1)
    points = [chance.uniform(0, 1) for _ in range(30)]
    [(found, cut)] = launch(kill_while_writing, tmp_path / "runs", points, nproc=1)
    assert len(found) == 30 and cut > 5  # many were really cut in the middle


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
    sync(tmp_path)


def test_a_rank_killed_in_a_save_of_several(tmp_path):
    def save(step, victim):
        with new_checkpoint(tmp_path, step) as path:
            if dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            dcp.save({"weights": torch.full((4,), float(step))}, checkpoint_id=str(path))

    launch(save, 1, -1, nproc=2)
    for victim in (0, 1):
        with pytest.raises(RankError, match="SIGKILL"):
            launch(save, 2, victim, nproc=2)
        assert latest_good(tmp_path).name == "step_00000001"
    launch(save, 2, -1, nproc=2)
    assert latest_good(tmp_path).name == "step_00000002"


# ---- Several ranks


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


def save_sharded(folder, shard):
    model, optimizer = sharded(shard, seed=1)
    train_step(model, optimizer)
    with new_checkpoint(folder, 1) as path:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=str(path))
    train_step(model, optimizer)
    return [whole(parameter) for parameter in model.parameters()]


def resume_sharded(folder, shard):
    model, optimizer = sharded(shard, seed=2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    load_sharded(state, latest_good(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train_step(model, optimizer)
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize(("saved_on", "saved_sharded"), [(4, True), (1, True), (2, False)])
def test_saved_here_loaded_there(tmp_path, saved_on, saved_sharded):
    expected = launch(save_sharded, tmp_path, saved_sharded, nproc=saved_on)[0]
    for loaded_on, shard in [(4, True), (2, True), (1, True), (2, False)]:
        for weights in launch(resume_sharded, tmp_path, shard, nproc=loaded_on):
            for one, other in zip(weights, expected, strict=True):
                assert torch.allclose(one, other, atol=1e-6)


def test_another_model_is_refused_with_its_reason(tmp_path):
    def save_and_load(folder):
        dcp.save({"weights": torch.zeros(4)}, checkpoint_id=str(folder))
        said = []
        for state in ({"weights": torch.zeros(5)}, {"other": torch.zeros(4)}):
            try:
                load_sharded(state, folder)
            except CheckpointError as error:
                said.append(str(error))
        return said

    for size, name in launch(save_and_load, tmp_path / "a", nproc=2):
        assert "Size mismatch" in size and "Missing key in checkpoint state_dict: other" in name
        assert size.count("\n") == name.count("\n") == 1


def test_an_asynchronous_save_counts_when_it_is_committed(tmp_path):
    def save():
        weights = torch.ones(1000)
        background = dist.new_group(backend="gloo")  # its collectives and training's must not mix
        path = begin(tmp_path, 1)
        future = dcp.async_save({"weights": weights}, checkpoint_id=str(path), process_group=background)
        weights.zero_()  # training goes on
        early = latest_good(tmp_path)
        future.result()
        final = commit(path)
        state = {"weights": torch.zeros(1000)}
        load_sharded(state, latest_good(tmp_path))
        return early, final.name, state["weights"].min().item()

    assert launch(save, nproc=2) == [(None, "step_00000001", 1.0)] * 2


# ---- Chapter 7's script


def test_the_script_is_killed_and_goes_on(tmp_path):
    (tmp_path / "path").mkdir()
    alone = stand_alone(tmp_path / "path")
    script = export(ROOT / "notebooks" / "07_checkpointing.ipynb", tmp_path / "empty")
    status, out, errors, _ = torchrun(script, 2, alone, "--noise", "0.3")
    assert status == 0, errors
    through = result(out)
    folder = ["--checkpoint-dir", "runs/a", "--noise", "0.3"]
    status, out, errors, left = torchrun(script, 2, alone, *folder, "--kill-at", "50", "--keep", "1")
    assert status == 1 and "SIGKILL" in errors and not left
    runs = script.parent / "runs" / "a"
    assert os.listdir(runs) == ["step_00000040"]
    status, out, errors, _ = torchrun(script, 2, alone, *folder, "--resume")
    assert status == 0 and "going on from step_00000040\n" in out, errors
    assert result(out) == through
    assert [path.name for path in finished(runs)] == ["step_00000080", "step_00000100", "step_00000120"]

    os.truncate(runs / "step_00000120" / "__0_0.distcp", 100)
    status, out, errors, _ = torchrun(script, 4, alone, *folder, "--resume", "--shard")
    assert status == 0 and "skipped: step_00000120/__0_0.distcp" in out, errors
    assert "going on from step_00000100\n" in out and result(out)["step"] == 120
    assert len([verify(path) for path in finished(runs)]) == 3
