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
    """The line of the script that runs, such as ``train.py:7``.

    A GPU's backward runs on a thread of torch, on which the script has no line. Then it is the main thread's, which
    waits in the call of ``backward``.
    """
    line = script_line()
    is_on_thread_of_torch = line == "?"
    if not is_on_thread_of_torch:
        return line
    main_thread = threading.main_thread().ident
    assert main_thread is not None  # it has started
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
    """Count from now on each time that the host waits until the GPU has done its work.

    torch warns of most of these waits in its mode for it. Of calls of ``synchronize`` it does not always warn, so these
    are counted by their name, and a warning that one of them causes is left out.
    """
    show_warning: Any = warnings.showwarning

    def count_warning(message: Any, *args: Any, **kwargs: Any) -> None:
        """In the place of ``show_warning``, Python's function: count a warning of a wait, and show any other one."""
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
    """Count a call of the method ``name`` of a ProcessGroup: with tensors on a GPU it is NCCL's, otherwise gloo's."""
    backend = "gloo"
    if any(tensor.is_cuda for tensor in tensors_in((*args, *kwargs.values()))):
        backend = "NCCL"
    if name == "barrier" and nccl_of(group):
        backend = "NCCL"
        OBSERVED.count(WAIT, name)  # NCCL's barrier waits on the host.
    OBSERVED.count(COLLECTIVE, f"{name} ({backend})")


def count_pass(model: Any, *args: Any, **kwargs: Any) -> None:
    """Count a forward pass of DDP for its backward, whose all-reduces of gradients start in C++ and go unseen."""
    is_synchronized = torch.is_grad_enabled() and model.require_backward_grad_sync  # which is False within no_sync
    if is_synchronized and nccl_of(model.process_group):
        OBSERVED.count(COLLECTIVE, "allreduce by DDP, in backward")


class CollectivesOfDTensor(TorchDispatchMode):
    """Counts the collectives that DTensor starts as operators, without a call of ProcessGroup from Python.

    While such a mode is entered, torch calls its ``__torch_dispatch__`` in place of each operator.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """In the place of an operator ``func``, such as all_reduce: count it if it is a collective, and run it.

        ``types`` are the classes of those arguments that are not plain tensors.
        """
        if any(issubclass(tensor_class, (DTensor, CudaTensor)) for tensor_class in types):
            return NotImplemented  # torch turns it into operators of plain tensors, which come here, too.
        name, _, _ = func.__name__.partition(".")  # "all_reduce" of "all_reduce.default"
        is_collective = func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd")
        if is_collective:
            OBSERVED.count(COLLECTIVE, f"{name.rstrip('_')} (C++)")
        if kwargs is None:
            kwargs = {}
        return func(*args, **kwargs)


class Report:
    """The file in which this rank says what it has observed, ``rank<N>.json``. It is written when the rank ends."""

    def __init__(self, folder: Path, rank: str) -> None:
        """Nothing is written yet. ``rank`` is the rank's number as text, for the names of the files in ``folder``."""
        self.path = folder / f"rank{rank}.json"
        self.unfinished_path = folder / f"part{rank}"
        self.start = time.monotonic()
        self.process_id = os.getpid()

    def write(self) -> None:
        """Write the file, whole or not at all, because a rank may be killed meanwhile.

        A process that the script has forked, such as a DataLoader's worker, has this object too, and writes nothing.
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
    CollectivesOfDTensor().__enter__()  # It stays for the rest of the process.


def main(folder: str, script: str, *flags: str) -> None:
    """Run the script as ``__main__``, and write this rank's report to the folder, however the script ends."""
    rank = os.environ["RANK"]
    report = Report(Path(folder), rank)
    exit_at_once = os._exit

    def write_and_exit(status: int) -> None:
        report.write()
        exit_at_once(status)

    # A script that calls os._exit leaves without the finally below.
    os._exit = write_and_exit  # type: ignore[assignment]
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
