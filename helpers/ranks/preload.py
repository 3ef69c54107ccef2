"""Imported once by the forkserver, so that the ranks it forks find their imports done.

A ``torch.optim`` constructor imports torch._dynamo, which takes as long as torch itself: it belongs here too.
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
    """After a kernel that was killed and so could not: end its ranks and remove its files."""
    for file in Path(folder).glob("*/pid*"):
        with contextlib.suppress(OSError, ValueError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def use_huge_pages():
    """Move this process's memory to huge pages, so that a fork copies a hundred table entries and not fifty thousand.

    A call of four ranks takes a quarter less then. Linux does it from 6.1 on; elsewhere nothing changes.
    """
    collapse = 25  # MADV_COLLAPSE of <linux/mman.h>, which Python's mmap module does not name
    anonymous = re.compile(r"^(\w+)-(\w+) rw-p \w+ 00:00 0 ", re.MULTILINE)
    with contextlib.suppress(OSError):
        for start, end in anonymous.findall(Path("/proc/self/maps").read_text()):
            first, length = int(start, 16), int(end, 16) - int(start, 16)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), collapse)


os.setsid()  # a Ctrl-C and a kernel's restart signal its whole process group; this process must outlive it by a moment
gc.disable()  # nothing of this is garbage: to search it takes a fifth of the time
for name in ("torch._dynamo", "torch.nn.parallel", "torch.optim", "torch.utils.data", "helpers.ranks.rank"):
    importlib.import_module(name)
gc.freeze()  # a rank does not search it either
gc.enable()
atexit.register(tidy_up, os.environ["WORLD_SIZE_ONE_FOLDER"])
use_huge_pages()
