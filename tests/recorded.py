"""Transcripts that the book's pages show: what a test saw, compared with ``book/recorded/NAME.txt``.

A file begins with comment lines, the command that makes it and the versions that it was made with, and an empty line.
With ``UPDATE_RECORDED=1`` in the environment a test writes its file instead of comparing it.
"""

import difflib
import os
import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "book" / "recorded"


def compare(name, text, command, varying=(), **versions):
    """Fail with a difference where a transcript is not the recorded one, but for what ``varying`` matches in both.

    The caller puts words in the place of what must not be on a page: folders, process ids, names of this machine. What
    may be there and differs from run to run (times, ports, job ids) is named by the regular expressions ``varying``.
    ``versions`` are of other programs than torch: ``slurm="22.05.8"``.
    """
    path = FOLDER / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"
    if os.environ.get("UPDATE_RECORDED") == "1":
        versions = {"torch": torch.__version__.partition("+")[0], **versions}
        made_with = ", ".join(f"{program} {version}" for program, version in versions.items())
        FOLDER.mkdir(exist_ok=True)
        path.write_text(f"# Recorded by: {command}\n# With: {made_with}\n\n{text}")
        return
    if not path.is_file():
        raise AssertionError(f"There is no book/recorded/{path.name}: write it with UPDATE_RECORDED=1 {command}")
    before, now = masked(body(path), varying), masked(text, varying)
    if before != now:
        lines = difflib.unified_diff(
            before.splitlines(), now.splitlines(), f"book/recorded/{path.name}", "now", lineterm=""
        )
        raise AssertionError("\n".join([*lines, f"If that is right: UPDATE_RECORDED=1 {command}"]))


def body(path):
    """What is recorded in a file, without the comment lines at its head."""
    return path.read_text().partition("\n\n")[2]


def masked(text, varying):
    """The text with ``#`` for whatever one of the regular expressions matches."""
    for pattern in varying:
        text = re.sub(pattern, "#", text)
    return text
