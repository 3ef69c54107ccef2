"""Run a script as this rank and count what it does on its GPU: ``torchrun observer.py DIR SCRIPT FLAGS``.

Each rank writes DIR/rank<N>.json. The host's waits are what torch warns of (``torch.cuda.set_sync_debug_mode``), and
calls that wait by their name. Collectives are counted where the rehearsal counts them, and by its names.
"""

import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import counts
from helpers.counts import COLLECTIVE, SYNC, WAIT, Counts, frame_outside, script_line
from helpers.rehearsal.devices import replace
from helpers.rehearsal.nccl import COLLECTIVES, GROUP, POINT_TO_POINT, nccl_of
from helpers.rehearsal.tensor import CudaTensor, tensors_in


def line() -> str:
    """The script's line on this thread. On a thread of torch, as in a GPU's backward, the main thread's line."""
    here = script_line()
    return here if here != "?" else script_line(sys._current_frames()[threading.main_thread().ident or 0])


SEEN = Counts(line)


def count_calls(owner: Any, name: str, count: Callable[..., None]) -> None:
    """From now on, ``count`` gets the arguments of each call of a function, before the function."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, **{name: call})


def count_waits() -> None:
    """Count torch's warnings, and calls of ``synchronize``, of which it does not always warn."""
    show: Any = warnings.showwarning

    def see(message: Any, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(SYNC):
            return show(message, *args, **kwargs)
        place = frame_outside(warnings.__file__, __file__, counts.__file__)
        if not place or place.f_code.co_name not in ("synchronize", "barrier"):  # which count by their names
            SEEN.count(WAIT, "torch's warning")

    warnings.showwarning = see
    warnings.filterwarnings("always", message=SYNC)  # by default, a line's first warning alone is shown
    torch.cuda.set_sync_debug_mode("warn")
    for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream):
        count_calls(owner, "synchronize", lambda *args, **kwargs: SEEN.count(WAIT, "synchronize"))


def count_collective(name: str, group: Any, *args: Any, **kwargs: Any) -> None:
    """Count a call of a method of ProcessGroup."""
    on_gpu = any(tensor.is_cuda for tensor in tensors_in((*args, *kwargs.values())))
    if name == "barrier" and nccl_of(group):
        on_gpu = True
        SEEN.count(WAIT, name)
    SEEN.count(COLLECTIVE, f"{name} ({'NCCL' if on_gpu else 'gloo'})")


def count_pass(model: Any, *args: Any, **kwargs: Any) -> None:
    """Count a forward pass of DDP: the backward that follows all-reduces the gradients, in C++."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync and nccl_of(model.process_group):
        SEEN.count(COLLECTIVE, "allreduce by DDP, in backward")


class Functional(TorchDispatchMode):
    """Counts the collectives that DTensor starts, which are operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, CudaTensor)) for kind in types):
            return NotImplemented  # torch makes plain operators of it, which come here, too
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            SEEN.count(COLLECTIVE, f"{name.rstrip('_')} (C++)")
        return func(*args, **(kwargs or {}))


def main(folder: str, script: str, *flags: str) -> None:
    """Run the script as ``__main__``, and write this rank's record, however the script ends."""
    rank = os.environ["RANK"]
    start = time.monotonic()
    leave = os._exit
    process = os.getpid()
    record = Path(folder, f"rank{rank}.json")
    on_gpu = torch.cuda.is_available()

    def write() -> None:
        memory, rows = torch.cuda.max_memory_allocated() if on_gpu else 0, [asdict(row) for row in SEEN.rows()]
        text = json.dumps({"seconds": time.monotonic() - start, "memory": memory, "lines": rows})
        Path(folder, f"part{rank}").write_text(text)
        Path(folder, f"part{rank}").replace(record)  # whole, or not at all

    def write_and_leave(status: int) -> None:
        if os.getpid() == process:  # not a forked child
            write()
        leave(status)

    stack = open(Path(folder, f"stack{rank}"), "w")  # open while the rank runs
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    os._exit = write_and_leave  # type: ignore[assignment]
    sys.argv, sys.path[0] = [script, *flags], os.path.dirname(script)
    try:
        if on_gpu:
            count_waits()
            for name in (*COLLECTIVES, *POINT_TO_POINT, "barrier"):
                if hasattr(GROUP, name):  # PyTorch 2.11 and 2.12 do not have all of them.
                    count_calls(GROUP, name, partial(count_collective, name))
            count_calls(DistributedDataParallel, "forward", count_pass)
            optimizer.register_optimizer_step_post_hook(SEEN.count_step)
            Functional().__enter__()
        runpy.run_path(script, run_name="__main__")
    finally:
        write()


if __name__ == "__main__":
    main(*sys.argv[1:])
