"""A cluster as numbers: GPUs, memory, links, price and failures. Read by all of the planner."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from helpers.planner.corrections import CORRECTIONS
from helpers.planner.records import Record, look_up, refuse, with_preset


@dataclass(frozen=True)
class Cluster(Record):
    """Nodes of equal GPUs.

    The speed of a link is how many bytes a second one GPU sends in one direction while all others send, too: the bus
    bandwidth of nccl-tests. ``link_in_node`` is that of the GPUs in a node, and ``link_between`` that of groups with
    one GPU of each node. Latencies are in seconds.
    """

    gpu: str = "gpu"  # the model's name, such as "h100"
    peaks: dict[str, float] = field(default_factory=dict, hash=False)  # {dtype: FLOP/s of one GPU, dense}
    memory: float = 0  # bytes of one GPU
    # Bytes a second that one GPU reads and writes in its memory. 0 is for not known; then it is in the same proportion
    # to the peak as on an A100.
    memory_speed: float = 0
    gpus_per_node: int = 8
    nodes: int = 1
    link_in_node: float = 0  # 0: not known, where a node has one GPU
    latency_in_node: float = 0
    link_between: float = 0  # 0: not known, where there is one node
    latency_between: float = 0
    price_per_gpu_hour: float = 0  # in any currency; 0 for not known
    failures_per_node_day: float = 0
    # The share of the peak that matrix products reach, divided by the share that they reach on an A100.
    reaches: float = 1.0
    # The share of the peak that attention's kernel reaches; 0 for the same share as other matrix products.
    attention_reaches: float = 0
    power: float = 0  # watts that one GPU draws at its peak; needed for a limit
    power_limit: float = 0  # watts that one GPU may draw; 0 for no limit
    # Whether the speeds were measured, and not read off a data sheet: then no share of them is taken off.
    measured: bool = False

    POSITIVE: ClassVar[tuple[str, ...]] = ("gpus_per_node", "nodes", "memory", "reaches")

    def __post_init__(self) -> None:
        """Refuse, by a PlanError, a cluster without a peak, or one that does not say how fast its links are."""
        super().__post_init__()
        if not self.peaks:
            refuse(f"{self.gpu}: no peaks", "FLOP/s of each type, such as peaks = {bfloat16 = 312e12}")
        if self.gpus_per_node > 1 and self.link_in_node == 0:
            problem = f"{self.gpu}: there are {self.gpus_per_node} GPUs in a node, and link_in_node is not known"
            refuse(problem, "link_in_node, in bytes a second")
        if self.nodes > 1 and self.link_between == 0:
            problem = f"{self.gpu}: there are {self.nodes} nodes, and link_between is not known"
            refuse(problem, "link_between, in bytes a second")

    @property
    def gpus(self) -> int:
        """How many GPUs the cluster has."""
        return self.gpus_per_node * self.nodes

    def peak(self, dtype: str = "bfloat16") -> float:
        """FLOP/s of one GPU in this type. Raises PlanError for a type in which the GPU does not multiply."""
        return look_up(self.peaks, dtype, f"type with a peak on {self.gpu}")

    def limited_peak(self, dtype: str = "bfloat16") -> float:
        """FLOP/s of one GPU at the clock that the limit of power leaves it.

        A chip draws A·C·V²·f watts at the clock f, and its voltage V grows with the clock (Mudge 2001, equations 1 and
        2). So the power grows with the cube of the clock, and FLOP/s grow with the clock. The memory has a clock of its
        own, which stays.
        """
        if not self.power_limit:
            return self.peak(dtype)
        share_of_power = min(self.power_limit / self.power, 1)
        share_of_clock = share_of_power ** (1 / 3)
        return self.peak(dtype) * share_of_clock


# Peaks and watts: NVIDIA's data sheets for A100 and H100 SXM (dense), Google's for TPU v4. Links: 300 and 450 GB/s of
# NVLink in one direction, one 200 or 400 Gb/s adapter for each GPU, three of a TPU v4's six links of 50 GB/s.
# Latencies: the order of what nccl-tests show for small messages. Failures: Kokolis et al. 2025, 6.50 for each 1,000
# node-days on A100s (RSC-1). Prices change every month, so none is set.
A100: dict[str, Any] = {
    "gpu": "a100", "peaks": {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12},
    "memory": 80e9, "memory_speed": 2.039e12,
    "link_in_node": 300e9, "latency_in_node": 5e-6, "link_between": 25e9, "latency_between": 15e-6,
    "failures_per_node_day": 6.5e-3, "power": 400,
}  # fmt: skip
# attention_reaches is not set, because it depends on the kernel: on an H100 FlashAttention-2 reaches 35 % of the peak,
# and FlashAttention-3 up to 75 %, counted by half of the pairs of tokens (Shah et al. 2024).
H100: dict[str, Any] = {
    **A100, "gpu": "h100", "reaches": CORRECTIONS.h100, "memory_speed": 3.35e12,
    "link_in_node": 450e9, "link_between": 50e9, "power": 700,
    "peaks": {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "tf32": 494.5e12, "float32": 67e12},
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "a100": A100,
    "a100-40gb": {**A100, "gpu": "a100-40gb", "memory": 40e9, "memory_speed": 1.555e12},
    "h100": H100,
    "h200": {**H100, "gpu": "h200", "memory": 141e9, "memory_speed": 4.8e12},
    "tpu-v4": {
        **A100, "gpu": "tpu-v4", "peaks": {"bfloat16": 275e12}, "memory": 32 * 2**30, "memory_speed": 1.228e12,
        "gpus_per_node": 4, "link_in_node": 150e9, "link_between": 150e9, "power": 192,
    },
}  # fmt: skip
HOPPER = ("h100", "h200")  # GPUs of this architecture, as Cluster.gpu has them


def cluster_of(cluster: str | dict[str, Any] | Cluster, gpus: int = 0) -> Cluster:
    """A Cluster from a preset's name or from a table of fields, which may name a preset under "preset".

    For example cluster_of("h100", gpus=64) or cluster_of({"preset": "h100", "nodes": 8}). gpus: how many GPUs it should
    have, in full nodes or in a part of one node; 0 for as many as its fields say. Raises PlanError for a wrong field,
    or for GPUs that do not fill their nodes.
    """
    cluster = Cluster.of(with_preset(cluster, PRESETS, "cluster"))
    if gpus == 0:
        return cluster
    gpus_per_node = min(cluster.gpus_per_node, gpus)
    if gpus % gpus_per_node != 0:
        hint = f"a multiple of {gpus_per_node}, or another gpus_per_node"
        refuse(f"{gpus} GPUs are not full nodes of {gpus_per_node}", hint)
    return cluster.with_(nodes=gpus // gpus_per_node, gpus_per_node=gpus_per_node)
