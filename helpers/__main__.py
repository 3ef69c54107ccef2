"""The command line, ``python -m helpers``. What a command takes and does is in its folder's ``command`` module."""

import argparse
import sys

from helpers.command_line import Parser, open_closed_streams, status_of_failed_output

try:
    from helpers.doctor import command as doctor
    from helpers.export import command as chapters
    from helpers.planner import command as planner
    from helpers.rehearsal import command as rehearsal
    from helpers.verify import command as verify
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed in this Python.\nTake the one that make sets up: .venv/bin/python")

WITH_FLAGS = ("run", "rehearse")  # commands that hand flags to a script


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
    command.set_defaults(main=rehearsal.main)
    rehearsal.add_arguments(command)

    command = commands.add_parser("doctor", help="check the machines, the network and the collectives")
    command.set_defaults(main=lambda args, flags: doctor.main(args))
    doctor.add_arguments(command)

    command = commands.add_parser("verify", help="run the whole book on this machine's GPUs, and compare")
    command.set_defaults(main=lambda args, flags: verify.main(args))
    verify.add_arguments(command)

    command = commands.add_parser("plan", help="what a job needs: memory, messages, time, failures, cost")
    command.set_defaults(main=lambda args, flags: planner.main(args))
    planner.add_arguments(command)

    flags: list[str] = []
    if arguments and arguments[0] in WITH_FLAGS and "--" in arguments:
        dashes = arguments.index("--")
        flags = arguments[dashes + 1 :]
        arguments = arguments[:dashes]
    args, unknown = parser.parse_known_args(arguments)
    stray = " ".join(unknown + getattr(args, "flags", []))
    if stray:
        message = f"unrecognized arguments: {stray}"
        if args.command in WITH_FLAGS:
            message = f"put two dashes before the script's flags: -- {stray}"
        commands.choices[args.command].error(message)
    return args, flags


def main(arguments: list[str]) -> int:
    """Run a command line, without the program's name; return its exit status. Wrong usage raises SystemExit(2)."""
    open_closed_streams()
    status = 0
    try:
        args, flags = parse(arguments)
        status = args.main(args, flags)
        sys.stdout.flush()
    except OSError as error:
        # A command that has failed has said so already.
        status = status_of_failed_output(error, say_why=status == 0)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        status = 130
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
