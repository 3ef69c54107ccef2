"""``python -m helpers`` in a forked process with torch imported. It imports this file, which so imports little."""

import atexit
import multiprocessing
import os
import sys
from pathlib import Path


def be_a_command(arguments, environment, output, connection):
    """Become ``python -m helpers arguments``. ``output`` gets the files out and errors.

    This process and all that it forks hold the connection open.
    """
    import torch

    from helpers.__main__ import main

    atexit._clear()  # the forkserver's, which would end this process's ranks
    multiprocessing.set_start_method(None, force=True)
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(Path(output, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()  # the forkserver's are those of its start
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # torch read it when the forkserver imported it
    os._exit(main(arguments))
