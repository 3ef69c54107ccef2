"""``python -m helpers doctor``: its arguments, and a start in one rank or, without a launcher, on local ranks."""

import argparse
import os
import signal
import sys

from helpers.command_line import positive_int, positive_seconds
from helpers.ranks.torchrun import folder_until_a_signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor`` to its parser."""
    parser.description = (
        "Check what a training run will need: alone on this machine, or on all ranks under torchrun or srun. "
        "The exit status is 1 where something is wrong."
    )
    add = parser.add_argument
    add(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="without a launcher: how many ranks (default: one per GPU, or 2)",
    )
    add("--timeout", type=positive_seconds, default=60, metavar="S", help="seconds to wait for a rank (default: 60)")
    add("--backend", choices=["gloo"], help="leave the GPUs out (default: NCCL where all ranks have one)")
    add("--plan", metavar="FILE", help="compare with a plan, written by: plan … --json > FILE")


def main(args: argparse.Namespace) -> int:
    """Run ``doctor``: in this rank, if a launcher has started it, or else on new ranks of this machine.

    Returns the exit status: 0, or 1 where something is wrong.
    """
    # Otherwise torch would print warnings of connections that fail, which the report names better. torch reads the
    # variable when it is loaded, by these imports.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from helpers.doctor.examine import run_rank, start_local
    from helpers.doctor.membership import read_launcher
    from helpers.doctor.plan import read_plan

    try:
        launched = read_launcher(os.environ)  # None if no launcher has started this process
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    plan = None
    if args.plan:
        try:
            plan = read_plan(args.plan)
        except ValueError as error:
            is_first_of_host = launched is None or launched.local_rank == 0
            if is_first_of_host:  # one message a host is enough
                print(f"error: {error}", file=sys.stderr)
            return 1

    if launched is None:
        options = {"--timeout": args.timeout, "--backend": args.backend, "--plan": args.plan}
        flags = [f"{name}={value}" for name, value in options.items() if value]
        with folder_until_a_signal():
            return start_local(args.nproc, flags)
    # Python handles Ctrl-C only between two lines of Python, which a rank that waits in torch does not reach. The
    # system's own handler ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_rank(launched, args.backend, args.timeout, plan)
