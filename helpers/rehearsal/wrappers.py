"""DDP, FSDP and optimizers on pretended GPUs: patches for their C++ parts, which see only CPU tensors."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils import _foreach_utils

from helpers.rehearsal import nccl
from helpers.rehearsal.counts import COLLECTIVE, COUNTS, script_line
from helpers.rehearsal.devices import bytes_of, gpu_of, is_gpu, replace
from helpers.rehearsal.tensor import CudaTensor


@dataclass(frozen=True)
class Buckets:
    """The bytes of each of a DDP model's buckets, and the script's line at which the model first ran."""

    line: str
    bytes: list[int]


ORIGINAL_MOVE_STATES = _fsdp_init._move_states_to_device
ORIGINAL_GROUPING = _foreach_utils._group_tensors_by_device_and_dtype
BUCKETS: dict[int, Buckets] = {}  # by a model's number, for the report


def patch() -> None:
    patch_ddp()
    patch_dtensor()
    replace(_fsdp_collectives.DefaultAllocMixin, allocate=allocate)
    replace(_fsdp_init, _move_states_to_device=move_states)
    for module in (_foreach_utils, torch.nn.utils.clip_grad, optimizer):
        replace(module, _group_tensors_by_device_and_dtype=group_tensors)
    optimizer.register_optimizer_step_post_hook(COUNTS.count_step)


def patch_ddp() -> None:
    ddp = DistributedDataParallel
    start, register, forward, then = ddp.__init__, ddp.register_comm_hook, ddp.forward, torch._C.Future.then

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # DDP's C++ makes buckets on the CPU. Gradients that are views of the buckets would be CPU tensors.
        kwargs["gradient_as_bucket_view"] = False
        start(self, module, *args, **kwargs)

    def register_comm_hook(self: Any, state: Any, hook: Callable[..., Any]) -> None:
        register(self, state, trusting()(hook))

    def count_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            count_reduction(self)
        return out

    def continue_with(self: Any, callback: Callable[..., Any]) -> Any:
        return then(self, trusting()(callback) if nccl.HOOKS_OF_DDP[0] else callback)

    replace(ddp, __init__=init, register_comm_hook=register_comm_hook, forward=count_forward)
    replace(torch._C.Future, then=continue_with)


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """A decorator of DDP's comm hooks: while one runs, NCCL accepts its buckets, which are CPU tensors.

    It keeps a hook's annotations, which DDP checks.
    """
    nccl.HOOKS_OF_DDP[0] += 1
    try:
        yield
    finally:
        nccl.HOOKS_OF_DDP[0] -= 1


def count_reduction(model: Any) -> None:
    """Count, at the line of the forward pass, the all-reduce that DDP's C++ will start in backward."""
    if not nccl.nccl_of(model.process_group):
        return
    size = sum(bytes_of(parameter) for parameter in model.parameters() if parameter.requires_grad)
    COUNTS.add(COLLECTIVE, "allreduce by DDP, in backward", size)
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    number = model.__dict__.setdefault("rehearsal_number", len(BUCKETS))  # a later model may have the same id
    line = BUCKETS[number].line if number in BUCKETS else script_line()
    BUCKETS[number] = Buckets(line, [int(part) for part in str(sizes).split(",") if part.strip()])


def allocate(self: Any, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
    """FSDP's allocation of a buffer."""
    if is_gpu(device):
        return CudaTensor(torch.empty(*size, dtype=dtype), gpu_of(device))
    return torch.empty(*size, dtype=dtype, device=device)


def move_states(params: list[nn.Parameter], buffers: list[torch.Tensor], device: torch.device) -> None:
    """FSDP's move of a CPU model to the mesh's devices. Its assignment to ``.data`` leaves a parameter on the CPU."""
    for tensor in (*params, *buffers) if is_gpu(device) else ():
        if tensor.is_cpu and not isinstance(tensor, DTensor):
            with torch.no_grad():
                moved = tensor.to(device)
            parameter = isinstance(tensor, nn.Parameter)
            torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if parameter else moved)
    ORIGINAL_MOVE_STATES(params, buffers, device)


def patch_dtensor() -> None:
    """Make a DTensor a CPU tensor for torch's C++, as its local part is, while Python sees the local part's device."""
    wrap: Any = torch.Tensor._make_wrapper_subclass

    def on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return wrap(*args, device="cpu" if is_gpu(device) else device, **kwargs)

    replace(torch.Tensor, _make_wrapper_subclass=staticmethod(on_cpu))
    replace(DTensor, device=property(lambda self: self._local_tensor.device))
    replace(DTensor, is_cuda=property(lambda self: self._local_tensor.is_cuda))


def group_tensors(tensors: Any, with_indices: bool = False) -> dict[Any, Any]:
    """How clipping and optimizers group tensors by device and type. Their C++ takes all devices for the CPU."""
    groups = {}
    for (device, dtype), (lists, indices) in ORIGINAL_GROUPING(tensors, with_indices).items():
        first = next((tensor for tensor in lists[0] if tensor is not None), None)
        groups[device if first is None else first.device, dtype] = (lists, indices)
    return groups
