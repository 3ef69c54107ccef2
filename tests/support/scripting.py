"""What the tests of scripts share: exporting, hiding this project, torchrun, rehearsals, reading results."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import leftovers
import nbformat
from forked import AT_ADDRESS, TORCHRUN, command, forked
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers.export import chapters

ROOT = Path(__file__).parents[2]
CHAPTERS = chapters.chapters()
TOLERANCE = 0.002  # for numbers in a result, which are rounded to three digits


def write_notebook(folder, source, parameters="steps: int = 10\nfail: int = -1"):
    """Write a notebook of three cells to folder/sample.ipynb; return its path."""
    cells = [
        new_markdown_cell("# Sample"),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        new_code_cell(source, metadata={"tags": ["export"]}),
    ]
    path = folder / "sample.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def stand_alone(folder):
    """Environment variables that hide this project from scripts; ``folder`` takes the file that does it."""
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["helpers"] = None  # no import gets it\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    alone = {"PYTHONPATH": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    return {**environment, **alone, "CUDA_VISIBLE_DEVICES": ""}


def export(notebook, folder):
    """Write the script of a notebook, or of a chapter's number, into the folder; return its path."""
    [script] = chapters.export(notebook, folder)
    return script


def torchrun(script, nproc, environment, *flags, timeout=240):
    """Run a script under torchrun in its own folder, as (exit status, stdout, stderr, processes that it left).

    The status is None when it hung for ``timeout`` seconds and was killed.
    """
    mark = uuid.uuid4().hex
    words = [sys.executable, *TORCHRUN, f"--nproc-per-node={nproc}", *AT_ADDRESS, script, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=script.parent, env={**environment, leftovers.MARK: mark}, **pipes)
    status = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        out, errors = process.communicate(timeout=timeout)
        status = process.returncode
    leftovers.wait_until(lambda: status is None or not leftovers.processes(mark), seconds=60)
    left = leftovers.processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if status is None:
        out, errors = process.communicate()
    return status, out, errors, left


def rehearse_here(script, *options, flags=(), timeout=240):
    """Run ``python -m helpers rehearse`` in a fork that has torch, which saves two seconds of a processor.

    Returns the finished process. Fails if it hangs or leaves a process behind.
    """
    work = command("rehearse", script, "--timeout", timeout, *options, "--", *flags)
    status, out, errors, left = forked(work, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout)
    assert status is not None and not left, f"{status}: {left} left\n{out}{errors}"
    return subprocess.CompletedProcess(work.words, status, out, errors)


def result(out):
    """The numbers in the line ``result {json}``, which a script prints once."""
    [numbers] = re.findall(r"^result (.*)$", out, flags=re.MULTILINE)
    return json.loads(numbers)
