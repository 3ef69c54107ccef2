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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from multiprocessing import connection, forkserver, parent_process
from pathlib import Path
from typing import Any

from helpers.ranks.older_torch import use_newer_names

NOTEBOOK = "notebook cell"

# What a rank says through its pipe. Each message is a single byte, so that a rank that dies cannot leave half of one.
GROUP_STARTED = b"m"
RETURNED = b"+"
RAISED = b"-"

# Folders of installed packages and of the standard library, the longest path first. sys.path is needed too, because an
# environment may take packages from another one, whose folder is only there.
PACKAGES = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
LIBRARIES = sorted(
    {*site.getsitepackages(), *PACKAGES, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))},
    key=len,
    reverse=True,
)
PACKAGE = os.path.dirname(os.path.dirname(__file__))  # the folder helpers
START_WITHIN = 60  # seconds until the ranks' process group has started; they do not count for the call's timeout

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

# What gloo and NCCL say on a rank whose peer has ended.
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
class Work:
    """What each rank of one ``launch`` has to do. It is pickled, so that it can be carried to the ranks."""

    function: Callable[..., Any]
    added: list[str]  # the environment variables with the arguments that each rank adds before ``args``
    args: tuple[Any, ...]
    sources: dict[str, Any]  # linecache's entries for the notebook's cells, so that a traceback shows their lines


@dataclass(frozen=True)
class Failure:
    """How one rank failed, as the rank itself or the launcher saw it."""

    when: float  # time.monotonic(), which is one clock for all processes of a machine
    what: str  # such as "ValueError: too few samples" or "killed by SIGKILL"
    where: str = ""  # such as "line 3 of step: loss = f(x)"; empty if it is not known
    traceback: str = ""  # empty if the process was killed
    lost_peer: bool = False  # the error is a lost connection, so the cause is a peer's end
    killed: bool = False  # a signal ended the process, so no peer's failure is the cause


def rank_main(pipe: connection.Connection, rank: int, call: Call) -> None:
    """The whole life of a rank, in a process that the forkserver has just forked.

    Through the pipe the rank tells the launcher in two single bytes how far it is: GROUP_STARTED when its process group
    has started, and at the end RETURNED or RAISED. By then the file ``report<rank>`` in the call's folder has the
    function's result, or the Failure that describes its error. After that the rank waits until the launcher ends it.
    """
    folder = call.folder
    leave_launchers_terminal()
    end_if_launcher_ends(pid_file=folder / f"pid{rank}")
    choose_start_method()
    write_output_to(folder / f"output{rank}")

    # At the timeout faulthandler writes to this file where the rank is, for the launcher's error message. A signal
    # would need a handler, which belongs to the user's code. faulthandler needs none, and works without the GIL.
    stacks = open(folder / f"stack{rank}", "w")
    faulthandler.dump_traceback_later(START_WITHIN + call.timeout, file=stacks)

    def tell_that_group_has_started() -> None:
        faulthandler.dump_traceback_later(call.timeout, file=stacks)  # the timeout counts from now on
        os.write(pipe.fileno(), GROUP_STARTED)

    report = folder / f"report{rank}"
    try:
        report.write_bytes(run(rank, call, tell_that_group_has_started))
        outcome = RETURNED
    except BaseException as error:  # such as SystemExit and dcp.CheckpointException
        report.write_bytes(pickle.dumps(describe(error)))
        outcome = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(pipe.fileno(), outcome)
    threading.Event().wait()  # peers may still need this rank's connections; the launcher ends the process later


def leave_launchers_terminal() -> None:
    """Let a Ctrl-C at the terminal reach the launcher alone, which then ends the ranks.

    The rank leads a process group from now on, so that one signal to this group ends all that the rank starts, too.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_if_launcher_ends(pid_file: Path) -> None:
    """Let this rank end when the launcher is gone, also if the rank hangs then.

    Usually a thread of the rank sees to it. But no thread can run while the rank hangs in C code that holds the GIL.
    Then the forkserver kills the rank, whose process number it finds in ``pid_file``.
    """
    threading.Thread(target=end_with_parent, daemon=True).start()
    pid_file.write_text(str(os.getpid()))
    close_pipe_to_forkserver()  # while a rank had it open, the forkserver would not notice that the launcher is gone


def choose_start_method() -> None:
    """Let the rank start processes as a program under torchrun does, such as the workers of a DataLoader.

    The rank comes from a forkserver, whose start method it would have otherwise.
    """
    start_method = None  # the default, which is fork on Linux
    if sys.version_info >= (3, 14) and sys.platform == "linux":
        # Here the default is forkserver, whose workers cannot import the classes of a notebook's cell.
        start_method = "fork"
    multiprocessing.set_start_method(start_method, force=True)


def close_pipe_to_forkserver() -> None:
    """Close this rank's copy of the pipe by which the forkserver notices the launcher's end.

    The forkserver ends when no process has the pipe open any more. A rank inherits an open copy when it is forked.
    """
    server: Any = forkserver._forkserver
    alive_descriptor = server._forkserver_alive_fd  # the number of this end of the pipe, which has no public name
    os.close(alive_descriptor)


def write_output_to(path: Path) -> None:
    """From now on, write what this process prints to a file, also what C++ and child processes print."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)


def end_with_parent() -> None:
    """Wait until the process that called ``launch`` is gone; then kill this rank and all that it has started.

    A thread of the rank does this, so that a notebook's kernel that is killed leaves no ranks behind.
    """
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    own_group = 0  # as killpg understands it
    os.killpg(own_group, signal.SIGKILL)


def rank_variables(rank: int, local_size: int, nodes: int = 1) -> dict[str, str]:
    """The environment variables with which torchrun tells a rank its numbers, on nodes of ``local_size`` ranks each.

    Rank 5 on 2 nodes of 4 ranks has RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, and so on. GROUP_RANK is torchrun's name for
    the number of a node. Roles divide ranks by their tasks; here all ranks have one role, as by default.
    """
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


def run(rank: int, call: Call, tell_that_group_has_started: Callable[[], None]) -> bytes:
    """In a rank: start the process group, call the user's function, and return its pickled result.

    ``tell_that_group_has_started`` is called in between. Raises what the function raises, and TypeError for a result
    that cannot be pickled.
    """
    os.environ.clear()  # the forkserver has the variables of its own start, which may be old
    os.environ.update(call.environment, **rank_variables(rank, call.world_size))
    device = start_group(rank, call)
    tell_that_group_has_started()
    share_group()  # before the function is read, which may hold the two functions that this replaces
    from helpers.ranks import pickler  # here: whoever imports this file on a cluster does without cloudpickle

    work: Work = pickle.loads((call.folder / "call").read_bytes())
    linecache.cache.update(work.sources)
    if call.check:
        from helpers.training_check import check_training  # here, because it imports much of torch

        with check_training():
            result = call_function(work)
    else:
        result = call_function(work)
    if device is not None:
        wait_for_gpu(device)
    try:
        return pickler.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent back ({error}).\n"
            "Return tensors, arrays or plain objects."
        ) from None


def start_group(rank: int, call: Call) -> Any:
    """Start the default process group of the call's ranks, when this rank's environment variables are set.

    Returns the torch.device of this rank's GPU, or None on gloo.
    """
    import torch
    import torch.distributed as dist

    use_newer_names()
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
        timeout=timedelta(seconds=call.timeout + START_WITHIN),  # so that the launcher's timeout comes first
        device_id=device,  # NCCL connects the ranks here, and not at the first collective
    )
    dist.barrier()  # from here on a rank that dies cannot disturb its peers' rendezvous
    return device


def call_function(work: Work) -> Any:
    """Call the user's function, with the arguments that this rank adds before the given ones."""
    added_args = [int(os.environ[variable]) for variable in work.added]
    return work.function(*added_args, *work.args)


def draw_own_numbers() -> None:
    """Seed this rank's random generators randomly, so that it does not draw the same numbers as the other ranks.

    Under torchrun, each rank is a program of its own, so a generator that nobody seeds is different on each rank.
    Ranks that are forked would all have their parent's state. Python's ``random`` is left out, because Python itself
    seeds it anew after a fork.
    """
    import torch

    torch.seed()
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()


def share_cores(world_size: int) -> None:
    """Let this rank compute on its share of the cores, or on fewer threads if OMP_NUM_THREADS asks for fewer."""
    import torch

    threads = usable_cores() // world_size
    limit, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")  # it may be "4,2", for nested parallel regions
    if limit.isdigit():
        threads = min(threads, int(limit))
    threads = max(1, threads)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that the function imports


def wait_for_gpu(device: Any) -> None:
    """Wait until this rank's GPU, a torch.device, has done all that the function has started there.

    NCCL's collectives and CUDA's kernels run after the call that starts them has returned. If one fails or hangs, the
    error has to belong to this ``launch``, and not to a later one.
    """
    import torch

    torch.cuda.synchronize(device)


class GroupState(Enum):
    """What the function of a rank has done with the process group that launch had started before it."""

    NOT_ASKED_FOR = auto()  # nothing yet
    IN_USE = auto()  # it called init_process_group, which gave it the group of launch
    DESTROYED = auto()  # it destroyed the group of launch, so that it may start groups of its own


def share_group() -> None:
    """Let a function that was written for torchrun, and so starts its process group itself, run in a rank of launch.

    launch has started the default group already, and torch would raise an error for a second one. So this replaces
    ``init_process_group`` and ``destroy_process_group`` of torch.distributed. What each does depends on the state of
    the group:

    - NOT_ASKED_FOR: ``init_process_group`` makes no group. It only checks that the function asks for one like that of
      launch (ValueError if not), which is IN_USE then. ``destroy_process_group`` really destroys the group of launch.
    - IN_USE: ``init_process_group`` is torch's, which raises its error for a second start. ``destroy_process_group``
      leaves the group running for launch, and the group is NOT_ASKED_FOR again.
    - DESTROYED: both are torch's.
    """
    import torch.distributed as dist

    torch_init = dist.init_process_group
    torch_destroy = dist.destroy_process_group
    group_of_launch = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    # The two functions hold no reference to the group itself: gloo closes a group's connections only when the last
    # reference to it is gone.
    state = GroupState.NOT_ASKED_FOR

    @functools.wraps(torch_init)
    def init_process_group(*args: Any, **options: Any) -> None:
        nonlocal state
        if state is GroupState.NOT_ASKED_FOR:
            requested = inspect.signature(torch_init).bind(*args, **options).arguments
            check_group(requested, group_of_launch)
            state = GroupState.IN_USE
        else:
            torch_init(*args, **options)

    @functools.wraps(torch_destroy)
    def destroy_process_group(group: Any = None) -> None:
        nonlocal state
        is_default_group = group is None or group is dist.group.WORLD
        if not is_default_group:
            torch_destroy(group)
        elif state is GroupState.IN_USE:
            state = GroupState.NOT_ASKED_FOR
        else:
            state = GroupState.DESTROYED
            torch_destroy(group)

    # Both modules, because a notebook may have taken the functions by `from torch.distributed import ...`: cloudpickle
    # sends such a function by the name of the module that defines it, distributed_c10d.
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group


def check_group(requested: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raise ValueError if a call of ``init_process_group`` asks for another group than the one that runs.

    ``requested`` are the arguments of the call, such as {"backend": "gloo"}. ``actual`` has the backend, the rank and
    the world size of the group that runs.
    """
    for name, actual_value in actual.items():
        given = requested.get(name)
        if given is None or given == -1:  # the defaults, with which torch asks the environment variables
            continue
        alternatives = re.split("[:,]", str(given))  # a backend may be one of several: "cpu:gloo,cuda:nccl"
        if str(actual_value) in alternatives:
            continue
        advice = f"leave {name} out"
        if "nccl" in str(given):
            advice += ", or start the ranks with launch(..., backend='nccl')"
        raise ValueError(
            f"init_process_group({name}={given!r}) in a rank of launch, "
            f"whose group has {name}={actual_value!r}: {advice}."
        )


def describe(error: BaseException) -> Failure:
    """The Failure that describes an exception of the user's function, for the launcher's error message.

    Its traceback is the one that Python would print, without the frames of this folder at its beginning, and with files
    named so that the text is the same on every machine.
    """
    formatter = traceback.TracebackException.from_exception(error)
    line_that_raised = innermost_line(formatter.stack)
    chain = linked_exceptions(formatter)
    files = set()  # whose names the traceback shows
    for exception in chain:
        while len(exception.stack) > 1 and is_launchers(exception.stack[0]):
            del exception.stack[0]
        for frame in exception.stack:
            files.add(frame.filename)
    text = "".join(formatter.format())
    for file in files:
        text = text.replace(f'File "{file}"', f'File "{short_name(file)}"')
    return Failure(
        when=time.monotonic(),
        what="".join(formatter.format_exception_only()).strip(),
        where=line_that_raised,
        traceback=text,
        lost_peer=any(is_lost_connection(str(exception)) for exception in chain),
    )


def innermost_line(stack: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of the user's code in a stack, in words such as ``line 3 of step: loss = f(x)``.

    If the stack has no such line, it is the innermost line of a library, and if it has none either, "".
    """
    innermost_of_user = None
    innermost_of_all = None
    for frame in stack:  # the outermost frame comes first
        if is_launchers(frame):
            continue
        innermost_of_all = frame
        if not is_library(frame.filename):
            innermost_of_user = frame
    if innermost_of_user is not None:
        return describe_line(innermost_of_user)
    if innermost_of_all is not None:
        return describe_line(innermost_of_all)
    return ""


def linked_exceptions(last: traceback.TracebackException) -> list[traceback.TracebackException]:
    """An exception and all that led to it: those that it was raised from, or while handling them, and so on."""
    linked = []
    to_follow = [last]
    while to_follow:
        exception = to_follow.pop()
        linked.append(exception)
        for earlier in (exception.__cause__, exception.__context__):
            if earlier is not None:
                to_follow.append(earlier)
    return linked


def is_lost_connection(message: str) -> bool:
    """Whether an error's message says that a peer closed its connection, as a peer does that has ended."""
    return any(words in message for words in LOST_CONNECTION)


def is_launchers(frame: traceback.FrameSummary) -> bool:
    """Whether a frame of a traceback is in a file of this folder, and so belongs to the launcher, not to the user."""
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
    """A file's name without a machine's folders and a kernel's process id, so that a page can show it.

    It is relative to the folder of the installed packages or to the current one; a cell is a "notebook cell".
    """
    if filename.startswith("<") or "ipykernel_" in filename:
        return NOTEBOOK
    for folder in (*LIBRARIES, os.getcwd()):
        if filename.startswith(folder + os.sep):
            return filename.removeprefix(folder + os.sep)
    return os.path.basename(filename)


def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to ``helpers``, and not to the user."""
    folders = tuple(folder + os.sep for folder in (*LIBRARIES, PACKAGE))
    return filename.startswith(("<frozen", *folders))
