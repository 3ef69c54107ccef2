"""The command line, ``python -m helpers``. What a command takes and does is in its room's ``command`` module."""

import argparse
import os
import sys

from helpers.command_line import Parser

try:
    from helpers.doctor import command as doctor
    from helpers.export import command as chapters
    from helpers.planner import command as planner
    from helpers.rehearsal import command as rehearsal
    from helpers.verify import command as verify
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed in this Python.\nTake the one that make sets up: .venv/bin/python")


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
    if arguments[:1] in (["run"], ["rehearse"]) and "--" in arguments:
        arguments, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    args, unknown = parser.parse_known_args(arguments)
    if stray := " ".join(unknown + getattr(args, "flags", [])):
        takes_flags = args.command in ("run", "rehearse")
        advice = f"put two dashes before the script's flags: -- {stray}"
        commands.choices[args.command].error(advice if takes_flags else f"unrecognized arguments: {stray}")
    return args, flags


def main(arguments: list[str]) -> int:
    """Run a command line, without the program's name; return its exit status. Wrong usage raises SystemExit(2)."""
    args, flags = parse(arguments)
    try:
        status = args.main(args, flags)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `list | head`; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
