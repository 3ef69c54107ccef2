"""Run the chapters' scripts with the PyTorch of this Python, alone and on two ranks, and record its version.

``PYTHONPATH=. PYTHON tools/run_scripts.py [CHAPTER ...]`` is for a PyTorch on which `make test` cannot run, because the
notebooks call what is newer. A script passes if it ends alone with a result that is good enough for
tests/test_scripts.py, and on two ranks with the same result. The scripts that pass are recorded in
notebooks/verified.json, and say so in their docstrings. The exit status is 1 if one does not pass.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from helpers.export import chapters
from helpers.export.facts import Script, facts_at, unmet
from helpers.export.verified import FILE_NAME, add_script, fingerprint, read_record, write_record
from helpers.verify.compare import numbers

TOLERANCE = 0.002  # as in tests/support/scripting.py
TIMEOUT = 900  # seconds for one run: 16 ranks of a rehearsal may share two cores
PASSED = "passed"
WIDTH_OF_NAME = 28  # of the first column of what is printed
WIDTH_OF_SECONDS = 8  # of the second column
# The words between `python` and a script that start it on two ranks of this machine, as torchrun does.
ON_TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


class Failed(Exception):
    """A script did not pass. The message says why, and what the script printed."""


def result(folder: Path, *arguments: object) -> dict[str, float]:
    """Run Python with these arguments in a folder, and return the numbers that it prints as its result.

    They are in the last line, for example ``result {"world_size": 2, "loss": 0.31}``. Raises Failed if the program
    fails or takes too long.
    """
    command = [sys.executable, *map(str, arguments)]
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun sets it, so that one rank alone computes as one of several does
    environment.pop("PYTHONPATH", None)  # by which the script might find this project: it has to run without it
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Failed(f"it still ran after {TIMEOUT} seconds: {command}") from None
    if done.returncode != 0:
        raise Failed(f"exit status {done.returncode}: {command}\n{done.stdout}{done.stderr}")
    last_line = done.stdout.strip().splitlines()[-1]
    return json.loads(last_line.removeprefix("result "))


def try_script(script: Path, facts: Script) -> None:
    """Run a chapter's script alone and on two ranks. Raises Failed if its result is not good enough, or not the same.

    ``facts`` are what the chapter says of its script. ``facts.result`` are conditions for the numbers that a full run
    prints. ``facts.quick_flags``, such as "--epochs 1", make a run shorter: the runs that are compared use them.
    """
    full_result = result(script.parent, script)
    problems = unmet(facts.result, full_result)
    if problems:
        raise Failed("\n".join(problems))

    quick_flags = facts.quick_flags.split()
    if quick_flags:
        on_one_rank = result(script.parent, script, *quick_flags)
    else:
        on_one_rank = full_result
    on_two_ranks = result(script.parent, *ON_TWO_RANKS, script, *quick_flags)
    # The world size is the one number that has to differ.
    world_sizes = (on_one_rank.pop("world_size"), on_two_ranks.pop("world_size"))
    if world_sizes != (1, 2):
        raise Failed(f"it counted {world_sizes} ranks, and had 1 and 2")
    differences = list(numbers(on_two_ranks, on_one_rank, TOLERANCE))
    if differences:
        raise Failed(f"the results differ: {on_one_rank} alone, and {on_two_ranks} on two ranks")


def record_version(notebook: Path, version: str) -> None:
    """Record that a chapter's script passed on this version of PyTorch."""
    record = read_record(chapters.NOTEBOOKS / FILE_NAME)
    add_script(record, notebook.stem, fingerprint(notebook), version)
    write_record(record, chapters.NOTEBOOKS / FILE_NAME)


def outcome_of(notebook: Path, version: str, folder: Path) -> str:
    """Export a chapter's script into a folder, try it, and record that it passed: "passed", or why it did not."""
    script = chapters.export_script(notebook, folder)
    what_the_chapter_says = facts_at(notebook)
    try:
        try_script(script, what_the_chapter_says.script)
    except Failed as failure:
        return f"FAILED: {failure}"
    record_version(notebook, version)
    return PASSED


def main(names: list[str]) -> int:
    """Try the scripts of the chapters with these names, or of all chapters if ``names`` is empty.

    Prints a line for each script. Returns the exit status: 0, or 1 if a script does not pass.
    """
    version = torch.__version__.partition("+")[0]
    notebooks = [chapters.find_notebook(name) for name in names]
    if not notebooks:
        notebooks = chapters.chapters()
    passed = 0
    title = f"PyTorch {version}"
    print(f"{title:{WIDTH_OF_NAME}}{'seconds':>{WIDTH_OF_SECONDS}}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for notebook in notebooks:
            start = time.monotonic()
            outcome = outcome_of(notebook, version, Path(folder, notebook.stem))
            if outcome == PASSED:
                passed += 1
            seconds = time.monotonic() - start
            print(f"{notebook.stem:{WIDTH_OF_NAME}}{seconds:{WIDTH_OF_SECONDS}.0f}  {outcome}", flush=True)

    print(f"{passed} of {len(notebooks)} scripts passed: recorded in notebooks/{FILE_NAME}")
    return 0 if passed == len(notebooks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
