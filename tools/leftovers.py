"""What a test may leave behind: processes, files, descriptors, threads and sockets, counted before and after."""

import contextlib
import gc
import itertools
import os
import shutil
import signal
import tempfile
import textwrap
import threading
import time
import uuid
from collections import Counter
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import psutil
from jupyter_client import KernelManager

MARK = "WORLD_SIZE_ONE_CENSUS"  # in the environment of what a test starts, so that orphans are found too
os.environ.setdefault(MARK, uuid.uuid4().hex)
numbers = itertools.count()


def processes(mark=None):
    """{pid: name} of every process that carries ``mark``; without one, of this process's descendants too."""
    found = {} if mark else {child.pid: child for child in psutil.Process().children(recursive=True)}
    mark = mark or os.environ[MARK]
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
    """Everything in the folder of this process's launches, but for the forkserver's own socket."""
    return {str(path) for path in Path(util.get_temp_dir()).rglob("*") if not path.is_socket()}


def now():
    """All of it; each value can be subtracted from a later one."""
    mine = psutil.Process()
    return {
        "processes": set(processes().items()),
        "files": files(),
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "sockets": Counter(str(connection.laddr) for connection in mine.net_connections(kind="inet")),
        "descriptors": Counter({"open": mine.num_fds()}),
    }


def more_than(before):
    """{kind: what there is now that was not there before}, empty where that is nothing."""
    return {kind: more for kind, value in now().items() if (more := value - before[kind])}


def soon(condition, seconds=60):
    """The condition's value once it is true, or its last one: a killed process takes a moment to be gone.

    On a busy machine that moment is long, so ``seconds`` is a time in which only what never comes does not come.
    """
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def unchanged():
    """Fail where the block leaves anything behind."""
    before = now()
    yield
    soon(lambda: not more_than(before))
    assert not more_than(before), more_than(before)


@contextlib.contextmanager
def surroundings():
    """(environment, mark): a private temporary folder and a mark for what is started; nothing of either may stay."""
    folder, mark = tempfile.mkdtemp(prefix="one-"), f"{os.environ[MARK]}-{next(numbers)}"
    try:
        yield {**os.environ, "TMPDIR": folder, "IPYTHONDIR": f"{folder}-ipython", MARK: mark}
        assert_gone(folder, mark)
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(f"{folder}-ipython", ignore_errors=True)


def listing(folder):
    """What is in a temporary folder, but for the caches of torch and matplotlib for each user and torchrun's logs."""
    caches = ("torchinductor_", "torchelastic_", "matplotlib-")
    return [name for name in os.listdir(folder) if not name.startswith(caches)]


def assert_gone(folder, mark):
    """Wait for the processes with this mark to be gone and for the folder to be empty."""
    if not soon(lambda: not processes(mark) and not listing(folder), 60):  # a forkserver imports torch to its end first
        raise AssertionError(f"left: {processes(mark)}, {listing(folder)}")


class Kernel:
    """A real kernel with a private temporary folder and a mark of its own, and a client."""

    def __init__(self, environment):
        self.folder, self.mark = environment["TMPDIR"], environment[MARK]
        self.manager = KernelManager(connection_file=f"{self.folder}.json", shutdown_wait_time=2)
        self.manager.start_kernel(env=environment)
        self.client = None
        self.connect()

    def connect(self):
        self.disconnect()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def disconnect(self):
        if self.client:
            self.client.stop_channels()
            self.client.context.destroy(linger=0)

    def run(self, source):
        """(reply, what it printed) of one cell."""
        printed = []

        def show(message):
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        # The error of the cell before must not abort this one (stop_on_error): ipykernel drops what is already waiting.
        reply = self.client.execute_interactive(
            textwrap.dedent(source), stop_on_error=False, output_hook=show, timeout=60
        )
        return reply["content"], "".join(printed)

    def start(self, source):
        """Run a cell without waiting for its end, but until its ranks have written that they are in it."""
        self.client.execute(textwrap.dedent(source), stop_on_error=False)
        assert soon(lambda: len(list(Path(self.folder).rglob("inside*"))) == 2)

    def ranks(self):
        """How many processes there are beside the kernel, its forkserver and its resource tracker."""
        return len(processes(self.mark)) - 3

    def close(self):
        self.disconnect()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        gc.collect()  # its threads and descriptors go now, not in the middle of a later test
