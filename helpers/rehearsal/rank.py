"""One rank of a rehearsal: it gives its process pretended GPUs, then runs the script as ``__main__``."""

import _thread
import argparse
import atexit
import contextlib
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from helpers.counts import COUNTS
from helpers.ranks.rank import TORCHRUN_VARIABLES, draw_own_numbers, is_library, rank_variables
from helpers.rehearsal import batch_norm, devices, events, gpus, mistakes, nccl, placement, report, wrappers
from helpers.rehearsal.devices import Node
from helpers.training_check import TrainingObserver

ORIGINAL_EXIT = os._exit  # while the script runs, os._exit is ``leave``
ROOT = str(Path(__file__).resolve().parents[2])  # the folder in which this package is
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that torchrun's agent handles


def prepare_process() -> None:
    """Give this forked process what a process that torchrun starts has: its output, imports and random numbers.

    A fork has the random states of the process that forked it. Without new ones all ranks would draw the same numbers.
    """
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # This package comes last, because the script may have a module that is called helpers.
    sys.path.append(ROOT)
    paths = [ROOT]
    if os.environ.get("PYTHONPATH"):
        paths.insert(0, os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that the script starts
    draw_own_numbers()
    Node.random_seed = torch.initial_seed() % 2**63


def variables(rank: int, gpus: int, nodes: int, port: int, folder: Path) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
    return {
        **TORCHRUN_VARIABLES,
        **rank_variables(rank, gpus, nodes),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in HANDLED),
    }


def pretend(count: int) -> None:
    """Replace torch's functions, so that this process has ``count`` pretended GPUs."""
    Node.gpus = count
    for module in (devices, gpus, placement, nccl, wrappers, batch_norm, events):
        module.patch()


def write_stacks(path: Path, thread: int) -> None:
    """Write a thread's stack to a file every second, for as long as the process lives: the innermost call first.

    This is what faulthandler's timer does. But the timer reads the stack without the GIL, and now and then that ends
    the process by SIGSEGV.
    """
    new = path.with_suffix(".new")  # so that who reads the path finds a whole stack
    while True:
        time.sleep(1)
        frame = sys._current_frames()[thread]
        lines = []
        for call, number in traceback.walk_stack(frame):
            lines.append(f'File "{call.f_code.co_filename}", line {number} in {call.f_code.co_name}\n')
        del frame, call  # they hold the tensors of the functions that run, and a tensor that is held cannot move
        new.write_text("".join(lines))
        new.replace(path)


def hide_this_package(first_path: str) -> None:
    """Let the script import a module of its own that is called helpers, also a folder, instead of this package.

    ``helpers.training_check`` stays imported, because a script that itself calls ``check_training`` needs the copy that
    reads pretended tensors.
    """
    for name in list(sys.modules):
        is_needed = name.startswith(("helpers.rehearsal", "helpers.training_check"))
        if name.split(".")[0] == "helpers" and not is_needed:
            del sys.modules[name]
    if os.path.isdir(os.path.join(first_path, "helpers")):  # anything else on the path would precede a folder
        sys.path[1:] = [folder for folder in sys.path[1:] if folder != ROOT]


def run_as_main(script: str, is_module: bool, folder: Path) -> int:
    """Run the script as ``__main__``; return its exit status. An exception becomes a traceback and status 1."""
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None:
            return 0
        if isinstance(end.code, int):
            return end.code
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # With this file, peers whose connections are lost now do not take their own errors for the cause.
        (folder / f"raised-{os.environ['RANK']}").write_text(last_line(error))
        traceback.print_exc()
        return 1
    return 0


def last_line(error: BaseException) -> str:
    """What the command says last of a script that raised this: the script's line, the error's type and first line."""
    line = "?"
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            line = f"{os.path.basename(frame.f_code.co_filename)}:{number}"
    lines = str(error).strip().splitlines()
    message = ""
    if lines:
        message = f": {lines[0]}"
    if "Original Traceback" in str(error):  # an error in a DataLoader's worker, whose own last line says what it was
        message = f": {lines[-1]} (in a DataLoader's worker)"
    return f"{line}: {type(error).__name__}{message}"


def leave(
    status: int, rank: str, process: int, json: Path | None, folder: Path, observer: TrainingObserver
) -> NoReturn:
    """End this process with an exit status, after it has written the rank's report, refusal and notes.

    While the script runs, this is its os._exit. A child that the script has forked calls it, too, and ends at once:
    only ``process`` is the rank.
    """
    if os.getpid() == process:
        if COUNTS.refusals:
            last = COUNTS.refusals[-1]
            (folder / f"refused-{rank}").write_text(f"{last.line}: {last.error}")
        with contextlib.suppress(BrokenPipeError):  # nobody reads the output any more
            report.write(json)
            sys.stdout.flush()
            sys.stderr.flush()
        if status == 0:
            mistakes.write_notes(observer, folder)
    ORIGINAL_EXIT(status)


def main(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> NoReturn:
    """Run the script as ``__main__`` on this node's pretended GPUs, and end this process with its exit status.

    ``args`` are those of ``rehearse``. ``folder`` takes the rank's stack, its last refusal, and its notes, from which
    the silent mistakes are found.
    """
    rank = os.environ["RANK"]
    # Not a threading.Thread, because the script may count those.
    _thread.start_new_thread(write_stacks, (folder / f"stack{rank}", _thread.get_ident()))
    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")
    pretend(args.gpus)
    observer = mistakes.observe()
    end = partial(leave, rank=rank, process=os.getpid(), json=args.json, folder=folder, observer=observer)
    os._exit = end

    # The script finds the arguments and the import path that Python would have given it.
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if args.module:
        sys.path[0] = os.getcwd()
    hide_this_package(sys.path[0])
    status = run_as_main(script, args.module, folder)
    if status == 0:
        with contextlib.suppress(dist.DistError):  # the store is gone if the command has ended
            for group in nccl.PretendedNCCL.instances:
                group.note_end()
    atexit._run_exitfuncs()  # what the script has registered, because os._exit does not call it
    end(status)
