"""Functions of torch that make tensors on a device or move them, for pretended GPUs: factories, ``.to``, load, …"""

import functools

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_map_only

from helpers.rehearsal.counts import COUNTS, UPLOAD
from helpers.rehearsal.tensor import (
    GPU_GENERATORS,
    LOADING,
    CudaTensor,
    gpu_of,
    is_gpu,
    is_pinned,
    move,
)

FROM_HOST = {"tensor", "as_tensor", "asarray"}  # these copy values from the host; other factories compute on the GPU


def patch():
    for module in (torch, torch.fft):
        for factory in _device_constructors():
            name = factory.__name__
            if getattr(module, name, None) is factory:
                setattr(module, name, on_any_device(factory))
    for name in ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"):
        setattr(torch, name, like_on_any_device(getattr(torch, name)))
    for name in ("new_zeros", "new_ones", "new_empty", "new_full"):
        setattr(torch.Tensor, name, like_on_any_device(getattr(torch.Tensor, name)))
    for method in (to, cuda, cpu, pin_memory, new_tensor):
        setattr(torch.Tensor, method.__name__, method)
    torch.Tensor.is_pinned = lambda self, device=None: is_pinned(self)
    torch.nn.functional.one_hot = one_hot
    torch.Generator = Generator
    torch.load = load
    torch.compile = leave_eager


def default_device():
    """The device of ``with torch.device(…)`` or torch.set_default_device, or None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def check_generator(generator, on_gpu):
    """Raise torch's RuntimeError for a CPU generator with a tensor on a GPU, and for the reverse."""
    if generator is not None and (generator.device.type == "cuda") != on_gpu:
        wanted, found = ("cuda", "cpu") if on_gpu else ("cpu", "cuda")
        message = f"Expected a '{wanted}' device type for generator but found '{found}'"
        raise COUNTS.refuse(RuntimeError(message))


def on_any_device(factory):
    """A factory such as torch.zeros, wrapped so that it accepts pretended GPUs."""
    name = factory.__name__

    @functools.wraps(factory)
    def make(*args, device=None, **kwargs):
        source = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if device is None:
            copied = name in FROM_HOST and isinstance(source, CudaTensor)
            device = source.device if copied else default_device()
        on_gpu = is_gpu(device)
        if name in ("rand", "randn", "randint", "randperm"):
            check_generator(kwargs.get("generator"), on_gpu)
        if name in FROM_HOST and isinstance(source, torch.Tensor):
            args, kwargs = args[1:], {key: value for key, value in kwargs.items() if key not in ("data", "obj")}
            copy = source.detach().clone() if name == "tensor" else source
            out = move(copy, device).to(kwargs.get("dtype") or source.dtype)
            return out.requires_grad_() if kwargs.get("requires_grad") else out
        if not on_gpu:
            return factory(*args, device=device, **kwargs)
        index = gpu_of(device)
        needs_grad = kwargs.pop("requires_grad", False)
        pinned = kwargs.pop("pin_memory", False)
        if pinned:
            raise COUNTS.refuse(RuntimeError("Only dense CPU tensors can be pinned"))
        out = factory(*args, device="cpu", **kwargs)
        if name in FROM_HOST:
            COUNTS.add(UPLOAD, name, out.numel() * out.element_size())
        return CudaTensor(out, index).requires_grad_(needs_grad)

    def make_pinned(*args, pin_memory=False, **kwargs):
        out = make(*args, **kwargs)
        if pin_memory and not is_gpu(out.device):
            out.pinned_here = True
        return out

    return functools.wraps(factory)(make_pinned)


def like_on_any_device(function):
    """A function such as torch.zeros_like, wrapped so that ``device`` may be another device than the tensor's."""

    @functools.wraps(function)
    def make(tensor, *args, device=None, **kwargs):
        if device is None or device == tensor.device:
            return function(tensor, *args, **kwargs)
        inner = tensor.inner if isinstance(tensor, CudaTensor) else tensor
        needs_grad = kwargs.pop("requires_grad", False)
        out = function(inner, *args, **kwargs)
        if not is_gpu(device):
            return out.requires_grad_(needs_grad)
        return CudaTensor(out, gpu_of(device)).requires_grad_(needs_grad)

    return make


ORIGINAL_TO = torch.Tensor.to
ORIGINAL_CPU = torch.Tensor.cpu


def to(self, *args, **kwargs):
    """Tensor.to, in all its forms: (device, dtype, non_blocking, copy), (dtype, …) and (other, …)."""
    device, rest = kwargs.pop("device", None), list(args)
    other = kwargs.pop("other", None)
    if rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        device = other.device
        kwargs.setdefault("dtype", other.dtype)
    elif rest and not isinstance(rest[0], (torch.dtype, bool)):
        device = rest.pop(0)
    if rest and isinstance(rest[0], torch.dtype):
        kwargs["dtype"] = rest.pop(0)
    elif rest and rest[0] is None:
        rest.pop(0)
    kwargs |= dict(zip(("non_blocking", "copy"), rest, strict=False))
    here = self
    if device is not None:
        if isinstance(device, int) or torch.device(device).type in ("cpu", "cuda"):
            here = move_any(self, device, kwargs.get("non_blocking", False))
        else:
            kwargs["device"] = device
    moved = here is not self
    if moved:
        kwargs.pop("copy", None)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if not {"dtype", "copy", "memory_format", "device"} & set(kwargs):
        return here
    return ORIGINAL_TO(here, **kwargs)


def move_any(tensor, device, non_blocking):
    """``move``, also for a DTensor, whose local part is moved."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return move(tensor, device, non_blocking)
    if is_gpu(device) == is_gpu(local.device):
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        move(tensor.to_local(), device, non_blocking),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
    return to(self, torch.device("cuda") if device is None else device, non_blocking=non_blocking)


def cpu(self, memory_format=torch.preserve_format):
    return to(self, torch.device("cpu"))


def pin_memory(self, device=None):
    """A copy that is marked as pinned; nothing is really pinned here."""
    if isinstance(self, CudaTensor):
        kind = self.type()
        raise COUNTS.refuse(RuntimeError(f"cannot pin '{kind}' only dense CPU tensors can be pinned"))
    if is_pinned(self):
        return self
    copy = self.detach().clone()
    copy.pinned_here = True
    return copy


ORIGINAL_NEW_TENSOR = torch.Tensor.new_tensor


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
    if not isinstance(self, CudaTensor) and not is_gpu(device):
        return ORIGINAL_NEW_TENSOR(self, data, dtype=dtype, device=device, requires_grad=requires_grad)
    place = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=place, requires_grad=requires_grad)


ORIGINAL_ONE_HOT = torch.nn.functional.one_hot


def one_hot(tensor, num_classes=-1):
    """torch's one_hot. Its C++ would allocate the result on the CPU, where the values of a pretended tensor are."""
    if not isinstance(tensor, CudaTensor):
        return ORIGINAL_ONE_HOT(tensor, num_classes)
    if num_classes < 0:
        num_classes = int(tensor.max()) + 1
    return CudaTensor(ORIGINAL_ONE_HOT(tensor.inner, num_classes), tensor.index)


ORIGINAL_GENERATOR = torch.Generator


class AnyGenerator(type(torch.Generator)):
    """Makes torch's own generators, such as the default one, instances of the class below as well."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, ORIGINAL_GENERATOR)


class Generator(torch.Generator, metaclass=AnyGenerator):
    """torch.Generator, also on pretended GPUs, where it draws the CPU's numbers."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, device="cpu")
        generator.place = torch.device("cuda", gpu_of(device)) if is_gpu(device) else torch.device("cpu")
        if is_gpu(device):
            GPU_GENERATORS[generator._cdata] = generator  # kept alive, so that its address stays its own
        return generator

    def __init__(self, device="cpu"):
        pass

    device = property(lambda self: self.place)


ORIGINAL_LOAD = torch.load


def load(f, map_location=None, **kwargs):
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


def leave_eager(model=None, **kwargs):
    """torch.compile: it cannot trace a pretended tensor, so the model stays uncompiled."""
    return leave_eager if model is None else model
