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
from scripting import export, result, stand_alone, torchrun

from helpers.ranks.launch import launch
from helpers.runtime.checkpoint import (
    BackgroundSaves,
    CheckpointError,
    finished,
    latest_good,
    new_checkpoint,
    save_file,
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
        if event not in EVENTS:
            return
        path = str(arguments[0])
        is_ours = path.startswith(str(folder)) or not os.path.isabs(path)  # rmtree removes names in open folders
        if is_ours and next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def write_until_killed(number, folder):
    die_at_operation(number, folder)
    write(folder, 2, keep=1)


def kill_saves(folder):
    """[the good step after a save of step 2 that is killed at its first operation, its second, … its last].

    Each time, what is left must not disturb the next save.
    """
    dist.destroy_process_group()  # a forked child must not use this rank's
    steps = []
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, 1, keep=1)
        child = fork.Process(target=write_until_killed, args=(number, folder))
        child.start()
        child.join()
        steps.append(step_of(latest_good(folder)))
        write(folder, 3, keep=1)
        assert os.listdir(folder) == ["step_00000003"]
        if child.exitcode == 0:
            return steps
        assert child.exitcode == -signal.SIGKILL
    raise AssertionError("the save never ended")


@pytest.mark.ranks
def test_a_kill_at_every_operation_loses_nothing(tmp_path):
    [steps] = launch(kill_saves, tmp_path / "runs", nproc=1, timeout=240)
    assert len(steps) > 15  # operations
    # The good step is the old one up to the rename, and the new one from then on.
    assert steps == sorted(steps) and set(steps) == {1, 2}


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


def save_files(folder, step, _=None):
    with new_checkpoint(folder, step) as path:
        save_file(torch.arange(30_000.0), path / f"own_{dist.get_rank()}.pt")


def save_shards_in_the_background(folder, step, saves):
    saves.start({"weights": torch.arange(30_000.0), "step": step}, folder, step)
    saves.wait()


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
            errors.append(str(error))
        newest = latest_good(folder)
        verify(newest)
        if newest.name == "step_00000002":  # or only the sync after the rename failed
            return errors
        assert os.listdir(folder) == ["step_00000001"]
        assert len(errors) == operations + 1
        dist.barrier()
    raise AssertionError("the disk was always full")


def fill_the_disks(folder):
    """The errors of this rank for each kind of save and each victim."""
    errors = []
    for save in (save_files, save_shards_in_the_background):
        for victim in (0, 1):
            runs = folder / f"{save.__name__}_{victim}"
            save_files(runs, 1)
            errors.append(fill_the_disk(runs, victim, save))
    return errors


@pytest.mark.ranks
def test_a_full_disk_leaves_the_last_good_one_and_no_half_file(tmp_path):
    all_errors, all_errors_of_rank_1 = launch(fill_the_disks, tmp_path, nproc=2)
    assert all_errors == all_errors_of_rank_1
    for errors in all_errors:
        assert all("No space left on device" in text for text in errors)
        assert len(errors) > 2, "the victim's save has more operations"
        not_saved = [text for text in errors if "was not saved" in text]
        assert len(not_saved) >= len(errors) - 1, "without a folder there is nothing to save to"


# ---- Chapter 10's script


@pytest.mark.ranks
def test_the_script_is_killed_and_goes_on(tmp_path):
    (tmp_path / "path").mkdir()
    alone = stand_alone(tmp_path / "path")
    script = export("10", tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()

    training = ["--noise=0.3", "--save-every=4"]
    kept = [*training, "--checkpoint-dir=runs"]

    status, uninterrupted, errors, _ = forked(script_on_ranks(script, 2, *training), alone)
    assert status == 0, errors

    agent = Forked(script_on_ranks(script, 2, *kept), alone)
    while not agent.ended() and not any(path.name >= "step_00000020" for path in finished(runs)):
        time.sleep(0.001)
    os.kill(next(pid for pid in agent.left() if pid != agent.pid), signal.SIGKILL)  # a rank
    status, _, errors, left = agent.end(120)
    assert status == 1 and "SIGKILL" in errors and not left, errors
    newest = latest_good(runs)
    assert "step_00000020" <= newest.name < "step_00000120"
    status, out, errors, _ = forked(script_on_ranks(script, 2, *kept), alone)
    assert status == 0 and f"going on from {newest.name}\n" in out, errors
    assert result(out) == result(uninterrupted)

    os.truncate(runs / "step_00000120" / "__0_0.distcp", 100)
    # These ranks are real, because one of four forked ones hung here once.
    status, out, errors, _ = torchrun(script, 4, alone, *kept, "--shard")
    assert status == 0 and "skipped: step_00000120/__0_0.distcp" in out, errors
    assert "going on from step_00000116\n" in out and result(out)["step"] == 120
