"""A signal to one rank stops all ranks at one step, and a rank that waits too long for another raises an error."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch.distributed as dist

from helpers.ranks.launch import launch
from helpers.runtime.stop_request import StopRequest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second
pytestmark = pytest.mark.ranks


def signal_rank_1_in_step_7():
    """Return the step at which this rank stopped, and the name of the signal for which it did."""
    stop = StopRequest()
    for step in range(1, 50):
        if dist.get_rank() == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop.agreed():
            return {"stopped at": step, "by": stop.signal_name}


def test_a_signal_to_one_rank_stops_all_ranks_one_step_later():
    results = launch(signal_rank_1_in_step_7, nproc=3)
    assert results == [{"stopped at": 8, "by": "SIGUSR1"}] * 3


def two_answers_after_the_time_to_stop():
    """Return a rank's first two answers, if STOP_AT is over on rank 1's clock before the ranks start.

    An answer is read one call after the ranks were asked, so the first one is always None.
    """
    if dist.get_rank() == 1:
        os.environ["STOP_AT"] = str(time.time() - 1)
    else:
        os.environ["STOP_AT"] = str(time.time() + 1000)
    stop = StopRequest()
    first = stop.agreed()
    second = stop.agreed()
    return [first, second]


def test_ranks_that_start_after_the_signal_stop_by_the_clock():
    answers = launch(two_answers_after_the_time_to_stop, nproc=2)
    assert answers == [[None, "SIGUSR1"]] * 2


def ask_before_and_after_a_signal():
    """Return what ``agreed_now`` says before and after rank 1 gets a signal, and the reduction that is left running."""
    stop = StopRequest()
    before = stop.agreed_now()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    after = stop.agreed_now()
    return {"before": before, "after": after, "reduction": stop.reduction}


def test_ranks_may_wait_for_an_answer_that_counts_now():
    answers = launch(ask_before_and_after_a_signal, nproc=2)
    assert answers == [{"before": None, "after": "SIGTERM", "reduction": None}] * 2


def wait_a_second_for_rank_1():
    """Rank 1 never asks, so rank 0 waits for it in its second call, although a signal has told both to stop."""
    stop = StopRequest(patience=1)
    os.kill(os.getpid(), signal.SIGTERM)
    if dist.get_rank() == 1:
        threading.Event().wait()  # until launch ends this rank
    stop.agreed()
    stop.agreed()


def test_patience_is_how_long_a_rank_waits_for_another():
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
        launch(wait_a_second_for_rank_1, nproc=2)
