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
import subprocess
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
    """What a fork does: it goes to a folder, imports a module, and calls a function of it with a list of words."""

    module: str
    function: str
    words: list
    folder: str


class Ended(NamedTuple):
    """How a process has ended, with all that it started."""

    status: int | None  # its exit status; None if it hung until the time was up, and was killed
    out: str  # what was written to stdout
    errors: str  # what was written to stderr
    left: list | dict  # the processes that it left running, which were killed then; empty if there were none


def script_alone(script, *flags):
    """``python script flags``, in the script's folder."""
    return Work("forked", "run_script", [str(script), *map(str, flags)], str(script.parent))


def script_on_ranks(script, nproc, *flags):
    """``torchrun script flags`` with ``nproc`` ranks, in the script's folder. The ranks are forks, too."""
    words = [f"--nproc-per-node={nproc}", *AT_ADDRESS, str(script), *map(str, flags)]
    return Work("forked_torchrun", "main", words, str(script.parent))


def command(*words):
    """``python -m helpers words``, in this process's folder."""
    return Work("helpers.__main__", "main", [*map(str, words)], os.getcwd())


def forked(work, environment, timeout=400):
    """Do a Work in a fork with these environment variables, and wait for its end, ``timeout`` seconds at most.

    Returns an Ended.
    """
    return Forked(work, environment).end(timeout)


class Forked:
    """A fork that does a Work while the test goes on. ``end`` waits for it and says how it ended."""

    def __init__(self, work, environment):
        self.output = tempfile.TemporaryDirectory()  # for the files with what the fork prints
        # The fork and all that it forks hold the other end of this pipe open, so it ends when the last of them has.
        self.pipe, pipe_of_forks = context.Pipe(duplex=False)
        warm()
        with without_main(), pipe_of_forks:
            environment = {"OMP_NUM_THREADS": "1", **environment}
            self.process = context.Process(target=do_work, args=(work, environment, self.output.name, pipe_of_forks))
            self.process.start()
        self.pid = self.process.pid

    def ended(self):
        return not self.process.is_alive()

    def session(self):
        """The process ids of the fork and of all that it started, such as torchrun's ranks: they share a session."""
        pids = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    pids.append(pid)
        return pids

    def left(self):
        """The process ids of what still runs. It is ["a fork"] if a fork runs that has left the session."""
        pids = self.session()
        if pids:
            return pids
        pipe_has_ended = self.pipe.poll()
        if pipe_has_ended:
            return []
        return ["a fork"]

    def end(self, timeout=400):
        """Wait for the end, ``timeout`` seconds at most, and remove the fork's files. Returns an Ended.

        If the time was up, the Ended's ``errors`` also have the stack of each process.
        """
        self.process.join(timeout)
        status = self.process.exitcode
        stacks = ""
        if status is None:
            for pid in self.session():
                stacks += stack_of(pid)
            self.process.terminate()  # a rehearsal then ends its ranks
            self.process.join(10)
        leftovers.wait_until(lambda: not self.left())
        left = self.left()
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.pipe.close()
        out = Path(self.output.name, "out").read_text()
        errors = Path(self.output.name, "errors").read_text() + stacks
        self.output.cleanup()
        return Ended(status, out, errors, left)


def stack_of(pid):
    """The stack of each thread of a process, as text, so that the report of a hang says what hung."""
    py_spy = Path(sys.executable).with_name("py-spy")
    dump = subprocess.run([py_spy, "dump", "--native", f"--pid={pid}"], capture_output=True, text=True)
    return dump.stdout + dump.stderr


def do_work(work, environment, output_folder, pipe):
    """Do a Work in this fork, as a new process would do it. This is what a Forked's process executes.

    What the forkserver has done and a new process would not have is undone first. ``pipe`` is not used, but this
    process and all that it forks hold it open.
    """
    import torch  # here, because the tests' own process can do without it

    os.setsid()
    redirect_output(Path(output_folder, "out"), Path(output_folder, "errors"))
    atexit._clear()  # The forkserver has registered a function that would end its ranks.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(work.folder)
    os.environ.clear()  # The forkserver has the variables of its start.
    os.environ.update(environment)
    tempfile.tempdir = None
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read it when the forkserver imported it
    hide_helpers(Path(environment.get("PYTHONPATH", ""), "sitecustomize.py"))
    function = getattr(importlib.import_module(work.module), work.function)
    try:
        status = function(work.words)
    finally:
        atexit._run_exitfuncs()
    sys.exit(status)


def redirect_output(out, errors):
    """From now on, what this process and those that it starts write to stdout and stderr goes to these two files."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(out, flags), 1)
    os.dup2(os.open(errors, flags), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def hide_helpers(sitecustomize):
    """Forbid the import of helpers, if the file sitecustomize.py that scripting.stand_alone writes is there.

    A new Python would run this file at its start. A fork of the forkserver has imported helpers, so they are removed.
    """
    if sitecustomize.is_file():
        for name in list(sys.modules):
            if name.partition(".")[0] == "helpers":
                del sys.modules[name]
        runpy.run_path(str(sitecustomize))


def run_script(words):
    """Run a script as ``python words`` would."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
