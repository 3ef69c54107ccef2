"""Checkpoints that a kill cannot destroy: folders of torch.save's and DCP's own files, each with a checksum.

Run-time module: what a chapter uses from here is copied into its exported script. One job at a time writes to a
folder, on a disk that all ranks see; functions that say "on every rank" let rank 0 decide, and all ranks agree.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from helpers.runtime.process_group import print0

MANIFEST = "manifest.json"  # written last: {file: [bytes, sha256]} of all others
DCP_TYPES = {  # all that a DCP checkpoint's .metadata is made of, besides torch's dtypes and a path
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.distributed.checkpoint.metadata": [
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ],
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, is damaged or is not safe to load; nothing of it was executed."""


def save_file(state, path):
    """``torch.save`` that leaves the old file or the whole new one at ``path``, whenever it is interrupted."""
    replace_file(path, lambda file: torch.save(state, file))


def load_file(path):
    """What ``save_file`` wrote, on the CPU, read as it is used. Raises CheckpointError, and executes nothing."""
    path = Path(path)
    name = f"{path.parent.name}/{path.name}"
    if not path.is_file():
        raise CheckpointError(f"There is no file {name}.\nlatest_good(folder) finds a checkpoint that is whole.")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{name} is truncated, or no file of torch.save; nothing was loaded.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes can raise anything
        refuse_code(name, error)
        raise CheckpointError(
            f"{name} is damaged: torch.load raised {type(error).__name__}.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        ) from None


def refuse_code(name, error):
    """Raise CheckpointError if ``error`` is weights_only's refusal to execute what a file asks for."""
    asked = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    if asked:
        raise CheckpointError(
            f"{name} asks for {asked[1]}, which was not executed.\n"
            "Save state_dicts and plain values only, and load no file from someone you do not trust."
        ) from None


def load_sharded(state, path):
    """``dcp.load`` into ``state``, on every rank. Raises CheckpointError, and executes nothing.

    DCP itself trusts what it loads: its .metadata is a pickle, and so is each value that is no tensor.
    """
    path = Path(path)
    on_rank0(check_dcp_metadata, path)
    try:
        dcp.load(state, checkpoint_id=str(path), planner=PlainValues())
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        refuse_code(path.name, reason)
        raise CheckpointError(
            f"{path.name} cannot be loaded: {' '.join(str(reason).split())[:300]}\n"
            "Build model and optimizer as they were when it was saved, and check the files with verify(path)."
        ) from None


@contextmanager
def new_checkpoint(folder, step, keep=3):
    """A folder to write one checkpoint into, on every rank; it counts once the ``with`` block has ended everywhere."""
    path = begin(folder, step)
    yield path
    commit(path, keep)


def begin(folder, step):
    """Make the temporary folder of the checkpoint of ``step`` and return it, on every rank.

    Raises CheckpointError if the folder holds a good checkpoint as new as that, of another run.
    """
    return on_rank0(make_temporary, Path(folder), step)


def commit(path, keep=3):
    """Put what was written to ``begin``'s folder in place, keep the ``keep`` newest; return its name, on every rank."""
    if dist.is_initialized():
        dist.barrier()  # every rank has written its files
    return on_rank0(put_in_place, Path(path), keep)


def latest_good(folder):
    """The newest checkpoint that verifies, or None in a folder without checkpoints; the same on every rank.

    Raises CheckpointError if there is no such folder, and if there are checkpoints of which none is good.
    """
    return on_rank0(find_latest_good, Path(folder))


def verify(path):
    """Raise CheckpointError unless every file of the checkpoint has the length and the checksum of its manifest."""
    path = Path(path)
    try:
        files = json.loads((path / MANIFEST).read_bytes())
        files = {path / name: (length, digest) for name, (length, digest) in files.items()}
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is no finished checkpoint: it has no {MANIFEST}.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        ) from None
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError(
            f"{path.name}/{MANIFEST} is damaged, so nothing can be verified.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        ) from None
    for file, (length, digest) in files.items():
        name = f"{path.name}/{file.name}"
        if not file.is_file():
            raise CheckpointError(f"{name} is missing.\nlatest_good(folder) finds a checkpoint that is whole.")
        if file.stat().st_size != length:
            raise CheckpointError(
                f"{name} has {file.stat().st_size} bytes, and {length} were saved: it is truncated or overwritten.\n"
                "latest_good(folder) finds a checkpoint that is whole."
            )
        if sha256(file) != digest:
            raise CheckpointError(
                f"{name} holds other bytes than were saved: its checksum differs.\n"
                "latest_good(folder) finds a checkpoint that is whole."
            )


# ---- What rank 0 does


def on_rank0(function, *arguments):
    """Call a function on rank 0 only; return what it returned, or raise what it raised, on every rank."""
    outcome = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = function(*arguments)
        except (CheckpointError, OSError) as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def make_temporary(folder, step):
    """The empty folder ``.step_….tmp``; what killed runs left is removed."""
    name = f"step_{step:08}"
    for left in [*folder.glob(".step_*.tmp"), *folder.glob(".step_*.old")]:
        shutil.rmtree(left)
    for newer in reversed([path for path in finished(folder) if path.name >= name]):
        try:
            verify(newer)
        except CheckpointError:
            forget(newer)
        else:
            raise CheckpointError(
                f"{folder} holds {newer.name} already, and step {step} is not newer.\n"
                "Resume from it, or save to another folder."
            )
    if (folder / name).exists():
        raise CheckpointError(f"{folder}/{name} is no checkpoint of this module.\nSave to another folder.")
    path = folder / f".{name}.tmp"
    path.mkdir(parents=True)
    return path


def put_in_place(path, keep):
    """From ``.step_….tmp`` to ``step_…``: sync every file, write the manifest, rename, forget the oldest."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        sync(file)
    manifest = {file.relative_to(path).as_posix(): [file.stat().st_size, sha256(file)] for file in files}
    replace_file(path / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))
    final = path.with_name(path.name.removeprefix(".").removesuffix(".tmp"))
    os.rename(path, final)
    sync(final.parent)
    for old in finished(final.parent)[: -max(keep, 1)]:
        forget(old)
    return final


def forget(path):
    """Remove a checkpoint, under another name: one that is half removed does not count."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old")))


def find_latest_good(folder):
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder}.\nCorrect its name, or make it: mkdir -p {folder}")
    found = finished(folder)
    for path in reversed(found):
        try:
            verify(path)
            return path
        except CheckpointError as error:
            print0(f"skipped: {str(error).splitlines()[0]}")
    if found:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in {folder} is whole.\n"
            "Restore one from a copy, or start anew in another folder."
        )
    return None


def finished(folder):
    """The checkpoints in a folder that were put in place, the oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / MANIFEST).is_file())


# ---- Files


def replace_file(path, write):
    """Call ``write(file)`` on a temporary file beside ``path``; put it in place when all of it is on the disk."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    with open(part, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def sync(path):
    """Wait until a file, or a folder's list of names, is on the disk and not in memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path):
    """The checksum of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- What DCP would execute


class PlainValues(dcp.DefaultLoadPlanner):
    """Loads what is no tensor only if weights_only=True does."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)  # raises, where the line after next would execute
        value.seek(0)
        super().load_bytes(read_item, value)


class DCPMetadata(pickle.Unpickler):
    """An unpickler that knows DCP's own types and nothing else."""

    def find_class(self, module, name):
        plain = name in DCP_TYPES.get(module, [])
        plain = plain or module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        plain = plain or module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath")
        if not plain:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


def check_dcp_metadata(path):
    """Raise CheckpointError unless the .metadata of a DCP checkpoint is what DCP writes."""
    try:
        with open(path / ".metadata", "rb") as file:
            DCPMetadata(file).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} is no checkpoint of DCP: it has no .metadata.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        ) from None
    except Exception as error:  # damaged bytes can raise anything
        refuse_code(f"{path.name}/.metadata", error)
        raise CheckpointError(
            f"{path.name}/.metadata is damaged: unpickling raised {type(error).__name__}.\n"
            "latest_good(folder) finds a checkpoint that is whole."
        ) from None
