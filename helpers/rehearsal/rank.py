"""One rank of a rehearsal: it gives its process simulated GPUs, then runs the script as ``__main__``."""

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
STACK_EVERY = 1  # seconds from one note of where a rank is to the next


def prepare_process() -> None:
    """Give this forked process what a process that torchrun starts has: its output, imports and random numbers."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # This package comes last, because the script may have a module that is called helpers.
    sys.path.append(ROOT)
    paths = [ROOT]
    if os.environ.get("PYTHONPATH"):
        paths.insert(0, os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that the script starts
    # A fork has the random states of the process that forked it. Without new ones all ranks would draw equal numbers.
    draw_own_numbers()
    Node.random_seed = torch.initial_seed() % 2**63


def variables(rank: int, gpus: int, nodes: int, port: int, folder: Path) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank of a job with ``gpus`` ranks on each of ``nodes`` nodes.

    ``port`` is that of the store on this machine, and ``folder`` takes torch's error file.
    """
    return {
        **TORCHRUN_VARIABLES,
        **rank_variables(rank, gpus, nodes),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in HANDLED),
    }


def simulate_gpus(count: int) -> None:
    """Replace torch's functions, so that this process has ``count`` simulated GPUs, which the CPU plays.

    Each of the modules replaces what its own docstring names.
    """
    Node.gpus = count
    for module in (devices, gpus, placement, nccl, wrappers, batch_norm, events):
        module.patch()


def write_stacks(path: Path, thread: int) -> None:
    """Write a thread's stack to a file every second, for as long as the process lives: the innermost call first.

    The command reads there at which line a rank is, for a line of progress and for the message about a hang. The
    arguments are the file, and the number that ``_thread.get_ident`` gives the thread of the script.

    This is what faulthandler's timer does. But the timer reads the stack without the GIL, and now and then that ends
    the process by SIGSEGV.
    """
    unfinished = path.with_suffix(".new")  # renamed when it is whole, so that the command never reads half a stack
    while True:
        time.sleep(STACK_EVERY)
        frame = sys._current_frames()[thread]
        lines = []
        for call, number in traceback.walk_stack(frame):
            lines.append(f'File "{call.f_code.co_filename}", line {number} in {call.f_code.co_name}\n')
        del frame, call  # they hold the tensors of the functions that run, and a tensor that is held cannot move
        unfinished.write_text("".join(lines))
        unfinished.replace(path)


def hide_this_package(first_path: str) -> None:
    """Let the script import a module of its own that is called helpers, also a folder, instead of this package.

    ``first_path`` is the script's folder, where Python looks first. ``helpers.training_check`` stays imported, because
    a script that itself calls ``check_training`` needs the copy that reads simulated tensors.
    """
    for name in list(sys.modules):
        is_of_this_package = name.split(".")[0] == "helpers"
        is_needed = name.startswith(("helpers.rehearsal", "helpers.training_check"))
        if is_of_this_package and not is_needed:
            del sys.modules[name]
    if os.path.isdir(os.path.join(first_path, "helpers")):
        # A folder without an __init__.py is imported only if no other place on the path has a package of that name.
        sys.path[1:] = [folder for folder in sys.path[1:] if folder != ROOT]


def run_as_main(script: str, is_module: bool, folder: Path) -> int:
    """Run the script as ``__main__``; return its exit status, as Python would end with it.

    An exception becomes a traceback and status 1. It is noted in ``folder`` as well, for the command's last lines.
    """
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            # Python gives a script its absolute path as __file__, from which workers that are not forked import it.
            runpy.run_path(os.path.abspath(script), run_name="__main__")
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
    """An error that the script raised, in a line such as "train.py:12: RuntimeError: what it says".

    It has the innermost line outside of libraries, the error's type, and the first line of its message.
    """
    file_and_line = "?"
    for frame, number in traceback.walk_tb(error.__traceback__):  # the innermost comes last
        file = frame.f_code.co_filename
        if not is_library(file):
            file_and_line = f"{os.path.basename(file)}:{number}"
    lines = str(error).strip().splitlines()
    message = ""
    if lines:
        message = f": {lines[0]}"
    is_of_data_worker = "Original Traceback" in str(error)
    if is_of_data_worker:  # an error in a DataLoader's worker, whose own last line says what it was
        message = f": {lines[-1]} (in a DataLoader's worker)"
    return f"{file_and_line}: {type(error).__name__}{message}"


def leave(
    status: int, rank: str, process: int, json: Path | None, folder: Path, observer: TrainingObserver
) -> NoReturn:
    """Write what the command reads of this rank, and end the process with an exit status.

    Written are the report, on rank 0 and also to the file ``json``; in ``folder`` the last error that GPUs or NCCL
    would have raised; and there too, if all went well, the notes of ``observer``, by which the command looks for silent
    mistakes.

    While the script runs, this takes the place of os._exit, by which a script may end. A process that the script has
    forked may call it as well, and only ends: ``process`` is the number of the rank's own process.
    """
    is_rank_itself = os.getpid() == process
    if is_rank_itself:
        if COUNTS.refusals:
            last_refusal = COUNTS.refusals[-1]
            (folder / f"refused-{rank}").write_text(f"{last_refusal.line}: {last_refusal.error}")
        with contextlib.suppress(BrokenPipeError):  # nobody reads the output any more
            report.write(json)
            sys.stdout.flush()
            sys.stderr.flush()
        if status == 0:
            mistakes.write_notes(observer, folder)
    ORIGINAL_EXIT(status)


def main(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> NoReturn:
    """Run the script as ``__main__`` in this process, on simulated GPUs, and exit with its status.

    ``args`` are the options of ``rehearse``, ``flags`` those of the script. This rank reports to the command, which is
    another process, through files in ``folder``:

    - write_stacks: the stack of the main thread, while the script runs;
    - run_as_main: the exception, if the script raises one;
    - leave: at the end, what real GPUs or NCCL would have refused, and notes about silent mistakes.
    """
    rank = os.environ["RANK"]
    # This is not a threading.Thread, because the script may count those.
    _thread.start_new_thread(write_stacks, (folder / f"stack{rank}", _thread.get_ident()))
    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")  # torch's C++ warns of tensors such as CudaTensor
    simulate_gpus(args.gpus)
    observer = mistakes.observe()
    exit_with_report = partial(leave, rank=rank, process=os.getpid(), json=args.json, folder=folder, observer=observer)
    os._exit = exit_with_report  # so that a script that calls os._exit still reports

    set_arguments_and_path(script, flags, args.module)
    status = run_as_main(script, args.module, folder)
    if status == 0:
        tell_that_this_rank_has_ended()
    atexit._run_exitfuncs()  # exit_with_report ends with os._exit, which would skip the script's atexit handlers
    exit_with_report(status)


def set_arguments_and_path(script: str, flags: list[str], is_module: bool) -> None:
    """Let the script find the arguments and the import path that ``python SCRIPT`` or ``python -m`` gives it."""
    sys.argv = [script, *flags]
    if is_module:
        sys.path[0] = os.getcwd()
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    hide_this_package(sys.path[0])


def tell_that_this_rank_has_ended() -> None:
    """Note it in each group, so that a rank that still waits for this one in a collective can say why it waits."""
    with contextlib.suppress(dist.DistError):  # the store is gone if the command has ended
        for group in nccl.SimulatedNCCL.instances:
            group.note_end()
