"""``launch`` leaves nothing behind, whether a return, an interrupt, or the end of its script or kernel ends it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
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


def test_calls_leave_this_process_as_it_was():
    """Ten that return, and five that fail: a cycle of a traceback would keep their processes."""

    def size():
        server = psutil.Process(forkserver._forkserver._forkserver_pid)
        mine = psutil.Process()
        return mine.num_fds(), mine.num_threads(), server.num_fds(), mine.memory_info().rss, server.memory_info().rss

    for _ in range(5):
        launch(torch.ones, 100_000, nproc=2)
    gc.collect()
    *counts, memory, server_memory = size()
    for _ in range(5):
        with pytest.raises(RankError):
            launch(lambda: 1 / 0, nproc=2)
    assert size()[0] == counts[0]
    for _ in range(10):
        launch(torch.ones, 100_000, nproc=2)
    gc.collect()
    # The forkserver closes a pipe of a rank a moment after it has told of the rank's end.
    assert leftovers.wait_until(lambda: all(new <= old for new, old in zip(size()[:3], counts, strict=True)))
    *_, new_memory, new_server_memory = size()
    assert new_memory - memory < 8e6 and new_server_memory - server_memory < 8e6  # bytes


def is_zombie(pid):
    """Whether the killed child has ended: a moment earlier it has closed its sockets, and still counts as alive."""
    return leftovers.wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_forkserver_that_is_killed_during_a_call():
    def kill(server):
        time.sleep(0.2)
        os.kill(server, signal.SIGKILL)  # a zombie until the next call, so it keeps its number
        time.sleep(1000)

    server = forkserver._forkserver._forkserver_pid
    assert "ranks 0-1 died" in str(failure(kill, server, nproc=2)) and is_zombie(server)
    assert launch(dist.get_rank, nproc=2) == [0, 1]


def test_interrupt_that_another_thread_takes():
    """The system may deliver a signal to any thread, which does not wake the thread that waits for the ranks."""
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        launch(time.sleep, 1000, nproc=2, timeout=600)
    assert time.monotonic() - start < 60


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_interrupt_in_the_middle_of_a_call():
    """A Ctrl-C ends a call at any moment, and nothing is left.

    It may come between the making of a file or a socket and its with. Then the object's end closes it, and warns.
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


def python(*words, **options):
    """Run Python in a temporary folder that has to be empty at the end; return the finished process."""
    with leftovers.surroundings() as environment:
        command = [sys.executable, "-W", "error", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, **options)


def test_plain_script_needs_no_main_guard_and_shows_the_ranks_traceback(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}launch(step, 1, nproc=2)\n")
    process = python("script.py", cwd=tmp_path)
    assert (process.returncode, process.stdout) == (1, "[1, 2]\n")
    assert "RankError: rank 0 failed first: ZeroDivisionError" in process.stderr
    assert "line 7 of step in script.py: return x / dist.get_rank()" in process.stderr


def test_process_group_that_is_killed_right_after_the_forkservers_start_leaves_nothing():
    """nbval ends the kernel of a short notebook like this, while the forkserver still imports torch."""
    source = "import os\nfrom helpers.ranks.launch import warm\nwarm()\nos.killpg(0, 9)"
    assert python("-c", source, start_new_session=True).returncode == -9


# --- a notebook's kernel ----------------------------------------------------------------------------------------------


WARM = """
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
        dist.barrier() if dist.get_rank() else sum(range(10**13))  # in a collective; and where the GIL is not let go

    print(launch(rank, nproc=2))
"""


@pytest.fixture(scope="module")
def own_kernel():
    with leftovers.own_kernel() as kernel:
        yield kernel


@pytest.fixture
def kernel(own_kernel):
    """A kernel that has loaded helpers and made a launch, whatever the test before has done to it."""
    reply, printed = own_kernel.run(WARM)
    assert (reply["status"], printed) == ("ok", "[0, 1]\n"), reply
    return own_kernel


def test_interrupt_of_the_kernel_ends_the_ranks_and_spares_the_forkserver(kernel):
    server = "from multiprocessing.forkserver import _forkserver as server; print(server._forkserver_pid)"
    before = kernel.run(server)[1]
    kernel.start("launch(hang, nproc=2, timeout=600)")
    assert kernel.ranks() == 2
    kernel.manager.interrupt_kernel()
    reply = kernel.client.get_shell_msg(timeout=60)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert reply["traceback"] == ["KeyboardInterrupt: the call was interrupted, and its ranks are ended."]
    assert kernel.ranks() == 0  # no wait here: ranks end before their cell
    assert kernel.run("print(launch(rank, nproc=2))")[1] == "[0, 1]\n"
    assert kernel.run(server)[1] == before


@pytest.mark.parametrize(
    ("end", "hangs"),
    [("restart now", False), ("restart politely", True), ("SIGKILL", True)],
)
def test_end_of_the_kernel_leaves_nothing(kernel, end, hangs):
    """With hanging ranks or without any: the old kernel leaves no process and no file."""
    if hangs:
        kernel.start("launch(hang, nproc=2)")
    old = leftovers.processes(kernel.mark)
    assert kernel.ranks() == (2 if hangs else 0)
    if end == "SIGKILL":
        os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    kernel.manager.restart_kernel(now=end != "restart politely")
    kernel.connect()
    assert leftovers.wait_until(lambda: not old.keys() & leftovers.processes(kernel.mark).keys())
    assert leftovers.wait_until(lambda: not leftovers.listing(kernel.folder)), leftovers.listing(kernel.folder)
