"""Checkpoints that neither a kill nor a full disk destroys, for torch.save and DCP.

A checkpoint is a folder step_00000100 with a manifest of its files. One job at a time
writes checkpoints to a folder, on a disk that all ranks see. A function that is called
"on every rank" is a collective: rank 0 decides, and all ranks get its answer or error.
"""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from helpers.runtime.process_group import print0

MANIFEST = "manifest.json"  # written last: {file: [bytes, sha256]} of all other files
# {folder: {file: (bytes, sha256)}} of the checkpoints that this process is writing. It
# is global so that any file written to such a folder is found, by whichever function.
UNFINISHED: dict[Path, dict[str, tuple[int, str]]] = {}


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or unsafe, or it could not be saved."""


# --- Files


class HashedFile(io.BufferedWriter):
    """A new file at ``path``, hashed while it is written and synced when closed.

    If the file is in the folder of a new checkpoint, its length and hash are noted in
    UNFINISHED for the manifest, under ``final_name``, to which it will be renamed.
    """

    def __init__(self, path: Path, final_name: str) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.path = path
        self.final_name = final_name
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Hash the bytes, and write them."""
        self.sha256.update(data)
        return super().write(data)

    def close(self) -> None:
        """Sync the file to the disk, and note its length and hash for the manifest."""
        if self.closed:
            return
        folder = self.path.parent
        try:
            self.flush()
            os.fsync(self.fileno())
            if folder in UNFINISHED:
                length = self.tell()
                UNFINISHED[folder][self.final_name] = (length, self.sha256.hexdigest())
        finally:
            super().close()


def replace_file(path: str | Path, write: Callable) -> None:
    """Call ``write(file)`` on a file beside ``path``, then rename it to ``path``."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        # A rename must not reach the disk before the bytes: closing the file syncs it.
        with HashedFile(part, path.name) as file:
            write(file)
        rename(part, path)
    except BaseException:  # Ctrl-C too
        part.unlink(missing_ok=True)
        raise


def rename(old: Path, new: Path) -> None:
    """Rename, and wait until the disk has the new name."""
    os.replace(old, new)
    folder = os.open(new.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_file(state: Any, path: str | Path) -> None:
    """``torch.save``. ``path`` is the old file until the new one is complete."""
    replace_file(path, partial(torch.save, state))


def load_file(path: str | Path) -> Any:
    """Load what ``save_file`` wrote, with its tensors on the CPU.

    A file cannot make this execute code. Tensors are read only when they are used.
    Raises CheckpointError for a file that is missing or damaged, or asks for code.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        problem = "is missing"
    except Exception as error:  # damaged bytes can raise anything
        problem = "is damaged"
        # If the file wants a function to be called, torch's message has its name.
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match is not None:
            function = match.group(1)
            problem = f"asks for {function}, which was not executed"
    folder_and_name = "/".join(Path(path).parts[-2:])
    raise CheckpointError(f"{folder_and_name} {problem}.\nUse an older checkpoint.")


# --- Writing a checkpoint


@contextmanager
def new_checkpoint(
    folder: str | Path, step: int, keep: int = 3, group: ProcessGroup | None = None
) -> Iterator[Path]:
    """A context that gives a folder to write to, which its end makes a checkpoint.

    Enter it on every rank. The newest ``keep`` checkpoints stay, or all if it is 0.
    If one rank's disk fails, all ranks raise CheckpointError at the end. Until then the
    other ranks go on, so a collective in here has to come before the first file.
    """
    path = Path(folder, f".step_{step:08}.tmp")
    UNFINISHED[path] = {}
    try:
        on_rank0(make_temporary, path, step, group=group)
        failure = None
        try:
            yield path
        except (OSError, RuntimeError) as error:  # torch.save turns OSError into it
            # It is not raised yet: the other ranks wait for this one in gathered().
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        failures = gathered(failure, group)  # of each rank, None where all went well
        written = gathered(UNFINISHED[path], group)  # the files of each rank
        on_rank0(put_in_place, path, failures, written, keep, group=group)
    finally:
        del UNFINISHED[path]


def gathered(value: Any, group: ProcessGroup | None) -> list:
    """Give every rank the values of all ranks, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def on_rank0(function: Callable, *args: Any, group: ProcessGroup | None = None) -> Any:
    """Call a function on rank 0; return its result or raise its error on every rank.

    So all ranks decide alike, even if they would see the disk at different moments.
    """
    result = None
    error = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            result = function(*args)
        except (CheckpointError, OSError) as raised:
            error = raised
    if dist.is_initialized():
        # The error is sent too. Otherwise the other ranks would wait for a result.
        result_and_error = [result, error]
        dist.broadcast_object_list(result_and_error, src=0, group=group)
        result, error = result_and_error
    if error is not None:
        raise error
    return result


def make_temporary(path: Path, step: int) -> None:
    """Make the temporary folder of a new checkpoint, and remove what killed runs left.

    Raises CheckpointError if there is a good checkpoint of this step or a later one.
    """
    remove_leftovers(path)
    remove_damaged_from(step, path.parent)
    path.mkdir(parents=True)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary folders that killed runs left, also one at ``path``."""
    for leftover in path.parent.glob(".step_*"):
        # A save in the background may still write to another unfinished folder.
        is_in_use = leftover in UNFINISHED and leftover != path
        if not is_in_use:
            shutil.rmtree(leftover)


def remove_damaged_from(step: int, folder: Path) -> None:
    """Remove damaged checkpoints of ``step`` and later steps.

    The run has skipped them, and continued from an older one. Raises CheckpointError if
    one of them is good.
    """
    for path in finished(folder):
        if step_of(path) < step:
            continue
        if damage(path) is None:
            raise CheckpointError(
                f"{path} is there, and step {step} is not newer.\n"
                "Go on from it, or save elsewhere."
            )
        remove(path)


def final_path(path: Path) -> Path:
    """Where a checkpoint goes: from .step_00000100.tmp to step_00000100 beside it."""
    return path.with_name(path.name.removeprefix(".").removesuffix(".tmp"))


def put_in_place(
    path: Path, failures: list[str | None], written: list[dict], keep: int
) -> None:
    """Make the temporary folder ``path`` a checkpoint: write its manifest, rename it.

    Then older checkpoints are removed, except for the newest ``keep``. ``failures`` has
    what went wrong on each rank, or None, and ``written`` the files that it wrote. If
    anything went wrong, the folder is removed, and this raises CheckpointError.
    """
    final = final_path(path)
    try:
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"rank {rank}: {failure}")
        # All files are on the disk by now, so a folder with a manifest is complete.
        manifest = complete_manifest(path, written)
        write_manifest(path / MANIFEST, manifest)
        rename(path, final)
    except (CheckpointError, OSError) as error:
        shutil.rmtree(path, ignore_errors=True)
        raise CheckpointError(
            f"{final.name} was not saved: {error}\nThose before it are as they were."
        ) from None
    older = finished(path.parent)[:-keep]  # none if keep is 0
    for old_path in older:
        remove(old_path)


def complete_manifest(path: Path, written: list[dict]) -> dict[str, tuple[int, str]]:
    """{file: (bytes, sha256)} of all files in a new checkpoint's folder ``path``.

    ``written`` has such a dictionary from each rank, of the files that it wrote. Raises
    CheckpointError for a file in the folder that is in none of them.
    """
    manifest = {}
    for files_of_rank in written:
        manifest.update(files_of_rank)
    unknown = set(os.listdir(path)) - set(manifest)
    if unknown:
        raise CheckpointError(f"{min(unknown)} was not written with save_file")
    return manifest


def write_manifest(path: Path, manifest: dict[str, tuple[int, str]]) -> None:
    """Write a manifest as JSON."""
    text = json.dumps(manifest, indent=1)

    def write(file: HashedFile) -> None:
        file.write(text.encode())

    replace_file(path, write)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill does not leave half."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


# --- Finding and checking checkpoints


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step_"))


def finished(folder: Path) -> list[Path]:
    """The folder's checkpoints that have a manifest, the oldest first."""
    paths = []
    for manifest in folder.glob(f"step_*/{MANIFEST}"):
        path = manifest.parent
        if re.fullmatch(r"step_\d+", path.name):  # not step_7_copy, for example
            paths.append(path)
    return sorted(paths, key=step_of)


def damage(path: Path) -> str | None:
    """Say which of a checkpoint's files is missing or has another length, or None.

    It reads only the manifest, so it is quick for a checkpoint of any size.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        for name, (saved_size, _hash) in manifest.items():
            size = (path / name).stat().st_size
            if size != saved_size:
                return (
                    f"{path.name}/{name} has {size} bytes, and {saved_size} were saved"
                )
    except FileNotFoundError as error:
        return f"{path.name}/{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{path.name}/{MANIFEST} is damaged"
    return None


def latest_good(folder: str | Path) -> Path | None:
    """The newest checkpoint without ``damage``, or None, on every rank.

    Raises CheckpointError if there are checkpoints, and all of them are damaged.
    """
    return on_rank0(find_latest_good, Path(folder))


def find_latest_good(folder: Path) -> Path | None:
    """Find the checkpoint of ``latest_good``, on one rank; print which were skipped."""
    if not folder.is_dir():
        raise CheckpointError(
            f"There is no folder {folder}.\nCorrect its name, or: mkdir -p {folder}"
        )
    paths = finished(folder)
    for path in reversed(paths):
        problem = damage(path)
        if problem is None:
            return path
        print0(f"skipped: {problem}")
    if paths:
        raise CheckpointError(
            f"No good checkpoint in {folder}.\nRestore one, or use a new folder."
        )
    return None


def verify(path: str | Path) -> None:
    """Raise CheckpointError unless every file holds the bytes that were saved.

    One process reads all files, without a collective. With a terabyte it takes so long
    that waiting ranks would time out: run it before a job, or beside it.
    """
    path = Path(path)
    problem = damage(path)
    if problem is None:
        problem = changed_bytes(path)
    if problem is not None:
        raise CheckpointError(f"{problem}.\nRemove it, and the one before it is used.")


def changed_bytes(path: Path) -> str | None:
    """Say which of a checkpoint's files has other bytes than were saved, or None."""
    manifest = json.loads((path / MANIFEST).read_bytes())
    files = [path / name for name in manifest]
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter's lock
        digests = dict(zip(manifest, threads.map(sha256, files), strict=True))
    for name, entry in manifest.items():
        _, saved_digest = entry
        if digests[name] != saved_digest:
            return f"{path.name}/{name} holds other bytes than were saved"
    return None


def sha256(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Sharded checkpoints, by torch.distributed.checkpoint (DCP)


def save_sharded(state: dict, path: Path, group: ProcessGroup | None = None) -> None:
    """``dcp.save`` to the folder of a new checkpoint: each rank writes its shards."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = HashedFiles()
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:  # which is not an Exception
        # Many ranks may have failed for one reason, so the first one is enough.
        rank = min(error.failures)
        exception, _traceback = error.failures[rank]
        raise CheckpointError(f"DCP, rank {rank}: {exception}") from None


class HashedFiles(FileSystem):
    """Opens the files that DCP writes, so that they are hashed for the manifest."""

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        """DCP calls this for each file that it writes."""
        path = Path(path)
        # DCP writes .metadata.tmp, and renames it to .metadata.
        return HashedFile(path, path.name.removesuffix(".tmp"))


class BackgroundSaves:
    """Writes checkpoints while training goes on, one at a time; on every rank."""

    def __init__(self) -> None:
        # The thread that writes and the one that trains both communicate. In one group
        # their messages could meet in another order on each rank, so each has its own.
        self.writing_group = dist.new_group(backend="gloo")
        self.training_group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        self.saving: Future | None = None  # the save that runs, or has just ended
        # An all-reduce that one call of ``finished`` starts and the next one reads, and
        # its result: 1 if every rank has written, else 0.
        self.reduction: dist.Work | None = None
        self.all_have_written = torch.tensor(0)

    def start(self, state: dict, folder: Path, step: int, keep: int = 3) -> None:
        """Begin to save ``state``, and return as soon as its tensors are copied.

        Call it on every rank. Raises CheckpointError if a save is still running.
        """
        if self.saving is not None:
            raise CheckpointError("A save is still running.\nWait for finished().")
        # Training goes on to change the tensors, so the thread needs a copy of them.
        copy = BlockingAsyncStager().stage(state)
        self.saving = self.thread.submit(self.save, copy, folder, step, keep)

    def save(self, state: dict, folder: Path, step: int, keep: int) -> Path:
        """Write the copy; return the checkpoint's folder. This runs in the thread."""
        with new_checkpoint(folder, step, keep, self.writing_group) as path:
            save_sharded(state, path, self.writing_group)
        return final_path(path)

    def finished(self) -> Path | None:
        """The new checkpoint's folder, in the same step on every rank, or None.

        Call it once a step, on every rank. Each call starts an all-reduce of whether
        the ranks have written, and the next call reads its result. So no rank waits.
        Raises the error of a save that failed.
        """
        if self.saving is None:
            return None
        if self.reduction is not None:  # the call before has started it
            reduction = self.reduction
            self.reduction = None
            reduction.wait()
            if self.all_have_written.item() == 1:
                saving = self.saving
                self.saving = None
                return saving.result()  # the folder, or it raises the save's error
        has_written = self.saving.done()
        self.all_have_written = torch.tensor(int(has_written))
        self.reduction = dist.all_reduce(
            self.all_have_written,
            dist.ReduceOp.MIN,  # 1 only if it is 1 on every rank
            group=self.training_group,
            async_op=True,
        )
        return None

    def wait(self) -> None:
        """Wait for a save that still runs, on every rank. Call it after training."""
        while self.saving is not None:
            self.saving.exception()  # waits for the thread; finished() raises the error
            self.finished()
