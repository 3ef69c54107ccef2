"""Run a script as this rank and count what it does on its GPU: ``torchrun observer.py DIR SCRIPT FLAGS``.

Each rank writes DIR/rank<N>.json. Counted are the host's waits for the GPU, which torch tells by warnings
(``torch.cuda.set_sync_debug_mode``), and collectives, at the same places and by the same names as in a rehearsal.
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


def current_line() -> str:
    """The script's line on this thread. On a thread of torch, as in a GPU's backward, the main thread's line."""
    line = script_line()
    if line != "?":
        return line
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    return script_line(sys._current_frames()[main_thread])


OBSERVED = Counts(current_line)  # what this rank has done at each line of the script


def count_calls(owner: Any, name: str, count: Callable[..., None]) -> None:
    """Replace a function by one that calls ``count`` with its arguments before it does its work."""
    original = getattr(owner, name)

    def counted_call(*args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, **{name: counted_call})


def count_waits() -> None:
    """Count from now on each time that the host waits until the GPU has done its work.

    torch warns of most of these waits in its mode for it. Of calls of ``synchronize`` it does not always warn, so these
    are counted by their name, and a warning that one of them causes is left out.
    """
    show_warning: Any = warnings.showwarning

    def count_warning(message: Any, *args: Any, **kwargs: Any) -> None:
        is_of_wait = str(message).startswith(SYNC)
        if not is_of_wait:
            show_warning(message, *args, **kwargs)
            return
        caller = frame_outside(warnings.__file__, __file__, counts.__file__)
        # torch's functions of these names, which call what waits, are counted by observe_gpu and below.
        is_counted_by_name = caller is not None and caller.f_code.co_name in ("synchronize", "barrier")
        if not is_counted_by_name:
            OBSERVED.count(WAIT, "torch's warning")

    warnings.showwarning = count_warning
    warnings.filterwarnings("always", message=SYNC)  # By default only the first warning of a line is shown.
    torch.cuda.set_sync_debug_mode("warn")
    for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream):
        count_calls(owner, "synchronize", lambda *args, **kwargs: OBSERVED.count(WAIT, "synchronize"))


def count_collective(name: str, group: Any, *args: Any, **kwargs: Any) -> None:
    """Count a call of a method of ProcessGroup: with tensors on a GPU it is NCCL's, otherwise gloo's."""
    backend = "gloo"
    if any(tensor.is_cuda for tensor in tensors_in((*args, *kwargs.values()))):
        backend = "NCCL"
    if name == "barrier" and nccl_of(group):
        backend = "NCCL"
        OBSERVED.count(WAIT, name)  # NCCL's barrier waits on the host.
    OBSERVED.count(COLLECTIVE, f"{name} ({backend})")


def count_pass(model: Any, *args: Any, **kwargs: Any) -> None:
    """Count a forward pass of DDP for its backward, whose all-reduces of gradients start in C++ and go unseen."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync and nccl_of(model.process_group):
        OBSERVED.count(COLLECTIVE, "allreduce by DDP, in backward")


class CollectivesOfDTensor(TorchDispatchMode):
    """Counts the collectives that DTensor starts as operators, without a call of ProcessGroup from Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, CudaTensor)) for kind in types):
            return NotImplemented  # torch turns it into operators of plain tensors, which come here, too.
        name = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            OBSERVED.count(COLLECTIVE, f"{name.rstrip('_')} (C++)")
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)


class Report:
    """The file of this rank's record, which is written when the rank ends."""

    def __init__(self, folder: Path, rank: str) -> None:
        self.path = folder / f"rank{rank}.json"
        self.part = folder / f"part{rank}"
        self.start = time.monotonic()
        self.process = os.getpid()

    def write(self) -> None:
        """Write the record, whole or not at all. A child that the script has forked writes none."""
        if os.getpid() != self.process:
            return
        peak_memory = 0
        if torch.cuda.is_available():
            peak_memory = torch.cuda.max_memory_allocated()
        record = {
            "seconds": time.monotonic() - self.start,
            "memory": peak_memory,
            "lines": [asdict(row) for row in OBSERVED.rows()],
        }
        self.part.write_text(json.dumps(record))
        self.part.replace(self.path)


def observe_gpu() -> None:
    """Count from now on what this process does on its GPU."""
    count_waits()
    for name in (*COLLECTIVES, *POINT_TO_POINT, "barrier"):
        if hasattr(GROUP, name):  # PyTorch 2.11 and 2.12 do not have all of them.
            count_calls(GROUP, name, partial(count_collective, name))
    count_calls(DistributedDataParallel, "forward", count_pass)
    optimizer.register_optimizer_step_post_hook(OBSERVED.count_step)
    CollectivesOfDTensor().__enter__()  # It stays for the rest of the process.


def main(folder: str, script: str, *flags: str) -> None:
    """Run the script as ``__main__``, and write this rank's record, however the script ends."""
    rank = os.environ["RANK"]
    report = Report(Path(folder), rank)
    exit_at_once = os._exit

    def write_and_exit(status: int) -> None:
        report.write()
        exit_at_once(status)

    os._exit = write_and_exit  # type: ignore[assignment]  # It would skip the finally below.
    stack = open(Path(folder, f"stack{rank}"), "w")  # It stays open while the rank runs.
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)  # The signal asks where a rank hangs.
    # Python would give a script that it starts these arguments and this path.
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(script)
    try:
        if torch.cuda.is_available():
            observe_gpu()
        runpy.run_path(script, run_name="__main__")
    finally:
        report.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
