"""The command line, ``python -m helpers``: list the chapters, export their scripts, run one under torchrun."""

import argparse
import sys
import tempfile

from helpers.torchrun import run, stop_at_signals


def processes(text):
    """The value of --nproc as a number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; give 1, 2, 3, …")
    return int(text)


def parse(arguments):
    """A command line (without the program's name) as (args, flags of the script); SystemExit(2) for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m helpers",
        description="World Size One's chapters as scripts for torchrun.",
    )
    chapter = "its number (4), its name (04_ddp or ddp), or the path of any notebook"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the chapters")
    command = commands.add_parser("export", help="write a chapter's script")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("chapter", nargs="?", metavar="CHAPTER", help=chapter)
    which.add_argument("--all", action="store_true", help="every chapter")
    command.add_argument("--out", default="scripts", metavar="DIR", help="the folder to write to (default: scripts)")
    command.add_argument("--force", action="store_true", help="overwrite a script that differs")
    command = commands.add_parser("run", help="run a chapter's script on this machine")
    command.add_argument("chapter", metavar="CHAPTER", help=chapter)
    command.add_argument("--nproc", type=processes, default=2, metavar="N", help="how many ranks (default: 2)")
    command.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the script, after two dashes")
    flags = []
    if arguments[:1] == ["run"] and "--" in arguments:
        arguments, flags = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    args = parser.parse_args(arguments)
    if getattr(args, "flags", None):
        parser.error(f"put two dashes before the script's flags: -- {' '.join(args.flags)}")
    return args, flags


def carry_out(args, flags, folder=None):
    """Do what the command line says and return the exit status; ``folder`` is for a script that is only run."""
    from helpers import commands  # here, because it takes a second or more

    try:
        if args.command == "list":
            for name, title in commands.titles():
                print(f"{name:24}{title}")
        elif args.command == "export":
            for target in commands.export(None if args.all else args.chapter, args.out, args.force):
                print(target)
        else:
            [script] = commands.export(args.chapter, folder)
            return run(script, args.nproc, flags)
    except commands.ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments):
    """Run a command line (without the program's name) and return its exit status; SystemExit(2) for wrong usage."""
    args, flags = parse(arguments)
    try:
        if args.command != "run":
            return carry_out(args, flags)
        with tempfile.TemporaryDirectory() as folder:
            stop_at_signals(folder)
            return carry_out(args, flags, folder)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
