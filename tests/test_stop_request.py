"""A signal to one rank stops all ranks at one step, a rank that hangs is ended, and nothing is left behind."""

import contextlib
import os
import signal
import socket
import sys
import threading

import cloudpickle
import leftovers
import pytest
import torch.distributed as dist
from forked import AT_ADDRESS, Work, forked

from helpers.ranks.launch import launch
from helpers.runtime.process_group import start_process_group, stop_process_group
from helpers.runtime.stop_request import StopRequest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second
pytestmark = pytest.mark.ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# In the first start rank 1 dies. Rank 0 waits in C code, where no Python handler runs, as in a collective of NCCL.
# The death waits for rank 0 to be in the block: before, SIGTERM is none of StopRequest's.
STUCK = """\
import ctypes, os, sys, time
from pathlib import Path

import torch.distributed as dist
from helpers.runtime.stop_request import StopRequest

dist.init_process_group("gloo")
with StopRequest(patience=3) as stop:
    stop.agreed()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if dist.get_rank() == 1:
            while not Path("armed").exists():
                time.sleep(0.01)
            os._exit(3)
        Path("armed").touch()
        lock, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_lock(lock)
print(f"rank {dist.get_rank()} went on\\n", end="", flush=True)  # in one write
"""


def steps_until_stopped(number, who, at):
    """(after how many steps this rank stopped, the signal's name). The rank ``who`` gets a signal in step ``at``."""
    with StopRequest() as stop:
        for step in range(1, 50):
            if dist.get_rank() == who and step == at:
                os.kill(os.getpid(), number)
            if stop.agreed():
                break
    return step, stop.asked


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_one_rank_stops_all_at_one_step(number):
    assert launch(steps_until_stopped, number, 1, 7, nproc=3) == [(8, number.name)] * 3
    assert launch(steps_until_stopped, number, 5, 7, nproc=2) == [(49, None)] * 2


@pytest.fixture
def group():
    start_process_group()
    yield
    stop_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_there_before_is_there_afterwards(group, fails):
    calls, (bell, ring) = [], socket.socketpair()

    def mine(*_):
        calls.append(1)

    with bell, ring, contextlib.ExitStack() as stack:
        for end in (bell, ring):
            end.setblocking(False)
        for number in SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, mine))
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(ring.fileno()))
        threads = threading.active_count()
        with contextlib.suppress(ZeroDivisionError), StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.agreed() is None and stop.agreed() == stop.asked == "SIGUSR1"
            if fails:
                raise ZeroDivisionError
        assert not calls
        assert [signal.getsignal(number) for number in SIGNALS] == [mine, mine]
        assert leftovers.wait_until(lambda: threading.active_count() == threads)
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [1] and bell.recv(9) == bytes([signal.SIGTERM])


def fail_while_the_peer_is_busy(failed):
    """On each rank: rank 0 leaves the block with an exception, while its question is open because rank 1 waits."""
    with contextlib.suppress(ZeroDivisionError), StopRequest() as stop:
        if dist.get_rank() == 0:
            stop.agreed()
            raise ZeroDivisionError
        assert leftovers.wait_until(failed.exists, 50)
        stop.agreed()
    failed.touch()


def test_an_exception_inside_waits_for_nobody(tmp_path):
    launch(fail_while_the_peer_is_busy, tmp_path / "failed", nproc=2)


def test_a_rank_that_is_stuck_in_c_ends_and_the_job_goes_on(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["--nproc-per-node=2", "--max-restarts=1", *AT_ADDRESS, "stuck.py"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    status, out, errors, left = forked(Work("forked_torchrun", "main", words, str(tmp_path)), environment, timeout=120)
    assert status == 0 and not left, errors
    assert sorted(out.split("\n")) == ["", "rank 0 went on", "rank 1 went on"]
    assert "no step in 3 s after SIGTERM" in errors
    assert "SIGKILL" not in errors  # which torchrun sends to a rank that has not ended after 30 s
