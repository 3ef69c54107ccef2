"""What each rank of a large world really holds: fully_shard and tensor parallelism, on a group that pretends its size.

Sharding is not division: each tensor is cut between its rows, and the parts are rounded up. Here PyTorch itself cuts,
on the meta device, which stores no numbers, in a world of the "fake" backend, whose collectives do nothing.
"""

from dataclasses import dataclass

from helpers.planner.model import PlanError
from helpers.ranks.launch import launch


@dataclass(frozen=True)
class Rank:
    """What one rank holds."""

    rank: int
    stage: int
    numbers: int  # parameters
    bytes: int  # in float32
    layer: int  # numbers of one layer of the stage, the last
    outside: int  # numbers outside the layers


@dataclass(frozen=True)
class Trace:
    """What the first and the last rank of the first, second and last stage hold. The first rank of a stage holds the
    most of it, the last the least: each tensor's rows go to ranks in order until there are none."""

    ranks: tuple
    world: int
    parameters: int  # of the whole model

    @property
    def first(self):
        """Rank 0."""
        return self.ranks[0]

    @property
    def largest(self):
        return max(self.ranks, key=lambda one: one.numbers)

    @property
    def smallest(self):
        return min(self.ranks, key=lambda one: one.numbers)

    @property
    def divided(self):
        """Parameters that one copy of the model would put on each of the ranks which share it, without rounding."""
        return self.parameters / self.world

    @property
    def excess(self):
        """What the fullest rank holds beyond that, as a share."""
        return self.largest.numbers / self.divided - 1


def trace(model, layout, every_layer=False):
    """The Trace of a model under fully_shard, HSDP (layout.shard) and tensor parallelism; layout.zero must be 3.

    Two layers of each kind are traced, and the second counts for all others. every_layer traces all, which takes a
    minute for 80 layers on 16,384 ranks. It runs in a process of its own, so that the caller's group stays.
    """
    layout.check(model)
    if layout.zero != 3:
        raise PlanError(f"only FSDP's sharding is traced, and zero is {layout.zero}.\nGive zero = 3.")
    if layout.ep > 1:
        raise PlanError(f"experts on ranks of their own (ep = {layout.ep}) are not traced.\nGive ep = 1.")
    if model.kv_heads % layout.tp:
        raise PlanError(
            f"{model.kv_heads} kv_heads would be copied to tp = {layout.tp} ranks, which is not traced.\n"
            f"Give at most {model.kv_heads} as tp."
        )
    each = layout.gpus // layout.pp
    asked = [
        (stage, stage * each + offset)
        for stage in sorted({0, min(1, layout.pp - 1), layout.pp - 1})
        for offset in sorted({0, each - 1})
    ]
    found = launch(pretended, model, layout, asked, every_layer, nproc=1, timeout=600)[0]
    copies = layout.data_ranks // layout.sharers
    return Trace(tuple(found), layout.gpus // copies, model.parameters())


def pretended(model, layout, asked, every_layer):
    """[Rank] for each (stage, rank): in this process, as each of these ranks in turn. Ends the process group."""
    import torch.distributed as dist

    found = []
    for stage, rank in asked:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=layout.gpus)
        found.append(held(model, layout, rank, stage, every_layer, "meta"))
    return found


def held(model, layout, rank, stage, every_layer=True, device="meta"):
    """The Rank of this process, on whatever group it is in: it builds the stage, shards it and counts."""
    sizes = layout.stage_layers(model)
    start = sum(sizes[:stage])
    numbers = list(range(start, start + sizes[stage]))
    traced = numbers
    if not every_layer:  # the first two of each kind
        kinds = [model.has_experts(layer) for layer in numbers]
        traced = [layer for at, layer in enumerate(numbers) if kinds[:at].count(kinds[at]) < 2]
    layers, outside = sharded(model, layout, stage, traced, device)
    counts = {layer: count(module) for layer, module in layers.items()}
    second = {model.has_experts(layer): counts[layer] for layer in traced}
    in_layers = sum(counts.get(layer, second[model.has_experts(layer)]) for layer in numbers)
    total = in_layers + outside
    return Rank(rank, stage, total, 4 * total, counts[traced[-1]], outside)


def count(module):
    """Numbers of a module's parameters that this rank holds."""
    return sum(local(parameter).numel() for parameter in module.parameters())


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def sharded(model, layout, stage, layers, device):
    """({layer: module}, numbers outside the layers) of a stage, with these layers only, on this rank."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    sizes = {
        "pp": layout.pp,
        "replicate": layout.data_ranks // layout.sharers,
        "shard": layout.sharers,
        "tp": layout.tp,
    }
    # A dimension of one rank would cost a group for every rank of the world.
    sizes = {name: size for name, size in sizes.items() if size > 1} or {"tp": 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    with torch.device(device):
        root = stage_module(model, layout, stage, layers)
    if layout.tp > 1:
        plan = {
            name: RowwiseParallel() if kind in ("output", "down") else ColwiseParallel()
            for name, kind in root.divided.items()
        }
        if "embedding" in dict(root.named_children()):
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        if "head" in dict(root.named_children()):
            plan["head"] = ColwiseParallel(output_layouts=Shard(-1))
        if layout.sequence_parallel:
            plan |= {name: SequenceParallel() for name, _ in root.named_modules() if name.split(".")[-1] == "norm"}
            plan |= {f"layers.{at}.norms.{k}": SequenceParallel() for at in root.layers for k in range(model.norms)}
        parallelize_module(root, mesh["tp"], plan)
    if layout.sharers > 1:
        over = mesh["replicate", "shard"] if "replicate" in sizes else mesh["shard"]
        for layer in root.layers.values():
            fully_shard(layer, mesh=over)
        fully_shard(root, mesh=over)
    found = {int(at): layer for at, layer in root.layers.items()}
    return found, count(root) - sum(map(count, found.values()))


def stage_module(model, layout, stage, layers):
    """A module with the parameters of a stage, named as in Model.tensors; it computes nothing.

    ``divided`` maps the names of matrices that tensor parallelism divides to their kind.
    """
    import torch
    from torch import nn

    def norm(width):
        return nn.LayerNorm(width) if model.norm_biases else nn.RMSNorm(width)

    root, width = nn.Module(), model.width
    root.divided = {}
    if stage == 0:
        root.embedding = nn.Embedding(model.vocab, width)
        if model.learned_positions:
            root.positions = nn.Parameter(torch.empty(model.seq, width))
        if model.classes:
            root.labels = nn.Embedding(model.classes, width)
    root.layers = nn.ModuleDict()
    for at in layers:
        root.layers[str(at)] = layer = nn.Module()
        layer.norms = nn.ModuleList(norm(width) for _ in range(model.norms))
        if model.head_norms:
            layer.head_norms = nn.ModuleList(nn.RMSNorm(model.head_width) for _ in range(2))
        matrices, bias = {}, model.biases or model.qkv_biases
        matrices["query"] = nn.Linear(width, model.attention_width, bias)
        matrices["key"] = nn.Linear(width, model.kv_heads * model.head_width, bias)
        matrices["value"] = nn.Linear(width, model.kv_heads * model.head_width, bias)
        matrices["output"] = nn.Linear(model.attention_width, width, model.biases)
        ffn, copies = (model.dense_ffn if model.experts else model.ffn), 1
        if model.has_experts(at):
            layer.router = nn.Linear(width, model.experts, bias=False)
            ffn, copies = model.ffn, model.experts + model.shared_experts
        for copy in range(copies):
            for gate in range(model.matrices - 1):
                matrices[f"up{copy}_{gate}"] = nn.Linear(width, ffn, model.biases)
            matrices[f"down{copy}"] = nn.Linear(ffn, width, model.biases)
        for name, matrix in matrices.items():
            layer.add_module(name, matrix)
            root.divided[f"layers.{at}.{name}"] = name.rstrip("_0123456789")
    if stage == layout.pp - 1:
        root.norm = norm(width)
        if not model.tied:
            root.head = nn.Linear(width, model.vocab, bias=False)
        elif stage > 0:  # a copy of the embedding
            root.head = nn.Linear(width, model.vocab, bias=False)
    return root
