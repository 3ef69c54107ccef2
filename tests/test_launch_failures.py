"""``launch``: what its errors say about each way to fail or to hang."""

import itertools
import os
import re
import signal
import sys
import textwrap
import threading
import time
from multiprocessing import forkserver, util
from pathlib import Path

import cloudpickle
import leftovers
import psutil
import pytest
import torch.distributed as dist
from launching import CallWhenUnpickled, cell, failure, linux, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks import collecting
from helpers.ranks.messages import first_failure
from helpers.ranks.rank import Failure

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

# --- failures ---------------------------------------------------------------------------------------------------------


def fails_by(statement):
    """A function for ranks, in which rank 1 executes this statement while its peers wait in a collective."""
    return cell(f"""
        def step():
            x = torch.ones(200_000)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                {statement}
            dist.all_reduce(x)
            time.sleep(100)
    """).step


def test_rank_that_raises_is_named_with_its_own_line():
    page = cell("""
        def check(batch):
            if batch.sum() > 1:
                raise ValueError("too many samples")

        def step():
            x = torch.ones(1)
            if dist.get_rank() == 1:
                check(torch.ones(3))
            dist.all_reduce(x)
    """)
    error = failure(page.step, nproc=4)
    assert error.rank == 1
    assert list(error.failures) == [1]
    assert str(error) == (
        'rank 1 failed first: ValueError: too many samples\n  at line 3 of check: raise ValueError("too many samples")'
    )
    # Lines such as "    ~~~~~^^^^" underline the error. They differ between versions of Python.
    without_underlines = re.sub(r"^ *[~^]+\n", "", error.failures[1], flags=re.MULTILINE)
    assert without_underlines == textwrap.dedent("""\
        Traceback (most recent call last):
          File "notebook cell", line 8, in step
            check(torch.ones(3))
          File "notebook cell", line 3, in check
            raise ValueError("too many samples")
        ValueError: too many samples
    """)


@pytest.mark.parametrize(
    ("statement", "cause"),
    [
        pytest.param("os._exit(0)", "ended by itself with exit code 0", id="exit"),
        pytest.param(
            "os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '1000'); os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL (the system reports no out-of-memory kill)",
            id="SIGKILL to a rank that has started a program",
        ),
    ],
)
def test_rank_that_dies_is_named_and_not_its_peers_that_lose_it(statement, cause):
    """What the rank has started ends with it: the fixture nothing_left looks for processes."""
    error = failure(fails_by(statement), nproc=4)
    assert error.rank == 1
    assert str(error) == f"rank 1 died first: {cause}"


@linux
def test_last_lines_of_a_killed_rank_and_its_peers_are_shown(monkeypatch, capsys):
    """A peer that still computes when a rank is killed, as on a busy machine, goes on until it waits."""
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 1000)  # seconds
    page = cell("""
        def step():
            if dist.get_rank() == 1:
                print("its own last line", end="", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                pass
            print("a line after the kill")
            time.sleep(1000)
    """)
    assert failure(page.step, nproc=2).rank == 1
    assert capsys.readouterr().out == "[rank 0] a line after the kill\n[rank 1] its own last line\n"


@linux
def test_death_that_is_noticed_after_its_echo(monkeypatch):
    """A rank that was killed is the cause, also if its peer reports the lost connection before its death is known.

    The forkserver tells of a rank's death. Here rank 1 stops the forkserver before it kills itself, and the thread
    ``late`` lets the forkserver go on when the peer, rank 0, has written its report.
    """
    monkeypatch.setattr(collecting, "LATE_WITHIN", 60)  # seconds
    page = cell("""
        def step(server):
            x = torch.ones(1)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                os.kill(server, signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x)
    """)
    server = psutil.Process(forkserver._forkserver._forkserver_pid)

    def let_server_go_on():
        leftovers.wait_until(lambda: server.status() == psutil.STATUS_STOPPED)
        leftovers.wait_until(lambda: list(Path(util.get_temp_dir()).glob("launch*/report0")))
        server.resume()

    late = threading.Thread(target=let_server_go_on)
    late.start()
    error = failure(page.step, server.pid, nproc=2)
    late.join()
    assert str(error).startswith("rank 1 died first: killed by SIGKILL")
    assert "Connection" in error.failures[0]


def test_first_of_two_failures_is_named(monkeypatch):
    """Rank 0 fails, too, but only when rank 1 has written its report."""
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 60)  # both are reported before the launcher goes on
    page = cell("""
        def step():
            folder = os.path.dirname(os.environ["WORLD_SIZE_ONE_STORE"])
            while dist.get_rank() == 0 and not os.path.exists(os.path.join(folder, "report1")):
                time.sleep(0.001)
            raise ValueError(f"from {dist.get_rank()}")
    """)
    error = failure(page.step, nproc=2)
    assert "from 1" in str(error)
    assert sorted(error.failures) == [0, 1]


def test_a_cause_is_named_before_the_connections_that_it_broke():
    lost = Failure(when=1, what="RuntimeError: Connection closed by peer", traceback="...", lost_peer=True)
    cause = Failure(when=2, what="KeyError: 'the cause'", traceback="...")
    error = first_failure({0: lost, 1: cause}, out_of_memory=False)
    assert str(error) == "rank 1 failed first: KeyError: 'the cause'"


def test_ranks_that_fail_in_the_same_way_are_named_together():
    """Two messages that differ only in the rank's number are the same way."""
    failure_0 = Failure(when=0, what="ValueError: rank 0 has no data", traceback="...")
    failure_1 = Failure(when=1, what="ValueError: rank 1 has no data", traceback="...")
    error = first_failure({0: failure_0, 1: failure_1}, out_of_memory=False)
    assert str(error) == "ranks 0-1 failed: ValueError: rank 0 has no data"


def sleep():
    time.sleep(10_000)


def compute():
    sum(range(10**13))


@pytest.mark.parametrize("go_on", [sleep, compute])
def test_peer_that_sleeps_or_never_ends_its_work_does_not_hide_a_failure(go_on):
    def step():
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("no data")
        go_on()

    error = failure(step, nproc=2, timeout=10_000)
    assert str(error).startswith("rank 0 failed first: ValueError: no data")


def test_end_of_memory_is_named(monkeypatch):
    """If the system has counted one more out-of-memory kill during the call, it is taken for the cause of a SIGKILL."""
    counts = itertools.count()

    def count_one_more_each_time():
        return next(counts)

    def kill_itself():
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("helpers.ranks.launch.count_oom_kills", count_one_more_each_time)
    error = failure(kill_itself, nproc=1)
    assert "out-of-memory killer: use less memory" in str(error)


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_hang_names_each_ranks_line(capsys):
    """The message of a hang has the line at which each rank is.

    A rank may keep the GIL, block and handle all signals, or have other threads: it is asked without a signal. The
    function's name is not ASCII, and is shown as it is, though faulthandler escapes it.
    """
    page = cell("""
        NUMBERS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT

        def step_é_β():
            rank = dist.get_rank()
            print("started")
            for number in NUMBERS:
                before = signal.signal(number, lambda *_: os.write(1, b"a signal"))
                assert before in (signal.SIG_DFL, signal.SIG_IGN)  # nohup ignores SIGHUP
            if rank == 0:
                return "done"
            if rank == 1:
                sum(range(10**13))  # keeps the GIL
            if rank == 2:
                signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
                threading.Thread(target=time.sleep, args=(1000,)).start()
                threading.Event().wait()
            dist.all_reduce(torch.ones(1))
    """)
    error = failure(page.step_é_β, nproc=5, timeout=6)
    assert str(error).splitlines() == [
        "4 of 5 ranks still ran after timeout=6 s:",
        "  rank 0: finished",
        "  rank 1: at line 12 of step_é_β: sum(range(10**13))  # keeps the GIL",
        "  rank 2: at line 16 of step_é_β: threading.Event().wait()",
        "  ranks 3-4: at line 17 of step_é_β: dist.all_reduce(torch.ones(1))",
    ]
    assert error.rank is None
    assert sorted(error.failures) == [1, 2, 3, 4]
    assert capsys.readouterr().out == "[ranks 0-4] started\n"  # nobody watches, so there is no live line


def test_rank_that_hangs_before_the_call_is_ended():
    """It cannot be asked for its line, because it still unpickles its arguments."""
    argument = CallWhenUnpickled(time.sleep, 100)
    error = failure(print, argument, nproc=2, timeout=1)
    assert "2 of 2 ranks still ran" in str(error)


def test_rank_that_is_stopped_is_ended():
    def stop_rank_1():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            dist.barrier()

    error = failure(stop_rank_1, nproc=2, timeout=1)
    assert "2 of 2 ranks still ran" in str(error)
