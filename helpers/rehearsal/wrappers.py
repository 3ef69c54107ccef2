"""DDP, DTensor and modules on pretended GPUs: patches for their C++ parts, which see only CPU tensors."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from helpers.counts import script_line
from helpers.rehearsal import events, nccl
from helpers.rehearsal.devices import Node, is_gpu, refusing, replace
from helpers.rehearsal.tensor import CudaTensor, map_tensors

NUMBERS = 'int(os.environ["LOCAL_RANK"]) as its rank and int(os.environ["WORLD_SIZE"]) as the number of ranks'
SPAWN = f"mp.spawn starts ranks, and they run already, as with torchrun: call the function itself, with {NUMBERS}"


@dataclass(frozen=True)
class Buckets:
    """The bytes of each of a DDP model's buckets, and the script's line at which the model first ran."""

    line: str
    bytes: list[int]


ORIGINAL_APPLY: Any = nn.Module._apply
ORIGINAL_GROUPING: Any = torch._C._group_tensors_by_device_and_dtype
DDP_GROUPS: list[Any] = []  # the pretended NCCL of each DDP model
BUCKETS: dict[nn.Module, Buckets] = {}  # of each DDP model, for the report


def patch() -> None:
    patch_ddp()
    patch_dtensor()
    replace(nn.Module, _apply=apply)
    replace(torch._C, _group_tensors_by_device_and_dtype=group_tensors)
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        replace(owner, spawn=refusing(SPAWN), start_processes=refusing(SPAWN))


def patch_ddp() -> None:
    """Let DDP work with pretended tensors, count its all-reduces, and say who did not come to them."""
    original_init = DistributedDataParallel.__init__
    original_forward = DistributedDataParallel.forward
    original_backward: Any = torch.autograd._engine_run_backward

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # DDP's C++ makes buckets on the CPU. Gradients that are views of the buckets would be CPU tensors.
        kwargs["gradient_as_bucket_view"] = False
        original_init(self, module, *args, **kwargs)
        group = nccl.nccl_of(self.process_group)
        if group is not None and group not in DDP_GROUPS:
            DDP_GROUPS.append(group)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = nccl.nccl_of(self.process_group)
        if group is None:
            return original_forward(self, *args, **kwargs)
        if self.will_sync_module_buffers() and not self._join_config.enable:
            group.announce("DDP's broadcast of buffers")
        with explained([group]):
            out = original_forward(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            count_reduction(self, group, out)
        return out

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with explained(DDP_GROUPS):
            return original_backward(*args, **kwargs)

    replace(DistributedDataParallel, __init__=init, forward=forward)
    replace(torch.autograd, _engine_run_backward=run_backward)
    for name in ("buffer", "gradients"):  # what a comm hook takes from a bucket
        replace(dist.GradBucket, **{name: of_this_gpu(getattr(dist.GradBucket, name))})


@contextlib.contextmanager
def explained(groups: list[Any]) -> Iterator[None]:
    """Where DDP's C++ loses a peer in this block, raise an error that says which ranks of a group did not come.

    ``groups`` are the pretended NCCLs that may have lost it. Other errors pass.
    """
    try:
        yield
    except RuntimeError as error:
        for group in groups:
            explanation = group.explain(error)
            if explanation is not error:
                raise explanation from None
        raise


def patch_dtensor() -> None:
    """Make a DTensor a CPU tensor for torch's C++, as its local part is, while Python sees the local part's device."""
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if is_gpu(device):
            device = "cpu"
        return wrap(*args, device=device, **kwargs)

    replace(torch.Tensor, _make_wrapper_subclass=staticmethod(on_cpu))
    replace(DTensor, device=property(lambda self: self._local_tensor.device))
    replace(DTensor, is_cuda=property(lambda self: self._local_tensor.is_cuda))
    replace(OffsetBasedRNGTracker, _distribute_region=own_random_numbers)
    replace(sys.modules["torch.distributed.tensor._op_schema"], _rebuild_tensor_from_dtensor_meta=fake_tensor)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    allow_sharding(getattr(torch.ops.aten, attention), results=2, tensors=3)
    allow_sharding(getattr(torch.ops.aten, f"{attention}_backward"), results=3, tensors=6)


def fake_tensor(spec: Any) -> torch.Tensor:
    """A tensor with which torch finds the shape of an operator's result, in its mode for tensors without values.

    torch makes it on the mesh's device, where in-place random numbers ask a build for CPUs for CUDA.
    """
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")


def allow_sharding(operator: Any, results: int, tensors: int) -> None:
    """Tell DTensor that the CPU's fused attention can be split by sequences or by heads, as it knows of the GPU's.

    ``results`` and ``tensors`` are the numbers of its results and of the tensors among its arguments.
    """
    shardings = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        other_arguments = [None, None]  # dropout's probability, and whether the attention is causal
        shardings.append(([placement] * results, [placement] * tensors + other_arguments))
    register_sharding(operator.default)(lambda *args, **kwargs: shardings)


def of_this_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that returns CPU tensors of DDP's C++, so that it returns pretended tensors that share them."""
    return lambda self: map_tensors(original(self), lambda tensor: CudaTensor(tensor, Node.current))


def count_reduction(model: Any, group: Any, out: Any) -> None:
    """Count the all-reduces of a DDP model's gradients, and let the ranks compare whether all of them start these.

    DDP's C++ starts the all-reduces in backward, where Python does not see them. So they are counted here, at the line
    of the script that runs the model, which returned ``out``. A hook announces them to the ``group`` during backward.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    events.collective("allreduce by DDP, in backward", parameters)
    note_buckets(model)
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    # In DDP's join a rank without inputs takes part as well, in C++, where it cannot announce its call.
    if outputs and not model._join_config.enable:
        gradients = sum(parameter.numel() for parameter in parameters)
        # One output is enough to notice that backward has come to the model. Autograd comes to the newest one first.
        outputs[-1].register_hook(lambda grad: group.announce(f"DDP's all_reduce of {gradients} gradients"))


def note_buckets(model: Any) -> None:
    """Note the sizes of a DDP model's buckets for the report, with the line at which the model ran first.

    They are noted at each run, because DDP forms its buckets anew after the first backward pass.
    """
    data = model._get_ddp_logging_data()
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")  # such as "1024, 2048", in bytes
    line = script_line()
    if model in BUCKETS:
        line = BUCKETS[model].line
    BUCKETS[model] = Buckets(line, [int(size) for size in sizes.split(",") if size.strip()])


def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Module._apply, with which a module moves to a device. It first cuts computed attributes off their graphs.

    A parameter moves by ``set_values``, whose swap fails while anything else refers to the parameter. weight_norm keeps
    the weight that it has computed as an attribute, and the weight's graph refers to the parameters.
    """
    # The list holds names, because a variable that held a tensor would refer to it as well.
    computed = [name for name, value in vars(self).items() if isinstance(value, torch.Tensor) and value.grad_fn]
    for name in computed:
        vars(self)[name] = vars(self)[name].detach()
    return ORIGINAL_APPLY(self, *args, **kwargs)


def group_tensors(tensors: Any, with_indices: bool) -> dict[Any, Any]:
    """{(device, dtype): tensors}, as gradient clipping and optimizers ask torch's C++ for it.

    C++ takes every pretended tensor for one on the CPU, so the device in the key is replaced by the tensors' own.
    """
    groups = {}
    for (device_in_cpp, dtype), (lists, indices) in ORIGINAL_GROUPING(tensors, with_indices).items():
        present = [tensor for tensor in lists[0] if tensor is not None]
        device = device_in_cpp
        if present:
            device = present[0].device
        groups[device, dtype] = (lists, indices)
    return groups


@contextlib.contextmanager
def own_random_numbers(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Give the CPU's generator a seed for this rank's part of a DTensor, while the block draws random numbers for it.

    Different shards get different numbers, and replicas of a shard equal ones, as on GPUs. There the generator can
    begin at any offset of its sequence, and torch computes the offset of each shard. The CPU's generator cannot, so the
    seed is made of that offset. ``self`` is torch's tracker of offsets, ``spec`` says how the DTensor is divided.
    """
    if generator is not None or not self.distribute_region_enabled:
        yield
        return
    # torch 2.11 has no functions that return these offsets, only methods that add them to a state.
    state = SimpleNamespace(offset=0)
    self._set_pre_op_offset(state, spec)
    offset_of_shard = state.offset
    self._set_post_op_offset(state, spec, 0)
    numbers_drawn = state.offset
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(hash((Node.random_seed, Node.random_offset + offset_of_shard)) % 2**63)
        yield
    Node.random_offset += numbers_drawn
