"""A scheduler's signal to stop, on which all ranks act at the same step."""

import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class StopRequest:
    """Notes SIGTERM and SIGUSR1 on each rank; make it on every rank.

    A scheduler signals some ranks earlier than others. A rank that stopped by itself
    would leave the others waiting in a collective, so the ranks agree on a step: once
    a step they reduce the number of the signal that they got, and 0 is none.
    """

    signals = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, patience: float = 600) -> None:
        """``patience``: seconds that a rank waits for the others in ``agreed()``."""
        # gloo reduces on the CPU, so the ranks agree without a wait for the GPU.
        self.group = dist.new_group(timeout=timedelta(seconds=patience), backend="gloo")
        self.received = 0
        self.signal_name: str | None = None
        self.maximum = torch.tensor(0)
        self.work: dist.Work | None = None
        for number in self.signals:
            signal.signal(number, self.note)

    def note(self, number: int, frame: Any) -> None:
        self.received = number

    def agreed(self) -> str | None:
        """The signal's name, from the same call on every rank on, or None.

        Call it once a step, on every rank.
        """
        if self.signal_name is not None:
            return self.signal_name
        if self.work is not None:
            # It was started in the call before, so here it has usually ended.
            self.work.wait()
            number = int(self.maximum)
            if number > 0:
                self.signal_name = signal.Signals(number).name
                return self.signal_name
        self.maximum = torch.tensor(self.received)
        self.work = dist.all_reduce(
            self.maximum, dist.ReduceOp.MAX, group=self.group, async_op=True
        )
        return None
