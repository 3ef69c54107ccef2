"""A block of the pixel transformer divided by tensor parallelism, for what the planner counts of one."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def divide_block(block, mesh, *, sequence_parallel, shared_input):
    """Divide a block's matrices among the ranks of a mesh, and with sequence parallelism the tokens between them.

    With ``shared_input``, the output of the first norm is gathered once for query, key and value. Otherwise each of
    them gathers it again.
    """
    plan = {
        "query": ColwiseParallel(),
        "key": ColwiseParallel(),
        "value": ColwiseParallel(),
        "out": RowwiseParallel(),
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(),
    }
    layout_behind_norm = Replicate()
    if sequence_parallel:
        plan["norm1"] = SequenceParallel()
        plan["norm2"] = SequenceParallel()
        plan["out"] = RowwiseParallel(output_layouts=Shard(1))
        plan["mlp.0"] = ColwiseParallel(input_layouts=Shard(1))
        plan["mlp.2"] = RowwiseParallel(output_layouts=Shard(1))
        layout_behind_norm = Shard(1)
    parallelize_module(block, mesh, plan)
    if shared_input:
        gather_once = PrepareModuleOutput(
            output_layouts=layout_behind_norm, desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block.norm1, mesh, gather_once)
