"""``python -m helpers rehearse``: run a script on several ranks of this machine, each with a pretended GPU."""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from helpers.command_line import positive, whole
from helpers.ranks.torchrun import STOPS, folder_until_a_signal, set_defaults

ROOT = Path(__file__).resolve().parents[2]
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun's agent
GRACE = 3  # seconds that ranks have to end at a SIGTERM
EVERY = 10.0  # seconds from one line about the ranks to the next


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``rehearse`` to its parser."""
    chapter = "its number (4), its name (04_ddp or ddp), or the path of any notebook, or of any script"
    parser.add_argument("chapter", metavar="CHAPTER", help=chapter)
    parser.add_argument("--gpus", type=whole, default=2, metavar="N", help="pretended GPUs of a node (default: 2)")
    parser.add_argument("--nodes", type=whole, default=1, metavar="N", help="pretended nodes (default: 1)")
    parser.add_argument("--timeout", type=positive, default=120, metavar="S", help="seconds to run (default: 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rank 0's counts there too")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the script, after two dashes")


def main(args: argparse.Namespace, flags: list[str]) -> int:
    """Rehearse a chapter, a notebook or a script; leave with the exit status 0 or 1, or return 1 without a script."""
    with folder_until_a_signal() as folder:
        script = Path(args.chapter)
        if script.suffix != ".py" or not script.is_file():
            from helpers.export import chapters  # here, because it takes a second or more

            try:
                [script] = chapters.export(args.chapter, folder)
            except chapters.ExportError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        status = run(script, args.gpus, args.nodes, flags, Path(folder), args.json, args.timeout)
        if status:
            for line in refusals(Path(folder)):
                print(line, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without the interpreter's end, which takes half a second when torch is loaded


def run(
    script: Path,
    gpus: int,
    nodes: int,
    flags: list[str],
    folder: Path,
    counts: Path | None = None,
    timeout: float = 120,
) -> int:
    """Run a script on ranks that are forked from this process, and wait; return 0, or 1 where one failed or hung.

    ``folder`` takes refusals and torch's error files, ``counts`` is the path for rank 0's counts, or None. A forked
    rank has its imports done, which saves two seconds of a processor at each start.
    """
    set_defaults(gpus * nodes)
    counts = counts and counts.absolute()  # the script may change its folder
    import torch._dynamo  # else every rank would: an optimizer's constructor imports it

    from helpers.rehearsal import rank

    ranks: dict[int, int] = {}  # by process
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # a new rank still has this process's handlers
        for number in range(gpus * nodes):
            pid = os.fork()
            if not pid:
                try:
                    server.close()
                    become_a_rank(before)
                    os.environ.update(variables(number, gpus, nodes, port, folder))
                    rank.main(str(script), flags, gpus, folder, counts)
                finally:
                    rank.EXIT(1)  # main does not return
            ranks[pid] = number
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # After the forks, because a store has threads. The ranks' connections have waited in the socket.
        store = torch.distributed.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    status = wait(ranks, folder, timeout)
    del store  # the ranks needed it until now
    return status


def become_a_rank(mask: Iterable[int]) -> None:
    """Make this forked process as new as one that torchrun has started: its session, its signals, its numbers."""
    os.setsid()
    for number in HANDLED:  # some are ignored in a shell's background job
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path.insert(1, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all ranks would draw the same numbers


def variables(rank: int, gpus: int, nodes: int, port: int, folder: Path) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank."""
    node, local = divmod(rank, gpus)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(node),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(gpus * nodes),
        "LOCAL_WORLD_SIZE": str(gpus),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_WORLD_SIZE": str(gpus * nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(Path(folder, f"error-{rank}.json")),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in HANDLED),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def wait(ranks: dict[int, int], folder: Path, timeout: float) -> int:
    """Wait for all ranks, {process: rank}; return 0, or 1 where one failed or ran longer than ``timeout`` seconds.

    What still runs then is ended, as torchrun does it. Meanwhile a line now and then says where the ranks are.
    """
    from helpers.ranks.collecting import LATE_WITHIN, PEERS_WITHIN, busy  # here, because other commands do without
    from helpers.ranks.messages import hang

    world_size, failed, hung = len(ranks), False, False
    start = time.monotonic()
    report_at = start + EVERY
    while ranks and not failed and not hung:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = ranks.pop(pid, None), os.waitstatus_to_exitcode(status)
            failed = rank is not None and code != 0
            continue
        if time.monotonic() > report_at:
            line = where_ranks_were(folder, [0])[0]
            print(f"after {report_at - start:.0f} s: rank 0 at {line}", file=sys.stderr, flush=True)
            report_at += EVERY
        hung = time.monotonic() - start > timeout
        time.sleep(0.01)
    if hung:
        finished = set(range(world_size)) - set(ranks.values())
        print(hang(where_ranks_were(folder, range(world_size)), finished, timeout), file=sys.stderr, flush=True)
    if failed:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        print(f"rank {rank} failed: {how}", file=sys.stderr, flush=True)
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
    return int(failed or hung)


def where_ranks_were(folder: Path, ranks: Iterable[int]) -> dict[int, str]:
    """{rank: the innermost line of the script} in the stack that the rank wrote last, a second or so ago."""
    from helpers.ranks.collecting import innermost, read

    return {rank: innermost(read(folder / f"stack{rank}")) for rank in ranks}


def refusals(folder: Path) -> list[str]:
    """A line for each place in the script where GPUs or NCCL would have raised, with the ranks that came there."""
    from helpers.rehearsal.counts import Refusal

    ranks: dict[Refusal, list[int]] = {}
    for path in sorted(folder.glob("refused-*.json")):
        last = Refusal(**json.loads(path.read_text())[-1])
        ranks.setdefault(last, []).append(int(path.stem.partition("-")[2]))
    return [f"{refusal.line}: {refusal.error} (ranks {sorted(numbers)})" for refusal, numbers in ranks.items()]
