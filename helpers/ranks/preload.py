"""The forkserver imports this module once, so that the ranks that it forks have torch imported already.

A constructor of ``torch.optim`` imports torch._dynamo, which takes as long as torch itself, so this module does too. Of
the rest it imports what many cells use in ranks: four ranks that import checkpoints take three times an empty call.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import re
import shutil
import signal
from pathlib import Path


def tidy_up(folder):
    """End the ranks of a kernel that was killed, and remove its files: the kernel could not do so itself."""
    for file in Path(folder).glob("*/pid*"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def use_huge_pages():
    """Move this process's memory to huge pages, so that a fork copies about 100 page-table entries, not 50,000.

    With it, a call of four ranks takes a quarter less time. It works on Linux from 6.1 on, and does nothing elsewhere.
    """
    collapse = 25  # MADV_COLLAPSE of <linux/mman.h>, a constant that Python's mmap module lacks
    anonymous = re.compile(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 ", re.MULTILINE)
    with contextlib.suppress(OSError):
        for start, end in anonymous.findall(Path("/proc/self/maps").read_text()):
            first, length = int(start, 16), int(end, 16) - int(start, 16)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), collapse)


os.setsid()  # Ctrl-C and a kernel's restart signal the kernel's process group, and this process has to outlive both
gc.disable()  # the imports leave no garbage, and looking for some takes a fifth of the time
for name in ("_dynamo", "distributed.checkpoint", "distributed.pipelining", "nn.parallel", "optim", "utils.data"):
    importlib.import_module(f"torch.{name}")
importlib.import_module("helpers.ranks.rank")
gc.freeze()  # so that the ranks' garbage collection skips what is imported here
gc.enable()
atexit.register(tidy_up, os.environ["WORLD_SIZE_ONE_FOLDER"])
use_huge_pages()
