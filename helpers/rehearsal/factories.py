"""Functions of torch that make tensors, for pretended GPUs: factories such as torch.zeros, generators, torch.load, …"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.jit._builtins import _find_builtin, _register_builtin
from torch.overrides import _get_current_function_mode_stack
from torch.types import Device
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_map_only

from helpers.rehearsal.counts import COUNTS, UPLOAD
from helpers.rehearsal.devices import (
    GPU_GENERATORS,
    bytes_of,
    check_generator,
    gpu_of,
    is_gpu,
    mark_pinned,
    replace,
)
from helpers.rehearsal.moves import move, with_local
from helpers.rehearsal.tensor import LOADING, CudaTensor, bare

FROM_HOST = {"tensor", "as_tensor", "asarray"}  # these copy values from the host; other factories compute on the GPU
LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
NEW = ("new_zeros", "new_ones", "new_empty", "new_full")

ORIGINAL_ONE_HOT = torch.nn.functional.one_hot
ORIGINAL_GENERATOR: Any = torch.Generator
ORIGINAL_LOAD = torch.load


def patch() -> None:
    for factory in _device_constructors():
        module = torch.fft if factory.__name__.startswith("fft_") else torch
        name = factory.__name__.removeprefix("fft_")
        if getattr(module, name, None) is factory:
            replace(module, **{name: on_any_device(factory)})
    for owner, names in ((torch, LIKE), (torch.Tensor, NEW)):
        replace(owner, **{name: on_any_device(getattr(owner, name), like=True) for name in names})
    replace(torch.Tensor, new_tensor=new_tensor)
    replace(torch.nn.functional, one_hot=one_hot)
    replace(torch, Generator=Generator, load=load, compile=leave_eager)


def default_device() -> torch.device | None:
    """The device of ``with torch.device(…)`` or torch.set_default_device, or None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def on_any_device(factory: Any, like: bool = False) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor, wrapped so that it accepts pretended GPUs.

    ``like`` is for torch.zeros_like and its kind: their first argument is a tensor, and its device the default.
    """
    name = factory.__name__

    @functools.wraps(factory)
    def make(
        *args: Any, device: Device = None, requires_grad: bool = False, pin_memory: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        for keyword in ("input", "data", "obj"):
            if keyword in kwargs:
                args = (kwargs.pop(keyword), *args)
        source: Any = args[0] if args else None
        copied = name in FROM_HOST and isinstance(source, torch.Tensor)
        if device is None:
            device = source.device if like or copied and isinstance(source, CudaTensor) else default_device()
        on_gpu = is_gpu(device)
        if name.startswith("rand"):
            check_generator(kwargs.get("generator"), on_gpu)
        if pin_memory and on_gpu:
            raise COUNTS.refuse(RuntimeError("Only dense CPU tensors can be pinned"))
        if copied:
            copy = source.detach().clone() if name == "tensor" else source
            out = move(copy, device).to(kwargs.get("dtype") or source.dtype)
        elif like and device == source.device:
            out = factory(*args, **kwargs)
        elif like and isinstance(source, DTensor):
            out = with_local(source, make(source.to_local(), *args[1:], device=device, **kwargs))
        else:
            args = (bare(source), *args[1:]) if like else args
            out = factory(*args, device="cpu" if on_gpu else device, **kwargs)
            if on_gpu:
                out = CudaTensor(out, gpu_of(device))
            if on_gpu and name in FROM_HOST:
                COUNTS.add(UPLOAD, name, bytes_of(out))
        if pin_memory:
            mark_pinned(out)
        return out.requires_grad_() if requires_grad else out

    if builtin := _find_builtin(factory):
        _register_builtin(make, builtin)  # torch.jit.script knows its operators by the function
    return make


def new_tensor(
    self: torch.Tensor, data: Any, *, dtype: Any = None, device: Device = None, requires_grad: bool = False
) -> torch.Tensor:
    device = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's one_hot. Its C++ would allocate the result on the CPU, where the values of a pretended tensor are."""
    if not isinstance(tensor, CudaTensor):
        return ORIGINAL_ONE_HOT(tensor, num_classes)
    if num_classes < 0:
        num_classes = int(tensor.max()) + 1
    return CudaTensor(ORIGINAL_ONE_HOT(tensor.inner, num_classes), tensor.index)


class AnyGenerator(type(ORIGINAL_GENERATOR)):  # type: ignore[misc]
    """Makes torch's own generators, such as the default one, instances of the class below as well."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ORIGINAL_GENERATOR)


class Generator(ORIGINAL_GENERATOR, metaclass=AnyGenerator):
    """torch.Generator, also on pretended GPUs, where it draws the CPU's numbers."""

    def __new__(cls, device: Device = "cpu") -> "Generator":
        generator = super().__new__(cls, device="cpu")
        generator.place = torch.device("cuda", gpu_of(device)) if is_gpu(device) else torch.device("cpu")
        if is_gpu(device):
            GPU_GENERATORS[generator._cdata] = generator  # kept alive, so that its address stays its own
        return generator

    def __init__(self, device: Device = "cpu") -> None:
        pass

    device: Any = property(lambda self: self.place)


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
