"""Checkpoints: a kill at every operation, a disk that is full at every operation, and chapter 10's script."""

import contextlib
import errno
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import time
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from checkpoints import step_of, write
from forked import Forked, forked, script_on_ranks
from scripting import export, result, stand_alone

from helpers.ranks.launch import launch
from helpers.runtime.checkpoint import (
    BackgroundSaves,
    CheckpointError,
    finished,
    latest_good,
    new_checkpoint,
    replace_file,
    save_file,
    save_sharded,
    verify,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second


# ---- Kills

fork = multiprocessing.get_context("fork")
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")


def die_at_operation(number, folder):
    """From now on, die before the ``number``-th operation on the folder (see sys.audit)."""
    operations = itertools.count()

    def hook(event, arguments):
        path = str(arguments[0])
        is_ours = path.startswith(str(folder)) or not os.path.isabs(path)  # rmtree removes names in open folders
        if event in EVENTS and is_ours and next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def write_until_killed(number, folder, keep):
    die_at_operation(number, folder)
    write(folder, 3, keep)


def kill_saves(folder, keep):
    """[the good step after a save of step 3 that is killed at its first operation, its second, … its last].

    Each time, what is left must not disturb the next save.
    """
    dist.destroy_process_group()  # a forked child must not use this rank's
    steps = []
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        for step in (1, 2):
            write(folder, step, keep)
        child = fork.Process(target=write_until_killed, args=(number, folder, keep))
        child.start()
        child.join()
        steps.append(step_of(latest_good(folder)))
        write(folder, 4, keep)
        names = sorted(os.listdir(folder))
        assert names == [path.name for path in finished(folder)]
        assert len(names) == keep
        assert step_of(latest_good(folder)) == 4
        if child.exitcode == 0:
            return steps
        assert child.exitcode == -signal.SIGKILL
    raise AssertionError("the save never ended")


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.ranks
def test_a_kill_at_every_operation_loses_nothing(tmp_path, keep):
    [steps] = launch(kill_saves, tmp_path / "runs", keep, nproc=1, timeout=240)
    assert len(steps) > 15  # operations
    assert steps == sorted(steps) and set(steps) == {2, 3}  # the old one up to the rename, the new one from then on


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path):
    def interrupted(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    (tmp_path / "a.txt").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "a.txt", interrupted)
    assert os.listdir(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == b"old"


# ---- A full disk, at every operation of a save


@contextlib.contextmanager
def full_disk_after(operations):
    """A context in which the disk is full after so many writes, syncs, new folders and renames."""
    count = itertools.count()

    def full(function):
        def wrapped(*arguments, **options):
            if next(count) >= operations:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return wrapped

    class File(io.FileIO):
        write = full(io.FileIO.write)

    calls = {name: full(getattr(os, name)) for name in ("fsync", "mkdir", "replace")}
    with mock.patch("io.FileIO", File), mock.patch.multiple("os", **calls):
        yield


def fill_the_disk(folder, victim, save):
    """[the error of a save of step 2 on this rank] with the victim's disk full after 0, 1, 2, … operations."""
    errors = []
    saves = BackgroundSaves()
    for operations in range(200):
        disk = contextlib.nullcontext()
        if dist.get_rank() == victim:
            disk = full_disk_after(operations)
        try:
            with disk:
                save(folder, 2, saves)
        except (CheckpointError, OSError) as error:  # OSError: that of the new folder
            assert isinstance(error, OSError) or len(str(error).splitlines()) == 2
            errors.append(str(error))
        newest = latest_good(folder)
        verify(newest)
        if newest.name == "step_00000002":  # or only the sync after the rename failed
            return errors
        assert os.listdir(folder) == ["step_00000001"]
        assert len(errors) == operations + 1
        dist.barrier()
    raise AssertionError("the disk was always full")


def save_files(folder, step, _=None):
    with new_checkpoint(folder, step) as path:
        save_file(torch.arange(30_000.0), path / f"own_{dist.get_rank()}.pt")


def save_shards(folder, step, _):
    with new_checkpoint(folder, step) as path:
        save_sharded({"weights": torch.arange(30_000.0), "step": step}, path)


def save_behind(folder, step, saves):
    saves.start({"weights": torch.arange(30_000.0), "step": step}, folder, step)
    saves.wait()


@pytest.mark.parametrize("save", [save_files, save_shards, save_behind])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.ranks
def test_a_full_disk_leaves_the_last_good_one_and_no_half_file(tmp_path, save, victim):
    launch(save_files, tmp_path, 1, nproc=2)
    errors, errors_of_rank_1 = launch(fill_the_disk, tmp_path, victim, save, nproc=2)
    assert errors == errors_of_rank_1
    assert all("No space left on device" in text for text in errors)
    assert len(errors) > 2, "the victim's save has more operations"
    not_saved = [text for text in errors if "was not saved" in text]
    assert len(not_saved) >= len(errors) - 1, "without a folder there is nothing to save to"


# ---- Chapter 10's script


@pytest.mark.ranks
def test_the_script_is_killed_and_goes_on(tmp_path):
    (tmp_path / "path").mkdir()
    alone = stand_alone(tmp_path / "path")
    script = export("10", tmp_path / "empty")
    runs = script.parent / "runs" / "a"
    settings = ["--noise", "0.3", "--save-every", "4"]

    def run(nproc, *flags):
        return forked(script_on_ranks(script, nproc, *settings, *flags), alone)[:3]

    status, uninterrupted, errors = run(2)
    assert status == 0, errors
    settings += ["--checkpoint-dir", "runs/a"]
    status, _, errors = run(1)
    assert status == 1 and "Correct its name, or: mkdir -p runs/a" in errors

    runs.mkdir(parents=True)
    agent = Forked(script_on_ranks(script, 2, *settings), alone)
    while not agent.ended() and not any(int(path.name[5:]) >= 20 for path in finished(runs)):
        time.sleep(0.001)
    os.kill(next(pid for pid in agent.left() if pid != agent.pid), signal.SIGKILL)  # a rank
    status, _, errors, left = agent.end(120)
    assert status == 1 and "SIGKILL" in errors and not left, errors
    newest = latest_good(runs)
    assert 20 <= int(newest.name[5:]) < 120
    status, out, errors = run(2)
    assert status == 0 and f"going on from {newest.name}\n" in out, errors
    assert result(out) == result(uninterrupted)
    assert [path.name for path in finished(runs)] == ["step_00000112", "step_00000116", "step_00000120"]

    os.truncate(runs / "step_00000120" / "__0_0.distcp", 100)
    status, out, errors = run(4, "--shard")
    assert status == 0 and "skipped: step_00000120/__0_0.distcp" in out, errors
    assert "going on from step_00000116\n" in out and result(out)["step"] == 120
    assert len([verify(path) for path in finished(runs)]) == 3
