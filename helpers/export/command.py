"""``python -m helpers list``, ``export`` and ``run``: the chapters as scripts."""

import argparse
import sys

from helpers.command_line import positive_int
from helpers.ranks.torchrun import folder_until_a_signal, run

CHAPTER = "its number (4), its name (04_ddp or ddp), or the path of any notebook"


def add_commands(commands: "argparse._SubParsersAction") -> None:
    """Add the three commands to a parser's."""
    command = commands.add_parser("list", help="list the chapters")
    command.set_defaults(main=main)

    command = commands.add_parser("export", help="write a chapter's script")
    command.set_defaults(main=main)
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("chapter", nargs="?", metavar="CHAPTER", help=CHAPTER)
    which.add_argument("--all", action="store_true", help="every chapter")
    command.add_argument("--out", default="scripts", metavar="DIR", help="the folder to write to (default: scripts)")
    command.add_argument("--force", action="store_true", help="overwrite a script that differs")
    command.add_argument(
        "--slurm", action="store_true", help="write what starts it on many nodes too: for Slurm, by hand, on Kubernetes"
    )
    command.add_argument(
        "--nodes", type=positive_int, metavar="N", help="of the files of --slurm, which it implies (default: 2)"
    )
    command.add_argument("--gpus-per-node", type=positive_int, metavar="N", help="of the files of --slurm (default: 8)")
    command.add_argument("--time", metavar="LIMIT", help="of the files of --slurm (default: 04:00:00)")

    command = commands.add_parser("run", help="run a chapter's script on this machine")
    command.set_defaults(main=main)
    command.add_argument("chapter", metavar="CHAPTER", help=CHAPTER)
    command.add_argument("--nproc", type=positive_int, default=2, metavar="N", help="how many ranks (default: 2)")
    command.add_argument("flags", nargs="*", default=[], metavar="-- FLAGS", help="the script's, after two dashes")


def main(args: argparse.Namespace, flags: list[str]) -> int:
    """Carry out one of the commands, ``run`` with flags of the script; return the exit status."""
    from helpers.export.error import ExportError

    try:
        if args.command == "list":
            list_chapters()
            return 0
        if args.command == "export":
            export(args)
            return 0
        return run_chapter(args, flags)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


# What these functions import takes half a second, so it is not imported for a command that does not need it.


def list_chapters() -> None:
    """Print each chapter's name and title."""
    from helpers.export import chapters
    from helpers.export.notebook import read_notebook, title_and_purpose

    for path in chapters.chapters():
        title, _purpose = title_and_purpose(read_notebook(path), path.stem)
        print(f"{path.stem:27}{title}")


def export(args: argparse.Namespace) -> None:
    """Write what the arguments ask for, and print the paths of what was written.

    Launch files are written if --slurm or one of their sizes is given. A size that is not given has its default.
    """
    from helpers.export import chapters
    from helpers.export.launch_files import Allocation

    sizes = {}
    for name in ("nodes", "gpus_per_node", "time"):
        if getattr(args, name):
            sizes[name] = getattr(args, name)
    allocation = None
    if args.slurm or sizes:
        allocation = Allocation(**sizes)
    chapter = None if args.all else args.chapter
    for path in chapters.export(chapter, args.out, args.force, allocation):
        print(path)


def run_chapter(args: argparse.Namespace, flags: list[str]) -> int:
    """Run a chapter's script under torchrun, from a folder that is then removed; return its exit status."""
    from helpers.export import chapters

    with folder_until_a_signal() as folder:
        script = chapters.export_script(args.chapter, folder)
        return run(script, args.nproc, flags)
