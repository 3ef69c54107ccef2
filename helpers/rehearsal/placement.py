"""How tensors get to pretended GPUs and back: ``.to`` and its like, functions such as torch.zeros, and torch.load."""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.overrides import _get_current_function_mode_stack
from torch.types import Device
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_map_only

from helpers.counts import COPY, COUNTS
from helpers.rehearsal import cuda_names
from helpers.rehearsal.devices import bytes_of, gpu_of, is_gpu, is_pinned, mark_pinned, replace
from helpers.rehearsal.tensor import (
    MAP_LOCATIONS,
    CudaTensor,
    count_copy,
    cpu_tensor,
    index_of,
    on_gpu_or_host,
    set_inner,
    set_values,
    unwrap,
)

LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")
aten = torch.ops.aten
# The operators with which torch's C++ makes tensors.
FACTORIES = (aten.empty.memory_format, aten.empty_strided.default, aten.tril_indices.default, aten.triu_indices.default)
LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
TENSOR_TYPES = [name for name in cuda_names.PRETENDED if name.endswith("Tensor")]
NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")

flex: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # its package has a function of this name
ORIGINAL_COMPATIBLE: Any = torch._has_compatible_shallow_copy_type
ORIGINAL_DATA: Any = torch.Tensor.data
ORIGINAL_LOAD = torch.load
ORIGINAL_ONE_HOT = torch.nn.functional.one_hot
ORIGINAL_TO: Any = torch.Tensor.to
ORIGINAL_TYPE: Any = torch.Tensor.type


def patch() -> None:
    """Replace every function of torch that makes a tensor or moves it to another device, and torch.compile."""
    torch._C._set_only_lift_cpu_tensors(True)  # then torch.tensor copies its values to a GPU by an operator
    with warnings.catch_warnings():
        # PyTorch's build for CUDA has kernels already, and warns that these take their place.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator in FACTORIES:
            LIBRARY.impl(operator, kernel(operator))
    for factory in _device_constructors():
        owner: Any = torch
        if factory.__name__.startswith("fft_"):  # torch.fft.fftfreq is called fft_fftfreq
            owner = torch.fft
        name = factory.__name__.removeprefix("fft_")
        if getattr(owner, name, None) is factory:
            replace(owner, **{name: on_any_device(factory)})
    for owner, names in ((torch, LIKE), (torch.Tensor, NEW)):
        replace(owner, **{name: on_any_device(getattr(owner, name)) for name in names})
    replace(torch.Tensor, to=to, cuda=cuda, pin_memory=pin_memory, data=property(ORIGINAL_DATA.__get__, set_data))
    replace(torch.Tensor, cpu=lambda self, memory_format=None: to(self, "cpu"), type_as=type_as, type=type_)
    replace(torch.Tensor, is_pinned=lambda self, device=None: is_pinned(self))
    replace(torch.nn.functional, one_hot=one_hot)
    for name in TENSOR_TYPES:
        body = {"dtype": dtype_of(name), "__module__": "torch.cuda"}
        replace(torch.cuda, **{name: TensorType(name, (), body)})
    replace(torch, set_default_tensor_type=set_default_tensor_type)
    replace(torch, load=load, compile=leave_eager, _has_compatible_shallow_copy_type=may_share_data)
    # torch would trace or compile flex_attention. Pretended tensors get its uncompiled version, sdpa_dense.
    flex.flex_attention.py_impl(CudaTensor)(flex.sdpa_dense)
    flex.flex_attention.py_kernels[torch._C.DispatchKey.Autograd] = flex_attention


def kernel(operator: Any) -> Callable[..., torch.Tensor]:
    """A CUDA kernel for an operator that makes a tensor: the CPU makes it, and a pretended tensor is put around it."""

    def make(*args: Any, device: Device = None, pin_memory: bool | None = None, **kwargs: Any) -> torch.Tensor:
        return CudaTensor(operator(*args, device="cpu", **kwargs), gpu_of(device))

    return make


def default_device() -> torch.device | None:
    """The device of ``with torch.device(…)`` or torch.set_default_device, or None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def implied_device(name: str, source: torch.Tensor | None) -> Device:
    """Where the function ``name`` makes a tensor if its call names no device; None where torch finds the right one.

    ``source`` is the tensor that the function is given first, if it is given one.
    """
    if source is None:
        return default_device()
    if "tensor" in name or name == "asarray":
        return source.device  # torch.tensor, new_tensor and their like copy the source to where it is
    return None  # zeros_like and its like are operators on the source, and stay on its device by themselves


def on_any_device(factory: Any) -> Callable[..., torch.Tensor]:
    """Wrap a function or method of torch that makes a tensor, such as torch.zeros or Tensor.new_ones.

    The wrapper does what the kernels above cannot, because torch's C++ keeps it from them: it finds the GPU that is
    meant, moves the values of a tensor that is given as data, and marks the result as pinned.
    """
    name = factory.__name__

    @functools.wraps(factory)
    def make(*args: Any, device: Device = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        source = None
        if args and isinstance(args[0], torch.Tensor):
            source = args[0]
        if device is None:
            device = implied_device(name, source)
        if source is not None and name in ("as_tensor", "asarray"):  # these return a tensor itself if nothing changes
            return to(source, device, kwargs.get("dtype") or source.dtype)
        if is_gpu(device):
            device = torch.device("cuda", gpu_of(device))
        elif device is not None:
            # For torch's C++ a pretended tensor is on the CPU already, so it would not be copied there.
            args = unwrap(args)
        out = factory(*args, device=device, **kwargs)
        if pin_memory:
            return out.pin_memory()
        return out

    builtin = _find_builtin(factory)
    if builtin:
        # torch.jit.script finds the operator of a function in a table, which has the original function alone.
        _register_builtin(make, builtin)
    return make


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's one_hot. Its C++ would allocate the result on the CPU, where the values of a pretended tensor are."""
    if not isinstance(tensor, CudaTensor):
        return ORIGINAL_ONE_HOT(tensor, num_classes)
    if num_classes < 0:
        num_classes = int(tensor.max()) + 1
    return CudaTensor(ORIGINAL_ONE_HOT(tensor.inner, num_classes), tensor.index)


def flex_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """flex_attention under autograd. torch would trace it, which a pretended tensor does not allow."""
    if isinstance(query, CudaTensor):
        return flex.sdpa_dense(query, *args, **kwargs)
    return flex.flex_attention_autograd(query, *args, **kwargs)


def set_data(self: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor.data = values``, also where one of the two is on a pretended GPU and the other on the CPU."""
    if isinstance(self, DTensor):
        ORIGINAL_DATA.__set__(self, values)
    elif isinstance(self, CudaTensor) and (isinstance(values, CudaTensor) or self.index is None):
        set_inner(self, values)
    elif isinstance(self, CudaTensor) or isinstance(values, CudaTensor):
        set_values(self, values)
    else:
        ORIGINAL_DATA.__set__(self, values)


def may_share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a module that moves may keep its parameter and set ``data``.

    From meta to a GPU it makes a new parameter, which unties tied weights. torch's C++ takes a pretended tensor for one
    of the CPU, with wrong answers about meta.
    """
    if tensor.is_meta != other.is_meta:
        return False
    return bool(ORIGINAL_COMPATIBLE(tensor, other))


class Copy(torch.autograd.Function):
    """A copy of a tensor on GPU ``index``, or on the host for None. Its gradient goes back to where the tensor is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: int | None) -> torch.Tensor:
        ctx.source = index_of(local_part(tensor))
        return copied(tensor, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return copied(grad, ctx.source), None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def copied(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    """A copy of a tensor's values on GPU ``index``, or on the host for None.

    A DTensor's local part is copied. The mesh stays the one of GPUs, also on the host, as with torch.
    """
    if isinstance(tensor, DTensor):
        return DTensor(copied(tensor._local_tensor, index), tensor._spec, requires_grad=False)
    return on_gpu_or_host(cpu_tensor(tensor).detach().clone(), index)


def move(tensor: torch.Tensor, device: Device, non_blocking: bool = False) -> torch.Tensor:
    """Return the tensor if it is on the device already, or else a copy that is there, and count the copy."""
    target = None
    if is_gpu(device):
        target = gpu_of(device)
    local = local_part(tensor)
    source = index_of(local)
    if local.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # Module.to looks for these words
    if target == source:
        return tensor
    if target is None or source is None:
        count_copy(local, upload=source is None, non_blocking=non_blocking)
    else:
        COUNTS.count(COPY, "between GPUs", bytes_of(local))
    return Copy.apply(tensor, target)


def to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.to, in all its forms: (device, dtype, non_blocking, copy), (dtype, …) and (other, …)."""
    # torch's own parser takes the first form and the second, without ``copy``. The others are rewritten for it.
    for keyword in ("other", "device"):
        if keyword in kwargs:
            args = (kwargs.pop(keyword), *args)
    ends_with_two_flags = len(args) >= 2 and isinstance(args[-2], bool) and isinstance(args[-1], bool)
    if ends_with_two_flags:  # non_blocking and copy
        copy = args[-1]
        args = args[:-1]
    if args and isinstance(args[0], torch.Tensor):
        other, *flags = args
        args = (other.device, other.dtype, *flags)
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)

    # ``move`` copies between host and pretended GPU. The rest, on one device, is left to torch's own function.
    moved = self
    remaining: dict[str, Any] = {}
    if device is not None:
        if device.type in ("cpu", "cuda"):
            moved = move(self, device, non_blocking)
        else:
            remaining["device"] = device
    if dtype is not None:
        remaining["dtype"] = dtype
    if memory_format is not None:
        remaining["memory_format"] = memory_format
    if copy and moved is self:
        remaining["copy"] = True
    if not remaining:
        return moved
    return ORIGINAL_TO(moved, **remaining)


def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Tensor.type: the name of the tensor's type, such as torch.cuda.FloatTensor, or the tensor as one of a type."""
    if dtype is None:
        name = ORIGINAL_TYPE(cpu_tensor(self))
        if index_of(self) is not None:
            name = name.replace("torch.", "torch.cuda.")
        return name
    if isinstance(dtype, torch.dtype):
        return to(self, dtype)
    name = type_name(dtype)
    device: str | torch.device = "cpu"
    if ".cuda." in name:
        device = "cuda"
        if self.is_cuda:
            device = self.device
    return to(self, device, dtype_of(name), non_blocking=non_blocking)


def type_name(dtype: Any) -> str:
    """The name of a tensor type, such as torch.FloatTensor, which is given as a text or as a class."""
    if isinstance(dtype, str):
        return dtype
    return f"{dtype.__module__}.{dtype.__name__}"


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for torch.FloatTensor, and so on."""
    return getattr(torch, name.rpartition(".")[2]).dtype


class TensorType(type):
    """The class of torch.cuda.FloatTensor and its like, the old names for a dtype on GPUs."""

    dtype: torch.dtype
    is_cuda = True

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        return cuda(getattr(torch, cls.__name__)(*unwrap(args), **kwargs))


def set_default_tensor_type(type_: Any) -> None:
    """torch.set_default_tensor_type, which for a type of GPUs sets the default device too."""
    name = type_name(type_)
    device = None
    if ".cuda." in name:
        device = "cuda"
    torch.set_default_dtype(dtype_of(name))
    torch.set_default_device(device)


def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return to(self, other.device, other.dtype)


def cuda(self: torch.Tensor, device: Device = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    if device is None:
        device = "cuda"
    return to(self, device, non_blocking=non_blocking)


def pin_memory(self: torch.Tensor, device: Device = None) -> torch.Tensor:
    """A copy that is marked as pinned."""
    if isinstance(self, CudaTensor):
        raise COUNTS.refuse(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
    if is_pinned(self):
        return self
    return mark_pinned(self.detach().clone())


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load: a tensor that was saved on GPU k comes back there, unless map_location names another device.

    Of a map_location that is a dict, the first value counts. A function is taken for one that returns CPU tensors.
    """
    device = map_location
    if isinstance(map_location, dict):
        device = next(iter(map_location.values()))
    if callable(device):
        device = "cpu"
    # A file has the CPU tensors that are inside pretended ones. torch reads these, and then calls ``rebuild``, which
    # finds the device in MAP_LOCATIONS.
    location_of_inner_tensors = None
    if device is not None:
        location_of_inner_tensors = "cpu"
    MAP_LOCATIONS.append(device)
    try:
        out = ORIGINAL_LOAD(f, map_location=location_of_inner_tensors, **kwargs)
    finally:
        MAP_LOCATIONS.pop()
    if is_gpu(device) and not isinstance(map_location, dict):  # tensors that were saved on the CPU go there as well
        return tree_map_only(torch.Tensor, lambda tensor: move(tensor, device), out)
    return out


def leave_eager(model: Any = None, **kwargs: Any) -> Any:
    """torch.compile: it cannot trace a pretended tensor, so the model stays uncompiled."""
    if model is None:  # as in @torch.compile(mode=…)
        return leave_eager
    return model
