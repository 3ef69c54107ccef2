"""Seconds of a training step, from counts of work and five constants that were fitted on 88 measured steps.

The steps are vTrain's (Bang et al. 2024), of Megatron-DeepSpeed on 64 to 512 A100 GPUs; experiments/vtrain.py fits the
constants. Work is counted from the model and the layout, and the constants say which share of a data sheet's speed is
reached. For other GPUs the data sheet is another one and the shares stay the same, apart from the factors of
corrections.py, which were fitted on published steps of other programs. Such a prediction is an extrapolation, and its
interval is that of those steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.communication import RECEIVED, Collective, activations, data_parallel, with_seconds
from helpers.planner.conventions import Conventions
from helpers.planner.corrections import CORRECTIONS, EXTRAPOLATION_FACTOR, Corrections
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_parameters
from helpers.planner.model import Model


@dataclass(frozen=True)
class Constants:
    """The constants of the fit: which share of each data sheet speed a program reaches, and the host's seconds."""

    matmul: float  # the share of the peak FLOP/s that large matrix products reach
    memory: float  # the share of the memory's speed that elementwise operations reach
    in_node: float  # the share of the speed of links in a node that collectives reach
    between: float  # the share of the speed of links between nodes that collectives reach
    launch: float  # seconds that the host takes to launch the kernels of one layer in one pass


# What vtrain.fit(vtrain.measured()) gives, rounded. A test compares them with a new fit.
FITTED = Constants(matmul=0.733, memory=0.829, in_node=0.806, between=0.799, launch=0.00147)
# 90 % of the measured steps took between prediction / 1.18 and prediction · 1.18 seconds. A test compares the factor
# with vtrain.interval_factor().
COVERAGE = 0.9
INTERVAL_FACTOR = 1.18
# If the cluster's speeds of products and links were measured, a program has reached all of them.
CONSTANTS_AT_MEASURED_SPEEDS = replace(FITTED, matmul=1.0, in_node=1.0, between=1.0)

# Memory traffic of the optimizer for each parameter that a rank updates: float32 weights and two moments are read and
# written (24 bytes), the gradient is copied to float32 (2 + 4) and read for its norm and by Adam (4 + 4), and the
# 16-bit weights are written (2).
OPTIMIZER_BYTES = 40
# Memory traffic of the loss for each logit: it is written in 16 bits (2 bytes), copied to float32 (2 + 4) and read by
# the loss (4), and its gradient is written (4).
PER_LOGIT_BYTES = 16


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of one step, and the interval in which a measurement is expected."""

    seconds: float
    low: float  # of the interval
    high: float
    parts: dict[str, float]  # {part of the step: seconds}
    extrapolated: str  # how the step differs from the measured ones, in words; empty if it does not

    @property
    def rounded(self) -> float:
        """The seconds with nine digits. Layouts that differ by less are called equally fast, on every machine."""
        return float(f"{self.seconds:.9g}")


def step_time(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions | None = None) -> StepTime:
    """Predict the seconds of a training step, and the interval in which a measurement of it is expected.

    The interval was tested by leaving each model size out of the fit in turn: 89 % of the measured steps were in the
    interval that was predicted without their model size (vtrain.coverage). If the job differs from the measured ones,
    the interval is that of published steps of other programs (corrections.py).
    """
    if cluster.measured:
        constants = CONSTANTS_AT_MEASURED_SPEEDS
        corrections = replace(CORRECTIONS, float8=1.0)  # The cluster's file has the measured speed of float8.
    else:
        constants = replace(FITTED, matmul=FITTED.matmul * cluster.reaches)
        corrections = CORRECTIONS
    work = count_work(model, layout, cluster, conventions or Conventions())
    seconds_by_part = seconds_of_parts(work, constants, corrections)
    seconds = sum(seconds_by_part.values())

    differences = extrapolated(model, layout, cluster)
    if differences:
        interval_factor = EXTRAPOLATION_FACTOR
    else:
        interval_factor = INTERVAL_FACTOR
    return StepTime(
        seconds=seconds,
        low=seconds / interval_factor,
        high=seconds * interval_factor,
        parts=seconds_by_part,
        extrapolated=differences,
    )


def extrapolated(model: Model, layout: Layout, cluster: Cluster) -> str:
    """How a job differs from all the measured steps on which the constants were fitted, in words.

    For example "experts, FSDP or ZeRO". It is empty if the job does not differ.
    """
    differences = {
        f"{cluster.gpu} (fitted on A100s)": not cluster.gpu.startswith("a100"),
        "experts": model.experts > 0,
        "context parallelism": layout.cp > 1,
        "FSDP or ZeRO": layout.zero > 0,
        "FlashAttention": layout.attention == "flash",
        "gated MLPs": model.gated,
        "checkpointed operations": layout.recompute == "sac",
        "a limit of power": cluster.power_limit > 0,
    }
    return ", ".join(words for words, applies in differences.items() if applies)


# --- What is counted, whatever the constants are ----------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWork:
    """What one rank computes for one micro-batch in an average layer, in all passes together.

    Times are seconds at the full speed of the data sheet.
    """

    passes: int  # 1 for the forward, 2 for the backward, and 1 more if the forward is recomputed
    products: float  # seconds of the matrix products outside of attention and of routed experts
    expert_products: float  # seconds of the routed experts' matrix products
    attention: float  # seconds of attention's matrix products, behind which context parallelism may hide
    elementwise: float  # seconds of operations that only read and write memory


@dataclass(frozen=True)
class StepWork:
    """What one rank of the busiest stage does in a step. Seconds are those at the data sheet's full speed."""

    layout: Layout
    conventions: Conventions
    layers: int  # on the busiest stage
    layers_of_last: int  # on the last stage, which also computes the head
    layer: LayerWork
    attention_share: float  # of the peak that attention's kernel reaches; 0 if it is that of other products
    head: float  # seconds for one micro-batch
    loss: float  # seconds for one micro-batch
    optimizer: float  # seconds for one step
    tensor_parallel: list[Collective]
    expert_parallel: list[Collective]
    context_parallel: list[Collective]
    to_stages: list[Collective]
    # Collectives of gradients that run during a backward, and during how many micro-batches' backwards they do.
    overlapped: list[Collective]
    overlapping_micro_batches: int
    data_parallel: list[Collective]  # all others of parameters and gradients


def count_work(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions) -> StepWork:
    """Count what a step computes, moves and sends, in seconds at the full speed of the data sheet.

    The collectives of DDP and ZeRO follow the backward, as they did in the measured Megatron-DeepSpeed, so their time
    is an upper bound. With the convention overlap = "backward" those of gradients run during the backward, as PyTorch's
    DDP reduces its buckets (Li et al. 2020, section 3.2.3).
    """
    stage_layers = layout.stage_layers(model)
    most_layers = max(stage_layers)
    busiest_stage = stage_layers.index(most_layers)
    bytes_per_second = memory_speed(layout, cluster)
    attention_share = 0.0
    if layout.attention == "flash":
        attention_share = cluster.attention_reaches
    updated_parameters = 0.0  # by this rank's GPU; with offload the host updates them
    if not layout.offload:
        updated_parameters = stage_parameters(model, layout, busiest_stage) / layout.sharers

    # The output layer takes 2 FLOPs for each weight and token in the forward, and twice as many in the backward.
    flops_per_weight = 6
    logits = layout.tokens(model) * model.vocab / layout.tp
    head_flops = flops_per_weight * logits * model.width
    # PER_LOGIT_BYTES are counted for logits of 2 bytes.
    loss_bytes = PER_LOGIT_BYTES * logits * layout.element_bytes / 2

    # A stage in the middle is counted, if there is one, because it both receives and sends. Recomputation includes a
    # layer's last output (early_stop=False), because the measured Megatron-DeepSpeed computes it, too.
    counted_stage = 0
    if layout.pp > 2:
        counted_stage = 1
    of_activations = activations(model, layout, counted_stage, early_stop=False, dispatch=conventions.dispatch)
    between_stages = []
    in_layers = []
    for collective in with_seconds(of_activations, cluster):
        if collective.dimension == "pp" or collective.what == RECEIVED:
            between_stages.append(collective)
        else:
            in_layers.append(collective)

    overlaps_backward = conventions.overlap == "backward" and layout.zero < 3
    overlapped = []
    exposed = []
    for collective in with_seconds(data_parallel(model, layout, conventions), cluster):
        if overlaps_backward and collective.phase == "backward":
            overlapped.append(collective)
        else:
            exposed.append(collective)
    # DDP and ZeRO-1 reduce gradients in the backward of the last micro-batch only, and ZeRO-2 may in that of each.
    overlapping_micro_batches = 1
    if layout.zero == 2 and not conventions.gathers_once(layout.pp):
        overlapping_micro_batches = layout.micro_batches

    return StepWork(
        layout=layout,
        conventions=conventions,
        layers=most_layers,
        layers_of_last=stage_layers[-1],
        layer=layer_work(model, layout, cluster, conventions),
        attention_share=attention_share,
        head=head_flops / cluster.limited_peak(layout.attention_dtype),
        loss=loss_bytes / bytes_per_second,
        optimizer=OPTIMIZER_BYTES * updated_parameters / bytes_per_second,
        tensor_parallel=[collective for collective in in_layers if collective.dimension == "tp"],
        expert_parallel=[collective for collective in in_layers if collective.dimension == "ep"],
        context_parallel=[collective for collective in in_layers if collective.dimension == "cp"],
        to_stages=between_stages,
        overlapped=overlapped,
        overlapping_micro_batches=overlapping_micro_batches,
        data_parallel=exposed,
    )


def layer_work(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions) -> LayerWork:
    """What one rank computes in an average layer: its FLOPs and bytes, divided by the data sheet's speeds."""
    products = product_flops(model, layout) / cluster.limited_peak(layout.dtype)
    expert_products = products * model.expert_gemm_weights() / model.gemm_weights()
    return LayerWork(
        passes=passes_over_layer(layout),
        products=products - expert_products,
        expert_products=expert_products,
        attention=attention_flops(model, layout, conventions) / cluster.limited_peak(layout.attention_dtype),
        elementwise=elementwise_bytes(model, layout) / memory_speed(layout, cluster),
    )


def passes_over_layer(layout: Layout) -> int:
    """How many forwards the passes over a layer are worth: 1 for the forward, 2 for the backward, 1 if recomputed."""
    forward = 1
    backward = 2
    if layout.recomputes_layers:
        return forward + backward + forward
    return forward + backward


def recomputes_attention(layout: Layout) -> bool:
    """Whether the backward computes the attention scores again.

    Checkpointing of operations ("sac") keeps the output of FlashAttention, which is one operation. It does not keep
    scores.
    """
    if layout.recompute == "sac":
        return layout.attention == "scores"
    return layout.recompute in ("full", "selective")


def product_flops(model: Model, layout: Layout) -> float:
    """FLOPs of an average layer's matrix products, without attention's, in all passes over a micro-batch.

    A forward takes 2 FLOPs for each weight and token, a multiplication and an addition (Narayanan et al. 2021,
    appendix). The backward takes two forwards: one for the gradients of the inputs, one for those of the weights.
    """
    forward = 2 * layout.tokens(model) * model.gemm_weights() / model.layers / layout.tp
    forwards_in_backward = 2
    recomputed_forwards = model.recomputed_share(layout.recompute)
    return forward * (1 + forwards_in_backward + recomputed_forwards)


def attention_flops(model: Model, layout: Layout, conventions: Conventions) -> float:
    """FLOPs of attention's two matrix products in all passes over a micro-batch.

    FlashAttention's backward takes 2.5 forwards, because it computes the scores again (Dao et al. 2022).
    """
    flops_of_forward = layout.tokens(model) * model.seq * model.flops_per_pair / layout.tp
    forwards_in_backward = 2 if layout.attention == "scores" else 2.5
    recomputed_forwards = 1 if recomputes_attention(layout) else 0
    flops = flops_of_forward * (1 + forwards_in_backward + recomputed_forwards)
    if conventions.causal == "half":
        flops *= 0.5  # The kernel skips the half of the pairs in which a token would see a later one.
    return flops


def elementwise_bytes(model: Model, layout: Layout) -> float:
    """Bytes that an average layer's norms, additions, activation functions and scores move for one micro-batch.

    They are counted for all passes together. For GPT with dropout in 16 bits, one pass moves 22h + 16h/t bytes a token,
    and with stored scores 13as/t more, where h is the width, t = tp, a the heads and s the sequence length.
    """
    # Bytes are counted for numbers of 16 bits. The last line makes them right for other numbers.
    number_bytes = 2
    mask_bytes = 0  # of dropout, for one number
    if model.dropout:
        mask_bytes = 1

    # For each of the layer's norms there is one addition to the residual stream and one dropout.
    norm_bytes = 2 * number_bytes  # A norm reads a number and writes one.
    addition_bytes = 3 * number_bytes  # An addition reads two numbers and writes one.
    bytes_of_width = norm_bytes + addition_bytes + mask_bytes
    bytes_of_pass = bytes_of_width * model.norms * model.width / layout.norm_sharers

    # An activation function reads a number and writes one. A gated one reads two.
    activation_bytes = 2 * number_bytes
    if model.gated:
        activation_bytes += number_bytes
    mlp_numbers = model.ffn
    if model.experts:
        mlp_numbers *= model.active_experts + model.shared_experts
        # Tokens are copied to the order of their experts, and the outputs are copied back (Gale et al. 2023).
        sorting_bytes = 4 * number_bytes
        bytes_of_pass += sorting_bytes * model.active_experts * model.width / layout.norm_sharers
    bytes_of_pass += activation_bytes * mlp_numbers / layout.tp
    bytes_per_token = bytes_of_pass * passes_over_layer(layout)

    if layout.attention == "scores":
        # The first product writes a score, the softmax reads it and writes one, and the second product reads that.
        score_bytes = 4 * number_bytes
        if model.dropout:
            score_bytes += 2 * number_bytes + mask_bytes  # Dropout reads and writes it once more.
        scores_per_token = model.heads * model.seq
        passes_over_scores = 3
        if recomputes_attention(layout):
            passes_over_scores = 4
        bytes_per_token += score_bytes * scores_per_token / layout.tp * passes_over_scores
    return layout.tokens(model) * bytes_per_token * layout.element_bytes / number_bytes


def memory_speed(layout: Layout, cluster: Cluster) -> float:
    """Bytes a second of the GPU's memory. If the cluster does not say, they follow from the peak, as on an A100."""
    if cluster.memory_speed:
        return cluster.memory_speed
    a100 = PRESETS["a100"]
    return cluster.peak(layout.attention_dtype) * a100["memory_speed"] / a100["peaks"]["bfloat16"]


# --- What it takes: counts and constants become seconds ---------------------------------------------------------------


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch in one layer of one rank, in all passes together."""

    products: float
    elementwise: float
    # Of the collectives of tensor, expert and context parallelism, as far as they do not run during something else.
    tensor: float
    expert: float
    context: float
    launch: float  # in which the GPU waits for the host

    @property
    def gpu_busy(self) -> float:
        """Seconds in which the GPU computes or communicates."""
        return self.products + self.elementwise + self.tensor + self.expert + self.context

    @property
    def total(self) -> float:
        """Seconds in which the GPU is busy or waits for the host."""
        return self.gpu_busy + self.launch


def seconds_of_layer(work: StepWork, constants: Constants, corrections: Corrections) -> LayerSeconds:
    """Seconds of one micro-batch in one layer, from its work, which is counted in seconds at full speed.

    constants: the shares of full speed that products, memory and links reach. corrections: factors for programs and
    GPUs other than those on which the constants were fitted.
    """
    layout = work.layout
    conventions = work.conventions
    layer_passes = work.layers * layout.micro_batches  # how often in a step a layer of the stage gets a micro-batch

    products = work.layer.products + work.layer.expert_products / corrections.experts
    if layout.dtype == "float8":
        products /= corrections.float8
    if conventions.kernels == "transformer engine":
        products /= corrections.engine
    products /= constants.matmul

    attention_rate = work.attention_share or constants.matmul
    attention = work.layer.attention / attention_rate
    context = seconds_of(work.context_parallel, constants) / layer_passes
    if conventions.context == "overlapped":
        context = max(context - attention, 0)  # Ring attention sends while it computes.
    elif layout.cp > 1:
        attention /= corrections.parts

    elementwise = work.layer.elementwise / constants.memory
    if conventions.kernels == "eager":
        elementwise *= corrections.eager
    tensor = seconds_of(work.tensor_parallel, constants) / layer_passes
    if conventions.tensor == "overlapped":
        tensor *= corrections.exposed

    without_launch = LayerSeconds(
        products=products + attention,
        elementwise=elementwise,
        tensor=tensor,
        expert=seconds_of(work.expert_parallel, constants) / layer_passes,
        context=context,
        launch=0,
    )
    # The GPU waits if the host takes longer to launch kernels than the GPU takes to run them. The root of the sum of
    # squares is near the longer of the two times, with a smooth transition between them.
    gpu_busy = without_launch.gpu_busy
    host_busy = constants.launch * work.layer.passes
    longer = (gpu_busy**2 + host_busy**2) ** 0.5
    return replace(without_launch, launch=longer - gpu_busy)


def seconds_of(groups: Iterable[Collective], constants: Constants) -> float:
    """Seconds of all these collectives of a step, if links reach the shares of their speed that the constants say."""
    return sum(group.seconds(constants.in_node, constants.between) for group in groups)


def seconds_of_parts(work: StepWork, constants: Constants, corrections: Corrections) -> dict[str, float]:
    """{part of a step: seconds}, such as {"matrix products": 1.2, …}, from work counted in seconds at full speed.

    constants: the shares of full speed that products, memory and links reach. corrections: factors for programs and
    GPUs other than those on which the constants were fitted.

    The busiest stage works on m micro-batches. It also waits, because the last stage waits for the first one at the
    beginning, and the first one for the last at the end. That takes as long as p-1 more micro-batches, or a v-th of it
    if stages have v parts of the model (Narayanan et al. 2021, section 2.2).
    """
    layout = work.layout
    micro_batches = layout.micro_batches
    layers = work.layers
    layer_passes = layers * micro_batches  # how often in a step a layer of the busiest stage gets a micro-batch
    layer = seconds_of_layer(work, constants, corrections)

    # Seconds of one micro-batch on the stage. The last stage also computes the head. That delays the other stages,
    # unless the last one has fewer layers.
    send = seconds_of(work.to_stages, constants) / micro_batches
    stage = layers * layer.total
    head = work.head / constants.matmul + work.loss / constants.memory
    layers_less_on_last_stage = layers - work.layers_of_last
    head_delay = max(head - layers_less_on_last_stage * layer.total, 0)

    # Seconds of the step. The collectives of fully_shard run during all passes, a layer at a time, so only the time
    # counts that they take longer. Other collectives of gradients run during the backward, if the convention says so.
    data = seconds_of(work.data_parallel, constants)
    if layout.zero == 3:
        data = exposed_seconds(data, pieces=layer_passes, computing=layer_passes * layer.total)
    passes_of_backward = work.layer.passes - 1  # all but the forward
    share_of_backward = passes_of_backward / work.layer.passes
    backward = work.overlapping_micro_batches * layers * layer.total * share_of_backward
    gradients = exposed_seconds(seconds_of(work.overlapped, constants), pieces=layers, computing=backward)

    other_stages = layout.pp - 1
    return {
        "matrix products": layer_passes * layer.products,
        "element by element": layer_passes * layer.elementwise,
        "tensor parallel": layer_passes * layer.tensor,
        "expert parallel": layer_passes * layer.expert,
        "context parallel": layer_passes * layer.context,
        "launching": layer_passes * layer.launch,
        "sending to stages": micro_batches * send,
        "waiting for stages": other_stages * (stage + send) / layout.interleave,
        "output layer": micro_batches * head_delay,
        "data parallel": data + gradients,
        "optimizer": work.optimizer / constants.memory,
    }


def exposed_seconds(communication: float, pieces: int, computing: float) -> float:
    """How many seconds of communication are left if it runs during computing, piece by piece.

    A piece is the collectives of one layer. During the first or the last piece nothing is computed, so all of it is
    left. Of the other pieces only the time is left that they take longer than the computing.
    """
    one_piece = communication / pieces
    other_pieces = communication * (1 - 1 / pieces)
    return one_piece + max(other_pieces - computing, 0)
