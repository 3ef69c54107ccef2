"""Checkpoints that neither a kill nor a full disk destroys, for torch.save and DCP.

First single files, then checkpoints, which are folders with a manifest, then DCP's.
One job at a time writes to a folder, on a disk that all ranks see. A function is called
"on every rank" if it is a collective: rank 0 decides, and all get its answer or error.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from helpers.runtime.process_group import print0

MANIFEST = "manifest.json"  # written last: {file: [bytes, sha256]} of all others
WRITTEN: dict[Path, dict[str, tuple[int, str]]] = {}  # unfinished, by this rank


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged or unsafe, or it could not be saved."""


class Hashed(io.BufferedWriter):
    """A new file at ``path``, hashed while it is written and synced when closed."""

    def __init__(self, path: Path, final_name: str) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.path, self.final_name, self.sha256 = path, final_name, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
            note = self.tell(), self.sha256.hexdigest()
            WRITTEN.get(self.path.parent, {})[self.final_name] = note
        finally:
            super().close()


def replace_file(path: str | Path, write: Callable) -> None:
    """Call ``write(file)`` on a file beside ``path``, then rename it to ``path``."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        with Hashed(part, path.name) as file:
            write(file)
        rename(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def rename(old: Path, new: Path) -> None:
    """Rename, and wait until the disk has the new name."""
    os.replace(old, new)
    folder = os.open(new.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_file(state: Any, path: str | Path) -> None:
    """``torch.save``: at ``path`` stands the old file or the complete new one."""
    replace_file(path, lambda file: torch.save(state, file))


def load_file(path: str | Path) -> Any:
    """What ``save_file`` wrote: tensors on the CPU, mapped. Executes nothing."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes can raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"asks for {code[1]}, which was not executed" if code else "is damaged"
        why = "is missing" if isinstance(error, FileNotFoundError) else why
        name = "/".join(Path(path).parts[-2:])
        raise CheckpointError(f"{name} {why}.\nUse an older checkpoint.") from None


@contextmanager
def new_checkpoint(
    folder: str | Path, step: int, keep: int = 3, group: ProcessGroup | None = None
) -> Iterator[Path]:
    """Gives a folder to write to, on every rank. The block's end makes it a checkpoint.

    If one rank's disk fails, all ranks raise there. So use collectives before files.
    """
    path, failure = Path(folder, f".step_{step:08}.tmp"), ""
    WRITTEN[path] = {}
    try:
        on_rank0(make_temporary, path, step, group=group)
        try:
            yield path
        except (OSError, RuntimeError) as error:  # torch.save turns OSError into it
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        ranks = [(failure, WRITTEN[path])]  # with lengths and hashes: no file is read
        if dist.is_initialized():
            ranks *= dist.get_world_size()
            dist.all_gather_object(ranks, ranks[0], group=group)
        on_rank0(put_in_place, path, ranks, keep, group=group)
    finally:
        del WRITTEN[path]


def on_rank0(function: Callable, *args: Any, group: ProcessGroup | None = None) -> Any:
    """Call a function on rank 0; return its result or raise its error on every rank."""
    outcome: list = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except (CheckpointError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


def make_temporary(path: Path, step: int) -> None:
    for other in path.parent.glob(".step_*"):  # left by runs that were killed
        if other == path or other not in WRITTEN:  # no thread of this run writes there
            shutil.rmtree(other)
    for newer in finished(path.parent):
        if int(newer.name[5:]) >= step:
            if not damage(newer):
                text = f"{newer} is there, and step {step} is not newer."
                raise CheckpointError(f"{text}\nGo on from it, or save elsewhere.")
            forget(newer)
    path.mkdir(parents=True)


def put_in_place(path: Path, ranks: list, keep: int) -> None:
    final = path.with_name(path.stem[1:])
    try:
        for rank, (failure, _) in enumerate(ranks):
            if failure:
                raise CheckpointError(f"rank {rank}: {failure}")
        manifest = {name: note for _, files in ranks for name, note in files.items()}
        if unknown := set(os.listdir(path)) - set(manifest):
            raise CheckpointError(f"{min(unknown)} was not written with save_file")
        data = json.dumps(manifest, indent=1).encode()
        replace_file(path / MANIFEST, lambda file: file.write(data))
        rename(path, final)
    except (CheckpointError, OSError) as error:
        shutil.rmtree(path, ignore_errors=True)
        text = f"{final.name} was not saved: {error}\nThose before it are as they were."
        raise CheckpointError(text) from None
    for old in finished(path.parent)[: -max(keep, 1)]:
        forget(old)


def forget(path: Path) -> None:  # renamed first: a half removed one must not count
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))


def finished(folder: Path) -> list[Path]:
    """The folder's checkpoints that have a manifest, the oldest first."""
    paths = [manifest.parent for manifest in folder.glob(f"step_*/{MANIFEST}")]
    paths = [path for path in paths if path.name[5:].isdecimal()]
    return sorted(paths, key=lambda path: int(path.name[5:]))


def damage(path: Path) -> str | None:
    """Which of a checkpoint's files is missing or has another length; None if none."""
    try:
        for name, (length, _) in json.loads((path / MANIFEST).read_bytes()).items():
            size = (path / name).stat().st_size
            if size != length:
                return f"{path.name}/{name} has {size} bytes, and {length} were saved"
    except FileNotFoundError as error:
        return f"{path.name}/{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{path.name}/{MANIFEST} is damaged"
    return None


def latest_good(folder: str | Path) -> Path | None:
    """The newest checkpoint without ``damage``, or None, on every rank."""
    return on_rank0(find_latest_good, Path(folder))


def find_latest_good(folder: Path) -> Path | None:
    """``latest_good`` on one rank. Raises CheckpointError if all are damaged."""
    if not folder.is_dir():
        text = f"There is no folder {folder}.\nCorrect its name, or: mkdir -p {folder}"
        raise CheckpointError(text)
    for path in reversed(paths := finished(folder)):
        if not (problem := damage(path)):
            return path
        print0(f"skipped: {problem}")
    if paths:
        text = f"No good checkpoint in {folder}.\nRestore one, or use a new folder."
        raise CheckpointError(text)
    return None


def verify(path: str | Path) -> None:
    """Raise CheckpointError unless every file holds the bytes that were saved.

    One process reads all files, without a collective. With a terabyte it takes so long
    that waiting ranks would time out: run it before a job, or beside it.
    """
    path = Path(path)
    problem = damage(path)
    if not problem:
        manifest = json.loads((path / MANIFEST).read_bytes())
        with ThreadPoolExecutor() as threads:
            digests = threads.map(sha256, [path / name for name in manifest])
        for name, digest in zip(manifest, digests, strict=True):
            if digest != manifest[name][1]:
                problem = f"{path.name}/{name} holds other bytes than were saved"
    if problem:
        raise CheckpointError(f"{problem}.\nRemove it, and the one before it is used.")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_sharded(state: dict, path: Path, group: ProcessGroup | None = None) -> None:
    """``dcp.save`` to a new checkpoint's folder, each rank its slices."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = HashedFiles()
    try:
        dcp.save(state, storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:  # which is not an Exception
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"DCP, rank {rank}: {reason}") from None


class HashedFiles(FileSystem):
    """Opens files for DCP's writer."""

    def create_stream(self, path: str | os.PathLike, mode: str) -> Any:
        path = Path(path)
        return Hashed(path, path.name.removesuffix(".tmp"))  # .metadata is renamed


class BackgroundSaves:
    """Writes checkpoints while training goes on, one at a time; on every rank."""

    def __init__(self) -> None:
        # Two threads send, the writer's and the training's: each needs its own group.
        self.writing = dist.new_group(backend="gloo")
        self.asking = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        self.saving: Future | None = None
        self.question: tuple[dist.Work, torch.Tensor] | None = None

    def start(self, state: dict, folder: Path, step: int, keep: int = 3) -> None:
        """Copy the tensors of ``state``, and return; on every rank."""
        if self.saving:
            raise CheckpointError("A save is still running.\nWait for finished().")
        copy = BlockingAsyncStager().stage(state)  # on the CPU
        self.saving = self.thread.submit(self.save, copy, folder, step, keep)

    def save(self, state: dict, folder: Path, step: int, keep: int) -> Path:
        """Save the copy, in the thread."""
        with new_checkpoint(folder, step, keep, self.writing) as path:
            save_sharded(state, path, self.writing)
        return path.with_name(path.stem[1:])

    def finished(self) -> Path | None:
        """The new checkpoint's folder, in the same step on every rank, or None. Call it
        once a step, on every rank.

        Each call asks, and reads the answer to the call before: no rank waits for it.
        """
        if self.question:
            work, done = self.question
            work.wait()
            self.question = None
            if done.item() and self.saving:
                saved, self.saving = self.saving, None
                return saved.result()
        if self.saving:
            done = torch.tensor(int(self.saving.done()))
            work = dist.all_reduce(done, dist.ReduceOp.MIN, self.asking, async_op=True)
            self.question = work, done
        return None

    def wait(self) -> None:
        """Wait for a save that still runs, on every rank. Call it after training."""
        while self.saving and not self.finished():
            self.saving.exception()  # waits; finished() raises it
