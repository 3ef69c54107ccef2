"""Bytes that one rank holds, by kind and pipeline stage. Formulas, not measurements: what is not counted is named."""

import math
from collections import Counter
from dataclasses import dataclass

from helpers.planner.conventions import Conventions, StateBytes
from helpers.planner.corrections import ALLOCATOR_GAPS
from helpers.planner.layout import Layout
from helpers.planner.model import KEYS_AND_VALUES, MLP, Model, Tensor, layer_tensors, matrices_of, outer_tensors

NOT_COUNTED = "the CUDA context, NCCL's buffers, and what a kernel needs while it runs"
VOCABULARY = ("embedding", "head")  # the tensors that have a row for each token
OUTSIDE = "outside the layers"


# --- Parameters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Parameters that fully_shard gathers together: a layer's, its experts', or those outside the layers.

    One Unit stands for all equal ones of a pipeline stage.
    """

    what: str  # "layers", "experts" or OUTSIDE
    times: int  # how many equal units the stage has
    expert_ranks: int  # among how many ranks the experts are divided, so that each has other ones; 1 without experts
    tensors: list[Tensor]  # as tensor parallelism leaves them on one rank

    @property
    def numbers(self) -> int:
        """How many parameters one unit has."""
        return sum(tensor.numbers for tensor in self.tensors)


def units_of(model: Model, layout: Layout, stage: int, sharded: tuple[str, ...] = VOCABULARY) -> list[Unit]:
    """List the parameters that one rank of a pipeline stage computes with, as the units that fully_shard gathers.

    A stage has at most two kinds of layers, those with experts and those without. All layers of a kind are one Unit,
    and what is outside the layers is another. sharded: which of embedding and head tensor parallelism divides along the
    vocabulary; one that is not in it is whole on every rank.
    """
    units = []
    layer_kinds = Counter(model.has_experts(layer) for layer in layout.layers_of(model, stage))
    for has_experts, layers in layer_kinds.items():
        units += units_of_layers(model, layout, has_experts, layers)

    tensors_outside = []
    for tensor in outer_tensors_of(model, layout, stage):
        is_whole = tensor.name in VOCABULARY and tensor.name not in sharded
        if not is_whole:
            tensor = local(tensor, model, layout.tp)
        tensors_outside.append(tensor)
    if tensors_outside:
        units.append(Unit(OUTSIDE, times=1, expert_ranks=1, tensors=tensors_outside))
    return units


def units_of_layers(model: Model, layout: Layout, has_experts: bool, layers: int) -> list[Unit]:
    """The units of so many equal layers, which have experts or do not.

    Expert parallelism divides the routed experts among ep ranks. Since other ranks hold the same ones then, they are a
    unit of their own. Every rank has the rest of the layer, with the shared experts.
    """
    divides_experts = has_experts and layout.ep > 1
    tensors = []
    expert_tensors = []
    for tensor in layer_tensors(model, has_experts):
        tensor_on_rank = local(tensor, model, layout.tp)
        if divides_experts and tensor.name in MLP:
            expert_tensors.append(tensor_on_rank._replace(copies=model.experts // layout.ep))
            tensor_on_rank = tensor_on_rank._replace(copies=model.shared_experts)
        tensors.append(tensor_on_rank)
    units = [Unit("layers", times=layers, expert_ranks=1, tensors=tensors)]
    if expert_tensors:
        units.append(Unit("experts", times=layers, expert_ranks=layout.ep, tensors=expert_tensors))
    return units


def local(tensor: Tensor, model: Model, tp: int) -> Tensor:
    """The part of a tensor that one of tp tensor-parallel ranks has, rounded up if it does not divide evenly.

    If there are fewer heads of keys and values than ranks, several ranks have a copy of the same head.
    """
    if tensor.name in KEYS_AND_VALUES:
        heads = max(model.kv_heads // tp, 1)
        return tensor._replace(rows=model.head_width * heads)
    if tensor.split == "rows":
        return tensor._replace(rows=math.ceil(tensor.rows / tp))
    if tensor.split == "columns":
        return tensor._replace(columns=math.ceil(tensor.columns / tp))
    return tensor


def outer_tensors_of(model: Model, layout: Layout, stage: int) -> list[Tensor]:
    """Tensors of a stage outside its layers: the embeddings on the first, the norm and the head on the last.

    A tied head is the embedding's matrix. Where the embedding is on another stage, the last stage has a copy of it
    (Megatron-LM).
    """
    is_first = stage == 0
    is_last = stage == layout.pp - 1
    tensors = []
    for tensor in outer_tensors(model):
        follows_layers = tensor.name in ("norm", "norm bias", "head")
        is_tied_head = model.tied and tensor.name == "embedding"
        belongs_to_first = not follows_layers
        belongs_to_last = follows_layers or is_tied_head
        if is_first and belongs_to_first:
            tensors.append(tensor)
        elif is_last and belongs_to_last:
            tensors.append(tensor)
    return tensors


def stage_parameters(model: Model, layout: Layout, stage: int) -> int:
    """Parameters that one rank of a stage computes with: divided by pp, tp and ep, not by ZeRO."""
    return sum(unit.times * unit.numbers for unit in units_of(model, layout, stage))


def fsdp_parameters(model: Model, layout: Layout, stage: int) -> int:
    """How many of a stage's parameters fully_shard divides among ranks and gathers.

    The other ones are experts that no other rank has. They stay as they are, because there is nobody to share them with
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
    """How many parameters of a stage the first rank keeps if ranks share them, as ZeRO and fully_shard do.

    shards: "rows" cuts each tensor between its rows and rounds up, as fully_shard does, so that the first rank has
    most; "even" cuts one flat tensor of all parameters (ZeRO's formula, DeepSpeed, Megatron-LM).
    """
    total: float = 0
    for unit in units_of(model, layout, stage):
        # Only ranks that have the same experts can share them.
        sharers = max(layout.sharers // unit.expert_ranks, 1)
        for tensor in unit.tensors:
            rows: float = tensor.rows / sharers
            if shards == "rows":
                rows = math.ceil(rows)
            total += unit.times * tensor.copies * tensor.columns * rows
    return total


def states_per_rank(parameters: float, shard: float, zero: int, sizes: StateBytes) -> dict[str, float]:
    """{kind: bytes} of parameters, gradients and optimizer state on a rank.

    parameters: how many the rank computes with. shard: how many of them it keeps where they are divided. ZeRO stage 1
    divides the optimizer's state, stage 2 the gradients, too, and stage 3 all: for Ψ parameters in mixed precision and
    N ranks 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N bytes for stages 0 to 3 (Rajbhandari et al. 2020, figure 1).
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

    layer: its number, which matters only in models with experts. recompute: what is recomputed, instead of the
    layout's. sequence_inputs: the convention of that name; the paper's formulas are for "again".

    For GPT with s tokens, a micro-batch of b, width h, a heads and t = tp this is sbh(34 + 5as/h) in 16 bits; with
    tensor parallelism sbh(10 + 24/t + 5as/ht), with sequence parallelism, too, sbh(34 + 5as/h)/t. Selective
    recomputation drops 5as/h, and full recomputation stores only the layer's input, 2sbh (Korthikanti et al. 2022,
    equations 1 to 4 and table 2). Here the parts are added up, so that the sum also holds for other MLPs, fewer heads
    of keys and values, no dropout and 32 bits. Attention "flash" never stores the scores. "sac" is selective
    checkpointing of whole operations (see sac_numbers).
    """
    recompute = recompute or layout.recompute
    has_experts = model.has_experts(layer % model.layers)  # -1 is the last layer, as in a list.
    tokens = layout.tokens(model)
    number_bytes = layout.element_bytes
    if recompute == "full":
        return tokens * (model.width / layout.norm_sharers) * number_bytes
    if recompute == "sac":
        return tokens * sac_numbers(model, layout, has_experts) * number_bytes

    # Numbers for each token that tensor parallelism divides: queries and attention's output, then keys and values.
    # Latent attention adds to each query, and to each key, the numbers that tell positions.
    positions = 2 * model.heads * model.position_width
    divided = 2 * model.attention_width + 2 * model.head_width * model.kv_heads + positions
    # Numbers for each token that only sequence parallelism divides: the norms' inputs.
    undivided = model.norms * model.width
    # What the MLP stores between its matrices.
    if has_experts:
        experts = model.active_experts + model.shared_experts
        divided += experts * model.mlp_matrices * model.ffn
        # A copy of the token for each further expert, and the router's scores.
        undivided += (experts - 1) * model.width + model.experts
    else:
        divided += model.mlp_matrices * model.ffn_of_dense_layers
    # The inputs of attention and MLP. Sequence parallelism gathers them: either they are kept as gathered, or each rank
    # keeps its part and gathers again in the backward.
    inputs: float = 2 * model.width
    if sequence_inputs == "again":
        inputs /= layout.norm_sharers
    mask_bytes = 0
    if model.dropout:
        mask_bytes = 2 * model.width  # after attention and after the MLP, one byte for each number

    bytes_per_token = divided * number_bytes / layout.tp
    bytes_per_token += inputs * number_bytes
    bytes_per_token += (undivided * number_bytes + mask_bytes) / layout.norm_sharers
    if layout.attention == "scores" and recompute == "none":
        score_bytes = number_bytes  # the softmax's output
        if model.dropout:
            score_bytes += number_bytes + 1  # dropout's output, and its mask of one byte
        bytes_per_token += score_bytes * model.heads * model.seq / layout.tp
    return tokens * bytes_per_token


def sac_numbers(model: Model, layout: Layout, has_experts: bool) -> float:
    """How many numbers for each token selective checkpointing of operations keeps of a layer.

    It keeps the layer's input and the outputs of attention, of every second matrix product and of each reduce-scatter
    (torchtitan, distributed/activation_checkpoint.py).
    """
    kept = model.width / layout.norm_sharers + model.attention_width / layout.tp
    if layout.sequence_parallel:
        kept += 2 * model.width / layout.tp  # A layer has two reduce-scatters.
    every_second_matrix = matrices_of(model, has_experts)[::2]
    for matrix in every_second_matrix:
        # A product with a matrix of [rows, columns] has as many numbers as the matrix has rows.
        kept += local(matrix, model, layout.tp).rows
    return kept


def in_flight(layout: Layout, stage: int, convention: str = "schedule") -> float:
    """How many micro-batches' activations a pipeline stage holds at once, at most; each is of all the stage's layers.

    With 1F1B the first of p stages holds p micro-batches of L/p layers each, as much as one GPU without stages holds.
    Interleaving v parts on a stage makes that p(1 + (p-1)/(pv)) (Korthikanti et al. 2022, section 4.2.3). GPipe holds
    all m micro-batches. convention: the one of the same name; "one" is for a single micro-batch, whatever the schedule.
    """
    p = layout.pp
    m = layout.micro_batches
    v = layout.interleave
    if convention == "one":
        return 1
    if layout.schedule == "gpipe":
        return m
    if v == 1:
        stages_from_here_on = p - stage
        return min(stages_from_here_on, m)
    # A stage runs so many forwards of a part of the model before its first backward, and one more just before it
    # (num_warmup_microbatches in Megatron-LM's schedules.py). Each holds a v-th of the stage's layers.
    warmup_forwards = 2 * (p - stage - 1) + (v - 1) * p
    forwards = min(warmup_forwards + 1, m * v)
    return forwards / v


# --- All of a rank ----------------------------------------------------------------------------------------------------


def memory(model: Model, layout: Layout, conventions: Conventions) -> list[dict[str, float]]:
    """[{kind: bytes}] of a rank of each pipeline stage."""
    return [stage_memory(model, layout, conventions, stage) for stage in range(layout.pp)]


def stage_memory(model: Model, layout: Layout, conventions: Conventions, stage: int) -> dict[str, float]:
    """{kind: bytes} on the first rank of a stage, at the moment of a step that needs most; "total" is their sum.

    Memory is fullest when the backward begins, with all activations and the output, or when the first gradient of a
    sharded layer is reduced. PyTorch's FSDPMemTracker sees the same within 3 % (chapter 15).
    """
    number_bytes = layout.element_bytes
    tokens = layout.tokens(model)
    kinds = bytes_of_states(model, layout, conventions, stage)

    # What the forward stores for the backward: in bytes for one micro-batch, layer by layer, and then all of it.
    layers = layout.layers_of(model, stage)
    micro_batches = in_flight(layout, stage, conventions.in_flight)
    inputs = conventions.sequence_inputs
    stored = [activations_per_layer(model, layout, layer, sequence_inputs=inputs) for layer in layers]
    kinds["activations"] = sum(stored) * micro_batches

    # While a layer's backward runs, it holds the gradients of its MLP's inner numbers, and of its output. The last
    # matrix of an MLP reads inner numbers, and each of the others makes some.
    experts_at_work = max(model.active_experts, 1)
    inner = (model.mlp_matrices - 1) * model.ffn * experts_at_work
    kinds["working"] = tokens * number_bytes * (inner / layout.tp + model.width)
    if layout.recomputes_layers:
        kinds["recomputed layer"] = activations_per_layer(model, layout, layers[-1], "none", inputs)
        if layout.recompute == "sac":
            kinds["recomputed layer"] -= stored[-1]  # What was kept is not computed again.
    if stage == 0 and model.dropout:
        # A mask of one byte, sbhp/t (Korthikanti et al. 2022, section 4.3).
        kinds["embedding's dropout"] = tokens * model.width * micro_batches / layout.norm_sharers
    if stage == layout.pp - 1:
        logits = logits_bytes(model, layout, conventions)
        # The inputs of the last norm and of the head, and the logits: 4sbh/t · (1 + v/h), section 4.3.
        kinds["output"] = 2 * tokens * model.width * number_bytes / layout.norm_sharers + logits
        # The logits are freed before the layers' backward, which uses their memory.
        kinds["working"] = max(kinds["working"] - logits, 0)

    if layout.zero == 3:
        kinds = fullest_moment(model, layout, conventions, stage, kinds, stored)
    if conventions.allocator == "reserved":
        kinds["allocator's gaps"] = ALLOCATOR_GAPS * sum(kinds.values())
    kinds["total"] = sum(kinds.values())
    return kinds


def bytes_of_states(model: Model, layout: Layout, conventions: Conventions, stage: int) -> dict[str, float]:
    """{kind: bytes} of parameters, gradients and optimizer state on the first rank of a pipeline stage, on the GPU."""
    parameters = stage_parameters(model, layout, stage)
    cut = "even"  # ZeRO-1 and 2 cut one flat tensor.
    if layout.zero == 3:
        cut = "rows"  # ZeRO-3 is planned as fully_shard, which cuts each tensor between its rows.
    shard = shared_parameters(model, layout, stage, cut)
    kinds = states_per_rank(parameters, shard, layout.zero, conventions.state_bytes)
    if layout.offload:
        kinds["gradients"] = 0
        kinds["optimizer"] = 0
    return kinds


def logits_bytes(model: Model, layout: Layout, conventions: Conventions) -> float:
    """Bytes of the copies of the logits, which are in float32, or in bfloat16 if the loss computes in it.

    PyTorch's cross_entropy has four copies at once: the logits, their log-softmax, and the gradient of each. If the
    caller frees the logits, three are left. With tensor parallelism there are four, because loss_parallel adds two.
    """
    copies = 4
    if conventions.logits == "stored":
        copies = 1
    elif conventions.logits == "freed" and layout.tp == 1:
        copies = 3
    bytes_of_logit = 2 if conventions.loss == "bfloat16" else 4
    return bytes_of_logit * copies * layout.tokens(model) * model.vocab / layout.tp


@dataclass(frozen=True)
class Gathered:
    """Bytes of parameters and gradients that fully_shard holds in full, beside its shards, at two moments of a step."""

    backward_begins: float
    first_reduction: float  # when the gradient of the first layer is reduced


def fullest_moment(
    model: Model,
    layout: Layout,
    conventions: Conventions,
    stage: int,
    kinds: dict[str, float],
    stored: list[float],
) -> dict[str, float]:
    """Choose the fuller of two moments of a step with fully_shard, and return its {kind: bytes}, with "gathered".

    kinds: the memory of the stage's first rank without what is gathered. stored: bytes of activations of each layer.

    When the backward begins, all activations are there. When the gradient of the first layer is reduced, the
    activations of the last two layers and the output are gone, but more is gathered (see gathered_for_each_pass).
    """
    layers = len(stored)
    parameters = fsdp_parameters(model, layout, stage)
    outside = sum(local(tensor, model, layout.tp).numbers for tensor in outer_tensors_of(model, layout, stage))
    parameters_of_layer = (parameters - outside) / layers
    accumulates = layout.micro_batches > 1
    gathers_once = conventions.gathers_once(layout.pp)
    if gathers_once:
        gathered = gathered_once_a_step(layout, conventions, parameters, parameters_of_layer)
    else:
        gathered = gathered_for_each_pass(layout, outside, parameters_of_layer, layers)
    backward_begins = {**kinds, "gathered": gathered.backward_begins}
    first_reduction = {**kinds, "gathered": gathered.first_reduction, "output": 0, "working": 0}
    first_reduction["activations"] -= sum(stored[-2:])

    # The gradients of experts that FSDP leaves as they are stay from one micro-batch to the next.
    staying_gradients: float = 0
    if accumulates:
        left_as_they_are = stage_parameters(model, layout, stage) - parameters
        staying_gradients = left_as_they_are * conventions.state_bytes.gradient
    if gathers_once or not accumulates:
        # The optimizer's zero_grad has freed the gradients. Reduced ones come layer by layer.
        reduced_gradients = kinds["gradients"] - staying_gradients
        backward_begins["gradients"] = staying_gradients
        first_reduction["gradients"] = staying_gradients + reduced_gradients / layers
    return max(backward_begins, first_reduction, key=lambda moment: sum(moment.values()))


def gathered_once_a_step(
    layout: Layout, conventions: Conventions, parameters: int, parameters_of_layer: float
) -> Gathered:
    """What fully_shard holds in full if it gathers once a step, as in a pipeline (reshard_after_forward=False).

    All parameters of the stage stay, and so do all gradients if several micro-batches add to them
    (set_requires_gradient_sync). A rank of 16-bit parameters and float32 gradients then holds 2Ψ + 4Ψ bytes, for the Ψ
    parameters of its stage, beside the shares of its states (torchtitan, fsdp_reshard_after_forward).
    """
    kept_bytes = layout.element_bytes  # for each parameter
    # From PyTorch 2.15 on, one layer is in the buffer of an all-gather at a time, and before it two were.
    buffer_bytes = layout.element_bytes  # for each parameter of that layer
    if layout.micro_batches > 1:
        kept_bytes += reduced_bytes(conventions)
        buffer_bytes = reduced_bytes(conventions)  # The buffer of a reduce-scatter is larger then.
    kept: float = kept_bytes * parameters
    return Gathered(backward_begins=kept, first_reduction=kept + buffer_bytes * parameters_of_layer)


def gathered_for_each_pass(layout: Layout, outside: int, parameters_of_layer: float, layers: int) -> Gathered:
    """What fully_shard holds in full if it gathers a layer for each pass, and frees it after that.

    outside: how many parameters of the stage are outside its layers. layers: how many layers the stage has.

    When the backward begins, the layer at work, the next one, and what is outside the layers are gathered. When the
    gradient of the first layer is reduced, the layer's gradient is there, too, and the float32 memory in which the
    gradient of the layer before is reduced (chapter 6 measures four times a block). A next layer is gathered then only
    if the stage has more than two.
    """
    number_bytes = layout.element_bytes
    float32_bytes = 4
    next_layer: float = 0
    if layers > 2:
        next_layer = number_bytes * parameters_of_layer
    # The layer's parameters, its gradient, and its float32 memory.
    layer_at_work = (2 * number_bytes + float32_bytes) * parameters_of_layer
    outside_with_gradients = 2 * number_bytes * outside
    return Gathered(
        backward_begins=2 * number_bytes * parameters_of_layer + number_bytes * outside,
        first_reduction=next_layer + layer_at_work + outside_with_gradients,
    )


def reduced_bytes(conventions: Conventions) -> int:
    """Bytes of a gradient while it is summed over micro-batches and ranks: those it is kept in, but 2 to 4 of them.

    A gradient that is not kept at all (0 bytes) is summed in 16 bits. Of one that is kept twice, in 16 and in 32 bits
    (6 bytes), the 32 bits are summed.
    """
    return min(max(conventions.state_bytes.gradient, 2), 4)
