"""``launch`` leaves nothing behind, whether a return, an interrupt, or the end of its script or kernel ends it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver

import leftovers
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from launching import failure, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks.launch import RankError, launch

pytestmark = pytest.mark.ranks

# --- nothing is left --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What this process and the forkserver use of the system."""

    descriptors: int
    threads: int
    server_descriptors: int
    bytes: int
    server_bytes: int


def usage():
    """The Usage of now."""
    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    mine = psutil.Process()
    return Usage(
        descriptors=mine.num_fds(),
        threads=mine.num_threads(),
        server_descriptors=server.num_fds(),
        bytes=mine.memory_info().rss,
        server_bytes=server.memory_info().rss,
    )


def divide_by_zero():
    return 1 / 0


def test_calls_leave_this_process_as_it_was():
    """Ten that return, and five that fail: a cycle of a traceback would keep their processes."""
    for _ in range(5):  # what the first calls take stays
        launch(torch.ones, 100_000, nproc=2)
    gc.collect()
    before = usage()

    for _ in range(5):
        with pytest.raises(RankError):
            launch(divide_by_zero, nproc=2)
    assert usage().descriptors == before.descriptors

    for _ in range(10):
        launch(torch.ones, 100_000, nproc=2)
    gc.collect()

    def no_more_than_before():
        now = usage()
        return (
            now.descriptors <= before.descriptors
            and now.threads <= before.threads
            and now.server_descriptors <= before.server_descriptors
        )

    # The forkserver closes a pipe of a rank a moment after it has told of the rank's end.
    assert leftovers.wait_until(no_more_than_before)
    after = usage()
    assert after.bytes - before.bytes < 8e6
    assert after.server_bytes - before.server_bytes < 8e6


def test_forkserver_that_is_killed_during_a_call():
    def kill(server):
        time.sleep(0.2)
        os.kill(server, signal.SIGKILL)
        time.sleep(1000)

    server = psutil.Process(forkserver._forkserver._forkserver_pid)
    error = failure(kill, server.pid, nproc=2)
    assert "ranks 0-1 died" in str(error)
    # It stays a zombie until the next call. A moment earlier it has closed its sockets, and still counts as alive.
    assert leftovers.wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE)
    assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_interrupt_that_another_thread_takes():
    """The system may deliver a signal to any thread, which does not wake the thread that waits for the ranks."""

    def interrupt_this_thread():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt_this_thread)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        launch(time.sleep, 1000, nproc=2, timeout=600)
    assert time.monotonic() - start < 60


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_interrupt_in_the_middle_of_a_call():
    """A Ctrl-C ends a call at any moment, and nothing is left.

    It may come when a file or a socket has been opened and its ``with`` has not begun. Then the garbage collector
    closes it, with a ResourceWarning, which is allowed here.
    """
    for delay in np.linspace(0.001, 0.25, 6):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            launch(time.sleep, 1000, nproc=3, timeout=600)
        assert time.monotonic() - start < 60
        timer.join()
    assert launch(dist.get_rank, nproc=2) == [0, 1]


# --- scripts ----------------------------------------------------------------------------------------------------------


SCRIPT = """
import os
import torch.distributed as dist
from helpers.ranks.launch import launch

def step(x):
    return x / dist.get_rank()

print(launch(lambda x: x + dist.get_rank(), 1, nproc=2))
"""


def python(*arguments, **options):
    """Run Python with these arguments. Returns the finished process, which may leave no process and temporary file."""
    with leftovers.surroundings() as environment:
        command = [sys.executable, "-W", "error", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, **options)


def test_plain_script_needs_no_main_guard_and_shows_the_ranks_traceback(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}launch(step, 1, nproc=2)\n")
    process = python("script.py", cwd=tmp_path)
    assert process.returncode == 1
    assert process.stdout == "[1, 2]\n"
    assert "RankError: rank 0 failed first: ZeroDivisionError" in process.stderr
    assert "line 7 of step in script.py: return x / dist.get_rank()" in process.stderr


def test_process_group_that_is_killed_right_after_the_forkservers_start_leaves_nothing():
    """nbval ends the kernel of a short notebook like this, while the forkserver still imports torch."""
    source = "import os\nfrom helpers.ranks.launch import warm\nwarm()\nos.killpg(0, 9)"
    process = python("-c", source, start_new_session=True)
    assert process.returncode == -signal.SIGKILL


# --- a notebook's kernel ----------------------------------------------------------------------------------------------


LOAD_AND_LAUNCH = """
    %reload_ext helpers
    import os, time, pathlib
    from helpers.ranks.launch import launch

    def rank():  # the ranks import torch; a kernel that does not starts in half the time
        import torch.distributed as dist
        return dist.get_rank()

    def hang():
        import torch.distributed as dist
        inside = pathlib.Path(os.environ["WORLD_SIZE_ONE_STORE"]).parent
        (inside / f"inside{dist.get_rank()}").touch()
        if dist.get_rank() == 0:
            sum(range(10**13))  # keeps the GIL
        else:
            dist.barrier()

    print(launch(rank, nproc=2))
"""


@pytest.fixture(scope="module")
def own_kernel():
    with leftovers.own_kernel() as kernel:
        yield kernel


@pytest.fixture
def kernel(own_kernel):
    """A kernel that has loaded helpers and made a launch, whatever the test before has done to it."""
    reply, printed = own_kernel.run(LOAD_AND_LAUNCH)
    assert reply["status"] == "ok", reply
    assert printed == "[0, 1]\n"
    return own_kernel


def printed_by(kernel, source):
    """What a cell prints."""
    _, printed = kernel.run(source)
    return printed


def test_interrupt_of_the_kernel_ends_the_ranks_and_spares_the_forkserver(kernel):
    print_server = "from multiprocessing.forkserver import _forkserver as server; print(server._forkserver_pid)"
    server_before = printed_by(kernel, print_server)
    kernel.start("launch(hang, nproc=2, timeout=600)")
    assert kernel.ranks() == 2

    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=60)["content"]
    assert reply["status"] == "error"
    assert reply["ename"] == "KeyboardInterrupt"
    assert reply["traceback"] == ["KeyboardInterrupt: the call was interrupted, and its ranks are ended."]
    assert kernel.ranks() == 0  # no wait here: ranks end before their cell
    assert printed_by(kernel, "print(launch(rank, nproc=2))") == "[0, 1]\n"
    assert printed_by(kernel, print_server) == server_before


def restart_at_once(manager):
    manager.restart_kernel(now=True)


def restart_politely(manager):
    manager.restart_kernel(now=False)


def kill_and_restart(manager):
    os.kill(manager.provisioner.pid, signal.SIGKILL)
    manager.restart_kernel(now=True)


@pytest.mark.parametrize(
    ("restart", "hanging_ranks"), [(restart_at_once, 0), (restart_politely, 2), (kill_and_restart, 2)]
)
def test_end_of_the_kernel_leaves_nothing(kernel, restart, hanging_ranks):
    """With hanging ranks or without any: the old kernel leaves no process and no file."""
    if hanging_ranks > 0:
        kernel.start("launch(hang, nproc=2)")
    old = leftovers.processes(kernel.mark)
    assert kernel.ranks() == hanging_ranks

    restart(kernel.manager)
    kernel.connect()
    assert leftovers.wait_until(lambda: not old.keys() & leftovers.processes(kernel.mark).keys())
    assert leftovers.wait_until(lambda: not leftovers.listing(kernel.folder)), leftovers.listing(kernel.folder)
