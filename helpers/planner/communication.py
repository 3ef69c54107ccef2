"""The collectives of a step on one rank: kind, count, bytes, and seconds at the links' full speed. Read by the plan.

Sizes are bytes of the whole tensor: what an all-reduce sums, an all-gather makes and a reduce-scatter takes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import OUTSIDE, VOCABULARY, Unit, reduced_bytes, units_of
from helpers.planner.model import Model

# Bytes that each rank sends, as a share of the size: nccl-tests, doc/PERFORMANCE.md, where busbw = size/time times it.
SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "send": lambda p: 1,
}
RECEIVED = "what a stage received"  # gathered by its tensor-parallel ranks, each of which was sent a part
SUMMED = 4  # bytes of a float32


def link_seconds(kind: str, size: float, in_node: int, nodes: int, cluster: Cluster) -> tuple[float, float, float]:
    """(latency, in the node, between nodes) in seconds of one collective, each link at its full speed.

    Rings in a node: an all-gather or a reduce-scatter takes (g-1)α + (g-1)/g · nβ, an all-reduce both (Thakur et al.
    2005, sections 4.1 and 4.5); an all-to-all sends pairwise, (p-1)α + (p-1)/p · nβ (section 4.4). Between k nodes each
    GPU sends the ring's bytes of its part, n/g. That is the least that is possible: in a gather NCCL's ring of W = gk
    ranks sends (W-1)/W · n/g over each link between nodes, on two nodes of eight nearly twice as much, but sends in the
    node at the same time (src/graph/tuning.cc), where a plan adds both. Between nodes an all-reduce takes a tree's
    ⌈lg k⌉ steps, and the others take a ring's k-1, since NCCL has trees for all-reduces alone (NVIDIA/nccl#1473).
    """
    ranks = in_node * nodes
    near, far = cluster.link_in_node or math.inf, cluster.link_between or math.inf  # unknown where nothing uses it
    if kind == "send":
        return (cluster.latency_between, 0.0, size / far) if nodes > 1 else (cluster.latency_in_node, size / near, 0.0)
    if kind == "all_to_all":
        latency = (in_node - 1) * cluster.latency_in_node + (ranks - in_node) * cluster.latency_between
        return latency, size * (in_node - 1) / ranks / near, size * (ranks - in_node) / ranks / far
    twice = 2 if kind == "all_reduce" else 1
    steps = math.ceil(math.log2(nodes)) if kind == "all_reduce" else nodes - 1
    latency = (in_node - 1) * cluster.latency_in_node + steps * cluster.latency_between
    return (
        twice * latency,
        twice * (in_node - 1) / in_node * size / near,
        twice * (nodes - 1) / nodes * size / in_node / far,
    )


def places(ranks: int, stride: int, cluster: Cluster) -> tuple[int, int]:
    """(ranks of a group in one node, nodes) for ranks that lie so far apart: tp inside, then cp, dp, and pp outside."""
    most = min(ranks, max(cluster.gpus_per_node // stride, 1))
    inside = max(size for size in range(1, most + 1) if ranks % size == 0)
    return inside, ranks // inside


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a step on one rank."""

    dimension: str  # of the mesh: tp, cp, ep, dp, replicate, pp
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send
    phase: str  # forward, recompute, backward, step
    what: str
    ranks: int
    stride: int  # how far apart these lie
    count: int
    size: int  # bytes of the whole tensor of one of them
    latency: float = 0  # seconds of one of them; the next two at the links' full speed
    in_node: float = 0
    between: float = 0

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a step."""
        return self.count * self.size * SENT[self.kind](self.ranks)

    def seconds(self, in_node: float = 1.0, between: float = 1.0) -> float:
        """Seconds of all of them, where links reach these shares of their speed."""
        return self.count * (self.latency + self.in_node / in_node + self.between / between)

    def on(self, cluster: Cluster) -> Self:
        """The same with their seconds on a cluster."""
        group = places(self.ranks, self.stride, cluster)
        latency, in_node, between = link_seconds(self.kind, self.size, *group, cluster)
        return replace(self, latency=latency, in_node=in_node, between=between)


def with_seconds(candidates: Iterable[Collective], cluster: Cluster | None) -> list[Collective]:
    """Those that send anything, with their seconds; without a cluster these stay 0."""
    sent = [group for group in candidates if group.ranks > 1 and group.count and group.size]
    return [group.on(cluster) for group in sent] if cluster else sent


def collectives(
    model: Model,
    layout: Layout,
    cluster: Cluster | None = None,
    conventions: Conventions | None = None,
    stage: int = 0,
    sharded: tuple[str, ...] = VOCABULARY,
    **options: bool,
) -> list[Collective]:
    """All of a step on the first rank of a stage; without a cluster, their seconds are 0.

    sharded: which of embedding and head tensor parallelism divides along the vocabulary; options: see activations.
    """
    of_gradients = data_parallel(model, layout, conventions or Conventions(), stage, sharded)
    return with_seconds([*activations(model, layout, stage, sharded, **options), *of_gradients], cluster)


def activations(
    model: Model,
    layout: Layout,
    stage: int = 0,
    sharded: tuple[str, ...] = VOCABULARY,
    *,
    shared_input: bool = True,
    loss_parallel: bool = True,
    split_sends: bool = True,
    early_stop: bool = True,
) -> list[Collective]:
    """Those of activations and their gradients: tensor, context, expert and pipeline parallelism. Some are empty.

    shared_input: query, key and value gather their input once, and sum its gradient once. loss_parallel: the loss reads
    divided logits. split_sends: a stage sends each tensor-parallel rank's part, and the next stage gathers (Narayanan
    et al. 2021, section 4.1); torch.distributed.pipelining sends it whole from each.
    early_stop: recomputation ends before a layer's last output, which nothing needs, as in PyTorch's checkpoint.
    """
    sent: list[Collective] = []
    m, layers = layout.micro_batches, layout.stage_layers(model)[stage]
    first, last = stage == 0, stage == layout.pp - 1
    tokens, bytes_each = layout.tokens(model), layout.element_bytes
    block = tokens * model.width * bytes_each
    forwards = ["forward"] + ["recompute"] * (layout.recompute in ("full", "sac"))
    kept = layout.recompute == "sac"  # what a reduce-scatter or an all-to-all put out

    def tensor_parallel(kind: str, phase: str, what: str, count: int, size: int = block) -> None:
        sent.append(Collective("tp", kind, phase, what, layout.tp, 1, count * m, size))

    # Shoeybi et al. 2019, section 3: two all-reduces in the forward of a layer, two in its backward. With sequence
    # parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2).
    def gather(phase: str, what: str, count: int) -> None:
        tensor_parallel("all_gather", phase, what, count * layout.sequence_parallel)

    def add(phase: str, what: str, count: int) -> None:
        tensor_parallel("reduce_scatter" if layout.sequence_parallel else "all_reduce", phase, what, count)

    inputs = (2 if shared_input else 4) * layers
    repeated = 0 if kept and layout.sequence_parallel else 1 if early_stop else 2
    outputs = {"forward": 2 * layers, "recompute": repeated * layers}
    for phase in forwards:
        gather(phase, "inputs of attention and MLP", inputs)
        add(phase, "outputs of attention and MLP", outputs[phase])
    gather("backward", "gradients of outputs", 2 * layers)
    add("backward", "gradients of inputs", inputs)
    if first:
        add("forward", "embedding", "embedding" in sharded)
        gather("backward", "embedding's gradient", 1)
    if last:
        gather("forward", "input of the head", 1)
        add("backward", "gradient of the head's input", "head" in sharded)
    if layout.sequence_parallel and layout.sharers > 1 and layout.zero == 3:
        # A norm saw its rank's tokens only: fully_shard sums first.
        norms = (model.norms * layers + last) * (2 if model.norm_biases else 1)
        tensor_parallel("all_reduce", "backward", "gradients of norms", norms, model.width * bytes_each)
    if last and "head" in sharded:
        if loss_parallel:  # the largest logit, the sum, and the label's own
            tensor_parallel("all_reduce", "forward", "loss", 3, tokens * SUMMED)
        else:
            padded_logits = tokens * math.ceil(model.vocab / layout.tp) * layout.tp
            tensor_parallel("all_gather", "forward", "logits", 1, padded_logits * bytes_each)

    # Ring attention (Liu et al. 2024): keys and values go round, in backward with their gradients.
    pair = 2 * tokens * model.head_width * max(model.kv_heads // layout.tp, 1) * bytes_each
    rounds = [(phase, "keys and values", layout.cp - 1) for phase in [*forwards, "backward"]]
    for phase, what, count in [*rounds, ("backward", "their gradients", layout.cp)]:
        sent.append(Collective("cp", "send", phase, what, layout.cp, layout.tp, count * layers * m, pair))

    # Lepikhin et al. 2021: tokens go to their experts and come back, and so do gradients.
    count = 2 * m * sum(map(model.has_experts, layout.layers_of(model, stage)))
    for phase in ["forward", "backward"] if kept else [*forwards, "backward"]:
        what, size = "tokens to experts and back", block * model.active_experts
        sent.append(Collective("ep", "all_to_all", phase, what, layout.ep, layout.tp, count, size))

    parts = layout.tp if split_sends or layout.sequence_parallel else 1
    stride = layout.tp * layout.data_ranks
    directions = [("forward", "activations", last, first), ("backward", "their gradients", first, last)]
    for phase, what, at_end, at_start in directions:
        sends = m * (layout.interleave - at_end)
        sent.append(Collective("pp", "send", phase, what, layout.pp, stride, sends, block // parts))
        if parts > 1 and not layout.sequence_parallel:
            tensor_parallel("all_gather", phase, RECEIVED, layout.interleave - at_start)
    return sent


def data_parallel(
    model: Model, layout: Layout, conventions: Conventions, stage: int = 0, sharded: tuple[str, ...] = VOCABULARY
) -> Iterator[Collective]:
    """Those of parameters and gradients: DDP's, ZeRO's, fully_shard's or HSDP's. Some are empty.

    DDP sends 2Ψ, ZeRO-1 and 2 as much, ZeRO-3 3Ψ (Rajbhandari et al. 2020, section 7). With accumulation ZeRO-2's
    reduce and ZeRO-3's gathers and reduce repeat for each micro-batch (convention gather: "each"), ZeRO-1's do not.
    DDP's all-reduce is given as one; it sends buckets of 25 MiB.
    """
    for unit in units_of(model, layout, stage, sharded):
        yield from of_unit(unit, layout, conventions)


def of_unit(unit: Unit, layout: Layout, conventions: Conventions) -> Iterator[Collective]:
    """What a unit's parameters and gradients need."""
    ranks, stride = layout.data_ranks // unit.apart, layout.tp * unit.apart
    sharers = min(layout.sharers, ranks)
    repeated = layout.micro_batches if layout.zero >= 2 and conventions.gather == "each" else 1
    parts = sharers if layout.zero == 3 else 1  # fully_shard fills each tensor's last rows up: all parts are equal
    numbers = sum(math.ceil(rows / parts) * parts * columns * copies for rows, columns, copies in unit.shapes)
    weights = numbers * layout.element_bytes
    gradients = numbers * reduced_bytes(conventions)

    def among_sharers(kind: str, phase: str, count: int, size: int) -> Collective:
        return Collective("dp", kind, phase, unit.what, sharers, stride, unit.times * count, size)

    if layout.zero == 3:
        yield among_sharers("all_gather", "forward", repeated, weights)
        # The root module keeps its parameters until its backward has ended.
        if unit.what != OUTSIDE and conventions.gather == "each":
            yield among_sharers("all_gather", "backward", repeated, weights)
    if layout.zero:
        yield among_sharers("reduce_scatter", "backward", repeated, gradients)
    if layout.zero in (1, 2):
        yield among_sharers("all_gather", "step", 1, weights)
    dimension, copies, size = "replicate" if layout.zero else "dp", ranks // sharers, gradients // sharers
    count = unit.times * repeated
    yield Collective(dimension, "all_reduce", "backward", unit.what, copies, stride * sharers, count, size)
