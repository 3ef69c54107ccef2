"""Run a function on N real ranks of this machine, from a notebook cell or a script.

    results = launch(fn, *args, nproc=4)

Each call gets fresh ranks. They are forked by one of Python's forkservers, which has imported torch already, so a call
costs a fork and a gloo rendezvous. The ranks end with the call, and the forkserver ends with this process.
"""

import contextlib
import itertools
import linecache
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from multiprocessing import connection, forkserver, util
from pathlib import Path
from types import ModuleType

from helpers.ranks.rank import MEET_WITHIN, MET, NOTEBOOK, RAISED, RETURNED, Failure, is_library, place, rank_main
from helpers.ranks.serialization import dumps

MAX_RANKS = 64
MAX_SECONDS = 1_000_000
PEERS_WITHIN = 0.2  # seconds to wait after an exception for an earlier cause, or for peers that fail in the same way
LATE_WITHIN = 2  # seconds to wait for ranks that still compute, or would on a machine that is less busy
NOTICE_WITHIN = 0.2  # seconds of one wait: a Ctrl-C that another thread receives does not interrupt it
context = multiprocessing.get_context("forkserver")
launches = itertools.count()
starting = threading.Lock()  # without_main changes sys.modules, so one thread at a time may be in it


class LaunchError(ValueError):
    """The call cannot work, and no rank was started. The message names the next thing to try."""

    def _render_traceback_(self):
        """What IPython shows: the message, without the launcher's frames."""
        return [f"{type(self).__name__}: {self}"]


class RankError(RuntimeError):
    """A rank raised an exception, died or hung.

    ``rank`` is the rank that failed first, or None after a hang. ``failures`` is {rank: text}, with each failed rank's
    traceback, the signal that killed the rank, or the line in which it hung.
    """

    def __init__(self, message, rank=None, failures=None):
        super().__init__(message)
        self.rank, self.failures = rank, failures or {}
        if rank in self.failures:
            self.add_note(self.failures[rank])  # Python prints notes under the message

    def _render_traceback_(self):
        """What IPython shows: the rank's traceback in place of the launcher's."""
        return [*self.failures.get(self.rank, "").splitlines(), f"{type(self).__name__}: {self}"]


def warm():
    """Start the forkserver unless it runs. It imports torch in the background, after this function has returned."""
    os.environ["WORLD_SIZE_ONE_FOLDER"] = util.get_temp_dir()
    context.set_forkserver_preload(["helpers.ranks.preload"])
    with without_main():
        running = forkserver._forkserver._forkserver_pid
        forkserver.ensure_running()
    started, patience = forkserver._forkserver._forkserver_pid, time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        # Restarting a kernel kills its process group. The forkserver has to leave it first: it tidies up afterwards.
        while started != running and os.getpgid(started) == os.getpgrp() and time.monotonic() < patience:
            time.sleep(0.002)


def launch(fn, *args, nproc=4, timeout=60, env=None):
    """Call ``fn(*args)`` on ``nproc`` fresh ranks and return their results, ``[rank 0's, rank 1's, …]``.

    In each rank the default process group runs (gloo, loopback only), and RANK, LOCAL_RANK, WORLD_SIZE and
    LOCAL_WORLD_SIZE are set as torchrun sets them. cloudpickle carries ``fn``, its arguments and its results.
    What the ranks print appears here when they end, in rank order; a line that several ranks print is shown once.
    ``timeout`` is in seconds and begins when all ranks have met, so that a busy machine's slow start does not
    count. After it, ranks have LATE_WITHIN more seconds to tell in which line they are. ``env`` is {name: text},
    added to the ranks' environment variables.

    Raises RankError when a rank raises, dies, or still runs at ``timeout``, and LaunchError for an argument that
    cannot work.
    """
    check(fn, nproc, timeout, env)
    payload = pack(fn, args)
    warm()
    folder = Path(util.get_temp_dir(), f"launch{next(launches)}")
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "WORLD_SIZE_ONE_STORE": str(folder / "store"),
        **(env or {}),
    }
    ranks, stands, reports = [], {}, []
    oom_kills = count_oom_kills()
    try:
        folder.mkdir()
        (folder / "call").write_bytes(payload)
        for rank in range(nproc):
            with uninterrupted(), without_main():
                here, there = context.Pipe(duplex=False)
                task = (there, folder, rank, nproc, timeout, environment)
                process = context.Process(target=rank_main, args=task, name=f"rank {rank}")
                ranks.append((process, here))
                with there:
                    process.start()
        returned, failures = collect(folder, ranks, timeout)
        if len(returned) == nproc:
            reports = [(folder / f"report{rank}").read_bytes() for rank in range(nproc)]
        elif not failures:
            stands = where_they_stand(folder, len(ranks))
    finally:
        with uninterrupted():
            end(ranks)
            outputs = [tidy(read(folder / f"output{rank}")) for rank in range(len(ranks))]
            shutil.rmtree(folder, ignore_errors=True)
        for line in fold(outputs):
            print(line)
    if failures:
        raise first_failure(failures, count_oom_kills() > oom_kills)
    if stands:
        raise hang(stands, returned, timeout)
    return [pickle.loads(report) for report in reports]


def check(fn, nproc, timeout, env):
    """Raise LaunchError for arguments that cannot work, before anything is started."""
    if not callable(fn):
        raise LaunchError(f"launch needs a function, and got {fn!r}.\nPass it uncalled: launch(fn, argument, nproc=4).")
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise LaunchError(f"nproc is the number of ranks, an int; it was {nproc!r}.\nTry nproc=4.")
    if not 1 <= nproc <= MAX_RANKS:
        raise LaunchError(
            f"nproc={nproc} is not between 1 and {MAX_RANKS}.\nMore ranks need more machines: see torchrun."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_SECONDS:
        raise LaunchError(f"timeout is a number of seconds above 0; it was {timeout!r}.\nTry timeout=60.")
    if not isinstance(env or {}, dict) or not all(
        isinstance(text, str) for pair in (env or {}).items() for text in pair
    ):
        raise LaunchError("env maps names to strings.\nTry env={'TORCH_DISTRIBUTED_DEBUG': 'DETAIL'}.")
    if "WORLD_SIZE_ONE_STORE" in os.environ:
        raise LaunchError("launch was called inside a rank.\nStart ranks from the notebook, and call dist.* in them.")


def pack(fn, args):
    """The function, its arguments and the sources of the notebook's cells as bytes. Raises LaunchError."""
    sources = {name: entry for name, entry in linecache.cache.items() if "ipykernel_" in name or name.startswith("<")}
    try:
        return dumps((fn, args, sources))
    except Exception as error:
        parts = {f"the function {getattr(fn, '__name__', fn)}": fn}
        parts |= {f"argument {index}, a {type(arg).__name__},": arg for index, arg in enumerate(args)}
        raise cannot_be_sent(parts) or error from None


def cannot_be_sent(parts):
    """The LaunchError for the first of ``{label: object}`` that cloudpickle refuses, or None."""
    for name, part in parts.items():
        try:
            dumps(part)
        except Exception as reason:
            return LaunchError(
                f"{name} cannot be sent to the ranks ({reason}).\n"
                "Build process groups, DDP models, locks and open files in the ranks."
            )
    return None


def collect(folder, ranks, timeout):
    """Wait until every rank has reported, one has failed, or the timeout: (ranks that returned, {rank: Failure})."""
    met, returned, failures, deadline = set(), set(), {}, time.monotonic() + MEET_WITHIN + timeout
    closed = set()  # ranks without a pipe: dead, which the forkserver has yet to tell
    while waiting := {rank: pair for rank, pair in enumerate(ranks) if rank not in returned | failures.keys()}:
        patience = deadline - time.monotonic()
        last = patience <= 0
        if failures:
            waited = time.monotonic() - min(failure.when for failure in failures.values())
            killed = any(failure.killed for failure in failures.values())  # no peer is killed for the same reason
            within, late_within = (0, PEERS_WITHIN) if killed else (PEERS_WITHIN, LATE_WITHIN)
            # Ranks that have reported count as well: a thread of theirs may still send what a peer waits for.
            if waited > within and (
                waited > late_within or not (closed & waiting.keys() or any(busy(process.pid) for process, _ in ranks))
            ):
                last = True
            patience = min(patience, max(within - waited, 0.02))
        handles = [process.sentinel for process, _ in waiting.values()]
        handles += [here for rank, (_, here) in waiting.items() if rank not in closed]
        # The last look comes after the question whether a rank is busy: one may have reported just before the answer.
        ready = connection.wait(handles, 0 if last else min(patience, NOTICE_WITHIN))
        for rank, (process, here) in waiting.items():
            told = os.read(here.fileno(), 2) if here in ready else b""
            if here in ready and not told:
                closed.add(rank)
            if MET in told:
                met.add(rank)
                if len(met) == len(ranks):
                    deadline = time.monotonic() + timeout
            if RETURNED in told:
                returned.add(rank)
            elif RAISED in told:
                failures[rank] = pickle.loads((folder / f"report{rank}").read_bytes())
            elif process.sentinel in ready and not told:
                failures[rank] = death(process)
        if last:
            break
    return returned, failures


def busy(pid):
    """Whether a thread of a process runs, or waits for a processor or a disk. False on systems without /proc."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has ended since glob listed it
        return True
    return any(stat.rpartition(")")[2].split()[0] in "RD" for stat in stats)


def death(process):
    """The Failure of a rank whose process is gone."""
    process.join()
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"
    return Failure(when=time.monotonic(), what=how, killed=code < 0)


def end(ranks):
    """Kill all ranks and the processes that they started; return when the ranks are gone."""
    started = [process for process, _ in ranks if process.pid is not None]
    for process in started:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no group of its own yet, or gone
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in started:
        process.join()
        process.close()
    for _, here in ranks:
        here.close()


def where_they_stand(folder, nproc):
    """{rank: the innermost line of the reader's code} at the timeout. Waits for the ranks to dump their stacks."""
    patience = time.monotonic() + LATE_WITHIN
    while True:
        late = time.monotonic() > patience
        stacks = [main_thread(read(folder / f"stack{rank}")) for rank in range(nproc)]
        if late or all(stack.endswith((" in <module>\n", "\n  ...\n")) for stack in stacks):  # or over 100 frames
            return {rank: innermost(stack) for rank, stack in enumerate(stacks)}
        time.sleep(0.05)


def main_thread(dump):
    """The main thread's part of a faulthandler dump, or "". The dump's first line is the main thread's id."""
    main, _, dump = dump.partition("\n")
    return next((block for block in re.split(r"(?<=\n)\n", dump) if f"Thread {main} " in block), "")


def innermost(stack):
    """The innermost line of the reader's code in one thread's part of a dump, which faulthandler writes in ASCII."""
    stack = re.sub(r"\\(?:x(..)|u(.{4})|U(.{8}))", lambda found: chr(int(found[found.lastindex], 16)), stack)
    for file, line, function in re.findall(r'File "(.*)", line (\d+) in (.*)', stack):
        if not is_library(file):
            source = linecache.getline(file, int(line)).strip()
            return place(traceback.FrameSummary(file, int(line), function, line=source))
    return "no line of its own code"


def first_failure(failures, out_of_memory):
    """The RankError for the first failure. A lost connection comes after its cause, and equal failures count as one.

    ``out_of_memory`` says whether the system has counted an out-of-memory kill during the call.
    """

    def story(rank):  # without the rank's own number, which torch puts into its messages
        return re.sub(rf"\brank {rank}\b", "rank", failures[rank].what), failures[rank].where

    first = min(failures, key=lambda rank: (failures[rank].echo, failures[rank].when))
    alike = [rank for rank in sorted(failures) if story(rank) == story(first)]
    cause = failures[alike[0]]
    what = cause.what.split("\n")[0]  # the traceback has the rest
    if what == "killed by SIGKILL":
        by_system = "the system's out-of-memory killer: use less memory"
        what += f" ({by_system if out_of_memory else 'the system reports no out-of-memory kill'})"
    how = ("failed" if cause.traceback else "died") + (" first" if len(alike) == 1 else "")
    message = f"{label(alike)} {how}: {what}" + (f"\n  at {cause.where}" if cause.where else "")
    return RankError(message, alike[0], {rank: failure.traceback or failure.what for rank, failure in failures.items()})


def hang(stands, finished, timeout):
    """The RankError that says in which line each rank was when the time was over. ``finished`` are ranks."""
    lines = {rank: "finished" if rank in finished else f"at {line}" for rank, line in sorted(stands.items())}
    groups = {}
    for rank, line in lines.items():
        groups.setdefault(line, []).append(rank)
    message = f"{len(lines) - len(finished)} of {len(lines)} ranks still ran after timeout={timeout} s:"
    message += "".join(f"\n  {label(ranks)}: {line}" for line, ranks in groups.items())
    return RankError(message, None, {rank: line for rank, line in lines.items() if rank not in finished})


def fold(outputs):
    """Yields the ranks' outputs, a list of texts, as labelled lines.

    Every rank's lines keep their order. A line that several ranks print at the same point comes once, with the ranks
    that printed it.
    """
    texts = [output.removesuffix("\n").split("\n") if output else [] for output in outputs]
    ahead = [Counter(lines) for lines in texts]
    at = [0] * len(texts)
    while unread := [rank for rank, lines in enumerate(texts) if at[rank] < len(lines)]:
        heads = {rank: texts[rank][at[rank]] for rank in unread}
        # A line waits while another rank has yet to print the same line after other lines.
        ready = (r for r in unread if all(heads[o] == heads[r] or not ahead[o][heads[r]] for o in unread))
        line = heads[next(ready, unread[0])]
        same = [rank for rank in unread if heads[rank] == line]
        for rank in same:
            ahead[rank][line] -= 1
            at[rank] += 1
        yield f"[{label(same)}] {line}".rstrip()


def label(ranks):
    """``rank 2``, ``ranks 0-3`` or ``ranks 0, 2`` for a list of ranks in order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def read(path):
    """A file's text, or "" where a rank ended before it wrote the file."""
    return path.read_text(errors="replace") if path.exists() else ""


def tidy(text):
    """A rank's output without what changes from run to run: the kernel's process id, the times of C++ messages."""
    text = re.sub(r"""(?<![^\s"'(])[^\s"'(]*ipykernel_\d+/\d+\.py""", NOTEBOOK, text)
    # [rank0]:[W1120 23:56:46.832225602 reducer.cpp:1529] … becomes [W reducer.cpp:1529] …
    return re.sub(r"^(?:\[rank\d+\]:)?\[([IWEF])\d{4} [\d:.]+ ", r"[\1 ", text, flags=re.MULTILINE)


def count_oom_kills():
    """How many processes Linux has killed since its start because memory ran out; 0 on other systems."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(found[1])
    return 0


@contextlib.contextmanager
def without_main():
    """Hide the caller's main module: multiprocessing would import it in the ranks. cloudpickle sends what they need."""
    with starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def uninterrupted():
    """Delay a Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, pending = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda *_: pending.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        raise KeyboardInterrupt
