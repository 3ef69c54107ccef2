"""What a rank stores and what autograd keeps for the backward, beside the planner's counts (for the decision guide)."""

import sys
from collections import Counter
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
from tensor_parallel import divide_block
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers.planner.layout import Layout
from helpers.planner.memory import activations_per_layer, in_flight, shared_parameters
from helpers.planner.model import model_of
from helpers.ranks.launch import launch
from helpers.runtime.models import PixelBlock

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second

WIDTH = 64
LAYERS = 4
TOKENS = 100  # of a sample


@dataclass(frozen=True)
class Arrangement:
    """How the blocks of a transformer are divided among ranks."""

    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    sequence: bool = False  # whether tensor parallelism comes with sequence parallelism
    recompute: bool = False  # whether the backward recomputes each block

    @property
    def ranks(self):
        return self.fsdp * self.tp * self.pp

    @property
    def micro_batches(self):
        """Of one sample each, in a step."""
        if self.pp > 1:
            return 4
        return 1


ARRANGEMENTS = [
    Arrangement(),
    Arrangement(fsdp=2),
    Arrangement(tp=2),
    Arrangement(tp=2, sequence=True),
    Arrangement(fsdp=2, tp=2),
    Arrangement(fsdp=2, recompute=True),
    Arrangement(pp=2),
    Arrangement(pp=2, fsdp=2),
]


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the blocks of a rank."""

    stored: float  # parameters, gradients and AdamW's two moments
    kept: float  # activations that are kept for the backward, at the fullest moment of a step


# --- As planned -------------------------------------------------------------------------------------------------------


def planned_bytes(arrangement):
    """The planner's count for a rank of the first stage, in float32.

    Its model has a vocabulary of one token, so that nearly all parameters are those of the blocks.
    """
    shape = {"width": WIDTH, "layers": LAYERS, "seq": TOKENS, "vocab": 1, "classes": 0}
    model = model_of({"preset": "pixels", **shape, "learned_positions": False})
    layout = Layout(
        dp=arrangement.fsdp,
        tp=arrangement.tp,
        pp=arrangement.pp,
        zero=3 if arrangement.fsdp > 1 else 0,
        dtype="float32",
        batch=arrangement.fsdp * arrangement.micro_batches,
        sequence_parallel=arrangement.sequence,
        recompute="full" if arrangement.recompute else "none",
    ).check(model)
    bytes_of_parameter = 16  # float32: the parameter, its gradient and two moments
    layers_of_stage = LAYERS // arrangement.pp
    kept_by_layer = activations_per_layer(model, layout, sequence_inputs="kept")
    return RankBytes(
        stored=bytes_of_parameter * shared_parameters(model, layout, stage=0),
        kept=layers_of_stage * in_flight(layout, stage=0) * kept_by_layer,
    )


# --- As measured ------------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    """A block that keeps only its input for the backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def divided_blocks(arrangement, mesh):
    """The blocks of this rank's stage, divided by tensor parallelism and by fully_shard."""
    blocks = nn.Sequential()
    for _ in range(LAYERS // arrangement.pp):
        block = PixelBlock(WIDTH, heads=4)
        if arrangement.tp > 1:
            is_sequence_parallel = arrangement.sequence
            divide_block(block, mesh["tp"], sequence_parallel=is_sequence_parallel, shared_input=is_sequence_parallel)
        if arrangement.recompute:
            block = Recomputed(block)
        if arrangement.fsdp > 1:
            fully_shard(block, mesh=mesh["fsdp"])
        blocks.append(block)
    return blocks


def forward_and_backward(arrangement, blocks, mesh):
    """Run one step: of a pipeline by its schedule, otherwise of one sample."""
    if arrangement.pp == 1:
        tokens = TOKENS
        if arrangement.sequence:
            tokens = TOKENS // arrangement.tp  # Outside the blocks, a rank has only its part of the tokens.
        x = torch.randn(1, tokens, WIDTH, requires_grad=True)
        blocks(x).sum().backward()
        return

    def loss(output, target):
        return output.sum()

    index = mesh["pp"].get_local_rank()
    stage = PipelineStage(blocks, index, arrangement.pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, arrangement.micro_batches, loss_fn=loss)
    x = torch.randn(arrangement.micro_batches, TOKENS, WIDTH, requires_grad=True)
    if index == 0:
        schedule.step(x, target=x)
    else:
        schedule.step(target=x)


def local(tensor):
    """The part of a tensor that is on this rank."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return tensor


class Kept:
    """A tensor that autograd keeps until its backward, in place of the tensor itself."""

    def __init__(self, tensor, tracker):
        self.tensor = tensor
        self.tracker = tracker
        self.address = local(tensor).data_ptr()
        tracker.add(self.address, local(tensor).nbytes)

    def __del__(self):
        self.tracker.remove(self.address)


class KeptBytes:
    """Measures how many bytes of activations autograd keeps at most. Several tensors may share the same memory.

    ``pack`` and ``unpack`` are the functions for torch.autograd.graph.saved_tensors_hooks.
    """

    def __init__(self, sequence_lengths):
        self.sequence_lengths = set(sequence_lengths)
        self.keepers = Counter()  # {address: how many tensors there are kept}
        self.sizes = {}  # {address: bytes}
        self.peak = 0

    def pack(self, tensor):
        """Activations have a length of the sequence among their sizes, and are counted. Weights do not, and are not."""
        is_activation = bool(self.sequence_lengths & set(tensor.shape))
        if is_activation:
            return Kept(tensor, self)
        return tensor

    @staticmethod
    def unpack(packed):
        if isinstance(packed, Kept):
            return packed.tensor
        return packed

    def add(self, address, size):
        self.keepers[address] += 1
        self.sizes[address] = size
        self.peak = max(self.peak, sum(self.sizes.values()))

    def remove(self, address):
        self.keepers[address] -= 1
        if self.keepers[address] == 0:
            del self.sizes[address]


def stored_bytes(blocks, optimizer):
    """Bytes on this rank of the parameters, their gradients and the optimizer's state, without its step counters."""
    total = 0
    for parameter in blocks.parameters():
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            is_step_counter = tensor.dim() == 0
            if not is_step_counter:
                total += local(tensor).nbytes
    return total


def measured_bytes(arrangement):
    """Take one step on this rank, and return what it has stored and the most that it has kept."""
    sizes = (arrangement.pp, arrangement.fsdp, arrangement.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "fsdp", "tp"))
    blocks = divided_blocks(arrangement, mesh)
    optimizer = torch.optim.AdamW(blocks.parameters())

    sequence_lengths = [TOKENS]
    if arrangement.sequence:
        sequence_lengths.append(TOKENS // arrangement.tp)  # Some activations have only this rank's part of the tokens.
    tracker = KeptBytes(sequence_lengths)
    with torch.autograd.graph.saved_tensors_hooks(tracker.pack, tracker.unpack):
        forward_and_backward(arrangement, blocks, mesh)
    optimizer.step()
    return RankBytes(stored=stored_bytes(blocks, optimizer), kept=tracker.peak)


@pytest.mark.ranks
@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_a_rank_stores_and_keeps_what_is_planned(arrangement):
    bytes_of_ranks = launch(measured_bytes, arrangement, nproc=arrangement.ranks)
    measured = bytes_of_ranks[0]
    planned = planned_bytes(arrangement)
    assert measured.stored == pytest.approx(planned.stored, rel=0.01)
    assert measured.kept == pytest.approx(planned.kept, rel=0.01)
