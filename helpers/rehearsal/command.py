"""``python -m helpers rehearse``: run a script on several ranks of this machine, each with a pretended GPU."""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

from helpers.command_line import positive_int, positive_seconds
from helpers.ranks.torchrun import STOPS, folder_until_a_signal, set_defaults

GRACE = 3  # seconds that ranks have to end at a SIGTERM
EVERY = 10.0  # seconds from one line about the ranks to the next


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rank 0's counts there too")
    parser.add_argument("flags", nargs="*", default=[], metavar="-- FLAGS", help="the script's, after two dashes")


def main(args: argparse.Namespace, flags: list[str]) -> int:
    """Rehearse a chapter, a notebook or a script; leave with the exit status 0 or 1, or return 1 without a script."""
    if args.json and not args.json.absolute().parent.is_dir():
        print(f"error: {args.json}: there is no such folder.\nMake it, or name another file.", file=sys.stderr)
        return 1
    package = args.chapter.partition(".")[0]  # to look for a module in it would import it
    if args.module and not PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
        print(f"error: there is no module {args.chapter} here.\nStart in the folder that holds it.", file=sys.stderr)
        return 1
    with folder_until_a_signal(last_words) as name:
        folder, script = Path(name), Path(args.chapter)
        if not args.module and (script.suffix != ".py" or not script.is_file()):
            from helpers.export import chapters  # here, because it takes a second or more

            try:
                [script] = chapters.export(args.chapter, name)
            except chapters.ExportError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        args.json = args.json and args.json.absolute()  # the script may change its folder
        status = run(str(script), args, flags, folder)
        for line in refusals(folder) if status else ():
            print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the interpreter's end, which takes half a second when torch is loaded


def run(script: str, args: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Run a script on ranks that are forked from this process, and wait; return 0, or 1 where one failed or hung.

    ``folder`` takes refusals and torch's error files. A forked rank has its imports done, which saves two seconds of a
    processor at each start.
    """
    world_size = args.gpus * args.nodes
    set_defaults(world_size)
    import torch._dynamo  # else every rank would: an optimizer's constructor imports it

    from helpers.rehearsal import rank

    ranks: dict[int, int] = {}  # by process
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # a new rank still has this process's handlers
        for number in range(world_size):
            pid = os.fork()
            if not pid:
                try:
                    server.close()
                    rank.be_new(before)
                    os.environ.update(rank.variables(number, args.gpus, args.nodes, port, folder))
                    rank.main(script, args, flags, folder)
                finally:
                    rank.EXIT(1)  # main does not return
            ranks[pid] = number
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # After the forks, because a store has threads. The ranks' connections have waited in the socket.
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    status = wait(ranks, folder, args.timeout)
    del store  # the ranks needed it until now
    return status


def wait(ranks: dict[int, int], folder: Path, timeout: float) -> int:
    """Wait for all ranks, {process: rank}; return 0, or 1 where one failed or ran longer than ``timeout`` seconds.

    What still runs then is ended, as torchrun does it. Meanwhile a line now and then says where the ranks are.
    """
    from helpers.ranks.collecting import LATE_WITHIN, PEERS_WITHIN, busy, where  # here: other commands do without
    from helpers.ranks.messages import hang

    everyone, trouble = range(len(ranks)), ""
    start = time.monotonic()
    report_at = start + EVERY
    while ranks and not trouble:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid in ranks:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            (folder / f"stack{rank}").unlink(missing_ok=True)  # a finished rank is nowhere
            if code:
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                trouble = f"rank {rank} failed: {how}"
        elif now > start + timeout:
            trouble = str(hang(where(folder, everyone), set(everyone) - set(ranks.values()), timeout))
        elif now > report_at:
            print(f"after {now - start:.0f} s: rank 0 at {where(folder, [0])[0]}", file=sys.stderr, flush=True)
            report_at += EVERY
        else:
            time.sleep(0.01)
    if trouble:
        print(trouble, file=sys.stderr, flush=True)
    # First the other ranks may print their errors, longer if they are at work: 0 sends nothing.
    endings = ((0, PEERS_WITHIN, LATE_WITHIN), (signal.SIGTERM, GRACE, GRACE), (signal.SIGKILL, GRACE, GRACE))
    for ending, within, late_within in endings:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, ending)  # with what the rank has started
        start = time.monotonic()
        while ranks and (waited := time.monotonic() - start) < late_within:
            if waited > within and not any(map(busy, ranks)):
                break
            ranks.pop(os.waitpid(-1, os.WNOHANG)[0], None)
            time.sleep(0.01)
    return int(bool(trouble))


def last_words(folder: str) -> str:
    """What a rehearsal that is interrupted says: where the ranks were that had not finished."""
    from helpers.ranks.collecting import where
    from helpers.ranks.messages import by_line

    ranks = sorted(int(path.name.removeprefix("stack")) for path in Path(folder).glob("stack*[0-9]"))
    return "".join(f"{line}\n" for line in by_line({rank: f"at {line}" for rank, line in where(folder, ranks).items()}))


def refusals(folder: Path) -> list[str]:
    """A line for each place in the script where GPUs or NCCL would have raised, with the ranks that came there."""
    ranks: dict[str, list[int]] = {}
    for path in sorted(folder.glob("refused-*")):
        ranks.setdefault(path.read_text(), []).append(int(path.name.partition("-")[2]))
    return [f"{refusal} (ranks {sorted(ranks_there)})" for refusal, ranks_there in ranks.items()]
