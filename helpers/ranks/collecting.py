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

# After the first failure, other ranks get so many seconds to report an earlier cause, or the same failure:
PEERS_WITHIN = 0.2  # all ranks
LATE_WITHIN = 2  # ranks that are computing, or that wait for a processor of a busy machine
# So many seconds is one wait for reports. It is short, because a Ctrl-C that another thread receives does not end it:
NOTICE_WITHIN = 0.2
NOTICE_AFTER_A_FAILURE = 0.02  # shorter, so that a call ends soon after its ranks have


@dataclass(frozen=True)
class Rank:
    """A rank as the launcher has it."""

    process: BaseProcess
    pipe: connection.Connection  # the rank sends MET, then RETURNED or RAISED; it closes when the process ends


@dataclass
class Outcome:
    """What has become of the ranks so far. A rank that is neither in ``returned`` nor in ``failures`` may still run."""

    met: set[int] = field(default_factory=set)  # the process group of these ranks has started
    returned: set[int] = field(default_factory=set)
    failures: dict[int, Failure] = field(default_factory=dict)
    # The pipes of these ranks are closed, so they are dead. The forkserver gives their exit statuses a moment later.
    closed: set[int] = field(default_factory=set)


def collect(folder: Path, ranks: list[Rank], timeout: float, watch: Callable[[], None] = lambda: None) -> Outcome:
    """Wait for the ranks' reports, and return what has become of the ranks.

    The wait is over when every rank has reported, shortly after one has failed, or at the timeout. The timeout counts
    from the moment when all ranks have met in their process group, for which they have MEET_WITHIN seconds more.
    Meanwhile ``watch`` is called several times a second.
    """
    outcome = Outcome()
    deadline = time.monotonic() + MEET_WITHIN + timeout
    all_have_met = False
    while True:
        waiting = [rank for rank in range(len(ranks)) if rank not in outcome.returned | outcome.failures.keys()]
        if not waiting:
            return outcome
        watch()
        seconds = seconds_to_wait(outcome, ranks, waiting, deadline)
        read_reports(folder, ranks, waiting, outcome, seconds)
        if seconds == 0:  # the wait is over, but a rank may have reported since it was decided
            return outcome
        if len(outcome.met) == len(ranks) and not all_have_met:
            all_have_met = True
            deadline = time.monotonic() + timeout


def seconds_to_wait(outcome: Outcome, ranks: list[Rank], waiting: list[int], deadline: float) -> float:
    """How long the next wait for reports takes. 0 if the ranks that still are ``waiting`` get no more time."""
    if not outcome.failures:
        return max(0, min(deadline - time.monotonic(), NOTICE_WITHIN))
    dying = outcome.closed.intersection(waiting)
    if time.monotonic() >= deadline or not may_report(outcome.failures, ranks, dying):
        return 0
    return NOTICE_AFTER_A_FAILURE


def read_reports(folder: Path, ranks: list[Rank], waiting: list[int], outcome: Outcome, seconds: float) -> None:
    """Wait for at most ``seconds`` until one of the ``waiting`` ranks reports or dies, and add that to the outcome."""
    events: list[connection.Connection | int] = [ranks[rank].process.sentinel for rank in waiting]
    events += [ranks[rank].pipe for rank in waiting if rank not in outcome.closed]
    ready = connection.wait(events, seconds)
    for rank in waiting:
        process = ranks[rank].process
        pipe = ranks[rank].pipe
        report = b""
        if pipe in ready:
            report = os.read(pipe.fileno(), 2)  # a rank sends a byte when it has met its peers, and one at its end
            if not report:
                outcome.closed.add(rank)
        if MET in report:
            outcome.met.add(rank)
        if RETURNED in report:
            outcome.returned.add(rank)
        elif RAISED in report:
            outcome.failures[rank] = pickle.loads((folder / f"report{rank}").read_bytes())
        elif process.sentinel in ready and not report:
            outcome.failures[rank] = death(process)


def may_report(failures: dict[int, Failure], ranks: list[Rank], dying: Collection[int]) -> bool:
    """Whether it is worth waiting for more ranks, which may report an earlier cause, or the same failure.

    ``dying`` are ranks whose pipes are closed, and whose exit statuses are not known yet.
    """
    seconds = time.monotonic() - min(failure.when for failure in failures.values())
    wait_for_all: float = PEERS_WITHIN
    wait_for_busy: float = LATE_WITHIN
    if any(failure.killed for failure in failures.values()):
        # A rank that is killed is no consequence of a peer's failure, so nobody has an earlier cause to report. The
        # peers get only the time to finish what they print.
        wait_for_all = 0
        wait_for_busy = PEERS_WITHIN
    if seconds <= wait_for_all:
        return True
    if seconds > wait_for_busy:
        return False
    # Ranks that have reported may be busy as well: a thread of theirs may still send what a peer waits for.
    return bool(dying) or any(busy(rank.process.pid) for rank in ranks)


def busy(pid: int | None) -> bool:
    """Whether a thread of a process runs, or waits for a processor or a disk. False on systems without /proc.

    /proc has a thread's state after its name in parentheses. R: it runs, or is ready to run. D: it waits for a disk.
    """
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
    """{rank: the innermost line of the reader's code} at the timeout.

    At the timeout each rank's faulthandler begins to write the stacks of its threads into a file. This waits until all
    files are complete, but not longer than LATE_WITHIN seconds.
    """
    latest = time.monotonic() + LATE_WITHIN
    while True:
        is_late = time.monotonic() > latest
        dumps = [read(folder / f"stack{rank}") for rank in range(nproc)]
        main_stacks = [dump.rpartition("\n\n")[2] for dump in dumps]  # faulthandler writes the main thread's last
        if is_late or all(is_complete(stack) for stack in main_stacks):
            return {rank: innermost(stack) for rank, stack in enumerate(main_stacks)}
        time.sleep(0.05)


def is_complete(stack: str) -> bool:
    """Whether faulthandler has written a stack to its end, or to the hundredth frame, after which it stops."""
    return stack.endswith((" in <module>\n", "\n  ...\n"))


def where(folder: str | Path, ranks: Iterable[int]) -> dict[int, str]:
    """{rank: the innermost line of the reader's code} in the stack that each rank wrote last into the folder."""
    return {rank: innermost(read(Path(folder, f"stack{rank}"))) for rank in ranks}


def innermost(stack: str) -> str:
    """The innermost line of the reader's code in one thread's stack, in words for an error message."""
    escaped_character = r"\\(x..|u.{4}|U.{8})"  # faulthandler writes in ASCII: "\xe9" for é
    stack = re.sub(escaped_character, lambda code: chr(int(code[1][1:], 16)), stack)
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
