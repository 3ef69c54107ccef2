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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from typing import Any

NOTEBOOK = "notebook cell"

# What a rank says through its pipe. Single bytes, so that a rank that dies cannot leave half a message.
MET = b"m"
RETURNED = b"+"
RAISED = b"-"

# Folders of installed packages and of the standard library, the longest path first. An environment may take packages
# from another one, whose folder is then on sys.path.
PACKAGES = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
LIBRARIES = sorted(
    {*site.getsitepackages(), *PACKAGES, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))},
    key=len,
    reverse=True,
)
PACKAGE = os.path.dirname(os.path.dirname(__file__))
MEET_WITHIN = 60  # seconds that the ranks have to start and meet; they do not count for the call's timeout

# What torchrun sets if no agent serves the ranks' store. ``rank_variables`` gives the numbers of each rank.
TORCHRUN_VARIABLES = {
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
}

# What gloo and NCCL say where a peer has ended.
LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exit",
)


@dataclass(frozen=True)
class Call:
    """What all ranks of one ``launch`` share."""

    folder: Path  # has the pickled function in "call", and takes the ranks' reports, outputs and stacks
    world_size: int
    timeout: float  # seconds
    environment: dict[str, str]
    backend: str = "gloo"  # or "nccl": then each rank has a GPU
    check: bool = False  # look for mistakes that raise no error


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
    write_output_to(folder / f"output{rank}")
    stacks = open(folder / f"stack{rank}", "w")

    def all_have_met() -> None:
        # A signal would need a handler, and handlers belong to the reader. faulthandler also works without the GIL.
        faulthandler.dump_traceback_later(call.timeout, file=stacks)
        os.write(pipe.fileno(), MET)

    faulthandler.dump_traceback_later(MEET_WITHIN + call.timeout, file=stacks)
    report = folder / f"report{rank}"
    try:
        report.write_bytes(run(rank, call, all_have_met))
        outcome = RETURNED
    except BaseException as error:  # such as SystemExit and dcp.CheckpointException
        report.write_bytes(pickle.dumps(describe(error)))
        outcome = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(pipe.fileno(), outcome)
    threading.Event().wait()  # peers may still need this rank's connections; the launcher ends the process later


def write_output_to(path: Path) -> None:
    """From now on, write what this process prints to a file, also what C++ and child processes print."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)


def end_with_parent() -> None:
    """End this rank and all that it started as soon as the process that called ``launch`` is gone."""
    parent = parent_process()
    if parent:
        connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def rank_variables(rank: int, local_size: int, nodes: int = 1) -> dict[str, str]:
    """The variables that torchrun sets to the numbers of a rank, on nodes of ``local_size`` ranks."""
    node, local_rank = divmod(rank, local_size)
    world_size = local_size * nodes
    return {
        "RANK": str(rank),
        "ROLE_RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_WORLD_SIZE": str(nodes),
    }


def usable_cores() -> int:
    """How many of the machine's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(rank: int, call: Call, all_have_met: Callable[[], None]) -> bytes:
    """Start the process group, call ``all_have_met``, then the function in the folder; return its pickled result."""
    os.environ.clear()  # the forkserver has the variables of its own start, which may be old
    os.environ.update(call.environment, **rank_variables(rank, call.world_size))
    import torch
    import torch.distributed as dist

    share_cores(call.world_size)
    dist.set_debug_level_from_env()  # torch read the variable in the forkserver, before it had its value
    draw_own_numbers()
    device = None
    if call.backend == "nccl":
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    dist.init_process_group(
        call.backend,
        init_method=f"file://{call.environment['WORLD_SIZE_ONE_STORE']}",
        rank=rank,
        world_size=call.world_size,
        timeout=timedelta(seconds=call.timeout + MEET_WITHIN),  # so that the launcher's timeout comes first
        device_id=device,  # NCCL connects the ranks here, and not at the first collective
    )
    dist.barrier()  # from here on a rank that dies cannot disturb its peers' rendezvous
    all_have_met()
    share_group()  # before the function is read, which may hold the two functions that this replaces
    from helpers.ranks import pickler  # here: whoever imports this file on a cluster does without cloudpickle

    fn, variables, args, sources = pickle.loads((call.folder / "call").read_bytes())
    linecache.cache.update(sources)  # so that a traceback shows the notebook's lines
    first_args = [int(os.environ[variable]) for variable in variables]
    if call.check:
        from helpers.training_check import check_training  # here, because it imports much of torch

        with check_training():
            result = fn(*first_args, *args)
    else:
        result = fn(*first_args, *args)
    if device is not None:
        wait_for_gpu(device)
    try:
        return pickler.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent back ({error}).\n"
            "Return tensors, arrays or plain objects."
        ) from None


def draw_own_numbers() -> None:
    """Seed this forked rank at random, because with its parent's random state all ranks would draw the same numbers.

    Under torchrun they differ. Python's random module takes care of that itself.
    """
    import torch

    torch.seed()
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()


def share_cores(world_size: int) -> None:
    """Give this rank its share of the cores, or fewer threads if OMP_NUM_THREADS asks for fewer."""
    import torch

    threads = usable_cores() // world_size
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # it may have a number for each nested level
    if limit.isdigit():
        threads = min(threads, int(limit))
    threads = max(1, threads)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that the function imports


def wait_for_gpu(device: Any) -> None:
    """Wait for what the function has left to its GPU, so that an error or a hang there is one of this call.

    NCCL's collectives and CUDA's kernels run after the call that starts them has returned. ``device``: a torch.device.
    """
    import torch

    torch.cuda.synchronize(device)


@dataclass
class GroupUse:
    """What the function of a rank has done with the process group that launch started.

    This record and the functions below hold no reference to the group: gloo closes the group's connections only when
    the last reference to it is gone.
    """

    is_shared: bool = False  # the function called init_process_group, and was given the group of launch
    has_ended: bool = False  # the function destroyed the group of launch, so it makes its own groups from then on


def share_group() -> None:
    """Replace torch's functions that start and end the default group, because launch has started a group already.

    A function that was written for torchrun starts a group itself, for which torch would raise an error here. So its
    first ``init_process_group`` makes no group: it checks that the function asks for a group like the one that runs,
    and raises ValueError if not. The ``destroy_process_group`` that belongs to it leaves the group running. All other
    calls are torch's: a second start raises its error, and an end without a start ends the group of launch.
    """
    import torch.distributed as dist

    torch_init = dist.init_process_group
    torch_destroy = dist.destroy_process_group
    actual = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    use = GroupUse()

    @functools.wraps(torch_init)
    def init_process_group(*args: Any, **options: Any) -> None:
        if use.is_shared or use.has_ended:
            torch_init(*args, **options)
            return
        requested = inspect.signature(torch_init).bind(*args, **options).arguments
        check_group(requested, actual)
        use.is_shared = True

    @functools.wraps(torch_destroy)
    def destroy_process_group(group: Any = None) -> None:
        is_default_group = group is None or group is dist.group.WORLD
        if is_default_group and use.is_shared:
            use.is_shared = False
            return
        if is_default_group:
            use.has_ended = True
        torch_destroy(group)

    # cloudpickle reads what a notebook took by `from torch.distributed import ...` from the module that defines it.
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group


def check_group(requested: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raise ValueError where the arguments of ``init_process_group`` ask for another group than the one that runs."""
    for name, value in actual.items():
        given = requested.get(name)
        if given is None or given == -1:  # the defaults, with which torch asks the environment variables
            continue
        if str(value) in re.split("[:,]", str(given)):  # a backend may be one of several: "cpu:gloo,cuda:nccl"
            continue
        advice = f"leave {name} out"
        if "nccl" in str(given):
            advice += ", or start the ranks with launch(..., backend='nccl')"
        raise ValueError(
            f"init_process_group({name}={given!r}) in a rank of launch, whose group has {name}={value!r}: {advice}."
        )


def describe(error: BaseException) -> Failure:
    """The Failure that describes an exception."""
    story = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in story.stack if not is_launchers(frame)]
    own_frames = [frame for frame in frames if not is_library(frame.filename)]
    where = ""
    if own_frames:
        where = describe_line(own_frames[-1])
    elif frames:
        where = describe_line(frames[-1])
    chain = [story]  # the exception, what caused it, and what it was raised beside
    for link in chain:  # the list grows meanwhile
        chain += [cause for cause in (link.__cause__, link.__context__) if cause]
        while len(link.stack) > 1 and is_launchers(link.stack[0]):
            link.stack.pop(0)  # a reader does not look for the launcher's frames
    text = "".join(story.format())
    for file in {frame.filename for link in chain for frame in link.stack}:
        text = text.replace(f'File "{file}"', f'File "{short_name(file)}"')
    return Failure(
        when=time.monotonic(),
        what="".join(story.format_exception_only()).strip(),
        where=where,
        traceback=text,
        echo=any(words in str(link) for link in chain for words in LOST_CONNECTION),
    )


def is_launchers(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of this folder."""
    return os.path.dirname(frame.filename) == os.path.dirname(__file__)


def describe_line(frame: traceback.FrameSummary) -> str:
    """``line 3 of step: loss = f(x)`` for a frame of a traceback; the file's name is added if it is not a cell."""
    text = f"line {frame.lineno}"
    if frame.name != "<module>":
        text += f" of {frame.name}"
    file = short_name(frame.filename)
    if file != NOTEBOOK:
        text += f" in {file}"
    return f"{text}: {frame.line}"


def short_name(filename: str) -> str:
    """A file's name without a machine's folders and a kernel's process id, so that a page can show it."""
    if filename.startswith("<") or "ipykernel_" in filename:
        return NOTEBOOK
    for folder in (*LIBRARIES, os.getcwd()):
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return os.path.basename(filename)


def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to this package, and not to the reader."""
    folders = tuple(folder + os.sep for folder in (*LIBRARIES, PACKAGE))
    return filename.startswith(("<frozen", *folders))
