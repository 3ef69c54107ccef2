"""Run a script on several ranks of this machine: torchrun in this process, and a Ctrl-C that ends every process."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from helpers.ranks import processes
from helpers.ranks.ports import LOOPBACK
from helpers.ranks.rank import usable_cores

# Options of torchrun for ranks on one machine. Port 0 lets the system pick a free port for the store. The address is
# given as a number, because --standalone would use the host's name, which may not resolve.
ON_THIS_MACHINE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
INTERRUPTED = 130  # the exit status that shells give to a command that Ctrl-C ended: 128 and the number of SIGINT


@contextlib.contextmanager
def folder_until_a_signal() -> Iterator[str]:
    """A context that gives a temporary folder, and in which Ctrl-C, SIGTERM or SIGHUP end this command.

    The signal's handler ends all processes that this one started, removes the folder, and exits with status 130. It
    does not raise KeyboardInterrupt, because torchrun would catch that in some places, and in others would lose track
    of a rank that it is starting.
    """
    # A signal that is ignored already stays ignored: nohup starts a command that ignores SIGHUP.
    signals_to_handle = [number for number in processes.STOPS if signal.getsignal(number) != signal.SIG_IGN]
    # Not a TemporaryDirectory: each rank that is forked would remove it at its own end.
    folder = tempfile.mkdtemp()

    def end_at_signal(number: int, frame: FrameType | None) -> None:
        for handled in signals_to_handle:
            signal.signal(handled, signal.SIG_IGN)  # a second Ctrl-C must not interrupt this handler
        end_command(folder)

    old_handlers = {}
    for number in signals_to_handle:
        old_handlers[number] = signal.signal(number, end_at_signal)
    try:
        yield folder
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)


def end_command(folder: str) -> NoReturn:
    """End all processes that this one started, remove the folder, say so, and exit with the status of an interrupt."""
    try:
        processes.end(psutil.Process().children())
        shutil.rmtree(folder, ignore_errors=True)
        # Not print, which the signal may have interrupted: Python's streams refuse to print inside a print.
        os.write(2, b"Interrupted; all ranks are stopped.\n")
    finally:
        os._exit(INTERRUPTED)  # at once: what the signal has interrupted does not go on


def set_defaults(nproc: int) -> None:
    """Set the environment variables that ``nproc`` ranks on this machine need, unless the user has set them.

    The ranks share the cores, and gloo stays on the loopback interface. torch reads OMP_NUM_THREADS when it is
    imported, so this is called before.
    """
    threads = max(1, usable_cores() // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def run(script: Path, nproc: int, flags: Sequence[str]) -> int:
    """Run a script with these flags under torchrun, on ``nproc`` ranks of this machine.

    Returns the command's exit status: 0, or 1 if a rank failed. torchrun writes its logs into the script's folder.
    """
    set_defaults(nproc)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    options = [
        *ON_THIS_MACHINE,
        f"--nproc-per-node={nproc}",
        f"--log-dir={script.parent}",
        "--signals-to-handle=SIGQUIT",  # folder_until_a_signal handles the others
    ]
    try:
        torchrun([*options, str(script), *flags])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        was_killed = failure.exitcode < 0
        if was_killed:
            ended = f"by {failure.signal_name()}"
        else:
            ended = f"with status {failure.exitcode}"
        print(f"error: rank {rank} ended {ended}; what the ranks said is above.", file=sys.stderr)
        return 1
    return 0
