"""The forkserver imports this module once, so that the ranks that it forks have torch imported already.

It also imports the parts of torch that many cells use in their ranks. torch._dynamo is among them, because each
optimizer of ``torch.optim`` imports it when it is built, which takes as long as torch itself.
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
    """End the ranks that a kernel has left when it was killed, and remove its files from the folder.

    Each rank has written its process id, which is also that of its process group, to a file ``pid<rank>``.
    """
    for file in Path(folder).glob("*/pid*"):
        with contextlib.suppress(OSError, ValueError):  # the rank is gone, or its file is not complete
            process_group = int(file.read_text())
            os.killpg(process_group, signal.SIGKILL)
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
