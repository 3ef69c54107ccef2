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


def steps_until_stopped():
    """(after how many steps this rank stopped, the signal's name). Rank 1 gets the signal in step 7."""
    stop = StopRequest()
    for step in range(1, 50):
        if dist.get_rank() == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        if stop.agreed():
            break
    return step, stop.signal_name


def test_a_signal_to_one_rank_stops_all_ranks_one_step_later():
    assert launch(steps_until_stopped, nproc=3) == [(8, "SIGUSR1")] * 3


def answers_after_the_signal():
    """What a rank hears whose start came after Slurm's signal. Only rank 1's clock is that late."""
    if dist.get_rank() == 1:
        os.environ["STOP_AT"] = str(time.time() - 1)
    else:
        os.environ["STOP_AT"] = str(time.time() + 1000)
    stop = StopRequest()
    return stop.agreed(), stop.agreed()


def test_ranks_that_start_after_the_signal_stop_by_the_clock():
    assert launch(answers_after_the_signal, nproc=2) == [(None, "SIGUSR1")] * 2


def answers_at_once():
    """What ``agreed_now`` says before and after rank 1 has got a signal, and whether it leaves a reduction running."""
    stop = StopRequest()
    before = stop.agreed_now()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    return before, stop.agreed_now(), stop.reduction


def test_ranks_may_wait_for_an_answer_that_counts_now():
    assert launch(answers_at_once, nproc=2) == [(None, "SIGTERM", None)] * 2


def error_of_an_impatient_rank():
    """What rank 0 raises, which waits a second for rank 1, although a signal has asked both to stop."""
    stop = StopRequest(patience=1)
    os.kill(os.getpid(), signal.SIGTERM)
    if dist.get_rank() == 1:
        threading.Event().wait()  # until launch ends this rank
    stop.agreed()
    stop.agreed()


def test_patience_is_how_long_a_rank_waits_for_another():
    with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
        launch(error_of_an_impatient_rank, nproc=2)
