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
    """What a fork does: ``function(words)`` of a module that it imports, in a folder."""

    module: str
    function: str
    words: list
    folder: str


class Ended(NamedTuple):
    """How a program ended."""

    status: int | None  # its exit status; None if it still ran after its timeout and was killed
    out: str  # what it printed
    errors: str  # what it printed to stderr
    left: list  # the processes that it left behind


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
    """Do the work in a fork, and return how it Ended. It is killed if it takes more than ``timeout`` seconds."""
    return Forked(work, environment).end(timeout)


class Forked:
    """A fork that works, and the files that take what it prints. End it with ``end``."""

    def __init__(self, work, environment):
        self.output = tempfile.TemporaryDirectory()
        self.watch, pipe = context.Pipe(duplex=False)
        warm()
        with without_main(), pipe:
            environment = {"OMP_NUM_THREADS": "1", **environment}
            self.process = context.Process(target=do_work, args=(work, environment, self.output.name, pipe))
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
        """The processes that are left: the session's, or "a fork" where one has left the session and holds the pipe."""
        pids = self.session()
        if pids:
            return pids
        pipe_has_ended = self.watch.poll()
        if pipe_has_ended:
            return []
        return ["a fork"]

    def end(self, timeout=240):
        """Wait until the work has ended, at most ``timeout`` seconds, and kill what is left of it. Return how it Ended.

        If it took longer, the stacks of its processes are behind what it printed to stderr.
        """
        self.process.join(timeout)
        status = self.process.exitcode
        stacks = ""
        if status is None:
            stacks = "".join(stack_of(pid) for pid in self.session())
            self.process.terminate()  # a rehearsal then ends its ranks
            self.process.join(10)
        leftovers.wait_until(lambda: not self.left())
        left = self.left()
        for pid in self.session():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()
        self.process.close()
        self.watch.close()
        out = Path(self.output.name, "out").read_text()
        errors = Path(self.output.name, "errors").read_text() + stacks
        self.output.cleanup()
        return Ended(status, out, errors, left)


def stack_of(pid):
    """Where each thread of a process stands, so that the report of a hang says what hung."""
    py_spy = Path(sys.executable).with_name("py-spy")
    dump = subprocess.run([py_spy, "dump", "--native", f"--pid={pid}"], capture_output=True, text=True)
    return dump.stdout + dump.stderr


def do_work(work, environment, output, pipe):
    """Do the work in this fork as a new process would, and print into files of the folder ``output``.

    The fork and all that it forks hold ``pipe`` open, by which the tests notice a process that is left behind.
    """
    import torch  # here: the tests' own process can do without

    os.setsid()
    write_to(Path(output, "out"), Path(output, "errors"))
    atexit._clear()  # the forkserver's, which would end its ranks
    multiprocessing.set_start_method(None, force=True)
    os.chdir(work.folder)
    os.environ.clear()  # the forkserver has those of its start
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


STDOUT = 1  # the numbers of the two files into which a process prints
STDERR = 2


def write_to(out, errors):
    """From now on, this process and those that it starts print into these two files."""
    file_of_out = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file_of_out, STDOUT)
    file_of_errors = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file_of_errors, STDERR)
    sys.stdout = open(STDOUT, "w", buffering=1, closefd=False)
    sys.stderr = open(STDERR, "w", buffering=1, closefd=False)


def hide_helpers(sitecustomize):
    """Forbid the import of helpers if scripting.stand_alone has written the file that does it, sitecustomize.py.

    A new Python runs that file at its start. A fork has to, and to forget the modules that it has from before.
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
