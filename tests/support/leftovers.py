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

# An environment variable for the processes that a test starts. Its value, a mark, finds them, also the orphans.
MARK = "WORLD_SIZE_ONE_CENSUS"
os.environ.setdefault(MARK, uuid.uuid4().hex)
numbers_of_marks = itertools.count()


def descendants():
    """The processes that this one has started, and those that they have."""
    return psutil.Process().children(recursive=True)


def marked(mark):
    """The processes with this mark in their environment, also orphans."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def processes(mark=None):
    """The processes with this mark, as {process id: name}. Without a mark: all that this process has started.

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
    """What exists now and a test may leave behind: for each kind, such as "threads", a set or a Counter of them."""
    this_process = psutil.Process()
    folder_of_launch = Path(util.get_temp_dir())
    files = [str(path) for path in folder_of_launch.rglob("*") if not path.is_socket()]
    threads = [thread.name for thread in threading.enumerate()]
    sockets = [str(connection.laddr) for connection in this_process.net_connections(kind="inet")]
    return {
        "processes": set(processes().items()),
        "files": set(files),
        "threads": Counter(threads),
        "sockets": Counter(sockets),
        "descriptors": Counter({"open": this_process.num_fds()}),
    }


def more_than(before):
    """What exists now and did not when ``existing`` returned ``before``, as {kind: new ones}; {} if nothing is new."""
    more = {}
    for kind, now in existing().items():
        new = now - before[kind]
        if new:
            more[kind] = new
    return more


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
    """A context with environment variables for processes to start, with a temporary folder and a mark of their own.

    At its end, it waits for the processes. Raises AssertionError if they, or their temporary files, do not go away.
    """
    folder = tempfile.mkdtemp(prefix="one-")
    mark = f"{os.environ[MARK]}-{next(numbers_of_marks)}"

    def nothing_is_left():
        return not processes(mark) and not listing(folder)

    try:
        yield {**os.environ, "TMPDIR": folder, "IPYTHONDIR": f"{folder}-ipython", MARK: mark}
        # A forkserver ends only after its imports, which take long on a busy machine.
        if not wait_until(nothing_is_left, seconds=200):
            raise AssertionError(f"left: {processes(mark)}, {listing(folder)}")
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(f"{folder}-ipython", ignore_errors=True)


def listing(folder):
    """The names in a temporary folder, without torchrun's logs and the users' caches of torch and matplotlib."""
    caches = ("torchinductor_", "torchelastic_", "matplotlib-")
    return [name for name in os.listdir(folder) if not name.startswith(caches)]


class Kernel:
    """A real Jupyter kernel with a client. ``environment`` is from ``surroundings``."""

    def __init__(self, environment):
        self.folder = environment["TMPDIR"]
        self.mark = environment[MARK]
        # Its sockets are files beside the folder. Ports are chosen before it starts, and others may take them first.
        self.manager = KernelManager(transport="ipc", connection_file=f"{self.folder}.json", shutdown_wait_time=2)
        self.manager.start_kernel(env=environment)
        self.client = None
        self.connect()

    def connect(self):
        """Connect a new client to the kernel, which may have been restarted."""
        self.disconnect()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=200)

    def disconnect(self):
        if self.client:
            self.client.stop_channels()
            self.client.context.destroy(linger=0)

    def run(self, source):
        """Run a cell, and wait for its end. Returns (the kernel's reply as a dictionary, what the cell printed)."""
        printed = []

        def keep_what_is_printed(message):
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])

        # With stop_on_error, ipykernel would drop this cell if it were waiting while the one before fails.
        reply = self.client.execute_interactive(
            textwrap.dedent(source), stop_on_error=False, output_hook=keep_what_is_printed, timeout=200
        )
        return reply["content"], "".join(printed)

    def start(self, source):
        """Start a cell, and wait until its two ranks each have written a file ``inside…``. The cell goes on."""
        self.client.execute(textwrap.dedent(source), stop_on_error=False)
        assert wait_until(lambda: len(list(Path(self.folder).rglob("inside*"))) == 2)

    def ranks(self):
        """How many ranks there are: all processes but the kernel, its forkserver and its resource tracker."""
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
    """A context with a Kernel. Raises AssertionError if the kernel leaves processes or files behind."""
    with surroundings() as environment:
        kernel = Kernel(environment)
        try:
            yield kernel
        finally:
            kernel.close()
