"""What each rank of ``launch`` does: set up, call the function, report, and wait until the launcher ends it."""

import faulthandler
import linecache
import multiprocessing
import os
import pickle
import signal
import site
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, parent_process

from helpers.ranks.serialization import dumps

NOTEBOOK = "notebook cell"
MET, RETURNED, RAISED = b"m", b"+", b"-"  # single bytes in the pipe: a rank that dies cannot leave half a message
MEET_WITHIN = 60  # seconds that the ranks have to start and meet; they do not count for the call's timeout


@dataclass
class Failure:
    """How one rank failed, as the rank itself or the launcher saw it."""

    when: float  # time.monotonic(), which is one clock for all processes of a machine
    what: str  # "ValueError: too few samples", "killed by SIGKILL"
    where: str = ""  # "line 3 of step: loss = f(x)"
    traceback: str = ""
    echo: bool = False  # the error is a lost connection, so the cause is a peer's end
    killed: bool = False  # a signal ended the process, so no peer's failure is the cause


def rank_main(conn, folder, rank, world_size, timeout, environment):
    """The whole life of a rank, in a process that the forkserver has forked. It does not return: the launcher ends it.

    The rank writes its result or its Failure to a file of the call's folder, and then says through the pipe which.
    """
    os.setsid()  # Ctrl-C reaches the launcher alone, and one signal to this group ends all that the rank starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method(None, force=True)  # this rank forks a DataLoader's workers, as under torchrun
    threading.Thread(target=end_with_parent, daemon=True).start()
    (folder / f"pid{rank}").write_text(str(os.getpid()))  # the forkserver reads it if a rank that holds the GIL is left
    os.close(forkserver._forkserver._forkserver_alive_fd)  # open, it would hide the launcher's end
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)  # C++ writes to the descriptors, so replacing sys.stdout is not enough
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    stacks = open(folder / f"stack{rank}", "w", buffering=1)
    print(f"{threading.main_thread().ident:#018x}", file=stacks)

    def met():
        # A signal would need a handler, and handlers belong to the reader. faulthandler also works without the GIL.
        faulthandler.dump_traceback_later(timeout, file=stacks)
        os.write(conn.fileno(), MET)

    faulthandler.dump_traceback_later(MEET_WITHIN + timeout, file=stacks)
    report = folder / f"report{rank}"
    try:
        report.write_bytes(run(folder, rank, world_size, timeout, environment, met))
        kind = RETURNED
    except BaseException as error:  # such as SystemExit and dcp.CheckpointException
        report.write_bytes(pickle.dumps(describe(error)))
        kind = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(conn.fileno(), kind)
    threading.Event().wait()  # peers may still need this rank's connections; the launcher ends the process later


def run(folder, rank, world_size, timeout, environment, met):
    """Start the process group, call ``met``, then call the function that the folder holds; return its pickled result.

    ``timeout`` is in seconds. Raises what the function raises, and TypeError for a result that cannot be sent back.
    """
    os.environ.clear()  # the forkserver has the variables of its own start, which may be old
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = max(1, min(cores // world_size, int(asked) if asked.isdigit() else cores))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that the function imports
    dist.set_debug_level_from_env()  # torch read the variable in the forkserver, before it had its value
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # a forked rank has the forkserver's state, so all ranks would draw the same numbers
    dist.init_process_group(
        "gloo",
        init_method=f"file://{environment['WORLD_SIZE_ONE_STORE']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout + MEET_WITHIN),  # so that the launcher's timeout comes first
    )
    dist.barrier()  # from here on a rank that dies cannot disturb its peers' rendezvous
    met()
    fn, args, sources = pickle.loads((folder / "call").read_bytes())
    linecache.cache.update(sources)  # so that a traceback shows the notebook's lines
    result = fn(*args)
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, cannot be sent back ({error}).\n"
            "Return tensors, arrays or plain objects."
        ) from None


def end_with_parent():
    """End this rank and all that it started as soon as the process that called ``launch`` is gone."""
    connection.wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def describe(error):
    """The Failure that describes an exception."""
    story, here = traceback.TracebackException.from_exception(error), os.path.dirname(__file__)
    chain, stories = [], [story]
    while stories:
        one = stories.pop()
        if one is not None:
            chain.append(one)
            stories += [one.__cause__, one.__context__]
    for one in chain:
        while len(one.stack) > 1 and os.path.dirname(one.stack[0].filename) == here:
            one.stack.pop(0)  # a reader does not look for the launcher's frames
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
    outside = [frame for frame in story.stack if os.path.dirname(frame.filename) != here]
    own = [frame for frame in outside if not is_library(frame.filename)] or outside
    text = "".join(story.format())
    for frame in {frame.filename for one in chain for frame in one.stack}:
        text = text.replace(f'File "{frame}"', f'File "{short(frame)}"')
    return Failure(
        when=time.monotonic(),
        what="".join(story.format_exception_only()).strip(),
        where=place(own[-1]) if own else "",
        traceback=text,
        echo=any(word in str(one) for one in chain for word in lost),
    )


def place(frame):
    """``line 3 of step: loss = f(x)`` for a frame of a traceback; the file's name is added if it is not a cell."""
    scope = "" if frame.name == "<module>" else f" of {frame.name}"
    file = "" if short(frame.filename) == NOTEBOOK else f" in {short(frame.filename)}"
    return f"line {frame.lineno}{scope}{file}: {frame.line}"


def short(filename):
    """A file's name without a machine's folders and a kernel's process id, so that a page can show it."""
    if filename.startswith("<") or "ipykernel_" in filename:
        return NOTEBOOK
    for folder in library_folders():
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else os.path.basename(filename)


def is_library(filename):
    """Whether a file belongs to an installed package, to Python or to this package, and not to the reader."""
    folders = [*library_folders(), os.path.dirname(os.path.dirname(__file__))]
    return filename.startswith("<frozen") or any(filename.startswith(folder + os.sep) for folder in folders)


def library_folders():
    """The folders of installed packages and of the standard library, the longest path first."""
    found = {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
    return sorted(found, key=len, reverse=True)
