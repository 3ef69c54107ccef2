"""Transcripts that the book's pages show: a test compares what it sees with ``book/recorded/NAME.txt``.

A file begins with two comment lines, the command that makes the file and the versions of the programs, and an empty
line. With ``UPDATE_RECORDED=1`` in the environment a test writes its file and compares nothing.
"""

import difflib
import os
import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "book" / "recorded"


def compare(name, text, command, varying=(), **versions):
    """Compare a transcript with the recorded one. Fails with a difference, apart from what ``varying`` matches in both.

    The caller replaces what must not be on a page: folders, process ids, names of this machine. The regular
    expressions ``varying`` match what may be on a page and changes from run to run: times, ports, job ids.
    ``versions`` are those of other programs than torch: ``slurm="22.05.8"``.
    """
    path = FOLDER / f"{name}.txt"
    text = "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())
    if os.environ.get("UPDATE_RECORDED") == "1":
        versions = {"torch": torch.__version__.partition("+")[0], **versions}
        programs = ", ".join(f"{program} {version}" for program, version in versions.items())
        path.write_text(f"# Recorded by: {command}\n# With: {programs}\n\n{text}")
        return
    _, _, recorded = path.read_text().partition("\n\n")
    for pattern in varying:
        recorded = re.sub(pattern, "#", recorded)
        text = re.sub(pattern, "#", text)
    difference = difflib.unified_diff(recorded.splitlines(), text.splitlines(), path.name, "now", lineterm="")
    assert recorded == text, "\n".join([*difference, f"If that is right: UPDATE_RECORDED=1 {command}"])
