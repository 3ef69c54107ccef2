"""What the ranks try and time in their process group: each collective, each pair's link, and a rank's own speed."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from helpers.ranks.older_torch import use_newer_names

COLLECTIVES = (
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
)
SMALL = 1 << 10  # float32 numbers: 4 KiB
LARGE = {"cpu": 1 << 20, "cuda": 1 << 24}  # 4 MiB on CPUs, 64 MiB on GPUs
MATRIX_SIZE = {"cpu": 512, "cuda": 8192}
MATMUL_DTYPES = ("float64", "float32", "bfloat16", "float16")  # those of torch.mm

Call = Callable[[], Any]


@dataclass(frozen=True)
class Trial:
    """What one rank measured of a collective, or the slower of two ranks of the link between them."""

    right: bool  # whether the data that arrived were the expected ones
    seconds: float  # of one call with 4 KiB
    speed: float  # bytes per second with 4 MiB, or 64 MiB on GPUs; of a link, in each direction


@dataclass(frozen=True)
class Speeds:
    """The speeds of one rank that a plan counts on; None or 0 where a speed cannot be tried."""

    matmul: float | None  # FLOP/s of a matrix product in the plan's type of numbers
    in_node: float  # bus bandwidth of an all-reduce within the rank's node, in bytes per second
    between: float  # the same of an all-reduce between nodes


@dataclass(frozen=True)
class Exchange:
    """A communication that can be started again and again, and the result that it should have."""

    start: Call  # It starts the communication, and returns the Work to wait for, or a list of them.
    output: torch.Tensor | None  # The communication writes here; None on a rank that gets no result.
    expected: torch.Tensor  # what should then be in ``output``


def wait(works: Any) -> None:
    """Wait for what ``Exchange.start`` has returned."""
    if not isinstance(works, list):
        works = [works]
    for work in works:
        if isinstance(work, dist.Work):  # A rank that has no part in a collective gets None.
            work.wait()


def seconds_of(
    call: Call, rounds: int, device: torch.device, before_each_try: Call | None = None, tries: int = 3
) -> float:
    """Seconds of one call: the mean over ``rounds`` calls in a row, in the fastest of several tries.

    ``call`` does its work before it returns, or starts a communication and returns what ``wait`` waits for.
    ``before_each_try`` is called outside of the measured time, such as a barrier at which all ranks meet.
    """
    synchronize = torch.get_device_module(device).synchronize
    seconds_of_tries = []
    for _ in range(tries):
        if before_each_try is not None:
            before_each_try()
        synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            works = call()
            if device.type == "cpu":
                wait(works)  # A GPU's collectives follow each other on its stream, so the host need not wait.
        synchronize()
        seconds = time.perf_counter() - start
        seconds_of_tries.append(seconds / rounds)
    return min(seconds_of_tries)


def try_exchange(
    prepare: Callable[[int], Exchange], device: torch.device, before_each_try: Call | None = None
) -> Trial:
    """Check an exchange's result, and time it with little data for its latency and with much for its speed.

    ``prepare(numbers)`` makes the exchange of so many float32 numbers. ``before_each_try`` is called before each
    measurement, such as a barrier.
    """
    small_exchange = prepare(SMALL)
    small_is_right = is_right(small_exchange)
    latency = seconds_of(small_exchange.start, rounds=5, device=device, before_each_try=before_each_try)

    # Every rank has to try this one, too, even if it got a wrong result before: the others wait for it.
    large = LARGE[device.type]
    large_exchange = prepare(large)
    large_is_right = is_right(large_exchange)
    seconds_of_large = seconds_of(large_exchange.start, rounds=2, device=device, before_each_try=before_each_try)
    bytes_of_large = 4 * large  # a float32 number has 4 bytes
    return Trial(
        right=small_is_right and large_is_right,
        seconds=latency,
        speed=bytes_of_large / seconds_of_large,
    )


def is_right(exchange: Exchange) -> bool:
    """Do the exchange once; return whether its result, if this rank gets one, is the expected one."""
    wait(exchange.start())
    return exchange.output is None or torch.equal(exchange.output, exchange.expected)


# --- collectives ------------------------------------------------------------------------------------------------------


def try_collective(name: str, device: torch.device) -> Trial:
    """Try one collective on this rank. All ranks meet before each measurement."""
    return try_exchange(lambda numbers: collective(name, numbers, device), device, before_each_try=dist.barrier)


def collective(name: str, numbers: int, device: torch.device) -> Exchange:
    """One of COLLECTIVES over so many float32 numbers: how to start it, and what this rank has to get from it."""
    data = DataOfRanks(numbers, device)
    if name in ("broadcast", "reduce", "all_reduce", "all_to_all"):
        return collective_of_whole_data(name, data)
    if name in ("scatter", "gather"):
        return collective_with_parts_on_rank_0(name, data)
    if name in ("all_gather", "reduce_scatter"):
        return collective_of_own_parts(name, data)
    raise ValueError(f"{name!r} is none of {', '.join(COLLECTIVES)}.")


class DataOfRanks:
    """What the ranks send in a collective: this rank's data, and what is expected of all ranks' data together.

    The data are divided into as many parts as there are ranks, all of one length. Rank k's data are a pattern times
    k + 1. The numbers are small and whole, so that their sums are exact in float32.
    """

    def __init__(self, numbers: int, device: torch.device) -> None:
        """``numbers``: how many float32 numbers each rank has, rounded up to a multiple of the ranks."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.length_of_part = math.ceil(numbers / self.world_size)
        numbers_of_rank = torch.arange(self.world_size * self.length_of_part, device=device)
        self.pattern = numbers_of_rank.view(self.world_size, self.length_of_part) % 7 + 1.0  # [parts, numbers]
        self.factors = torch.arange(1.0, self.world_size + 1, device=device)[:, None]  # of the ranks: [ranks, 1]
        self.own = (self.pattern * (self.rank + 1)).flatten()
        self.sum_of_ranks = (self.pattern * self.factors.sum()).flatten()
        # Part 0 of rank 0's data, part 1 of rank 1's, and so on:
        self.one_part_of_each_rank = (self.pattern * self.factors).flatten()

    def own_part_of_all_ranks(self) -> torch.Tensor:
        """The part with this rank's number of rank 0's data, of rank 1's data, and so on."""
        return (self.pattern[self.rank] * self.factors).flatten()

    def own_part(self) -> torch.Tensor:
        """The part of this rank's data that has the rank's number."""
        return self.own.chunk(self.world_size)[self.rank].clone()

    def empty_part(self) -> torch.Tensor:
        """Memory for a part that is to be received."""
        return torch.zeros(self.length_of_part, device=self.own.device)


def collective_of_whole_data(name: str, data: DataOfRanks) -> Exchange:
    """A collective in which each rank that sends sends all of its data."""
    own = data.own
    if name == "broadcast":
        return Exchange(lambda: dist.broadcast(own, 0, async_op=True), own, expected=data.pattern.flatten())
    if name == "reduce":
        output = own if data.rank == 0 else None
        return Exchange(lambda: dist.reduce(own, 0, async_op=True), output, expected=data.sum_of_ranks)
    if name == "all_reduce":
        return Exchange(lambda: dist.all_reduce(own, async_op=True), own, expected=data.sum_of_ranks)
    received = torch.zeros_like(own)
    start = partial(dist.all_to_all_single, received, own, async_op=True)
    return Exchange(start, received, expected=data.own_part_of_all_ranks())


def collective_with_parts_on_rank_0(name: str, data: DataOfRanks) -> Exchange:
    """A scatter of rank 0's parts to the ranks, or a gather of one part of each rank on rank 0."""
    is_rank_0 = data.rank == 0
    if name == "scatter":
        received_part = data.empty_part()
        parts_to_send = list(data.own.chunk(data.world_size)) if is_rank_0 else None
        start = partial(dist.scatter, received_part, parts_to_send, 0, async_op=True)
        return Exchange(start, received_part, expected=data.pattern[data.rank])
    received = torch.zeros_like(data.own)
    parts_of_received = list(received.chunk(data.world_size)) if is_rank_0 else None
    start = partial(dist.gather, data.own_part(), parts_of_received, 0, async_op=True)
    output = received if is_rank_0 else None
    return Exchange(start, output, expected=data.one_part_of_each_rank)


def collective_of_own_parts(name: str, data: DataOfRanks) -> Exchange:
    """An all-gather of one part of each rank, or a reduce-scatter that leaves each rank one part of the sum."""
    use_newer_names()  # a cluster may have an older PyTorch
    if name == "all_gather":
        received = torch.zeros_like(data.own)
        start = partial(dist.all_gather_single, received, data.own_part(), async_op=True)
        return Exchange(start, received, expected=data.one_part_of_each_rank)
    received_part = data.empty_part()
    start = partial(dist.reduce_scatter_single, received_part, data.own, async_op=True)
    own_part_of_sum = data.sum_of_ranks.chunk(data.world_size)[data.rank]
    return Exchange(start, received_part, expected=own_part_of_sum)


# --- links ------------------------------------------------------------------------------------------------------------


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of pairs of range(count): in a round no number is in two pairs, and in all each pair comes once.

    For 4 the first round is [(0, 3), (1, 2)]. It is the circle method, by which round-robin tournaments are planned:
    the players sit at a table, play against the player opposite, and between two rounds all but the first move on by
    one seat.
    """
    seats = list(range(count))
    if count % 2 == 1:
        seats.append(count)  # Nobody has this number, so who sits opposite to it has nobody to play with.
    number_of_rounds = len(seats) - 1
    for _ in range(number_of_rounds):
        pairs = []
        for number, opposite in zip(seats, reversed(seats), strict=True):
            is_pair = opposite < count
            if is_pair and number < opposite:  # each pair is met twice, once from each side
                pairs.append((number, opposite))
        yield pairs
        last = seats.pop()
        seats.insert(1, last)


def try_link(peer: int, device: torch.device) -> Trial:
    """Try an exchange with one peer, a rank of the process group: both send and receive at once."""

    def prepare(numbers: int) -> Exchange:
        """Send so many numbers, and receive as many. Each rank's are a pattern times its rank + 1."""
        pattern = torch.arange(numbers, device=device) % 7 + 1.0
        sent = pattern * (dist.get_rank() + 1)
        received = torch.zeros_like(pattern)
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        return Exchange(lambda: dist.batch_isend_irecv(operations), received, pattern * (peer + 1))

    return try_exchange(prepare, device)


# --- speeds -----------------------------------------------------------------------------------------------------------


def try_matmul(dtype: str, device: torch.device, before_each_try: Call | None = None) -> float | None:
    """FLOP/s of a large product of random matrices; None for a type that torch.mm does not have.

    A matrix of equal numbers would be faster: its bits flip less, so a GPU draws less power and clocks higher.
    """
    if dtype not in MATMUL_DTYPES:
        return None
    size = MATRIX_SIZE[device.type]
    x = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    seconds = seconds_of(lambda: torch.mm(x, x), rounds=1, device=device, before_each_try=before_each_try, tries=15)
    operations = 2 * size**3  # a multiplication and an addition for each number of a row and each of a column
    return operations / seconds


def try_all_reduce(groups: list[list[int]], device: torch.device) -> float:
    """Bus bandwidth in bytes per second of an all-reduce in this rank's group, while all groups do the same.

    ``groups`` are lists of ranks, such as [[0, 1], [2, 3]]. The bandwidth is 0 for a rank that is alone in its group.
    """
    own_group, _ = dist.new_subgroups_by_enumeration(groups)
    numbers = torch.zeros(LARGE[device.type], device=device)
    all_reduce = partial(dist.all_reduce, numbers, group=own_group, async_op=True)
    wait(all_reduce())  # the first call connects the ranks
    seconds = seconds_of(all_reduce, rounds=2, device=device, before_each_try=dist.barrier)
    # An all-reduce among N ranks sends 2(N - 1)/N times its size over each link (nccl-tests, doc/PERFORMANCE.md).
    ranks = own_group.size()
    bytes_over_a_link = 2 * (ranks - 1) / ranks * numbers.nbytes
    return bytes_over_a_link / seconds


def try_plan(dtype: str, hosts: list[str], device: torch.device) -> Speeds:
    """Try what a plan counts on. ``dtype`` is its type of numbers; ``hosts`` has each rank's host, in order.

    Between nodes the first ranks of all hosts form a group, the second ranks another group, and so on. Gradients are
    averaged in such groups where the ranks of a node share a model.
    """
    ranks_by_host = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks_by_host[host].append(rank)
    groups_in_nodes = list(ranks_by_host.values())  # such as [[0, 1], [2, 3]]
    groups_between_nodes = []  # then [[0, 2], [1, 3]]
    for ranks_in_same_position in zip_longest(*groups_in_nodes):  # a node with fewer ranks is filled up with None
        groups_between_nodes.append([rank for rank in ranks_in_same_position if rank is not None])
    return Speeds(
        matmul=try_matmul(dtype, device, before_each_try=dist.barrier),
        in_node=try_all_reduce(groups_in_nodes, device),
        between=try_all_reduce(groups_between_nodes, device),
    )
