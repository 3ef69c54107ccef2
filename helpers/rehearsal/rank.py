"""One rank of a rehearsal: it gives its process pretended GPUs, then runs the script as ``__main__``."""

import atexit
import json
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path

from helpers.rehearsal import factories, gpus, nccl, wrappers
from helpers.rehearsal.counts import COUNTS
from helpers.rehearsal.report import tell
from helpers.rehearsal.tensor import State

EXIT = os._exit


def pretend(count):
    """From now on this process has ``count`` pretended GPUs."""
    State.gpus = count
    gpus.patch()
    factories.patch()
    nccl.patch()
    wrappers.patch()


def main(script, flags, gpus, folder, counts):
    """Run the script as ``__main__`` and leave with its exit status. ``counts`` is the report's path, or None."""
    process = os.getpid()

    def leave(status):
        """The script's os._exit: it first writes the report and the refusals. A forked child leaves at once."""
        if os.getpid() == process:
            if COUNTS.refusals:
                Path(folder, f"refused-{os.environ['RANK']}.json").write_text(json.dumps(COUNTS.refusals))
            try:
                tell(counts)
                sys.stdout.flush()
                sys.stderr.flush()
            except BrokenPipeError:
                pass
        EXIT(status)

    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")
    pretend(gpus)
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
