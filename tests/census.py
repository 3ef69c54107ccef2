"""What a test may leave behind: processes, files, descriptors, threads and sockets, counted before and after."""

import contextlib
import os
import tempfile
import threading
import time
import uuid
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import psutil

MARK = "WORLD_SIZE_ONE_CENSUS"  # in the environment of what a test starts, so that orphans are found too
os.environ.setdefault(MARK, uuid.uuid4().hex)


def processes(mark=None):
    """{pid: name} of this process's descendants and of every process that carries ``mark``, zombies included."""
    mark = mark or os.environ[MARK]
    found = (
        {child.pid: child for child in psutil.Process().children(recursive=True)} if mark == os.environ[MARK] else {}
    )
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found[process.pid] = process
    for pid in (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid):
        found.pop(pid, None)  # the two that this process keeps; one that was replaced counts
    names = {}
    for pid, process in found.items():
        with contextlib.suppress(psutil.Error):
            names[pid] = process.name()
    return names


def files():
    """Everything in the folder of this process's launches, and the process group's private folders."""
    launches = [path for path in Path(util.get_temp_dir()).rglob("*") if not path.is_socket()]  # the forkserver's own
    return {str(path) for path in [*launches, *Path(tempfile.gettempdir()).glob(f"one-rank-{os.getpid()}-*")]}


def now():
    """All of it, as a dictionary that compares."""
    return {
        "processes": processes(),
        "files": files(),
        "descriptors": psutil.Process().num_fds(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sockets": len(psutil.Process().net_connections(kind="inet")),
    }


def soon(condition, seconds=8):
    """The condition's value once it is true, or its last one: a killed process takes a moment to be gone."""
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def unchanged():
    """Fail where the block leaves anything behind."""
    before = now()
    yield
    soon(lambda: now() == before)
    assert now() == before
