"""The collectives of a step on one rank: kind, count, bytes, and seconds at the links' full speed. Read by the plan.

Sizes are bytes of the whole tensor: what an all-reduce sums, an all-gather makes and a reduce-scatter takes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import OUTSIDE, VOCABULARY, Unit, reduced_bytes, units_of
from helpers.planner.model import Model

# Bytes that each rank sends, as a share of the size: nccl-tests, doc/PERFORMANCE.md, where busbw = size/time times it.
SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "send": lambda ranks: 1,
}
RECEIVED = "what a stage received"  # gathered by its tensor-parallel ranks, each of which was sent a part
FLOAT32_BYTES = 4  # of the numbers that a divided loss sums


@dataclass(frozen=True)
class LinkTime:
    """Seconds of one collective, each link at its full speed."""

    latency: float = 0
    in_node: float = 0
    between: float = 0  # nodes

    @property
    def total(self) -> float:
        return self.latency + self.in_node + self.between


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
    time: LinkTime = LinkTime()  # of one of them; 0 without a cluster

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a step."""
        return self.count * self.size * SENT[self.kind](self.ranks)

    def seconds(self, in_node: float = 1.0, between: float = 1.0) -> float:
        """Seconds of all of them, where links reach these shares of their speed."""
        return self.count * (self.time.latency + self.time.in_node / in_node + self.time.between / between)


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
    of_activations = activations(model, layout, stage, sharded, **options)
    of_parameters = data_parallel(model, layout, conventions or Conventions(), stage, sharded)
    return with_seconds(of_activations + of_parameters, cluster)


# --- Activations and their gradients ----------------------------------------------------------------------------------


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
    """Those of tensor, context, expert and pipeline parallelism. Some are empty.

    shared_input: query, key and value gather their input once, and sum its gradient once. loss_parallel: the loss reads
    divided logits. split_sends: a stage sends each tensor-parallel rank's part, and the next stage gathers (Narayanan
    et al. 2021, section 4.1); torch.distributed.pipelining sends it whole from each.
    early_stop: recomputation ends before a layer's last output, which nothing needs, as in PyTorch's checkpoint.
    """
    result: list[Collective] = []
    m = layout.micro_batches
    layers = layout.stage_layers(model)[stage]
    is_first = stage == 0
    is_last = stage == layout.pp - 1
    tokens = layout.tokens(model)
    size = layout.element_bytes
    hidden = tokens * model.width * size  # bytes of the hidden states of a micro-batch
    forwards = ["forward"]
    if layout.recomputes_layers:
        forwards.append("recompute")

    def tensor_parallel(kind: str, phase: str, what: str, count: int, size: int = hidden) -> None:
        result.append(Collective("tp", kind, phase, what, layout.tp, 1, count * m, size))

    # Shoeybi et al. 2019, section 3: two all-reduces in the forward of a layer, two in its backward. With sequence
    # parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2).
    def gather(phase: str, what: str, count: int) -> None:
        if layout.sequence_parallel:
            tensor_parallel("all_gather", phase, what, count)

    def reduce(phase: str, what: str, count: int) -> None:
        kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        tensor_parallel(kind, phase, what, count)

    # A layer gathers the MLP's input, and attention's: once, or for query, key and value each.
    inputs = 2 if shared_input else 4
    # A layer sums attention's output and the MLP's. The MLP's is the last one, which recomputation may leave out.
    outputs = {"forward": 2, "recompute": 1 if early_stop else 2}
    if layout.recompute == "sac" and layout.sequence_parallel:
        outputs["recompute"] = 0  # The output of a reduce-scatter is kept, so that it is not sent again.
    for phase in forwards:
        gather(phase, "inputs of attention and MLP", inputs * layers)
        reduce(phase, "outputs of attention and MLP", outputs[phase] * layers)
    gather("backward", "gradients of outputs", 2 * layers)
    reduce("backward", "gradients of inputs", inputs * layers)
    if is_first:
        if "embedding" in sharded:
            reduce("forward", "embedding", 1)
        gather("backward", "embedding's gradient", 1)
    if is_last:
        gather("forward", "input of the head", 1)
        if "head" in sharded:
            reduce("backward", "gradient of the head's input", 1)
    if layout.sequence_parallel and layout.sharers > 1 and layout.zero == 3:
        # A norm saw only its rank's tokens, so its gradient is summed before fully_shard reduces it.
        norms = model.norms * layers
        if is_last:
            norms += 1
        tensors = 2 if model.norm_biases else 1
        tensor_parallel("all_reduce", "backward", "gradients of norms", norms * tensors, model.width * size)
    if is_last and "head" in sharded:
        if loss_parallel:
            # The largest logit, the sum, and the label's own.
            tensor_parallel("all_reduce", "forward", "loss", 3, tokens * FLOAT32_BYTES)
        else:
            padded_vocab = math.ceil(model.vocab / layout.tp) * layout.tp
            tensor_parallel("all_gather", "forward", "logits", 1, tokens * padded_vocab * size)

    # Ring attention (Liu et al. 2024): keys and values go round, in backward with their gradients.
    pair = 2 * tokens * model.head_width * max(model.kv_heads // layout.tp, 1) * size

    def context_parallel(phase: str, what: str, count: int) -> None:
        result.append(Collective("cp", "send", phase, what, layout.cp, layout.tp, count * layers * m, pair))

    for phase in (*forwards, "backward"):
        context_parallel(phase, "keys and values", layout.cp - 1)
    context_parallel("backward", "their gradients", layout.cp)

    # Lepikhin et al. 2021: tokens go to their experts and come back, and so do gradients.
    expert_layers = sum(model.has_experts(layer) for layer in layout.layers_of(model, stage))
    phases = [*forwards, "backward"]
    if layout.recompute == "sac":
        phases.remove("recompute")  # The output of an all-to-all is kept, so that it is not sent again.
    for phase in phases:
        what = "tokens to experts and back"
        to_experts = hidden * model.active_experts
        count = 2 * m * expert_layers
        result.append(Collective("ep", "all_to_all", phase, what, layout.ep, layout.tp, count, to_experts))

    parts = 1
    if split_sends or layout.sequence_parallel:
        parts = layout.tp
    stride = layout.tp * layout.data_ranks

    def pipeline(phase: str, what: str, sends: int, receives: int) -> None:
        result.append(Collective("pp", "send", phase, what, layout.pp, stride, sends * m, hidden // parts))
        if parts > 1 and not layout.sequence_parallel:
            tensor_parallel("all_gather", phase, RECEIVED, receives)

    # How often a micro-batch comes from the stage before, and goes to the next: not into the model's first part, and
    # not out of its last one. Gradients go the other way.
    arrivals = layout.interleave - 1 if is_first else layout.interleave
    departures = layout.interleave - 1 if is_last else layout.interleave
    pipeline("forward", "activations", sends=departures, receives=arrivals)
    pipeline("backward", "their gradients", sends=arrivals, receives=departures)
    return result


# --- Parameters and gradients -----------------------------------------------------------------------------------------


def data_parallel(
    model: Model, layout: Layout, conventions: Conventions, stage: int = 0, sharded: tuple[str, ...] = VOCABULARY
) -> list[Collective]:
    """Those of DDP, ZeRO, fully_shard or HSDP. Some are empty.

    DDP sends 2Ψ, ZeRO-1 and 2 as much, ZeRO-3 3Ψ (Rajbhandari et al. 2020, section 7). With accumulation ZeRO-2's
    reduce and ZeRO-3's gathers and reduce repeat for each micro-batch (convention gather: "each"), ZeRO-1's do not.
    DDP's all-reduce is given as one; it sends buckets of 25 MiB.
    """
    result = []
    for unit in units_of(model, layout, stage, sharded):
        result += unit_collectives(unit, layout, conventions)
    return result


def unit_collectives(unit: Unit, layout: Layout, conventions: Conventions) -> list[Collective]:
    """What a unit's parameters and gradients need."""
    result: list[Collective] = []
    ranks = layout.data_ranks // unit.expert_ranks
    stride = layout.tp * unit.expert_ranks
    sharers = min(layout.sharers, ranks)
    gathers_each = conventions.gather == "each"
    repeated = 1
    if layout.zero >= 2 and gathers_each:
        repeated = layout.micro_batches
    # fully_shard pads each tensor's rows, so that all ranks send equal parts.
    parts = 1
    if layout.zero == 3:
        parts = sharers
    padded = 0
    for tensor in unit.tensors:
        padded += math.ceil(tensor.rows / parts) * parts * tensor.columns * tensor.copies
    weights = padded * layout.element_bytes
    gradients = padded * reduced_bytes(conventions)

    def among_sharers(kind: str, phase: str, count: int, size: int) -> None:
        result.append(Collective("dp", kind, phase, unit.what, sharers, stride, unit.times * count, size))

    if layout.zero == 3:
        among_sharers("all_gather", "forward", repeated, weights)
        # The root module keeps its parameters until its backward has ended.
        if unit.what != OUTSIDE and gathers_each:
            among_sharers("all_gather", "backward", repeated, weights)
    if layout.zero >= 1:
        among_sharers("reduce_scatter", "backward", repeated, gradients)
    if layout.zero in (1, 2):
        among_sharers("all_gather", "step", 1, weights)
    # DDP sums all gradients over all ranks, HSDP each shard over the copies of it.
    dimension = "replicate" if layout.zero else "dp"
    copies = ranks // sharers
    count = unit.times * repeated
    size = gradients // sharers
    result.append(Collective(dimension, "all_reduce", "backward", unit.what, copies, stride * sharers, count, size))
    return result


# --- Seconds ----------------------------------------------------------------------------------------------------------


def with_seconds(candidates: Iterable[Collective], cluster: Cluster | None) -> list[Collective]:
    """Those that send anything, with their seconds on a cluster."""
    sending = [group for group in candidates if group.ranks > 1 and group.count and group.size]
    if cluster is None:
        return sending
    timed = []
    for group in sending:
        in_node = ranks_in_node(group.ranks, group.stride, cluster)
        time = link_time(group.kind, group.size, in_node, group.ranks // in_node, cluster)
        timed.append(replace(group, time=time))
    return timed


def ranks_in_node(ranks: int, stride: int, cluster: Cluster) -> int:
    """How many ranks of a group are in one node, if they lie so far apart: tp inside, then cp, dp, and pp outside."""
    most = min(ranks, max(cluster.gpus_per_node // stride, 1))
    return max(size for size in range(1, most + 1) if ranks % size == 0)


def link_time(kind: str, size: float, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """The LinkTime of one collective among so many ranks in each of so many nodes.

    Rings in a node: an all-gather or a reduce-scatter takes (g-1)α + (g-1)/g · nβ, an all-reduce both (Thakur et al.
    2005, sections 4.1 and 4.5); an all-to-all sends pairwise, (p-1)α + (p-1)/p · nβ (section 4.4). Between k nodes each
    GPU sends the ring's bytes of its part, n/g. That is the least that is possible: in a gather NCCL's ring of W = gk
    ranks sends (W-1)/W · n/g over each link between nodes, on two nodes of eight nearly twice as much, but sends in the
    node at the same time (src/graph/tuning.cc), where a plan adds both. Between nodes an all-reduce takes a tree's
    ⌈lg k⌉ steps, and the others take a ring's k-1, since NCCL has trees for all-reduces alone (NVIDIA/nccl#1473).
    """
    # A link that is not known is one that nothing goes over.
    near = cluster.link_in_node or math.inf
    far = cluster.link_between or math.inf
    if kind == "send":
        if nodes > 1:
            return LinkTime(latency=cluster.latency_between, between=size / far)
        return LinkTime(latency=cluster.latency_in_node, in_node=size / near)
    if kind == "all_to_all":
        ranks = in_node * nodes
        return LinkTime(
            latency=(in_node - 1) * cluster.latency_in_node + (ranks - in_node) * cluster.latency_between,
            in_node=size * (in_node - 1) / ranks / near,
            between=size * (ranks - in_node) / ranks / far,
        )
    rounds = 1
    steps_between = nodes - 1
    if kind == "all_reduce":
        rounds = 2
        steps_between = math.ceil(math.log2(nodes))
    latency = (in_node - 1) * cluster.latency_in_node + steps_between * cluster.latency_between
    return LinkTime(
        latency=rounds * latency,
        in_node=rounds * (in_node - 1) / in_node * size / near,
        between=rounds * (nodes - 1) / nodes * size / in_node / far,
    )
