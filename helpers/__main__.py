"""The command line, ``python -m helpers``: list the chapters, export their scripts, run one under torchrun."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.cells import ExportError, read_notebook, title_and_promise
from helpers.export import script_from_notebook

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def chapters():
    """The chapters' notebooks, in order. The template is none."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def find_notebook(chapter):
    """The notebook of a chapter: its number, its name with or without the number, or any notebook's path."""
    if Path(chapter).is_file():
        return Path(chapter)
    for path in chapters():
        number, _, topic = path.stem.partition("_")
        if chapter in (path.stem, topic) or (chapter.isdecimal() and int(chapter) == int(number)):
            return path
    known = ", ".join(path.stem for path in chapters()) or "none yet"
    raise ExportError(f"There is no chapter or notebook {chapter!r}.\nChapters: {known}. Or the path of a notebook.")


def export(path):
    """The script's text of the notebook at ``path``."""
    return script_from_notebook(read_notebook(path), path.stem)


def write_scripts(scripts, folder, force):
    """Write {name: text} as FOLDER/name.py, each at once or not at all; return the paths.

    Raises ExportError, before it writes anything, when a file is there that differs and ``force`` is not given.
    """
    targets = {Path(folder) / f"{name}.py": text for name, text in scripts.items()}
    try:
        for target, text in targets.items():
            if not force and target.exists() and target.read_bytes() != text.encode():
                raise ExportError(f"{target} exists and differs.\nKeep your changes elsewhere, or overwrite: --force")
        Path(folder).mkdir(parents=True, exist_ok=True)
        for target, text in targets.items():
            if target.exists() and target.read_bytes() == text.encode():
                continue
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                draft.write_text(text, encoding="utf-8", newline="\n")
                os.replace(draft, target)
            finally:
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise ExportError(
            f"{error.filename} cannot be written: {error.strerror}.\nChoose a folder: --out DIR"
        ) from None
    return list(targets)


def run(script, name, nproc, flags):
    """Run a script's text on ``nproc`` ranks of this machine under torchrun; return its exit status.

    Ctrl-C, SIGTERM and SIGHUP end every rank; the status is 130 then.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {
        "OMP_NUM_THREADS": str(max(1, cores // nproc)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # a host's name may not resolve
        **os.environ,
    }
    # The store is at a port that the system picks, at an address that needs no name: --standalone asks for the host's.
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--shutdown-timeout=3"]

    process, stopped = None, False

    def stop(number, frame):
        nonlocal stopped
        if process and not stopped:
            process.terminate()  # once: a second signal would disturb torchrun as it ends its ranks
        stopped = True

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(script, encoding="utf-8")
        torchrun += [f"--log-dir={folder}", str(path), *flags]
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, for one, ignores SIGHUP
                before[number] = signal.signal(number, stop)
        try:
            # Out of the terminal's process group: Ctrl-C reaches torchrun through us alone.
            process = subprocess.Popen(torchrun, env=environment, start_new_session=True)
            if stopped:
                process.terminate()
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 130 if stopped else status


def processes(text):
    """The value of --nproc as a number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; give 1, 2, 3, …")
    return int(text)


def main(arguments):
    """Run a command line (without the program's name) and return its exit status; SystemExit(2) for wrong usage."""
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

    try:
        if args.command == "list":
            for path in chapters():
                print(f"{path.stem:24}{title_and_promise(read_notebook(path), path.stem)[0]}")
        elif args.command == "export":
            paths = chapters() if args.all else [find_notebook(args.chapter)]
            for target in write_scripts({path.stem: export(path) for path in paths}, args.out, args.force):
                print(target)
        else:
            path = find_notebook(args.chapter)
            return run(export(path), path.stem, args.nproc, flags)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
