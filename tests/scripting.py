"""What the tests of scripts share: exporting, hiding this project, torchrun, rehearsals, and reading results."""

import atexit
import contextlib
import io
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
import torch.distributed as dist
from kills import TORCHRUN
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers.export import chapters
from helpers.ranks.launch import launch

ROOT = Path(__file__).parents[1]
TOLERANCE = 0.002  # for numbers in a result, which are rounded to three digits

# As a module that comes first on a rank's path, this text hides the project, however it is installed.
SITECUSTOMIZE = """\
import sys


class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "helpers":
            raise ModuleNotFoundError("helpers is hidden: a script stands alone", name=name)


sys.meta_path.insert(0, Hidden)
"""


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
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    alone = {"PYTHONPATH": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    return {**environment, **alone, "CUDA_VISIBLE_DEVICES": ""}


def export(notebook, folder):
    """Write a notebook's script into the folder; return its path."""
    [script] = chapters.export(notebook, folder)
    return script


def torchrun(script, nproc, environment, *flags, agent=TORCHRUN, timeout=240):
    """Run a script under torchrun in its own folder. Returns (exit status, stdout, stderr, processes that it left).

    The status is None if the script hung for ``timeout`` seconds and was killed. With the agent FORKING, the ranks
    have torch imported when they start.
    """
    mark = uuid.uuid4().hex
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, *agent, f"--nproc-per-node={nproc}", *where, script, *flags]
    process = subprocess.Popen(
        command,
        cwd=script.parent,
        env={**environment, leftovers.MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        status = None
    leftovers.soon(lambda: status is None or not leftovers.processes(mark), seconds=60)
    left = leftovers.processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if status is None:
        out, errors = process.communicate()
    return status, out, errors, left


def rehearse(script, *options, flags=(), timeout=240):
    """Run ``python -m helpers rehearse``; return the finished process. Fails if it leaves a process behind."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "helpers", "rehearse", str(script), *map(str, options), "--", *map(str, flags)]
    environment = {**os.environ, leftovers.MARK: mark}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    assert leftovers.soon(lambda: not leftovers.processes(mark), seconds=60)
    return done


class Left(BaseException):
    """Raised in place of os._exit: a rehearsed script has ended."""


def rehearse_rank(port, script, gpus, flags, folder):
    """Turn this rank of ``launch`` into one of a rehearsal and run the script; return its exit status."""
    from helpers.rehearsal import rank

    def leave(status):
        raise Left(status)

    atexit._clear()  # the forkserver's, which would end this rank: a fresh process has none
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"REHEARSAL_GPUS": str(gpus), "REHEARSAL_FOLDER": folder, "REHEARSAL_JSON": f"{folder}/report.json"}
    rank.EXIT, end = leave, os._exit
    try:
        rank.main(script, flags)
    except Left as left:
        return left.args[0]
    finally:
        os._exit = end


def rehearse_here(script, gpus, flags, folder):
    """Rehearse without torchrun, on ranks that are forked with torch imported. Returns (exit statuses, output).

    Otherwise it does what ``python -m helpers rehearse`` does. The counts go to folder/report.json.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        statuses = launch(rehearse_rank, store.port, str(script), gpus, flags, str(folder), nproc=gpus, timeout=240)
    return statuses, re.sub(r"^\[ranks? [^]]*\] ?", "", out.getvalue(), flags=re.MULTILINE)


def result(out):
    """The numbers in the line ``result {json}``, which a script prints once."""
    [numbers] = re.findall(r"^result (.*)$", out, flags=re.MULTILINE)
    return json.loads(numbers)
