"""``python -m helpers rehearse``: run a script on several ranks of this machine, each with a simulated GPU."""

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
from typing import Any

import psutil

from helpers.command_line import positive_int, positive_seconds
from helpers.ranks import processes
from helpers.ranks.torchrun import folder_until_a_signal, set_defaults

PROGRESS_EVERY = 10.0  # seconds from one line about rank 0 to the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rehearse`` to its parser."""
    chapter = "its number (4), its name (04_ddp or ddp), or the path of any notebook, or of any script"
    parser.add_argument("chapter", metavar="CHAPTER", help=chapter)
    parser.add_argument(
        "-m", "--module", action="store_true", help="CHAPTER is a module, as in python -m package.train"
    )
    parser.add_argument(
        "--gpus", type=positive_int, default=2, metavar="N", help="simulated GPUs of a node (default: 2)"
    )
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="simulated nodes (default: 1)")
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
    """Rehearse a chapter, a notebook, a script or a module. ``flags`` are those of the script.

    Returns 1 if there is nothing to run. Otherwise this process ends here, with the exit status of the rehearsal.
    """
    problem = problem_of(args)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if args.json:
        args.json = args.json.absolute()  # the script may change its folder
    with folder_until_a_signal() as name:
        folder = Path(name)
        script = args.chapter
        is_notebook = not args.module and not is_script(Path(script))
        if is_notebook:
            from helpers.export import chapters  # here, because it takes a second or more

            try:
                script = str(chapters.export_script(args.chapter, folder))
            except chapters.ExportError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        status = run(script, args, flags, folder)
        if status != 0:
            for line in last_lines(folder):
                print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the interpreter's end, which takes half a second when torch is loaded


def problem_of(args: argparse.Namespace) -> str:
    """Why the arguments of ``rehearse`` cannot work and what to do, as text for an error message; "" if they can."""
    if args.json and not args.json.absolute().parent.is_dir():
        return f"{args.json}: there is no such folder.\nMake it, or name another file."
    if args.module:
        # Only the outermost package is looked for. To find a module in it, Python would have to import the package,
        # and so to run code of the script in this process.
        package = args.chapter.partition(".")[0]
        folders = [os.getcwd(), *sys.path]
        if not PathFinder.find_spec(package, folders):
            return f"there is no module {args.chapter} here.\nStart in the folder that holds it."
    if args.allow:
        from helpers.training_check import check_allowed  # here, because it imports torch

        try:
            check_allowed(args.allow)
        except ValueError as error:
            return str(error)
    return ""


def is_script(path: Path) -> bool:
    """Whether this is the path of a script, and not the number or name of a chapter, nor a notebook."""
    return path.suffix == ".py" and path.is_file()


@dataclass(frozen=True)
class StartedRanks:
    """The processes of the ranks, and the store in which the ranks find each other. It serves them while it is kept."""

    processes: list[psutil.Process]
    store: Any  # a torch.distributed.TCPStore


def start_ranks(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> StartedRanks:
    """Fork the ranks from this process, and start their store. The arguments are those of ``run``.

    A forked rank has its imports done, which saves two seconds of a processor at each start.
    """
    world_size = args.gpus * args.nodes
    set_defaults(world_size)  # before the import of torch, which reads some of these variables
    import torch._dynamo  # otherwise each rank would import it: an optimizer's constructor does

    from helpers.rehearsal import rank

    # The store's socket. The system picks a free port.
    host = "127.0.0.1"
    with socket.create_server((host, 0)) as server:
        _, port = server.getsockname()

        def be_rank(number: int) -> None:
            """What a forked process does. It ends in rank.main."""
            server.close()  # this process's copy; the store takes the command's own
            rank.prepare_process()
            os.environ.update(rank.variables(number, args.gpus, args.nodes, port, folder))
            rank.main(script, args, flags, folder)

        ranks = [processes.fork(partial(be_rank, number)) for number in range(world_size)]
        # The store starts after the forks, because it has threads, which a fork would not copy. The ranks may have
        # connected to the socket by now, and have waited there.
        store = torch.distributed.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    return StartedRanks(ranks, store)


def run(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Run a script on ranks that are forked from this process, and wait for them.

    Returns the exit status: 0, or that of the rank that failed first, or 1 if the ranks hung or a silent mistake was
    found. ``args`` are those of ``rehearse``, ``flags`` those of the script. ``folder`` takes files of the ranks: their
    stacks, their errors, and what they note for the search for silent mistakes.
    """
    started = start_ranks(script, args, flags, folder)
    from helpers.rehearsal import mistakes  # here, because it imports torch

    trouble = wait(started.processes, folder, args.timeout)
    if trouble is not None:
        print(trouble.message, file=sys.stderr, flush=True)
        end(started.processes)
        # Silent mistakes are not looked for: the ranks' notes are incomplete, and the script has a known error.
        return trouble.status
    comparison = mistakes.compare_notes(folder, len(started.processes), args.allow)
    mistakes.write_section(comparison, args.json)
    if comparison.has_mistakes:
        return 1
    return 0


@dataclass(frozen=True)
class Trouble:
    """How the ranks of a rehearsal failed."""

    message: str
    status: int = 1  # the command's exit status


class Progress:
    """Says now and then, while the ranks run, in which line of the script rank 0 is.

    ``folder`` has a file ``stackRANK`` with the last stack of each rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = time.monotonic()
        self.next_at = self.start + PROGRESS_EVERY

    def report(self, statuses: Mapping[int, int]) -> None:
        """Print the line, if it is time for it. ``statuses`` is {rank: exit status} of the ranks that have ended."""
        for rank in statuses:
            (self.folder / f"stack{rank}").unlink(missing_ok=True)  # a rank that has ended is on no line
        now = time.monotonic()
        if now > self.next_at:
            from helpers.ranks.collecting import where  # here: other commands do without

            line = where(self.folder, [0])[0]
            print(f"after {now - self.start:.0f} s: rank 0 at {line}", file=sys.stderr, flush=True)
            self.next_at += PROGRESS_EVERY


def wait(ranks: Sequence[psutil.Process], folder: Path, timeout: float) -> Trouble | None:
    """Wait for the ranks until all have ended, one has failed, or ``timeout`` seconds are over.

    Returns what went wrong, or None. Meanwhile a line is printed now and then that says where rank 0 is. It is read
    from ``folder``, where each rank writes its stack.
    """
    from helpers.ranks.collecting import where  # here: other commands do without
    from helpers.ranks.messages import hang

    progress = Progress(folder)
    statuses = processes.wait(ranks, timeout, stop_at_failure=True, watch=progress.report)  # {rank: exit status}
    for rank, status in sorted(statuses.items()):
        if status < 0:  # as in subprocess: the number of the signal that killed it, with a minus
            return Trouble(f"rank {rank} failed: killed by {signal.Signals(-status).name}")
        if status > 0:
            return Trouble(f"rank {rank} failed: exit status {status}", status)
    some_still_run = len(statuses) < len(ranks)
    if some_still_run:
        lines = where(folder, range(len(ranks)))
        return Trouble(str(hang(lines, finished=statuses, timeout=timeout)))
    return None


def end(ranks: Sequence[psutil.Process]) -> None:
    """End the ranks that still run after one has failed, or after the time is over.

    Before that they get a moment to print their own errors, which a rank's failure causes on its peers. A rank that is
    at work, as on a busy machine, gets longer than one that only waits.
    """
    from helpers.ranks.collecting import LATE_WITHIN, PEERS_WITHIN, busy

    latest = time.monotonic() + LATE_WITHIN
    processes.wait(ranks, PEERS_WITHIN)
    while time.monotonic() < latest:
        a_rank_works = any(busy(rank.pid) for rank in ranks if rank.is_running())
        if not a_rank_works:
            break
        processes.wait(ranks, processes.NOTICE_WITHIN)
    processes.end(ranks)


def last_lines(folder: Path) -> list[str]:
    """The errors of a failed rehearsal in lines such as "train.py:12: RuntimeError: what it says (ranks [0, 1])".

    First come the errors that GPUs or NCCL would have raised, which the ranks have left in files ``refused-RANK`` of
    the folder. Then come other errors of the script, from files ``raised-RANK``. Of these, two kinds are left out: what
    is in the first files already, and what only says that the connection to another rank is lost, unless there is no
    other error.
    """
    from helpers.rehearsal.call_order import LOST  # here, because it imports torch

    refused = ranks_by_line(folder, "refused")
    raised = ranks_by_line(folder, "raised")

    shown = dict(refused)  # {line: ranks}
    refused_errors = [first_line_of_error(line) for line in refused]
    for line, ranks in raised.items():
        is_refused = first_line_of_error(line) in refused_errors
        is_lost_connection = LOST.search(line) is not None
        if not is_refused and not is_lost_connection:
            shown[line] = ranks
    if not shown:
        shown = raised
    return [f"{line} (ranks {ranks})" for line, ranks in shown.items()]


def first_line_of_error(line: str) -> str:
    """RuntimeError: what it says, of the text ``train.py:12: RuntimeError: what it says``, which may go on below."""
    _, _, error = line.partition(": ")
    first_line, _, _ = error.partition("\n")
    return first_line


def ranks_by_line(folder: Path, kind: str) -> dict[str, list[int]]:
    """{line: the ranks that have left it} of the files in the folder that are called ``kind-RANK``, as refused-0."""

    def rank_of(path: Path) -> int:
        return int(path.name.removeprefix(f"{kind}-"))

    ranks_of_line: dict[str, list[int]] = {}
    for path in sorted(folder.glob(f"{kind}-*"), key=rank_of):
        line = path.read_text()
        ranks_of_line.setdefault(line, []).append(rank_of(path))
    return ranks_of_line
