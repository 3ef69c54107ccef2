"""Run a function on N real ranks of this machine: ``results = launch(fn, *args, nproc=4)``.

Each call gets fresh ranks, forked by one of Python's forkservers, which has imported torch already. They end with it.
"""

import contextlib
import inspect
import itertools
import linecache
import math
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
# The function of a tutorial, written for mp.spawn, may begin with parameters such as ``rank`` and ``world_size``, which
# each rank fills in. {name of a parameter: the environment variable that has its value in a rank}, for the first
# parameter and for the second.
FIRST_PARAMETERS = {"rank": "RANK", "local_rank": "LOCAL_RANK", "gpu": "LOCAL_RANK"}
SECOND_PARAMETERS = {"world_size": "WORLD_SIZE", "size": "WORLD_SIZE", "ngpus_per_node": "LOCAL_WORLD_SIZE"}
context = multiprocessing.get_context("forkserver")
numbers_of_calls = itertools.count()  # Each call of launch has a folder with its number.
main_module_lock = threading.Lock()  # without_main changes sys.modules, so one thread at a time may be in it


def default_timeout() -> float:
    """The timeout, in seconds, of calls that do not pass one.

    It is 60. The environment variable WORLD_SIZE_ONE_TIMEOUT changes it, for example on a busy machine. Raises
    LaunchError if the variable is not a number above 0.
    """
    text = os.environ.get("WORLD_SIZE_ONE_TIMEOUT", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan  # fails the check below, because comparisons with nan are false
    if not 0 < seconds <= MAX_SECONDS:
        raise LaunchError(
            f"WORLD_SIZE_ONE_TIMEOUT is a number of seconds above 0; it was {text!r}.\n"
            "Unset it, or set it to 300 on a busy machine, and start this process again."
        )
    return seconds


DEFAULT_TIMEOUT = default_timeout()


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
    """Wait until a new forkserver, with this process id, has left this process group, but not longer than 10 seconds.

    A restart of a notebook's kernel kills the kernel's whole process group. The forkserver has to outlive the kernel,
    because it then ends the kernel's ranks and removes its files. A forkserver that does not come so far has failed,
    and its first use will say why.
    """
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):  # raised if the forkserver has ended
        while os.getpgid(pid) == os.getpgrp() and time.monotonic() < deadline:
            time.sleep(0.002)


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int = 4,
    timeout: float = DEFAULT_TIMEOUT,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    check: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nproc`` fresh ranks and return their results, ``[rank 0's, rank 1's, …]``.

    In each rank the default process group runs, and the environment variables that torchrun sets are set, except for
    those of its error file and of its signals. The other arguments are

    - ``timeout``: after so many seconds, ranks that still run are ended. They count from the moment when the process
      group has started on all ranks, so that the slow start of a busy machine does not count. After the timeout, ranks
      have two more seconds to tell in which line they are.
    - ``env``: {name: text}, environment variables for the ranks beside those of this process.
    - ``backend``: "gloo" (on CPUs, over the loopback interface only), "nccl" (GPU k is the current device of rank k),
      or "auto" ("nccl" if there is a GPU for each rank, or else "gloo").
    - ``check``: whether to look for mistakes of training that raise no error in the first 20 steps of each optimizer,
      as ``helpers.training_check`` does. Rank 0 then prints a section *silent mistakes*.

    **What ``fn`` gets.** If its parameters begin with ``rank`` (or ``local_rank`` or ``gpu``), or with this and
    ``world_size`` (or ``size`` or ``ngpus_per_node``), and ``args`` lack these, each rank adds its own numbers, as
    mp.spawn adds the first. If ``fn`` starts a process group itself, ``init_process_group`` only compares backend, rank
    and world size with the group that runs, and ``destroy_process_group`` then leaves this group running.

    **What is carried.** cloudpickle carries ``fn``, its arguments and its results. A CUDA tensor arrives on the GPU
    with the same number: so send CPU tensors, and return ``x.cpu()``.

    **What is printed.** What the ranks print appears here when they end, in rank order; a line that several ranks print
    is shown once. A terminal and JupyterLab also show the newest lines of a call that takes more than two seconds,
    while it runs.

    Raises RankError if a rank raises, dies, or still runs at the timeout, and LaunchError for an argument that cannot
    work, or for fewer GPUs than ranks.
    """
    check_arguments(fn, nproc, timeout, backend)
    payload = pack(fn, added_arguments(fn, args), args)
    warm()
    folder = Path(util.get_temp_dir(), f"launch{next(numbers_of_calls)}")
    with hold_port() as port:  # for a function that ends this group and starts one at MASTER_ADDR
        environment = {
            **os.environ,
            **TORCHRUN_VARIABLES,
            "MASTER_PORT": str(port),
            # NCCL_SOCKET_IFNAME stays as it is: NCCL takes the loopback interface by itself where there is no other.
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "WORLD_SIZE_ONE_STORE": str(folder / "store"),
            **(env or {}),  # last, so that they replace others of the same name
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

    Returns the names of the environment variables that hold them: [], ["RANK"], or ["RANK", "WORLD_SIZE"]. As few are
    added as make the call possible. For example, for ``train(rank, world_size, epochs)``

    - ``args=(3,)`` lacks both, so both are added;
    - ``args=(0, 4, 3)`` is complete, so none is added.

    Raises LaunchError if the call is not possible with any of them.
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
    names = list(signature.parameters)
    if len(names) < 1 or names[0] not in FIRST_PARAMETERS:
        return []
    variable_of_first = FIRST_PARAMETERS[names[0]]
    if len(names) < 2 or names[1] not in SECOND_PARAMETERS:
        return [variable_of_first]
    variable_of_second = SECOND_PARAMETERS[names[1]]
    return [variable_of_first, variable_of_second]


def required(signature: inspect.Signature) -> list[str]:
    """The names of the positional parameters that have no default: ["x", "y"] for ``f(x, y, z=1)``."""
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
    sources = {}  # the lines of the notebook's cells, for tracebacks
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
    """A context for starting processes, in which an empty module replaces the caller's main module.

    multiprocessing imports the main module again in each process that it starts. For a script without the guard
    ``if __name__ == "__main__"``, this would run the script once more in each rank. The ranks do not need the module,
    because cloudpickle sends what they use of it.
    """
    with main_module_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
