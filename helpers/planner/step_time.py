"""Seconds of a training step, from counts of work and five constants that were fitted on 88 measured steps.

The steps are vTrain's (Bang et al. 2024): Megatron-LM on 64 to 512 A100 GPUs, in book/recorded/vtrain.csv. Work is
counted from the model and the layout; the constants say which share of a data sheet's speed is reached. On other GPUs
the shares are taken over and the data sheet changes: an extrapolation, outside of what the interval knows.
"""

import csv
import functools
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from helpers.planner.cluster import PRESETS, Cluster
from helpers.planner.communication import activations, data_parallel
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import BYTES, stage_parameters
from helpers.planner.model import Model, model_of

MEASURED = Path(__file__).parents[2] / "book" / "recorded" / "vtrain.csv"
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


# What fit(measured()) gives, rounded. A test compares them, and FACTOR with interval_factor().
FITTED = Constants(matmul=0.733, memory=0.829, in_node=0.806, between=0.799, launch=0.00147)
FACTOR = 1.18  # a step lies between prediction / FACTOR and prediction · FACTOR
# Above it where it is extrapolated: torchtitan's steps with FSDP, not compiled, on 8 and 128 H100s took 1.51 and 1.57
# times as long (benchmarks/llama3_h100_202412_torchtitan.md: 5,762 and 5,605 tokens a second and GPU). A test has them.
FACTOR_ELSEWHERE = 1.6
# Where the fit starts and what pulls it back: (value, standard deviation of its logarithm). in_node was measured:
# 234.89 GB/s of 300, an all-reduce of 16 GiB on 8 A100s. The others are wide.
PRIOR = {
    "matmul": (0.75, 0.15),
    "memory": (0.8, 0.15),
    "in_node": (0.78, 0.05),
    "between": (0.75, 0.25),
    "launch": (0.001, 1.0),
}
NOISE = 0.08  # of a measured step, as a share; beyond it a step counts less, so that an outlier does not lead


@dataclass(frozen=True)
class Work:
    """One rank's work in a step: seconds at full speed, or counts. For a fit each field is an array."""

    layers: float  # of the largest stage
    micro_batches: float
    stages: float
    interleave: float
    passes: float  # over a layer: forward, backward twice, and what is recomputed
    matmul: float  # of a layer and micro-batch, all passes; so are the next
    elementwise: float
    tensor_in_node: float
    tensor_between: float
    expert_in_node: float
    expert_between: float
    context_in_node: float
    context_between: float
    attention: float  # the part of matmul that hides context parallelism
    latency: float
    send_in_node: float  # of a micro-batch, forward and backward
    send_between: float
    send_latency: float
    output_matmul: float  # logits and loss, of a micro-batch on the last stage
    output_elementwise: float
    data_in_node: float  # parameters and gradients, of a step
    data_between: float
    data_latency: float
    hidden: float  # 1 where they are hidden behind computing (fully_shard), 0 where they follow it
    overlapped: float  # where they follow it: the share that may hide behind the backwards that reduce
    reducing: float  # micro-batches whose backward reduces
    optimizer: float


def work(model, layout, cluster, conventions=None):
    """The Work of the busiest stage.

    A layer's matrix products: 2 FLOPs a weight and token (Narayanan et al. 2021, appendix), attention 4·s·n_h·d_h a
    token, half of it with the convention causal = "half". Backward takes twice the forward, attention's 2.5 times with
    FlashAttention, which computes the scores again (Dao et al. 2022). Element by element, in one pass: norms read and
    write, residuals read two and write one in 32 and 16 bits, an MLP's activation reads and writes its inner width, and
    scores that are stored pass 4 times, 6 and a mask with dropout: 22h + 16h/t + 13as/t bytes a token for GPT.
    """
    conventions = conventions or Conventions()
    t, size = layout.tp, BYTES.get(layout.dtype, 2)
    sizes = layout.stage_layers(model)
    layers, busiest = max(sizes), sizes.index(max(sizes))
    tokens = layout.micro_batch * model.seq // layout.cp
    peak = cluster.peak(layout.dtype)
    speed = cluster.memory_speed or peak * PRESETS["a100"]["memory_speed"] / 312e12

    full, stored = layout.recompute == "full", layout.attention == "scores"
    passes = 4 if full else 3
    again = layout.recompute != "none"  # attention: selective recomputation repeats it alone
    attention_passes = 1 + (2 if stored else 2.5) + again
    attention = 4 * tokens * model.seq * model.attention_width / t / peak * attention_passes
    attention *= 0.5 if conventions.causal == "half" else 1
    matmul = 2 * tokens * model.gemm_weights() / model.layers / t / peak * passes

    ffn = model.ffn * (model.active_experts + model.shared_experts) if model.experts else model.ffn
    outside = (4 + 6 + model.dropout) * model.norms * model.width / (t if layout.sequence_parallel else 1)
    inside = (6 if model.gated else 4) * ffn / t
    scores = (8 + 5 * model.dropout) * model.heads * model.seq / t * stored
    elementwise = tokens * ((outside + inside) * passes + scores * (3 + again)) * size / 2 / speed

    # Megatron-LM, which was measured, recomputes a layer's last output, too.
    found = activations(model, layout, cluster, stage=1 if layout.pp > 2 else 0, early_stop=False)
    tensor, expert, context, sends = [], [], [], []
    for each in found:
        received = each.what == "what a stage received"
        lists = {"tp": sends if received else tensor, "ep": expert, "cp": context, "pp": sends}
        lists[each.dimension].append(each)
    data = data_parallel(model, layout, cluster, conventions, stage=0)
    m = layout.micro_batches

    def total(group, part):
        return sum(each.count * getattr(each, part) for each in group)

    reduces = [each for each in data if each.phase == "backward"]
    all_data = sum(each.seconds() for each in data)
    overlaps = conventions.overlap == "backward" and layout.zero < 3 and all_data > 0
    held = stage_parameters(model, layout, busiest) / layout.sharers
    return Work(
        layers=layers,
        micro_batches=m,
        stages=layout.pp,
        interleave=layout.interleave,
        passes=passes,
        matmul=matmul + attention,
        elementwise=elementwise,
        tensor_in_node=total(tensor, "in_node") / m / layers,
        tensor_between=total(tensor, "between") / m / layers,
        expert_in_node=total(expert, "in_node") / m / layers,
        expert_between=total(expert, "between") / m / layers,
        context_in_node=total(context, "in_node") / m / layers,
        context_between=total(context, "between") / m / layers,
        attention=attention,
        latency=total(tensor + expert + context, "latency") / m / layers,
        send_in_node=total(sends, "in_node") / m,
        send_between=total(sends, "between") / m,
        send_latency=total(sends, "latency") / m,
        output_matmul=6 * tokens * model.width * model.vocab / t / peak,
        output_elementwise=PER_LOGIT_BYTES * tokens * model.vocab / t * size / 2 / speed,
        data_in_node=total(data, "in_node"),
        data_between=total(data, "between"),
        data_latency=total(data, "latency"),
        hidden=float(layout.zero == 3),
        overlapped=sum(each.seconds() for each in reduces) / all_data if overlaps else 0.0,
        reducing=m if layout.zero == 2 and conventions.gather == "each" else 1,
        optimizer=0.0 if layout.offload else OPTIMIZER_BYTES * held / speed,
    )


def larger(a, b):
    """The larger of two numbers, and of two arrays' each."""
    return (a + b + abs(a - b)) / 2


def parts_of(work, constants):
    """{part: seconds} of a step, which add up to it.

    m micro-batches pass the busiest stage, and p-1 more times of a stage is what the first waits for the last and the
    last for the first, divided by v where stages are interleaved (Narayanan et al. 2021, section 2.2). A layer takes
    √(work² + launch²): a host that launches its kernels more slowly than the GPU runs them is what the GPU waits for.
    fully_shard's collectives hide behind computing. DDP's and ZeRO's follow it, as in Megatron-LM when it was measured:
    an upper bound. With the convention overlap = "backward" the gradients' hide behind the last backward, as PyTorch's
    DDP reduces its buckets (Li et al. 2020, section 3.2.3); a layer's part of them, and what takes longer, stays.
    """
    w, c = work, constants
    tensor = w.tensor_in_node / c.in_node + w.tensor_between / c.between
    expert = w.expert_in_node / c.in_node + w.expert_between / c.between
    context = larger(w.context_in_node / c.in_node + w.context_between / c.between - w.attention / c.matmul, 0.0)
    busy = w.matmul / c.matmul + w.elementwise / c.memory + tensor + expert + context + w.latency
    layer = (busy**2 + (c.launch * w.passes) ** 2) ** 0.5
    send = w.send_in_node / c.in_node + w.send_between / c.between + w.send_latency
    once = w.layers * w.micro_batches
    data = w.data_in_node / c.in_node + w.data_between / c.between + w.data_latency
    # Behind computing all hides but the first gather and the last reduce, and what takes longer than computing.
    shown = data / once + larger(data * (1 - 1 / once) - once * layer, 0.0)
    behind = w.reducing * w.layers * layer * (w.passes - 1) / w.passes
    reduced = data * w.overlapped
    follows = data - reduced + reduced / w.layers + larger(reduced * (1 - 1 / w.layers) - behind, 0.0)
    return {
        "matrix products": once * w.matmul / c.matmul,
        "element by element": once * w.elementwise / c.memory,
        "tensor parallel": once * (tensor + w.latency),
        "expert parallel": once * expert,
        "context parallel": once * context,
        "launching": once * (layer - busy),
        "sending to stages": w.micro_batches * send,
        "waiting for stages": (w.stages - 1) * (w.layers * layer + send) / w.interleave,
        "output layer": w.micro_batches * (w.output_matmul / c.matmul + w.output_elementwise / c.memory),
        "data parallel": follows * (1 - w.hidden) + shown * w.hidden,
        "optimizer": w.optimizer / c.memory,
    }


def seconds_of(work, constants):
    """Seconds of a step."""
    return sum(parts_of(work, constants).values())


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and between which they are expected."""

    seconds: float
    low: float
    high: float
    parts: dict  # {part: seconds}
    extrapolated: str  # what the measured steps did not have; empty where they had it


# For a cluster whose speeds were measured: nothing is taken off them.
REACHED = replace(FITTED, matmul=1.0, in_node=1.0, between=1.0)


def step_time(model, layout, cluster, conventions=None, constants=None):
    """The StepTime of a layout; by REACHED for a measured cluster, else by FITTED, unless constants are given.

    low and high: of measured steps of a model size that no fit saw, 89 % lay between (left_out and coverage, below).
    Where something is extrapolated, high is wider, by what a few published steps were off; it has no coverage.
    """
    fitted = replace(FITTED, matmul=FITTED.matmul * cluster.reaches)
    constants = constants or (REACHED if cluster.measured else fitted)
    parts = parts_of(work(model, layout, cluster, conventions), constants)
    seconds, new = sum(parts.values()), extrapolated(model, layout, cluster)
    return StepTime(seconds, seconds / FACTOR, seconds * (FACTOR_ELSEWHERE if new else FACTOR), parts, new)


def extrapolated(model, layout, cluster):
    """What of a layout the measured steps did not have, in words."""
    new = [f"{cluster.gpu} (fitted on A100s)"] * (not cluster.gpu.startswith("a100"))
    new += ["experts"] * bool(model.experts) + ["context parallelism"] * (layout.cp > 1)
    new += ["FSDP or ZeRO"] * (layout.zero > 0)
    new += ["FlashAttention"] * (layout.attention == "flash") + ["gated MLPs"] * model.gated
    return ", ".join(new)


# --- the fit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A step that was measured."""

    model: Model
    layout: Layout
    cluster: Cluster
    seconds: float


def vtrain_cluster(gpus):
    """vTrain's nodes: 8 A100s with NVLink. The network is not in its file: a 100 Gb/s share for each GPU is assumed."""
    return Cluster(**{**PRESETS["a100"], "nodes": gpus // 8, "link_between": 12.5e9})


@functools.cache
def measured(path=MEASURED):
    """[Measured] of vTrain's file. It trains GPTs of Megatron-LM in float16, with full recomputation."""
    found = []
    with open(path, encoding="utf-8") as file:
        rows = csv.reader(line for line in file if not line.startswith("#"))
        next(rows)
        for row in rows:
            billions, (gpus, batch, micro_batch, width, heads, layers, seq, tp, dp, pp) = row[0], map(int, row[1:11])
            shape = {"preset": "gpt-175b", "name": f"{billions}B", "layers": layers, "width": width, "heads": heads}
            model = model_of({**shape, "kv_heads": heads, "head_width": width // heads, "ffn": 4 * width, "seq": seq})
            layout = Layout(
                dp=dp,
                tp=tp,
                pp=pp,
                micro_batch=micro_batch,
                batch=batch,
                recompute="full",
                attention="scores",
                dtype="float16",
            )
            found.append(Measured(model, layout.check(model), vtrain_cluster(gpus), float(row[11]) / 1000))
    return tuple(found)


MEGATRON = Conventions(states="zero")  # gradients are summed in 16 bits


@functools.cache
def work_of(step):
    return work(step.model, step.layout, step.cluster, MEGATRON)


def stacked(steps):
    """One Work of arrays, and the measured seconds."""
    import numpy as np

    works = [work_of(step) for step in steps]
    columns = {field.name: np.array([getattr(each, field.name) for each in works], float) for field in fields(Work)}
    return Work(**columns), np.array([step.seconds for step in steps])


def log_errors(steps, constants):
    """log(predicted / measured) of each step, as an array."""
    import numpy as np

    works, times = stacked(steps)
    return np.log(seconds_of(works, constants) / times)


def fit(steps):
    """The Constants that fit measured steps: least squares of log(predicted / measured), pulled to PRIOR.

    Levenberg-Marquardt on the constants' logarithms, derivatives by differences. A step that is off by much more than
    NOISE counts by its distance, not its square (pseudo-Huber). Deterministic.
    """
    import numpy as np

    works, times = stacked(steps)
    start, width = (np.array([PRIOR[field.name][k] for field in fields(Constants)]) for k in (0, 1))
    start = np.log(start)

    def residuals(logs):
        off = np.log(seconds_of(works, Constants(*np.exp(logs))) / times) / NOISE
        return np.concatenate([np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), (logs - start) / width])

    logs, damping = start, 1e-3
    now = residuals(logs)
    while damping < 1e8:
        slopes = np.stack([(residuals(logs + 1e-6 * axis) - now) / 1e-6 for axis in np.eye(len(logs))], axis=1)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now)
        then = residuals(logs + step)
        if then @ then >= now @ now:
            damping *= 10
            continue
        logs, now, damping = logs + step, then, damping / 10
        if np.abs(step).max() < 1e-8:
            break
    return Constants(*(float(value) for value in np.exp(logs)))


@dataclass(frozen=True)
class LeftOut:
    """A model size whose steps were predicted by a fit on the other sizes."""

    size: str
    gpus: int
    steps: int
    error: float  # mean of |predicted / measured - 1|
    bias: float  # mean of predicted / measured - 1
    picked: float  # seconds of the layout that is predicted to be fastest, beside the fastest measured: 1 is best
    logs: tuple  # log(predicted / measured)


def left_out(steps=None):
    """[LeftOut] of each model size. In vTrain's file each size has one number of GPUs: they are left out together."""
    import numpy as np

    steps, found = steps or measured(), []
    for size in dict.fromkeys(step.model.name for step in steps):
        here = [step for step in steps if step.model.name == size]
        logs = log_errors(here, fit([step for step in steps if step.model.name != size]))
        times = np.array([step.seconds for step in here])
        off, pick = np.exp(logs) - 1, times[np.argmin(np.exp(logs) * times)]
        error, bias, picked = (float(value) for value in (abs(off).mean(), off.mean(), pick / times.min()))
        found.append(LeftOut(size, here[0].layout.gpus, len(here), error, bias, picked, tuple(map(float, logs))))
    return found


def mean_error(sizes):
    """Mean of |predicted / measured - 1| over all steps of [LeftOut]."""
    return sum(size.error * size.steps for size in sizes) / sum(size.steps for size in sizes)


def interval_factor(sizes, coverage=COVERAGE):
    """The factor within which so many of the left-out predictions lie: FACTOR."""
    import numpy as np

    return float(np.exp(np.quantile(np.abs(np.concatenate([size.logs for size in sizes])), coverage)))


def coverage(steps=None, wanted=COVERAGE):
    """The share of steps inside an interval whose factor was found without their model size, as were the constants.

    For each size the factor comes from the others alone, each predicted by a fit that saw neither.
    """
    steps = steps or measured()
    inside = 0
    for size in left_out(steps):
        factor = interval_factor(left_out([step for step in steps if step.model.name != size.size]), wanted)
        inside += sum(abs(log) <= math.log(factor) for log in size.logs)
    return inside / len(steps)
