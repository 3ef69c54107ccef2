"""What is expected of the figures before anything is measured: the planner's numbers for a model of GPU."""

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
    "simulated GPU": "h100",
}
GPUS_PER_NODE = 8  # of the planner's clusters
# The share of its peak that an H100 or H200 is expected to reach in a matrix product alone, divided by the share that
# an A100 reaches. The planner's own factor is smaller, because it is fitted on whole steps.
HOPPER_REACHES = 0.8
# GPT-2 medium, 8 samples of 1,024 tokens, on one GPU.
LAYOUT = {"dp": 1, "zero": 3, "micro_batch": 8, "batch": 8, "dtype": "bfloat16"}
# {preset: what the planner predicted for this step before it had the factors of corrections.py}. No GPU had run the
# step by then, so this prediction stays on the page beside today's. The predicted peak of 17.9 GB is still the same.
FIRST_PREDICTIONS = {
    "h100": Prediction(catalog.STEP_TIME, "ms", value=124.6, low=105.6, high=199.3, version="planned first")
}


def predictions_for(gpu: str, ranks: int) -> dict[str, list[Prediction]]:
    """What the planner expects of ``ranks`` GPUs of one model: {a probe's name: predictions of its figures}.

    A probe measures figures on real GPUs, and the book's page shows each of them beside its prediction. ``gpu`` is
    nvidia-smi's name for the model. The dictionary is empty for a GPU that the planner does not know.
    """
    preset = PRESETS.get(gpu)
    if preset is None:
        return {}
    cluster = cluster_of(preset, min(ranks, GPUS_PER_NODE))  # one node at most
    predictions = {
        catalog.PLANNED.name: step_predictions(preset),
        catalog.RATES.name: rate_predictions(cluster),
    }
    has_float8 = "float8" in cluster.peaks
    if has_float8:
        predictions[catalog.FLOAT8.name] = [product_prediction(cluster, "float8", catalog.MATRIX)]
    if ranks > 1:
        # Real programs reach a share of a data sheet's speed, which FITTED has.
        bandwidth = cluster.link_in_node * FITTED.in_node
        name = catalog.all_reduce_name(catalog.MESSAGE)
        predictions[catalog.BUS_BANDWIDTH.name] = [Prediction(name, unit="GB/s", value=bandwidth / 1e9)]
    return predictions


def step_predictions(preset: str) -> list[Prediction]:
    """Time and memory of a step of GPT-2 medium on one GPU, as ``python -m helpers plan`` predicts them.

    ``preset`` is the planner's name for the GPU.
    """
    # The probe reads torch.cuda.max_memory_allocated, which counts tensors without the allocator's gaps.
    planned = plan("gpt2-medium", preset, LAYOUT, {"allocator": "tensors"})
    step = planned.step
    memory = planned.stages[0]  # {kind: bytes} of the only pipeline stage
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
    if preset in FIRST_PREDICTIONS:
        predictions.append(FIRST_PREDICTIONS[preset])
    predictions.append(Prediction(catalog.PEAK, unit="GB", value=memory["total"] / 1e9))
    predictions.append(Prediction(catalog.STATES, unit="GB", value=states / 1e9))
    return predictions


def rate_predictions(cluster: Cluster) -> list[Prediction]:
    """Speeds of large matrix products in four number formats, and of a copy within the GPU's memory."""
    predictions = []
    for name in ("float32", "TF32", "bfloat16", "float16"):
        predictions.append(product_prediction(cluster, name, catalog.MATRIX, dtype=name.lower()))
    bytes_per_second = cluster.memory_speed * FITTED.memory  # Programs reach this share of the data sheet's speed.
    predictions.append(Prediction(catalog.MEMORY_SPEED, unit="GB/s", value=bytes_per_second / 1e9))
    return predictions


def product_prediction(cluster: Cluster, name: str, size: int, dtype: str = "") -> Prediction:
    """TFLOP/s of a product of two square matrices that runs alone.

    ``name`` is the number format's name in the figure, and ``dtype`` the planner's name for it, if it has another one.
    """
    reached = cluster.peak(dtype or name) * FITTED.matmul
    if cluster.gpu in HOPPER:
        reached *= HOPPER_REACHES
    return Prediction(catalog.product_name(name, size), unit="TFLOP/s", value=reached / 1e12)
