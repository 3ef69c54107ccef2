"""What each rank of a large world really holds: fully_shard and tensor parallelism, on a group that pretends its size.

Sharding is not division: each tensor is cut between its rows, and the parts are rounded up. Here PyTorch itself cuts,
on the meta device, which stores no numbers, in a world of the "fake" backend, whose collectives do nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from helpers.planner.layout import Layout
from helpers.planner.memory import outer_tensors_of
from helpers.planner.model import Model, Tensor, layer_tensors
from helpers.planner.records import refuse
from helpers.ranks.launch import launch

LAYERS_BUILT = 2  # of each kind; the second one stands for all that are not built


@dataclass(frozen=True)
class Rank:
    """What one rank holds."""

    rank: int
    stage: int
    numbers: int  # of parameters


@dataclass(frozen=True)
class Trace:
    """What the first and the last rank of the first, second and last stage hold.

    The first rank of a stage holds the most of it, the last the least: each tensor's rows go to ranks in order.
    """

    ranks: tuple[Rank, ...]
    divided: float  # parameters of the model for each of the ranks that share a copy of it, without rounding

    @property
    def first(self) -> Rank:
        """Rank 0."""
        return self.ranks[0]

    @property
    def excess(self) -> float:
        """What the fullest rank holds beyond ``divided``, as a share."""
        return max(rank.numbers for rank in self.ranks) / self.divided - 1


def trace(model: Model, layout: Layout) -> Trace:
    """The Trace of a model under fully_shard, HSDP (layout.shard) and tensor parallelism; layout.zero must be 3.

    It runs in a process of its own, so that the caller's process group stays.
    """
    layout.check(model)
    if layout.zero != 3 or layout.ep > 1 or model.kv_heads % layout.tp != 0:
        problem = "only FSDP and tensor parallelism are traced, without expert parallelism and without copied kv_heads"
        refuse(problem, f"zero = 3, ep = 1, and a divisor of {model.kv_heads} as tp")
    ranks_per_stage = layout.gpus // layout.pp
    traced = []
    for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        first = stage * ranks_per_stage
        last = first + ranks_per_stage - 1
        for rank in sorted({first, last}):
            traced.append((stage, rank))
    [ranks] = launch(pretend, model, layout, traced, nproc=1, timeout=600)
    ranks_of_copy = layout.gpus // copies_of_model(layout)
    return Trace(tuple(ranks), divided=model.parameters() / ranks_of_copy)


def copies_of_model(layout: Layout) -> int:
    """How many groups of ranks have a full copy of the parameters: more than one under HSDP."""
    return layout.data_ranks // layout.sharers


def pretend(model: Model, layout: Layout, traced: list[tuple[int, int]]) -> list[Rank]:
    """A Rank for each (stage, rank): in this process, as each of these ranks in turn. Ends the process group."""
    ranks = []
    for stage, rank in traced:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=layout.gpus)
        ranks.append(count_rank(model, layout, rank, stage))
    return ranks


def count_rank(model: Model, layout: Layout, rank: int, stage: int, device: str = "meta") -> Rank:
    """The Rank of this process, on whatever group it is in: it builds the stage, shards it and counts."""
    layers = layout.layers_of(model, stage)
    built = []
    for has_experts in (False, True):
        of_this_kind = [layer for layer in layers if model.has_experts(layer) == has_experts]
        built += of_this_kind[:LAYERS_BUILT]
    root = sharded_stage(model, layout, stage, built, device)

    numbers_of_kind = {}
    total = local_numbers(root)
    for layer in built:
        numbers_of_kind[model.has_experts(layer)] = local_numbers(root.get_submodule(f"layers.{layer}"))
    for layer in layers:
        if layer not in built:
            total += numbers_of_kind[model.has_experts(layer)]
    return Rank(rank, stage, total)


def local_numbers(module: nn.Module) -> int:
    """Numbers of a module's parameters that this rank holds."""
    total = 0
    for parameter in module.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total += local.numel()
    return total


def sharded_stage(model: Model, layout: Layout, stage: int, layers: Iterable[int], device: str) -> nn.Module:
    """A stage with these layers only, as a module on this rank. It has the model's parameters and computes nothing."""
    copies = copies_of_model(layout)
    sizes = {"pp": layout.pp, "replicate": copies, "shard": layout.sharers, "tp": layout.tp}
    # A dimension of one rank would cost a group for every rank of the world.
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        sizes = {"tp": 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tp = None
    if "tp" in sizes:
        tp = mesh["tp"]
    root = module_of(outer_tensors_of(model, layout, stage), tp, device)
    root.layers = nn.ModuleDict()
    for layer in layers:
        root.layers[str(layer)] = module_of(layer_tensors(model, model.has_experts(layer)), tp, device)
    if layout.sharers > 1:
        data = mesh["replicate", "shard"] if copies > 1 else mesh["shard"]
        for module in [*root.layers.values(), root]:
            fully_shard(module, mesh=data)
    return root


def module_of(tensors: Iterable[Tensor], tp: DeviceMesh | None, device: str) -> nn.Module:
    """A module with these parameters, each already divided among the tensor-parallel ranks."""
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        shape = [tensor.rows, tensor.columns] if tensor.columns > 1 else [tensor.rows]
        for copy in range(tensor.copies):
            value = torch.empty(shape, device=device)
            if tensor.split and tp:
                dimension = 0 if tensor.split == "rows" else 1
                value = distribute_tensor(value, tp, [Shard(dimension)])
            module.register_parameter(f"{number}_{copy}", nn.Parameter(value))
    return module
