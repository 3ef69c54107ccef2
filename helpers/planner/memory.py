"""Bytes that one rank holds, by kind and pipeline stage. They come from formulas; NOT_COUNTED says what is left out."""

import math
from collections import Counter
from dataclasses import dataclass

from helpers.planner.conventions import Conventions, StateBytes
from helpers.planner.corrections import ALLOCATOR_GAPS
from helpers.planner.layout import Layout
from helpers.planner.model import KEYS_AND_VALUES, MLP, Model, Tensor, layer_tensors, matrices_of, outer_tensors

NOT_COUNTED = "the CUDA context, NCCL's buffers, and what a kernel needs while it runs"
# The share of a GPU's memory that a plan may fill. Of 20 published jobs the worst one needed 18 % more than is planned,
# and what is not counted needs room, too. With plans of nine tenths, two of the 20 jobs would run out of memory.
SAFE_SHARE = 0.75
VOCABULARY = ("embedding", "head")  # the tensors that have a row for each token
OUTSIDE = "outside the layers"


# --- Parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Parameters that fully_shard gathers together: those of a layer, of its experts, or outside the layers.

    One Unit stands for all equal ones of a pipeline stage.
    """

    what: str  # "layers", "experts" or OUTSIDE
    times: int  # how many equal units the stage has
    expert_ranks: int  # among how many ranks expert parallelism divides the unit; 1 if it is not of experts
    tensors: list[Tensor]  # as tensor parallelism leaves them on one rank

    @property
    def numbers(self) -> int:
        """How many parameters one unit has."""
        return sum(tensor.numbers for tensor in self.tensors)


def units_of(model: Model, layout: Layout, stage: int, sharded: tuple[str, ...] = VOCABULARY) -> list[Unit]:
    """The parameters with which one rank of a pipeline stage computes, in the units that fully_shard gathers together.

    A stage has at most two kinds of layers: with experts and without. Equal layers are one Unit, which says how many
    there are. The embedding, the head and whatever else is outside the layers are another Unit.

    sharded: which of "embedding" and "head" tensor parallelism divides along the vocabulary. The other ones are whole
    on every rank.
    """
    units = []
    layers_have_experts = [model.has_experts(layer) for layer in layout.layers_of(model, stage)]
    for has_experts, layer_count in Counter(layers_have_experts).items():
        units += units_of_layers(model, layout, has_experts, layer_count)

    outer_parts = []
    for tensor in outer_tensors_of(model, layout, stage):
        is_whole_on_each_rank = tensor.name in VOCABULARY and tensor.name not in sharded
        if is_whole_on_each_rank:
            outer_parts.append(tensor)
        else:
            outer_parts.append(part_on_rank(tensor, model, layout.tp))
    if outer_parts:
        units.append(Unit(OUTSIDE, times=1, expert_ranks=1, tensors=outer_parts))
    return units


def units_of_layers(model: Model, layout: Layout, has_experts: bool, layer_count: int) -> list[Unit]:
    """The units of ``layer_count`` equal layers on one rank: one Unit, or two if expert parallelism divides experts.

    Expert parallelism gives each of ep ranks different routed experts. They are a unit of their own, because fewer
    ranks hold the same ones. The rest of the layer, with the shared experts that see every token, is on every rank.
    """
    divides_experts = has_experts and layout.ep > 1
    layer_parts = []
    expert_parts = []
    for tensor in layer_tensors(model, has_experts):
        part = part_on_rank(tensor, model, layout.tp)
        if divides_experts and tensor.name in MLP:
            # The tensor stands for all experts of the layer: the routed ones, which are divided, and the shared ones.
            expert_parts.append(part._replace(copies=model.experts // layout.ep))
            layer_parts.append(part._replace(copies=model.shared_experts))
        else:
            layer_parts.append(part)

    units = [Unit("layers", times=layer_count, expert_ranks=1, tensors=layer_parts)]
    if divides_experts:
        units.append(Unit("experts", times=layer_count, expert_ranks=layout.ep, tensors=expert_parts))
    return units


def part_on_rank(tensor: Tensor, model: Model, tp: int) -> Tensor:
    """The part of a tensor on one of tp tensor-parallel ranks, rounded up if the tensor cannot be divided evenly.

    If there are fewer heads of keys and values than ranks, several ranks have a copy of the same head.
    """
    if tensor.name in KEYS_AND_VALUES:
        heads_on_rank = max(model.kv_heads // tp, 1)
        return tensor._replace(rows=model.head_width * heads_on_rank)
    if tensor.split == "rows":
        return tensor._replace(rows=math.ceil(tensor.rows / tp))
    if tensor.split == "columns":
        return tensor._replace(columns=math.ceil(tensor.columns / tp))
    return tensor


def outer_tensors_of(model: Model, layout: Layout, stage: int) -> list[Tensor]:
    """The tensors outside the layers that a pipeline stage has.

    The first stage has the embeddings, the last one the norm behind the layers and the head. If the head is tied, it is
    the embedding's matrix. Then a last stage that is not also the first has a copy of it (Megatron-LM).
    """
    is_first_stage = stage == 0
    is_last_stage = stage == layout.pp - 1
    tensors = []
    for tensor in outer_tensors(model):
        comes_after_layers = tensor.name in ("norm", "norm bias", "head")
        comes_before_layers = not comes_after_layers
        is_tied_head = model.tied and tensor.name == "embedding"
        if is_first_stage and comes_before_layers:
            tensors.append(tensor)
        elif is_last_stage and (comes_after_layers or is_tied_head):
            tensors.append(tensor)
    return tensors


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """How many parameters one rank of a stage computes with. They are divided by pp, tp and ep, but not by ZeRO."""
    return sum(unit.times * unit.numbers for unit in units_of(model, layout, stage))


def fsdp_parameters(model: Model, layout: Layout, stage: int) -> int:
    """How many of a stage's parameters fully_shard divides among ranks and gathers.

    The other ones are experts that no other rank has. They stay whole, because there is no rank to share them with
    (NeMo AutoModel, components/moe/parallelizer.py).
    """
    total = 0
    for unit in units_of(model, layout, stage):
        are_experts = unit.expert_ranks > 1
        if are_experts and layout.sharers <= unit.expert_ranks:
            continue
        total += unit.times * unit.numbers
    return total


def shared_parameters(model: Model, layout: Layout, stage: int, shards: str = "rows") -> float:
    """How many parameters the first rank of a pipeline stage keeps if ranks share them, as in ZeRO and fully_shard.

    shards: how they are cut. "rows" cuts each tensor between its rows and rounds up, as fully_shard does, so that the
    first rank has most. "even" cuts one flat tensor of all parameters (ZeRO's formula, DeepSpeed, Megatron-LM).
    """
    parameters: float = 0
    for unit in units_of(model, layout, stage):
        # Only ranks that have the same experts can share them.
        ranks_that_share = max(layout.sharers // unit.expert_ranks, 1)
        for tensor in unit.tensors:
            rows_on_rank: float
            if shards == "rows":
                rows_on_rank = math.ceil(tensor.rows / ranks_that_share)
            else:
                rows_on_rank = tensor.rows / ranks_that_share
            parameters += unit.times * tensor.copies * tensor.columns * rows_on_rank
    return parameters


def states_per_rank(parameters: float, shard: float, zero: int, sizes: StateBytes) -> dict[str, float]:
    """{kind: bytes} of parameters, gradients and optimizer state on one rank.

    parameters: with how many parameters the rank computes. shard: how many of them it keeps of a state that is shared.
    zero: the stage of ZeRO. Stage 1 shares the optimizer state, stage 2 also the gradients, and stage 3 also the
    parameters. sizes: how many bytes each state has for one parameter.

    For Ψ parameters in mixed precision and N ranks, stages 0 to 3 need 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes
    (Rajbhandari et al. 2020, figure 1).
    """
    return {
        "parameters": (shard if zero == 3 else parameters) * sizes.parameter,
        "gradients": (shard if zero >= 2 else parameters) * sizes.gradient,
        "optimizer": (shard if zero >= 1 else parameters) * sizes.optimizer,
    }


# --- Activations ------------------------------------------------------------------------------------------------------


def activations_per_layer(
    model: Model, layout: Layout, layer: int = -1, recompute: str = "", sequence_inputs: str = "again"
) -> float:
    """Bytes that one layer stores on one rank for the backward of one micro-batch.

    layer: its number, which matters only in models with experts; -1 is the last one. recompute: what the backward
    computes again, such as "full"; empty for what the layout says. sequence_inputs: whether the inputs that sequence
    parallelism has gathered are "kept" for the backward, or gathered "again" in it, as in the paper's formulas.

    The formulas are those of Korthikanti et al. 2022 (equations 1 to 4 and table 2), for GPT in 16 bits with s tokens,
    a micro-batch of b, width h, a heads and t = tp:
      sbh(34 + 5as/h) on one rank, sbh(10 + 24/t + 5as/ht) with tensor parallelism, and sbh(34 + 5as/h)/t with sequence
      parallelism, too.
      Selective recomputation drops 5as/h. Full recomputation stores only the layer's input, 2sbh.
    Here the parts are added up one by one. So the sum is also right for other MLPs, for fewer heads of keys and values,
    without dropout and in 32 bits. Attention "flash" never stores the scores. "sac" is selective checkpointing of
    operations (see sac_numbers).
    """
    recompute = recompute or layout.recompute
    has_experts = model.has_experts(layer % model.layers)  # -1 is the last layer, as in a list.
    tokens = layout.tokens(model)
    number_bytes = layout.element_bytes
    if recompute == "full":
        return tokens * (model.width / layout.norm_sharers) * number_bytes
    if recompute == "sac":
        return tokens * sac_numbers(model, layout, has_experts) * number_bytes

    # How many numbers a layer stores for each token. In attention these are queries, keys, values and the output.
    # Latent attention adds to each query and to each key the numbers that tell positions.
    queries_and_output = 2 * model.attention_width
    keys_and_values = 2 * model.head_width * model.kv_heads
    position_numbers = 2 * model.heads * model.position_width
    attention_numbers = queries_and_output + keys_and_values + position_numbers
    norm_inputs = model.norms * model.width
    routing_numbers = 0
    # The MLP, or each expert that works on the token, stores the numbers between its matrices.
    if has_experts:
        experts = model.active_experts + model.shared_experts
        mlp_numbers = experts * model.mlp_matrices * model.ffn
        # Each expert but the first one has a copy of the token. The router has a score for each expert.
        routing_numbers = (experts - 1) * model.width + model.experts
    else:
        mlp_numbers = model.mlp_matrices * model.ffn_of_dense_layers
    # The inputs of attention and MLP. With sequence parallelism they are gathered, and then either kept as they are, or
    # each rank keeps its part and they are gathered again in the backward.
    inputs: float = 2 * model.width
    if sequence_inputs == "again":
        inputs /= layout.norm_sharers
    mask_bytes = 0
    if model.dropout:
        mask_bytes = 2 * model.width  # after attention and after the MLP, one byte for each number

    # Tensor parallelism divides what attention and the MLP compute. Only sequence parallelism divides the rest.
    bytes_per_token = (attention_numbers + mlp_numbers) * number_bytes / layout.tp
    bytes_per_token += inputs * number_bytes
    bytes_per_token += ((norm_inputs + routing_numbers) * number_bytes + mask_bytes) / layout.norm_sharers
    if layout.attention == "scores" and recompute == "none":
        bytes_per_score = number_bytes  # the softmax's output
        if model.dropout:
            bytes_per_score += number_bytes + 1  # dropout's output, and its mask of one byte
        scores_per_token = model.heads * model.seq
        bytes_per_token += bytes_per_score * scores_per_token / layout.tp
    return tokens * bytes_per_token


def sac_numbers(model: Model, layout: Layout, has_experts: bool) -> float:
    """How many numbers a layer stores for each token under selective activation checkpointing (SAC) of operations.

    They are the layer's input and the outputs of attention, of every second matrix product, and of each reduce-scatter.
    The backward computes the rest again (torchtitan, distributed/activation_checkpoint.py).
    """
    layer_input = model.width / layout.norm_sharers
    attention_output = model.attention_width / layout.tp
    numbers = layer_input + attention_output
    if layout.sequence_parallel:
        reduce_scatters = 2  # behind attention and behind the MLP
        numbers += reduce_scatters * model.width / layout.tp
    every_second_matrix = matrices_of(model, has_experts)[::2]
    for matrix in every_second_matrix:
        # The product of a matrix of [rows, columns] with one token has as many numbers as the matrix has rows.
        numbers += part_on_rank(matrix, model, layout.tp).rows
    return numbers


def in_flight(layout: Layout, stage: int) -> float:
    """For how many micro-batches a pipeline stage holds activations at the same time, at most.

    A micro-batch counts as one if all layers of the stage hold its activations, so the result may be a fraction.
      1F1B: the first of p stages holds p micro-batches of L/p layers each, as much as one GPU without stages holds.
      1F1B with v parts of the model on each stage: it holds p(1 + (p-1)/(pv)) (Korthikanti et al. 2022, section 4.2.3).
      GPipe: it holds all micro-batches of a step.
    """
    stages = layout.pp
    micro_batches = layout.micro_batches
    parts_of_stage = layout.interleave
    if layout.schedule == "gpipe":
        return micro_batches
    if parts_of_stage == 1:
        stages_from_here_on = stages - stage
        return min(stages_from_here_on, micro_batches)

    # How many forwards, each of one part of the stage, come before the first backward: the warmup's, and one more just
    # before it (num_warmup_microbatches in Megatron-LM's schedules.py).
    warmup_forwards = 2 * (stages - stage - 1) + (parts_of_stage - 1) * stages
    forwards_of_parts = min(warmup_forwards + 1, micro_batches * parts_of_stage)
    return forwards_of_parts / parts_of_stage


# --- All of a rank ----------------------------------------------------------------------------------------------------


def memory(model: Model, layout: Layout, conventions: Conventions) -> list[dict[str, float]]:
    """What a rank of each pipeline stage needs: [{kind: bytes}], with the sum as "total"."""
    return [stage_memory(model, layout, conventions, stage) for stage in range(layout.pp)]


def stage_memory(model: Model, layout: Layout, conventions: Conventions, stage: int) -> dict[str, float]:
    """{kind: bytes} of a pipeline stage's first rank at the fullest moment of a step. "total" is their sum.

    That is when the backward begins, with all activations and the output, or when the first gradient of a sharded layer
    is reduced. PyTorch's FSDPMemTracker measures the same within 6 % (tests/test_planner_memory.py).
    """
    kinds = bytes_of_states(model, layout, conventions, stage)

    # What each layer has stored for one micro-batch, and all of them for all micro-batches before the first backward.
    stored_by_layer = []
    for layer in layout.layers_of(model, stage):
        inputs = conventions.sequence_inputs
        stored_by_layer.append(activations_per_layer(model, layout, layer, sequence_inputs=inputs))
    micro_batches = in_flight(layout, stage)
    kinds["activations"] = sum(stored_by_layer) * micro_batches

    is_last_stage = stage == layout.pp - 1
    gradients_in_mlp = bytes_of_mlp_backward(model, layout)
    if is_last_stage:
        # The logits are freed before the layers' backward, which uses their memory.
        logits = logits_bytes(model, layout, conventions)
        kinds["working"] = max(gradients_in_mlp - logits, 0)
    else:
        kinds["working"] = gradients_in_mlp
    if layout.recomputes_layers:
        stored_by_last_layer = stored_by_layer[-1]
        kinds["recomputed layer"] = recomputed_bytes(model, layout, conventions, stage, stored_by_last_layer)
    if stage == 0 and model.dropout:
        # A mask of one byte for each number of the hidden states (Korthikanti et al. 2022, section 4.3: sbhp/t).
        kinds["embedding's dropout"] = layout.tokens(model) * model.width * micro_batches / layout.norm_sharers
    if is_last_stage:
        # The inputs of the last norm and of the head, and the logits (section 4.3: 4sbh/t · (1 + v/h)).
        inputs_of_norm_and_head = 2 * layout.tokens(model) * model.width * layout.element_bytes / layout.norm_sharers
        kinds["output"] = inputs_of_norm_and_head + logits

    if layout.zero == 3:
        kinds = fullest_moment(model, layout, conventions, stage, kinds, stored_by_layer)
    if conventions.allocator == "reserved":
        kinds["allocator's gaps"] = ALLOCATOR_GAPS * sum(kinds.values())
    kinds["total"] = sum(kinds.values())
    return kinds


def bytes_of_mlp_backward(model: Model, layout: Layout) -> float:
    """Bytes of the gradients that one rank holds while the backward of a layer's MLP runs.

    They are the gradients of the MLP's output and of the numbers between its matrices. Each matrix but the last makes
    ffn of these numbers for each token.
    """
    matrices_before_last = model.mlp_matrices - 1
    experts_per_token = max(model.active_experts, 1)  # 1 for an MLP without experts
    inner_numbers = matrices_before_last * model.ffn * experts_per_token
    numbers_per_token = inner_numbers / layout.tp + model.width
    return layout.tokens(model) * layout.element_bytes * numbers_per_token


def recomputed_bytes(
    model: Model, layout: Layout, conventions: Conventions, stage: int, stored_by_last_layer: float
) -> float:
    """Bytes of activations that the backward computes again for a stage's last layer, with which it begins.

    stored_by_last_layer: bytes of that layer's activations that the forward has stored.
    """
    last_layer = layout.layers_of(model, stage)[-1]
    all_activations = activations_per_layer(model, layout, last_layer, "none", conventions.sequence_inputs)
    if layout.recompute == "sac":
        return all_activations - stored_by_last_layer  # What was stored is not computed again.
    return all_activations


def bytes_of_states(model: Model, layout: Layout, conventions: Conventions, stage: int) -> dict[str, float]:
    """{kind: bytes} of parameters, gradients and optimizer state in the GPU of a pipeline stage's first rank."""
    parameters = stage_parameters(model, layout, stage)
    if layout.zero == 3:
        # As in fully_shard, which cuts each tensor between its rows.
        shard = shared_parameters(model, layout, stage, shards="rows")
    else:
        # ZeRO-1 and 2 cut one flat tensor.
        shard = shared_parameters(model, layout, stage, shards="even")
    kinds = states_per_rank(parameters, shard, layout.zero, conventions.state_bytes)
    if layout.offload:
        # They are in the host's memory, not in the GPU's.
        kinds["gradients"] = 0
        kinds["optimizer"] = 0
    return kinds


def logits_bytes(model: Model, layout: Layout, conventions: Conventions) -> float:
    """Bytes of the copies of the logits that there are at the same time. They have the type in which the loss computes.

    PyTorch's cross_entropy has four copies: the logits, their log-softmax, and the gradient of each. If the caller
    frees the logits, three are left. With tensor parallelism there are four, because loss_parallel adds two.
    """
    if conventions.logits == "stored":
        copies = 1
    elif conventions.logits == "freed" and layout.tp == 1:
        copies = 3
    else:
        copies = 4
    if conventions.loss == "bfloat16":
        bytes_of_logit = 2
    else:
        bytes_of_logit = 4
    return bytes_of_logit * copies * layout.tokens(model) * model.vocab / layout.tp


@dataclass(frozen=True)
class Gathered:
    """Bytes of whole parameters and gradients that fully_shard holds beside its shards, at two moments of a step."""

    backward_begins: float  # when the last forward has ended
    first_reduction: float  # when the first gradient is reduced: that of the stage's last layer


def fullest_moment(
    model: Model,
    layout: Layout,
    conventions: Conventions,
    stage: int,
    kinds: dict[str, float],
    stored_by_layer: list[float],
) -> dict[str, float]:
    """Return {kind: bytes} of a stage's first rank under fully_shard, at the fuller of two moments of a step.

      When the backward begins, all activations are there.
      When the first gradient is reduced, which is that of the stage's last layer, the activations of the last two
      layers and the output are gone, but more parameters and gradients are gathered (see gathered_for_each_pass).

    kinds: {kind: bytes} without what is gathered. stored_by_layer: bytes of activations that each layer has stored. The
    result has one more kind, "gathered": the whole parameters and gradients beside the rank's own shards.
    """
    layers = len(stored_by_layer)
    parameters = fsdp_parameters(model, layout, stage)
    outer_parameters = 0
    for tensor in outer_tensors_of(model, layout, stage):
        outer_parameters += part_on_rank(tensor, model, layout.tp).numbers
    parameters_per_layer = (parameters - outer_parameters) / layers
    gathers_once = conventions.gathers_once(layout.pp)
    if gathers_once:
        gathered = gathered_once_a_step(layout, conventions, parameters, parameters_per_layer)
    else:
        gathered = gathered_for_each_pass(layout, outer_parameters, parameters_per_layer, layers)
    backward_begins = {**kinds, "gathered": gathered.backward_begins}
    first_reduction = {**kinds, "gathered": gathered.first_reduction, "output": 0, "working": 0}
    first_reduction["activations"] -= sum(stored_by_layer[-2:])

    accumulates_gradients = layout.micro_batches > 1
    unsharded_gradients: float = 0
    if accumulates_gradients:
        # Experts that no other rank has are not sharded. Their gradients stay from one micro-batch to the next.
        unsharded_parameters = stage_parameters(model, layout, stage) - parameters
        unsharded_gradients = unsharded_parameters * conventions.state_bytes.gradient
    if gathers_once or not accumulates_gradients:
        # The optimizer's zero_grad has freed the sharded gradients, and new ones come layer by layer.
        sharded_gradients = kinds["gradients"] - unsharded_gradients
        backward_begins["gradients"] = unsharded_gradients
        first_reduction["gradients"] = unsharded_gradients + sharded_gradients / layers

    if sum(first_reduction.values()) > sum(backward_begins.values()):
        return first_reduction
    return backward_begins


def gathered_once_a_step(
    layout: Layout, conventions: Conventions, parameters: int, parameters_per_layer: float
) -> Gathered:
    """Count the bytes that fully_shard holds in full if it gathers once a step (reshard_after_forward=False).

    Pipelines do so. All parameters of the stage stay gathered until the step ends.
      One micro-batch in a step: each layer's gradient is reduced as soon as it is there, so none is kept in full.
      Several micro-batches: the gradients add up in full until the last one (set_requires_gradient_sync). With 16-bit
      parameters and float32 gradients that is 2Ψ + 4Ψ bytes for the Ψ parameters of the stage.
    Source: torchtitan, fsdp_reshard_after_forward.

    parameters: how many parameters of the pipeline stage fully_shard divides. parameters_per_layer: of these, in a
    layer.
    """
    parameter_bytes = layout.element_bytes
    backward_begins: float
    if layout.micro_batches > 1:
        gradient_bytes = reduced_bytes(conventions)
        backward_begins = (parameter_bytes + gradient_bytes) * parameters
        # The reduce-scatter copies the layer's gradients, which have added up, into a buffer.
        reduce_scatter_buffer = gradient_bytes * parameters_per_layer
        first_reduction = backward_begins + reduce_scatter_buffer
    else:
        backward_begins = parameter_bytes * parameters
        # The forward keeps an all-gather's buffer until the next all-gather is done. None comes after the last layer's,
        # so that buffer is still there. Before PyTorch 2.15 a second layer's buffer was there as well.
        all_gather_buffer = parameter_bytes * parameters_per_layer
        first_reduction = backward_begins + all_gather_buffer
    return Gathered(backward_begins=backward_begins, first_reduction=first_reduction)


def gathered_for_each_pass(layout: Layout, outer_parameters: int, parameters_per_layer: float, layers: int) -> Gathered:
    """Count the bytes that fully_shard holds in full if it gathers each layer for its forward and for its backward.

    This is reshard_after_forward=True. While a layer is computed, fully_shard already gathers the next one. In the
    backward, which goes from the last layer to the first, that is the layer before.

    outer_parameters: parameters of the pipeline stage that are in no layer, such as the embedding's. layers: how many
    layers the stage has.
    """
    # A parameter and its gradient have the type in which the layers compute. Gradients are reduced in float32.
    parameter_bytes = layout.element_bytes
    gradient_bytes = layout.element_bytes
    float32_bytes = 4

    # The backward begins with the last layer. The layer before it is gathered already, too.
    last_layer = parameter_bytes * parameters_per_layer
    layer_before = parameter_bytes * parameters_per_layer
    outer = parameter_bytes * outer_parameters
    backward_begins = last_layer + layer_before + outer

    # While the last layer's gradient is reduced, the backward of the layer before is at work, and the layer before that
    # is gathered, if there is one. Chapter 6 measures this moment as four times a layer.
    reduced_layer = float32_bytes * parameters_per_layer
    layer_at_work = (parameter_bytes + gradient_bytes) * parameters_per_layer
    next_layer: float = 0
    if layers > 2:
        next_layer = parameter_bytes * parameters_per_layer
    outer_with_gradients = (parameter_bytes + gradient_bytes) * outer_parameters
    first_reduction = next_layer + layer_at_work + reduced_layer + outer_with_gradients
    return Gathered(backward_begins=backward_begins, first_reduction=first_reduction)


def reduced_bytes(conventions: Conventions) -> int:
    """How many bytes a number of a gradient has while it is summed over micro-batches and ranks.

    Usually as many as it is kept in: 2 for 16 bits, 4 for float32.
    2 if gradients are not kept at all (0 bytes).
    4 if they are kept twice, in 16 and in 32 bits (6 bytes), because those in 32 bits are summed.
    """
    fewest = 2
    most = 4
    kept_bytes = conventions.state_bytes.gradient
    return min(max(kept_bytes, fewest), most)
