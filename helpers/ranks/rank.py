"""What each rank of ``launch`` does: set up, call the function, report, and wait until the launcher ends it."""

import faulthandler
import functools
import inspect
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from typing import Any

NOTEBOOK = "notebook cell"
MET, RETURNED, RAISED = b"m", b"+", b"-"  # single bytes in the pipe: a rank that dies cannot leave half a message
LIBRARIES = sorted(  # folders of installed packages and of the standard library, the longest path first
    {*site.getsitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}, key=len, reverse=True
)
MEET_WITHIN = 60  # seconds that the ranks have to start and meet; they do not count for the call's timeout
TORCHRUNS = {  # what torchrun sets, if no agent serves the ranks' store; each rank adds its numbers
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
}


@dataclass(frozen=True)
class Call:
    """What all ranks of one ``launch`` share."""

    folder: Path  # has the pickled function in "call", and takes the ranks' reports, outputs and stacks
    world_size: int
    timeout: float  # seconds
    environment: dict[str, str]
    backend: str = "gloo"  # or "nccl": then each rank has a GPU


@dataclass(frozen=True)
class Failure:
    """How one rank failed, as the rank itself or the launcher saw it."""

    when: float  # time.monotonic(), which is one clock for all processes of a machine
    what: str  # "ValueError: too few samples", "killed by SIGKILL"
    where: str = ""  # "line 3 of step: loss = f(x)"
    traceback: str = ""
    echo: bool = False  # the error is a lost connection, so the cause is a peer's end
    killed: bool = False  # a signal ended the process, so no peer's failure is the cause


def rank_main(pipe: connection.Connection, rank: int, call: Call) -> None:
    """The whole life of a rank: it writes its result or its Failure to a file, and says through the pipe which."""
    folder = call.folder
    os.setsid()  # Ctrl-C reaches the launcher alone, and one signal to this group ends all that the rank starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_method = None  # the default, as under torchrun: on Linux this rank forks a DataLoader's workers
    if sys.version_info >= (3, 14) and sys.platform == "linux":
        # Here the default is forkserver, whose workers cannot import the classes of a notebook's cell.
        start_method = "fork"
    multiprocessing.set_start_method(start_method, force=True)
    threading.Thread(target=end_with_parent, daemon=True).start()
    (folder / f"pid{rank}").write_text(str(os.getpid()))  # the forkserver reads it if a rank that holds the GIL is left
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)  # open, it would hide the launcher's end
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)  # C++ writes to the descriptors, so replacing sys.stdout is not enough
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    stacks = open(folder / f"stack{rank}", "w")

    def met() -> None:
        # A signal would need a handler, and handlers belong to the reader. faulthandler also works without the GIL.
        faulthandler.dump_traceback_later(call.timeout, file=stacks)
        os.write(pipe.fileno(), MET)

    faulthandler.dump_traceback_later(MEET_WITHIN + call.timeout, file=stacks)
    report = folder / f"report{rank}"
    try:
        report.write_bytes(run(rank, call, met))
        kind = RETURNED
    except BaseException as error:  # such as SystemExit and dcp.CheckpointException
        report.write_bytes(pickle.dumps(describe(error)))
        kind = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(pipe.fileno(), kind)
    threading.Event().wait()  # peers may still need this rank's connections; the launcher ends the process later


def numbers(rank: int, local_size: int, nodes: int = 1) -> dict[str, str]:
    """The variables that torchrun sets to the numbers of a rank, on nodes of ``local_size`` ranks."""
    node, local = divmod(rank, local_size)
    values = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes}
    values |= dict.fromkeys(("RANK", "ROLE_RANK"), rank)
    values |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), local_size * nodes)
    return {name: str(value) for name, value in values.items()}


def usable_cores() -> int:
    """How many of the machine's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(rank: int, call: Call, met: Callable[[], None]) -> bytes:
    """Start the process group, call ``met``, then the function that the folder holds; return its pickled result."""
    os.environ.clear()  # the forkserver has the variables of its own start, which may be old
    world_size = call.world_size
    os.environ.update(call.environment, **numbers(rank, world_size))
    import torch
    import torch.distributed as dist

    cores = usable_cores()
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = max(1, min(cores // world_size, int(limit) if limit.isdigit() else cores))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that the function imports
    dist.set_debug_level_from_env()  # torch read the variable in the forkserver, before it had its value
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # a forked rank has the forkserver's state, so all ranks would draw the same numbers
    device = None
    if call.backend == "nccl":
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.environment['WORLD_SIZE_ONE_STORE']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=call.timeout + MEET_WITHIN),  # so that the launcher's timeout comes first
        device_id=device,  # NCCL connects the ranks here, and not at the first collective
    )
    dist.barrier()  # from here on a rank that dies cannot disturb its peers' rendezvous
    met()
    share_group()  # before the function is read, which may hold the two that this replaces
    from helpers.ranks import pickler  # here: whoever imports this file on a cluster does without cloudpickle

    fn, own, args, sources = pickle.loads((call.folder / "call").read_bytes())
    linecache.cache.update(sources)  # so that a traceback shows the notebook's lines
    result = fn(*(int(os.environ[variable]) for variable in own), *args)
    if device is not None:
        wait_for_gpu(device)
    try:
        return pickler.dumps(result)
    except Exception as error:
        what = f"the result, a {type(result).__name__}, cannot be sent back ({error})"
        raise TypeError(f"{what}.\nReturn tensors, arrays or plain objects.") from None


def wait_for_gpu(device: Any) -> None:
    """Wait for what the function has left to its GPU, so that an error or a hang there is one of this call.

    NCCL's collectives and CUDA's kernels run after the call that starts them has returned. ``device``: a torch.device.
    """
    import torch

    torch.cuda.synchronize(device)


def share_group() -> None:
    """Let the function's own ``init_process_group`` share the group that runs: the call only compares."""
    import torch.distributed as dist

    init, destroy = dist.init_process_group, dist.destroy_process_group
    actual = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    state = "running"  # then shared or ended. No name holds launch's group itself: its end has to close its connections

    @functools.wraps(init)
    def init_process_group(*args: Any, **options: Any) -> None:
        nonlocal state
        if state != "running":  # a second start, or one after a real end: as torch has it
            return init(*args, **options)
        asked = inspect.signature(init).bind(*args, **options).arguments
        for name, value in actual.items():
            given = asked.get(name, -1)
            if given not in (None, -1) and str(value) not in re.split("[:,]", str(given)):  # "cpu:gloo,cuda:nccl"
                what = f"init_process_group({name}={given!r}) in a rank of launch, whose group has {name}={value!r}"
                otherwise = ", or start the ranks with launch(..., backend='nccl')" if "nccl" in str(given) else ""
                raise ValueError(f"{what}: leave {name} out{otherwise}.")
        state = "shared"

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        nonlocal state
        if group is not None and group is not dist.group.WORLD:
            destroy(group)
        elif state == "shared":
            state = "running"
        else:
            state = "ended"
            destroy(group)

    for function in (init_process_group, destroy_process_group):
        for module in (dist, dist.distributed_c10d):  # a notebook's `from` import is read from the second
            setattr(module, function.__name__, function)


def end_with_parent() -> None:
    """End this rank and all that it started as soon as the process that called ``launch`` is gone."""
    if parent := parent_process():
        connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def describe(error: BaseException) -> Failure:
    """The Failure that describes an exception."""
    story, here = traceback.TracebackException.from_exception(error), os.path.dirname(__file__)
    chain = [story]  # the exception, what caused it, and what it was raised beside
    for link in chain:  # which grows meanwhile
        chain += filter(None, (link.__cause__, link.__context__))
        while len(link.stack) > 1 and os.path.dirname(link.stack[0].filename) == here:
            link.stack.pop(0)  # a reader does not look for the launcher's frames
    lost = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Socket closed",
        "remote process exit",
    )
    outside = [frame for frame in story.stack if os.path.dirname(frame.filename) != here]
    own = [frame for frame in outside if not is_library(frame.filename)] or outside
    text = "".join(story.format())
    for file in {frame.filename for link in chain for frame in link.stack}:
        text = text.replace(f'File "{file}"', f'File "{short(file)}"')
    return Failure(
        when=time.monotonic(),
        what="".join(story.format_exception_only()).strip(),
        where=place(own[-1]) if own else "",
        traceback=text,
        echo=any(words in str(link) for link in chain for words in lost),
    )


def place(frame: traceback.FrameSummary) -> str:
    """``line 3 of step: loss = f(x)`` for a frame of a traceback; the file's name is added if it is not a cell."""
    scope = "" if frame.name == "<module>" else f" of {frame.name}"
    file = "" if short(frame.filename) == NOTEBOOK else f" in {short(frame.filename)}"
    return f"line {frame.lineno}{scope}{file}: {frame.line}"


def short(filename: str) -> str:
    """A file's name without a machine's folders and a kernel's process id, so that a page can show it."""
    if filename.startswith("<") or "ipykernel_" in filename:
        return NOTEBOOK
    for folder in (*LIBRARIES, os.getcwd()):
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return os.path.basename(filename)


def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to this package, and not to the reader."""
    package = os.path.dirname(os.path.dirname(__file__))
    return filename.startswith(("<frozen", *(folder + os.sep for folder in (*LIBRARIES, package))))
