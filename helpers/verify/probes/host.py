"""What lies between host and GPU: launching kernels, waiting for a number, copying a batch."""

from collections.abc import Iterator
from functools import partial

import torch

from helpers.verify.probes.results import host_seconds_of, seconds_of
from helpers.verify.record import Figure

KERNELS = 100  # in a row


def launch(device: torch.device) -> Iterator[Figure]:
    """Yields the microseconds of a small kernel: launched by the host, replayed by a CUDA graph, awaited by .item()."""
    x = torch.ones(64, device=device)

    def kernels() -> None:
        for _ in range(KERNELS):
            x.mul_(1.0)

    def items() -> None:
        for _ in range(KERNELS):
            x[0].item()

    def microseconds(seconds: float) -> float:
        """The microseconds of one kernel, if all KERNELS together take so many seconds."""
        return 1e6 * seconds / KERNELS

    yield Figure("the host launches a kernel", microseconds(host_seconds_of(kernels, device)), "us")
    yield Figure("a small kernel in a row of 100", microseconds(seconds_of(kernels, device)), "us")
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()
        yield Figure("the same in a CUDA graph", microseconds(seconds_of(graph.replay, device)), "us")
    yield Figure("x[0].item()", microseconds(host_seconds_of(items, device)), "us")


def copies(device: torch.device) -> Iterator[Figure]:
    """Yields GB/s of a copy from the host with ``non_blocking=True``, and how long the host waits in the call."""
    size = 1 << 28  # bytes
    is_pinned = {"pageable memory": False, "pinned memory": True}
    if device.type == "cpu":
        size = 1 << 20
        is_pinned = {"pageable memory": False}  # Memory can only be pinned on a machine with a GPU.
    target = torch.empty(size, dtype=torch.uint8, device=device)
    for name, pinned in is_pinned.items():
        source = torch.randint(256, (size,), dtype=torch.uint8, pin_memory=pinned)
        copy = partial(target.copy_, source, non_blocking=True)
        yield Figure(f"from {name}", size / seconds_of(copy, device) / 1e9, "GB/s")
        yield Figure(f"from {name}, the host is kept for", 1e3 * host_seconds_of(copy, device), "ms")
