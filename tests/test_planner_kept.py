"""What a rank stores and what autograd keeps, in eight arrangements, beside the planner's counts (decision guide)."""

import math
import sys
from collections import Counter
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from helpers.planner.layout import Layout
from helpers.planner.memory import activations_per_layer, in_flight, shared_parameters
from helpers.planner.model import model_of
from helpers.ranks.launch import launch
from helpers.runtime.models import PixelBlock

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second

SHAPE = {"width": 64, "layers": 4, "tokens": 100}
ARRANGEMENTS = [
    {},
    {"fsdp": 2},
    {"tp": 2},
    {"tp": 2, "sequence": True},
    {"fsdp": 2, "tp": 2},
    {"fsdp": 2, "recompute": True},
    {"pp": 2},
    {"pp": 2, "fsdp": 2},
]


def blocks_of_rank(width, layers, tokens, fsdp=1, tp=1, pp=1, sequence=False, recompute=False):
    """Bytes of (state, what is kept for backward) of the blocks on a rank of stage 0.

    In float32; the planner's model has one token in its vocabulary, so that its blocks
    are nearly all of it. A pipeline has four micro-batches.
    """
    shape = {"width": width, "layers": layers, "seq": tokens, "vocab": 1, "classes": 0}
    model = model_of({"preset": "pixels", **shape, "learned_positions": False})
    layout = Layout(
        dp=fsdp,
        tp=tp,
        pp=pp,
        zero=3 if fsdp > 1 else 0,
        dtype="float32",
        batch=fsdp * (4 if pp > 1 else 1),
        sequence_parallel=sequence,
        recompute="full" if recompute else "none",
    ).check(model)
    each = activations_per_layer(model, layout, sequence_inputs="kept")
    return (
        16 * shared_parameters(model, layout, stage=0),
        layers // pp * in_flight(layout, stage=0) * each,
    )


PLAN = {
    "query": ColwiseParallel(),
    "key": ColwiseParallel(),
    "value": ColwiseParallel(),
    "out": RowwiseParallel(),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}


class Recomputed(nn.Module):
    """A block that keeps its input only."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


SEQUENCE_PLAN = {
    **PLAN,
    **dict.fromkeys(["norm1", "norm2"], SequenceParallel()),
    **dict.fromkeys(["out", "mlp.2"], RowwiseParallel(output_layouts=Shard(1))),
    "mlp.0": ColwiseParallel(input_layouts=Shard(1)),
}
GATHERED = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)


def local(tensor):
    """The part of a tensor that is on this rank."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()
    return tensor


class Kept:
    """An activation, as autograd holds it until its backward; counts all of them."""

    holders = Counter()  # by place in memory
    sizes = {}  # bytes, by place
    peak = 0

    def __init__(self, tensor):
        self.tensor, self.place = tensor, local(tensor).data_ptr()
        Kept.holders[self.place] += 1
        Kept.sizes[self.place] = local(tensor).nbytes
        Kept.peak = max(Kept.peak, sum(Kept.sizes.values()))

    def __del__(self):
        Kept.holders[self.place] -= 1
        if not Kept.holders[self.place]:
            del Kept.sizes[self.place]

    @staticmethod
    def of(tensor, lengths):
        """Activations have a sequence's length among their sizes; weights do not."""
        return Kept(tensor) if lengths & set(tensor.shape) else tensor

    @staticmethod
    def give(held):
        return held.tensor if isinstance(held, Kept) else held


def measured(width, layers, tokens, fsdp=1, tp=1, pp=1, sequence=False, recompute=False):
    """(bytes stored, most bytes kept for backward) of this rank in one step."""
    names = ("pp", "fsdp", "tp")
    mesh = init_device_mesh("cpu", (pp, fsdp, tp), mesh_dim_names=names)
    blocks = nn.Sequential(*(PixelBlock(width, heads=4) for _ in range(layers // pp)))
    for index, block in enumerate(blocks):
        if tp > 1:
            parallelize_module(block, mesh["tp"], SEQUENCE_PLAN if sequence else PLAN)
        if sequence:  # query, key and value share one gathered tensor
            parallelize_module(block, mesh["tp"], {"norm1": GATHERED})
        if recompute:
            blocks[index] = Recomputed(block)
        if fsdp > 1:
            fully_shard(blocks[index], mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(blocks.parameters())
    mine = tokens // tp if sequence else tokens  # of a sequence, where blocks begin
    keep = partial(Kept.of, lengths={tokens, mine})
    with torch.autograd.graph.saved_tensors_hooks(keep, Kept.give):
        if pp > 1:
            micro_batches, index = 4, mesh["pp"].get_local_rank()
            device, group = torch.device("cpu"), mesh["pp"].get_group()
            stage = PipelineStage(blocks, index, pp, device, group=group)
            schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, _: output.sum())
            x = torch.randn(micro_batches, tokens, width, requires_grad=True)
            schedule.step(*([x] if index == 0 else []), target=x)
        else:
            x = torch.randn(1, mine, width, requires_grad=True)
            blocks(x).sum().backward()
    optimizer.step()
    stored = [
        tensor
        for parameter in blocks.parameters()
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values())
        if tensor.dim()  # without the step counters
    ]
    return sum(local(tensor).nbytes for tensor in stored), Kept.peak


@pytest.mark.ranks
@pytest.mark.parametrize("options", ARRANGEMENTS, ids=str)
def test_a_rank_stores_and_keeps_what_is_planned(options):
    nproc = math.prod(options.get(name, 1) for name in ("fsdp", "tp", "pp"))
    state, kept = launch(partial(measured, **SHAPE, **options), nproc=nproc)[0]  # of rank 0
    planned_state, planned_kept = blocks_of_rank(**SHAPE, **options)
    assert state == pytest.approx(planned_state, rel=0.01)
    assert kept == pytest.approx(planned_kept, rel=0.01)
