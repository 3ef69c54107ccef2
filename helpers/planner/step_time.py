"""Seconds of a training step, from counts of work and five constants that were fitted on 88 measured steps.

The steps are vTrain's (Bang et al. 2024): Megatron-LM on 64 to 512 A100 GPUs; experiments/vtrain.py fits them. Work is
counted from the model and the layout; the constants say which share of a data sheet's speed is reached. On other GPUs
the shares are taken over and the data sheet changes: an extrapolation, outside of what the interval knows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.communication import RECEIVED, Collective, activations, data_parallel, with_seconds
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_parameters
from helpers.planner.model import Model


@dataclass(frozen=True)
class Constants:
    """Shares of a data sheet's speed, and seconds of the host."""

    matmul: float  # of the peak, by large matrix products
    memory: float  # of the memory's speed, by what reads and writes element by element
    in_node: float  # of the link in a node, by collectives
    between: float  # of the link between nodes
    launch: float  # seconds in which the host launches one layer's kernels, for one pass


# What vtrain.fit(vtrain.measured()) gives, rounded. A test compares them, and FACTOR with vtrain.interval_factor().
FITTED = Constants(matmul=0.733, memory=0.829, in_node=0.806, between=0.799, launch=0.00147)
# This share of the measured steps took between prediction / FACTOR and prediction · FACTOR seconds.
COVERAGE = 0.9
FACTOR = 1.18
# The upper end of a prediction that is extrapolated is prediction · FACTOR_ELSEWHERE. One of the 15 published steps in
# experiments/steps.py took longer than that: the one with samples of 256k tokens.
FACTOR_ELSEWHERE = 1.6
# For a cluster whose speeds were measured: nothing is taken off them.
REACHED = replace(FITTED, matmul=1.0, in_node=1.0, between=1.0)

# For each parameter that a rank updates: float32 weights and two moments are read and written (24), the gradient is
# copied to float32 (6) and read for its norm and by Adam (8), and the 16-bit weights are written (2).
OPTIMIZER_BYTES = 40
PER_LOGIT_BYTES = 16  # written (2), copied to float32 (6), read by the loss (4), and their gradient (4)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and between which they are expected."""

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    extrapolated: str  # how the step differs from the measured ones; empty if it does not

    @property
    def rounded(self) -> float:
        """Seconds to nine digits: layouts that differ by less are equally fast, on every machine."""
        return float(f"{self.seconds:.9g}")


def step_time(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions | None = None) -> StepTime:
    """The StepTime of a layout: with the constants REACHED for a cluster whose speeds were measured, else with FITTED.

    low and high are the seconds between which a measured step is expected. Each model size was left out of the fit in
    turn, and 89 % of its measured steps lay between them (vtrain.coverage). Where something is extrapolated, high is
    further away, by what a few published steps took longer; nobody has counted how many steps that interval covers.
    """
    work = count_work(model, layout, cluster, conventions or Conventions())
    constants = replace(FITTED, matmul=FITTED.matmul * cluster.reaches)
    if cluster.measured:
        constants = REACHED
    parts = seconds_of_parts(work, constants)
    seconds = sum(parts.values())
    differences = extrapolated(model, layout, cluster)
    factor = FACTOR_ELSEWHERE if differences else FACTOR
    return StepTime(seconds, seconds / FACTOR, seconds * factor, parts, differences)


def extrapolated(model: Model, layout: Layout, cluster: Cluster) -> str:
    """What of a layout the measured steps did not have, in words."""
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


# --- What is counted: the same for all constants ----------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWork:
    """Computing on one rank in all passes over a mean layer, for one micro-batch: seconds at the data sheet's speed."""

    passes: int  # forward, backward twice, and a recomputed forward, whole or not
    products: float  # matrix products without those of attention
    attention: float  # which hides context parallelism
    elementwise: float


@dataclass(frozen=True)
class StepWork:
    """What one rank of the busiest stage does in a step. Seconds are those at the data sheet's speed."""

    layout: Layout
    layers: int  # of the busiest stage
    layers_of_last: int  # of the last stage, which has the head, too
    layer: LayerWork
    attention_share: float  # of its peak that attention's kernel reaches; 0 for that of matrix products
    head: float  # seconds for one micro-batch
    loss: float  # seconds for one micro-batch
    optimizer: float  # seconds
    tensor_parallel: list[Collective]
    expert_parallel: list[Collective]
    context_parallel: list[Collective]
    to_stages: list[Collective]
    overlapped: list[Collective]  # of gradients, hidden behind the backward of some micro-batches
    overlapping_micro_batches: int
    data_parallel: list[Collective]  # the other ones of parameters and gradients


def count_work(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions) -> StepWork:
    """The StepWork of a layout.

    Context parallelism hides behind attention, fully_shard's collectives behind computing. DDP's and ZeRO's follow it,
    as in Megatron-LM when it was measured: an upper bound. With the convention overlap = "backward" the gradients' hide
    behind the last backward, as PyTorch's DDP reduces its buckets (Li et al. 2020, section 3.2.3).
    """
    stage_layers = layout.stage_layers(model)
    layers = max(stage_layers)
    speed = memory_speed(layout, cluster)
    logits = layout.tokens(model) * model.vocab / layout.tp
    updated = 0.0
    if not layout.offload:
        updated = stage_parameters(model, layout, stage_layers.index(layers)) / layout.sharers

    # A stage in the middle sends and receives. Megatron-LM, which was measured, recomputes a layer's last output, too.
    middle = 1 if layout.pp > 2 else 0
    sent = with_seconds(activations(model, layout, stage=middle, early_stop=False), cluster)
    in_layers = [group for group in sent if group.dimension != "pp" and group.what != RECEIVED]

    overlaps = conventions.overlap == "backward" and layout.zero < 3
    overlapped = []
    exposed = []
    for group in with_seconds(data_parallel(model, layout, conventions), cluster):
        if overlaps and group.phase == "backward":
            overlapped.append(group)
        else:
            exposed.append(group)
    reduces_each = layout.zero == 2 and conventions.gather == "each"

    return StepWork(
        layout=layout,
        layers=layers,
        layers_of_last=stage_layers[-1],
        layer=layer_work(model, layout, cluster, conventions),
        attention_share=cluster.attention_reaches if layout.attention == "flash" else 0,
        head=6 * logits * model.width / cluster.limited_peak(layout.attention_dtype),
        loss=PER_LOGIT_BYTES * logits * layout.element_bytes / 2 / speed,
        optimizer=OPTIMIZER_BYTES * updated / speed,
        tensor_parallel=[group for group in in_layers if group.dimension == "tp"],
        expert_parallel=[group for group in in_layers if group.dimension == "ep"],
        context_parallel=[group for group in in_layers if group.dimension == "cp"],
        to_stages=[group for group in sent if group.dimension == "pp" or group.what == RECEIVED],
        overlapped=overlapped,
        overlapping_micro_batches=layout.micro_batches if reduces_each else 1,
        data_parallel=exposed,
    )


def layer_work(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions) -> LayerWork:
    """The work of a mean layer.

    Matrix products: 2 FLOPs a weight and token (Narayanan et al. 2021, appendix), attention 4·s·n_h·d_h a token, half
    of it with the convention causal = "half". Backward takes twice the forward, attention's 2.5 times with
    FlashAttention, which computes the scores again (Dao et al. 2022). Element by element, in one pass: norms read and
    write, residuals read two and write one in 32 and 16 bits, an MLP's activation reads and writes its inner width, and
    scores that are stored pass 4 times, 6 and a mask with dropout: 22h + 16h/t + 13as/t bytes a token for GPT.
    """
    tp = layout.tp
    tokens = layout.tokens(model)
    stores_scores = layout.attention == "scores"

    products = 2 * tokens * model.gemm_weights() / model.layers / tp
    products *= 3 + model.recomputed_share(layout.recompute)

    attention_backward = 2 if stores_scores else 2.5
    attention_again = 0
    if layout.recompute in ("full", "selective") or (layout.recompute == "sac" and stores_scores):
        attention_again = 1  # Checkpointing of operations ("sac") keeps the output of FlashAttention's one operation.
    attention = 4 * tokens * model.seq * model.attention_width / tp * (1 + attention_backward + attention_again)
    if conventions.causal == "half":
        attention *= 0.5

    passes = 4 if layout.recomputes_layers else 3
    ffn = model.ffn
    if model.experts:
        ffn *= model.active_experts + model.shared_experts
    norm_bytes = 4 + 6
    score_bytes = 8
    if model.dropout:
        norm_bytes += 1
        score_bytes += 5
    activation_bytes = 6 if model.gated else 4
    elementwise = norm_bytes * model.norms * model.width / layout.norm_sharers + activation_bytes * ffn / tp
    elementwise *= passes
    if stores_scores:
        elementwise += score_bytes * model.heads * model.seq / tp * (3 + attention_again)

    return LayerWork(
        passes=passes,
        products=products / cluster.limited_peak(layout.dtype),
        attention=attention / cluster.limited_peak(layout.attention_dtype),
        elementwise=tokens * elementwise * layout.element_bytes / 2 / memory_speed(layout, cluster),
    )


def memory_speed(layout: Layout, cluster: Cluster) -> float:
    """Bytes a second of the GPU's memory; where it is not given, an A100's for each FLOP/s."""
    if cluster.memory_speed:
        return cluster.memory_speed
    a100 = PRESETS["a100"]
    return cluster.peak(layout.attention_dtype) * a100["memory_speed"] / a100["peaks"]["bfloat16"]


# --- What it takes: counts and constants become seconds ---------------------------------------------------------------


def seconds_of_parts(work: StepWork, constants: Constants) -> dict[str, float]:
    """{part of a step: seconds}.

    m micro-batches pass the busiest stage, and p-1 more times of a stage is what the first waits for the last and the
    last for the first, divided by v where stages are interleaved (Narayanan et al. 2021, section 2.2).
    """

    def seconds(groups: Iterable[Collective]) -> float:
        return sum(group.seconds(constants.in_node, constants.between) for group in groups)

    layout = work.layout
    m = layout.micro_batches
    visits = work.layers * m  # of micro-batches to the layers of this stage

    # One visit to a layer, in all passes.
    attention_share = work.attention_share or constants.matmul
    attention = work.layer.attention / attention_share
    products = work.layer.products / constants.matmul + attention
    elementwise = work.layer.elementwise / constants.memory
    tensor = seconds(work.tensor_parallel) / visits
    expert = seconds(work.expert_parallel) / visits
    context = max(seconds(work.context_parallel) / visits - attention, 0)
    busy = products + elementwise + tensor + expert + context
    # A host that launches its kernels more slowly than the GPU runs them is what the GPU waits for.
    layer = (busy**2 + (constants.launch * work.layer.passes) ** 2) ** 0.5

    # One micro-batch. The last stage computes the output layer, which delays the others unless it has fewer layers.
    send = seconds(work.to_stages) / m
    head = work.head / constants.matmul + work.loss / constants.memory
    layers_less_on_last_stage = work.layers - work.layers_of_last
    output = max(head - layers_less_on_last_stage * layer, 0)

    # The step. What overlaps leaves the part of one layer, and what takes longer than the computing that hides it.
    data = seconds(work.data_parallel)
    if layout.zero == 3:
        data = data / visits + max(data * (1 - 1 / visits) - visits * layer, 0)
    overlapped = seconds(work.overlapped)
    backward = work.overlapping_micro_batches * work.layers * layer * (work.layer.passes - 1) / work.layer.passes
    overlapped = overlapped / work.layers + max(overlapped * (1 - 1 / work.layers) - backward, 0)
    return {
        "matrix products": visits * products,
        "element by element": visits * elementwise,
        "tensor parallel": visits * tensor,
        "expert parallel": visits * expert,
        "context parallel": visits * context,
        "launching": visits * (layer - busy),
        "sending to stages": m * send,
        "waiting for stages": (layout.pp - 1) * (work.layers * layer + send) / layout.interleave,
        "output layer": m * output,
        "data parallel": data + overlapped,
        "optimizer": work.optimizer / constants.memory,
    }
