"""Runs scripts one after the other, each in a fork of this process, which has imported torch.

Each line of the standard input is [script, flags…] as JSON. The answer is the script's exit status, and its output is
in the files out and errors in the folder for temporary files. A fork saves the import of torch, and os._exit saves the
end of the interpreter. A script still has to import whatever it uses, but for the compiler, which every optimizer does.
"""

import atexit
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401


def run(script, *flags):
    """Become ``python script flags``; return the exit status. After four minutes the process is killed."""
    signal.alarm(240)
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(Path(tempfile.gettempdir(), name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(Path(script).parent)
    sys.argv, sys.path[0] = [script, *flags], str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    return 0


for line in sys.stdin:
    if not (pid := os.fork()):
        os._exit(run(*json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
