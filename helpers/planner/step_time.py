"""Seconds of a training step, from counts of work and five constants that were fitted on 88 measured steps.

The steps are vTrain's (Bang et al. 2024): Megatron-LM on 64 to 512 A100 GPUs; experiments/vtrain.py fits them. Work is
counted from the model and the layout; the constants say which share of a data sheet's speed is reached. On other GPUs
the shares are taken over and the data sheet changes: an extrapolation, outside of what the interval knows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.communication import RECEIVED, Collective, activations, data_parallel, with_seconds
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import stage_parameters
from helpers.planner.model import Model

# For each parameter that a rank updates: float32 weights and two moments are read and written (24), the gradient is
# copied to float32 (6) and read for its norm and by Adam (8), and the 16-bit weights are written (2).
OPTIMIZER_BYTES = 40
PER_LOGIT_BYTES = 16  # written (2), copied to float32 (6), read by the loss (4), and their gradient (4)
COVERAGE = 0.9  # of the measured steps lie in an interval


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
FACTOR = 1.18  # a step lies between prediction / FACTOR and prediction · FACTOR
# Above it where it is extrapolated: of 15 published steps (experiments/steps.py) one took longer, with 256k tokens.
FACTOR_ELSEWHERE = 1.6
# For a cluster whose speeds were measured: nothing is taken off them.
REACHED = replace(FITTED, matmul=1.0, in_node=1.0, between=1.0)


@dataclass(frozen=True)
class LayerWork:
    """Computing on one rank in all passes over a layer, for one micro-batch: seconds at the data sheet's speed."""

    passes: int  # forward, backward twice, and a recomputed forward, whole or not
    products: float  # matrix products
    attention: float  # its own, which hide context parallelism
    elementwise: float


def memory_speed(layout: Layout, cluster: Cluster) -> float:
    """Bytes a second of the GPU's memory; where it is not given, an A100's for each FLOP/s."""
    a100 = PRESETS["a100"]
    return cluster.memory_speed or cluster.peak(layout.other_dtype) * a100["memory_speed"] / a100["peaks"]["bfloat16"]


def layer_work(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions) -> LayerWork:
    """The work of a mean layer.

    Matrix products: 2 FLOPs a weight and token (Narayanan et al. 2021, appendix), attention 4·s·n_h·d_h a token, half
    of it with the convention causal = "half". Backward takes twice the forward, attention's 2.5 times with
    FlashAttention, which computes the scores again (Dao et al. 2022). Element by element, in one pass: norms read and
    write, residuals read two and write one in 32 and 16 bits, an MLP's activation reads and writes its inner width, and
    scores that are stored pass 4 times, 6 and a mask with dropout: 22h + 16h/t + 13as/t bytes a token for GPT.
    """
    t, tokens = layout.tp, layout.tokens(model)
    stored = layout.attention == "scores"
    passes = 4 if layout.recompute in ("full", "sac") else 3
    # Attention: selective recomputation repeats it alone, that of whole operations only where it is not one of them.
    again = layout.recompute in ("full", "selective") or (layout.recompute == "sac" and stored)
    attention = 4 * tokens * model.seq * model.attention_width / t * (1 + (2 if stored else 2.5) + again)
    attention *= (0.5 if conventions.causal == "half" else 1) / cluster.limited_peak(layout.other_dtype)
    products = 2 * tokens * model.gemm_weights() / model.layers / t * (3 + model.recomputed_share(layout.recompute))
    products /= cluster.limited_peak(layout.dtype)

    ffn = model.ffn * (model.active_experts + model.shared_experts) if model.experts else model.ffn
    outside = (4 + 6 + model.dropout) * model.norms * model.width / layout.norm_sharers
    inside = (6 if model.gated else 4) * ffn / t
    scores = (8 + 5 * model.dropout) * model.heads * model.seq / t * stored
    elementwise = tokens * ((outside + inside) * passes + scores * (3 + again)) * layout.element_bytes / 2
    return LayerWork(passes, products, attention, elementwise / memory_speed(layout, cluster))


def parts_of(
    model: Model, layout: Layout, cluster: Cluster, conventions: Conventions
) -> Callable[[Constants], dict[str, float]]:
    """What the busiest stage does in a step, counted once: a function from Constants to {part: seconds}.

    m micro-batches pass the busiest stage, and p-1 more times of a stage is what the first waits for the last and the
    last for the first, divided by v where stages are interleaved (Narayanan et al. 2021, section 2.2). Context
    parallelism hides behind attention, fully_shard's collectives behind computing. DDP's and ZeRO's follow it, as in
    Megatron-LM when it was measured: an upper bound. With the convention overlap = "backward" the gradients' hide
    behind the last backward, as PyTorch's DDP reduces its buckets (Li et al. 2020, section 3.2.3); a layer's part of
    them, and what takes longer, stays.
    """
    m, sizes = layout.micro_batches, layout.stage_layers(model)
    layers = max(sizes)
    visits = layers * m  # of micro-batches to the layers of the busiest stage
    work, speed = layer_work(model, layout, cluster, conventions), memory_speed(layout, cluster)
    logits = layout.tokens(model) * model.vocab / layout.tp
    head = 6 * logits * model.width / cluster.limited_peak(layout.other_dtype)
    loss = PER_LOGIT_BYTES * logits * layout.element_bytes / 2 / speed
    states = 0 if layout.offload else stage_parameters(model, layout, sizes.index(layers)) / layout.sharers

    # Megatron-LM, which was measured, recomputes a layer's last output, too.
    sent = with_seconds(activations(model, layout, stage=1 if layout.pp > 2 else 0, early_stop=False), cluster)
    to_stages = [group for group in sent if group.dimension == "pp" or group.what == RECEIVED]
    in_layers = [
        [group for group in sent if group.dimension == name and group.what != RECEIVED] for name in ("tp", "ep", "cp")
    ]
    data = with_seconds(data_parallel(model, layout, conventions), cluster)
    overlaps = conventions.overlap == "backward" and layout.zero < 3
    reductions = [group for group in data if overlaps and group.phase == "backward"]
    reducing = m if layout.zero == 2 and conventions.gather == "each" else 1  # micro-batches whose backward reduces

    def parts(constants: Constants) -> dict[str, float]:
        def seconds(groups: Iterable[Collective]) -> float:
            return sum(group.seconds(constants.in_node, constants.between) for group in groups)

        tensor, expert, context = (seconds(groups) / visits for groups in in_layers)
        kernel = cluster.attention_reaches * (layout.attention == "flash")
        attention = work.attention / (kernel or constants.matmul)
        products, context = work.products / constants.matmul + attention, max(context - attention, 0)
        computing = products + work.elementwise / constants.memory
        output = head / constants.matmul + loss / constants.memory
        busy = computing + tensor + expert + context
        # A host that launches its kernels more slowly than the GPU runs them is what the GPU waits for.
        layer = (busy**2 + (constants.launch * work.passes) ** 2) ** 0.5
        send, reduced = seconds(to_stages) / m, seconds(reductions)
        follows = seconds(data) - reduced
        if layout.zero == 3:  # all hides but the first gather and the last reduce, and what takes longer than computing
            follows = follows / visits + max(follows * (1 - 1 / visits) - visits * layer, 0)
        behind = reducing * layers * layer * (work.passes - 1) / work.passes
        return {
            "matrix products": visits * products,
            "element by element": visits * work.elementwise / constants.memory,
            "tensor parallel": visits * tensor,
            "expert parallel": visits * expert,
            "context parallel": visits * context,
            "launching": visits * (layer - busy),
            "sending to stages": m * send,
            "waiting for stages": (layout.pp - 1) * (layers * layer + send) / layout.interleave,
            "output layer": m * max(output - (layers - sizes[-1]) * layer, 0),
            "data parallel": follows + reduced / layers + max(reduced * (1 - 1 / layers) - behind, 0),
            "optimizer": OPTIMIZER_BYTES * states / speed / constants.memory,
        }

    return parts


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and between which they are expected."""

    seconds: float
    low: float
    high: float
    parts: dict[str, float]
    extrapolated: str  # what the measured steps did not have; empty where they had it


def step_time(model: Model, layout: Layout, cluster: Cluster, conventions: Conventions | None = None) -> StepTime:
    """The StepTime of a layout; by REACHED for a measured cluster, else by FITTED.

    low and high: of measured steps of a model size that no fit saw, 89 % lay between (vtrain.coverage). Where something
    is extrapolated, high is wider, by what a few published steps were off; it has no coverage.
    """
    constants = REACHED if cluster.measured else replace(FITTED, matmul=FITTED.matmul * cluster.reaches)
    parts = parts_of(model, layout, cluster, conventions or Conventions())(constants)
    seconds, new = sum(parts.values()), extrapolated(model, layout, cluster)
    return StepTime(seconds, seconds / FACTOR, seconds * (FACTOR_ELSEWHERE if new else FACTOR), parts, new)


def extrapolated(model: Model, layout: Layout, cluster: Cluster) -> str:
    """What of a layout the measured steps did not have, in words."""
    new = {
        f"{cluster.gpu} (fitted on A100s)": not cluster.gpu.startswith("a100"),
        "experts": model.experts > 0,
        "context parallelism": layout.cp > 1,
        "FSDP or ZeRO": layout.zero > 0,
        "FlashAttention": layout.attention == "flash",
        "gated MLPs": model.gated,
        "checkpointed operations": layout.recompute == "sac",
        "a limit of power": cluster.power_limit > 0,
    }
    return ", ".join(words for words, is_new in new.items() if is_new)
