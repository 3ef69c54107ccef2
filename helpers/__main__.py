"""The command line, ``python -m helpers``. What a command takes and does is in its room's ``command`` module."""

import argparse
import os
import sys
import traceback

from helpers.command_line import Parser, positive, whole
from helpers.export import command as chapters
from helpers.planner import command as planner
from helpers.ranks.torchrun import folder_until_a_signal
from helpers.rehearsal import command as rehearsal


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """A command line, without the program's name, as (args, flags of the script). Wrong usage raises SystemExit(2).

    ``args.main`` is the function to call with both.
    """
    parser = Parser(
        prog="python -m helpers",
        description="World Size One's chapters as scripts for torchrun.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chapters.add_commands(commands)

    command = commands.add_parser("rehearse", help="run a script's GPU path on pretended GPUs of this machine")
    command.set_defaults(main=rehearsal.rehearse)
    rehearsal.add_arguments(command, chapters.CHAPTER)

    command = commands.add_parser(
        "doctor",
        help="check the machines, the network and the collectives",
        description="Check what a training run will need: alone on this machine, or on all ranks under torchrun or "
        "srun. The exit status is 1 where something is wrong.",
    )
    command.set_defaults(main=lambda args, flags: run_doctor(args, arguments[1:]))
    command.add_argument(
        "--nproc", type=whole, metavar="N", help="without a launcher: how many ranks (default: one per GPU, or 2)"
    )
    command.add_argument(
        "--timeout", type=positive, default=60, metavar="S", help="seconds to wait for a rank (default: 60)"
    )
    command.add_argument(
        "--backend", choices=["gloo"], help="leave the GPUs out (default: NCCL where all ranks have one)"
    )
    command.add_argument("--plan", metavar="FILE", help="compare with a plan, written by: plan … --json > FILE")
    command.add_argument("--master", metavar="HOST[:PORT]", help="where rank 0 runs (default: the launcher's)")

    command = commands.add_parser("plan", help="what a job needs: memory, messages, time, failures, cost")
    command.set_defaults(main=lambda args, flags: planner.main(args))
    planner.add_arguments(command)

    flags: list[str] = []
    if arguments[:1] in (["run"], ["rehearse"]) and "--" in arguments:
        arguments, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    args = parser.parse_args(arguments)
    if getattr(args, "flags", None):
        parser.error(f"put two dashes before the script's flags: -- {' '.join(args.flags)}")
    return args, flags


def run_doctor(args: argparse.Namespace, flags: list[str]) -> int:
    """Start the doctor in this rank, or without a launcher on ranks of this machine; return the exit status.

    A rank ends in here, by os._exit. A normal exit could hang: it waits for the threads of a broken process group.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # read when torch is loaded
    from helpers.doctor import examine as doctor
    from helpers.doctor import membership
    from helpers.doctor.plan import read_plan

    try:
        place = membership.find_place(args.master)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        plan = read_plan(args.plan) if args.plan else None
    except ValueError as error:
        if place.get("LOCAL_RANK", 0) == 0:  # one rank of a host says it
            print(f"error: {error}", file=sys.stderr)
        return 1
    if not place:
        if args.master:
            print("error: --master is for srun or torchrun, which start the ranks; leave it out here.", file=sys.stderr)
            return 2
        with folder_until_a_signal():
            return doctor.start_local(args.nproc, flags)
    status = 1
    try:
        status = doctor.run_rank(place, args.backend, args.timeout, plan)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(arguments: list[str]) -> int:
    """Run a command line, without the program's name; return its exit status. Wrong usage raises SystemExit(2)."""
    args, flags = parse(arguments)
    try:
        return args.main(args, flags)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
