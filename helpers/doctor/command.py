"""``python -m helpers doctor``: its arguments, and a start in one rank or, without a launcher, on local ranks."""

import argparse
import os
import signal
import sys
import traceback

from helpers.command_line import positive, whole
from helpers.ranks.torchrun import folder_until_a_signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor`` to its parser."""
    parser.description = (
        "Check what a training run will need: alone on this machine, or on all ranks under torchrun or srun. "
        "The exit status is 1 where something is wrong."
    )
    add = parser.add_argument
    add("--nproc", type=whole, metavar="N", help="without a launcher: how many ranks (default: one per GPU, or 2)")
    add("--timeout", type=positive, default=60, metavar="S", help="seconds to wait for a rank (default: 60)")
    add("--backend", choices=["gloo"], help="leave the GPUs out (default: NCCL where all ranks have one)")
    add("--plan", metavar="FILE", help="compare with a plan, written by: plan … --json > FILE")


def main(args: argparse.Namespace) -> int:
    """Start the doctor in this rank, or without a launcher on ranks of this machine; return the exit status."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    from helpers.doctor.examine import run_rank, start_local
    from helpers.doctor.membership import find_place
    from helpers.doctor.plan import read_plan

    place = None
    try:
        place = find_place()
        plan = read_plan(args.plan) if args.plan else None
    except ValueError as error:
        if not place or place.local_rank == 0:  # of a file, one rank of each host tells
            print(f"error: {error}", file=sys.stderr)
        return 1
    if not place:
        options = {"--timeout": args.timeout, "--backend": args.backend, "--plan": args.plan}
        with folder_until_a_signal():
            return start_local(args.nproc, [f"{name}={value}" for name, value in options.items() if value])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C ends this rank in torch's waits, too
    try:
        status = run_rank(place, args.backend, args.timeout, plan)
    except Exception:
        traceback.print_exc()
        status = 1
    os._exit(status)  # a normal exit could hang: it waits for the threads of a broken process group
