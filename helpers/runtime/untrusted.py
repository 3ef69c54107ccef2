"""DCP checkpoints of strangers, loaded without executing any code that is in them.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

import copyreg
import pickle
import re
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp

from helpers.runtime.checkpoint import CheckpointError, on_rank0


def load_untrusted(state, path):
    """``dcp.load`` into the tensors of ``state``, on every rank. Executes nothing.

    DCP trusts what it loads: .metadata and each value that is not a tensor are pickles.
    Raises CheckpointError where one of them is damaged, or asks for code.
    """
    path = Path(path)
    on_rank0(check_metadata, path)
    try:
        dcp.load(state, checkpoint_id=str(path), planner=PlainValues())
    except dcp.CheckpointException as error:  # which is not an Exception
        reason, _ = next(iter(error.failures.values()))
        if isinstance(reason, pickle.UnpicklingError):
            raise refused(path, reason) from None
        raise


def refused(path, error):
    """The CheckpointError for a file whose unpickling ended with ``error``."""
    asked = re.search(r"GLOBAL (\S+)", str(error))
    why = f"asks for {asked[1]}, which was not executed" if asked else "is damaged"
    return CheckpointError(f"{path} {why}.\nUse a checkpoint that you trust.")


class PlainValues(dcp.DefaultLoadPlanner):
    """Loads a value that is not a tensor only if weights_only=True allows it."""

    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)  # raises before super() executes anything
        value.seek(0)
        super().load_bytes(read_item, value)


class PlainMetadata(pickle.Unpickler):
    """Builds DCP's dataclasses, dtypes and paths alone: they only hold values."""

    known = r"torch(\.serialization|\.distributed\.checkpoint\..+)?|pathlib(\._local)?"

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return self.member
        if re.fullmatch(self.known, module):
            found = super().find_class(module, name)
            layout = copyreg.dispatch_table[torch.layout](torch.strided)[0]
            if found in (torch.Size, layout) or isinstance(found, torch.dtype):
                return found
            if isinstance(found, type) and found.__module__ == module:
                if is_dataclass(found) or issubclass(found, (Enum, PurePath)):
                    return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")

    @staticmethod
    def member(kind, name):
        """getattr as Python 3.11.2 pickles an enum's member with it, and no more."""
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind[name]
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")


def check_metadata(path):
    """Raise CheckpointError unless DCP's .metadata holds values and nothing else."""
    try:
        with open(path / ".metadata", "rb") as file:
            PlainMetadata(file).load()
    except FileNotFoundError:
        raise
    except Exception as error:  # damaged bytes can raise anything
        raise refused(path / ".metadata", error) from None
