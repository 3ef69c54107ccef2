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
        """Seconds until the collective has ended: one part comes after the other."""
        return self.latency + self.in_node + self.between


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a step on one rank."""

    dimension: str  # of the mesh: tp, cp, ep, dp, replicate, pp
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send
    phase: str  # forward, recompute, backward, step
    what: str  # the tensors, in words
    ranks: int  # of the group
    stride: int  # the difference between the numbers of two neighbours in the group
    count: int  # in a step
    size: int  # bytes of the whole tensor of one of them
    # Of an all-to-all that sends a token to each node only once: on how many ranks a token is needed, and for how many
    # of its experts a node is drawn at random (see dispatch_time). draws is 0 for a usual all-to-all, which sends each
    # copy from rank to rank.
    copies: int = 0
    draws: int = 0
    time: LinkTime = LinkTime()  # of one of them; 0 without a cluster

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a step."""
        return self.count * self.size * SENT[self.kind](self.ranks)

    def seconds(self, in_node: float = 1.0, between: float = 1.0) -> float:
        """Seconds of all of them together, where links reach these shares of their speed."""
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
    """All collectives of a step on the first rank of a stage; without a cluster, their seconds are 0.

    sharded: which of embedding and head tensor parallelism divides along the vocabulary. options: those of
    ``activations``.
    """
    conventions = conventions or Conventions()
    of_activations = activations(model, layout, stage, sharded, dispatch=conventions.dispatch, **options)
    of_parameters = data_parallel(model, layout, conventions, stage, sharded)
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
    dispatch: str = "rank",
) -> list[Collective]:
    """The collectives of tensor, context, expert and pipeline parallelism on a stage. Some have one rank or no bytes.

    shared_input: query, key and value gather their input once and sum its gradient once, not each on its own.
    loss_parallel: the loss reads logits that stay divided along the vocabulary.
    split_sends: a stage sends each tensor-parallel rank's part, and the next stage gathers the parts (Narayanan et al.
    2021, section 4.1); torch.distributed.pipelining sends the whole tensor from each rank.
    early_stop: recomputation ends before a layer's last output, which nothing needs, as in PyTorch's checkpoint.
    dispatch: the convention of that name.
    """
    return [
        *of_tensor_parallelism(model, layout, stage, sharded, shared_input, loss_parallel, early_stop),
        *of_context_parallelism(model, layout, stage),
        *of_expert_parallelism(model, layout, stage, dispatch),
        *of_pipeline(model, layout, stage, split_sends),
    ]


def forward_phases(layout: Layout) -> list[str]:
    """The phases of a step in which the layers' forward runs."""
    if layout.recomputes_layers:
        return ["forward", "recompute"]
    return ["forward"]


def hidden_bytes(model: Model, layout: Layout) -> int:
    """Bytes of the hidden states of one micro-batch, as one layer gives them to the next."""
    return layout.tokens(model) * model.width * layout.element_bytes


def of_tensor_parallelism(
    model: Model,
    layout: Layout,
    stage: int,
    sharded: tuple[str, ...],
    shared_input: bool,
    loss_parallel: bool,
    early_stop: bool,
) -> list[Collective]:
    """The collectives by which tensor-parallel ranks put their parts of activations and gradients together.

    The parameters are those of ``activations``.
    """
    result = of_tensor_parallel_layers(model, layout, stage, shared_input, early_stop)
    if stage == 0:
        if "embedding" in sharded:
            result.append(sum_hidden(model, layout, "forward", "embedding", times=1))
        result += gather_hidden(model, layout, "backward", "embedding's gradient", times=1)

    is_last = stage == layout.pp - 1
    if is_last:
        result += gather_hidden(model, layout, "forward", "input of the head", times=1)
        if "head" in sharded:
            result.append(sum_hidden(model, layout, "backward", "gradient of the head's input", times=1))
    result += of_norms(model, layout, stage)
    if is_last and "head" in sharded:
        result.append(of_loss(model, layout, loss_parallel))
    return result


def of_tensor_parallel_layers(
    model: Model, layout: Layout, stage: int, shared_input: bool, early_stop: bool
) -> list[Collective]:
    """The collectives of tensor-parallel ranks in the layers of a stage, on hidden states and their gradients.

    A layer has two all-reduces in the forward and two in the backward (Shoeybi et al. 2019, section 3). With sequence
    parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2).

    shared_input: query, key and value gather their input once, not each on its own. early_stop: recomputation ends
    before a layer's last output.
    """
    layers = layout.stage_layers(model)[stage]
    # The input of the MLP, and that of attention: once, or for query, key and value each.
    inputs = 2 if shared_input else 4
    result = []
    for phase in forward_phases(layout):
        outputs = 2  # attention's and the MLP's
        if phase == "recompute":
            outputs = recomputed_outputs(layout, early_stop)
        result += gather_hidden(model, layout, phase, "inputs of attention and MLP", times=inputs * layers)
        result.append(sum_hidden(model, layout, phase, "outputs of attention and MLP", times=outputs * layers))
    result += gather_hidden(model, layout, "backward", "gradients of outputs", times=2 * layers)
    result.append(sum_hidden(model, layout, "backward", "gradients of inputs", times=inputs * layers))
    return result


def recomputed_outputs(layout: Layout, early_stop: bool) -> int:
    """How many of a layer's two outputs, attention's and the MLP's, tensor-parallel ranks sum again in a recomputation.

    The MLP's output is the layer's result, which the backward does not need. With early_stop, as in PyTorch's
    checkpoint, recomputation ends before it.
    """
    if layout.recompute == "sac" and layout.sequence_parallel:
        return 0  # Checkpointing of operations keeps the output of each reduce-scatter.
    return 1 if early_stop else 2


def of_norms(model: Model, layout: Layout, stage: int) -> list[Collective]:
    """The all-reduces of the norms' gradients among tensor-parallel ranks, under fully_shard with sequence parallelism.

    A norm saw only the tokens of its rank, so its gradient is summed before fully_shard reduces it.
    """
    is_divided = layout.zero == 3 and layout.sharers > 1
    if not layout.sequence_parallel or not is_divided:
        return []
    norms = model.norms * layout.stage_layers(model)[stage]
    if stage == layout.pp - 1:
        norms += 1  # the norm behind the last layer
    tensors_of_norm = 2 if model.norm_biases else 1
    size = model.width * layout.element_bytes
    return [tensor_collective(layout, "all_reduce", "backward", "gradients of norms", norms * tensors_of_norm, size)]


def of_loss(model: Model, layout: Layout, loss_parallel: bool) -> Collective:
    """What tensor-parallel ranks exchange for the loss, since each has the logits of a part of the vocabulary.

    With loss_parallel the logits stay divided. Three numbers of each token are summed, or their largest found: the
    largest logit, the sum of exponentials, and the logit of the label. Otherwise each rank gathers all logits.
    """
    tokens = layout.tokens(model)
    if loss_parallel:
        numbers = 3
        return tensor_collective(layout, "all_reduce", "forward", "loss", numbers, size=tokens * FLOAT32_BYTES)
    padded_vocab = math.ceil(model.vocab / layout.tp) * layout.tp
    size = tokens * padded_vocab * layout.element_bytes
    return tensor_collective(layout, "all_gather", "forward", "logits", times=1, size=size)


def gather_hidden(model: Model, layout: Layout, phase: str, what: str, times: int) -> list[Collective]:
    """All-gathers of hidden states, or of their gradients, among tensor-parallel ranks; ``times`` a micro-batch.

    Only with sequence parallelism does a rank have a part of the tokens alone. Otherwise it has all, and the list is
    empty.
    """
    if not layout.sequence_parallel:
        return []
    return [tensor_collective(layout, "all_gather", phase, what, times, size=hidden_bytes(model, layout))]


def sum_hidden(model: Model, layout: Layout, phase: str, what: str, times: int) -> Collective:
    """Sums of hidden states, or of their gradients, over tensor-parallel ranks; ``times`` a micro-batch.

    An all-reduce gives each rank the sum of all tokens. With sequence parallelism a reduce-scatter gives it that of its
    own tokens.
    """
    kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
    return tensor_collective(layout, kind, phase, what, times, size=hidden_bytes(model, layout))


def tensor_collective(layout: Layout, kind: str, phase: str, what: str, times: int, size: int) -> Collective:
    """Equal collectives of ``size`` bytes among tensor-parallel ranks, ``times`` for each micro-batch."""
    return Collective(
        dimension="tp",
        kind=kind,
        phase=phase,
        what=what,
        ranks=layout.tp,
        stride=1,
        count=times * layout.micro_batches,
        size=size,
    )


def of_context_parallelism(model: Model, layout: Layout, stage: int) -> list[Collective]:
    """The sends of ring attention (Liu et al. 2024): keys and values go round, in backward with their gradients.

    A rank begins with the keys and values of its own tokens, so those of the cp ranks meet all queries after cp - 1
    sends.
    """
    layers = layout.stage_layers(model)[stage]
    to_all_others = layout.cp - 1  # sends in each layer
    result = []
    for phase in [*forward_phases(layout), "backward"]:
        result.append(ring_sends(model, layout, phase, "keys and values", times=to_all_others * layers))
    # A gradient goes one step further than its keys and values, back to the rank that they came from.
    back_to_the_first = layout.cp
    result.append(ring_sends(model, layout, "backward", "their gradients", times=back_to_the_first * layers))
    return result


def ring_sends(model: Model, layout: Layout, phase: str, what: str, times: int) -> Collective:
    """Sends of the keys and values of a rank's tokens to the next rank of a ring; ``times`` for each micro-batch."""
    kv_heads = max(model.kv_heads // layout.tp, 1)  # Tensor-parallel ranks that outnumber them have copies.
    key_or_value = layout.tokens(model) * model.head_width * kv_heads * layout.element_bytes  # bytes
    return Collective(
        dimension="cp",
        kind="send",
        phase=phase,
        what=what,
        ranks=layout.cp,
        stride=layout.tp,
        count=times * layout.micro_batches,
        size=2 * key_or_value,
    )


def of_expert_parallelism(model: Model, layout: Layout, stage: int, dispatch: str) -> list[Collective]:
    """The all-to-alls that bring tokens to their experts and back, and the gradients (Lepikhin et al. 2021).

    dispatch: "rank" sends a copy of a token to each of its experts. "node" sends one to each node that has some of
    them, and copies it there. "neighbours" does that, too, but a token's experts are side by side, on few ranks.
    """
    if layout.ep == 1:
        return []  # Each rank has all experts, or the model has none.
    copies = model.active_experts  # of each token
    draws = 0
    if dispatch == "node":
        draws = model.active_experts  # Each expert may be on any node.
    elif dispatch == "neighbours":
        experts_of_rank = model.experts // layout.ep
        copies = math.ceil(model.active_experts / experts_of_rank)
        draws = 1  # All of a token's experts are where the first one is.
    phases = [*forward_phases(layout), "backward"]
    if layout.recompute == "sac":
        phases.remove("recompute")  # The output of an all-to-all is kept, so that it is not sent again.

    expert_layers = sum(model.has_experts(layer) for layer in layout.layers_of(model, stage))
    there_and_back = 2
    result = []
    for phase in phases:
        result.append(
            Collective(
                dimension="ep",
                kind="all_to_all",
                phase=phase,
                what="tokens to experts and back",
                ranks=layout.ep,
                stride=layout.tp,
                count=there_and_back * layout.micro_batches * expert_layers,
                size=hidden_bytes(model, layout) * copies,
                copies=copies,
                draws=draws,
            )
        )
    return result


def of_pipeline(model: Model, layout: Layout, stage: int, split_sends: bool) -> list[Collective]:
    """The sends of activations and gradients between stages, and the gathers of what arrives in parts.

    A stage has ``interleave`` parts of the model, so a micro-batch comes to it as often, and leaves it as often. Only
    the model's first part receives nothing, because it reads the data, and its last part sends nothing, because it
    computes the loss. split_sends: each tensor-parallel rank sends a part of the hidden states, not all of them.
    """
    arrivals = layout.interleave  # of activations, for each micro-batch
    departures = layout.interleave
    if stage == 0:
        arrivals -= 1
    if stage == layout.pp - 1:
        departures -= 1
    hidden = hidden_bytes(model, layout)
    # With sequence parallelism a rank has only its part of the hidden states, and the next stage goes on with parts.
    is_split = split_sends or layout.sequence_parallel
    is_gathered = split_sends and not layout.sequence_parallel and layout.tp > 1
    sent_bytes = hidden // layout.tp if is_split else hidden

    # A gradient goes back the way that its activation came, so what arrived now departs.
    result = []
    for phase, what, sends, receives in (
        ("forward", "activations", departures, arrivals),
        ("backward", "their gradients", arrivals, departures),
    ):
        result.append(
            Collective(
                dimension="pp",
                kind="send",
                phase=phase,
                what=what,
                ranks=layout.pp,
                stride=layout.tp * layout.data_ranks,
                count=sends * layout.micro_batches,
                size=sent_bytes,
            )
        )
        if is_gathered:
            result.append(tensor_collective(layout, "all_gather", phase, RECEIVED, times=receives, size=hidden))
    return result


# --- Parameters and gradients -----------------------------------------------------------------------------------------


def data_parallel(
    model: Model, layout: Layout, conventions: Conventions, stage: int = 0, sharded: tuple[str, ...] = VOCABULARY
) -> list[Collective]:
    """How the data-parallel ranks of a stage exchange parameters and gradients in a step: its collectives.

    Some of them have one rank or no bytes. sharded: which of embedding and head tensor parallelism divides along the
    vocabulary, so that a rank has only a part of them.

    The layout may be that of DDP, ZeRO, fully_shard or HSDP. What they send follows from the units, which are what is
    gathered or reduced at once, such as a layer: see ``unit_collectives``. DDP's all-reduce is given as one for each
    unit, although DDP sends buckets of 25 MiB.
    """
    result = []
    for unit in units_of(model, layout, stage, sharded):
        result += unit_collectives(unit, layout, conventions)
    return result


def unit_collectives(unit: Unit, layout: Layout, conventions: Conventions) -> list[Collective]:
    """The collectives that the parameters and gradients of equal units need in a step.

    A Unit stands for the layers of a stage, for their experts, or for what is outside the layers.

    DDP (zero 0) all-reduces gradients. ZeRO-1 and 2 reduce-scatter them, and gather the weights after the step, which
    sends as much. ZeRO-3, as fully_shard does it, gathers the weights before a unit's forward and backward instead, and
    sends half as much again (Rajbhandari et al. 2020, section 7).
    """
    gathers_each = not conventions.gathers_once(layout.pp)
    repetitions = 1  # in a step
    if layout.zero >= 2 and gathers_each:
        # Nothing divided is kept whole from one micro-batch to the next, so each of them communicates.
        repetitions = layout.micro_batches
    parts = sharers_of(unit, layout) if layout.zero == 3 else 1
    padded = padded_numbers(unit, parts)
    weight_bytes = padded * layout.element_bytes
    gradient_bytes = padded * reduced_bytes(conventions)

    result = []
    if layout.zero == 3:
        result.append(among_sharers(unit, layout, "all_gather", "forward", repetitions, weight_bytes))
        # The root module, which holds what is outside the layers, keeps its parameters until its backward has ended.
        if unit.what != OUTSIDE and gathers_each:
            result.append(among_sharers(unit, layout, "all_gather", "backward", repetitions, weight_bytes))
    if layout.zero >= 1:
        result.append(among_sharers(unit, layout, "reduce_scatter", "backward", repetitions, gradient_bytes))
    if layout.zero in (1, 2):
        result.append(among_sharers(unit, layout, "all_gather", "step", repetitions=1, size=weight_bytes))
    result.append(among_copies(unit, layout, repetitions, gradient_bytes))
    return result


def holders_of(unit: Unit, layout: Layout) -> int:
    """How many data-parallel ranks compute with the same parameters of a unit: of divided experts, not all ranks."""
    return layout.data_ranks // unit.expert_ranks


def sharers_of(unit: Unit, layout: Layout) -> int:
    """Among how many of these ranks ZeRO divides the unit; 1 if it divides nothing."""
    return min(layout.sharers, holders_of(unit, layout))


def among_sharers(unit: Unit, layout: Layout, kind: str, phase: str, repetitions: int, size: int) -> Collective:
    """Collectives of ``size`` bytes among the ranks that ZeRO divides a unit among; so many for each unit and step."""
    return Collective(
        dimension="dp",
        kind=kind,
        phase=phase,
        what=unit.what,
        ranks=sharers_of(unit, layout),
        stride=layout.tp * unit.expert_ranks,
        count=unit.times * repetitions,
        size=size,
    )


def among_copies(unit: Unit, layout: Layout, repetitions: int, gradient_bytes: int) -> Collective:
    """All-reduces of a unit's gradients among ranks that hold the same shard of it; so many for each unit and step.

    Under DDP the shard is the whole unit, and all ranks hold it. Under HSDP one rank of each group of sharers holds it.
    The ranks of such a group have numbers side by side, so those with the same shard are a group apart.
    """
    sharers = sharers_of(unit, layout)
    stride_of_sharers = layout.tp * unit.expert_ranks
    return Collective(
        dimension="dp" if layout.zero == 0 else "replicate",
        kind="all_reduce",
        phase="backward",
        what=unit.what,
        ranks=holders_of(unit, layout) // sharers,
        stride=stride_of_sharers * sharers,
        count=unit.times * repetitions,
        size=gradient_bytes // sharers,
    )


def padded_numbers(unit: Unit, parts: int) -> int:
    """How many numbers a unit has if each tensor's rows are padded, as by fully_shard, to divide into equal parts."""
    numbers = 0
    for tensor in unit.tensors:
        padded_rows = math.ceil(tensor.rows / parts) * parts
        numbers += padded_rows * tensor.columns * tensor.copies
    return numbers


# --- Seconds ----------------------------------------------------------------------------------------------------------


def with_seconds(candidates: Iterable[Collective], cluster: Cluster | None) -> list[Collective]:
    """Leave out the collectives that send nothing; give the others their seconds on a cluster, if there is one."""
    sending = [group for group in candidates if group.ranks > 1 and group.count and group.size]
    if cluster is None:
        return sending
    timed = []
    for group in sending:
        in_node = ranks_in_node(group.ranks, group.stride, cluster)
        nodes = group.ranks // in_node
        sends_once_to_each_node = group.draws > 0
        if sends_once_to_each_node:
            size_of_copy = group.size / group.copies
            time = dispatch_time(size_of_copy, group.copies, group.draws, in_node, nodes, cluster)
        else:
            time = link_time(group.kind, group.size, in_node, nodes, cluster)
        timed.append(replace(group, time=time))
    return timed


def dispatch_time(size: float, copies: int, draws: int, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """Seconds of an all-to-all of tokens that sends each of them once to every node that needs it, as DeepEP does.

    size: bytes of one copy of all tokens. copies: on how many ranks a token is needed. draws: for how many experts its
    nodes are drawn, each independently of the others.

    Experts are spread evenly, so that a token needs a given one of n nodes for k draws with a probability of
    1 - (1 - 1/n)^k. In a node that got a token, the GPU that received it sends the copies on (DeepEP's README, normal
    kernels with NVLink and RDMA forwarding).
    """
    share_of_nodes = 1 - (1 - 1 / nodes) ** draws
    sent_between = size * (nodes - 1) * share_of_nodes
    sent_in_node = size * copies * (in_node - 1) / in_node
    # Nothing is ever sent over a link whose speed is not given, so its time is 0.
    speed_in_node = cluster.link_in_node or math.inf
    speed_between = cluster.link_between or math.inf
    return LinkTime(
        latency=(in_node - 1) * cluster.latency_in_node + (nodes - 1) * cluster.latency_between,
        in_node=sent_in_node / speed_in_node,
        between=sent_between / speed_between,
    )


def ranks_in_node(ranks: int, stride: int, cluster: Cluster) -> int:
    """How many ranks of a group share a node: a divisor of the group's size, so that all nodes have equally many.

    Each rank of the group is ``stride`` ranks away from the one before, so only every stride-th GPU of a node is in it.
    """
    places_in_node = max(cluster.gpus_per_node // stride, 1)
    most = min(ranks, places_in_node)
    return max(size for size in range(1, most + 1) if ranks % size == 0)


def link_time(kind: str, size: float, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """Seconds of one collective of so many bytes, among ``in_node`` ranks in each of ``nodes`` nodes.

    With p ranks, a latency α and β seconds for each byte, an all-gather or a reduce-scatter on a ring takes
    (p-1)α + (p-1)/p · nβ for n bytes, an all-reduce both of them (Thakur et al. 2005, sections 4.1 and 4.5), and a
    pairwise all-to-all (p-1)α + (p-1)/p · nβ (section 4.4).

    A ring is planned in each node, and then rings between the nodes, in which each of g GPUs of a node sends its part
    of n/g bytes. That is the least that is possible. NCCL's own ring over all W ranks sends (W-1)/W · n/g over each
    link between nodes, on two nodes of eight nearly twice as much, but sends in the node at the same time
    (src/graph/tuning.cc), where this plan adds both times.

    For the latency between k nodes, an all-reduce takes the ⌈lg k⌉ steps of a tree, and the others the k-1 steps of a
    ring, because NCCL has trees for all-reduces only (NVIDIA/nccl#1473).
    """
    # Nothing is ever sent over a link whose speed is not given, so its time is 0.
    speed_in_node = cluster.link_in_node or math.inf
    speed_between = cluster.link_between or math.inf
    if kind == "send":
        if nodes > 1:
            return LinkTime(latency=cluster.latency_between, between=size / speed_between)
        return LinkTime(latency=cluster.latency_in_node, in_node=size / speed_in_node)
    if kind == "all_to_all":
        ranks = in_node * nodes
        peers_in_node = in_node - 1
        peers_in_other_nodes = ranks - in_node
        return LinkTime(
            latency=peers_in_node * cluster.latency_in_node + peers_in_other_nodes * cluster.latency_between,
            in_node=size * peers_in_node / ranks / speed_in_node,
            between=size * peers_in_other_nodes / ranks / speed_between,
        )
    rounds = 1
    steps_between = nodes - 1
    if kind == "all_reduce":
        rounds = 2  # a reduce-scatter, then an all-gather
        steps_between = math.ceil(math.log2(nodes))
    latency = (in_node - 1) * cluster.latency_in_node + steps_between * cluster.latency_between
    return LinkTime(
        latency=rounds * latency,
        in_node=rounds * (in_node - 1) / in_node * size / speed_in_node,
        between=rounds * (nodes - 1) / nodes * size / in_node / speed_between,
    )
