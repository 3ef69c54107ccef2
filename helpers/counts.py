"""What is counted for each line of a script, on real and on pretended GPUs: waits, copies, collectives, and steps."""

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

SYNC = "called a synchronizing CUDA operation"  # torch's message for a wait, if set_sync_debug_mode asked for messages
NOT_PINNED = "to the GPU, not pinned"  # a copy that blocks in spite of non_blocking=True
SILENT = {"cuda.synchronize", "event.synchronize", NOT_PINNED}  # waits for which torch has no such message


class Event(NamedTuple):
    """Something that happens at a line of the script."""

    line: str  # name.py:LINE
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
    """The innermost running frame whose file is in none of these folders: the line that called what is in them.

    The search goes outwards from ``start``, or else from the caller of this function. None if no frame is outside.
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
        """``line`` says at which line of the script an event happens: it is called at each."""
        self.line = line
        self.sync_debug_mode = 0  # 1: warn, 2: raise
        self.events: Counter[Event] = Counter()
        self.bytes: Counter[Event] = Counter()
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # of each optimizer
        self.events_at_step: list[Counter[Event]] = []  # a copy of `events` at each optimizer step
        self.refusals: list[Refusal] = []

    def count(self, kind: str, what: str, size: int = 0) -> None:
        """Count one event, of ``size`` bytes, at the line of the script that is running now."""
        event = Event(self.line(), kind, what)
        self.events[event] += 1
        self.bytes[event] += size
        is_wait = kind in (WAIT, UPLOAD)
        if is_wait and self.sync_debug_mode != 0 and what not in SILENT:
            self.report_wait(event)

    def report_wait(self, event: Event) -> None:
        """Warn of a wait, or raise for it, as torch does in the mode that torch.cuda.set_sync_debug_mode has set."""
        if self.sync_debug_mode == 2:
            raise self.refuse(SYNC)
        file, _, number = event.line.rpartition(":")  # an unknown line, "?", has no number
        warnings.warn_explicit(SYNC, UserWarning, file, int(number or 0))

    def count_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note the counts so far at a training step. This is a hook that torch calls after each optimizer's step.

        A training step may step several optimizers. Only the one that has made the most steps begins a new one here.
        """
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        is_new_training_step = self.steps[optimizer] > len(self.events_at_step)
        if is_new_training_step:
            self.events_at_step.append(Counter(self.events))

    def refuse(self, message: str, kind: type[Exception] = RuntimeError) -> Exception:
        """Note an error that a GPU or NCCL would raise, with the script's line; return the error, for ``raise``."""
        self.refusals.append(Refusal(self.line(), f"{kind.__name__}: {message}"))
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
