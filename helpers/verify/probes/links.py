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
    """The largest of all ranks' seconds. All ranks call this together, and it returns the same number on each."""
    largest = torch.tensor(seconds, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def bus_bandwidth(device: torch.device) -> Iterator[Figure]:
    """Yields the bus bandwidth of all-reduces of growing size in GB/s, as nccl-tests defines it.

    An all-reduce of S bytes among N ranks that takes t seconds has the bus bandwidth S/t · 2(N - 1)/N: what each link
    carries, whatever N is (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    start_group(device, alone=False)
    ranks = dist.get_world_size()
    sent_share = 2 * (ranks - 1) / ranks  # bytes that each rank sends, as a share of the tensor's
    smallest_size = 1 << 10  # bytes
    largest_size = MESSAGE
    if device.type == "cpu":
        largest_size = 1 << 14
    bytes_of_number = 4  # of float32
    size = smallest_size
    while size <= largest_size:
        x = torch.zeros(size // bytes_of_number, device=device)
        seconds_of_this_rank = seconds_of(partial(dist.all_reduce, x), device)
        seconds = slowest(seconds_of_this_rank, device)
        if size == smallest_size:
            yield Figure(f"{all_reduce_name(size)}, time", 1e6 * seconds, "us")
        bytes_per_second = size / seconds * sent_share
        yield Figure(all_reduce_name(size), bytes_per_second / 1e9, "GB/s")
        size *= 4


def overlap(device: torch.device) -> Iterator[Figure]:
    """Yields how much of an all-reduce runs during matrix products, and how long a rank waits for a late one."""
    start_group(device, alone=False)
    matrix_size = 8192
    numbers = 1 << 26
    if device.type == "cpu":
        matrix_size = 128
        numbers = 1 << 12
    a = torch.randn(matrix_size, matrix_size, device=device, dtype=torch.bfloat16)
    message = torch.zeros(numbers, device=device)

    def products() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        products()
        work.wait()

    products_alone = slowest(seconds_of(products, device), device)
    all_reduce_alone = slowest(seconds_of(partial(dist.all_reduce, message), device), device)
    together = slowest(seconds_of(both, device), device)
    yield Figure("matrix products alone", 1e3 * products_alone, "ms")
    yield Figure("all-reduce alone", 1e3 * all_reduce_alone, "ms")
    yield Figure("both at once", 1e3 * together, "ms")
    # One after the other they would take the sum of both times. What is missing from the sum ran at the same time, and
    # that can be at most the shorter of the two.
    seconds_at_once = products_alone + all_reduce_alone - together
    hidden = seconds_at_once / min(products_alone, all_reduce_alone)
    yield Figure("of the shorter one, hidden", 100 * hidden, "%")
    yield from late_rank(message, device)


def late_rank(message: torch.Tensor, device: torch.device) -> Iterator[Figure]:
    """Let the last rank come late to an all-reduce. Yields when rank 0's call returns, and when rank 0 has the sum.

    NCCL's call only starts the all-reduce, so it may return before the last rank has come.
    """
    late_by = 0.1  # seconds
    dist.barrier()
    is_last_rank = dist.get_rank() == dist.get_world_size() - 1
    if is_last_rank:
        time.sleep(late_by)
    start = time.perf_counter()
    dist.all_reduce(message)
    returned = time.perf_counter() - start
    synchronize(device)
    done = time.perf_counter() - start
    yield Figure("the last rank comes late by", 1e3 * late_by, "ms")
    yield Figure("rank 0's call of all_reduce returns after", 1e3 * returned, "ms")
    yield Figure("rank 0's GPU has the sum after", 1e3 * done, "ms")
