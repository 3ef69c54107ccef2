"""What the ranks try and time in their process group: each collective, each pair's link, and a rank's own speed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

SMALL, LARGE = 1 << 10, {"cpu": 1 << 20, "cuda": 1 << 24}  # counts of float32: 4 KiB; 4 MiB on CPUs, 64 MiB on GPUs

Call = Callable[[], Any]  # it starts something, and may return the Work to wait for, or a list of them
Exchange = tuple[Call, torch.Tensor | None, torch.Tensor]  # (call, the tensor that it fills, its right values)


@dataclass(frozen=True)
class Trial:
    """One collective on one rank, or one link, as its slower rank has it."""

    right: bool  # whether the data were
    seconds: float  # with 4 KiB
    speed: float  # bytes per second with 4 MiB, or 64 MiB on GPUs; of a link, in each direction


@dataclass(frozen=True)
class Speeds:
    """What one rank has of what a plan counts on; None or 0 where that cannot be tried."""

    matmul: float | None  # FLOP/s
    in_node: float  # bus bandwidth in bytes per second
    between: float


def wait(works: Any) -> None:
    """Wait for what a call has started."""
    for work in works if isinstance(works, list) else [works]:
        if isinstance(work, dist.Work):
            work.wait()


def seconds(call: Call, rounds: int, device: torch.device, align: Call = lambda: None, tries: int = 3) -> float:
    """Seconds of one call: the best of ``tries`` means over ``rounds`` calls. ``align`` runs before each try."""
    synchronize = torch.get_device_module(device).synchronize
    times = []
    for _ in range(tries):
        align()
        synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            works = call()
            if device.type == "cpu":
                wait(works)
        synchronize()
        times.append((time.perf_counter() - start) / rounds)
    return min(times)


def try_exchange(prepare: Callable[[int], Exchange], device: torch.device, align: Call = lambda: None) -> Trial:
    """Try an exchange, which ``prepare`` makes for so many numbers, with little data and with much."""
    right, times = True, []
    for numbers, rounds in ((SMALL, 5), (LARGE[device.type], 2)):
        call, output, expected = prepare(numbers)
        wait(call())
        right = right and (output is None or torch.equal(output, expected))
        times.append(seconds(call, rounds, device, align))
    return Trial(right, times[0], 4 * numbers / times[1])


def collectives(numbers: int, device: torch.device) -> dict[str, Exchange]:
    """Every collective by its name, over so many float32 numbers, of which each rank has an equal part.

    The tensor that the call fills is [part] or [world_size * part], and None on a rank that gets no result.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = -(-numbers // world_size)
    pattern = torch.arange(world_size * part, device=device).view(world_size, part) % 7 + 1.0  # exact in float32
    factors = torch.arange(1.0, world_size + 1, device=device)[:, None]
    mine = (pattern * (rank + 1)).flatten()
    total, spread = (pattern * factors.sum()).flatten(), (pattern * factors).flatten()
    swap = (pattern[rank] * factors).flatten()
    own, own_total = (x.chunk(world_size)[rank].clone() for x in (mine, total))
    copied, reduced, summed = (mine.clone() for _ in range(3))
    gathered, everything, swapped = (torch.zeros_like(mine) for _ in range(3))
    scattered, own_sum = torch.zeros_like(own), torch.zeros_like(own)
    outbox, inbox = (list(x.chunk(world_size)) if rank == 0 else None for x in (mine, gathered))
    if hasattr(dist, "all_gather_single"):
        all_gather = dist.all_gather_single
        reduce_scatter = dist.reduce_scatter_single
    else:  # A cluster may have an older PyTorch: before 2.13 these two had other names.
        all_gather = dist.all_gather_into_tensor
        reduce_scatter = dist.reduce_scatter_tensor
    return {
        "broadcast": (lambda: dist.broadcast(copied, 0, async_op=True), copied, pattern.flatten()),
        "scatter": (lambda: dist.scatter(scattered, outbox, 0, async_op=True), scattered, pattern[rank]),
        "gather": (lambda: dist.gather(own, inbox, 0, async_op=True), gathered if rank == 0 else None, spread),
        "reduce": (lambda: dist.reduce(reduced, 0, async_op=True), reduced if rank == 0 else None, total),
        "all_gather": (lambda: all_gather(everything, own, async_op=True), everything, spread),
        "all_reduce": (lambda: dist.all_reduce(summed, async_op=True), summed, total),
        "reduce_scatter": (lambda: reduce_scatter(own_sum, mine, async_op=True), own_sum, own_total),
        "all_to_all": (lambda: dist.all_to_all_single(swapped, mine, async_op=True), swapped, swap),
    }


def try_collective(name: str, device: torch.device) -> Trial:
    """Try one collective on this rank."""
    return try_exchange(lambda numbers: collectives(numbers, device)[name], device, dist.barrier)


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of pairs: no two pairs of a round share a rank, and each pair of range(count) comes once.

    It is the circle method, by which round-robin tournaments are planned.
    """
    seats = list(range(count + count % 2))
    for _ in seats[1:]:
        pairs = [sorted((seats[k], seats[-1 - k])) for k in range(len(seats) // 2)]
        yield [(a, b) for a, b in pairs if b < count]
        seats.insert(1, seats.pop())


def try_link(peer: int, device: torch.device) -> Trial:
    """Try an exchange with one peer, a rank of the process group: both send and receive at once."""

    def prepare(numbers: int) -> Exchange:
        pattern = torch.arange(numbers, device=device) % 7 + 1.0
        mine, theirs = pattern * (dist.get_rank() + 1), torch.zeros_like(pattern)
        both = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        return lambda: dist.batch_isend_irecv(both), theirs, pattern * (peer + 1)

    return try_exchange(prepare, device)


def try_matmul(dtype: str, device: torch.device, align: Call = lambda: None) -> float | None:
    """FLOP/s of a large product of random matrices; None: not a type of torch.mm. ``align`` is as in ``seconds``.

    A matrix of equal numbers would be faster: its bits flip less, so a GPU draws less power and clocks higher.
    """
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        return None
    size = 8192 if device.type == "cuda" else 512
    x = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    return 2 * size**3 / seconds(lambda: torch.mm(x, x), 1, device, align, tries=15)


def try_all_reduce(groups: list[list[int]], device: torch.device) -> float:
    """Bus bandwidth in bytes per second of an all-reduce in each of these groups of ranks, all at once; 0: alone."""
    group, _ = dist.new_subgroups_by_enumeration(groups)
    x = torch.zeros(LARGE[device.type], device=device)
    reduce = partial(dist.all_reduce, x, group=group, async_op=True)
    wait(reduce())  # connects
    return 2 * (group.size() - 1) / group.size() * x.nbytes / seconds(reduce, 2, device, dist.barrier)


def try_plan(dtype: str, hosts: list[str], device: torch.device) -> Speeds:
    """Try what a plan counts on. ``dtype`` is its type of numbers; ``hosts`` has each rank's host, in order.

    Between nodes the first ranks of all hosts form a group, the second ones another, and so on: as gradients travel.
    """
    nodes = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    columns = [[rank for rank in column if rank is not None] for column in zip_longest(*nodes)]
    matmul = try_matmul(dtype, device, dist.barrier)
    return Speeds(matmul, try_all_reduce(nodes, device), try_all_reduce(columns, device))
