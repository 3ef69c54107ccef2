"""What is counted for each line of a script, on real and on simulated GPUs: waits, copies, collectives, and steps."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from helpers.ranks.rank import LIBRARIES

PACKAGE = str(Path(__file__).parent)

# Kinds of events. At a wait, and at a blocking upload, the host stops until the GPU has done all its work.
WAIT = "wait"
UPLOAD = "upload"
COPY = "copy"
COLLECTIVE = "collective"

# What torch says at a wait, as a warning or an error, if a script has asked for it by torch.cuda.set_sync_debug_mode.
SYNC = "called a synchronizing CUDA operation"
NOT_PINNED = "to the GPU, not pinned"  # a copy that blocks in spite of non_blocking=True
SILENT = {"cuda.synchronize", "event.synchronize", NOT_PINNED}  # waits of which torch does not warn
# The numbers by which torch knows the modes of set_sync_debug_mode. In mode 1 it warns.
DEBUG_MODE_OFF = 0
DEBUG_MODE_ERROR = 2


class Event(NamedTuple):
    """Something that happens at a line of the script, such as ``Event("train.py:42", WAIT, "item()")``."""

    line: str
    kind: str  # one of the kinds above
    what: str  # what the operation is called


@dataclass(frozen=True)
class Row:
    """An event of one rank with its counts: a line of the tables of `rehearse` and of the run on GPUs."""

    line: str
    kind: str
    what: str
    count: int  # in the whole run
    bytes: int  # in the whole run
    in_steps: int  # the count between the first optimizer step and the last
    per_step: float  # its mean for a step


@dataclass(frozen=True)
class Refusal:
    """An error that a GPU or NCCL would raise, and the script's line."""

    line: str
    error: str


def frame_outside(*folders: str, start: FrameType | None = None) -> FrameType | None:
    """The innermost running frame whose file is in none of these folders, or None if there is no such frame.

    For example, the line of the script that called a function of torch, if the folder is that of torch. The search goes
    outwards from ``start``, or from the caller of this function if ``start`` is None.
    """
    frame: FrameType | None = start or sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame


def script_line(start: FrameType | None = None) -> str:
    """``name.py:LINE`` of the innermost running line outside of libraries: in the script or in a module of its own."""
    frame = frame_outside(*LIBRARIES, PACKAGE, "<", start=start)
    if frame is None:
        return "?"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


class Counts:
    """One rank's events: how often each happens, how many bytes it moves, and how often between two optimizer steps."""

    def __init__(self, line: Callable[[], str] = script_line) -> None:
        """``line`` is called at each event, and returns the line of the script that is running then."""
        self.current_line = line
        self.sync_debug_mode = DEBUG_MODE_OFF  # what the script has passed to torch.cuda.set_sync_debug_mode
        self.events: Counter[Event] = Counter()  # how often each event has happened
        self.bytes: Counter[Event] = Counter()  # how many bytes each event has moved, in all
        self.steps_of_optimizer: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.events_at_step: list[Counter[Event]] = []  # a copy of `events` at each training step
        self.refusals: list[Refusal] = []

    def count(self, kind: str, what: str, size: int = 0) -> None:
        """Count one event, of ``size`` bytes, at the line of the script that is running now."""
        event = Event(self.current_line(), kind, what)
        self.events[event] += 1
        self.bytes[event] += size
        is_wait = kind in (WAIT, UPLOAD)
        if is_wait and self.sync_debug_mode != DEBUG_MODE_OFF and what not in SILENT:
            self.report_wait(event)

    def report_wait(self, event: Event) -> None:
        """Warn of a wait, or raise for it, as torch does in the mode that torch.cuda.set_sync_debug_mode has set."""
        if self.sync_debug_mode == DEBUG_MODE_ERROR:
            raise self.refuse(SYNC)
        file, _, number = event.line.rpartition(":")
        if not number.isdecimal():  # the line is unknown, "?"
            number = "0"
        warnings.warn_explicit(SYNC, UserWarning, file, int(number))

    def count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Keep a copy of the counts so far, once for each training step. torch calls this after each optimizer's step.

        A training step may step several optimizers. So a copy is made only when an optimizer has made more steps than
        there are copies.
        """
        steps = self.steps_of_optimizer.get(optimizer, 0) + 1
        self.steps_of_optimizer[optimizer] = steps
        is_new_training_step = steps > len(self.events_at_step)
        if is_new_training_step:
            self.events_at_step.append(Counter(self.events))

    def refuse(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        """Note an error that a GPU or NCCL would raise, with the script's line. Returns the error, for ``raise``."""
        self.refusals.append(Refusal(self.current_line(), f"{kind.__name__}: {message}"))
        return kind(message)

    def rows(self) -> list[Row]:
        """All events with their counts, sorted by the line of the script at which they happen."""
        # The first step warms up, so what happens before its end is not counted for the mean of a step.
        steps_after_the_first = len(self.events_at_step) - 1
        rows = []
        for event, count in sorted(self.events.items()):
            count_in_steps = 0
            mean_per_step = 0.0
            if steps_after_the_first > 0:
                count_until_first_step = self.events_at_step[0][event]
                count_until_last_step = self.events_at_step[-1][event]
                count_in_steps = count_until_last_step - count_until_first_step
                mean_per_step = count_in_steps / steps_after_the_first
            row = Row(
                line=event.line,
                kind=event.kind,
                what=event.what,
                count=count,
                bytes=self.bytes[event],
                in_steps=count_in_steps,
                per_step=mean_per_step,
            )
            rows.append(row)
        return rows


COUNTS = Counts()  # those of this process, which is one rank
