"""The command line, ``python -m helpers``. What a command takes and does is in its folder's ``command`` module."""

import argparse
import os
import sys
import traceback
from typing import Any

from helpers.command_line import Parser, is_failed_output, open_closed_streams, status_of_failed_output

try:
    from helpers.doctor import command as doctor
    from helpers.doctor import nccl_log
    from helpers.export import command as chapters
    from helpers.planner import command as planner
    from helpers.rehearsal import command as rehearsal
    from helpers.verify import command as verify
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed in this Python.\nTake the one that make sets up: .venv/bin/python")

WITH_FLAGS = ("run", "rehearse")  # commands that pass flags on to a script, after two dashes: run 04 -- --epochs 2


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read a command line, which comes without the program's name. Wrong usage raises SystemExit(2).

    Returns the command's arguments and the flags for a script, which are empty for commands that run none. The function
    that carries the command out is ``args.main``, and is called as ``args.main(args, flags)``.
    """
    parser = Parser(
        prog="python -m helpers",
        description="World Size One's chapters as scripts for torchrun.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_commands(commands)

    flags: list[str] = []
    runs_a_script = bool(arguments) and arguments[0] in WITH_FLAGS
    if runs_a_script and "--" in arguments:
        dashes = arguments.index("--")
        flags = arguments[dashes + 1 :]
        arguments = arguments[:dashes]
    args, unrecognized = parser.parse_known_args(arguments)
    if args.command in WITH_FLAGS:
        # These commands have an argument `flags` only so that their help shows it. The script's flags, after the two
        # dashes, were taken off above. So what argparse has put into `flags` was written without the dashes.
        without_dashes = [*unrecognized, *args.flags]
        if without_dashes:
            message = f"put two dashes before the script's flags: -- {' '.join(without_dashes)}"
            commands.choices[args.command].error(message)
    elif unrecognized:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unrecognized)}")
    return args, flags


def add_commands(commands: Any) -> None:
    """Add all commands with their arguments. ``commands`` is what argparse's ``add_subparsers`` has returned."""
    chapters.add_commands(commands)

    command = commands.add_parser("rehearse", help="run a script's GPU path on pretended GPUs of this machine")
    command.set_defaults(main=rehearsal.main)
    rehearsal.add_arguments(command)

    command = commands.add_parser("doctor", help="check the machines, the network and the collectives")
    command.set_defaults(main=lambda args, flags: doctor.main(args))
    doctor.add_arguments(command)

    command = commands.add_parser("nccl-log", help="what the logs of a job that is slow or hangs say of NCCL")
    command.set_defaults(main=lambda args, flags: nccl_log.main(args))
    nccl_log.add_arguments(command)

    command = commands.add_parser("verify", help="run the whole book on this machine's GPUs, and compare")
    command.set_defaults(main=lambda args, flags: verify.main(args))
    verify.add_arguments(command)

    command = commands.add_parser("plan", help="what a job needs: memory, messages, time, failures, cost")
    command.set_defaults(main=lambda args, flags: planner.main(args))
    planner.add_arguments(command)


def main(arguments: list[str]) -> int:
    """Run a command line, without the program's name; return its exit status. Wrong usage raises SystemExit(2).

    A command need not handle an OSError of its output, or of a file that it names: it becomes a one-line message here.
    """
    open_closed_streams()
    try:
        args, flags = parse(arguments)
        status = args.main(args, flags)
    except OSError as error:
        if is_failed_output(error):
            return status_of_failed_output(error)
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    try:
        sys.stdout.flush()  # what a command has printed may be written only now, to a file or a pipe
    except OSError as error:
        if status == 0:  # otherwise the command has failed before, and has said why
            return status_of_failed_output(error)
    return status


def main_and_exit() -> None:
    """Run this process's command line, and end the process at once.

    Python's usual end waits for threads, and those of a process group that has failed may never finish.
    """
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main_and_exit()
