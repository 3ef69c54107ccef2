"""The processes of a command: start them, wait for them, and end them with all that they have started.

``rehearse``, ``doctor`` and ``verify`` start their ranks here. ``launch`` does not: its ranks are forked by a
forkserver.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import psutil

from helpers.ranks.leash import leashed

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the signals that end a command
RESET = (*STOPS, signal.SIGQUIT)  # the signals for which a forked process gets the default handlers
NOTICE_WITHIN = 0.02  # The end of a process is noticed within so many seconds.
GRACE = 3  # seconds that a process has to end at a SIGTERM, before it is killed


def start(command: Sequence[str], **options: Any) -> psutil.Popen:
    """Start a program, which ends with this process. The options are those of subprocess.Popen.

    It leads a process group of its own, so that a Ctrl-C at the terminal reaches this process alone.
    """
    return psutil.Popen(leashed([*command]), process_group=0, **options)


def fork(work: Callable[[], object]) -> psutil.Process:
    """Fork this process; the new one calls ``work()`` and exits, with status 1 if that raised and 0 if it returned.

    The new process begins quickly, because it has imported already what this one has. It leads a session of its own, so
    that a Ctrl-C at the terminal does not reach it, and it handles signals as a program does that has just started.
    """
    sys.stdout.flush()  # otherwise both processes would write what is still in the buffers
    sys.stderr.flush()
    exit_at_once = os._exit  # kept here, because ``work`` may replace os._exit
    # The new process begins with this one's handlers, which would end the other ranks. So signals wait until it has
    # handlers of its own.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    pid = os.fork()
    is_new_process = pid == 0
    if is_new_process:
        try:
            os.setsid()
            for number in RESET:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # it raises KeyboardInterrupt
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            work()
            exit_at_once(0)
        finally:
            exit_at_once(1)  # reached if ``work`` raised, because the call above does not return
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return psutil.Process(pid)


def wait(
    processes: Sequence[psutil.Process],
    timeout: float = math.inf,
    stop_at_failure: bool = False,
    watch: Callable[[Mapping[int, int]], None] | None = None,
) -> dict[int, int]:
    """Wait until the processes have ended, but not longer than ``timeout`` seconds; return how they ended.

    Returns {index of the process in the list: its exit status}, without the processes that still run. The status of a
    process that a signal has killed is the signal's number with a minus. With ``stop_at_failure`` the wait is over as
    soon as one process has another status than 0. ``watch`` is called several times a second while this function waits,
    with the statuses so far.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(statuses) < len(processes) and time.monotonic() < deadline:
        running = [process for index, process in enumerate(processes) if index not in statuses]
        ended, _ = psutil.wait_procs(running, timeout=NOTICE_WITHIN)
        for process in ended:
            statuses[processes.index(process)] = int(process.returncode or 0)
        if watch is not None:
            watch(statuses)
        if stop_at_failure and any(statuses.values()):
            break
    return statuses


def with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """These processes and all their descendants, without those that have ended."""
    family = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [process, *process.children(recursive=True)]
    return family


def end(processes: Iterable[psutil.Process], grace: float = GRACE) -> None:
    """End processes and all that they have started: by SIGTERM, and by SIGKILL what still runs after ``grace`` seconds.

    With no seconds of grace all of them are killed at once.
    """
    running = with_descendants(processes)
    if grace > 0:
        # All processes are paused until each has got SIGTERM. Otherwise one would end before the others, which would
        # print tracebacks about their lost peer.
        send(signal.SIGSTOP, running)
        send(signal.SIGTERM, running)
        send(signal.SIGCONT, running)
        _, running = psutil.wait_procs(running, timeout=grace)
    send(signal.SIGKILL, running)
    psutil.wait_procs(running, timeout=GRACE)  # so that no child of this process stays behind as a zombie


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    """Send a signal to each process, and to the process group that it leads, if it leads one, as torchrun's ranks do.

    The group may have processes whose parent has ended, so that ``with_descendants`` does not find them.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        with contextlib.suppress(OSError):  # it leads no group
            os.killpg(process.pid, number)
