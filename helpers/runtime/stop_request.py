"""A scheduler's signal to stop, on which all ranks act at the same step."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class StopRequest:
    """Lets all ranks stop at the same step after a scheduler's SIGTERM or SIGUSR1.

    Make one on every rank. A scheduler signals some ranks earlier than others. A rank
    that stopped by itself would leave the others waiting in a collective, so the ranks
    agree: once a step they all-reduce the number of the signal that they have got,
    which is 0 if there was none.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1)
    # The number of the signal that this process got. It is stored with the class,
    # because a signal may come before there is a StopRequest.
    received = 0

    def __init__(self, patience: float = 600) -> None:
        """``patience``: seconds that a rank waits for the others in ``agreed()``."""
        # gloo reduces on the CPU, so the ranks agree without a wait for the GPU.
        self.group = dist.new_group(timeout=timedelta(seconds=patience), backend="gloo")
        self.signal_name: str | None = None  # what the ranks have agreed on
        # An all-reduce that one call of ``agreed`` starts and the next one reads, and
        # its result: the highest number of a signal that any rank has received.
        self.reduction: dist.Work | None = None
        self.highest_number = torch.tensor(0)
        for number in self.signals:
            signal.signal(number, self.note)

        # Slurm sends its signal once, so a rank that starts after it would train until
        # the time is over. The batch file says from when on no rank should start.
        stop_at = os.environ.get("STOP_AT")
        if stop_at is not None and time.time() >= float(stop_at):
            self.note(signal.SIGUSR1, None)

    @classmethod
    def note(cls, number: int, frame: Any) -> None:
        """Python calls this when a signal comes. The ranks hear of it in ``agreed``."""
        cls.received = int(number)

    def agreed(self) -> str | None:
        """The name of the signal that a rank has got, such as "SIGUSR1", or None.

        Call it once a step, on every rank: all ranks get the name in the same step.
        A call reads the all-reduce that the call before has started, and that has
        usually ended. So the ranks stop a step later than they could, but no step has
        to wait for the network.
        """
        if self.answer() is None:
            self.ask()
        return self.signal_name

    def agreed_now(self) -> str | None:
        """As ``agreed``, but wait for all ranks, and count what has just come."""
        if self.answer() is None:
            self.ask()
        return self.answer()

    def ask(self) -> None:
        """Start the all-reduce that finds out which signal the ranks have got."""
        self.highest_number = torch.tensor(self.received)
        self.reduction = dist.all_reduce(
            self.highest_number, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def answer(self) -> str | None:
        """Wait for the all-reduce that ``ask`` has started; return the signal's name.

        None says that no rank had got a signal when it asked.
        """
        if self.reduction is not None:
            self.reduction.wait()
            self.reduction = None
        number = int(self.highest_number)
        if number > 0:
            self.signal_name = signal.Signals(number).name
        return self.signal_name
