"""The command line, ``python -m helpers``. What a command takes and does is in its folder's ``command`` module."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
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

# Commands that run a script. What follows two dashes are flags for the script, as in: run 04 -- --epochs 2
WITH_FLAGS = ("run", "rehearse")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read a command line, given without the program's name. Wrong usage raises SystemExit(2).

    Returns the command's arguments and the flags for the script that it runs. For "run 04 --nproc 2 -- --epochs 2" the
    flags are ["--epochs", "2"]; a command that runs no script has none. ``args.main`` is the function that carries out
    the command: it takes the arguments and the flags.
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
        # The script's flags were taken off above, so what is still here was written without the two dashes. argparse
        # has put part of it into `args.flags`, an argument that these commands have for their help text only.
        without_dashes = [*unrecognized, *args.flags]
        if without_dashes:
            message = f"put two dashes before the script's flags: -- {' '.join(without_dashes)}"
            commands.choices[args.command].error(message)
    elif unrecognized:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unrecognized)}")
    return args, flags


def add_commands(commands: Any) -> None:
    """Add all commands with their arguments. ``commands`` is what argparse's ``add_subparsers`` returned."""
    chapters.add_commands(commands)

    command = commands.add_parser("rehearse", help="run a script's GPU path on simulated GPUs of this machine")
    command.set_defaults(main=rehearsal.main)
    rehearsal.add_arguments(command)

    command = commands.add_parser("doctor", help="check the machines, the network and the collectives")
    command.set_defaults(main=without_flags(doctor.main))
    doctor.add_arguments(command)

    command = commands.add_parser("nccl-log", help="what the logs of a job that is slow or hangs say of NCCL")
    command.set_defaults(main=without_flags(nccl_log.main))
    nccl_log.add_arguments(command)

    command = commands.add_parser("verify", help="run the whole book on this machine's GPUs, and compare")
    command.set_defaults(main=without_flags(verify.main))
    verify.add_arguments(command)

    command = commands.add_parser("plan", help="what a job needs: memory, messages, time, failures, cost")
    command.set_defaults(main=without_flags(planner.main))
    planner.add_arguments(command)


def without_flags(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace, list[str]], int]:
    """Turn the main function of a command that runs no script, which takes no flags, into one that ignores them."""

    def main_of_command(args: argparse.Namespace, flags: list[str]) -> int:
        return command(args)

    return main_of_command


def main(arguments: list[str]) -> int:
    """Run a command line, given without the program's name, and return its exit status.

    Wrong usage raises SystemExit(2). A command need not handle an OSError of its output or of a file that the user
    names: here it becomes a message of one line.
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
        sys.stdout.flush()  # Only now is what the command printed written to a file or a pipe, and that may fail.
    except OSError as error:
        command_succeeded = status == 0  # A command that failed has said why already.
        if command_succeeded:
            return status_of_failed_output(error)
    return status


def main_and_exit() -> None:
    """Run this process's command line and exit by ``os._exit``, which does not wait for threads.

    Python's usual exit waits for them, and the threads of a failed process group may never finish.
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
