"""Run a program that ends when its parent does: ``python leash.py PARENT PROGRAM ARGUMENT ...``.

A kill of the command with SIGKILL leaves it no moment to stop what it started. So Linux stops that: the kernel sends
SIGTERM to a process whose parent has died, if the process asked for it (prctl(2), PR_SET_PDEATHSIG). The request
outlives exec. torchrun and a rehearsal end their ranks at a SIGTERM.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def leashed(command: list[str]) -> list[str]:
    """A command line that does what ``command`` does, but gets a SIGTERM when this process ends, even if it is killed.

    It starts this file, which then becomes the command. On systems other than Linux it is ``command`` itself.
    """
    if not sys.platform.startswith("linux"):
        return command
    quick_python = [sys.executable, "-I", "-S"]  # isolated and without site-packages, which take time to find
    return [*quick_python, __file__, str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Ask the kernel for a SIGTERM at the death of the parent, whose process id is given, and become the command."""
    this_program = ctypes.CDLL(None)  # with the C library, which it is linked with
    this_program.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    parent_is_alive = os.getppid() == parent  # it may have died before the request
    if parent_is_alive:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
