"""How tensors get to simulated GPUs and back: ``.to`` and its like, functions such as torch.zeros, and torch.load.

A tensor on a simulated GPU is a ``CudaTensor``: a wrapper that says it is on cuda:k, around a CPU tensor with the
values. So a copy to a GPU is a copy on the CPU, with such a wrapper around it.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
from helpers.rehearsal.devices import bytes_of, gpu_error, gpu_of, is_gpu, is_pinned, mark_pinned, replace
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
TENSOR_TYPES = [name for name in cuda_names.SIMULATED if name.endswith("Tensor")]
NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")

flex: Any = sys.modules["torch._higher_order_ops.flex_attention"]  # its package has a function of this name
ORIGINAL_COMPATIBLE: Any = torch._has_compatible_shallow_copy_type
ORIGINAL_ATTENTION = torch.nn.functional.scaled_dot_product_attention
ORIGINAL_DATA: Any = torch.Tensor.data
ORIGINAL_LOAD = torch.load
ORIGINAL_ONE_HOT = torch.nn.functional.one_hot
ORIGINAL_TO: Any = torch.Tensor.to
ORIGINAL_TYPE: Any = torch.Tensor.type


def patch() -> None:
    """Replace every function of torch that makes a tensor or moves it to another device, and torch.compile."""
    patch_factories()
    patch_tensor_types()
    replace(torch.Tensor, to=to, cpu=cpu, cuda=cuda, type_as=type_as, type=type_)
    replace(torch.Tensor, pin_memory=pin_memory, is_pinned=lambda self, device=None: is_pinned(self))
    replace(torch.Tensor, data=property(ORIGINAL_DATA.__get__, set_data))
    replace(torch.nn.functional, one_hot=one_hot, scaled_dot_product_attention=scaled_dot_product_attention)
    replace(torch, load=load, compile=leave_eager, _has_compatible_shallow_copy_type=may_share_data)
    # torch would trace or compile flex_attention. Simulated tensors get its uncompiled version, sdpa_dense.
    flex.flex_attention.py_impl(CudaTensor)(flex.sdpa_dense)
    flex.flex_attention.py_kernels[torch._C.DispatchKey.Autograd] = flex_attention


def patch_factories() -> None:
    """Let functions that make tensors, such as torch.zeros and Tensor.new_ones, make them on simulated GPUs, too.

    If torch's C++ makes a tensor, it calls one of the kernels that are registered here as kernels for CUDA. If a script
    calls a Python function, it calls the wrapper that ``on_any_device`` makes.
    """
    torch._C._set_only_lift_cpu_tensors(True)  # Then torch.tensor copies its values to a GPU by an operator.
    with warnings.catch_warnings():
        # PyTorch's build for CUDA has kernels already, and warns that these take their place.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator in FACTORIES:
            LIBRARY.impl(operator, kernel(operator))
    for factory in _device_constructors():  # torch's list of its functions that take a device
        owner: Any = torch
        name = factory.__name__
        if name.startswith("fft_"):  # torch.fft.fftfreq says of itself that it is called fft_fftfreq
            owner = torch.fft
            name = name.removeprefix("fft_")
        is_in_owner = getattr(owner, name, None) is factory
        if is_in_owner:  # All are, except torch.nested.nested_tensor, which stays torch's own.
            replace(owner, **{name: on_any_device(factory)})
    for name in LIKE:
        replace(torch, **{name: on_any_device(getattr(torch, name))})
    for name in NEW:
        replace(torch.Tensor, **{name: on_any_device(getattr(torch.Tensor, name))})


def patch_tensor_types() -> None:
    """Replace torch.cuda.FloatTensor and its like by classes that make and recognize tensors on simulated GPUs."""
    for name in TENSOR_TYPES:
        body = {"dtype": dtype_of(name), "__module__": "torch.cuda"}
        replace(torch.cuda, **{name: TensorType(name, (), body)})
    replace(torch, set_default_tensor_type=set_default_tensor_type)


def kernel(operator: Any) -> Callable[..., torch.Tensor]:
    """A CUDA kernel for an operator that makes a tensor. It makes the tensor on the CPU, in a simulated tensor."""

    def make(*args: Any, device: Device = None, pin_memory: bool | None = None, **kwargs: Any) -> torch.Tensor:
        # ``pin_memory`` is left out, because only memory of the host can be pinned.
        inner = operator(*args, device="cpu", **kwargs)
        return CudaTensor(inner, gpu_of(device))

    return make


def default_device() -> torch.device | None:
    """The device that ``with torch.device(…)`` or torch.set_default_device has chosen, or None."""
    # The innermost ``with`` counts, which torch has put on this stack last.
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def implied_device(name: str, source: torch.Tensor | None) -> Device:
    """The device on which a function of torch makes a tensor if the call names none. None: torch finds it by itself.

    ``name`` is the function's, such as "zeros". ``source`` is the tensor that the call has as its first argument, or
    None if it has none, as in torch.zeros(3).
    """
    if source is None:
        return default_device()
    if "tensor" in name or name == "asarray":
        return source.device  # torch.tensor, new_tensor and their like copy the source to where it is
    return None  # zeros_like and its like are operators on the source, and stay on its device by themselves


def on_any_device(factory: Any) -> Callable[..., torch.Tensor]:
    """Wrap a function or method of torch that makes a tensor, such as torch.zeros or Tensor.new_ones.

    The wrapper finds the GPU that is meant, lets torch make the tensor there, and marks its memory as pinned if that is
    asked for. By itself torch would know of no simulated GPU where the call does not name one.
    """
    name = factory.__name__

    @functools.wraps(factory)
    def make(*args: Any, device: Device = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        """What takes the function's place. The arguments are those of the function."""
        source = None  # a tensor that is given as data, or whose shape and type the new one gets
        if args and isinstance(args[0], torch.Tensor):
            source = args[0]
        if device is None:
            device = implied_device(name, source)
        returns_source_if_unchanged = name in ("as_tensor", "asarray")
        if source is not None and returns_source_if_unchanged:
            dtype = kwargs.get("dtype") or source.dtype
            return to(source, device, dtype)
        if is_gpu(device):
            device = torch.device("cuda", gpu_of(device))
        elif device is not None:
            # For torch's C++ a simulated tensor is on the CPU already, so it would not be copied there.
            args = unwrap(args)
        tensor = factory(*args, device=device, **kwargs)
        if pin_memory:
            return tensor.pin_memory()
        return tensor

    # torch.jit.script finds the operator of a function in a table, which has the original function alone.
    operator_name = _find_builtin(factory)
    if operator_name:
        _register_builtin(make, operator_name)
    return make


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's one_hot. Its C++ would allocate the result on the CPU, where the values of a simulated tensor are."""
    if not isinstance(tensor, CudaTensor):
        return ORIGINAL_ONE_HOT(tensor, num_classes)
    if num_classes < 0:  # Then the largest class says how many there are. The host has to wait for it, as with torch.
        num_classes = int(tensor.max()) + 1
    encoded = ORIGINAL_ONE_HOT(tensor.inner, num_classes)
    return CudaTensor(encoded, tensor.index)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """torch's function of this name, for causal attention with dropout on a simulated GPU, too.

    The CPU has no fused attention with dropout. torch's C++ then makes the causal mask itself, and makes it on the
    CPU, where it does not fit the simulated tensors. So the mask is made here, on the device of the query.
    """
    makes_mask = is_causal and dropout_p > 0 and attn_mask is None
    if makes_mask and isinstance(query, CudaTensor):
        positions = (query.size(-2), key.size(-2))  # of the queries and of the keys
        attn_mask = torch.ones(positions, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    return ORIGINAL_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def flex_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """What torch calls for flex_attention under autograd. It would trace the call, which a simulated tensor forbids.

    sdpa_dense computes the same without a trace, and autograd differentiates each of its operators.
    """
    if isinstance(query, CudaTensor):
        return flex.sdpa_dense(query, *args, **kwargs)
    return flex.flex_attention_autograd(query, *args, **kwargs)


def set_data(self: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor.data = values``, also where one of the two is on a simulated GPU and the other on the CPU.

    Module.to moves a parameter like this. A tensor on a simulated GPU is of another class, a wrapper: ``set_values``
    changes the class of ``self`` where this is needed.
    """
    values_are_wrapper = isinstance(values, CudaTensor)
    if isinstance(self, DTensor):
        ORIGINAL_DATA.__set__(self, values)
    elif isinstance(self, CudaTensor):
        # A wrapper without an index is a parameter that moved to the host before. It can stay a wrapper.
        if values_are_wrapper or self.index is None:
            set_inner(self, values)
        else:
            set_values(self, values)
    elif values_are_wrapper:
        set_values(self, values)
    else:
        ORIGINAL_DATA.__set__(self, values)


def may_share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether Module.to may keep a parameter as it moves, and only set its ``data``. torch asks this of C++.

    From the meta device to a GPU torch makes a new parameter, which unties tied weights. But its C++ takes a simulated
    tensor for one of the CPU, and then answers that the two can share data. So this is decided here.
    """
    if tensor.is_meta != other.is_meta:
        return False
    return bool(ORIGINAL_COMPATIBLE(tensor, other))


class Copy(torch.autograd.Function):
    """Copies a tensor to GPU ``index``, or to the host for None. The gradient is copied back to the tensor's device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, index: int | None) -> torch.Tensor:
        ctx.source = index_of(local_part(tensor))
        return copied(tensor, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return copied(grad, ctx.source), None  # ``index`` is a number, and has no gradient


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor


def copied(tensor: torch.Tensor, index: int | None) -> torch.Tensor:
    """A copy of a tensor's values on GPU ``index``, or on the host for None, without a gradient's graph.

    A DTensor's local part is copied. The mesh stays the one of GPUs, also on the host, as with torch.
    """
    if isinstance(tensor, DTensor):
        local = copied(tensor._local_tensor, index)
        return DTensor(local, tensor._spec, requires_grad=False)
    values = cpu_tensor(tensor).detach().clone()
    return on_gpu_or_host(values, index)


def move(tensor: torch.Tensor, device: Device, non_blocking: bool = False) -> torch.Tensor:
    """Return the tensor if it is on the device already, or else a copy that is there, and count the copy.

    ``device`` is a GPU or the CPU. For a copy between these two, the count says whether the host waits until it is
    done, which depends on ``non_blocking``.
    """
    # The numbers of the GPUs from and to which it moves; None stands for the host.
    own_part = local_part(tensor)
    source = index_of(own_part)
    target = None
    if is_gpu(device):
        target = gpu_of(device)
    if own_part.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")  # Module.to looks for these words
    if target == source:
        return tensor
    if target is None or source is None:
        count_copy(own_part, upload=source is None, non_blocking=non_blocking)
    else:
        COUNTS.count(COPY, "between GPUs", bytes_of(own_part))
    return Copy.apply(tensor, target)


def to(self: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.to on simulated GPUs. Returns the tensor itself if nothing changes, as torch does, or else a new one.

    It may be called in three forms: to(device, dtype, non_blocking, copy), to(dtype, non_blocking, copy) and
    to(other_tensor, non_blocking, copy). Each argument may also be left out, or be given by its name.
    """
    wanted = parse_to(args, copy, kwargs)
    # First the move between the host and a simulated GPU. What changes on one device is left to torch's own function.
    moved = self
    other_changes: dict[str, Any] = {}
    if wanted.device is not None:
        if wanted.device.type in ("cpu", "cuda"):
            moved = move(self, wanted.device, wanted.non_blocking)
        else:
            other_changes["device"] = wanted.device  # such as meta, which is not simulated
    if wanted.dtype is not None:
        other_changes["dtype"] = wanted.dtype
    if wanted.memory_format is not None:
        other_changes["memory_format"] = wanted.memory_format
    was_copied = moved is not self
    if wanted.copy and not was_copied:
        other_changes["copy"] = True
    if not other_changes:
        return moved
    return ORIGINAL_TO(moved, **other_changes)


@dataclass(frozen=True)
class Wanted:
    """What a call of Tensor.to asks for. None stays as it is with the tensor."""

    device: torch.device | None
    dtype: torch.dtype | None
    non_blocking: bool
    copy: bool  # make a new tensor also if nothing changes
    memory_format: torch.memory_format | None


def parse_to(args: tuple[Any, ...], copy: bool, kwargs: dict[str, Any]) -> Wanted:
    """What a call of Tensor.to asks for. ``args``, ``copy`` and ``kwargs`` are the arguments of the call.

    torch's own parser takes to(device, dtype, non_blocking) and to(dtype, non_blocking), with memory_format as a
    keyword, but neither ``copy`` nor the form to(other_tensor). So these are rewritten for it.
    """
    for keyword in ("other", "device"):
        if keyword in kwargs:
            args = (kwargs.pop(keyword), *args)
    # If there are two flags at the end, the first is non_blocking, and the second is copy.
    ends_with_two_flags = len(args) >= 2 and isinstance(args[-2], bool) and isinstance(args[-1], bool)
    if ends_with_two_flags:
        *args_without_copy, copy = args
        args = tuple(args_without_copy)
    if args and isinstance(args[0], torch.Tensor):
        other_tensor, *flags = args
        args = (other_tensor.device, other_tensor.dtype, *flags)
    parse = torch._C._nn._parse_to  # torch has no public function for it; Module.to calls this one
    device, dtype, non_blocking, memory_format = parse(*args, **kwargs)
    return Wanted(device, dtype, non_blocking, copy, memory_format)


def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Tensor.type, an old method of torch that does two things.

    tensor.type() returns the name of the tensor's type: "torch.FloatTensor", on a GPU "torch.cuda.FloatTensor".
    tensor.type(dtype) converts the tensor to a type and returns it. ``dtype`` is such a name, the class of that name,
    or a torch.dtype.
    """
    if dtype is None:
        return name_of_type(self)
    if isinstance(dtype, torch.dtype):
        return to(self, dtype)  # It says nothing of a device, so the tensor stays where it is.

    name = type_name(dtype)
    device: str | torch.device
    is_type_on_gpu = ".cuda." in name
    if not is_type_on_gpu:
        device = "cpu"
    elif self.is_cuda:
        device = self.device  # The name has no GPU's number, so the tensor stays on its own GPU.
    else:
        device = "cuda"  # the current GPU
    return to(self, device, dtype_of(name), non_blocking=non_blocking)


def name_of_type(tensor: torch.Tensor) -> str:
    """The name of a tensor's type, such as "torch.FloatTensor", or "torch.cuda.FloatTensor" on a simulated GPU."""
    name = ORIGINAL_TYPE(cpu_tensor(tensor))
    if index_of(tensor) is None:
        return name
    return name.replace("torch.", "torch.cuda.")


def type_name(dtype: Any) -> str:
    """The name of a tensor type, such as "torch.FloatTensor", which is given as that text or as the class."""
    if isinstance(dtype, str):
        return dtype
    return f"{dtype.__module__}.{dtype.__name__}"


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a tensor type by the type's name: torch.float32 for torch.FloatTensor or torch.cuda.FloatTensor."""
    class_name = name.rpartition(".")[2]
    return getattr(torch, class_name).dtype


class TensorType(type):
    """The class of torch.cuda.FloatTensor and its like: old names for a dtype on GPUs, which are classes themselves.

    torch.cuda.FloatTensor([1.0]) makes a tensor on a simulated GPU, and isinstance asks where a tensor is.
    """

    dtype: torch.dtype
    is_cuda = True

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        type_on_cpu = getattr(torch, cls.__name__)
        tensor = type_on_cpu(*unwrap(args), **kwargs)
        return cuda(tensor)


def set_default_tensor_type(type_: Any) -> None:
    """In the place of torch.set_default_tensor_type. A type of GPUs, torch.cuda.FloatTensor, also sets the device."""
    name = type_name(type_)
    torch.set_default_dtype(dtype_of(name))
    if ".cuda." in name:
        torch.set_default_device("cuda")
    else:
        torch.set_default_device(None)


def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Tensor.type_as: the tensor on the device of another, and with its dtype."""
    return to(self, other.device, other.dtype)


def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    """Tensor.cpu, without its memory_format: the copy keeps the tensor's own."""
    return to(self, "cpu")


def cuda(self: torch.Tensor, device: Device = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    """Tensor.cuda: the tensor on a simulated GPU, the current one if none is named."""
    if device is None:
        device = "cuda"
    return to(self, device, non_blocking=non_blocking)


def pin_memory(self: torch.Tensor, device: Device = None) -> torch.Tensor:
    """Tensor.pin_memory: a copy that is marked as pinned, or the tensor itself if it is marked already."""
    if isinstance(self, CudaTensor):
        raise gpu_error(f"cannot pin a tensor on {self.device}: only dense CPU tensors can be pinned")
    if is_pinned(self):
        return self
    return mark_pinned(self.detach().clone())


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """In the place of torch.load: a tensor that was saved on GPU k comes back there, or to ``map_location``.

    ``f`` is the file. torch.save writes for a simulated tensor the CPU tensor that holds its values, the number of its
    GPU, and a call of ``tensor.rebuild``. Here torch reads the CPU tensor and calls ``rebuild``, which puts it on a
    simulated GPU again. The call has only arguments from the file. So ``rebuild`` finds the device that the script asks
    for in MAP_LOCATIONS, whose last item is that of the torch.load which runs now.
    """
    device = device_to_load_to(map_location)
    # torch's own ``map_location`` decides about the CPU tensors alone, which stay on the CPU in any case.
    location_of_cpu_tensors = None
    if device is not None:
        location_of_cpu_tensors = "cpu"
    MAP_LOCATIONS.append(device)
    try:
        loaded = ORIGINAL_LOAD(f, map_location=location_of_cpu_tensors, **kwargs)
    finally:
        MAP_LOCATIONS.pop()
    # A tensor that was saved on the CPU needs no ``rebuild``, so it is still there. A single device is meant for all
    # tensors of the file, but a dict only says where those of one GPU go.
    is_for_all_tensors = not isinstance(map_location, dict)
    if is_gpu(device) and is_for_all_tensors:
        return tree_map_only(torch.Tensor, lambda tensor: move(tensor, device), loaded)
    return loaded


def device_to_load_to(map_location: Any) -> Device:
    """The device to which a torch.load with this ``map_location`` brings all simulated tensors of a file.

    - A device is meant for all tensors. None leaves each on the device that it had.
    - Of a dict such as {"cuda:0": "cuda:1"} only the first value counts here.
    - A function, such as ``lambda storage, location: storage``, brings all tensors to the CPU here.
    """
    device = map_location
    if isinstance(map_location, dict):
        device, *_ = map_location.values()
    if callable(device):
        return "cpu"
    return device


def leave_eager(model: Any = None, **kwargs: Any) -> Any:
    """In the place of torch.compile, which cannot trace a simulated tensor: return the model or function uncompiled."""
    if model is None:  # @torch.compile(mode=…): what this returns is then called with the decorated function
        return leave_eager
    return model
