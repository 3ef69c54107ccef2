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

SECONDS_BEFORE_FIRST = 2  # A call that takes less time shows no line.
SECONDS_BETWEEN_UPDATES = 1
WIDTH_IN_NOTEBOOK = 100  # characters of the line
BYTES_TO_SEARCH = 4096  # The newest line of a rank is looked for in so many bytes at the end of its output.
SHORTEST_GROUP = 20  # characters that each different line gets at least, however many there are
# What programs write to a terminal to set a colour or to move the cursor, such as "\x1b[1;31m".
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# What a terminal does at these characters (https://invisible-island.net/xterm/ctlseqs/ctlseqs.html):
ERASE_LINE = "\x1b[K"  # from the cursor to the end of the line
SAVE_CURSOR = "\x1b7"
RESTORE_CURSOR = "\x1b8"
DO_NOT_WRAP = "\x1b[?7l"  # what does not fit into the line is not shown
WRAP = "\x1b[?7h"


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
        write(f"{ERASE_LINE}{SAVE_CURSOR}{DO_NOT_WRAP}{text}{WRAP}{RESTORE_CURSOR}")

    def erase(self) -> None:
        write(ERASE_LINE)


class JupyterLab:
    """A cell's output in JupyterLab, which removes a character for each backspace, also from what it will store."""

    width = WIDTH_IN_NOTEBOOK

    def __init__(self) -> None:
        self.shown_characters = 0

    def show(self, text: str) -> None:
        write("\b" * self.shown_characters + text)
        self.shown_characters = len(text)

    def erase(self) -> None:
        write("\b" * self.shown_characters)
        self.shown_characters = 0


def write(text: str) -> None:
    """Write to standard output at once, and without a newline."""
    sys.stdout.write(text)
    sys.stdout.flush()


def find_screen() -> Screen | None:
    """Where to show the line: in the terminal or the JupyterLab that a person watches.

    Returns None if nobody watches, or if the line could not be erased, as in a file, in a pipe or in another frontend.
    """
    if threading.current_thread() is not threading.main_thread():
        return None  # several calls at once would erase each other's lines
    if not hasattr(sys.stdout, "isatty"):
        return None  # somebody has replaced it by an object that can be written to, and no more
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
    """Whether a person runs the current cell in JupyterLab, which handles backspaces.

    ``request`` is the message that asked the kernel to run the cell. If nbclient or nbval sent it, it says that nobody
    can answer a question of the cell. Only JupyterLab's notebooks list in it the cells that were deleted.
    """
    somebody_can_answer: bool = request.get("content", {}).get("allow_stdin", False)
    return somebody_can_answer and "deletedCells" in request.get("metadata", {})


class LiveLine:
    """The newest lines of the ranks whose outputs are in ``folder``, on the screen for as long as the ranks run."""

    def __init__(self, folder: Path, nproc: int) -> None:
        """Nothing is on the screen before the first update, so that a short run shows no line at all."""
        self.folder = folder
        self.nproc = nproc
        self.start = time.monotonic()
        self.next_update = self.start + SECONDS_BEFORE_FIRST  # when it is due, by time.monotonic()
        self.screen: Screen | None = None
        self.shown = False

    def is_due(self) -> bool:
        """Whether it is time to call ``update``."""
        return time.monotonic() >= self.next_update

    def update(self) -> None:
        """Write the line anew. If nobody watches, nothing is written, and no further update is due."""
        if self.screen is None:
            self.screen = find_screen()
        if self.screen is None:
            self.next_update = math.inf
            return
        self.next_update = time.monotonic() + SECONDS_BETWEEN_UPDATES
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
    """The last line of a rank's output that has a visible character, or "".

    A progress bar overwrites its line, so the latest version of the bar comes after a carriage return.
    """
    try:
        text = end_of_file(output, BYTES_TO_SEARCH).decode("utf-8", errors="replace")
    except FileNotFoundError:  # the rank has not come so far
        return ""
    plain = ESCAPES.sub("", tidy(text))
    for line in reversed(re.split(r"[\r\n]+", plain)):
        if line.strip():
            return line.strip()
    return ""


def compose(seconds: float, newest: Mapping[int, str], width: int) -> str:
    """The line that is shown after so many seconds, such as ``5 s  [ranks 0-1] step 3  [rank 2] step 2``.

    ``newest`` is {rank: its newest line}. Ranks with the same newest line are one group: ``[ranks 0-1] step 3``. The
    line has at most ``width`` characters, of which each group gets the same share.
    """
    separator = "  "
    time_text = f"{seconds:.0f} s"
    ranks_of_line = ranks_by_line(newest)
    width_of_group = (width - len(time_text)) // len(ranks_of_line) - len(separator)
    width_of_group = max(SHORTEST_GROUP, width_of_group)
    parts = [time_text]
    for line, ranks in ranks_of_line.items():
        group = f"[{label(ranks)}] {line}"
        parts.append(shorten(group, width_of_group))
    return separator.join(parts)[:width]


def shorten(text: str, width: int) -> str:
    """The text with at most ``width`` characters, each of which can be erased by one backspace.

    So a tab, a control character, or one beyond U+FFFF, such as an emoji, which JupyterLab counts as two, becomes "?".
    """
    plain = ""
    for character in text:
        if character.isprintable() and character <= "\uffff":
            plain += character
        else:
            plain += "?"
    if len(plain) <= width:
        return plain
    return plain[: width - 1] + "…"
