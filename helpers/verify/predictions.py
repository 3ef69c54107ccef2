"""What is expected of the figures before anything is measured: the planner's numbers for this model of GPU."""

from helpers.planner.cluster import Cluster, cluster_of
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
# GPT-2 medium, 8 samples of 1,024 tokens, on one GPU.
LAYOUT = {"dp": 1, "zero": 3, "micro_batch": 8, "batch": 8, "dtype": "bfloat16"}


def predictions_for(gpu: str, ranks: int) -> dict[str, list[Prediction]]:
    """{probe: what is predicted of its figures} for a GPU by its name; empty for one that the planner does not know."""
    preset = PRESETS.get(gpu)
    if preset is None:
        return {}
    cluster = cluster_of(preset, min(ranks, GPUS_PER_NODE))
    predictions = {
        catalog.PLANNED.name: of_step(preset),
        catalog.RATES.name: of_rates(cluster),
    }
    if "float8" in cluster.peaks:
        predictions[catalog.FLOAT8.name] = [of_product(cluster, "float8", catalog.MATRIX)]
    if ranks > 1:
        name = catalog.all_reduce_name(catalog.MESSAGE)
        reached = cluster.link_in_node * FITTED.in_node
        predictions[catalog.BUS_BANDWIDTH.name] = [Prediction(name, "GB/s", reached / 1e9)]
    return predictions


def of_step(preset: str) -> list[Prediction]:
    """Time and memory of a step of GPT-2 medium, as ``python -m helpers plan`` gives them."""
    # torch.cuda.max_memory_allocated, which the probe reads, counts tensors without the allocator's gaps.
    planned = plan("gpt2-medium", preset, LAYOUT, {"allocator": "tensors"})
    step = planned.step
    memory = planned.stages[0]
    states = sum(memory[kind] for kind in STATES)
    return [
        Prediction(catalog.STEP_TIME, "ms", 1e3 * step.seconds, 1e3 * step.low, 1e3 * step.high),
        Prediction(catalog.PEAK, "GB", memory["total"] / 1e9),
        Prediction(catalog.STATES, "GB", states / 1e9),
    ]


def of_rates(cluster: Cluster) -> list[Prediction]:
    """What the planner counts on in large matrix products, and in work that reads and writes element by element."""
    names = {"float32": "float32", "TF32": "tf32", "bfloat16": "bfloat16", "float16": "float16"}
    products = [of_product(cluster, name, catalog.MATRIX, dtype) for name, dtype in names.items()]
    memory = cluster.memory_speed * FITTED.memory
    return [*products, Prediction(catalog.MEMORY_SPEED, "GB/s", memory / 1e9)]


def of_product(cluster: Cluster, name: str, size: int, dtype: str = "") -> Prediction:
    """TFLOP/s of a square matrix product: the share of the peak that the planner counts on in a training step.

    A product alone may be faster, because nothing else then draws power or waits.
    """
    peak = cluster.peak(dtype or name)
    reached = peak * FITTED.matmul * cluster.reaches
    return Prediction(catalog.product_name(name, size), "TFLOP/s", reached / 1e12)
