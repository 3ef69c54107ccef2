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
    nproc_help = "without a launcher: how many ranks (default: one per GPU, or 2)"
    parser.add_argument("--nproc", type=positive_int, metavar="N", help=nproc_help)
    timeout_help = "seconds to wait for a rank (default: 60)"
    parser.add_argument("--timeout", type=positive_seconds, default=60, metavar="S", help=timeout_help)
    backend_help = "leave the GPUs out (default: NCCL where all ranks have one)"
    parser.add_argument("--backend", choices=["gloo"], help=backend_help)
    plan_help = "compare with a plan, written by: plan … --json > FILE"
    parser.add_argument("--plan", metavar="FILE", help=plan_help)


def main(args: argparse.Namespace) -> int:
    """Run ``doctor``, and return its exit status: 0, or 1 where something is wrong.

    Under torchrun or srun this process is one rank, and examines the cluster together with the others.
    Without a launcher it starts ranks on this machine, in each of which the same command runs.
    """
    # torch would print warnings about failed connections, which the report explains better. It reads this variable when
    # it is first imported, so the modules that import torch are imported after it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from helpers.doctor.examine import run_rank, start_local
    from helpers.doctor.membership import read_launcher
    from helpers.doctor.plan import read_plan

    try:
        launched_rank = read_launcher(os.environ)  # None if no launcher has started this process
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    plan = None
    if args.plan:
        try:
            plan = read_plan(args.plan)
        except ValueError as error:
            # All ranks fail here, but one message from each host is enough.
            if launched_rank is None or launched_rank.local_rank == 0:
                print(f"error: {error}", file=sys.stderr)
            return 1

    if launched_rank is None:
        with folder_until_a_signal():  # Ctrl-C or SIGTERM ends the ranks, too.
            return start_local(args.nproc, flags_of_ranks(args))
    # Python handles Ctrl-C only when the current call into torch returns, and this rank may wait there for minutes. The
    # system's default handler ends the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_rank(launched_rank, args.backend, args.timeout, plan)


def flags_of_ranks(args: argparse.Namespace) -> list[str]:
    """The flags that this command passes on to the ranks it starts, such as ["--timeout=60", "--backend=gloo"]."""
    flags = [f"--timeout={args.timeout}"]
    if args.backend:
        flags.append(f"--backend={args.backend}")
    if args.plan:
        flags.append(f"--plan={args.plan}")
    return flags
