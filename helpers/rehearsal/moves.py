"""Moves of tensors between the host and pretended GPUs: ``.to``, ``.cuda``, ``.cpu``, ``.pin_memory``."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.types import Device

from helpers.rehearsal.counts import COPY, COUNTS
from helpers.rehearsal.devices import bytes_of, gpu_of, is_gpu, is_pinned, mark_pinned, replace
from helpers.rehearsal.tensor import CudaTensor, bare, count_copy

ORIGINAL_TO: Any = torch.Tensor.to


def patch() -> None:
    replace(torch.Tensor, to=to, cuda=cuda, cpu=cpu, pin_memory=pin_memory)
    replace(torch.Tensor, is_pinned=lambda self, device=None: is_pinned(self))


class Copy(torch.autograd.Function):
    """A copy of a tensor on GPU ``index``, or on the host for None. Its gradient goes back to where the tensor is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: int | None) -> torch.Tensor:
        ctx.source = tensor.index if isinstance(tensor, CudaTensor) else None
        copy = bare(tensor).detach().clone()
        return copy if index is None else CudaTensor(copy, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return bare(grad) if ctx.source is None else CudaTensor(bare(grad), ctx.source), None


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the same shape and placements, with another local part."""
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def move(tensor: torch.Tensor, device: Device, non_blocking: bool = False) -> torch.Tensor:
    """The tensor on a device; of a DTensor, the local part. A copy is counted; what is there already is returned."""
    if isinstance(tensor, DTensor):
        if is_gpu(device) == is_gpu(tensor.device):
            return tensor
        return with_local(tensor, move(tensor.to_local(), device, non_blocking))
    target = gpu_of(device) if is_gpu(device) else None
    source = tensor.index if isinstance(tensor, CudaTensor) else None
    if target == source:
        return tensor
    if target is None or source is None:
        count_copy(tensor, target is not None, non_blocking)
    else:
        COUNTS.add(COPY, "between GPUs", bytes_of(tensor))
    return Copy.apply(tensor, target)


def to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.to, in all its forms: (device, dtype, non_blocking, copy), (dtype, …) and (other, …)."""
    for keyword in ("other", "device"):
        if keyword in kwargs:
            args = (kwargs.pop(keyword), *args)
    if [type(arg) for arg in args[-2:]] == [bool, bool]:
        args, copy = args[:-1], args[-1]
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    place, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    here = place is not None and place.type in ("cpu", "cuda")  # else it is "meta", say, or no device
    tensor = move(self, place, non_blocking) if here else self
    copy = copy and tensor is self
    changes = {"device": None if here else place, "dtype": dtype, "memory_format": memory_format, "copy": copy or None}
    changes = {name: change for name, change in changes.items() if change is not None}
    return ORIGINAL_TO(tensor, **changes) if changes else tensor


def cuda(
    self: torch.Tensor, device: Device = None, non_blocking: bool = False, memory_format: Any = None
) -> torch.Tensor:
    return to(self, "cuda" if device is None else device, non_blocking=non_blocking)


def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    return to(self, "cpu")


def pin_memory(self: torch.Tensor, device: Device = None) -> torch.Tensor:
    """A copy that is marked as pinned."""
    if isinstance(self, CudaTensor):
        raise COUNTS.refuse(RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned"))
    return self if is_pinned(self) else mark_pinned(self.detach().clone())
