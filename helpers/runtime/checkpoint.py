"""Checkpoints that neither a kill nor a full disk destroys, for torch.save and DCP.

Run-time module: what a chapter uses from here is copied into its exported script. One
job at a time writes to a folder, on a disk that all ranks see. "On every rank" says:
the function is a collective; rank 0 decides, and all ranks get its answer or its error.
"""

import copyreg
import hashlib
import io
import json
import mmap
import os
import pickle
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from helpers.runtime.process_group import print0

MANIFEST = "manifest.json"  # written last: {file: [bytes, sha256]} of all others
GO_BACK = "latest_good(folder) finds a checkpoint that is whole."
WRITTEN = {}  # {folder of begin(): {file: [bytes, sha256]}}, by this rank


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, is damaged or unsafe, or could not be saved."""


# ---- Files


class Hashed(io.BufferedWriter):
    """A new file that hashes what is written to it, for the manifest."""

    def __init__(self, path):
        super().__init__(io.FileIO(path, "wb"))
        self.path, self.sha256 = path, hashlib.sha256()

    def write(self, data):
        self.sha256.update(data)
        return super().write(data)

    def __exit__(self, kind, error, trace):
        self.close()
        if kind is RuntimeError and isinstance(error.__context__, OSError):
            raise error.__context__  # a full disk, which torch.save words differently
        note = [self.path.stat().st_size, self.sha256.hexdigest()]
        WRITTEN.get(self.path.parent, {})[self.path.name] = note


def replace_file(path, write):
    """Call ``write(file)`` on a file beside ``path``, then rename it to ``path``."""
    part = Path(path).with_name(f".{Path(path).name}.part")
    try:
        with Hashed(part) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        rename(part, Path(path))
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def rename(old, new):
    """Rename, and wait until the disk has the new name."""
    os.replace(old, new)
    if files := WRITTEN.get(new.parent):
        files[new.name] = files.pop(old.name)
    folder = os.open(new.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_file(state, path):
    """``torch.save`` that leaves the old file or all of the new one at ``path``."""
    replace_file(path, lambda file: torch.save(state, file))


def load_file(path, memory=None):
    """What ``save_file`` wrote, on the CPU, read as it is used. Executes nothing."""
    try:
        mapped = memory is None
        return torch.load(memory or path, "cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # damaged bytes can raise anything
        raise unreadable(path, error) from None


def unreadable(path, error):
    """What to raise where ``error`` ended the load of a file."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    why = f"asks for {asked[1]}, which was not executed" if asked else "is damaged"
    why = "is missing" if isinstance(error, FileNotFoundError) else why
    name = "/".join(Path(path).parts[-2:])
    return CheckpointError(f"{name} {why} ({type(error).__name__}).\n{GO_BACK}")


def load_and_send(path, device):
    """``load_file`` on every rank: rank 0 reads, and sends what it reads.

    ``device`` is where the process group sends from; what is returned is on the CPU.
    Until it returns, each rank needs memory for the file and for what is in it.
    """
    memory = mmap.mmap(-1, on_rank0(os.path.getsize, path) or 1)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    with open(path if dist.get_rank() == 0 else os.devnull, "rb") as file:
        for part in data.split(2**26):  # nobody waits for more than 64 MB to be read
            file.readinto(part.numpy())
            sent = part.to(device)
            dist.broadcast(sent, src=0)
            part.copy_(sent)
    return load_file(path, memory)


# ---- Checkpoints: a folder counts when its files and its manifest are there


@contextmanager
def new_checkpoint(folder, step, keep=3):
    """A folder to write into, on every rank; a checkpoint at the end of the block.

    There, all ranks raise what one rank's disk did. So collectives come before files.
    """
    path, failed = begin(folder, step), ""
    try:
        yield path
    except (OSError, CheckpointError) as error:
        failed = str(error).splitlines()[0]
    commit(path, keep, failed)


def begin(folder, step, group=None):
    """Make the temporary folder of a checkpoint and return it, on every rank."""
    path = on_rank0(make_temporary, Path(folder), step, group=group)
    WRITTEN[path] = {}
    return path


def commit(path, keep=3, failed="", group=None):
    """Put ``begin``'s folder in its place, unless a rank failed; on every rank."""
    ranks = [(failed, WRITTEN[path])]  # names, lengths and hashes: nobody reads a file
    if dist.is_initialized():
        ranks *= dist.get_world_size()
        dist.all_gather_object(ranks, ranks[0], group=group)
    try:
        return on_rank0(put_in_place, path, ranks, keep, group=group)
    finally:
        del WRITTEN[path]


def on_rank0(function, *arguments, group=None):
    """Call a function on rank 0 only; what it returns or raises, on every rank."""
    outcome = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function(*arguments)
        except (CheckpointError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1]:
        raise outcome[1]
    return outcome[0]


def make_temporary(folder, step):
    path = folder / f".step_{step:08}.tmp"
    for left in folder.glob(".step_*"):  # by runs that were killed
        if left == path or left not in WRITTEN:  # not by a thread that still writes
            shutil.rmtree(left)
    for newer in finished(folder):
        if int(newer.name[5:]) >= step:
            if not damage(newer):
                raise CheckpointError(
                    f"{folder} holds {newer.name}, and step {step} is not newer.\n"
                    "Resume from it, or save to another folder."
                )
            forget(newer)
    path.mkdir(parents=True)
    return path


def put_in_place(path, ranks, keep):
    final, manifest = path.with_name(path.name[1:].removesuffix(".tmp")), {}
    try:
        for rank, (failed, files) in enumerate(ranks):
            if failed:
                raise CheckpointError(f"rank {rank}: {failed}")
            manifest |= files
        if unknown := set(os.listdir(path)) - set(manifest):
            raise CheckpointError(f"{min(unknown)} was not written with save_file")
        text = json.dumps(manifest, indent=1).encode()
        replace_file(path / MANIFEST, lambda file: file.write(text))
        rename(path, final)
    except (CheckpointError, OSError) as error:
        shutil.rmtree(path, ignore_errors=True)
        text = f"{final.name} was not saved: {error}\nThose before it are as they were."
        raise CheckpointError(text) from None
    for old in finished(final.parent)[: -max(keep, 1)]:
        forget(old)
    return final


def forget(path):  # under another name, for half of one must not count
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))


def finished(folder):
    """The checkpoints in a folder that count, the oldest first."""
    found = [path.parent for path in folder.glob(f"step_*/{MANIFEST}")]
    found = [path for path in found if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def damage(path):
    """What is wrong with the names and the lengths of a checkpoint's files, or ""."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        for name, (length, _) in manifest.items():
            size = (path / name).stat().st_size
            if size != length:
                return f"{path.name}/{name} has {size} bytes, and {length} were saved"
    except FileNotFoundError as error:
        return f"{path.name}/{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{path.name}/{MANIFEST} is damaged"
    return ""


def latest_good(folder):
    """The newest checkpoint whose files have their lengths, or None, on every rank."""
    return on_rank0(find_latest_good, Path(folder))


def find_latest_good(folder, damage=damage):
    """What ``latest_good`` does, on one rank; ``damage=damaged_bytes`` reads all."""
    if not folder.is_dir():
        text = f"There is no folder {folder}.\nCorrect its name, or: mkdir -p {folder}"
        raise CheckpointError(text)
    for path in reversed(found := finished(folder)):
        if not (problem := damage(path)):
            return path
        print0(f"skipped: {problem}")
    if found:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in {folder} is whole.\n"
            "Restore one from a copy, or start anew in another folder."
        )
    return None


def verify(path):
    """Raise CheckpointError unless each file has the bytes that were saved. Reads all.

    One process does it, with a thread for each file and no collective: on a terabyte,
    ranks that waited would time out. So run it before or beside a job.
    """
    if problem := damaged_bytes(Path(path)):
        raise CheckpointError(f"{problem}.\n{GO_BACK}")


def damaged_bytes(path):
    """What is wrong with a checkpoint, its files' bytes included, or ""."""
    if problem := damage(path):
        return problem
    manifest = json.loads((path / MANIFEST).read_bytes())
    with ThreadPoolExecutor() as threads:
        found = threads.map(sha256, [path / name for name in manifest])
        for (name, (_, digest)), is_now in zip(manifest.items(), found, strict=True):
            if is_now != digest:
                return f"{path.name}/{name} holds other bytes than were saved"
    return ""


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- DCP: slices of tensors, each written by the rank that has it


def save_sharded(state, path):
    """``dcp.save`` into a checkpoint's folder, on every rank."""
    try:
        dcp.save(state, storage_writer=hashing_writer(path))
    except dcp.CheckpointException as error:
        raise dcp_failed(path, error) from None


def hashing_writer(path):
    """DCP's own writer, whose files are hashed while they are written."""
    writer = dcp.FileSystemWriter(path)
    writer.fs = HashedFiles()
    return writer


class HashedFiles(FileSystem):
    """What DCP's writer opens and renames files with."""

    def create_stream(self, path, mode):
        return Hashed(path)

    def rename(self, path, new_path):
        rename(path, new_path)


def load_sharded(state, path):
    """``dcp.load`` into the tensors of ``state``, on every rank. Executes nothing.

    DCP trusts what it loads: its .metadata is a pickle, and so is each value that is
    not a tensor.
    """
    path = Path(path)
    on_rank0(check_metadata, path)
    try:
        dcp.load(state, checkpoint_id=str(path), planner=PlainValues())
    except dcp.CheckpointException as error:
        raise dcp_failed(path, error) from None


def dcp_failed(path, error):
    """What to raise for DCP's exception, which is not an Exception, in two lines."""
    rank, (reason, _) = next(iter(error.failures.items()))
    if isinstance(reason, pickle.UnpicklingError):
        return unreadable(path, reason)
    return CheckpointError(
        f"DCP, rank {rank}: {' '.join(str(reason).split())[:300]}\n"
        "To load, build model and optimizer as they were when they were saved."
    )


class PlainValues(dcp.DefaultLoadPlanner):
    """Loads what is not a tensor only if weights_only=True does."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)  # raises, where super() would execute
        value.seek(0)
        super().load_bytes(read_item, value)


class PlainMetadata(pickle.Unpickler):
    """Makes dataclasses of DCP, dtypes and paths: they hold values and do nothing."""

    known = r"torch(\.serialization|\.distributed\.checkpoint\..+)?|pathlib(\._local)?"

    def find_class(self, module, name):
        if re.fullmatch(self.known, module):
            found = super().find_class(module, name)
            layout = copyreg.dispatch_table[torch.layout](torch.strided)[0]
            if found in (torch.Size, layout) or isinstance(found, torch.dtype):
                return found
            if isinstance(found, type) and found.__module__ == module:
                if is_dataclass(found) or issubclass(found, (Enum, PurePath)):
                    return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def check_metadata(path):
    """Raise CheckpointError unless DCP's .metadata holds values and nothing else."""
    try:
        with open(path / ".metadata", "rb") as file:
            PlainMetadata(file).load()
    except Exception as error:  # damaged bytes can raise anything
        raise unreadable(path / ".metadata", error) from None


class BackgroundSaves:
    """Checkpoints written while training goes on, one at a time; made on every rank."""

    def __init__(self):
        # Two threads send: the writer's collectives and the steps' each need a group.
        self.writing = dist.new_group(backend="gloo")
        self.asking = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(1)
        self.saving = self.question = None

    def start(self, state, folder, step, keep=3):
        """Copy the tensors of ``state``, and return; on every rank."""
        if self.saving:
            raise CheckpointError("A save is still running.\nWait for finished().")
        path = begin(folder, step, self.writing)
        written = dcp.async_save(
            state, storage_writer=hashing_writer(path), process_group=self.writing
        )  # fmt: skip
        self.saving = self.thread.submit(self.finish, written, path, keep)

    def finish(self, written, path, keep):
        """The thread's part: wait for the files, then commit them."""
        failed = None
        try:
            written.result()
        except dcp.CheckpointException as error:
            failed = str(dcp_failed(path, error)).splitlines()[0]
        return commit(path, keep, failed, self.writing)

    def finished(self):
        """Call it once a step, on every rank: the new checkpoint's folder, in the same
        step on all of them, or None.

        The answer is the one to the question of the step before: nobody waits for it.
        """
        if self.question:
            work, done = self.question
            work.wait()
            self.question = None
            if done.item():
                saved, self.saving = self.saving, None
                return saved.result()
        if self.saving:
            done = torch.tensor(int(self.saving.done()))
            work = dist.all_reduce(done, dist.ReduceOp.MIN, self.asking, async_op=True)
            self.question = work, done
        return None

    def wait(self):
        """Wait for the save that runs, if any, on every rank: when training ends."""
        while self.saving and not self.finished():
            wait_for([self.saving])
