"""What a rehearsal counts for each line of the script: waits for the GPU, copies and collectives; and its steps."""

import contextlib
import os
import site
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path

LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    | {*site.getsitepackages(), str(Path(__file__).parents[1])}
)

# Kinds of events. At a wait, and at a blocking upload, the host stops until the GPU has done all its work.
WAIT, UPLOAD, COPY, COLLECTIVE = "wait", "upload", "copy", "collective"


class Counts:
    """One rank's events: how often each came, how many bytes it moved, and how often between two optimizer steps."""

    def __init__(self):
        self.events = Counter()
        self.bytes = Counter()
        self.steps = Counter()
        self.marks = []  # a copy of `events` at each optimizer step
        self.refusals = []
        self.quiet = threading.local()

    def add(self, kind, what, size=0):
        """Count one event at the line of the script that is running now."""
        if getattr(self.quiet, "depth", 0):
            return
        event = (script_line(), kind, what)
        self.events[event] += 1
        self.bytes[event] += size

    @contextlib.contextmanager
    def paused(self):
        """Count nothing inside the block, which is the rehearsal's own work."""
        self.quiet.depth = getattr(self.quiet, "depth", 0) + 1
        try:
            yield
        finally:
            self.quiet.depth -= 1

    def count_step(self, optimizer, args, kwargs):
        """A hook that every optimizer calls at a step. With several optimizers, the steps of the busiest one count."""
        self.steps[id(optimizer)] += 1
        if self.steps[id(optimizer)] == len(self.marks) + 1:
            self.marks.append(Counter(self.events))

    def refuse(self, error):
        """Note an error that a GPU or NCCL would raise, with the script's line; return the error, for ``raise``."""
        self.refusals.append({"line": script_line(), "error": f"{type(error).__name__}: {error}"})
        return error

    def table(self):
        """All events as dicts, sorted by line. ``per_step`` is the mean from the first optimizer step to the last."""
        steady = max(len(self.marks) - 1, 0)
        rows = []
        for event, count in sorted(self.events.items()):
            line, kind, what = event
            inside = self.marks[-1][event] - self.marks[0][event] if steady else 0
            row = {"line": line, "kind": kind, "what": what, "count": count, "bytes": self.bytes[event]}
            rows.append(row | {"in_steps": inside, "per_step": inside / steady if steady else 0.0})
        return rows


def script_line():
    """``name.py:LINE`` of the innermost running line outside of libraries: in the script or in a module of its own."""
    frame = sys._getframe(1)
    while frame:
        name = frame.f_code.co_filename
        if not name.startswith((*LIBRARIES, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


COUNTS = Counts()
