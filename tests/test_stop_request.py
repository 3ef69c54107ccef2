"""A signal to one rank stops all ranks at one step."""

import os
import signal
import sys

import cloudpickle
import pytest
import torch.distributed as dist

from helpers.ranks.launch import launch
from helpers.runtime.stop_request import StopRequest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second
pytestmark = pytest.mark.ranks


def steps_until_stopped(number, signalled_rank, signalled_step):
    """(after how many of 49 steps this rank stopped, the signal's name). One rank gets the signal, in one step."""
    stop = StopRequest()
    for step in range(1, 50):
        if dist.get_rank() == signalled_rank and step == signalled_step:
            os.kill(os.getpid(), number)
        if stop.agreed():
            break
    return step, stop.signal_name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_ranks_one_step_later(number):
    results = launch(steps_until_stopped, number, 1, 7, nproc=3)
    assert results == [(8, number.name)] * 3


def test_without_a_signal_nobody_stops():
    assert launch(steps_until_stopped, signal.SIGTERM, 5, 7, nproc=2) == [(49, None)] * 2
