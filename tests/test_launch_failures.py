"""``launch``: what its errors say about each way to fail or to hang."""

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import forkserver, util
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import leftovers
import psutil
import pytest
import torch.distributed as dist
from launching import Trap, cell, failure, linux, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks import collecting
from helpers.ranks.collecting import Outcome, Rank, collect, lines_at_timeout
from helpers.ranks.rank import MET, RETURNED, describe

pytestmark = pytest.mark.ranks
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

# --- failures ---------------------------------------------------------------------------------------------------------


def failing(how):
    """A function whose rank 1 runs the statement ``how`` while its peers wait in a collective."""
    return cell(f"""
        class Odd(Exception):
            pass

        def step():
            x = torch.ones(200_000)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                {how}
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
    assert error.rank == 1 and list(error.failures) == [1]
    assert str(error) == (
        'rank 1 failed first: ValueError: too many samples\n  at line 3 of check: raise ValueError("too many samples")'
    )
    without_carets = re.sub(r"^ *[~^]+\n", "", error.failures[1], flags=re.M)  # they differ between versions of Python
    assert without_carets == textwrap.dedent("""\
        Traceback (most recent call last):
          File "notebook cell", line 8, in step
            check(torch.ones(3))
          File "notebook cell", line 3, in check
            raise ValueError("too many samples")
        ValueError: too many samples
    """)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("os._exit(0)", "ended by itself with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (the system reports no out-of-memory kill)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
    ],
)
def test_rank_that_dies_is_named_and_not_its_peers_that_lose_it(how, text):
    error = failure(failing(how), nproc=4)
    assert (error.rank, str(error)) == (1, f"rank 1 died first: {text}")


def test_killed_rank_is_named_without_a_wait_for_peers(monkeypatch):
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 1000)
    monkeypatch.setattr(collecting, "LATE_WITHIN", 1000)
    error = failure(lambda: os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() else time.sleep(1000), nproc=2)
    assert str(error).startswith("rank 1 died first: killed by SIGKILL")


@linux
def test_last_lines_of_a_killed_rank_and_its_peers_are_shown(monkeypatch, capsys):
    """A peer that still computes when a rank is killed, as on a busy machine, goes on until it waits."""
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 1000)
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


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("sys.exit()", "SystemExit"),
        ("raise Odd(lambda: 0) from KeyError('early')", "Odd: <function"),  # pickle refuses it
    ],
)
def test_every_exception_is_named(how, text):
    error = failure(failing(how), nproc=2)
    assert error.rank == 1 and str(error).startswith(f"rank 1 failed first: {text}")
    assert "notebook cell" in error.failures[1] and "helpers" not in error.failures[1]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unprintable(), "Unprintable: <exception str() failed>"),
        (ExceptionGroup("two", [ValueError("one"), KeyError("other")]), "two (2 sub-exceptions)"),
    ],
)
def test_exceptions_of_several_kinds_are_described(error, text):
    failure = describe(error)
    assert text in failure.what and text in failure.traceback


def test_what_an_exception_was_raised_from_is_described():
    error = ValueError("late")
    error.__cause__ = KeyError("early")
    assert "KeyError: 'early'\n\nThe above exception was the direct" in describe(error).traceback


@linux
def test_death_that_is_noticed_after_its_echo(monkeypatch):
    """The forkserver tells of a rank's death. Here it is stopped until the peer has reported the lost connection."""
    monkeypatch.setattr(collecting, "LATE_WITHIN", 60)
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

    def go_on():
        leftovers.wait_until(lambda: server.status() == psutil.STATUS_STOPPED)
        leftovers.wait_until(lambda: list(Path(util.get_temp_dir()).glob("launch*/report0")))
        server.resume()

    late = threading.Thread(target=go_on)
    late.start()
    error = failure(page.step, server.pid, nproc=2)
    late.join()
    assert str(error).startswith("rank 1 died first: killed by SIGKILL")
    assert "Connection" in error.failures[0]


def test_cause_that_comes_after_its_echo(tmp_path, monkeypatch):
    """Rank 1 closes its connections, waits until its peer has failed for that reason, and then raises the cause."""
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 60)  # both are reported before the launcher goes on
    page = cell("""
        def step(echo):
            x = torch.ones(1)
            dist.all_reduce(x)
            if dist.get_rank() == 1:
                dist.destroy_process_group()
                while not echo.exists():
                    time.sleep(0.001)
                raise KeyError("the cause")
            try:
                dist.all_reduce(x)
            except RuntimeError as error:
                echo.touch()
                raise ValueError("the reader's own words") from error
    """)
    error = failure(page.step, tmp_path / "echo", nproc=2)
    assert str(error).startswith("rank 1 failed first: KeyError: 'the cause'")
    assert "Connection" in error.failures[0] and "own words" in error.failures[0]


def test_first_of_two_failures_is_named(monkeypatch):
    monkeypatch.setattr(collecting, "PEERS_WITHIN", 60)  # both are reported before the launcher goes on
    page = cell("""
        def step():
            folder = os.path.dirname(os.environ["WORLD_SIZE_ONE_STORE"])
            while dist.get_rank() == 0 and not os.path.exists(os.path.join(folder, "report1")):
                time.sleep(0.001)
            raise ValueError(f"from {dist.get_rank()}")
    """)
    error = failure(page.step, nproc=2)
    assert "from 1" in str(error) and sorted(error.failures) == [0, 1]


def in_turn():
    """A cell with a function that fails on both of two ranks, but on rank 1 only after ``do(seconds)``."""
    return cell("""
        def step(do, seconds):
            dist.barrier()
            if dist.get_rank() == 1:
                do(seconds)
            print("here")
            raise ValueError("no data")

        def work(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                pass
    """)


@linux
def test_late_peer_that_fails_in_the_same_way_is_named_too(monkeypatch, capsys):
    """A peer that computes is waited for: a busy machine may slow it. Here it fails while `busy` looks at it."""
    monkeypatch.setattr(collecting, "LATE_WITHIN", 60)
    page = in_turn()
    busy = collecting.busy

    def look_slowly(pid):
        time.sleep(0.6)
        return busy(pid)

    monkeypatch.setattr(collecting, "busy", look_slowly)
    assert str(failure(page.step, page.work, 0.5, nproc=2)).startswith("ranks 0-1 failed: ValueError: no data")
    assert capsys.readouterr().out == "[ranks 0-1] here\n"


@pytest.mark.parametrize("do", ["sleep", "work"])
def test_peer_that_sleeps_or_never_ends_its_work_does_not_hide_a_failure(do):
    page = in_turn()
    error = failure(page.step, {"sleep": time.sleep, "work": page.work}[do], 10_000, nproc=2, timeout=10_000)
    assert str(error).startswith("rank 0 failed first: ValueError: no data")


def test_end_of_memory_is_named(monkeypatch):
    counts = itertools.count()  # of the kills since the machine's start
    monkeypatch.setattr("helpers.ranks.launch.count_oom_kills", lambda: next(counts))
    error = failure(lambda: os.kill(os.getpid(), signal.SIGKILL), nproc=1)
    assert "out-of-memory killer: use less memory" in str(error)


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_hang_names_each_ranks_line(capsys):
    """The rank may keep the GIL, block and handle all signals, or have threads, and it gets no signal.

    Names that are not ASCII are told, too, which faulthandler escapes.
    """
    page = cell("""
        NUMBERS = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT

        def step_é_β():
            rank = dist.get_rank()
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
        "  rank 1: at line 11 of step_é_β: sum(range(10**13))  # keeps the GIL",
        "  rank 2: at line 15 of step_é_β: threading.Event().wait()",
        "  ranks 3-4: at line 16 of step_é_β: dist.all_reduce(torch.ones(1))",
    ]
    assert error.rank is None and sorted(error.failures) == [1, 2, 3, 4]
    assert capsys.readouterr().out == ""


def test_slow_start_does_not_count(tmp_path):
    """A call's time begins when its ranks have met. Here one rank needs twice that time before they meet."""
    here, there = multiprocessing.Pipe(duplex=False)
    alive, _ = multiprocessing.Pipe()
    late = threading.Timer(1, os.write, (there.fileno(), MET + RETURNED))
    late.start()
    assert collect(tmp_path, [Rank(SimpleNamespace(sentinel=alive), here)], timeout=0.5) == Outcome({0}, {0})
    late.join()


@pytest.mark.parametrize(
    "call",
    [
        (print, Trap(time.sleep, 100)),
        (lambda: os.kill(os.getpid(), signal.SIGSTOP) if dist.get_rank() else dist.barrier(),),
    ],
    ids=["hangs before the call", "stopped"],
)
def test_rank_that_cannot_be_asked_is_ended(call):
    assert "2 of 2 ranks still ran" in str(failure(*call, nproc=2, timeout=1))


def test_rank_that_tells_its_line_late_is_waited_for(monkeypatch):
    """The rank is stopped when the time is over, and goes on a little later."""
    monkeypatch.setattr(collecting, "LATE_WITHIN", 60)  # a busy machine may need long to let the rank run again

    def stop():
        if dist.get_rank() == 1:
            subprocess.Popen(["sh", "-c", f"sleep 2.3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        dist.barrier()

    message = str(failure(stop, nproc=2, timeout=2))
    assert message.startswith("2 of 2 ranks still ran after timeout=2 s:")
    assert "rank 0: at line" in message and "rank 1: at line" in message


def test_line_is_read_when_its_stack_is_complete(tmp_path):
    """faulthandler writes a stack piece by piece, the innermost frame first."""
    stack = tmp_path / "stack0"
    begin = f'Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "{os.__file__}", line 1 in wait\n'
    end = '  File "mine.py", line 7 in step\n  File "<string>", line 1 in <module>\n'
    stack.write_text(begin)
    late = threading.Timer(0.4, stack.write_text, [begin + end])
    late.start()
    assert lines_at_timeout(tmp_path, 1)[0].startswith("line 7 of step in mine.py")
    late.join()
