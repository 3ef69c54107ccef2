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
    """A communication that can be started again and again, and the result that it should have on this rank."""

    start: Call  # starts the communication, and returns a torch.distributed.Work to wait for, or a list of them
    output: torch.Tensor | None  # where the communication writes its result; None on a rank that gets none
    expected: torch.Tensor  # what should be in ``output`` afterwards


def wait(works: Any) -> None:
    """Wait until a communication has ended: ``works`` is what the function that started it returned."""
    if not isinstance(works, list):
        works = [works]
    for work in works:
        if isinstance(work, dist.Work):  # It is None on a rank that takes no part in the collective.
            work.wait()


def seconds_of(
    call: Call, rounds: int, device: torch.device, before_each_try: Call | None = None, tries: int = 3
) -> float:
    """Measure how many seconds one call takes.

    Each try makes ``rounds`` calls in a row, and the mean of the fastest try counts. ``call`` does its work before it
    returns, or starts a communication and returns what ``wait`` waits for. ``before_each_try`` is called outside of the
    measured time, for example a barrier at which all ranks meet.
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
                wait(works)  # On a GPU the host need not wait, because collectives follow each other on its stream.
        synchronize()
        seconds = time.perf_counter() - start
        seconds_of_tries.append(seconds / rounds)
    return min(seconds_of_tries)


def try_exchange(
    prepare: Callable[[int], Exchange], device: torch.device, before_each_try: Call | None = None
) -> Trial:
    """Check an exchange's result, and time it with little data for its latency and with much for its speed.

    ``prepare(numbers)`` makes the exchange of so many float32 numbers. ``before_each_try`` is called before each
    measurement, for example a barrier.
    """
    small_exchange = prepare(SMALL)
    small_is_right = is_right(small_exchange)
    latency = seconds_of(small_exchange.start, rounds=5, device=device, before_each_try=before_each_try)

    # A rank that got a wrong result goes on with this one, too, because the other ranks wait for it.
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
    """Do the exchange once, and return whether its result is the expected one. True on a rank that gets no result."""
    wait(exchange.start())
    return exchange.output is None or torch.equal(exchange.output, exchange.expected)


# --- collectives ------------------------------------------------------------------------------------------------------


def try_collective(name: str, device: torch.device) -> Trial:
    """Try one collective on this rank. All ranks meet before each measurement."""

    def prepare(numbers: int) -> Exchange:
        return collective(name, numbers, device)

    return try_exchange(prepare, device, before_each_try=dist.barrier)


def collective(name: str, numbers: int, device: torch.device) -> Exchange:
    """One of COLLECTIVES over so many float32 numbers: how to start it, and what this rank should get from it."""
    data = DataOfRanks(numbers, device)
    if name in ("broadcast", "reduce", "all_reduce", "all_to_all"):
        return collective_of_whole_data(name, data)
    if name in ("scatter", "gather"):
        return collective_with_parts_on_rank_0(name, data)
    if name in ("all_gather", "reduce_scatter"):
        return collective_of_own_parts(name, data)
    raise ValueError(f"{name!r} is none of {', '.join(COLLECTIVES)}.")


class DataOfRanks:
    """What the ranks send in a collective, so that each of them can compute what it should receive.

    Rank k sends the pattern 1, 2, …, 7, 1, 2, … times k + 1: rank 0 sends 1, 2, 3, … and rank 1 sends 2, 4, 6, … The
    data of a rank are divided into as many equal parts as there are ranks. All numbers are small and whole, so that
    their sums are exact in float32.
    """

    def __init__(self, numbers: int, device: torch.device) -> None:
        """``numbers``: how many float32 numbers each rank has, rounded up to a multiple of the number of ranks."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.length_of_part = math.ceil(numbers / self.world_size)
        self.pattern = torch.arange(self.world_size * self.length_of_part, device=device) % 7 + 1.0

    def of_rank(self, rank: int) -> torch.Tensor:
        """All data of a rank, in a tensor of their own."""
        return self.pattern * (rank + 1)

    def part_of_rank(self, rank: int, part: int) -> torch.Tensor:
        """One part of a rank's data, in a tensor of its own."""
        start = part * self.length_of_part
        pattern_of_part = self.pattern[start : start + self.length_of_part]
        return pattern_of_part * (rank + 1)

    def sum_of_ranks(self) -> torch.Tensor:
        """The sum of all ranks' data."""
        factors = range(1, self.world_size + 1)  # of rank 0, rank 1, …
        return self.pattern * sum(factors)

    def one_part_of_each_rank(self) -> torch.Tensor:
        """Part 0 of rank 0's data, then part 1 of rank 1's, and so on."""
        return torch.cat([self.part_of_rank(rank, part=rank) for rank in range(self.world_size)])

    def own_part_of_all_ranks(self) -> torch.Tensor:
        """The part with this rank's number of rank 0's data, then that of rank 1's, and so on."""
        return torch.cat([self.part_of_rank(rank, part=self.rank) for rank in range(self.world_size)])

    def parts_of(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a rank's data, or of memory for them, as views: one for each rank."""
        return list(data.chunk(self.world_size))


def collective_of_whole_data(name: str, data: DataOfRanks) -> Exchange:
    """A broadcast, reduce, all-reduce or all-to-all. In these a rank that sends something sends all of its data.

    The first three write their result over what the rank sends.
    """
    own = data.of_rank(data.rank)
    if name == "broadcast":
        start = partial(dist.broadcast, own, src=0, async_op=True)
        return Exchange(start, output=own, expected=data.of_rank(0))
    if name == "reduce":
        start = partial(dist.reduce, own, dst=0, async_op=True)
        output = None
        if data.rank == 0:
            output = own
        return Exchange(start, output, expected=data.sum_of_ranks())
    if name == "all_reduce":
        start = partial(dist.all_reduce, own, async_op=True)
        return Exchange(start, output=own, expected=data.sum_of_ranks())
    received = torch.zeros_like(own)
    start = partial(dist.all_to_all_single, received, own, async_op=True)
    return Exchange(start, output=received, expected=data.own_part_of_all_ranks())


def collective_with_parts_on_rank_0(name: str, data: DataOfRanks) -> Exchange:
    """A scatter, in which rank 0 sends each rank a part of its data, or a gather of one part of each rank on rank 0."""
    is_rank_0 = data.rank == 0
    if name == "scatter":
        parts_to_send = None
        if is_rank_0:
            parts_to_send = data.parts_of(data.of_rank(0))
        expected = data.part_of_rank(0, part=data.rank)
        received_part = torch.zeros_like(expected)
        start = partial(dist.scatter, received_part, parts_to_send, src=0, async_op=True)
        return Exchange(start, output=received_part, expected=expected)

    sent_part = data.part_of_rank(data.rank, part=data.rank)
    expected = data.one_part_of_each_rank()
    output = None
    received_parts = None
    if is_rank_0:
        output = torch.zeros_like(expected)
        received_parts = data.parts_of(output)
    start = partial(dist.gather, sent_part, received_parts, dst=0, async_op=True)
    return Exchange(start, output, expected)


def collective_of_own_parts(name: str, data: DataOfRanks) -> Exchange:
    """An all-gather of one part of each rank, or a reduce-scatter that leaves each rank one part of the sum."""
    use_newer_names()  # The cluster may have an older PyTorch.
    if name == "all_gather":
        sent_part = data.part_of_rank(data.rank, part=data.rank)
        expected = data.one_part_of_each_rank()
        received = torch.zeros_like(expected)
        start = partial(dist.all_gather_single, received, sent_part, async_op=True)
        return Exchange(start, output=received, expected=expected)
    own = data.of_rank(data.rank)
    expected = data.parts_of(data.sum_of_ranks())[data.rank]
    received_part = torch.zeros_like(expected)
    start = partial(dist.reduce_scatter_single, received_part, own, async_op=True)
    return Exchange(start, output=received_part, expected=expected)


# --- links ------------------------------------------------------------------------------------------------------------


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Divide all pairs of the numbers 0 to count - 1 into rounds, so that no number is in two pairs of a round.

    Yields one round after the other. For a count of 4 the first is [(0, 3), (1, 2)]. This is the circle method of
    round-robin tournaments: the players sit at a table, each plays against the one opposite, and between two rounds all
    but the first player move on by one seat.
    """
    seats = list(range(count))
    if count % 2 == 1:
        seats.append(count)  # No player has this number, so the one who sits opposite to it pauses.
    number_of_rounds = len(seats) - 1
    for _ in range(number_of_rounds):
        pairs = []
        for number, opposite in zip(seats, reversed(seats), strict=True):
            # Each pair is met twice, once from each side.
            if number < opposite < count:
                pairs.append((number, opposite))
        yield pairs
        last = seats.pop()
        seats.insert(1, last)


def try_link(peer: int, device: torch.device) -> Trial:
    """Try an exchange with one peer, a rank of the process group: both send and receive at once."""

    def prepare(numbers: int) -> Exchange:
        """Send so many numbers and receive as many. Rank k sends the pattern 1, 2, …, 7, 1, 2, … times k + 1."""
        pattern = torch.arange(numbers, device=device) % 7 + 1.0
        sent = pattern * (dist.get_rank() + 1)
        received = torch.zeros_like(pattern)
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        start = partial(dist.batch_isend_irecv, operations)
        return Exchange(start, output=received, expected=pattern * (peer + 1))

    return try_exchange(prepare, device)


# --- speeds -----------------------------------------------------------------------------------------------------------


def try_matmul(dtype: str, device: torch.device, before_each_try: Call | None = None) -> float | None:
    """Measure FLOP/s of a product of two large random matrices; None for a type that torch.mm does not have.

    The matrices are random because a product of equal numbers would be faster: fewer bits flip, so a GPU draws less
    power and clocks higher.
    """
    if dtype not in MATMUL_DTYPES:
        return None
    size = MATRIX_SIZE[device.type]
    x = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    multiply = partial(torch.mm, x, x)
    seconds = seconds_of(multiply, rounds=1, device=device, before_each_try=before_each_try, tries=15)
    # Each of the size² results takes a multiplication and an addition for each number of a row.
    operations = 2 * size**3
    return operations / seconds


def try_all_reduce(groups: list[list[int]], device: torch.device) -> float:
    """Measure the bus bandwidth, in bytes per second, of an all-reduce in this rank's group, while all groups do one.

    ``groups`` are lists of ranks, such as [[0, 1], [2, 3]]. The bandwidth is 0 for a rank that is alone in its group.
    """
    own_group, _ = dist.new_subgroups_by_enumeration(groups)
    numbers = torch.zeros(LARGE[device.type], device=device)
    all_reduce = partial(dist.all_reduce, numbers, group=own_group, async_op=True)
    wait(all_reduce())  # The first call connects the ranks, and is not timed.
    seconds = seconds_of(all_reduce, rounds=2, device=device, before_each_try=dist.barrier)
    # An all-reduce among N ranks sends 2(N - 1)/N times its size over each link (nccl-tests, doc/PERFORMANCE.md).
    ranks = own_group.size()
    bytes_over_a_link = 2 * (ranks - 1) / ranks * numbers.nbytes
    return bytes_over_a_link / seconds


def try_plan(dtype: str, hosts: list[str], device: torch.device) -> Speeds:
    """Measure the speeds that a plan counts on: of a matrix product, and of links within and between nodes.

    ``dtype`` is the plan's type of numbers; ``hosts`` has each rank's host, in order. Between nodes the first ranks of
    all hosts form a group, their second ranks another group, and so on. If the ranks of a node share a model, gradients
    are averaged in such groups.
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
