"""A cluster as numbers: GPUs, memory, links, price and failures. Read by all of the planner."""

from dataclasses import dataclass, field

from helpers.planner.model import LARGEST, PlanError, from_table, known


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs. Links are what one GPU sends in one direction, in bytes a second; latencies in seconds."""

    gpu: str = "gpu"
    peaks: dict = field(default_factory=dict, hash=False)  # {dtype: FLOP/s of one GPU, dense}
    memory: float = 0  # bytes of one GPU
    memory_speed: float = 0  # bytes a second that one GPU reads and writes there; 0: an A100's share of its peak
    gpus_per_node: int = 8
    nodes: int = 1
    link_in_node: float = 0
    latency_in_node: float = 0
    link_between: float = 0
    latency_between: float = 0
    price_per_gpu_hour: float = 0  # in any currency; 0 for not known
    failures_per_node_day: float = 0
    reaches: float = 1.0  # the share of their peak that matrix products reach, beside an A100's
    measured: bool = False  # the speeds were reached, not read off a data sheet: nothing is taken off

    def __post_init__(self):
        for name in ("gpus_per_node", "nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{self.gpu}: {name} is {value!r}.\nGive a whole number above 0.")
        if not self.peaks or self.memory <= 0:
            raise PlanError(
                f"{self.gpu}: peaks or memory is missing.\nGive peaks = {{bfloat16 = 312e12}}, memory = 80e9."
            )
        for dtype, peak in self.peaks.items():
            if type(peak) not in (int, float) or not 0 < peak < LARGEST:
                raise PlanError(f"{self.gpu}: the peak of {dtype} is {peak!r}.\nGive FLOP/s, such as 312e12.")
        if not 0 < self.reaches <= 1:
            raise PlanError(f"{self.gpu}: reaches is {self.reaches!r}.\nGive a share above 0, at most 1.")
        for name in ("link_in_node", "link_between"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{self.gpu}: {name} is {getattr(self, name)!r}.\nGive bytes a second, such as 25e9.")

    @property
    def gpus(self):
        return self.gpus_per_node * self.nodes

    def peak(self, dtype="bfloat16"):
        """FLOP/s of one GPU in this type."""
        return known(self.peaks, dtype, f"type with a peak on {self.gpu}")


# Peaks: NVIDIA's data sheets for A100 and H100 SXM (dense), Google's for TPU v4. Links: 300 and 450 GB/s of NVLink
# in one direction, one 200 or 400 Gb/s adapter for each GPU, three of a TPU v4's six links of 50 GB/s.
# Latencies: the order of what nccl-tests show for small messages. Failures: Kokolis et al. 2025, 6.50 for each 1,000
# node-days on A100s (RSC-1). Prices change every month, so none is set.
A100 = {
    "gpu": "a100", "peaks": {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12},
    "memory": 80e9, "memory_speed": 2.039e12,
    "link_in_node": 300e9, "latency_in_node": 5e-6, "link_between": 25e9, "latency_between": 15e-6,
    "failures_per_node_day": 6.5e-3,
}  # fmt: skip
# What an H100 reaches: chosen by llm-foundry's table (scripts/train/benchmarking/README.md), eight rows of FSDP with
# 2,048 tokens. They took 0.96 to 1.29 times the predicted seconds with it, 1.18 to 1.55 times without. A test has them.
H100 = {
    **A100, "gpu": "h100", "reaches": 0.8, "memory_speed": 3.35e12, "link_in_node": 450e9, "link_between": 50e9,
    "peaks": {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "tf32": 494.5e12, "float32": 67e12},
}  # fmt: skip
PRESETS = {
    "a100": A100,
    "a100-40gb": {**A100, "gpu": "a100-40gb", "memory": 40e9, "memory_speed": 1.555e12},
    "h100": H100,
    "h200": {**H100, "gpu": "h200", "memory": 141e9, "memory_speed": 4.8e12},
    "tpu-v4": {
        **A100, "gpu": "tpu-v4", "peaks": {"bfloat16": 275e12}, "memory": 32 * 2**30, "memory_speed": 1.228e12,
        "gpus_per_node": 4, "link_in_node": 150e9, "link_between": 150e9,
    },
}  # fmt: skip


def cluster_of(given, gpus=0):
    """A Cluster from a preset's name or a table (with "preset" or not), of so many GPUs if given."""
    if isinstance(given, str):
        given = {"preset": given}
    if not isinstance(given, Cluster):
        if not isinstance(given, dict):
            raise PlanError(f"the cluster is {given!r}.\nGive a name, or a table of fields.")
        given = dict(given)
        if (preset := given.pop("preset", None)) is not None:
            given = {**known(PRESETS, preset, "cluster"), **given}
        given = from_table(Cluster, given, "the cluster")
    if not gpus:
        return given
    each = min(given.gpus_per_node, gpus)
    if gpus % each:
        raise PlanError(
            f"{gpus} GPUs are not full nodes of {each}.\nGive a multiple of {each}, or another gpus_per_node."
        )
    return from_table(Cluster, {**given.__dict__, "nodes": gpus // each, "gpus_per_node": each}, "the cluster")
