"""What is seen of a long call while it runs: one line with its ranks' newest lines, which is erased before the end.

What a notebook stores has to stay the same, whoever runs it. So the line is only written where a person watches, and
where what was written can be taken back: in a terminal, and in JupyterLab. nbclient, nbval, other frontends and pipes
get nothing of it.
"""

import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from helpers.ranks.collecting import end_of_file
from helpers.ranks.messages import label, ranks_by_line, tidy

AFTER = 2  # seconds after which a call shows its line
EVERY = 1  # seconds between two versions of the line
WIDTH = 100  # characters of the line in a notebook
TAIL = 4096  # bytes at the end of a rank's output in which its newest line is looked for
SHORTEST_GROUP = 20  # characters that each different line gets at least, however many there are
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements of the cursor


class Screen(Protocol):
    """Where a line can be shown, and be erased again."""

    width: int  # characters

    def show(self, text: str) -> None: ...

    def erase(self) -> None: ...


class Terminal:
    """A terminal. Its cursor goes back to where it was, so that the next output overwrites the line."""

    def __init__(self) -> None:
        self.width = shutil.get_terminal_size().columns - 1

    def show(self, text: str) -> None:
        # Erase to the end of the line; save the cursor, do not wrap; wrap again, restore the cursor.
        write(f"\x1b[K\x1b7\x1b[?7l{text}\x1b[?7h\x1b8")

    def erase(self) -> None:
        write("\x1b[K")


class JupyterLab:
    """A cell's output in JupyterLab, which removes a character for each backspace, also from what it will store."""

    width = WIDTH

    def __init__(self) -> None:
        self.shown = 0  # characters

    def show(self, text: str) -> None:
        write("\b" * self.shown + text)
        self.shown = len(text)

    def erase(self) -> None:
        write("\b" * self.shown)
        self.shown = 0


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def find_screen() -> Screen | None:
    """The screen that a person watches, or None where nobody does, or where a line could not be taken back."""
    if threading.current_thread() is not threading.main_thread():
        return None  # several calls at once would erase each other's lines
    if not hasattr(sys.stdout, "isatty"):
        return None  # it was replaced by something that is less than a file
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return Terminal()
    if type(sys.stdout).__module__ == "ipykernel.iostream" and is_jupyterlab(executed_request()):
        return JupyterLab()
    return None


def executed_request() -> Mapping[str, Any]:
    """The message that asked this kernel to run the current cell; empty outside a kernel."""
    from IPython import get_ipython  # here: a plain script does without IPython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "get_parent"):
        return {}
    request: Mapping[str, Any] = shell.get_parent()
    return request


def is_jupyterlab(request: Mapping[str, Any]) -> bool:
    """Whether a person asked for this execution in JupyterLab, which handles backspaces.

    nbclient and nbval tell the kernel that nobody can answer a question, and only JupyterLab's notebooks send the
    cells that were deleted.
    """
    somebody_can_answer: bool = request.get("content", {}).get("allow_stdin", False)
    return somebody_can_answer and "deletedCells" in request.get("metadata", {})


class LiveLine:
    """The newest lines of the ranks whose outputs are in ``folder``, on the screen for as long as the ranks run."""

    def __init__(self, folder: Path, nproc: int) -> None:
        self.folder = folder
        self.nproc = nproc
        self.start = time.monotonic()
        self.due = self.start + AFTER  # the time of the next update, by time.monotonic()
        self.screen: Screen | None = None
        self.shown = False

    def is_due(self) -> bool:
        return time.monotonic() >= self.due

    def update(self) -> None:
        """Write the line anew. Where nobody watches, no further update is due."""
        if self.screen is None:
            self.screen = find_screen()
        if self.screen is None:
            self.due = math.inf
            return
        self.due = time.monotonic() + EVERY
        newest = {rank: newest_line(self.folder / f"output{rank}") for rank in range(self.nproc)}
        printed = {rank: line for rank, line in newest.items() if line}
        # JupyterLab would store an empty output for a call that prints nothing. Ranks that printed leave one anyway.
        if printed:
            self.shown = True
            self.screen.show(compose(time.monotonic() - self.start, printed, self.screen.width))

    def erase(self) -> None:
        """Take the line back, before what follows is printed in its place."""
        if self.screen is not None and self.shown:
            self.screen.erase()


def newest_line(output: Path) -> str:
    """The last line of a rank's output that has a visible character, or ""."""
    try:
        text = end_of_file(output, TAIL).decode("utf-8", errors="replace")
    except FileNotFoundError:  # the rank has not come so far
        return ""
    lines = re.split(r"[\r\n]+", ESCAPES.sub("", tidy(text)))  # a progress bar separates its versions by \r
    visible = [line.strip() for line in lines if line.strip()]
    if not visible:
        return ""
    return visible[-1]


def compose(seconds: float, newest: Mapping[int, str], width: int) -> str:
    """``5 s  [ranks 0-1] step 3  [rank 2] step 2`` for {rank: its newest line}, with at most ``width`` characters."""
    separator = "  "
    time_text = f"{seconds:.0f} s"
    ranks_of_line = ranks_by_line(newest)
    width_of_line = (width - len(time_text)) // len(ranks_of_line) - len(separator)
    parts = [time_text]
    for line, ranks in ranks_of_line.items():
        parts.append(shorten(f"[{label(ranks)}] {line}", max(SHORTEST_GROUP, width_of_line)))
    return separator.join(parts)[:width]


def shorten(text: str, width: int) -> str:
    """The text with at most ``width`` characters, each of which takes one column and one backspace."""
    plain = ""
    for character in text:
        if character.isprintable() and character <= "\uffff":
            plain += character
        else:
            plain += "?"
    if len(plain) <= width:
        return plain
    return plain[: width - 1] + "…"
