"""Conventions: points in which published numbers of the same thing differ. Each output names those that it follows."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from helpers.planner.records import Record

Flops = Literal["6N", "6N+A", "6(N-E)+A", "6(N-E)+A/2", "gemm"]
FLOPS: tuple[str, ...] = get_args(Flops)
States = Literal[
    "zero",
    "float32-gradients",
    "no-master",
    "float32",
    "bfloat16-moments",
    "bfloat16",
]


class StateBytes(NamedTuple):
    """Bytes that a rank keeps for one parameter, for its gradient, and for its optimizer state."""

    parameter: int
    gradient: int
    optimizer: int


STATES: dict[States, StateBytes] = {
    # Rajbhandari et al. 2020, section 3.1: float32 weights and two moments.
    "zero": StateBytes(2, 2, 12),
    # 18 bytes in all: DeepSpeed; Megatron-LM, where a distributed optimizer makes it 6 + 12/DP.
    "float32-gradients": StateBytes(2, 4, 12),
    # Two moments, no float32 weights.
    "no-master": StateBytes(2, 2, 8),
    # FSDP's sharded float32 parameters, and everything without mixed precision.
    "float32": StateBytes(4, 4, 8),
    # As float32, but AdamW's two moments are in bfloat16 (torchtitan, fused_opt_states_bf16).
    "bfloat16-moments": StateBytes(4, 4, 4),
    # Everything in bfloat16, the moments too: torch.optim.Adam on a model in bfloat16 (NeMo AutoModel).
    "bfloat16": StateBytes(2, 2, 4),
}


@dataclass(frozen=True)
class Conventions(Record):
    """How the planner counts. The defaults are what most papers use, and for states what PyTorch's FSDP does."""

    flops: Flops = "6N+A"  # how FLOPs are counted for each token
    peak: float = 0  # FLOP/s of a GPU; 0 for the cluster's
    states: States = "float32"  # how many bytes each parameter, its gradient and its optimizer state have
    # Whether ZeRO-3 gathers and reduces for each micro-batch, or once a step, and keeps all parameters meanwhile.
    # "auto" is once in a pipeline and otherwise for each, as torchtitan's fsdp_reshard_after_forward = "default".
    gather: Literal["auto", "each", "once"] = "auto"
    # Whether attention takes the time of all pairs of tokens, or of half, as a kernel that skips later tokens does.
    causal: Literal["full", "half"] = "full"
    # Whether a layer's inputs that sequence parallelism has gathered are kept for the backward, as in PyTorch, or
    # gathered again in it, as in Megatron-LM.
    sequence_inputs: Literal["kept", "again"] = "kept"
    # How many float32 copies of the logits there are at once: four, as PyTorch's cross_entropy makes; three where the
    # caller frees its own; or one.
    logits: Literal["eager", "freed", "stored"] = "eager"
    # The type in which the loss computes: float32, or bfloat16, which halves the copies of the logits.
    loss: Literal["float32", "bfloat16"] = "float32"
    # Without FSDP, whether the collectives of gradients follow the backward or run during it.
    overlap: Literal["none", "backward"] = "none"
    # Whether a token is sent to the rank of each of its experts, as by all_to_all_single, or once to each node that has
    # some of them, as by DeepEP. "neighbours": as "node", and a token's experts lie side by side, so that they are on
    # as few ranks as possible, as with the balanced gate of NeMo AutoModel's benchmarks.
    dispatch: Literal["rank", "node", "neighbours"] = "rank"
    # Whether the collectives of tensor parallelism interrupt the matrix products, or partly run during them, as async
    # TP of PyTorch and tp_comm_overlap of Megatron-LM let them.
    tensor: Literal["exposed", "overlapped"] = "exposed"
    # Whether context parallelism sends keys and values while attention computes, as Megatron-LM does, or gathers them
    # first and then computes attention in parts, as PyTorch's context_parallel does.
    context: Literal["overlapped", "gathered"] = "overlapped"
    # Whose kernels run: those of torch.compile, which fuse a norm or an activation function into one; those of PyTorch
    # without it, one for each operation; or NVIDIA's Transformer Engine, whose matrix products are faster, too.
    kernels: Literal["fused", "eager", "transformer engine"] = "fused"
    # Whether memory is what PyTorch's allocator reserves, with gaps, as nvidia-smi shows it, or what tensors take.
    allocator: Literal["reserved", "tensors"] = "reserved"

    def gathers_once(self, stages: int) -> bool:
        """Whether FSDP keeps the gathered parameters until the end of a step, if there are so many pipeline stages."""
        if self.gather == "auto":
            return stages > 1
        return self.gather == "once"

    @property
    def state_bytes(self) -> StateBytes:
        """The bytes of each parameter, its gradient and its optimizer state."""
        return STATES[self.states]
