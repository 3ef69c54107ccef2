"""Where things are: this node's pretended GPUs, what a device argument means, and which memory of the host is pinned.

Also ``replace``, with which the other modules put their functions in torch's place.
"""

from typing import Any

import torch
from torch.types import Device

from helpers.rehearsal.counts import COUNTS


class Node:
    """How many GPUs this node pretends to have, and which one is the current GPU."""

    gpus = 1
    current = 0
    initialized = False  # torch.cuda is, at the first use of a GPU; until then a mesh sets the current one


ORIGINAL_DEVICE: Any = torch.device
ORIGINAL_PARSE_TO: Any = torch._C._nn._parse_to
GPU_GENERATORS: dict[int, torch.Generator] = {}  # by address: torch's C++ hands out a new Python object each time


class AnyDevice(type):
    """Makes torch's own devices instances of the class below, and the class equal to torch's own, say in a dict."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        if args and type(args[0]) is int:
            args = ("cuda", *args)
        elif type(kwargs.get("device")) is int:
            kwargs = {"type": "cuda", "index": kwargs["device"]}
        return ORIGINAL_DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, ORIGINAL_DEVICE)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is ORIGINAL_DEVICE

    def __hash__(cls) -> int:
        return hash(ORIGINAL_DEVICE)


class device(metaclass=AnyDevice):
    """torch.device, which also takes a number: torch asks C++ for the accelerator, and a CPU build has none."""

    __module__ = "torch"  # where a pickle finds it


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """The arguments of Module.to and Tensor.to as (device, dtype, non_blocking, memory_format); a number is a GPU."""
    if args and type(args[0]) is int:
        args = (torch.device(args[0]), *args[1:])
    elif type(kwargs.get("device")) is int:
        kwargs["device"] = torch.device(kwargs["device"])
    return ORIGINAL_PARSE_TO(*args, **kwargs)


def patch() -> None:
    replace(torch, device=device)
    replace(torch._C._nn, _parse_to=parse_to)


def replace(owner: Any, **attributes: Any) -> None:
    """Give a module or a class of torch these attributes, in place of its own."""
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)


def is_gpu(device: Device) -> bool:
    """Whether a device argument means a GPU."""
    return isinstance(device, int) or device is not None and torch.device(device).type == "cuda"


def gpu_of(device: Device) -> int:
    """The number of the GPU that a device argument means. Raises CUDA's RuntimeError for one that the node lacks."""
    Node.initialized = True
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if index is None:
        return Node.current
    if not 0 <= index < Node.gpus:
        message = f"CUDA error: invalid device ordinal (cuda:{index}; this node has {Node.gpus} GPUs)"
        raise COUNTS.refuse(RuntimeError(message))
    return index


def check_generator(generator: Any, on_gpu: bool) -> None:
    """Raise torch's RuntimeError for a CPU generator with a tensor on a GPU, and for the reverse."""
    if generator is not None and (generator._cdata in GPU_GENERATORS) != on_gpu:
        ours, other = ("cuda", "cpu") if on_gpu else ("cpu", "cuda")
        raise COUNTS.refuse(RuntimeError(f"Expected a '{ours}' device type for generator but found '{other}'"))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the rehearsal has marked a CPU tensor's memory as pinned, through this tensor or another."""
    return tensor.layout == torch.strided and getattr(tensor.untyped_storage(), "pinned_here", False)


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor itself, which from now on counts as pinned; nothing is really pinned here."""
    tensor.untyped_storage().pinned_here = True  # type: ignore[attr-defined]
    return tensor


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()
