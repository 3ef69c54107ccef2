"""The points in which published numbers differ although they mean the same. Each is a switch, named in every output."""

from dataclasses import dataclass
from typing import Any, ClassVar

from helpers.planner.cluster import Cluster
from helpers.planner.records import check_fields, from_table

# {name: bytes of (parameter, gradient, optimizer state) for one parameter}
STATES = {
    "zero": (2, 2, 12),  # Rajbhandari et al. 2020, section 3.1: float32 weights and two moments
    "float32-gradients": (2, 4, 12),  # 18: DeepSpeed; Megatron, where a distributed optimizer makes it 6 + 12/DP
    "two-gradients": (2, 6, 12),  # 20: the Ultra-Scale Playbook's text with float32 gradients beside the others
    "no-master": (2, 2, 8),  # two moments, no float32 weights
    "float32": (4, 4, 8),  # FSDP's sharded float32 parameters, and everything without mixed precision
    "scaling-book": (2, 0, 8),  # 10: gradients do not last
}
FLOPS = ("6N", "6N+A", "6(N-E)+A", "6(N-E)+A/2", "gemm")
GIGA = {"GB": 1e9, "GiB": 2**30}


@dataclass(frozen=True)
class Conventions:
    """Defaults: what most papers of the day use; PyTorch's FSDP for states."""

    flops: str = "6N+A"  # which count of FLOPs for each token
    achieved: str = "model"  # a published TFLOP/s counts "model" FLOPs, or "hardware" ones, with recomputation
    peak: float = 0  # FLOP/s of a GPU; 0 for the cluster's
    bubble: str = "ideal"  # (p-1)/(vm), of the "ideal" time; or of the "total": (p-1)/(vm+p-1)
    memory: str = "GiB"  # 2^30 bytes; or "GB", 1e9
    states: str = "float32"  # which bytes for each parameter
    gather: str = "each"  # under ZeRO-3 "each" micro-batch gathers and reduces again; or "once" a step
    in_flight: str = "schedule"  # the first stage holds p micro-batches; "one" holds one, as if p divided it
    days: str = "count"  # training days from the count of FLOPs; or "8TP": Narayanan et al. 2021, equation 4
    causal: str = "full"  # seconds count every pair of tokens; or "half", where a kernel skips later tokens
    sequence_inputs: str = "kept"  # sequence parallelism keeps gathered inputs (PyTorch); or gathers "again" (Megatron)
    logits: str = "eager"  # at the peak four float32 copies, as PyTorch's cross_entropy makes; or one, "stored"
    overlap: str = "none"  # without FSDP gradients are sent after the backward; or hide behind it, "backward"
    shards: str = "rows"  # ZeRO-3 cuts each tensor between "rows", rounded up (fully_shard); or all, "even"

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "flops": FLOPS,
        "achieved": ("model", "hardware"),
        "bubble": ("ideal", "total"),
        "memory": tuple(GIGA),
        "states": tuple(STATES),
        "gather": ("each", "once"),
        "in_flight": ("schedule", "one"),
        "days": ("count", "8TP"),
        "causal": ("full", "half"),
        "sequence_inputs": ("kept", "again"),
        "logits": ("eager", "stored"),
        "overlap": ("none", "backward"),
        "shards": ("rows", "even"),
    }

    def __post_init__(self) -> None:
        check_fields(Conventions, vars(self))

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of (parameter, gradient, optimizer state) for one parameter."""
        return STATES[self.states]

    def peak_of(self, cluster: Cluster, dtype: str) -> float:
        """FLOP/s of one GPU: the convention's, or the cluster's."""
        return self.peak or cluster.peak(dtype)


def conventions_of(conventions: dict[str, Any] | Conventions | None) -> Conventions:
    """Conventions from a table of fields."""
    return conventions if isinstance(conventions, Conventions) else from_table(Conventions, conventions or {})
