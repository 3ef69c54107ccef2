"""Checkpoints: a kill at every operation and in the middle of a file, a disk that is full at every operation."""

import contextlib
import errno
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from checkpoints import committed, step_of, write
from forked import Forked, forked, script_on_ranks
from scripting import ROOT, export, result, stand_alone

from helpers.ranks.launch import RankError, launch
from helpers.runtime.checkpoint import (
    BackgroundSaves,
    CheckpointError,
    finished,
    latest_good,
    load_file,
    new_checkpoint,
    replace_file,
    save_file,
    save_sharded,
    verify,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


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
    steps = []
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        for step in (1, 2):
            write(folder, step, keep=keep)
        child = fork.Process(target=killed_at_operation, args=(number, folder, lambda: write(folder, 3, keep=keep)))
        child.start()
        child.join()
        steps.append(step_of(latest_good(folder)))
        write(folder, 4, keep=keep)  # the next run is not disturbed by what is left
        names = sorted(os.listdir(folder))
        assert names == [path.name for path in finished(folder)] and len(names) == keep, names
        assert step_of(latest_good(folder)) == 4
        if child.exitcode == 0:
            return steps
        assert child.exitcode == -signal.SIGKILL
    raise AssertionError("the save never ended")


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.ranks
def test_a_kill_at_every_operation_loses_nothing(tmp_path, keep):
    [steps] = launch(kill_everywhere, tmp_path / "runs", keep, nproc=1, timeout=240)
    assert len(steps) > 15  # operations
    assert steps == sorted(steps) and set(steps) == {2, 3}  # the old one up to the rename, the new one from then on


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
    size, lengths = 2_000_000, []

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
        [half] = folder.glob(".step_*.tmp/*")
        lengths.append(half.stat().st_size - before)
    save(step + 1)
    assert good() == step + 1 and not list(folder.glob(".*"))
    return lengths


@pytest.mark.ranks
def test_a_kill_in_the_middle_of_a_file_loses_nothing(tmp_path):
    chance = random.Random(1)
    points = [chance.uniform(0, 1) for _ in range(30)]
    [lengths] = launch(kill_while_writing, tmp_path / "runs", points, nproc=1, timeout=240)
    assert lengths == [int(point * 8_000_000) for point in points]


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
    """[the error of a save on this rank] with the victim's disk full after 0, 1, 2, … operations."""
    errors = []
    for operations in range(200):
        full = full_disk_after(operations) if dist.get_rank() == victim else contextlib.nullcontext()
        try:
            with full:
                save(folder, 2)
        except CheckpointError as error:
            assert len(str(error).splitlines()) == 2
            errors.append(str(error))
        except OSError as error:  # that of the new folder
            errors.append(str(error))
        else:
            verify(latest_good(folder))
            assert latest_good(folder).name == "step_00000002"
            return errors
        if latest_good(folder).name == "step_00000002":  # only the sync after the rename failed
            return errors
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
    assert on0 == on1  # every rank raises, and the same
    assert all("No space left on device" in text for text in on0)
    assert len(on0) > (5 if victim == 0 else 2)
    assert sum("was not saved" in text for text in on0) >= len(on0) - 1


def test_a_full_disk_leaves_no_half_file_beside_another(tmp_path):
    save_file({"step": 1}, tmp_path / "a.pt")
    steps = []
    for operations in itertools.count():
        with full_disk_after(operations):
            try:
                save_file({"step": 2, "weights": torch.rand(10_000)}, tmp_path / "a.pt")
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        assert os.listdir(tmp_path) == ["a.pt"]
        steps.append(load_file(tmp_path / "a.pt")["step"])
    assert steps[:-1] == [1] * (len(steps) - 1) and len(steps) > 4
    assert steps[-1] == load_file(tmp_path / "a.pt")["step"] == 2  # renamed; the sync after that failed


# ---- Chapter 10's script


def kill_a_rank(script, environment, flags, folder, step):
    """Start a script on two ranks, and kill one of them when the folder holds a checkpoint of that step or a later."""
    agent = Forked(script_on_ranks(script, 2, *flags), environment)
    while not agent.ended() and not any(int(path.name[5:]) >= step for path in finished(folder)):
        time.sleep(0.001)
    rank = next(pid for pid in agent.left() if pid != agent.pid)
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
