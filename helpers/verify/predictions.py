"""What is expected of the figures before anything is measured: the planner's numbers for this model of GPU."""

from helpers.planner.cluster import HOPPER, Cluster, cluster_of
from helpers.planner.plan import STATES, plan
from helpers.planner.step_time import FITTED
from helpers.verify.probes import catalog
from helpers.verify.record import Prediction

# What nvidia-smi calls the GPUs that the planner knows. Those of PCIe cards have other speeds.
PRESETS = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "pretended GPU": "h100",
}
GPUS_PER_NODE = 8  # of the planner's clusters
# The share of the peak that a matrix product alone is expected to reach on an H100 or H200, divided by an A100's. The
# planner's own factor is smaller, because it is fitted on whole steps.
HOPPER_REACHES = 0.8
# GPT-2 medium, 8 samples of 1,024 tokens, on one GPU.
LAYOUT = {"dp": 1, "zero": 3, "micro_batch": 8, "batch": 8, "dtype": "bfloat16"}
# What the planner said of this step before it had the factors of corrections.py, {preset: prediction}. No GPU had run
# it by then, so it stays on the page beside the one of today. The peak of 17.9 GB has stayed the same.
FIRST = {"h100": Prediction(catalog.STEP_TIME, "ms", value=124.6, low=105.6, high=199.3, version="planned first")}


def predictions_for(gpu: str, ranks: int) -> dict[str, list[Prediction]]:
    """What the planner expects of so many GPUs of one model: {a probe's name: predictions of its figures}.

    A probe measures some figures on real GPUs, and the book's page shows each beside its prediction. ``gpu`` is the
    name that nvidia-smi gives the model. The dictionary is empty for a GPU that the planner does not know.
    """
    preset = PRESETS.get(gpu)
    if preset is None:
        return {}
    cluster = cluster_of(preset, min(ranks, GPUS_PER_NODE))  # one node at most
    predictions = {
        catalog.PLANNED.name: of_step(preset),
        catalog.RATES.name: of_rates(cluster),
    }
    has_float8 = "float8" in cluster.peaks
    if has_float8:
        predictions[catalog.FLOAT8.name] = [of_product(cluster, "float8", catalog.MATRIX)]
    if ranks > 1:
        # FITTED has the shares of data sheets' speeds that real programs have reached.
        reached = cluster.link_in_node * FITTED.in_node
        name = catalog.all_reduce_name(catalog.MESSAGE)
        predictions[catalog.BUS_BANDWIDTH.name] = [Prediction(name, unit="GB/s", value=reached / 1e9)]
    return predictions


def of_step(preset: str) -> list[Prediction]:
    """Time and memory of a step of GPT-2 medium on a GPU of the planner, as ``python -m helpers plan`` gives them."""
    # torch.cuda.max_memory_allocated, which the probe reads, counts tensors without the allocator's gaps.
    planned = plan("gpt2-medium", preset, LAYOUT, {"allocator": "tensors"})
    step = planned.step
    memory = planned.stages[0]  # {kind: bytes}; there is one stage
    states = sum(memory[kind] for kind in STATES)
    predictions = [
        Prediction(
            catalog.STEP_TIME,
            unit="ms",
            value=1e3 * step.seconds,
            low=1e3 * step.low,
            high=1e3 * step.high,
        )
    ]
    if preset in FIRST:
        predictions.append(FIRST[preset])
    predictions.append(Prediction(catalog.PEAK, unit="GB", value=memory["total"] / 1e9))
    predictions.append(Prediction(catalog.STATES, unit="GB", value=states / 1e9))
    return predictions


def of_rates(cluster: Cluster) -> list[Prediction]:
    """What is expected of large matrix products, and of work that reads and writes element by element."""
    # {the probe's name of a number format: the planner's name}
    formats = {"float32": "float32", "TF32": "tf32", "bfloat16": "bfloat16", "float16": "float16"}
    products = [of_product(cluster, name, catalog.MATRIX, dtype) for name, dtype in formats.items()]
    memory_speed = cluster.memory_speed * FITTED.memory  # of the data sheet's speed the share that programs reach
    return [*products, Prediction(catalog.MEMORY_SPEED, unit="GB/s", value=memory_speed / 1e9)]


def of_product(cluster: Cluster, name: str, size: int, dtype: str = "") -> Prediction:
    """TFLOP/s of a product of two square matrices, which runs alone.

    ``name`` is the number format's name in the figure. ``dtype`` is what the planner calls it, if that is different.
    """
    reached = cluster.peak(dtype or name) * FITTED.matmul
    if cluster.gpu in HOPPER:
        reached *= HOPPER_REACHES
    return Prediction(catalog.product_name(name, size), unit="TFLOP/s", value=reached / 1e12)
