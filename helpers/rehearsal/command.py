"""``python -m helpers rehearse``: run a script on several ranks of this machine, each with a pretended GPU."""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import psutil

from helpers.command_line import positive_int, positive_seconds
from helpers.ranks import processes
from helpers.ranks.torchrun import folder_until_a_signal, set_defaults

PROGRESS_EVERY = 10.0  # seconds from one line about the ranks to the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rehearse`` to its parser."""
    chapter = "its number (4), its name (04_ddp or ddp), or the path of any notebook, or of any script"
    parser.add_argument("chapter", metavar="CHAPTER", help=chapter)
    parser.add_argument(
        "-m", "--module", action="store_true", help="CHAPTER is a module, as in python -m package.train"
    )
    parser.add_argument(
        "--gpus", type=positive_int, default=2, metavar="N", help="pretended GPUs of a node (default: 2)"
    )
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="pretended nodes (default: 1)")
    parser.add_argument(
        "--timeout", type=positive_seconds, default=120, metavar="S", help="seconds to run (default: 120)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write rank 0's counts and the silent mistakes there too"
    )
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KIND", help="a kind of silent mistake that is meant"
    )
    parser.add_argument("flags", nargs="*", default=[], metavar="-- FLAGS", help="the script's, after two dashes")


def main(args: argparse.Namespace, flags: list[str]) -> int:
    """Rehearse a chapter, a notebook or a script; leave with the exit status 0 or 1, or return 1 without a script."""
    problem = problem_of(args)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if args.json:
        args.json = args.json.absolute()  # the script may change its folder
    with folder_until_a_signal() as name:
        folder = Path(name)
        script = args.chapter
        if not args.module and not is_script(Path(script)):
            from helpers.export import chapters  # here, because it takes a second or more

            try:
                [path] = chapters.export(args.chapter, name)
            except chapters.ExportError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            script = str(path)
        status = run(script, args, flags, folder)
        if status != 0:
            for line in last_lines(folder):
                print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the interpreter's end, which takes half a second when torch is loaded


def problem_of(args: argparse.Namespace) -> str:
    """Why the arguments cannot work and what to do, in two lines, or ""."""
    if args.json and not args.json.absolute().parent.is_dir():
        return f"{args.json}: there is no such folder.\nMake it, or name another file."
    if args.module:
        package = args.chapter.partition(".")[0]  # to look for a module in it would import it
        if not PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
            return f"there is no module {args.chapter} here.\nStart in the folder that holds it."
    if args.allow:
        from helpers.training_check import check_allowed  # here, because it imports torch

        try:
            check_allowed(args.allow)
        except ValueError as error:
            return str(error)
    return ""


def is_script(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()


def run(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Run a script on ranks that are forked from this process, and wait.

    Returns the exit status: 0, or that of the rank that failed first, or 1 where the ranks hung or a silent mistake was
    found. ``folder`` takes the ranks' stacks, last lines and notes, and torch's error files. A forked rank has its
    imports done, which saves two seconds of a processor at each start.
    """
    world_size = args.gpus * args.nodes
    set_defaults(world_size)
    import torch._dynamo  # otherwise each rank would import it: an optimizer's constructor does

    from helpers.rehearsal import mistakes, rank

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def be_rank(number: int) -> None:
            server.close()
            rank.prepare_process()
            os.environ.update(rank.variables(number, args.gpus, args.nodes, port, folder))
            rank.main(script, args, flags, folder)

        ranks = [processes.fork(partial(be_rank, number)) for number in range(world_size)]
        # After the forks, because a store has threads. The ranks' connections have waited in the socket.
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    trouble = wait(ranks, folder, args.timeout)
    if trouble is not None:
        print(trouble.message, file=sys.stderr, flush=True)
        end(ranks)
    del store  # the ranks needed it until now
    if trouble is not None:
        # What the ranks have noted is cut short, and the script's error is no silent mistake.
        return trouble.status
    if mistakes.write_section(folder, world_size, args.allow, args.json):
        return 1
    return 0


@dataclass(frozen=True)
class Trouble:
    """How the ranks of a rehearsal failed."""

    message: str
    status: int = 1  # the command's exit status


def wait(ranks: Sequence[psutil.Process], folder: Path, timeout: float) -> Trouble | None:
    """Wait until all ranks have ended, one has failed, or for ``timeout`` seconds. Returns what went wrong, or None.

    Meanwhile a line now and then says where rank 0 is.
    """
    from helpers.ranks.collecting import where  # here: other commands do without
    from helpers.ranks.messages import hang

    start = time.monotonic()
    progress_at = start + PROGRESS_EVERY

    def report_progress(statuses: Mapping[int, int]) -> None:
        nonlocal progress_at
        for rank in statuses:
            (folder / f"stack{rank}").unlink(missing_ok=True)  # a rank that has ended is on no line
        if time.monotonic() > progress_at:
            [line] = where(folder, [0]).values()
            print(f"after {time.monotonic() - start:.0f} s: rank 0 at {line}", file=sys.stderr, flush=True)
            progress_at += PROGRESS_EVERY

    statuses = processes.wait(ranks, timeout, stop_at_failure=True, watch=report_progress)
    for rank, status in sorted(statuses.items()):
        if status < 0:
            return Trouble(f"rank {rank} failed: killed by {signal.Signals(-status).name}")
        if status > 0:
            return Trouble(f"rank {rank} failed: exit status {status}", status)
    if len(statuses) < len(ranks):
        return Trouble(str(hang(where(folder, range(len(ranks))), statuses, timeout)))
    return None


def end(ranks: Sequence[psutil.Process]) -> None:
    """End the ranks that still run. Before that they may print their errors, and have longer if they are at work."""
    from helpers.ranks.collecting import LATE_WITHIN, PEERS_WITHIN, busy

    latest = time.monotonic() + LATE_WITHIN
    processes.wait(ranks, PEERS_WITHIN)
    while time.monotonic() < latest and any(busy(rank.pid) for rank in ranks if rank.is_running()):
        processes.wait(ranks, processes.NOTICE_WITHIN)
    processes.end(ranks)


def last_lines(folder: Path) -> list[str]:
    """The last lines of a rehearsal that failed: the script's lines, the errors, and the ranks that came there.

    First where GPUs or NCCL would have raised, then what the script raised, if that is another error. A rank that has
    only lost the connection to another one is left out, unless there is nothing else to say.
    """
    from helpers.rehearsal.call_order import LOST  # here, because it imports torch

    refused = lines_of_ranks(folder, "refused")
    raised = lines_of_ranks(folder, "raised")
    refusals = {first_line_of_error(line) for line in refused}
    lines = dict(refused)
    for line, ranks in raised.items():
        if first_line_of_error(line) not in refusals and not LOST.search(line):
            lines[line] = ranks
    return [f"{line} (ranks {ranks})" for line, ranks in (lines or raised).items()]


def first_line_of_error(line: str) -> str:
    """RuntimeError: what it says, of the text ``train.py:12: RuntimeError: what it says``, which may go on below."""
    error = line.partition(": ")[2]
    return error.partition("\n")[0]


def lines_of_ranks(folder: Path, kind: str) -> dict[str, list[int]]:
    """{line: the ranks that have left it} of the files ``kind-RANK``."""
    paths = {int(path.name.partition("-")[2]): path for path in folder.glob(f"{kind}-*")}  # {rank: its file}
    ranks: dict[str, list[int]] = {}
    for rank in sorted(paths):
        line = paths[rank].read_text()
        ranks.setdefault(line, []).append(rank)
    return ranks
