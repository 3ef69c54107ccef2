"""The points in which published numbers differ although they mean the same. Each is a switch, named in every output."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from helpers.planner.records import Record

Flops = Literal["6N", "6N+A", "6(N-E)+A", "6(N-E)+A/2", "gemm"]
FLOPS: tuple[str, ...] = get_args(Flops)
States = Literal[
    "zero", "float32-gradients", "two-gradients", "no-master", "float32", "bfloat16-moments", "scaling-book"
]


class StateBytes(NamedTuple):
    """Bytes for one parameter."""

    parameter: int
    gradient: int
    optimizer: int


STATES: dict[States, StateBytes] = {
    # Rajbhandari et al. 2020, section 3.1: float32 weights and two moments.
    "zero": StateBytes(2, 2, 12),
    # 18: DeepSpeed; Megatron-LM, where a distributed optimizer makes it 6 + 12/DP.
    "float32-gradients": StateBytes(2, 4, 12),
    # 20: the Ultra-Scale Playbook's text, with float32 gradients beside the 16-bit ones.
    "two-gradients": StateBytes(2, 6, 12),
    # Two moments, no float32 weights.
    "no-master": StateBytes(2, 2, 8),
    # FSDP's sharded float32 parameters, and everything without mixed precision.
    "float32": StateBytes(4, 4, 8),
    # The same, but for AdamW's two moments (torchtitan, fused_opt_states_bf16).
    "bfloat16-moments": StateBytes(4, 4, 4),
    # 10: gradients do not last.
    "scaling-book": StateBytes(2, 0, 8),
}
GIGA = {"GB": 1e9, "GiB": 2**30}


@dataclass(frozen=True)
class Conventions(Record):
    """Defaults: what most papers of the day use; PyTorch's FSDP for states."""

    flops: Flops = "6N+A"  # which count of FLOPs for each token
    peak: float = 0  # FLOP/s of a GPU; 0 for the cluster's
    bubble: Literal["ideal", "total"] = "ideal"  # (p-1)/(vm), of the ideal time; of the total: (p-1)/(vm+p-1)
    memory: Literal["GB", "GiB"] = "GiB"  # 1e9 or 2^30 bytes
    states: States = "float32"  # which bytes for each parameter
    gather: Literal["each", "once"] = "each"  # ZeRO-3 gathers and reduces for each micro-batch; or once, and keeps all
    in_flight: Literal["schedule", "one"] = "schedule"  # the first stage holds p micro-batches; one: p divided them
    causal: Literal["full", "half"] = "full"  # seconds count all pairs of tokens; half: a kernel skips later tokens
    sequence_inputs: Literal["kept", "again"] = "kept"  # gathered once (PyTorch), or again in backward (Megatron)
    # Float32 copies at once: four, as PyTorch's cross_entropy makes; three where the caller frees its own; or one.
    logits: Literal["eager", "freed", "stored"] = "eager"
    overlap: Literal["none", "backward"] = "none"  # without FSDP, gradients follow the backward; or hide behind it

    @property
    def state_bytes(self) -> StateBytes:
        return STATES[self.states]
