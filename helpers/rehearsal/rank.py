"""One rank of a rehearsal: it gives its process pretended GPUs, then runs the script as ``__main__``."""

import _thread
import atexit
import json
import os
import runpy
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from helpers.rehearsal import devices, factories, gpus, moves, nccl, report, wrappers
from helpers.rehearsal.counts import COUNTS
from helpers.rehearsal.devices import Node

EXIT = os._exit


def pretend(count: int) -> None:
    """From now on this process has ``count`` pretended GPUs."""
    Node.gpus = count
    for module in (devices, gpus, moves, factories, nccl, wrappers):
        module.patch()


def write_stacks(path: Path, thread: int) -> None:
    """Write a thread's stack to a file every second, for as long as the process lives: the innermost call first.

    faulthandler's timer would read the stack without the GIL, and now and then that ends the process by SIGSEGV.
    """
    while True:
        time.sleep(1)
        if frame := sys._current_frames().get(thread):
            calls = [(call.f_code.co_filename, line, call.f_code.co_name) for call, line in traceback.walk_stack(frame)]
            path.with_suffix(".new").write_text(
                "".join(f'File "{file}", line {n} in {name}\n' for file, n, name in calls)
            )
            path.with_suffix(".new").replace(path)


def main(script: str, flags: list[str], count: int, folder: Path, counts: Path | None) -> NoReturn:
    """Run the script as ``__main__`` on ``count`` pretended GPUs of this node, and leave with its exit status.

    ``folder`` takes the refusals, ``counts`` is the report's path, or None.
    """
    process = os.getpid()

    def leave(status: int) -> NoReturn:
        """The script's os._exit: it first writes the report and the refusals. A forked child leaves at once."""
        if os.getpid() == process:
            if COUNTS.refusals:
                refusals = json.dumps([asdict(refusal) for refusal in COUNTS.refusals])
                Path(folder, f"refused-{os.environ['RANK']}.json").write_text(refusals)
            try:
                report.write(counts)
                sys.stdout.flush()
                sys.stderr.flush()
            except BrokenPipeError:
                pass
        EXIT(status)

    # Not a threading.Thread: the script may count those.
    _thread.start_new_thread(write_stacks, (folder / f"stack{os.environ['RANK']}", _thread.get_ident()))
    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")
    pretend(count)
    os._exit = leave
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    leave(status)
