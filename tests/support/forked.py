"""Work in a fork of a process that has imported torch, as if it were a new process: ``forked(work, environment)``.

For tests and for tools/soak.py. The process that forks is the forkserver of ``launch``; a fork saves the two seconds of
a processor that its imports would take. The work is a script, torchrun's agent with its ranks, or a command of helpers.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import leftovers
import psutil

from helpers.ranks.launch import context, warm, without_main

HERE = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run"]
FORKING = [str(HERE / "forked_torchrun.py")]  # the same agent; its ranks do not import torch
AT_ADDRESS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


class Work(NamedTuple):
    """What a fork does: ``function(words)`` of a module that it imports, in a folder."""

    module: str
    function: str
    words: list
    folder: str


def script_alone(script, *flags):
    """``python script flags``, in the script's folder."""
    return Work("forked", "run_script", [str(script), *map(str, flags)], str(script.parent))


def script_on_ranks(script, nproc, *flags):
    """``torchrun script flags`` on ``nproc`` ranks, which are forked too, in the script's folder."""
    words = [f"--nproc-per-node={nproc}", *AT_ADDRESS, str(script), *map(str, flags)]
    return Work("forked_torchrun", "main", words, str(script.parent))


def command(*words):
    """``python -m helpers words``, in this process's folder."""
    return Work("helpers.__main__", "main", [*map(str, words)], os.getcwd())


def forked(work, environment, timeout=240):
    """(exit status, stdout, stderr, processes that it left). The status is None if it was killed after ``timeout``."""
    return Forked(work, environment).end(timeout)


class Forked:
    """A fork that works, and the files that take what it prints. End it with ``end``."""

    def __init__(self, work, environment):
        self.output = tempfile.TemporaryDirectory()
        self.watch, there = context.Pipe(duplex=False)
        warm()
        with without_main(), there:
            task = (work, {"OMP_NUM_THREADS": "1", **environment}, self.output.name, there)
            self.process = context.Process(target=become, args=task)
            self.process.start()
        self.pid = self.process.pid

    def ended(self):
        return not self.process.is_alive()

    def session(self):
        """The processes of the fork's session, itself among them: torchrun's ranks, and what a script starts."""
        pids = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    pids.append(pid)
        return pids

    def left(self):
        """Of what process is left: the session's, and "a fork" where one has left the session and holds the pipe."""
        return self.session() or ([] if self.watch.poll() else ["a fork"])

    def end(self, timeout=240):
        """Wait for the end. Returns what ``forked`` returns."""
        self.process.join(timeout)
        status = self.process.exitcode
        if status is None:
            self.process.terminate()  # a rehearsal then ends its ranks
            self.process.join(10)
        leftovers.wait_until(lambda: not self.left(), seconds=60 if status is not None else 10)
        left = self.left()
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.watch.close()
        out, errors = (Path(self.output.name, name).read_text() for name in ("out", "errors"))
        self.output.cleanup()
        return status, out, errors, left


def become(work, environment, output, watch):
    """Do the work in this fork as a new process would. It and all that it forks hold the pipe ``watch`` open."""
    import torch

    os.setsid()
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    atexit._clear()  # the forkserver's, which would end its ranks
    multiprocessing.set_start_method(None, force=True)
    os.chdir(work.folder)
    os.environ.clear()  # the forkserver's are those of its start
    os.environ.update(environment)
    tempfile.tempdir = None
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read it when the forkserver imported it
    if (hiding := Path(environment.get("PYTHONPATH", ""), "sitecustomize.py")).is_file():  # of scripting.stand_alone
        for name in [name for name in sys.modules if name.partition(".")[0] == "helpers"]:
            del sys.modules[name]
        runpy.run_path(str(hiding))
    try:
        status = getattr(importlib.import_module(work.module), work.function)(work.words)
    finally:
        atexit._run_exitfuncs()
    sys.exit(status)


def run_script(words):
    """Run a script as ``python words`` would."""
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
