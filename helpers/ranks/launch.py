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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, util
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.ranks.collecting import Rank, collect, end, lines_at_timeout, read
from helpers.ranks.gpus import BACKENDS, COUNT_WITHIN, choose_backend, send_count
from helpers.ranks.interrupts import show_in_one_line, uninterrupted
from helpers.ranks.live import LiveLine
from helpers.ranks.messages import LaunchError, RankError, count_oom_kills, first_failure, fold, hang, tidy
from helpers.ranks.pickler import dumps
from helpers.ranks.ports import LOOPBACK, hold_port
from helpers.ranks.rank import TORCHRUN_VARIABLES, Call, Work, rank_main

__all__ = ["LaunchError", "RankError", "cannot_be_sent", "context", "launch", "warm", "without_main"]

MAX_RANKS = 64
MAX_SECONDS = 1_000_000
# What a tutorial's function takes before its own arguments: {parameter: the variable that has its value in a rank}.
FIRST_PARAMETERS = {"rank": "RANK", "local_rank": "LOCAL_RANK", "gpu": "LOCAL_RANK"}
SECOND_PARAMETERS = {"world_size": "WORLD_SIZE", "size": "WORLD_SIZE", "ngpus_per_node": "LOCAL_WORLD_SIZE"}
context = multiprocessing.get_context("forkserver")
launches = itertools.count()
starting = threading.Lock()  # without_main changes sys.modules, so one thread at a time may be in it


def warm() -> None:
    """Start the forkserver, from which all ranks are forked, unless it runs.

    It imports torch in the background, after this function has returned, so that later calls need not wait for that.
    """
    os.environ["WORLD_SIZE_ONE_FOLDER"] = util.get_temp_dir()
    context.set_forkserver_preload(["helpers.ranks.preload"])
    server: Any = forkserver._forkserver  # its process id has no public name
    with without_main():
        old_pid = server._forkserver_pid
        forkserver.ensure_running()
    if server._forkserver_pid != old_pid:
        wait_until_it_leads_a_group(server._forkserver_pid)


def wait_until_it_leads_a_group(pid: int) -> None:
    """Wait until a new forkserver has left this process group, which a restart of the kernel kills.

    The forkserver ends the ranks and removes the files of a kernel that was killed, so it has to outlive the kernel.
    ``pid`` is its process id. If it does not come so far within 10 seconds, its first use will fail and say why.
    """
    latest = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):  # it has ended
        while os.getpgid(pid) == os.getpgrp() and time.monotonic() < latest:
            time.sleep(0.002)


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int = 4,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    check: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nproc`` fresh ranks and return their results, ``[rank 0's, rank 1's, …]``.

    In each rank the default process group runs, and the variables that torchrun sets are set, but for the error file
    and the signals. ``backend`` is "gloo" (on CPUs, loopback only), "nccl" (rank k has GPU k as its current device), or
    "auto": "nccl" if each rank has a GPU, else "gloo". Where ``fn`` starts a group itself, ``init_process_group`` only
    compares backend, rank and world size with the group that runs, and ``destroy_process_group`` then leaves this group
    running.
    If the parameters of ``fn`` begin with ``rank`` (or ``local_rank``, ``gpu``), or with it and ``world_size`` (or
    ``size``, ``ngpus_per_node``), and ``args`` lack these, each rank adds its own, as mp.spawn adds the first.
    cloudpickle carries ``fn``, its arguments and its results. A CUDA tensor arrives on the GPU with the same number: so
    send CPU tensors, and return ``x.cpu()``.
    What the ranks print appears here when they end, in rank order; a line that several ranks print is shown once. A
    terminal and JupyterLab also show the newest lines of a call that takes more than two seconds, while it runs.
    ``timeout`` is in seconds and begins when the process group has started on all ranks, so that a busy machine's slow
    start does not count. After it, ranks have two more seconds to tell in which line they are. ``env`` is {name: text},
    added to the ranks' environment variables.
    ``check=True`` observes the first 20 steps of each optimizer for mistakes that raise no error, as
    ``helpers.training_check`` does, and prints a section *silent mistakes* with what rank 0 prints.

    Raises RankError when a rank raises, dies, or still runs at ``timeout``, and LaunchError for an argument that
    cannot work, or for fewer GPUs than ranks.
    """
    check_arguments(fn, nproc, timeout, backend)
    payload = pack(fn, added_arguments(fn, args), args)
    warm()
    folder = Path(util.get_temp_dir(), f"launch{next(launches)}")
    with hold_port() as port:  # for a function that ends this group and starts one at MASTER_ADDR
        environment = {
            **os.environ,
            **TORCHRUN_VARIABLES,
            "MASTER_PORT": str(port),
            # NCCL_SOCKET_IFNAME stays as it is: NCCL takes the loopback interface by itself where there is no other.
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "WORLD_SIZE_ONE_STORE": str(folder / "store"),
            **(env or {}),
        }
        try:
            if backend != "gloo":
                backend = choose_backend(backend, nproc, count_gpus(environment))
            call = Call(
                folder=folder,
                world_size=nproc,
                timeout=timeout,
                environment=environment,
                backend=backend,
                check=check,
            )
            return results(call, payload)
        except KeyboardInterrupt as interrupt:
            show_in_one_line(interrupt)
            raise interrupt.with_traceback(None) from None


def results(call: Call, payload: bytes) -> list[Any]:
    """Start the ranks of a call, wait for them, end them, print what they have printed, and return their results.

    ``payload`` is the pickled Work, which each rank reads from a file. Raises RankError if a rank failed or hung.
    """
    folder = call.folder
    ranks: list[Rank] = []
    live_line = LiveLine(folder, call.world_size)

    def show_live_line() -> None:
        if live_line.is_due():
            with uninterrupted():  # an interrupt between the writing and its record would leave a line for ever
                live_line.update()

    try:
        folder.mkdir()
        (folder / "call").write_bytes(payload)
        return run_ranks(call, ranks, show_live_line)
    finally:
        with uninterrupted():
            live_line.erase()
            end(ranks)
            outputs = [tidy(read(folder / f"output{rank}")) for rank in range(len(ranks))]
            shutil.rmtree(folder, ignore_errors=True)
        for line in fold(outputs):
            print(line)


def run_ranks(call: Call, ranks: list[Rank], watch: Callable[[], None]) -> list[Any]:
    """Start the ranks of a call, wait for them, and return their results. Raises RankError if a rank failed or hung.

    The started ranks are added to ``ranks``; the caller ends them. ``watch`` is called several times a second.
    """
    folder = call.folder
    world_size = call.world_size
    oom_kills_before = count_oom_kills()
    for rank in range(world_size):
        start(rank, call, ranks)
    outcome = collect(folder, ranks, call.timeout, watch)
    if outcome.failures:
        raise first_failure(outcome.failures, out_of_memory=count_oom_kills() > oom_kills_before)
    if len(outcome.returned) < world_size:
        raise hang(lines_at_timeout(folder, world_size), outcome.returned, call.timeout)
    return [pickle.loads((folder / f"report{rank}").read_bytes()) for rank in range(world_size)]


def count_gpus(environment: dict[str, str]) -> int:
    """How many GPUs a rank with these environment variables sees. ``send_count`` says why another process counts them.

    Raises LaunchError if that process does not answer, or ends without an answer.
    """
    with uninterrupted(), without_main():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=send_count, args=(sender, environment), name="count of the GPUs")
        with sender:
            process.start()
    try:
        if not receiver.poll(COUNT_WITHIN):
            raise LaunchError(
                f"PyTorch did not say within {COUNT_WITHIN} s how many GPUs there are.\n"
                "Look at nvidia-smi; backend='gloo' does without GPUs."
            )
        count: int = receiver.recv()
        return count
    except EOFError:
        raise LaunchError(
            "The process that counts this machine's GPUs ended without an answer.\n"
            "Try: python -c 'import torch; print(torch.cuda.device_count())'"
        ) from None
    finally:
        with uninterrupted():
            process.kill()
            process.join()
            process.close()
            receiver.close()


def check_arguments(fn: object, nproc: int, timeout: float, backend: str) -> None:
    """Raise LaunchError for arguments that cannot work, before anything is started."""
    if not callable(fn):
        raise LaunchError(f"launch needs a function, and got {fn!r}.\nPass it uncalled: launch(fn, argument, nproc=4).")
    if type(nproc) is not int or not 1 <= nproc <= MAX_RANKS:
        raise LaunchError(
            f"nproc={nproc!r} is not a number of ranks between 1 and {MAX_RANKS}.\n"
            "Try nproc=4; more ranks need more machines: see torchrun."
        )
    if type(timeout) not in (int, float) or not 0 < timeout <= MAX_SECONDS:
        raise LaunchError(f"timeout is a number of seconds above 0; it was {timeout!r}.\nTry timeout=60.")
    if backend not in BACKENDS:
        raise LaunchError(
            f"backend={backend!r} is not a backend of launch.\n"
            "Use 'gloo' (CPUs), 'nccl' (a GPU for each rank) or 'auto' (NCCL if there are as many GPUs as ranks)."
        )
    if "WORLD_SIZE_ONE_STORE" in os.environ:
        raise LaunchError("launch was called inside a rank.\nStart ranks from the notebook, and call dist.* in them.")


def added_arguments(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Which arguments each rank adds before ``args``, so that a tutorial's function need not be rewritten for launch.

    They are named by the environment variables that hold them: [], ["RANK"], or ["RANK", "WORLD_SIZE"]. For example
    ``train(rank, world_size, epochs)`` with ``args=(3,)`` gets both. As few are added as make the call possible, so
    ``args=(0, 4, 3)`` adds none. Raises LaunchError where the call is not possible with any of them.
    """
    try:
        signature = inspect.signature(fn)
    except ValueError:  # many functions that are written in C have no signature
        return []
    addable = addable_arguments(signature)
    refusal = ""
    for count in range(len(addable) + 1):
        added = addable[:count]
        try:
            signature.bind(*added, *args)
        except TypeError as error:
            refusal = str(error)
        else:
            return added
    name = getattr(fn, "__name__", fn)
    to_pass = required(signature)[len(addable) :]
    example = ", ".join(["fn", *to_pass, "nproc=4"])
    raise LaunchError(
        f"launch calls {name}{signature} with {len(args)} arguments: {refusal}.\n"
        f"Pass them: launch({example}). A rank's own number is dist.get_rank() in fn."
    )


def addable_arguments(signature: inspect.Signature) -> list[str]:
    """The environment variables whose values a rank can add, by the names of a function's first two parameters.

    For example ["RANK", "WORLD_SIZE"] for ``train(rank, world_size, epochs)``, and [] for ``train(epochs)``.
    """
    variables = []
    for parameter, variable_of_name in zip(signature.parameters, (FIRST_PARAMETERS, SECOND_PARAMETERS), strict=False):
        if parameter not in variable_of_name:
            break
        variables.append(variable_of_name[parameter])
    return variables


def required(signature: inspect.Signature) -> list[str]:
    """The names of the positional parameters that have no default."""
    positional_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = []
    for name, parameter in signature.parameters.items():
        if parameter.kind in positional_kinds and parameter.default is inspect.Parameter.empty:
            names.append(name)
    return names


def pack(fn: Callable[..., Any], added: list[str], args: tuple[Any, ...]) -> bytes:
    """A call's Work as bytes, which ``rank.run`` reads. Raises LaunchError if something in it cannot be pickled.

    ``added`` are the arguments that each rank adds itself, such as ["RANK"] (see ``added_arguments``).
    """
    sources = {}
    for file, entry in linecache.cache.items():
        is_cell = "ipykernel_" in file or file.startswith("<")
        if is_cell:
            sources[file] = entry
    try:
        return dumps(Work(function=fn, added=added, args=args, sources=sources))
    except Exception as error:
        # Pickled one by one, the function and its arguments show which of them is at fault.
        parts: dict[str, Any] = {f"the function {getattr(fn, '__name__', fn)}": fn}
        for index, arg in enumerate(args):
            parts[f"argument {index}, a {type(arg).__name__},"] = arg
        error_about_part = cannot_be_sent(parts)
        if error_about_part is not None:
            raise error_about_part from None
        raise error from None


def cannot_be_sent(labelled: Mapping[str, Any]) -> LaunchError | None:
    """A LaunchError about the first of these objects that cannot be pickled, or None if all can. It is not raised.

    ``labelled`` is {what the message calls the object: the object}, such as {"argument 0, a Module,": module}.
    """
    for label, value in labelled.items():
        try:
            dumps(value)
        except Exception as reason:
            return LaunchError(
                f"{label} cannot be sent to the ranks ({reason}).\n"
                "Build process groups, DDP models, locks and open files in the ranks."
            )
    return None


def start(rank: int, call: Call, ranks: list[Rank]) -> None:
    """Start a rank of a call, and add it to ``ranks``.

    It is added before it starts, so that the caller can end it even if this fails in between.
    """
    with uninterrupted(), without_main():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(sender, rank, call), name=f"rank {rank}")
        ranks.append(Rank(process=process, pipe=receiver))
        with sender:  # closed here, so that the pipe ends with the rank, which has the other copy
            process.start()


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """A context for starting processes, which hides the caller's main module from them.

    multiprocessing would import that module again in each rank, and so run a script without an
    ``if __name__ == "__main__"`` guard once more. The ranks do without it, because cloudpickle sends what they need.
    """
    with starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
