"""The collectives of a step on one rank: kind, count, bytes, and seconds at the links' full speed. Read by the plan.

Sizes are the bytes of the whole tensor: what an all-reduce sums, an all-gather makes and a reduce-scatter takes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from helpers.planner.cluster import Cluster
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import OUTSIDE, VOCABULARY, Unit, reduced_bytes, units_of
from helpers.planner.model import Model
from helpers.planner.records import refuse

# The name of the all-gathers by which tensor-parallel ranks, each of which was sent a part, make what a stage received.
RECEIVED = "what a stage received"
FLOAT32_BYTES = 4
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def share_sent(kind: str, ranks: int) -> float:
    """The bytes that each of so many ranks sends in a collective, as a share of the whole tensor's.

    kind: one of KINDS; a PlanError is raised for any other. Source: nccl-tests, doc/PERFORMANCE.md, where the bus
    bandwidth is this share times size / time.
    """
    if kind not in KINDS:
        refuse(f"{kind!r} is not a collective that the planner knows", f"one of {', '.join(KINDS)}")
    if kind == "send":
        return 1
    if kind == "all_reduce":  # a reduce-scatter, then an all-gather
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


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
    """A collective of one rank, which happens ``count`` times in a step."""

    dimension: str  # of the mesh: tp, cp, ep, dp, replicate or pp
    kind: str  # one of KINDS
    phase: str  # forward, recompute, backward or step
    what: str  # the tensors, in words, such as "keys and values"
    ranks: int  # how many ranks the group has
    stride: int  # the difference between the numbers of two neighbours in the group
    count: int  # how often it happens in a step
    size: int  # bytes of the whole tensor, each time
    # Only for an all-to-all that sends each token just once to every node that needs it (see dispatch_time):
    copies: int = 0  # on how many ranks each token is needed
    draws: int = 0  # how many of its experts may each be on any node, independently of the others; otherwise 0
    time: LinkTime = LinkTime()  # of one time; 0 without a cluster

    @property
    def sent(self) -> float:
        """Bytes that this rank sends in a step."""
        return self.count * self.size * share_sent(self.kind, self.ranks)

    def seconds(self, in_node: float = 1.0, between: float = 1.0) -> float:
        """Seconds of all ``count`` times together, if the links reach these shares of their speed."""
        seconds_each_time = self.time.latency + self.time.in_node / in_node + self.time.between / between
        return self.count * seconds_each_time


def collectives(
    model: Model,
    layout: Layout,
    cluster: Cluster | None = None,
    conventions: Conventions | None = None,
    stage: int = 0,
    sharded: tuple[str, ...] = VOCABULARY,
    **options: bool,
) -> list[Collective]:
    """All collectives of a step on the first rank of a pipeline stage. Without a cluster, their seconds are 0.

    sharded: which of "embedding" and "head" tensor parallelism divides along the vocabulary. options: keyword arguments
    of ``activations``, such as early_stop=False.
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
    """The collectives of tensor, context, expert and pipeline parallelism that a stage needs in a step.

    Some of them may have only one rank or no bytes. They send nothing, and ``with_seconds`` leaves them out.

    sharded: which of "embedding" and "head" tensor parallelism divides along the vocabulary.
    shared_input: query, key and value gather their input once and sum its gradient once, not each on its own.
    loss_parallel: the loss reads logits that stay divided along the vocabulary.
    split_sends: a stage sends each tensor-parallel rank's part, and the next stage gathers the parts (Narayanan et al.
    2021, section 4.1); torch.distributed.pipelining sends the whole tensor from each rank.
    early_stop: recomputation ends before a layer's last output, which nothing needs, as in PyTorch's checkpoint.
    dispatch: how tokens are sent to their experts: by "rank", by "node", or to "neighbours" (see expert_all_to_alls).
    """
    return [
        *tensor_parallel_collectives(model, layout, stage, sharded, shared_input, loss_parallel, early_stop),
        *ring_attention_sends(model, layout, stage),
        *expert_all_to_alls(model, layout, stage, dispatch),
        *pipeline_sends(model, layout, stage, split_sends),
    ]


def forward_phases(layout: Layout) -> list[str]:
    """The phases of a step in which the forward of the layers runs: "forward" and perhaps "recompute"."""
    if layout.recomputes_layers:
        return ["forward", "recompute"]
    return ["forward"]


def hidden_bytes(model: Model, layout: Layout) -> int:
    """Bytes of the hidden states of one micro-batch, as one layer gives them to the next."""
    return layout.tokens(model) * model.width * layout.element_bytes


def tensor_parallel_collectives(
    model: Model,
    layout: Layout,
    stage: int,
    sharded: tuple[str, ...],
    shared_input: bool,
    loss_parallel: bool,
    early_stop: bool,
) -> list[Collective]:
    """The collectives by which tensor-parallel ranks combine their parts of activations and of gradients.

    sharded: which of "embedding" and "head" are divided along the vocabulary. shared_input: query, key and value gather
    their input once, not each on its own. loss_parallel: the loss reads divided logits. early_stop: recomputation ends
    before a layer's last output.
    """
    result = layer_collectives(model, layout, stage, shared_input, early_stop)
    is_first_stage = stage == 0
    if is_first_stage:
        if "embedding" in sharded:
            result.append(sum_hidden(model, layout, "forward", "embedding", times=1))
        result += gather_hidden(model, layout, "backward", "embedding's gradient", times=1)

    is_last_stage = stage == layout.pp - 1
    if is_last_stage:
        result += gather_hidden(model, layout, "forward", "input of the head", times=1)
        if "head" in sharded:
            result.append(sum_hidden(model, layout, "backward", "gradient of the head's input", times=1))
    result += norm_gradient_collectives(model, layout, stage)
    if is_last_stage and "head" in sharded:
        result.append(loss_collective(model, layout, loss_parallel))
    return result


def layer_collectives(
    model: Model, layout: Layout, stage: int, shared_input: bool, early_stop: bool
) -> list[Collective]:
    """The collectives of tensor-parallel ranks in the layers of a stage, on hidden states and their gradients.

    A layer has two all-reduces in the forward and two in the backward (Shoeybi et al. 2019, section 3). With sequence
    parallelism each becomes an all-gather and a reduce-scatter (Korthikanti et al. 2022, section 4.2.2).

    shared_input: query, key and value gather their input once, not each on its own. early_stop: recomputation ends
    before a layer's last output.
    """
    layers = layout.stage_layers(model)[stage]
    if shared_input:
        inputs = 2  # of attention and of the MLP
    else:
        inputs = 4  # of query, key, value and the MLP
    result = []
    for phase in forward_phases(layout):
        if phase == "recompute":
            outputs = recomputed_outputs(layout, early_stop)
        else:
            outputs = 2  # attention's and the MLP's
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
    if early_stop:
        return 1
    return 2


def norm_gradient_collectives(model: Model, layout: Layout, stage: int) -> list[Collective]:
    """The all-reduces of the norms' gradients among tensor-parallel ranks, under fully_shard with sequence parallelism.

    On each rank a norm sees only the rank's own tokens, so its gradient is summed before fully_shard reduces it.
    """
    is_fully_sharded = layout.zero == 3 and layout.sharers > 1
    if not layout.sequence_parallel or not is_fully_sharded:
        return []
    norms = model.norms * layout.stage_layers(model)[stage]
    is_last_stage = stage == layout.pp - 1
    if is_last_stage:
        norms += 1  # the norm behind the last layer
    gradients = norms  # one for the weight of each
    if model.norm_biases:
        gradients += norms
    size = model.width * layout.element_bytes
    return [tensor_collective(layout, "all_reduce", "backward", "gradients of norms", times=gradients, size=size)]


def loss_collective(model: Model, layout: Layout, loss_parallel: bool) -> Collective:
    """What tensor-parallel ranks exchange to compute the loss, because each has the logits of a part of the vocabulary.

    With loss_parallel the logits stay divided, and each token takes three small all-reduces: of the largest logit, of
    the sum of exponentials, and of the logit of the label. Otherwise each rank gathers all logits.
    """
    tokens = layout.tokens(model)
    if loss_parallel:
        all_reduces = 3
        size = tokens * FLOAT32_BYTES  # one number for each token
        return tensor_collective(layout, "all_reduce", "forward", "loss", times=all_reduces, size=size)
    padded_vocab = math.ceil(model.vocab / layout.tp) * layout.tp
    size = tokens * padded_vocab * layout.element_bytes
    return tensor_collective(layout, "all_gather", "forward", "logits", times=1, size=size)


def gather_hidden(model: Model, layout: Layout, phase: str, what: str, times: int) -> list[Collective]:
    """All-gathers of hidden states, or of their gradients, among tensor-parallel ranks; ``times`` a micro-batch.

    They are needed only with sequence parallelism, because each rank has a part of the tokens then. Without it each
    rank has all tokens, and the list is empty.
    """
    if not layout.sequence_parallel:
        return []
    return [tensor_collective(layout, "all_gather", phase, what, times, size=hidden_bytes(model, layout))]


def sum_hidden(model: Model, layout: Layout, phase: str, what: str, times: int) -> Collective:
    """Sums of hidden states, or of their gradients, over tensor-parallel ranks; ``times`` a micro-batch.

    An all-reduce gives each rank the sum for all tokens. With sequence parallelism a reduce-scatter gives it the sum
    for its own tokens.
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


def ring_attention_sends(model: Model, layout: Layout, stage: int) -> list[Collective]:
    """The sends of ring attention (Liu et al. 2024), which pass keys and values around the context-parallel ranks.

    Each of the cp ranks begins with the keys and values of its own tokens. They are passed on cp - 1 times, so that the
    queries of all ranks see them. In the backward their gradients travel with them.
    """
    layers = layout.stage_layers(model)[stage]
    sends_to_all_others = layout.cp - 1  # in each layer
    result = []
    for phase in [*forward_phases(layout), "backward"]:
        result.append(ring_sends(model, layout, phase, "keys and values", times=sends_to_all_others * layers))
    # A gradient is sent once more than its keys and values, back to the rank that they came from.
    sends_around_ring = layout.cp
    result.append(ring_sends(model, layout, "backward", "their gradients", times=sends_around_ring * layers))
    return result


def ring_sends(model: Model, layout: Layout, phase: str, what: str, times: int) -> Collective:
    """Sends of the keys and values of a rank's tokens to the next rank of a ring; ``times`` for each micro-batch.

    phase: "forward", "recompute" or "backward". what: "keys and values" or "their gradients", which are as large.
    """
    # If there are more tensor-parallel ranks than heads, several ranks have a copy of the same head.
    kv_heads_on_rank = max(model.kv_heads // layout.tp, 1)
    key_bytes = layout.tokens(model) * model.head_width * kv_heads_on_rank * layout.element_bytes
    value_bytes = key_bytes
    return Collective(
        dimension="cp",
        kind="send",
        phase=phase,
        what=what,
        ranks=layout.cp,
        stride=layout.tp,
        count=times * layout.micro_batches,
        size=key_bytes + value_bytes,
    )


def expert_all_to_alls(model: Model, layout: Layout, stage: int, dispatch: str) -> list[Collective]:
    """The all-to-alls that bring tokens to their experts and back, and the gradients of both (Lepikhin et al. 2021).

    dispatch: how a token gets to its experts. "rank" sends a copy of it to each of them. "node" sends one copy to each
    node that has some of them, and copies it there. "neighbours" does that, too, but the experts of a token are side by
    side, on few ranks.
    """
    if layout.ep == 1:
        return []  # Each rank has all experts, or the model has none.
    # copies: how many ranks each token is sent to. independent_experts: how many of its experts may each be on any
    # node, which matters only if a token is sent to a node once.
    if dispatch == "neighbours":
        experts_of_rank = model.experts // layout.ep
        copies = math.ceil(model.active_experts / experts_of_rank)
        independent_experts = 1  # The others are beside the first one.
    elif dispatch == "node":
        copies = model.active_experts
        independent_experts = model.active_experts
    else:
        copies = model.active_experts
        independent_experts = 0
    phases = [*forward_phases(layout), "backward"]
    if layout.recompute == "sac":
        phases.remove("recompute")  # The output of an all-to-all is kept, so it is not sent again.

    layers_with_experts = sum(model.has_experts(layer) for layer in layout.layers_of(model, stage))
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
                count=there_and_back * layout.micro_batches * layers_with_experts,
                size=hidden_bytes(model, layout) * copies,
                copies=copies,
                draws=independent_experts,
            )
        )
    return result


def pipeline_sends(model: Model, layout: Layout, stage: int, split_sends: bool) -> list[Collective]:
    """The sends of activations and gradients from one stage to others, and the all-gathers of what arrives in parts.

    A stage has ``layout.interleave`` parts of the model, so each micro-batch arrives at it and leaves it as many times.
    There are two exceptions: the model's first part receives nothing, because it reads the data, and its last part
    sends nothing, because it computes the loss.

    split_sends: each tensor-parallel rank sends a part of the hidden states, not all of them.
    """
    arrivals = layout.interleave  # of a micro-batch's activations at this stage
    if stage == 0:
        arrivals -= 1
    departures = layout.interleave
    if stage == layout.pp - 1:
        departures -= 1

    hidden = hidden_bytes(model, layout)
    forward_sends = stage_sends(layout, "forward", "activations", departures, hidden, split_sends)
    # A gradient is sent back the way that its activation came, so what arrived in the forward departs in the backward.
    backward_sends = stage_sends(layout, "backward", "their gradients", arrivals, hidden, split_sends)
    sends_parts_that_are_gathered = split_sends and not layout.sequence_parallel and layout.tp > 1
    if not sends_parts_that_are_gathered:
        return [forward_sends, backward_sends]
    return [
        forward_sends,
        tensor_collective(layout, "all_gather", "forward", RECEIVED, times=arrivals, size=hidden),
        backward_sends,
        tensor_collective(layout, "all_gather", "backward", RECEIVED, times=departures, size=hidden),
    ]


def stage_sends(layout: Layout, phase: str, what: str, times: int, hidden: int, split_sends: bool) -> Collective:
    """The sends of a rank to other pipeline stages, ``times`` for each micro-batch.

    hidden: bytes of the hidden states of a micro-batch. With split_sends or sequence parallelism, each tensor-parallel
    rank sends only its part of them.
    """
    size = hidden
    if split_sends or layout.sequence_parallel:
        size = hidden // layout.tp
    return Collective(
        dimension="pp",
        kind="send",
        phase=phase,
        what=what,
        ranks=layout.pp,
        stride=layout.tp * layout.data_ranks,
        count=times * layout.micro_batches,
        size=size,
    )


# --- Parameters and gradients -----------------------------------------------------------------------------------------


def data_parallel(
    model: Model, layout: Layout, conventions: Conventions, stage: int = 0, sharded: tuple[str, ...] = VOCABULARY
) -> list[Collective]:
    """The collectives by which the data-parallel ranks of a stage exchange parameters and gradients in a step.

    The layout may be that of DDP, ZeRO, fully_shard or HSDP. Parameters that are gathered or reduced together, such as
    those of a layer, are a unit, which has collectives of its own (see ``unit_collectives``). DDP's all-reduce is
    counted for each unit, too, although DDP sends buckets of 25 MiB. Some collectives may have one rank or no bytes.

    sharded: which of "embedding" and "head" tensor parallelism divides along the vocabulary, so that a rank has only a
    part of them.
    """
    result = []
    for unit in units_of(model, layout, stage, sharded):
        result += unit_collectives(unit, layout, conventions)
    return result


def unit_collectives(unit: Unit, layout: Layout, conventions: Conventions) -> list[Collective]:
    """The collectives that the parameters and gradients of a Unit need in a step (Rajbhandari et al. 2020, section 7).

    A Unit is the parameters of equal layers, of their experts, or of what is outside the layers.
      DDP (zero = 0) all-reduces the gradients.
      ZeRO-1 and 2 reduce-scatter them, and gather the weights after the step. That sends as much as DDP.
      ZeRO-3, as in fully_shard, gathers the weights before each forward and before each backward, and reduce-scatters
      the gradients. That sends half as much again.
    """
    gathers_each_time = not conventions.gathers_once(layout.pp)
    repetitions = 1  # how often a unit communicates in a step
    if layout.zero >= 2 and gathers_each_time:
        # Nothing that is divided is kept whole from one micro-batch to the next, so each of them communicates.
        repetitions = layout.micro_batches

    shards = 1
    if layout.zero == 3:
        shards = sharers_of(unit, layout)
    numbers = padded_numbers(unit, shards)
    weight_bytes = numbers * layout.element_bytes
    gradient_bytes = numbers * reduced_bytes(conventions)

    result = []
    if layout.zero == 3:
        result.append(among_sharers(unit, layout, "all_gather", "forward", repetitions, weight_bytes))
        # The root module, which holds what is outside the layers, keeps its parameters until its backward has ended.
        is_root = unit.what == OUTSIDE
        if gathers_each_time and not is_root:
            result.append(among_sharers(unit, layout, "all_gather", "backward", repetitions, weight_bytes))
    if layout.zero >= 1:
        result.append(among_sharers(unit, layout, "reduce_scatter", "backward", repetitions, gradient_bytes))
    if layout.zero in (1, 2):
        result.append(among_sharers(unit, layout, "all_gather", "step", repetitions=1, size=weight_bytes))
    result.append(among_copies(unit, layout, repetitions, gradient_bytes))
    return result


def holders_of(unit: Unit, layout: Layout) -> int:
    """How many data-parallel ranks compute with the same parameters of a unit: all of them, or fewer for experts."""
    return layout.data_ranks // unit.expert_ranks


def sharers_of(unit: Unit, layout: Layout) -> int:
    """Among how many ranks ZeRO divides the parameters of a unit; 1 if it divides nothing."""
    return min(layout.sharers, holders_of(unit, layout))


def among_sharers(unit: Unit, layout: Layout, kind: str, phase: str, repetitions: int, size: int) -> Collective:
    """Collectives of ``size`` bytes among the ranks that share a unit by ZeRO: ``repetitions`` a step for each unit."""
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
    """All-reduces of a Unit's gradients among the ranks that hold the same shard of it.

    Under DDP the shard is the whole unit, and all data-parallel ranks hold it. Under HSDP each group of ranks that
    share a copy of the model has one rank that holds it.

    repetitions: how often each unit is reduced in a step. gradient_bytes: of the unit's whole gradient.
    """
    if layout.zero == 0:
        dimension = "dp"
    else:
        dimension = "replicate"
    sharers = sharers_of(unit, layout)
    # The ranks that share a copy are neighbours. So the next rank with the same shard is behind all of them.
    stride_of_sharers = layout.tp * unit.expert_ranks
    return Collective(
        dimension=dimension,
        kind="all_reduce",
        phase="backward",
        what=unit.what,
        ranks=holders_of(unit, layout) // sharers,
        stride=stride_of_sharers * sharers,
        count=unit.times * repetitions,
        size=gradient_bytes // sharers,
    )


def padded_numbers(unit: Unit, parts: int) -> int:
    """How many numbers a unit has if fully_shard pads the rows of each tensor to a multiple of ``parts``."""
    numbers = 0
    for tensor in unit.tensors:
        padded_rows = math.ceil(tensor.rows / parts) * parts
        numbers += padded_rows * tensor.columns * tensor.copies
    return numbers


# --- Seconds ----------------------------------------------------------------------------------------------------------


def with_seconds(candidates: Iterable[Collective], cluster: Cluster | None) -> list[Collective]:
    """The collectives that send something, each with the time that it takes on a cluster; 0 without a cluster."""
    result = []
    for collective in candidates:
        has_one_rank = collective.ranks == 1
        is_empty = collective.count == 0 or collective.size == 0
        if has_one_rank or is_empty:
            continue
        if cluster is not None:
            collective = replace(collective, time=time_on(cluster, collective))
        result.append(collective)
    return result


def time_on(cluster: Cluster, collective: Collective) -> LinkTime:
    """Seconds that a collective takes each time on a cluster, with each link at its full speed."""
    in_node = ranks_in_node(collective.ranks, collective.stride, cluster)
    nodes = collective.ranks // in_node
    sends_once_to_each_node = collective.draws > 0
    if sends_once_to_each_node:
        bytes_of_copy = collective.size / collective.copies
        return dispatch_time(bytes_of_copy, collective.copies, collective.draws, in_node, nodes, cluster)
    return link_time(collective.kind, collective.size, in_node, nodes, cluster)


def dispatch_time(size: float, copies: int, draws: int, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """Seconds of an all-to-all of tokens that sends each token once to every node that needs it, as DeepEP does.

    The GPU that receives a token sends copies of it to other GPUs of its node (DeepEP's README, normal kernels with
    NVLink and RDMA forwarding). There are ``in_node`` ranks in each of ``nodes`` nodes.

    size: bytes of one copy of all tokens. copies: on how many ranks each token is needed. draws: how many experts of a
    token may each be on any node, with equal probabilities and independently of each other. The probability that a node
    has none of k such experts is (1 - 1/n)^k on n nodes.
    """
    probability_that_node_needs_token = 1 - (1 - 1 / nodes) ** draws
    sent_between = size * (nodes - 1) * probability_that_node_needs_token
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
    """How many ranks of a group share a node. It is a divisor of the group's size, so that all nodes have as many.

    The numbers of two neighbours in the group differ by ``stride``, so only every stride-th GPU of a node is in it.
    """
    places_in_node = max(cluster.gpus_per_node // stride, 1)
    most = min(ranks, places_in_node)
    return max(size for size in range(1, most + 1) if ranks % size == 0)


def link_time(kind: str, size: float, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """Seconds of one collective of ``size`` bytes, among ``in_node`` ranks in each of ``nodes`` nodes.

    kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "send".
    """
    # Nothing is ever sent over a link whose speed is not given, so its time is 0.
    speed_in_node = cluster.link_in_node or math.inf
    speed_between = cluster.link_between or math.inf
    if kind == "send":
        if nodes > 1:
            return LinkTime(latency=cluster.latency_between, between=size / speed_between)
        return LinkTime(latency=cluster.latency_in_node, in_node=size / speed_in_node)
    if kind == "all_to_all":
        # Pairwise: each rank sends 1/p of the bytes to each of the others, one after the other (Thakur et al. 2005,
        # section 4.4).
        ranks = in_node * nodes
        peers_in_node = in_node - 1
        peers_in_other_nodes = ranks - in_node
        return LinkTime(
            latency=peers_in_node * cluster.latency_in_node + peers_in_other_nodes * cluster.latency_between,
            in_node=size * peers_in_node / ranks / speed_in_node,
            between=size * peers_in_other_nodes / ranks / speed_between,
        )
    return ring_time(kind, size, in_node, nodes, cluster)


def ring_time(kind: str, size: float, in_node: int, nodes: int, cluster: Cluster) -> LinkTime:
    """Seconds of an all-gather, reduce-scatter or all-reduce of ``size`` bytes on rings.

    With p ranks, a latency α and β seconds for each byte, an all-gather or a reduce-scatter of n bytes on a ring takes
    (p-1)α + (p-1)/p · nβ. An all-reduce is both of them (Thakur et al. 2005, sections 4.1 and 4.5).

    Here there is a ring in each node, and then there are rings between the nodes, in which each of g GPUs of a node
    sends its part of n/g bytes. That is the least that is possible. NCCL's ring over all W ranks sends (W-1)/W · n/g
    over each link between nodes: nearly twice as much on two nodes of eight. But it sends in the node at the same time
    (src/graph/tuning.cc), while this plan adds both times.
    """
    # Nothing is ever sent over a link whose speed is not given, so its time is 0.
    speed_in_node = cluster.link_in_node or math.inf
    speed_between = cluster.link_between or math.inf
    rounds = 1
    steps_between = nodes - 1
    if kind == "all_reduce":
        rounds = 2  # a reduce-scatter, then an all-gather
        # NCCL has trees for all-reduces only (NVIDIA/nccl#1473), which take fewer steps between nodes than a ring.
        steps_between = math.ceil(math.log2(nodes))
    latency_in_node = (in_node - 1) * cluster.latency_in_node
    latency_between = steps_between * cluster.latency_between
    return LinkTime(
        latency=rounds * (latency_in_node + latency_between),
        in_node=rounds * (in_node - 1) / in_node * size / speed_in_node,
        between=rounds * (nodes - 1) / nodes * size / in_node / speed_between,
    )
