"""What the ranks try and time in their process group: each collective, each pair's link, and a rank's own speed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SMALL, LARGE = 1 << 10, {"cpu": 1 << 20, "cuda": 1 << 24}  # counts of float32: 4 KiB; 4 MiB on CPUs, 64 MiB on GPUs

Call = Callable[[], Any]  # it starts something, and returns the Work to wait for, a list of them, or None
Exchange = tuple[
    Call, torch.Tensor | None, torch.Tensor
]  # (call, the tensor that it fills, that tensor's right values)


@dataclass(frozen=True)
class Trial:
    """One collective on one rank, or one link, as its slower rank has it."""

    right: bool  # whether the data were
    seconds: float  # with 4 KiB
    speed: float  # bytes per second with 4 MiB, or 64 MiB on GPUs; of a link, in each direction


@dataclass(frozen=True)
class Speeds:
    """What one rank has of what a plan counts on; None where that was not tried."""

    matmul: float | None  # FLOP/s
    in_node: float | None  # bus bandwidth in bytes per second
    between: float | None


def wait(works: Any) -> None:
    """Wait for what a call has started."""
    for work in works if isinstance(works, list) else [works]:
        if work is not None:
            work.wait()


def seconds(call: Call, rounds: int, device: torch.device, align: Call = lambda: None, tries: int = 3) -> float:
    """Seconds of one call: the best of ``tries`` means over ``rounds`` calls. ``align`` runs before each try."""
    times = []
    for _ in range(tries):
        align()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(rounds):
            works = call()
            if device.type == "cpu":
                wait(works)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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
    own = mine.chunk(world_size)[rank].clone()
    copied, reduced, summed = (mine.clone() for _ in range(3))
    gathered, everything, swapped = (torch.zeros_like(mine) for _ in range(3))
    scattered, own_sum = torch.zeros_like(own), torch.zeros_like(own)
    outbox, inbox = (list(x.chunk(world_size)) if rank == 0 else None for x in (mine, gathered))
    # A cluster may have an older torch: before 2.13 these two had other names.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    start: dict[str, Any] = {"async_op": True}
    return {
        "broadcast": (lambda: dist.broadcast(copied, 0, **start), copied, pattern.flatten()),
        "scatter": (lambda: dist.scatter(scattered, outbox, 0, **start), scattered, pattern[rank]),
        "gather": (lambda: dist.gather(own, inbox, 0, **start), gathered if rank == 0 else None, spread),
        "reduce": (lambda: dist.reduce(reduced, 0, **start), reduced if rank == 0 else None, total),
        "all_gather": (lambda: all_gather(everything, own, **start), everything, spread),
        "all_reduce": (lambda: dist.all_reduce(summed, **start), summed, total),
        "reduce_scatter": (lambda: reduce_scatter(own_sum, mine, **start), own_sum, total.chunk(world_size)[rank]),
        "all_to_all": (lambda: dist.all_to_all_single(swapped, mine, **start), swapped, swap),
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


def matmul_seconds(size: int, dtype: torch.dtype, device: torch.device, **options: Any) -> float:
    """Seconds of a product of two [size, size] matrices. ``options`` are those of ``seconds``."""
    x = torch.ones(size, size, device=device, dtype=dtype)

    def product() -> None:
        torch.mm(x, x)

    return seconds(product, 1, device, **options)


def try_alone(device: torch.device) -> float:
    """Seconds of one matrix product, [384, 384] or [4096, 4096] on a GPU, on this rank alone."""
    return matmul_seconds(4096 if device.type == "cuda" else 384, torch.float32, device, tries=15)


def try_matmul(dtype: str, device: torch.device) -> float | None:
    """FLOP/s of a large matrix product, which every rank computes at the same time; None: not a type of torch.mm."""
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        return None
    size = 8192 if device.type == "cuda" else 512
    return 2 * size**3 / matmul_seconds(size, getattr(torch, dtype), device, align=dist.barrier, tries=9)


def try_all_reduce(groups: list[list[int]], device: torch.device) -> float | None:
    """Bus bandwidth in bytes per second of an all-reduce in each of these groups of ranks, all at once; None: alone."""
    group, count = None, 1
    for ranks in groups:
        new = dist.new_group(ranks)  # by every rank, also by those that are not in it
        if dist.get_rank() in ranks:
            group, count = new, len(ranks)
    x = torch.zeros(LARGE[device.type], device=device)

    def reduce() -> dist.Work | None:
        return dist.all_reduce(x, group=group, async_op=True) if count > 1 else None

    wait(reduce())  # connects
    time = seconds(reduce, 2, device, dist.barrier)
    return 2 * (count - 1) / count * x.nbytes / time if count > 1 else None


def try_plan(dtype: str, hosts: list[str], device: torch.device) -> Speeds:
    """Try what a plan counts on. ``dtype`` is its type of numbers; ``hosts`` has each rank's host, in order.

    Between nodes the first ranks of all hosts form a group, the second ones another, and so on: as gradients travel.
    """
    nodes = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in hosts}
    columns = [[ranks[k] for ranks in nodes.values() if k < len(ranks)] for k in range(max(map(len, nodes.values())))]
    return Speeds(
        matmul=try_matmul(dtype, device),
        in_node=try_all_reduce([ranks for ranks in nodes.values() if len(ranks) > 1], device),
        between=try_all_reduce([ranks for ranks in columns if len(ranks) > 1], device),
    )
