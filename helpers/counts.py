"""What is counted for each line of a script, on real and on pretended GPUs: waits, copies, collectives, and steps."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from helpers.ranks.rank import LIBRARIES

PACKAGE = str(Path(__file__).parent)

# Kinds of events. At a wait, and at a blocking upload, the host stops until the GPU has done all its work.
WAIT, UPLOAD, COPY, COLLECTIVE = "wait", "upload", "copy", "collective"

SYNC = "called a synchronizing CUDA operation"  # what torch says in the mode of torch.cuda.set_sync_debug_mode
NOT_PINNED = "to the GPU, not pinned"  # a copy with non_blocking=True that waits all the same
SILENT = {"cuda.synchronize", "event.synchronize", NOT_PINNED}  # waits of which torch's mode says nothing

Event = tuple[str, str, str]  # the line as name.py:LINE, a kind such as WAIT, and what the operation is called


@dataclass(frozen=True)
class Row:
    """An event with its counts. ``per_step`` is the mean from the first optimizer step to the last."""

    line: str
    kind: str
    what: str
    count: int
    bytes: int
    in_steps: int
    per_step: float


@dataclass(frozen=True)
class Refusal:
    """An error that a GPU or NCCL would raise, and the script's line."""

    line: str
    error: str


class Counts:
    """One rank's events: how often each came, how many bytes it moved, and how often between two optimizer steps."""

    def __init__(self, line: "Callable[[], str] | None" = None) -> None:
        self.line = line or script_line
        self.sync_debug_mode = 0  # 1: warn, 2: raise
        self.events: Counter[Event] = Counter()
        self.bytes: Counter[Event] = Counter()
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of each optimizer
        self.marks: list[Counter[Event]] = []  # a copy of `events` at each optimizer step
        self.refusals: list[Refusal] = []

    def add(self, kind: str, what: str, size: int = 0) -> None:
        """Count one event, of ``size`` bytes, at the line of the script that is running now."""
        event = (self.line(), kind, what)
        self.events[event] += 1
        self.bytes[event] += size
        if self.sync_debug_mode and kind in (WAIT, UPLOAD) and what not in SILENT:
            if self.sync_debug_mode == 2:
                raise self.refuse(SYNC)
            file, _, number = event[0].rpartition(":")
            warnings.warn_explicit(SYNC, UserWarning, file, int(number or 0))

    def count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """A hook that every optimizer calls at a step. With several optimizers, the steps of the busiest one count."""
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if self.steps[optimizer] > len(self.marks):
            self.marks.append(Counter(self.events))

    def refuse(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        """Note an error that a GPU or NCCL would raise, with the script's line; return the error, for ``raise``."""
        self.refusals.append(Refusal(self.line(), f"{kind.__name__}: {message}"))
        return kind(message)

    def rows(self) -> list[Row]:
        """All events with their counts, sorted by line."""
        steps = max(len(self.marks) - 1, 0)
        rows = []
        for event, count in sorted(self.events.items()):
            inside = self.marks[-1][event] - self.marks[0][event] if steps else 0
            mean = inside / steps if steps else 0.0
            rows.append(Row(*event, count, self.bytes[event], inside, mean))
        return rows


def frame_outside(*places: str, start: FrameType | None = None) -> FrameType | None:
    """The innermost running frame whose file lies in none of these places: the caller, without the code in them."""
    frame: FrameType | None = start or sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame


def script_line(start: FrameType | None = None) -> str:
    """``name.py:LINE`` of the innermost running line outside of libraries: in the script or in a module of its own."""
    frame = frame_outside(*LIBRARIES, PACKAGE, "<", start=start)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"


COUNTS = Counts()
