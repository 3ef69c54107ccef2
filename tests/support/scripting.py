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
from forked import AT_ADDRESS, TORCHRUN, Ended, command, forked
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
    """Environment variables with which a script runs as on a machine without this project and without a GPU.

    Python imports the file sitecustomize.py at its start. The one that this function writes into ``folder`` makes each
    ``import helpers`` fail.
    """
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["helpers"] = None  # no import gets it\n')
    if sys.platform == "darwin":
        loopback = "lo0"
    else:
        loopback = "lo"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(folder)
    environment["TMPDIR"] = str(folder)
    environment["OMP_NUM_THREADS"] = "1"
    environment["GLOO_SOCKET_IFNAME"] = loopback
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def export(notebook, folder):
    """Write the script of a notebook, or of a chapter's number, into the folder; return its path."""
    [script] = chapters.export(notebook, folder)
    return script


def torchrun(script, nproc, environment, *flags, timeout=240):
    """Run a script under torchrun in its own folder, and return how it Ended.

    It is killed if it takes more than ``timeout`` seconds, and so are the processes that it leaves behind.
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
    return Ended(status, out, errors, left)


def rehearse_here(script, *options, flags=(), timeout=240):
    """Run ``python -m helpers rehearse`` in a fork that has torch, which saves two seconds of a processor.

    Returns the finished process. Fails if it hangs or leaves a process behind.
    """
    work = command("rehearse", script, "--timeout", timeout, *options, "--", *flags)
    ended = forked(work, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout)
    report = f"{ended.status}: {ended.left} left\n{ended.out}{ended.errors}"
    assert ended.status is not None, report
    assert not ended.left, report
    return subprocess.CompletedProcess(work.words, ended.status, ended.out, ended.errors)


def result(out):
    """The numbers in the line ``result {json}``, which a script prints once."""
    [numbers] = re.findall(r"^result (.*)$", out, flags=re.MULTILINE)
    return json.loads(numbers)
