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

fork_context = multiprocessing.get_context("fork")
FILE_OPERATIONS = {  # as sys.audit names them
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
}


def die_at_operation(number, folder):
    """Kill this process when it is about to do operation ``number`` on the folder; the first one is number 0."""
    operation_numbers = itertools.count()

    def kill_if_due(event, arguments):
        """Python calls this before each operation that is audited."""
        if event not in FILE_OPERATIONS:
            return
        path = str(arguments[0])
        is_relative = not os.path.isabs(path)  # as the names that rmtree removes from a folder that it has opened
        if not is_relative and not path.startswith(str(folder)):
            return
        if next(operation_numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_if_due)


def save_until_killed(number, folder):
    die_at_operation(number, folder)
    write(folder, 2, keep=1)


def kill_a_save_at_each_operation(folder):
    """Save step 2 beside step 1, and kill the save at its first operation. Then kill one at its second, and so on.

    Returns the step of the good checkpoint after each kill, and after the save that was not killed any more. What a
    kill leaves must not disturb the next save.
    """
    dist.destroy_process_group()  # a forked child must not use this rank's
    good_steps = []
    for number in range(1000):
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, 1, keep=1)
        child = fork_context.Process(target=save_until_killed, args=(number, folder))
        child.start()
        child.join()
        good_steps.append(step_of(latest_good(folder)))

        write(folder, 3, keep=1)
        assert os.listdir(folder) == ["step_00000003"]
        if child.exitcode == 0:
            return good_steps
        assert child.exitcode == -signal.SIGKILL
    raise AssertionError("the save never ended")


@pytest.mark.ranks
def test_a_kill_at_every_operation_loses_nothing(tmp_path):
    """The good checkpoint is that of step 1 up to the rename, and that of step 2 from then on."""
    [good_steps] = launch(kill_a_save_at_each_operation, tmp_path / "runs", nproc=1, timeout=240)
    assert len(good_steps) > 15
    assert set(good_steps) == {1, 2}
    assert good_steps == sorted(good_steps)


# ---- A full disk, at every operation of a save


@contextlib.contextmanager
def full_disk_after(num_operations):
    """In this context, only so many writes, syncs, new folders and renames succeed. Then the disk is full."""
    operation_numbers = itertools.count()

    def fails_on_full_disk(operation):
        """The same function, which raises "No space left on device" from some call on."""

        def operation_or_error(*arguments, **options):
            if next(operation_numbers) >= num_operations:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return operation(*arguments, **options)

        return operation_or_error

    class FileOnFullDisk(io.FileIO):
        write = fails_on_full_disk(io.FileIO.write)

    with (
        mock.patch("io.FileIO", FileOnFullDisk),
        mock.patch("os.fsync", fails_on_full_disk(os.fsync)),
        mock.patch("os.mkdir", fails_on_full_disk(os.mkdir)),
        mock.patch("os.replace", fails_on_full_disk(os.replace)),
    ):
        yield


def save_files(folder, step, saves=None):
    """Save a file of each rank's own. It needs no ``saves``, which the other kind of save does."""
    with new_checkpoint(folder, step) as path:
        save_file(torch.arange(30_000.0), path / f"own_{dist.get_rank()}.pt")


def save_shards_in_the_background(folder, step, saves):
    """Save a tensor of which each rank writes a part, and wait for the end."""
    saves.start({"weights": torch.arange(30_000.0), "step": step}, folder, step)
    saves.wait()


def errors_until_a_save_succeeds(folder, rank_with_full_disk, save):
    """Try to save step 2 on a disk that is full after 0 operations, then after 1, and so on, until it is saved.

    Only one rank has this disk. Returns the errors of the saves on the rank that calls.
    """
    errors = []
    saves = BackgroundSaves()
    for num_operations in range(200):
        if dist.get_rank() == rank_with_full_disk:
            disk = full_disk_after(num_operations)
        else:
            disk = contextlib.nullcontext()
        try:
            with disk:
                save(folder, 2, saves)
        except (CheckpointError, OSError) as error:  # an OSError if the new folder cannot be made
            errors.append(str(error))

        newest = latest_good(folder)
        verify(newest)
        if newest.name == "step_00000002":
            # This save had no error, or only that of the last operation, the sync after the rename.
            return errors
        assert os.listdir(folder) == ["step_00000001"]
        assert len(errors) == num_operations + 1
        dist.barrier()
    raise AssertionError("the disk was always full")


def errors_of_each_save_and_disk(folder):
    """For each kind of save, and with the disk of rank 0 or rank 1 full: the errors until a save succeeds."""
    all_errors = []
    for save in (save_files, save_shards_in_the_background):
        for rank_with_full_disk in (0, 1):
            runs = folder / f"{save.__name__}_{rank_with_full_disk}"
            save_files(runs, 1)
            all_errors.append(errors_until_a_save_succeeds(runs, rank_with_full_disk, save))
    return all_errors


@pytest.mark.ranks
def test_a_full_disk_leaves_the_last_good_one_and_no_half_file(tmp_path):
    """The folder is looked at after each save. Here, each error has to be the disk's, and the same on both ranks."""
    errors_of_rank_0, errors_of_rank_1 = launch(errors_of_each_save_and_disk, tmp_path, nproc=2)
    assert errors_of_rank_0 == errors_of_rank_1
    for errors in errors_of_rank_0:
        assert all("No space left on device" in error for error in errors)
        assert len(errors) > 2, "a save has more than two operations"
        not_saved = [error for error in errors if "was not saved" in error]
        assert len(not_saved) >= len(errors) - 1, "only the error of the new folder does not say so"


# ---- Chapter 10's script


@pytest.mark.ranks
def test_the_script_is_killed_and_goes_on(tmp_path):
    """A run of which a rank was killed goes on from its newest checkpoint to the result of an undisturbed run."""
    (tmp_path / "path").mkdir()
    alone = stand_alone(tmp_path / "path")
    script = export("10", tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    without_checkpoints = ["--noise=0.3", "--save-every=4"]
    with_checkpoints = [*without_checkpoints, "--checkpoint-dir=runs"]

    status, out, errors, _ = forked(script_on_ranks(script, 2, *without_checkpoints), alone)
    assert status == 0, errors
    undisturbed_result = result(out)

    run = Forked(script_on_ranks(script, 2, *with_checkpoints), alone)
    while not run.ended() and not has_step_20(runs):
        time.sleep(0.001)
    ranks = [pid for pid in run.left() if pid != run.pid]  # run.pid is torchrun's agent
    os.kill(ranks[0], signal.SIGKILL)
    status, _, errors, left = run.end(120)
    assert status == 1 and "SIGKILL" in errors and not left, errors
    newest = latest_good(runs)
    assert "step_00000020" <= newest.name < "step_00000120"

    status, out, errors, _ = forked(script_on_ranks(script, 2, *with_checkpoints), alone)
    assert status == 0 and f"going on from {newest.name}\n" in out, errors
    assert result(out) == undisturbed_result

    # The newest checkpoint is damaged, so four ranks with --shard go on from the one before it.
    os.truncate(runs / "step_00000120" / "__0_0.distcp", 100)
    # These ranks are started by torchrun itself, because one of four forked ones hung here once.
    status, out, errors, _ = torchrun(script, 4, alone, *with_checkpoints, "--shard")
    assert status == 0 and "skipped: step_00000120/__0_0.distcp" in out, errors
    assert "going on from step_00000116\n" in out
    assert result(out)["step"] == 120


def has_step_20(folder):
    """Whether a finished checkpoint of step 20 or of a later one is there."""
    return any(path.name >= "step_00000020" for path in finished(folder))
