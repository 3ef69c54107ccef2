"""Count what a test may leave behind: processes, files, descriptors, threads and sockets."""

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

MARK = "WORLD_SIZE_ONE_CENSUS"  # a variable for processes that a test starts: by it, orphans are found too
os.environ.setdefault(MARK, uuid.uuid4().hex)
numbers = itertools.count()


def descendants():
    """The processes that this one has started, and those that they have."""
    return psutil.Process().children(recursive=True)


def marked(mark):
    """The processes with ``mark`` in their environment, also orphans."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def processes(mark=None):
    """{pid: name} of the processes with ``mark``. Without it, of all that this process has started.

    The forkserver and the resource tracker of this process are left out, because it keeps them.
    """
    if mark is None:
        found = [*descendants(), *marked(os.environ[MARK])]
    else:
        found = marked(mark)
    kept = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    names = {}
    for process in found:
        with contextlib.suppress(psutil.Error):
            if process.pid not in kept:
                names[process.pid] = process.name()
    return names


def existing():
    """{kind: a set or a count of what exists now}, each of which can be subtracted from a later one."""
    this_process = psutil.Process()
    return {
        "processes": set(processes().items()),
        "files": {str(path) for path in Path(util.get_temp_dir()).rglob("*") if not path.is_socket()},  # launch's
        "threads": Counter(thread.name for thread in threading.enumerate()),
        "sockets": Counter(str(connection.laddr) for connection in this_process.net_connections(kind="inet")),
        "descriptors": Counter({"open": this_process.num_fds()}),
    }


def more_than(before):
    """{kind: what exists now and did not before}, without kinds of which nothing is new."""
    more = {kind: now - before[kind] for kind, now in existing().items()}
    return {kind: new for kind, new in more.items() if new}


def wait_until(condition, seconds=60):
    """Wait until ``condition()`` is true, at most ``seconds``; return its last value.

    A killed process takes a moment to be gone, and on a busy machine a long one: so ``seconds`` is generous.
    """
    end = time.monotonic() + seconds
    value = condition()
    while not value and time.monotonic() < end:
        time.sleep(0.02)
        value = condition()
    return value


@contextlib.contextmanager
def unchanged():
    """A context that fails with an AssertionError where its block leaves anything behind."""
    before = existing()
    yield
    wait_until(lambda: not more_than(before))
    assert more_than(before) == {}


@contextlib.contextmanager
def surroundings():
    """A context with (environment, mark) for processes to start: the environment has a temporary folder and the mark.

    Raises AssertionError where the processes or their files are still there at its end.
    """
    folder = tempfile.mkdtemp(prefix="one-")
    mark = f"{os.environ[MARK]}-{next(numbers)}"

    def nothing_is_left():
        return not processes(mark) and not listing(folder)

    try:
        yield {**os.environ, "TMPDIR": folder, "IPYTHONDIR": f"{folder}-ipython", MARK: mark}
        if not wait_until(nothing_is_left, 200):  # long, because a forkserver first ends its imports
            raise AssertionError(f"left: {processes(mark)}, {listing(folder)}")
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(f"{folder}-ipython", ignore_errors=True)


def listing(folder):
    """What is in a temporary folder, without torchrun's logs and the users' caches of torch and matplotlib."""
    caches = ("torchinductor_", "torchelastic_", "matplotlib-")
    return [name for name in os.listdir(folder) if not name.startswith(caches)]


class Kernel:
    """A real Jupyter kernel with a client, a temporary folder and a mark of its own."""

    def __init__(self, environment):
        self.folder = environment["TMPDIR"]
        self.mark = environment[MARK]
        # Its sockets are files beside the folder. Ports are chosen before it starts, and others may take them first.
        self.manager = KernelManager(transport="ipc", connection_file=f"{self.folder}.json", shutdown_wait_time=2)
        self.manager.start_kernel(env=environment)
        self.client = None
        self.connect()

    def connect(self):
        self.disconnect()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=200)

    def disconnect(self):
        if self.client:
            self.client.stop_channels()
            self.client.context.destroy(linger=0)

    def run(self, source):
        """Run a cell; return (the kernel's reply, what the cell printed)."""
        printed = []

        def show(message):
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        # With stop_on_error, ipykernel would drop this cell if it were waiting while the one before fails.
        reply = self.client.execute_interactive(
            textwrap.dedent(source), stop_on_error=False, output_hook=show, timeout=200
        )
        return reply["content"], "".join(printed)

    def start(self, source):
        """Start a cell, and wait until its ranks have written that they are in it. The cell goes on."""
        self.client.execute(textwrap.dedent(source), stop_on_error=False)
        assert wait_until(lambda: len(list(Path(self.folder).rglob("inside*"))) == 2)

    def ranks(self):
        """How many ranks there are: processes of the kernel without its forkserver and its resource tracker."""
        return len(processes(self.mark)) - 3

    def close(self):
        self.disconnect()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self.manager.context.destroy(linger=0)
        gc.collect()  # so that the client's threads and descriptors end now, and not during a later test


@contextlib.contextmanager
def own_kernel():
    """A context with a Kernel, which may leave nothing."""
    with surroundings() as environment:
        kernel = Kernel(environment)
        try:
            yield kernel
        finally:
            kernel.close()
