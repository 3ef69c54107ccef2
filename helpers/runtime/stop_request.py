"""A scheduler's signal to stop, on which all ranks act at the same step."""

import os
import signal
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist


class StopRequest:
    """``with StopRequest() as stop:`` notes SIGTERM and SIGUSR1; on every rank.

    A scheduler signals some ranks earlier than others, so they agree on a step. And
    torchrun sends SIGTERM when a peer has failed: a rank that then makes no step for
    ``patience`` seconds hangs in a collective with that peer, so it is ended. Without
    a signal too, a rank waits no longer than that in ``agreed()``.
    """

    signals = signal.SIGTERM, signal.SIGUSR1

    def __init__(self, patience: float = 600) -> None:
        self.patience = patience  # seconds, for a step and what it validates and saves
        self.number, self.steps = 0, 0  # the last signal, how often agreed() was called
        self.over, self.asked, self.work = threading.Event(), None, None

    def __enter__(self) -> "StopRequest":
        limit = timedelta(seconds=self.patience)
        self.group = dist.new_group(timeout=limit, backend="gloo")  # waits for no GPU
        self.alarm, self.bell = socket.socketpair()
        self.bell.setblocking(False)
        self.old_bell = signal.set_wakeup_fd(self.bell.fileno())
        self.handlers = [signal.signal(number, self.note) for number in self.signals]
        threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        for number, handler in zip(self.signals, self.handlers, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.old_bell)
        self.over.set()
        with self.bell:
            self.bell.shutdown(socket.SHUT_RDWR)  # ends the thread's recv
        if kind is None and self.work:
            self.work.wait()

    def note(self, number: int, _: object) -> None:
        self.number = number

    def watch(self) -> None:
        """In a thread: while a rank is in a collective, no Python handler runs."""
        with self.alarm:
            while (numbers := self.alarm.recv(64)) and signal.SIGTERM not in numbers:
                pass
        steps = self.steps
        while not self.over.wait(self.patience):
            if steps == self.steps:
                print(f"no step in {self.patience} s after SIGTERM", file=sys.stderr)
                os._exit(128 + signal.SIGTERM)
            steps = self.steps

    def agreed(self) -> str | None:
        """Call once a step: the signal's name, at one step on all ranks, or None."""
        self.steps += 1
        if self.work:  # it was begun a step ago, so the answer is here by now
            self.work.wait()
            if self.flag:
                self.asked = signal.Signals(int(self.flag)).name
                self.over.set()  # now comes a save, which may take long
        if not self.asked:
            self.flag = torch.tensor(self.number)
            self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, self.group, True)
        return self.asked
