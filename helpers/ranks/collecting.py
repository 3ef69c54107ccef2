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
    GROUP_STARTED,
    RAISED,
    RETURNED,
    START_WITHIN,
    Failure,
    describe_line,
    is_library,
    rank_main,
    wait_for_gpu,
)

# After the first failure, the other ranks get this many seconds to report an earlier cause, or the same failure.
PEERS_WITHIN = 0.2
# This many if they are still computing, or wait for a processor of a busy machine.
LATE_WITHIN = 2
# A wait for reports is repeated after this many seconds. A Ctrl-C that another thread receives does not end a wait, so
# they are few.
NOTICE_WITHIN = 0.2
NOTICE_AFTER_A_FAILURE = 0.02  # fewer, so that a call ends soon after its ranks have
# A rank sends two bytes in its life, GROUP_STARTED and then RETURNED or RAISED. One read may get both.
BYTES_OF_A_RANK = 2


@dataclass(frozen=True)
class Rank:
    """A rank that was started, as the launcher sees it.

    The rank sends single bytes through the pipe: GROUP_STARTED, and later RETURNED or RAISED. The pipe is closed when
    the rank's process ends.
    """

    process: BaseProcess
    pipe: connection.Connection


@dataclass
class Outcome:
    """What has become of the ranks so far. A rank that is neither in ``returned`` nor in ``failures`` may still run."""

    started: set[int] = field(default_factory=set)  # ranks on which the process group has started
    returned: set[int] = field(default_factory=set)  # ranks whose function has returned
    failures: dict[int, Failure] = field(default_factory=dict)  # {rank: how it failed}
    # Ranks whose pipes are closed, so they are dead. The forkserver gives their exit statuses a moment later.
    closed: set[int] = field(default_factory=set)

    def running(self, world_size: int) -> list[int]:
        """The ranks, of so many, that have neither returned nor failed."""
        ranks = []
        for rank in range(world_size):
            if rank not in self.returned and rank not in self.failures:
                ranks.append(rank)
        return ranks


def collect(folder: Path, ranks: list[Rank], timeout: float, watch: Callable[[], None]) -> Outcome:
    """Wait until every rank of a call has returned or failed, and return what has become of each.

    Ranks that still run are not waited for beyond the timeout, nor for long after the first failure, because they may
    then wait for the failed rank for ever. The timeout, in seconds, counts from the moment when the process group has
    started on all ranks. For the start they have START_WITHIN seconds more. ``watch`` is called several times a second
    while this function waits. The ranks write their results and failures to files in ``folder``. A rank that neither
    returned nor failed, in what is returned here, was not waited for.
    """
    outcome = Outcome()
    deadline = time.monotonic() + START_WITHIN + timeout
    timeout_has_begun = False
    while True:
        running = outcome.running(len(ranks))
        if not running:
            return outcome
        watch()
        if is_over(outcome, ranks, running, deadline):
            read_reports(folder, ranks, running, outcome, seconds=0)  # a rank may just have reported
            return outcome

        if outcome.failures:
            wait_seconds = NOTICE_AFTER_A_FAILURE
        else:
            wait_seconds = min(NOTICE_WITHIN, deadline - time.monotonic())
        read_reports(folder, ranks, running, outcome, seconds=wait_seconds)

        all_have_started = len(outcome.started) == len(ranks)
        if all_have_started and not timeout_has_begun:
            timeout_has_begun = True
            deadline = time.monotonic() + timeout


def is_over(outcome: Outcome, ranks: list[Rank], running: list[int], deadline: float) -> bool:
    """Whether the ranks that are still ``running`` get no more time to report, because of the deadline or a failure."""
    if time.monotonic() >= deadline:
        return True
    if not outcome.failures:
        return False
    dying = outcome.closed.intersection(running)
    return not may_report(outcome.failures, ranks, dying)


def read_reports(folder: Path, ranks: list[Rank], running: list[int], outcome: Outcome, seconds: float) -> None:
    """Wait until one of the ``running`` ranks reports or dies, at most so many seconds, and add it to ``outcome``.

    A rank reports by single bytes through its pipe, and by a file in ``folder``.
    """
    to_wait_for: list[connection.Connection | int] = []
    for rank in running:
        to_wait_for.append(ranks[rank].process.sentinel)  # it becomes ready when the process has ended
        if rank not in outcome.closed:  # a closed pipe would always be ready
            to_wait_for.append(ranks[rank].pipe)
    ready = connection.wait(to_wait_for, max(0, seconds))

    for rank in running:
        process = ranks[rank].process
        pipe = ranks[rank].pipe
        report = b""
        if pipe in ready:
            report = os.read(pipe.fileno(), BYTES_OF_A_RANK)
            if not report:
                outcome.closed.add(rank)
        if GROUP_STARTED in report:
            outcome.started.add(rank)
        if RETURNED in report:
            outcome.returned.add(rank)
        elif RAISED in report:
            outcome.failures[rank] = pickle.loads((folder / f"report{rank}").read_bytes())
        elif process.sentinel in ready and not report:  # a process that has ended may have left a report in the pipe
            outcome.failures[rank] = death(process)


def may_report(failures: dict[int, Failure], ranks: list[Rank], dying: Collection[int]) -> bool:
    """Whether to wait a little longer after the first failure, because another rank may explain it or share it.

    A rank that fails pulls others down with it, and these may report first. So the error message is not written before
    the other ranks have had the time to report, too. ``dying`` are the numbers of ranks that have closed their pipes,
    and whose exit statuses are not known yet.
    """
    time_of_first_failure = min(failure.when for failure in failures.values())
    seconds_since = time.monotonic() - time_of_first_failure
    seconds_for_all: float
    seconds_for_busy: float
    a_rank_was_killed = any(failure.killed for failure in failures.values())
    if a_rank_was_killed:
        # A kill is no consequence of a peer's failure, so nobody has an earlier cause to report. The peers get only the
        # time to finish what they print.
        seconds_for_all = 0
        seconds_for_busy = PEERS_WITHIN
    else:
        seconds_for_all = PEERS_WITHIN
        seconds_for_busy = LATE_WITHIN
    if seconds_since <= seconds_for_all:
        return True
    if seconds_since > seconds_for_busy:
        return False
    if dying:
        return True
    # Ranks that have reported may be busy as well: a thread of theirs may still send what a peer waits for.
    return any(busy(rank.process.pid) for rank in ranks)


def busy(pid: int | None) -> bool:
    """Whether a thread of a process runs, or waits for a processor or a disk. False on systems without /proc.

    Linux has a line for each thread in /proc/PID/task/*/stat, such as ``4711 (python) R 1 …``. The letter behind the
    name is the thread's state. R: it runs, or is ready to run. D: it waits for a disk. (man proc_pid_stat)
    """
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended since glob listed it
        return True
    for stat in stats:
        _, _, after_name = stat.rpartition(")")  # the name itself may have spaces and parentheses
        state = after_name.split()[0]
        if state in ("R", "D"):
            return True
    return False


def death(process: BaseProcess) -> Failure:
    """The Failure of a rank whose process has ended without a report: by a signal, or by a call such as os._exit."""
    process.join()
    status = process.exitcode or 0
    was_killed = status < 0  # then it is the signal's number with a minus
    if was_killed:
        how = f"killed by {signal.Signals(-status).name}"
    else:
        how = f"ended by itself with exit code {status}"
    return Failure(when=time.monotonic(), what=how, killed=was_killed)


def end(ranks: list[Rank]) -> None:
    """Kill all ranks and the processes that they started; return when the ranks are gone."""
    started = []
    for rank in ranks:
        process = rank.process
        if process.pid is None:  # something failed before it was started
            continue
        # A rank leads a process group, in which all that it starts is. Right after its start it may not yet.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        started.append(process)
    for process in started:
        process.join()
        process.close()
    for rank in ranks:
        rank.pipe.close()


def lines_at_timeout(folder: Path, nproc: int) -> dict[int, str]:
    """Where each rank is at the timeout: {rank: the innermost line of the user's code}, for the error message.

    At the timeout each rank's faulthandler begins to write the stacks of its threads into a file. This waits until all
    files are complete, but not longer than LATE_WITHIN seconds.
    """
    latest = time.monotonic() + LATE_WITHIN
    while True:
        is_late = time.monotonic() > latest
        main_stacks = [main_stack(read(folder / f"stack{rank}")) for rank in range(nproc)]
        if is_late or all(is_complete(stack) for stack in main_stacks):
            return {rank: innermost(stack) for rank, stack in enumerate(main_stacks)}
        time.sleep(0.05)


def main_stack(dump: str) -> str:
    """The main thread's stack in what faulthandler has written: the last one, after an empty line."""
    _, _, last_stack = dump.rpartition("\n\n")
    return last_stack


def is_complete(stack: str) -> bool:
    """Whether faulthandler has written a stack to its end, or to the hundredth frame, after which it stops."""
    return stack.endswith((" in <module>\n", "\n  ...\n"))


def where(folder: str | Path, ranks: Iterable[int]) -> dict[int, str]:
    """Where each of these ranks was when it last wrote its stack into the folder.

    Returns {rank: the innermost line of the user's code}, such as ``{0: "line 3 of step: loss = f(x)"}``.
    """
    return {rank: innermost(read(Path(folder, f"stack{rank}"))) for rank in ranks}


def innermost(stack: str) -> str:
    """The innermost line of the user's code in one thread's stack, in words for an error message.

    faulthandler writes a line for each frame, the innermost first: ``  File "train.py", line 3 in step``.
    """
    # Characters that are not ASCII are written as \xe9, \u20ac or \U0001f600, which this changes back.
    stack = re.sub(r"\\(?:x..|u.{4}|U.{8})", unescaped, stack)
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', stack):
        if not is_library(file):
            source = linecache.getline(file, int(line)).strip()
            return describe_line(traceback.FrameSummary(file, int(line), function, line=source))
        if function == wait_for_gpu.__name__:
            return "its end, waiting for its GPU: did every rank call the same collectives?"
        if function == rank_main.__name__:
            break  # further out are only the forkserver's frames
    return "no line of its own code"


def unescaped(match: re.Match[str]) -> str:
    r"""The character for ``\xe9``, ``\u20ac`` or ``\U0001f600``, as faulthandler writes what is not ASCII."""
    hexadecimal = match[0][2:]  # without the backslash and the letter
    return chr(int(hexadecimal, base=16))


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
