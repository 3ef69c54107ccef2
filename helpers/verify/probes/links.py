"""Between the GPUs of a machine: bus bandwidth, overlap, and waiting for another rank."""

import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from helpers.verify.probes.catalog import MESSAGE, all_reduce_name
from helpers.verify.probes.results import seconds_of, start_group, synchronize
from helpers.verify.record import Figure


def slowest(seconds: float, device: torch.device) -> float:
    """The largest of the ranks' seconds, on each rank."""
    largest = torch.tensor(seconds, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def bus_bandwidth(device: torch.device) -> Iterator[Figure]:
    """GB/s by size, as nccl-tests defines them.

    An all-reduce of S bytes among N ranks that takes t seconds has the bus bandwidth S/t · 2(N - 1)/N: what each link
    carries, whatever N is (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    start_group(device, alone=False)
    ranks = dist.get_world_size()
    largest = MESSAGE
    if device.type == "cpu":
        largest = 1 << 14
    size = 1 << 10
    while size <= largest:
        x = torch.zeros(size // 4, device=device)
        seconds = slowest(seconds_of(partial(dist.all_reduce, x), device), device)
        if size == 1 << 10:
            yield Figure(f"{all_reduce_name(size)}, time", 1e6 * seconds, "us")
        yield Figure(all_reduce_name(size), size / seconds * 2 * (ranks - 1) / ranks / 1e9, "GB/s")
        size *= 4


def overlap(device: torch.device) -> Iterator[Figure]:
    """Time of matrix products, of an all-reduce, of both at once, and of an all-reduce to which a rank comes late."""
    start_group(device, alone=False)
    size = 8192
    numbers = 1 << 26
    if device.type == "cpu":
        size = 128
        numbers = 1 << 12
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    message = torch.zeros(numbers, device=device)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        products()
        work.wait()

    alone = slowest(seconds_of(products, device), device)
    communication = slowest(seconds_of(lambda: dist.all_reduce(message), device), device)
    together = slowest(seconds_of(both, device), device)
    yield Figure("matrix products alone", 1e3 * alone, "ms")
    yield Figure("all-reduce alone", 1e3 * communication, "ms")
    yield Figure("both at once", 1e3 * together, "ms")
    hidden = (alone + communication - together) / min(alone, communication)
    yield Figure("of the shorter one, hidden", 100 * hidden, "%")

    late_by = 0.1
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late_by)
    start = time.perf_counter()
    dist.all_reduce(message)
    returned = time.perf_counter() - start
    synchronize(device)
    done = time.perf_counter() - start
    yield Figure("the last rank comes late by", 1e3 * late_by, "ms")
    yield Figure("rank 0's call of all_reduce returns after", 1e3 * returned, "ms")
    yield Figure("rank 0's GPU has the sum after", 1e3 * done, "ms")
