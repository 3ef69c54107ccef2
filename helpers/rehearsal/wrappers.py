"""DDP, DTensor and optimizers on pretended GPUs: patches for their C++ parts, which see only CPU tensors."""

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
from torch.optim import optimizer
from torch.utils._pytree import tree_leaves

from helpers.counts import COLLECTIVE, COUNTS, script_line
from helpers.rehearsal import nccl
from helpers.rehearsal.devices import Node, bytes_of, is_gpu, replace
from helpers.rehearsal.tensor import CudaTensor, with_tensors

NUMBERS = 'int(os.environ["LOCAL_RANK"]) as its rank and int(os.environ["WORLD_SIZE"]) as the number of ranks'
SPAWN = f"mp.spawn starts ranks, and they run already, as with torchrun: call the function itself, with {NUMBERS}"
SYNC_BATCH_NORM = "SyncBatchNorm's kernels are for GPUs alone: rehearse without convert_sync_batchnorm"


@dataclass(frozen=True)
class Buckets:
    """The bytes of each of a DDP model's buckets, and the script's line at which the model first ran."""

    line: str
    bytes: list[int]


ORIGINAL_APPLY: Any = nn.Module._apply
ORIGINAL_GROUPING: Any = torch._C._group_tensors_by_device_and_dtype
BUCKETS: dict[nn.Module, Buckets] = {}  # of each DDP model, for the report


def patch() -> None:
    patch_ddp()
    patch_dtensor()
    replace(nn.Module, _apply=apply)
    replace(torch._C, _group_tensors_by_device_and_dtype=group_tensors)
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        replace(owner, **dict.fromkeys(("spawn", "start_processes"), refusing(SPAWN)))
    replace(nn.modules.batchnorm, sync_batch_norm=SimpleNamespace(apply=refusing(SYNC_BATCH_NORM)))
    optimizer.register_optimizer_step_post_hook(COUNTS.count_step)


def patch_ddp() -> None:
    ddp = DistributedDataParallel
    start, forward = ddp.__init__, ddp.forward

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # DDP's C++ makes buckets on the CPU. Gradients that are views of the buckets would be CPU tensors.
        kwargs["gradient_as_bucket_view"] = False
        start(self, module, *args, **kwargs)

    def count_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        group = nccl.nccl_of(self.process_group)
        if group and torch.is_grad_enabled() and self.require_backward_grad_sync:
            count_reduction(self, group, out)
        return out

    replace(ddp, __init__=init, forward=count_forward)
    for name in ("buffer", "gradients"):  # what a comm hook takes from a bucket
        replace(dist.GradBucket, **{name: of_this_gpu(getattr(dist.GradBucket, name))})


def patch_dtensor() -> None:
    """Make a DTensor a CPU tensor for torch's C++, as its local part is, while Python sees the local part's device."""
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return wrap(*args, device="cpu" if is_gpu(device) else device, **kwargs)

    replace(torch.Tensor, _make_wrapper_subclass=staticmethod(on_cpu))
    replace(DTensor, device=property(lambda self: self._local_tensor.device))
    replace(DTensor, is_cuda=property(lambda self: self._local_tensor.is_cuda))
    replace(OffsetBasedRNGTracker, _distribute_region=draw)
    # The CPU's fused attention may be split as the GPU's is, by sequences or by heads: its results, then its arguments.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name, results, tensors in ((attention, 2, 3), (f"{attention}_backward", 3, 6)):
        parts = [([part] * results, [part] * tensors + [None] * 2) for part in (Replicate(), Shard(0), Shard(1))]
        register_sharding(getattr(torch.ops.aten, name).default)(lambda *args, parts=parts, **kwargs: parts)


def refusing(message: str) -> Callable[..., Any]:
    """A function that a rehearsal cannot run: it says what to do."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise COUNTS.refuse(message, NotImplementedError)

    return refuse


def of_this_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives CPU tensors of DDP's C++, wrapped: it gives tensors on the current GPU with their values."""
    return lambda self: with_tensors(original(self), lambda tensor: CudaTensor(tensor, Node.current))


def count_reduction(model: Any, group: Any, out: Any) -> None:
    """Count, at the line of the forward pass, the all-reduces that DDP's C++ will start in backward.

    When backward reaches the model, the ranks compare whether all of them have come there.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    COUNTS.add(COLLECTIVE, "allreduce by DDP, in backward", sum(map(bytes_of, parameters)))
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    line = BUCKETS[model].line if model in BUCKETS else script_line()
    BUCKETS[model] = Buckets(line, [int(part) for part in str(sizes).split(",") if part.strip()])
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if outputs and not model._join_config.enable:  # a rank without inputs then comes as well, in C++
        call = f"DDP's all_reduce of {sum(parameter.numel() for parameter in parameters)} gradients"
        outputs[-1].register_hook(lambda grad: group.come(call))


def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Module._apply, which moves a module. weight_norm's result would keep hold of the parameters that it came from."""
    derived = [name for name, value in vars(self).items() if isinstance(value, torch.Tensor) and value.grad_fn]
    vars(self).update({name: vars(self)[name].detach() for name in derived})
    return ORIGINAL_APPLY(self, *args, **kwargs)


def group_tensors(tensors: Any, with_indices: bool) -> dict[Any, Any]:
    """How clipping and optimizers group tensors by device and type. Their C++ takes all devices for the CPU."""
    groups = {}
    for (device, dtype), (lists, indices) in ORIGINAL_GROUPING(tensors, with_indices).items():
        first = next((tensor for tensor in lists[0] if tensor is not None), None)
        groups[device if first is None else first.device, dtype] = (lists, indices)
    return groups


@contextlib.contextmanager
def draw(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Where a DTensor draws random numbers: each shard has numbers of its own, and equal parts have equal numbers."""
    if generator is not None or not self.distribute_region_enabled:
        yield
        return
    # PyTorch 2.11 has these two methods and no function that returns what they add.
    state = SimpleNamespace(offset=0)
    self._set_pre_op_offset(state, spec)
    first = state.offset  # of this rank's shard
    self._set_post_op_offset(state, spec, 0)
    count = state.offset  # of the whole tensor
    seed, drawn = Node.draws
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(hash((seed, drawn + first)) % 2**63)
        yield
    Node.draws = [seed, drawn + count]
