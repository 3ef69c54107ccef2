"""What probes share: number formats, a record for printed text, and functions for time, memory and process groups."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class NumberFormat:
    """A type of numbers, and how torch multiplies it."""

    name: str
    dtype: torch.dtype
    matmul_precision: str = "highest"  # for torch.set_float32_matmul_precision


FORMATS = (
    NumberFormat("float32", torch.float32),
    NumberFormat("TF32", torch.float32, matmul_precision="high"),
    NumberFormat("bfloat16", torch.bfloat16),
    NumberFormat("float16", torch.float16),
)


@dataclass(frozen=True)
class Text:
    """A text as the result of a probe: what a program printed."""

    name: str
    text: str


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all its work. On a CPU the work is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Measure the median seconds of a call over so many repeats, after a warm-up.

    On a GPU it is the time between two events on its stream, so that the host's time does not count.
    """
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def host_seconds_of(call: Callable[[], Any], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Measure the median seconds after which a call returns to the host, even if the GPU is still at work then.

    The GPU is idle when the call begins.
    """
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return statistics.median(times)


def start_group(device: torch.device, alone: bool = True) -> None:
    """Start the default process group, with NCCL on a GPU and gloo on the CPU.

    If the probe runs ``alone``, this process is its only rank; otherwise it has the ranks that torchrun has started.
    """
    backend = "gloo"
    bound_device = None
    if device.type == "cuda":
        backend = "nccl"
        bound_device = device
    timeout = timedelta(seconds=60)
    if alone:
        store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound_device, timeout=timeout)
    else:
        dist.init_process_group(backend, device_id=bound_device, timeout=timeout)


def gigabytes_allocated() -> float:
    """GB that tensors occupy on the current GPU."""
    return torch.cuda.memory_allocated() / 1e9


def peak_gigabytes() -> float:
    """The most GB that tensors have occupied on the current GPU since the peak was reset."""
    return torch.cuda.max_memory_allocated() / 1e9


def bytes_outside_the_allocator(device: torch.device) -> int:
    """Bytes of a GPU that are used, but not by PyTorch's allocator. On a CPU there are none."""
    if device.type == "cpu":
        return 0
    synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
