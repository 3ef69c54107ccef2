"""How tensors come to pretended GPUs and back: ``.to`` and its kind, functions such as torch.zeros, and torch.load."""

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
from helpers.rehearsal.devices import bytes_of, gpu_of, is_gpu, is_pinned, mark_pinned, replace
from helpers.rehearsal.tensor import LOADING, CudaTensor, bare, become, count_copy, strip

LIBRARY = torch.library.Library("aten", "IMPL", "CUDA")
aten = torch.ops.aten
MAKERS = (aten.empty.memory_format, aten.empty_strided.default, aten.tril_indices.default, aten.triu_indices.default)
LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")

flex: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # its package has a function of this name
ORIGINAL_DATA: Any = torch.Tensor.data
ORIGINAL_LOAD = torch.load
ORIGINAL_ONE_HOT = torch.nn.functional.one_hot
ORIGINAL_TO: Any = torch.Tensor.to


def patch() -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor copies its values by an operator that is seen
    with warnings.catch_warnings():
        # PyTorch's build for CUDA has kernels already, and warns that these take their place.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator in MAKERS:
            LIBRARY.impl(operator, kernel(operator))
    for factory in _device_constructors():
        module = torch.fft if factory.__name__.startswith("fft_") else torch
        name = factory.__name__.removeprefix("fft_")
        if getattr(module, name, None) is factory:
            replace(module, **{name: on_any_device(factory)})
    for owner, names in ((torch, LIKE), (torch.Tensor, NEW)):
        replace(owner, **{name: on_any_device(getattr(owner, name)) for name in names})
    replace(torch.Tensor, to=to, cuda=cuda, pin_memory=pin_memory, data=property(ORIGINAL_DATA.__get__, set_data))
    replace(torch.Tensor, cpu=lambda self, memory_format=None: to(self, "cpu"))
    replace(torch.Tensor, is_pinned=lambda self, device=None: is_pinned(self))
    replace(torch.nn.functional, one_hot=one_hot)
    replace(torch, load=load, compile=leave_eager)
    flex.flex_attention.py_impl(CudaTensor)(flex.sdpa_dense)
    flex.flex_attention.py_kernels[torch._C.DispatchKey.Autograd] = flex_attention


def kernel(operator: Any) -> Callable[..., torch.Tensor]:
    """A GPU's kernel of an operator that makes a tensor. torch's C++ makes its other tensors by these operators."""

    def make(*args: Any, device: Device = None, pin_memory: bool | None = None, **kwargs: Any) -> torch.Tensor:
        return CudaTensor(operator(*args, device="cpu", **kwargs), gpu_of(device))

    return make


def default_device() -> torch.device | None:
    """The device of ``with torch.device(…)`` or torch.set_default_device, or None."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def on_any_device(factory: Any) -> Callable[..., torch.Tensor]:
    """A function or a method that makes a tensor, wrapped for what the kernels do not see: which GPU, and pinning."""

    @functools.wraps(factory)
    def make(*args: Any, device: Device = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if device is None:
            device = default_device() if source is None else source.device if "tensor" in factory.__name__ else None
        if source is not None and factory.__name__ in ("as_tensor", "asarray"):
            return to(source, source.device if device is None else device, kwargs.get("dtype") or source.dtype)
        if is_gpu(device):
            device = torch.device("cuda", gpu_of(device))
        elif device is not None:
            args = strip(args)  # torch's C++ takes a pretended tensor for the CPU's, and would not move its values
        out = factory(*args, device=device, **kwargs)
        return out.pin_memory() if pin_memory else out

    if builtin := _find_builtin(factory):
        _register_builtin(make, builtin)  # torch.jit.script knows its operators by the function
    return make


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's one_hot. Its C++ would allocate the result on the CPU, where the values of a pretended tensor are."""
    if not isinstance(tensor, CudaTensor):
        return ORIGINAL_ONE_HOT(tensor, num_classes)
    classes = num_classes if num_classes >= 0 else int(tensor.max()) + 1
    return CudaTensor(ORIGINAL_ONE_HOT(tensor.inner, classes), tensor.index)


def flex_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """flex_attention under autograd. torch would trace it, which a pretended tensor does not allow."""
    attention = flex.sdpa_dense if isinstance(query, CudaTensor) else flex.flex_attention_autograd
    return attention(query, *args, **kwargs)


def set_data(self: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor.data = values``, also for values on another kind of device."""
    pretended = isinstance(self, CudaTensor)
    if pretended != isinstance(values, CudaTensor) and not isinstance(self, DTensor):
        become(self, values)
        return
    ORIGINAL_DATA.__set__(self, values)
    if isinstance(self, CudaTensor) and isinstance(values, CudaTensor):
        self.inner, self.index = values.inner, values.index


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


def move(tensor: torch.Tensor, device: Device, non_blocking: bool = False) -> torch.Tensor:
    """The tensor on a device; of a DTensor, the local part. A copy is counted; what is there already is returned."""
    if isinstance(tensor, DTensor):
        if is_gpu(device) == is_gpu(tensor.device):
            return tensor
        sizes: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(
            move(tensor.to_local(), device, non_blocking), tensor.device_mesh, tensor.placements, **sizes
        )
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


def cuda(self: torch.Tensor, device: Device = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return to(self, "cuda" if device is None else device, non_blocking=non_blocking)


def pin_memory(self: torch.Tensor, device: Device = None) -> torch.Tensor:
    """A copy that is marked as pinned."""
    if isinstance(self, CudaTensor):
        raise COUNTS.refuse(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
    return self if is_pinned(self) else mark_pinned(self.detach().clone())


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """torch.load: a tensor that was saved on GPU k comes back there, unless map_location names another place.

    Of a map_location that is a dict, the first value counts. A function is taken for one that returns CPU tensors.
    """
    target = next(iter(map_location.values())) if isinstance(map_location, dict) else map_location
    target = "cpu" if callable(target) else target
    LOADING.append(target)
    try:
        out = ORIGINAL_LOAD(f, map_location=None if target is None else "cpu", **kwargs)
    finally:
        LOADING.pop()
    if is_gpu(target) and not isinstance(map_location, dict):
        out = tree_map_only(torch.Tensor, lambda tensor: move(tensor, target), out)
    return out


def leave_eager(model: Any = None, **kwargs: Any) -> Any:
    """torch.compile: it cannot trace a pretended tensor, so the model stays uncompiled."""
    return leave_eager if model is None else model
