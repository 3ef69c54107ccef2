"""What becomes of started ranks: which returned, failed, or hang and in which line; and their end."""

import contextlib
import linecache
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from helpers.ranks.rank import (
    MEET_WITHIN,
    MET,
    RAISED,
    RETURNED,
    Failure,
    describe_line,
    is_library,
    rank_main,
    wait_for_gpu,
)

PEERS_WITHIN = 0.2  # seconds to wait after an exception for an earlier cause, or for peers that fail in the same way
LATE_WITHIN = 2  # seconds to wait for ranks that still compute, or would on a machine that is less busy
NOTICE_WITHIN = 0.2  # seconds of one wait: a Ctrl-C that another thread receives does not interrupt it
AFTER_A_FAILURE = 0.02  # seconds of one wait, once a rank has failed


@dataclass(frozen=True)
class Rank:
    """A rank as the launcher has it."""

    process: BaseProcess
    pipe: connection.Connection  # gives MET, then RETURNED or RAISED, and ends when the process does


@dataclass
class Outcome:
    """What has become of the ranks so far."""

    met: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    # The pipes of these ranks have ended, so they are dead. The forkserver gives their exit statuses a moment later.
    closed: set[int] = field(default_factory=set)


def collect(folder: Path, ranks: list[Rank], timeout: float, watch: Callable[[], None] = lambda: None) -> Outcome:
    """Wait until every rank has reported, one has failed, or the timeout, which begins when all ranks have met.

    Meanwhile ``watch`` is called several times a second.
    """
    outcome = Outcome()
    deadline = time.monotonic() + MEET_WITHIN + timeout
    while True:
        waiting = [rank for rank in range(len(ranks)) if rank not in outcome.returned | outcome.failures.keys()]
        if not waiting:
            return outcome
        watch()
        patience = min(deadline - time.monotonic(), NOTICE_WITHIN)
        is_last_look = patience <= 0
        if outcome.failures:
            patience = AFTER_A_FAILURE
            dying = outcome.closed.intersection(waiting)
            if not more_to_come(outcome.failures, ranks, dying):
                is_last_look = True
        # The last look comes after the question whether a rank is busy: one may have reported just before the answer.
        if is_last_look:
            patience = 0
        has_met_before = len(outcome.met) == len(ranks)
        look(folder, ranks, waiting, outcome, patience)
        if len(outcome.met) == len(ranks) and not has_met_before:
            deadline = time.monotonic() + timeout
        if is_last_look:
            return outcome


def look(folder: Path, ranks: list[Rank], waiting: list[int], outcome: Outcome, patience: float) -> None:
    """Wait for at most ``patience`` seconds until ranks report or die, and add what they say to the outcome."""
    events: list[connection.Connection | int] = [ranks[rank].process.sentinel for rank in waiting]
    events += [ranks[rank].pipe for rank in waiting if rank not in outcome.closed]
    ready = connection.wait(events, patience)
    for rank in waiting:
        process = ranks[rank].process
        pipe = ranks[rank].pipe
        news = b""
        if pipe in ready:
            news = os.read(pipe.fileno(), 2)
            if not news:
                outcome.closed.add(rank)
        if MET in news:
            outcome.met.add(rank)
        if RETURNED in news:
            outcome.returned.add(rank)
        elif RAISED in news:
            outcome.failures[rank] = pickle.loads((folder / f"report{rank}").read_bytes())
        elif process.sentinel in ready and not news:
            outcome.failures[rank] = death(process)


def more_to_come(failures: dict[int, Failure], ranks: list[Rank], dying: Collection[int]) -> bool:
    """Whether other ranks may yet report an earlier cause, or the same failure: soon, or later if some are at work."""
    seconds = time.monotonic() - min(failure.when for failure in failures.values())
    in_any_case: float = PEERS_WITHIN
    if_at_work: float = LATE_WITHIN
    if any(failure.killed for failure in failures.values()):
        # A killed rank has no earlier cause, and no peer dies for the same reason: its peers only finish what they
        # print.
        in_any_case = 0
        if_at_work = PEERS_WITHIN
    if seconds <= in_any_case:
        return True
    if seconds > if_at_work:
        return False
    # Ranks that have reported count as well: a thread of theirs may still send what a peer waits for.
    return bool(dying) or any(busy(rank.process.pid) for rank in ranks)


def busy(pid: int | None) -> bool:
    """Whether a thread of a process runs, or waits for a processor or a disk. False on systems without /proc."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended since glob listed it
        return True
    states = [stat.rpartition(")")[2].split()[0] for stat in stats]
    return "R" in states or "D" in states


def death(process: BaseProcess) -> Failure:
    """The Failure of a rank whose process is gone."""
    process.join()
    status = process.exitcode or 0
    how = f"ended by itself with exit code {status}"
    if status < 0:
        how = f"killed by {signal.Signals(-status).name}"
    return Failure(when=time.monotonic(), what=how, killed=status < 0)


def end(ranks: list[Rank]) -> None:
    """Kill all ranks and the processes that they started; return when the ranks are gone."""
    processes = {rank.process.pid: rank.process for rank in ranks if rank.process.pid is not None}
    for pid, process in processes.items():
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no group of its own yet, or gone
            os.killpg(pid, signal.SIGKILL)
        process.kill()
    for process in processes.values():
        process.join()
        process.close()
    for rank in ranks:
        rank.pipe.close()


def lines_at_timeout(folder: Path, nproc: int) -> dict[int, str]:
    """{rank: the innermost line of the reader's code} at the timeout. Waits for the ranks to dump their stacks."""
    latest = time.monotonic() + LATE_WITHIN
    while True:
        is_late = time.monotonic() > latest
        dumps = [read(folder / f"stack{rank}") for rank in range(nproc)]
        stacks = [dump.rpartition("\n\n")[2] for dump in dumps]  # the main thread's: faulthandler writes it last
        if is_late or all(is_complete(stack) for stack in stacks):
            return {rank: innermost(stack) for rank, stack in enumerate(stacks)}
        time.sleep(0.05)


def is_complete(stack: str) -> bool:
    """Whether faulthandler has written a stack to its end, or to the hundredth frame, after which it stops."""
    return stack.endswith((" in <module>\n", "\n  ...\n"))


def where(folder: str | Path, ranks: Iterable[int]) -> dict[int, str]:
    """{rank: the innermost line of the reader's code} in the stack that each rank wrote last into the folder."""
    return {rank: innermost(read(Path(folder, f"stack{rank}"))) for rank in ranks}


def innermost(stack: str) -> str:
    """The innermost line of the reader's code in one thread's part of a dump, which faulthandler writes in ASCII."""
    escaped = r"\\(x..|u.{4}|U.{8})"
    stack = re.sub(escaped, lambda code: chr(int(code[1][1:], 16)), stack)
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', stack):
        if not is_library(file):
            source = linecache.getline(file, int(line)).strip()
            return describe_line(traceback.FrameSummary(file, int(line), function, line=source))
        if function == wait_for_gpu.__name__:
            return "its end, waiting for its GPU: did every rank call the same collectives?"
        if function == rank_main.__name__:
            break  # the forkserver's frames are outside
    return "no line of its own code"


def read(path: Path) -> str:
    """A file's text, or "" where a rank ended before it wrote the file."""
    if not path.exists():
        return ""
    return path.read_text(errors="replace")


def end_of_file(path: Path, count: int) -> bytes:
    """The last ``count`` bytes of a file, or all where it has fewer. Raises FileNotFoundError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        return file.read()
