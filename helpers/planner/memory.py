"""Bytes that one rank holds, by kind and pipeline stage. Formulas, not measurements: what is not counted is named."""

import math
from collections import Counter
from dataclasses import dataclass

from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.model import Model, Tensor, copies_of, products_of

NOT_COUNTED = "the CUDA context, NCCL's buffers, the allocator's gaps, and what a kernel needs while it runs"
VOCABULARY = ("embedding", "head")  # what has a row for each token
OUTSIDE = "outside the layers"
Shape = tuple[int, int, int]  # rows, columns, copies


@dataclass(frozen=True)
class Unit:
    """Parameters that fully_shard gathers together: a layer's, its experts', or what stands outside the layers."""

    what: str
    times: int  # equal ones on the stage
    apart: int  # expert-parallel ranks, which hold other experts: so fewer ranks share each
    shapes: list[Shape]  # on one of the tensor-parallel ranks


def states_per_rank(whole: float, share: float, zero: int, parts: tuple[int, int, int]) -> list[float]:
    """Bytes of (parameters, gradients, optimizer state) on a rank that has a share of the whole's numbers.

    16Ψ; 4Ψ + 12Ψ/N; 2Ψ + 14Ψ/N; 16Ψ/N for stages 0 to 3 (Rajbhandari et al. 2020, figure 1). Stage 1 divides the last
    of the three, stage 2 the last two, stage 3 all. parts: bytes of each for one parameter.
    """
    return [(share if zero >= 3 - index else whole) * size for index, size in enumerate(parts)]


def local_shape(tensor: Tensor, model: Model, tp: int) -> tuple[int, int]:
    """(rows, columns) of a tensor on one of tp ranks; the heads of keys are copied where there are fewer than tp."""
    if tensor.split == "columns":
        return tensor.rows, math.ceil(tensor.columns / tp)
    if tensor.part.startswith(("key", "value")):
        return model.head_width * max(model.kv_heads // tp, 1), tensor.columns
    return math.ceil(tensor.rows / tp) if tensor.split else tensor.rows, tensor.columns


def outer_tensors(model: Model, layout: Layout, stage: int) -> list[Tensor]:
    """[Tensor] of a stage outside its layers: the embeddings on the first, the norm and the head on the last."""
    last, tensors = layout.pp - 1, []
    for tensor in model.tensors():
        here = stage == (last if tensor.part in ("norm", "head") else 0)
        # A tied output layer on another stage than the embedding is a copy (Megatron-LM).
        tensors += [tensor] * (here or (tensor.part == "embedding" and model.tied and stage == last))
    return tensors


def units_of(model: Model, layout: Layout, stage: int, divided: tuple[str, ...] = VOCABULARY) -> list[Unit]:
    """The units of a stage; divided: which of VOCABULARY tensor parallelism divides."""
    units = []
    for layer, times in Counter(map(model.like, layout.layers_of(model, stage))).items():
        whole: list[Shape] = []
        routed: list[Shape] = []
        for tensor, copies in copies_of(model, layer):
            shape = local_shape(tensor, model, layout.tp)
            if layout.ep > 1 and model.has_experts(layer) and tensor.part.split()[0] in ("up", "down"):
                per_expert = copies // (model.experts + model.shared_experts)
                routed.append((*shape, per_expert * model.experts // layout.ep))
                copies = per_expert * model.shared_experts
            whole.append((*shape, copies))
        units.append(Unit("layers", times, 1, whole))
        if routed:
            units.append(Unit("experts", times, layout.ep, routed))
    outer: list[Shape] = []
    for tensor in outer_tensors(model, layout, stage):
        undivided = tensor.part in VOCABULARY and tensor.part not in divided
        outer.append((*local_shape(tensor, model, 1 if undivided else layout.tp), 1))
    return units + [Unit(OUTSIDE, 1, 1, outer)] * bool(outer)


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """Parameters that one rank of a stage computes with: divided by pp, tp and ep, not by ZeRO."""
    units = units_of(model, layout, stage)
    return sum(unit.times * math.prod(shape) for unit in units for shape in unit.shapes)


def shared_parameters(model: Model, layout: Layout, stage: int, shards: str = "rows") -> float:
    """Parameters of a stage that the first of the ranks which share them holds.

    shards: "rows": each tensor is cut between its rows, rounded up, as fully_shard does, so that the first rank holds
    most; "even": one flat tensor of all parameters is cut (ZeRO's formula, DeepSpeed, Megatron-LM).
    """
    total: float = 0
    for unit in units_of(model, layout, stage):
        sharers = max(layout.sharers // unit.apart, 1)
        for rows, columns, copies in unit.shapes:
            here = math.ceil(rows / sharers) if shards == "rows" else rows / sharers
            total += unit.times * copies * columns * here
    return total


def activations_per_layer(
    model: Model, layout: Layout, layer: int = -1, recompute: str = "", sequence_inputs: str = "again"
) -> float:
    """Bytes that one layer stores for the backward of one micro-batch, on one rank.

    sbh(34 + 5as/h) in 16 bits; with tensor parallelism sbh(10 + 24/t + 5as/ht), with sequence parallelism, too,
    sbh(34 + 5as/h)/t; selective recomputation drops 5as/h; full stores the layer's input, 2sbh (Korthikanti et al.
    2022, equations 1 to 4 and table 2). Here from its parts, so that it holds for other MLPs (18 + 4f/h; 18 + 6f/h
    where gated), for fewer heads of keys, without dropout and in 32 bits. Attention "flash" never stores s · s.
    "sac", selective checkpointing of whole operations: the layer's input, and what attention, every second matrix
    product and each reduce-scatter put out (torchtitan, distributed/activation_checkpoint.py).
    sequence_inputs: as the convention of that name; the formula is for "again".
    """
    t, size, outside, tokens = layout.tp, layout.element_bytes, layout.norm_sharers, layout.tokens(model)
    recompute = recompute or layout.recompute
    if recompute in ("full", "sac"):
        stored = model.width / outside
        if recompute == "sac":
            stored += model.attention_width / t + 2 * model.width / t * layout.sequence_parallel
            products = products_of(model, model.like(layer % model.layers))
            stored += sum(local_shape(tensor, model, t)[0] for tensor in products[::2])
        return tokens * stored * size
    divided = 2 * model.attention_width + 2 * model.head_width * model.kv_heads  # query, output; key, value
    whole, masks = model.norms * model.width, 2 * model.width * model.dropout  # the norms' inputs
    inputs = 2 * model.width / (outside if sequence_inputs == "again" else 1)  # of attention and MLP
    if model.has_experts(layer % model.layers):
        active = model.active_experts + model.shared_experts
        divided += active * model.matrices * model.ffn
        whole += (active - 1) * model.width + model.experts  # a copy of the token for each expert; the router
    else:
        divided += model.matrices * (model.dense_ffn if model.experts else model.ffn)
    stored = divided * size / t + inputs * size + (whole * size + masks) / outside
    if layout.attention == "scores" and recompute == "none":
        per_score = size + (size + 1) * model.dropout  # of the softmax; its mask, and what is left
        stored += per_score * model.heads * model.seq / t
    return tokens * stored


def in_flight(layout: Layout, stage: int, convention: str = "schedule") -> float:
    """Micro-batches that a stage holds at once; the first holds p, of L/p layers each: as much as without stages.

    Interleaving makes that p(1 + (p-1)/(pv)) (Korthikanti et al. 2022, section 4.2.3); GPipe holds all m.
    """
    p, m, v = layout.pp, layout.micro_batches, layout.interleave
    if convention == "one":
        return 1
    if layout.schedule == "gpipe":
        return m
    if v == 1:
        return min(p - stage, m)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, m * v) / v


def gathered(model: Model, layout: Layout, stage: int, computed: int, conventions: Conventions) -> tuple[float, float]:
    """Bytes that fully_shard holds gathered: as the backward begins, and as the first layer's gradient is reduced.

    First the layer at work, the one that arrives, and what is outside the layers. Then, too, the layer's gradient, and
    the float32 memory from which the layer before is reduced (chapter 6 measures four times a block); of the last two
    layers none arrives. Gathered once (reshard_after_forward=False), all parameters stay, and so do all gradients if
    several micro-batches add to them (set_requires_gradient_sync).
    """
    size, layers = layout.element_bytes, layout.stage_layers(model)[stage]
    outer = sum(math.prod(local_shape(tensor, model, layout.tp)) for tensor in outer_tensors(model, layout, stage))
    layer = (computed - outer) / layers
    if conventions.gather == "once":
        summed = reduced_bytes(conventions)
        several = layout.micro_batches > 1
        whole = (size + summed * several) * computed
        # Of the parameters, one layer is in an all-gather's buffer at a time; before PyTorch 2.15 two were.
        return whole, whole + (summed if several else size) * layer
    arriving = size * layer * (layers > 2)
    return 2 * size * layer + size * outer, arriving + (2 * size + 4) * layer + 2 * size * outer


def reduced_bytes(conventions: Conventions) -> int:
    """Bytes of a gradient that is summed over micro-batches and ranks: those it is kept in."""
    return min(max(conventions.state_bytes[1], 2), 4)


def stage_memory(model: Model, layout: Layout, conventions: Conventions, stage: int) -> dict[str, float]:
    """{kind: bytes} on the first rank of a stage, at the moment of a step that needs most; "total" is their sum.

    Memory is fullest as the backward begins, with all activations and the output, or as the first gradient of a
    sharded layer is reduced. PyTorch's FSDPMemTracker sees the same within 3 % (chapter 15).
    """
    size, tokens, inputs = layout.element_bytes, layout.tokens(model), conventions.sequence_inputs
    computed = stage_parameters(model, layout, stage)
    share = shared_parameters(model, layout, stage, conventions.shards if layout.zero == 3 else "even")
    parameters, gradients, optimizer = states_per_rank(computed, share, layout.zero, conventions.state_bytes)
    if layout.offload:
        gradients = optimizer = 0
    layers, micro_batches = layout.layers_of(model, stage), in_flight(layout, stage, conventions.in_flight)
    stored = [activations_per_layer(model, layout, layer, sequence_inputs=inputs) for layer in layers]
    inner = (model.matrices - 1) * model.ffn * max(model.active_experts, 1)
    kinds = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": sum(stored) * micro_batches,
        # The gradients of an MLP's inner width and of the layer's output.
        "working": tokens * size * (inner / layout.tp + model.width),
    }
    if layout.recompute in ("full", "sac"):
        whole = activations_per_layer(model, layout, layers[-1], "none", inputs)
        kinds["recomputed layer"] = whole - stored[-1] * (layout.recompute == "sac")
    if stage == 0 and model.dropout:
        kinds["embedding's dropout"] = tokens * model.width * micro_batches / layout.norm_sharers  # sbhp/t, section 4.3
    if stage == layout.pp - 1:
        # The last norm's and the output layer's input, and float32 logits: 4sbh/t · (1 + v/h), section 4.3. PyTorch's
        # cross_entropy has them four times at once: logits, log-softmax, and the gradient of each. Where the caller
        # frees the logits, three are left; divided by tensor parallelism, four, as loss_parallel adds two of them.
        freed = 12 if layout.tp == 1 else 16
        logits = {"eager": 16, "freed": freed, "stored": 4}[conventions.logits] * tokens * model.vocab / layout.tp
        kinds["output"] = 2 * tokens * model.width * size / layout.norm_sharers + logits
        kinds["working"] = max(kinds["working"] - logits, 0)  # the logits are freed before the layers work
    if layout.zero == 3:
        first, reducing = gathered(model, layout, stage, computed, conventions)
        begins, reduces = {**kinds, "gathered": first}, {**kinds, "gathered": reducing, "output": 0, "working": 0}
        reduces["activations"] -= sum(stored[-2:])
        # The optimizer's zero_grad has freed them; reduced ones come layer by layer.
        if layout.micro_batches == 1 or conventions.gather == "once":
            begins["gradients"], reduces["gradients"] = 0, gradients / len(stored)
        kinds = max(begins, reduces, key=lambda moment: sum(moment.values()))
    kinds["total"] = sum(kinds.values())
    return kinds


def memory(model: Model, layout: Layout, conventions: Conventions) -> list[dict[str, float]]:
    """[{kind: bytes}] of a rank of each pipeline stage."""
    return [stage_memory(model, layout, conventions, stage) for stage in range(layout.pp)]
