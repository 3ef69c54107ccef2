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
from pathlib import Path
from typing import NoReturn

import torch

from helpers.counts import COUNTS
from helpers.ranks.rank import TORCHRUN_VARIABLES, draw_own_numbers, rank_variables
from helpers.rehearsal import devices, events, gpus, mistakes, nccl, placement, report, wrappers
from helpers.rehearsal.devices import Node

EXIT = os._exit
ROOT = str(Path(__file__).resolve().parents[2])
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun's agent


def prepare_process() -> None:
    """Make this forked process as new as one that torchrun has started: its output, its imports, its random numbers."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.append(ROOT)  # last, as the script may have a module that is called helpers
    paths = [ROOT]
    if os.environ.get("PYTHONPATH"):
        paths.insert(0, os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
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
    """From now on this process has ``count`` pretended GPUs."""
    Node.gpus = count
    for module in (devices, gpus, placement, nccl, wrappers, events):
        module.patch()


def write_stacks(path: Path, thread: int) -> None:
    """Write a thread's stack to a file every second, for as long as the process lives: the innermost call first.

    faulthandler's timer would read the stack without the GIL, and now and then that ends the process by SIGSEGV.
    """
    new = path.with_suffix(".new")
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

    What observes the script stays, because a script that itself calls ``check_training`` needs the copy that knows
    pretended tensors.
    """
    for name in list(sys.modules):
        if name.split(".")[0] == "helpers" and not name.startswith(("helpers.rehearsal", "helpers.training_check")):
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
    except BaseException:
        (folder / f"raised-{os.environ['RANK']}").touch()  # so that no peer takes its own error for the cause
        traceback.print_exc()
        return 1
    return 0


def main(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> NoReturn:
    """Run the script as ``__main__`` on this node's pretended GPUs, and leave with its exit status.

    ``args`` are the command's. ``folder`` takes the last refusal, and the notes from which silent mistakes are found.
    """
    process = os.getpid()
    rank = os.environ["RANK"]

    def leave(status: int) -> NoReturn:
        """The script's os._exit: it first writes the report and the refusals. A forked child leaves at once."""
        if os.getpid() == process:
            if COUNTS.refusals:
                last = COUNTS.refusals[-1]
                (folder / f"refused-{rank}").write_text(f"{last.line}: {last.error}")
            with contextlib.suppress(BrokenPipeError):
                report.write(args.json)
                sys.stdout.flush()
                sys.stderr.flush()
            if status == 0:
                mistakes.write_notes(observer, folder)
        EXIT(status)

    # Not a threading.Thread: the script may count those.
    _thread.start_new_thread(write_stacks, (folder / f"stack{rank}", _thread.get_ident()))
    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")
    pretend(args.gpus)
    observer = mistakes.observe()
    os._exit = leave
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if args.module:
        sys.path[0] = os.getcwd()
    hide_this_package(sys.path[0])
    status = run_as_main(script, args.module, folder)
    atexit._run_exitfuncs()
    leave(status)
