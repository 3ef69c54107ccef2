"""Run a script as one rank and count what it does on its GPU: ``torchrun observer.py DIR SCRIPT FLAGS``.

Each rank writes DIR/rank<N>.json. It has counts of the host's waits for the GPU and of collectives, for the same lines
of the script and under the same names as in a rehearsal. torch warns of most waits (torch.cuda.set_sync_debug_mode).
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
    """The line of the script that is running, such as ``train.py:7``.

    The backward of a GPU runs on a thread of torch, which has no frame of the script. Then it is the line of the main
    thread, which waits in the call of ``backward``.
    """
    line = script_line()
    thread_runs_script = line != "?"
    if thread_runs_script:
        return line
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # It is None only for a thread that has not started.
    return script_line(sys._current_frames()[main_thread])


OBSERVED = Counts(current_line)  # what this rank has done at each line of the script


def count_calls(owner: Any, name: str, count: Callable[..., None]) -> None:
    """Replace the function ``owner.name`` by one that first calls ``count`` with the same arguments."""
    original = getattr(owner, name)

    def counted_call(*args: Any, **kwargs: Any) -> Any:
        count(*args, **kwargs)
        return original(*args, **kwargs)

    replace(owner, **{name: counted_call})


def count_waits() -> None:
    """Count from now on how often the host waits until the GPU has done its work.

    If torch's sync debug mode is "warn", torch warns of most waits, and ``warnings.showwarning`` is called with each
    warning. So that function is replaced here by one that counts them. For calls of ``synchronize`` torch does not
    always warn, so they are counted when they are made, and a warning that comes from one of them is left out.
    """
    show_warning: Any = warnings.showwarning

    def count_warning(message: Any, *args: Any, **kwargs: Any) -> None:
        """The replacement of ``warnings.showwarning``: count a warning of a wait, and show any other warning."""
        is_about_wait = str(message).startswith(SYNC)
        if not is_about_wait:
            show_warning(message, *args, **kwargs)
            return
        caller = frame_outside(warnings.__file__, __file__, counts.__file__)
        # Calls of torch's functions of these names are counted by count_synchronize and by count_collective.
        is_counted_as_call = caller is not None and caller.f_code.co_name in ("synchronize", "barrier")
        if not is_counted_as_call:
            OBSERVED.count(WAIT, "torch's warning")

    warnings.showwarning = count_warning
    warnings.filterwarnings("always", message=SYNC)  # By default only the first warning of a line is shown.
    torch.cuda.set_sync_debug_mode("warn")
    for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream):
        count_calls(owner, "synchronize", count_synchronize)


def count_synchronize(*args: Any, **kwargs: Any) -> None:
    """Count a call of ``synchronize``, whatever its arguments are."""
    OBSERVED.count(WAIT, "synchronize")


def count_collective(name: str, group: Any, *args: Any, **kwargs: Any) -> None:
    """Count a call of a ProcessGroup's method ``name``, such as "allreduce", on ``group`` with these arguments.

    With tensors on a GPU it is a collective of NCCL, otherwise of gloo. A barrier has no tensors.
    """
    tensors = tensors_in((*args, *kwargs.values()))
    is_on_gpu = any(tensor.is_cuda for tensor in tensors)
    is_barrier_of_nccl = name == "barrier" and bool(nccl_of(group))
    if is_barrier_of_nccl:
        OBSERVED.count(WAIT, name)  # The host waits in NCCL's barrier.
    if is_on_gpu or is_barrier_of_nccl:
        backend = "NCCL"
    else:
        backend = "gloo"
    OBSERVED.count(COLLECTIVE, f"{name} ({backend})")


def count_pass(model: Any, *args: Any, **kwargs: Any) -> None:
    """Count a forward pass of DDP as one all-reduce of gradients, which its backward will do.

    The backward itself cannot be counted, because DDP starts its all-reduces in C++.
    """
    # Within model.no_sync() the attribute is False.
    will_reduce_gradients = torch.is_grad_enabled() and model.require_backward_grad_sync
    if will_reduce_gradients and nccl_of(model.process_group):
        OBSERVED.count(COLLECTIVE, "allreduce by DDP, in backward")


class CollectivesOfDTensor(TorchDispatchMode):
    """Counts the collectives of DTensor, which calls them as operators and not as methods of a ProcessGroup.

    While this mode is entered, torch calls ``__torch_dispatch__`` in place of each operator.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator ``func``, such as ``_c10d_functional.all_reduce.default``, and count it if it communicates.

        ``types`` are the classes of those arguments that are not plain tensors.
        """
        if any(issubclass(tensor_class, (DTensor, CudaTensor)) for tensor_class in types):
            return NotImplemented  # torch turns it into operators on plain tensors, which come here, too.
        name, _, _ = func.__name__.partition(".")  # "all_reduce" of "all_reduce.default"
        sends_nothing = name in ("wait_tensor", "_wrap_tensor_autograd")
        is_collective = func.namespace == "_c10d_functional" and not sends_nothing
        if is_collective:
            OBSERVED.count(COLLECTIVE, f"{name.rstrip('_')} (C++)")
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)


class Report:
    """The file ``rank<N>.json``, to which this rank writes what it observed when it ends."""

    def __init__(self, folder: Path, rank: str) -> None:
        """Begin to measure the time. ``rank`` is the rank's number as text, for the names of files in ``folder``."""
        self.path = folder / f"rank{rank}.json"
        self.unfinished_path = folder / f"part{rank}"
        self.start = time.monotonic()
        self.process_id = os.getpid()

    def write(self) -> None:
        """Write the file. A rank that is killed meanwhile leaves no half of it.

        A process that the script has forked, such as a DataLoader's worker, has this object, too, and writes nothing.
        """
        is_forked = os.getpid() != self.process_id
        if is_forked:
            return
        peak_memory = 0
        if torch.cuda.is_available():
            peak_memory = torch.cuda.max_memory_allocated()
        record = {
            "seconds": time.monotonic() - self.start,
            "memory": peak_memory,
            "lines": [asdict(row) for row in OBSERVED.rows()],
        }
        self.unfinished_path.write_text(json.dumps(record))
        self.unfinished_path.replace(self.path)


def observe_gpu() -> None:
    """Count from now on what this process does on its GPU: waits, collectives, and steps of optimizers."""
    count_waits()
    for name in (*COLLECTIVES, *POINT_TO_POINT, "barrier"):
        if hasattr(GROUP, name):  # PyTorch 2.11 and 2.12 do not have all of them.
            count_calls(GROUP, name, partial(count_collective, name))
    count_calls(DistributedDataParallel, "forward", count_pass)
    optimizer.register_optimizer_step_post_hook(OBSERVED.count_step)
    CollectivesOfDTensor().__enter__()  # The mode stays entered until the process ends.


def main(folder: str, script: str, *flags: str) -> None:
    """Run the script as ``__main__``, and write this rank's report to the folder, however the script ends."""
    rank = os.environ["RANK"]
    report = Report(Path(folder), rank)
    original_exit = os._exit

    def write_and_exit(status: int) -> None:
        report.write()
        original_exit(status)

    # os._exit ends the process without the ``finally`` below, so it is replaced by a function that writes the report.
    os._exit = write_and_exit  # type: ignore[assignment]
    # At this signal, which a rank gets if it hangs, Python writes where it is. The file stays open while the rank runs.
    stack = open(Path(folder, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=False)
    # As when Python itself starts the script.
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
