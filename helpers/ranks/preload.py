"""The forkserver imports this module once, so that the ranks that it forks have torch imported already.

So it does what many cells use in ranks. Constructors of ``torch.optim`` import torch._dynamo: as slow as torch itself.
"""

import atexit
import contextlib
import gc
import importlib
import os
import shutil
import signal
from pathlib import Path


def tidy_up(folder: str) -> None:
    """End the ranks of a kernel that was killed, and remove its files."""
    for file in Path(folder).glob("*/pid*"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the interpreter's own end would take 0.7 s, to free all that is imported here


os.setsid()  # Ctrl-C and a kernel's restart signal the kernel's process group, and this process has to outlive both
gc.disable()  # the imports leave no garbage, and looking for some takes a fifth of the time
for name in ("_dynamo", "distributed.checkpoint", "distributed.pipelining", "nn.parallel", "optim", "utils.data"):
    importlib.import_module(f"torch.{name}")
for name in ("rank", "pickler"):
    importlib.import_module(f"helpers.ranks.{name}")
gc.freeze()  # so that the ranks' garbage collection skips what is imported here
gc.enable()
atexit.register(tidy_up, os.environ["WORLD_SIZE_ONE_FOLDER"])
