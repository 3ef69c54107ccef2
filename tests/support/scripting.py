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
    """Write a notebook to folder/sample.ipynb: a title, a cell of parameters, and a cell that is exported.

    ``source`` is the code of the exported cell. Returns the notebook's path.
    """
    cells = [
        new_markdown_cell("# Sample"),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        new_code_cell(source, metadata={"tags": ["export"]}),
    ]
    path = folder / "sample.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def stand_alone(folder):
    """Environment variables for scripts that must run without this project, as a reader runs an exported one.

    Python runs a file sitecustomize.py at its start if it is in PYTHONPATH. The one that is written to ``folder``
    forbids the import of helpers. Temporary files go to ``folder``, too.
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


def torchrun(script, nproc, environment, *flags, timeout=400):
    """Run a script under torchrun in its own folder. Returns an Ended, whose ``left`` is {process id: name}.

    If it hangs for ``timeout`` seconds, it is killed, and its status is None.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, f"--nproc-per-node={nproc}", *AT_ADDRESS, script, *flags],
        cwd=script.parent,
        env={**environment, leftovers.MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    status = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        out, errors = process.communicate(timeout=timeout)
        status = process.returncode
        leftovers.wait_until(lambda: not leftovers.processes(mark), seconds=60)
    left = leftovers.processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if status is None:
        out, errors = process.communicate()
    return Ended(status, out, errors, left)


def rehearse_here(script, *options, flags=(), timeout=400):
    """Run ``python -m helpers rehearse`` in a fork that has torch, which saves two seconds of a processor.

    Returns the finished process. Fails if it hangs or leaves a process behind.
    """
    work = command("rehearse", script, "--timeout", timeout, *options, "--", *flags)
    ended = forked(work, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout)
    assert ended.status is not None, f"it hung\n{ended.out}{ended.errors}"
    assert not ended.left, f"it left {ended.left}\n{ended.out}{ended.errors}"
    return subprocess.CompletedProcess(work.words, ended.status, ended.out, ended.errors)


def result(out):
    """The dictionary of a line such as ``result {"world_size": 2, "val_loss": 1.2}``, which a script prints once."""
    [numbers] = re.findall(r"^result (.*)$", out, flags=re.MULTILINE)
    return json.loads(numbers)
