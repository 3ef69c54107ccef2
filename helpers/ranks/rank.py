"""The life of one rank that ``launch`` started: set up, call the function, report, wait for the end."""

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
MET, RETURNED, RAISED = b"m", b"+", b"-"  # what a rank tells through its pipe: bytes, which no end can cut in two
MEET_WITHIN = 60  # seconds that the ranks have to start and meet, beside the call's own timeout


@dataclass
class Failure:
    """How one rank failed, as its owner or the launcher saw it."""

    when: float  # time.monotonic(), one clock for all processes of a machine
    what: str  # "ValueError: too few samples", "killed by SIGKILL"
    where: str = ""  # "line 3 of step: loss = f(x)"
    traceback: str = ""
    echo: bool = False  # a lost connection, which a peer's end explains
    killed: bool = False  # by a signal, which no peer's failure explains


def rank_main(conn, folder, rank, world_size, timeout, environment):
    """Run in a process of its own, forked by the forkserver; never returns before the launcher ends it.

    Its result or its Failure goes to a file of the call's folder. Only then the pipe says which of both it is.
    """
    os.setsid()  # the kernel's Ctrl-C is for the launcher, and what this rank starts can be ended with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.set_start_method(None, force=True)  # a DataLoader's workers are this rank's, as under torchrun
    threading.Thread(target=end_with_parent, daemon=True).start()
    (folder / f"pid{rank}").write_text(str(os.getpid()))  # for the forkserver: that thread needs the GIL
    os.close(forkserver._forkserver._forkserver_alive_fd)  # or it would not see the launcher's end before this rank's
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)  # descriptors, not sys.stdout alone: C++ writes to them too
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    stacks = open(folder / f"stack{rank}", "w", buffering=1)
    print(f"{threading.main_thread().ident:#018x}", file=stacks)

    def met():
        # No signal: those are the reader's; and it needs no GIL.
        faulthandler.dump_traceback_later(timeout, file=stacks)
        os.write(conn.fileno(), MET)

    faulthandler.dump_traceback_later(MEET_WITHIN + timeout, file=stacks)
    report = folder / f"report{rank}"
    try:
        report.write_bytes(run(folder, rank, world_size, timeout, environment, met))
        kind = RETURNED
    except BaseException as error:  # SystemExit too, and dcp.CheckpointException is a BaseException
        report.write_bytes(pickle.dumps(describe(error)))
        kind = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(conn.fileno(), kind)
    threading.Event().wait()  # the launcher ends this process: peers may still need its connections


def run(folder, rank, world_size, timeout, environment, met):
    """Start the process group, call ``met`` and the function in the call's folder, and return its pickled result."""
    os.environ.clear()  # the forkserver's are those of its start
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    import torch
    import torch.distributed as dist

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = max(1, min(cores // world_size, int(asked) if asked.isdigit() else cores))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for what the function imports
    dist.set_debug_level_from_env()  # torch read it when the forkserver imported it
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # or every rank of every call would draw the forkserver's numbers
    dist.init_process_group(
        "gloo",
        init_method=f"file://{environment['WORLD_SIZE_ONE_STORE']}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout + MEET_WITHIN),  # the launcher's own timeout comes first
    )
    dist.barrier()  # a rank that dies now cannot disturb its peers' rendezvous
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
    """End this rank and what it started as soon as the process that called ``launch`` is gone."""
    connection.wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def describe(error):
    """The Failure that tells an exception's story."""
    story, here = traceback.TracebackException.from_exception(error), os.path.dirname(__file__)
    chain, stories = [], [story]
    while stories:
        one = stories.pop()
        if one is not None:
            chain.append(one)
            stories += [one.__cause__, one.__context__]
    for one in chain:
        while len(one.stack) > 1 and os.path.dirname(one.stack[0].filename) == here:
            one.stack.pop(0)  # the launcher's own frames
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
    """``line 3 of step: loss = f(x)`` for a frame of a traceback, with its file where that is not a cell."""
    scope = "" if frame.name == "<module>" else f" of {frame.name}"
    file = "" if short(frame.filename) == NOTEBOOK else f" in {short(frame.filename)}"
    return f"line {frame.lineno}{scope}{file}: {frame.line}"


def short(filename):
    """A file's name as a page can show it: no machine's folders, no kernel's process id."""
    if filename.startswith("<") or "ipykernel_" in filename:
        return NOTEBOOK
    for folder in library_folders():
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else os.path.basename(filename)


def is_library(filename):
    """Whether a file is torch's, Python's or this package's rather than the reader's."""
    folders = [*library_folders(), os.path.dirname(os.path.dirname(__file__))]
    return filename.startswith("<frozen") or any(filename.startswith(folder + os.sep) for folder in folders)


def library_folders():
    """Where installed packages and the standard library live, the longest path first."""
    found = {*site.getsitepackages(), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
    return sorted(found, key=len, reverse=True)
