"""One rank of a rehearsal: ``python -m helpers.rehearsal.rank SCRIPT [flags]`` under torchrun.

It gives this process pretended GPUs, then runs the script as ``__main__``.
"""

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
PROCESS = os.getpid()


def pretend(count):
    """From now on this process has ``count`` pretended GPUs."""
    State.gpus = count
    gpus.patch()
    factories.patch()
    nccl.patch()
    wrappers.patch()


def leave(status):
    """The script's os._exit: it first writes the report and the refusals. A forked child leaves at once."""
    if os.getpid() == PROCESS:
        folder = os.environ.get("REHEARSAL_FOLDER")
        if folder and COUNTS.refusals:
            Path(folder, f"refused-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(COUNTS.refusals))
        try:
            tell()
            sys.stdout.flush()
            sys.stderr.flush()
        except BrokenPipeError:
            pass
    EXIT(status)


def main(script, flags):
    """Run the script as ``__main__`` and leave with its exit status."""
    warnings.filterwarnings("ignore", message=".*wrapper subclass.*")
    pretend(int(os.environ["REHEARSAL_GPUS"]))
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
