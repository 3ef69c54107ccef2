"""What each rank of a large world really holds under fully_shard and tensor parallelism.

Sharding is not division: each tensor is cut between its rows, and the parts are rounded up. Here PyTorch itself cuts.
The tensors are on the meta device, which stores no numbers, and the world is one of the "fake" backend, which pretends
to have any number of ranks and whose collectives do nothing.
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

# How many layers with experts, and how many without, are built of a stage. The last one of each kind stands for all
# that are not built.
LAYERS_BUILT = 2
LONGEST_TRACE = 600  # seconds: far more than the few that a world of 16,384 ranks takes


@dataclass(frozen=True)
class TracedRank:
    """A rank to trace, by its number in the world, and the pipeline stage that it belongs to."""

    rank: int
    stage: int


@dataclass(frozen=True)
class Rank:
    """How many parameters one rank holds."""

    rank: int
    stage: int
    numbers: int


@dataclass(frozen=True)
class Trace:
    """What the first and the last rank of the first, second and last stage hold.

    The rows of each tensor go to the ranks in order. So the first rank of a stage holds most of it, and the last one
    least.
    """

    ranks: tuple[Rank, ...]
    divided: float  # the model's parameters divided by the number of ranks that share a copy, without rounding

    @property
    def first(self) -> Rank:
        """Rank 0."""
        return self.ranks[0]

    @property
    def excess(self) -> float:
        """The share by which the fullest rank holds more than ``divided``: 0.01 is 1 % more."""
        most_numbers = max(rank.numbers for rank in self.ranks)
        return most_numbers / self.divided - 1


def trace(model: Model, layout: Layout) -> Trace:
    """Let PyTorch shard a model, and count the parameters that the first and the last rank of pipeline stages hold.

    The layout must be one of fully_shard or HSDP (zero = 3), with or without tensor parallelism and stages. Raises
    PlanError for any other. The ranks are simulated in a process of their own, so that the caller's process group stays
    as it is.
    """
    layout.check(model)
    # Ranks that outnumber the heads of keys and values have copies of these, which DTensor's Shard cannot express.
    copies_kv_heads = model.kv_heads % layout.tp != 0
    if layout.zero != 3 or layout.ep > 1 or copies_kv_heads:
        problem = "only FSDP and tensor parallelism are traced, without expert parallelism and without copied kv_heads"
        refuse(problem, f"zero = 3, ep = 1, and a divisor of {model.kv_heads} as tp")

    # One process is enough, because it pretends to be one rank after the other.
    results = launch(count_as_each, model, layout, ranks_to_trace(layout), nproc=1, timeout=LONGEST_TRACE)
    ranks_of_copy = layout.gpus // copies_of_model(layout)
    return Trace(ranks=tuple(results[0]), divided=model.parameters() / ranks_of_copy)


def ranks_to_trace(layout: Layout) -> list[TracedRank]:
    """The ranks that hold most and least: the first and the last one of each kind of stage.

    fully_shard cuts each tensor into parts of equally many rows, rounded up, and gives them to the ranks in order. So
    the first rank of a stage always has a full part, and if rows are missing in the end, the last rank has fewer.
    """
    # The stage is the outermost dimension of the mesh, so the ranks of a stage have consecutive numbers.
    ranks_per_stage = layout.gpus // layout.pp
    traced = []
    for stage in layout.typical_stages:
        first = stage * ranks_per_stage
        last = first + ranks_per_stage - 1
        traced.append(TracedRank(first, stage))
        if last != first:
            traced.append(TracedRank(last, stage))
    return traced


def copies_of_model(layout: Layout) -> int:
    """How many groups of ranks have a copy of all parameters: one under FSDP, more under HSDP."""
    return layout.data_ranks // layout.sharers


def count_as_each(model: Model, layout: Layout, traced: Iterable[TracedRank]) -> list[Rank]:
    """Pretend in this process to be each of these ranks in turn, and count the parameters that it holds.

    A process group of the backend "fake" takes any rank and any world size, and its collectives return at once, so no
    other process is needed. This process must have a process group, which a simulated one replaces for each rank.
    """
    ranks = []
    for member in traced:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=member.rank, world_size=layout.gpus)
        ranks.append(count_rank(model, layout, member.rank, member.stage))
    return ranks


def count_rank(model: Model, layout: Layout, rank: int, stage: int, device: str = "meta") -> Rank:
    """Build a stage of the model in this process, shard it, and count the parameters that are left on this rank.

    The process must be ``rank`` of a process group with as many ranks as the layout. All layers with experts are equal,
    and so are all layers without. So only a few of each kind are built, and the last one counts for the others, too.
    """
    layers = layout.layers_of(model, stage)
    built_layers = []
    for has_experts in (False, True):
        layers_of_kind = [layer for layer in layers if model.has_experts(layer) == has_experts]
        built_layers += layers_of_kind[:LAYERS_BUILT]
    root = sharded_stage(model, layout, stage, built_layers, device)

    total = local_numbers(root)
    numbers_of_kind = {}  # {whether a layer has experts: parameters of one such layer on this rank}
    for layer in built_layers:
        numbers_of_kind[model.has_experts(layer)] = local_numbers(root.get_submodule(f"layers.{layer}"))
    for layer in layers:
        if layer not in built_layers:
            total += numbers_of_kind[model.has_experts(layer)]
    return Rank(rank=rank, stage=stage, numbers=total)


def local_numbers(module: nn.Module) -> int:
    """Count the numbers of a module's parameters on this rank. Of a divided parameter only its own part counts."""
    total = 0
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            total += parameter.to_local().numel()
        else:
            total += parameter.numel()
    return total


def sharded_stage(model: Model, layout: Layout, stage: int, layers: Iterable[int], device: str) -> nn.Module:
    """Build a pipeline stage with only these layers, and divide its parameters among ranks as a training would.

    Tensor parallelism divides each tensor first, and then fully_shard divides what is left, layer by layer. The module
    has the model's parameters and no forward. ``device`` is where they are; "meta" stores only their shapes.
    """
    meshes = meshes_of(layout)
    root = module_of(outer_tensors_of(model, layout, stage), meshes.tensor, device)
    root.layers = nn.ModuleDict()
    for layer in layers:
        tensors = layer_tensors(model, model.has_experts(layer))
        root.layers[str(layer)] = module_of(tensors, meshes.tensor, device)
    if meshes.data is not None:
        # fully_shard leaves out parameters that it has divided already. So of the root, which comes last, it divides
        # only those outside the layers.
        for module in [*root.layers.values(), root]:
            fully_shard(module, mesh=meshes.data)
    return root


@dataclass(frozen=True)
class Meshes:
    """This rank's parts of the device mesh. None stands for a single rank, among which nothing is divided."""

    tensor: DeviceMesh | None  # the ranks of tensor parallelism
    data: DeviceMesh | None  # the ranks of fully_shard; for HSDP in two dimensions: copies and shards


def meshes_of(layout: Layout) -> Meshes:
    """Arrange all ranks of the process group in a mesh, and return the parts along which parameters are divided."""
    copies = copies_of_model(layout)
    # From the outermost dimension, whose neighbours are farthest from each other, to the innermost.
    all_sizes = {"pp": layout.pp, "replicate": copies, "shard": layout.sharers, "tp": layout.tp}
    # init_device_mesh makes a process group for each line of ranks along each dimension. A dimension of one rank would
    # need a group for every rank of the world.
    sizes = {name: size for name, size in all_sizes.items() if size > 1}
    if not sizes:
        return Meshes(tensor=None, data=None)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tensor = None
    if layout.tp > 1:
        tensor = mesh["tp"]
    data = None
    if layout.sharers > 1 and copies > 1:
        data = mesh["replicate", "shard"]
    elif layout.sharers > 1:
        data = mesh["shard"]
    return Meshes(tensor=tensor, data=data)


def module_of(tensors: Iterable[Tensor], mesh: DeviceMesh | None, device: str) -> nn.Module:
    """Make a module with parameters of these shapes, divided among the tensor-parallel ranks of a mesh if there is one.

    A Tensor says whether tensor parallelism divides its rows, its columns or nothing, and how many equal copies the
    model has of it, such as one for each expert.
    """
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        shape = [tensor.rows]
        if tensor.columns > 1:
            shape.append(tensor.columns)
        for copy in range(tensor.copies):
            value = torch.empty(shape, device=device)
            if tensor.split and mesh is not None:
                dimensions = {"rows": 0, "columns": 1}
                value = distribute_tensor(value, mesh, [Shard(dimensions[tensor.split])])
            module.register_parameter(f"{number}_{copy}", nn.Parameter(value))
    return module
