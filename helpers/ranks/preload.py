"""Imported once by the forkserver, so that the ranks it forks find their imports done.

A ``torch.optim`` constructor imports torch._dynamo, which takes as long as torch itself: it belongs here too.
"""

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
from pathlib import Path


def tidy_up(folder):
    """After a kernel that was killed and so could not: end its ranks and remove its files."""
    for file in Path(folder).glob("*/pid*"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


os.setsid()  # a Ctrl-C and a kernel's restart signal its whole process group; this process must outlive it by a moment
gc.disable()  # nothing of this is garbage: to search it takes a fifth of the time
for name in ("torch._dynamo", "torch.nn.parallel", "torch.optim", "torch.utils.data", "helpers.ranks.rank"):
    importlib.import_module(name)
gc.freeze()  # nor shall each rank search it
gc.enable()
atexit.register(tidy_up, os.environ["WORLD_SIZE_ONE_FOLDER"])
