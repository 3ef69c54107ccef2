"""What becomes of started ranks: who returned, who failed, who hangs and in which line; and their end."""

import contextlib
import linecache
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from helpers.ranks.rank import MEET_WITHIN, MET, RAISED, RETURNED, Failure, is_library, place, rank_main, wait_for_gpu

PEERS_WITHIN = 0.2  # seconds to wait after an exception for an earlier cause, or for peers that fail in the same way
LATE_WITHIN = 2  # seconds to wait for ranks that still compute, or would on a machine that is less busy
NOTICE_WITHIN = 0.2  # seconds of one wait: a Ctrl-C that another thread receives does not interrupt it


@dataclass(frozen=True)
class Rank:
    """A rank as the launcher has it."""

    process: BaseProcess
    pipe: connection.Connection  # gives MET, then RETURNED or RAISED, and ends when the process does


def collect(
    folder: Path, ranks: list[Rank], timeout: float, watch: Callable[[], None] = lambda: None
) -> tuple[set[int], dict[int, Failure]]:
    """Wait until every rank has reported, one has failed, or the timeout: (ranks that returned, {rank: Failure}).

    Meanwhile ``watch`` is called several times a second.
    """
    met: set[int] = set()
    returned: set[int] = set()
    closed: set[int] = set()  # their pipes have ended: they are dead, which the forkserver has yet to tell
    failures: dict[int, Failure] = {}
    deadline = time.monotonic() + MEET_WITHIN + timeout
    last = False
    while not last and (waiting := [rank for rank in range(len(ranks)) if rank not in returned | failures.keys()]):
        watch()
        patience = deadline - time.monotonic()
        last = patience <= 0
        if failures:
            last = last or not more_to_come(failures, ranks, closed.intersection(waiting))
            patience = 0.02
        # The last look comes after the question whether a rank is busy: one may have reported just before the answer.
        ready = connection.wait(
            [ranks[rank].process.sentinel for rank in waiting]
            + [ranks[rank].pipe for rank in waiting if rank not in closed],
            0 if last else min(patience, NOTICE_WITHIN),
        )
        for rank in waiting:
            process, pipe = ranks[rank].process, ranks[rank].pipe
            news = os.read(pipe.fileno(), 2) if pipe in ready else b""
            if pipe in ready and not news:
                closed.add(rank)
            if MET in news:
                met.add(rank)
                if len(met) == len(ranks):
                    deadline = time.monotonic() + timeout
            if RETURNED in news:
                returned.add(rank)
            elif RAISED in news:
                failures[rank] = pickle.loads((folder / f"report{rank}").read_bytes())
            elif process.sentinel in ready and not news:
                failures[rank] = death(process)
    return returned, failures


def more_to_come(failures: dict[int, Failure], ranks: list[Rank], dying: Collection[int]) -> bool:
    """Whether other ranks may yet report an earlier cause, or the same failure: soon, or later if some are at work."""
    seconds = time.monotonic() - min(failure.when for failure in failures.values())
    killed = any(failure.killed for failure in failures.values())
    # A killed rank has no earlier cause, and no peer dies for the same reason: its peers only finish what they print.
    soon, late = (0, PEERS_WITHIN) if killed else (PEERS_WITHIN, LATE_WITHIN)
    # Ranks that have reported count as well: a thread of theirs may still send what a peer waits for.
    return seconds <= soon or (seconds <= late and (bool(dying) or any(busy(rank.process.pid) for rank in ranks)))


def busy(pid: int | None) -> bool:
    """Whether a thread of a process runs, or waits for a processor or a disk. False on systems without /proc."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended since glob listed it
        return True
    return any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats)


def death(process: BaseProcess) -> Failure:
    """The Failure of a rank whose process is gone."""
    process.join()
    code = process.exitcode or 0
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
    return Failure(when=time.monotonic(), what=how, killed=code < 0)


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


def where_they_stand(folder: Path, nproc: int) -> dict[int, str]:
    """{rank: the innermost line of the reader's code} at the timeout. Waits for the ranks to dump their stacks."""
    patience = time.monotonic() + LATE_WITHIN
    while True:
        late = time.monotonic() > patience
        dumps = [read(folder / f"stack{rank}") for rank in range(nproc)]
        stacks = [dump.rpartition("\n\n")[2] for dump in dumps]  # the main thread's: faulthandler writes it last
        if late or all(stack.endswith((" in <module>\n", "\n  ...\n")) for stack in stacks):  # or over 100 frames
            return {rank: innermost(stack) for rank, stack in enumerate(stacks)}
        time.sleep(0.05)


def where(folder: str | Path, ranks: Iterable[int]) -> dict[int, str]:
    """{rank: the innermost line of the reader's code} in the stack that each rank wrote last into the folder."""
    return {rank: innermost(read(Path(folder, f"stack{rank}"))) for rank in ranks}


def innermost(stack: str) -> str:
    """The innermost line of the reader's code in one thread's part of a dump, which faulthandler writes in ASCII."""
    stack = re.sub(r"\\(?:x(..)|u(.{4})|U(.{8}))", lambda code: chr(int(code[code.lastindex or 0], 16)), stack)
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', stack):
        if not is_library(file):
            source = linecache.getline(file, int(line)).strip()
            return place(traceback.FrameSummary(file, int(line), function, line=source))
        if function == wait_for_gpu.__name__:
            return "its end, waiting for its GPU: did every rank call the same collectives?"
        if function == rank_main.__name__:
            break  # what is outside is the forkserver's
    return "no line of its own code"


def read(path: Path) -> str:
    """A file's text, or "" where a rank ended before it wrote the file."""
    return path.read_text(errors="replace") if path.exists() else ""


def end_of_file(path: Path, count: int) -> bytes:
    """The last ``count`` bytes of a file, or all where it has fewer. Raises FileNotFoundError."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - count))
        return file.read()
