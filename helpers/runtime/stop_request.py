"""A scheduler's warning, heard by every rank at the same step. Run-time: scripts carry it with them."""

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """``with StopRequest(device) as stop``: inside, SIGTERM and SIGUSR1 end no process; they are noted.

    A scheduler sends one of them before it takes the machine away, to some ranks earlier than to others, and a
    rank that left alone would leave its peers in a collective. Needs the main thread, and a process group.
    """

    def __init__(self, device):
        self.device = device
        self.asked = None  # the signal's name, once the ranks agreed to stop
        self.noted = 0  # the number of the last signal that this rank got
        self.pending = (
            None  # the all-reduce that agreed() began a step ago, and its tensor
        )

    def __enter__(self):
        self.before = {
            number: signal.signal(number, self.note)
            for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        return self

    def __exit__(self, kind, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if kind is None and self.pending:
            self.pending[0].wait()

    def note(self, number, _):
        self.noted = number

    def agreed(self):
        """Call it once a step, on every rank: the signal's name on all of them at the same step, else None.

        The answer is the one to the question of the step before, so that no rank waits for it.
        """
        if self.pending:
            work, flag = self.pending
            work.wait()
            self.pending = None
            if int(flag):
                self.asked = signal.Signals(int(flag)).name
        if not self.asked:
            flag = torch.tensor(self.noted, device=self.device)
            self.pending = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True), flag
        return self.asked


def outlive_signals(_):
    """A DataLoader's ``worker_init_fn``: these signals are the rank's, and would end a worker, so the rank too."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
