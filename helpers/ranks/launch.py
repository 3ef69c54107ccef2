"""Run a function on N real ranks of this machine: ``results = launch(fn, *args, nproc=4)``.

Each call gets fresh ranks, forked by one of Python's forkservers, which has imported torch already. They end with it.
"""

import contextlib
import inspect
import itertools
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.ranks.collecting import Rank, collect, end, read, where_they_stand
from helpers.ranks.messages import LaunchError, RankError, count_oom_kills, first_failure, fold, hang, tidy
from helpers.ranks.pickler import dumps
from helpers.ranks.ports import hold_port
from helpers.ranks.rank import TORCHRUNS, Call, rank_main

__all__ = ["LaunchError", "RankError", "cannot_be_sent", "context", "launch", "warm", "without_main"]

MAX_RANKS = 64
MAX_SECONDS = 1_000_000
OWN = ("rank", "world_size")  # what mp.spawn's functions take first
context = multiprocessing.get_context("forkserver")
launches = itertools.count()
starting = threading.Lock()  # without_main changes sys.modules, so one thread at a time may be in it


def warm() -> None:
    """Start the forkserver unless it runs. It imports torch in the background, after this function has returned."""
    os.environ["WORLD_SIZE_ONE_FOLDER"] = util.get_temp_dir()
    context.set_forkserver_preload(["helpers.ranks.preload"])
    server: Any = forkserver._forkserver  # its process id has no public name
    with without_main():
        before = server._forkserver_pid
        forkserver.ensure_running()
    pid, patience = server._forkserver_pid, time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        # Restarting a kernel kills its process group. The forkserver has to leave it first: it tidies up afterwards.
        while pid != before and os.getpgid(pid) == os.getpgrp() and time.monotonic() < patience:
            time.sleep(0.002)


def launch(
    fn: Callable[..., Any], *args: Any, nproc: int = 4, timeout: float = 60, env: dict[str, str] | None = None
) -> list[Any]:
    """Call ``fn(*args)`` on ``nproc`` fresh ranks and return their results, ``[rank 0's, rank 1's, …]``.

    In each rank the default process group runs (gloo, loopback only), and the variables that torchrun sets are set,
    but for the error file and the signals. Where ``fn`` starts a group itself, ``init_process_group`` only compares
    backend, rank and world size with the group that runs, and ``destroy_process_group`` then leaves this group running.
    If the parameters of ``fn`` begin with ``rank``, or ``rank, world_size``, and ``args`` lack these, each rank adds
    its own, as mp.spawn adds the first. cloudpickle carries ``fn``, its arguments and its results.
    What the ranks print appears here when they end, in rank order; a line that several ranks print is shown once.
    ``timeout`` is in seconds and begins when all ranks have met, so that a busy machine's slow start does not
    count. After it, ranks have LATE_WITHIN more seconds to tell in which line they are. ``env`` is {name: text},
    added to the ranks' environment variables.

    Raises RankError when a rank raises, dies, or still runs at ``timeout``, and LaunchError for an argument that
    cannot work.
    """
    check(fn, nproc, timeout)
    payload = pack(fn, own_arguments(fn, args), args)
    warm()
    folder = Path(util.get_temp_dir(), f"launch{next(launches)}")
    with hold_port() as port:  # for a function that ends this group and starts one at MASTER_ADDR
        environment = {
            **os.environ,
            **TORCHRUNS,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "WORLD_SIZE_ONE_STORE": str(folder / "store"),
            **(env or {}),
        }
        return results(Call(folder, nproc, timeout, environment), payload)


def results(call: Call, payload: bytes) -> list[Any]:
    """The results of a call's ranks, which this starts and ends. Raises RankError, and prints what the ranks print."""
    folder, nproc, ranks = call.folder, call.world_size, list[Rank]()
    oom_kills = count_oom_kills()
    try:
        folder.mkdir()
        (folder / "call").write_bytes(payload)
        for rank in range(nproc):
            start(rank, call, ranks)
        returned, failures = collect(folder, ranks, call.timeout)
        if failures:
            raise first_failure(failures, count_oom_kills() > oom_kills)
        if len(returned) < nproc:
            raise hang(where_they_stand(folder, nproc), returned, call.timeout)
        return [pickle.loads((folder / f"report{rank}").read_bytes()) for rank in range(nproc)]
    finally:
        with uninterrupted():
            end(ranks)
            outputs = [tidy(read(folder / f"output{rank}")) for rank in range(len(ranks))]
            shutil.rmtree(folder, ignore_errors=True)
        for line in fold(outputs):
            print(line)


def check(fn: object, nproc: int, timeout: float) -> None:
    """Raise LaunchError for arguments that cannot work, before anything is started."""
    if not callable(fn):
        raise LaunchError(f"launch needs a function, and got {fn!r}.\nPass it uncalled: launch(fn, argument, nproc=4).")
    if type(nproc) is not int or not 1 <= nproc <= MAX_RANKS:
        what = f"nproc={nproc!r} is not a number of ranks between 1 and {MAX_RANKS}"
        raise LaunchError(f"{what}.\nTry nproc=4; more ranks need more machines: see torchrun.")
    if type(timeout) not in (int, float) or not 0 < timeout <= MAX_SECONDS:
        raise LaunchError(f"timeout is a number of seconds above 0; it was {timeout!r}.\nTry timeout=60.")
    if "WORLD_SIZE_ONE_STORE" in os.environ:
        raise LaunchError("launch was called inside a rank.\nStart ranks from the notebook, and call dist.* in them.")


def own_arguments(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the arguments before ``args`` that each rank adds: (), rank, or rank and world_size.

    Raises LaunchError where ``fn`` takes other arguments than these.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of many functions in C
        return ()
    refusal = None
    for own in ((), OWN[:1], OWN):
        try:
            signature.bind(*own, *args)
            if (*signature.parameters,)[: len(own)] == own:
                return own
        except TypeError as error:
            refusal = refusal or error
    what = f"launch calls {getattr(fn, '__name__', fn)}{signature} with {len(args)} arguments: {refusal}"
    raise LaunchError(
        f"{what}.\nPass them: launch(fn, argument, nproc=4). A rank's own number is dist.get_rank() in fn."
    )


def pack(fn: Callable[..., Any], own: tuple[str, ...], args: tuple[Any, ...]) -> bytes:
    """The function, its arguments and the sources of the notebook's cells as bytes. Raises LaunchError."""
    sources = {name: entry for name, entry in linecache.cache.items() if "ipykernel_" in name or name.startswith("<")}
    try:
        return dumps((fn, own, args, sources))
    except Exception as error:
        parts = {f"the function {getattr(fn, '__name__', fn)}": fn}
        parts |= {f"argument {index}, a {type(arg).__name__},": arg for index, arg in enumerate(args)}
        raise cannot_be_sent(parts) or error from None


def cannot_be_sent(parts: Mapping[str, Any]) -> LaunchError | None:
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


def start(rank: int, call: Call, ranks: list[Rank]) -> None:
    """Start a rank of a call. It is added to ``ranks`` first, so that whatever happens it can be ended."""
    with uninterrupted(), without_main():
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(there, rank, call), name=f"rank {rank}")
        ranks.append(Rank(process, here))
        with there:
            process.start()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's main module: multiprocessing would import it in the ranks. cloudpickle sends what they need."""
    with starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[bool] = []
    handler = signal.signal(signal.SIGINT, lambda *_: pending.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pending:
        raise KeyboardInterrupt
