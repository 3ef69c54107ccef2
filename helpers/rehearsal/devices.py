"""This node's pretended GPUs, what a device argument means, and which memory of the host is pinned.

Also ``replace``, with which the other modules put their functions in torch's place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.types import Device

from helpers.counts import COUNTS

BAD_FORK = (
    "Cannot re-initialize CUDA in forked subprocess. "
    "To use CUDA with multiprocessing, you must use the 'spawn' start method"
)


class Node:
    """How many GPUs this node pretends to have, and which one is the current GPU."""

    gpus = 1
    current = 0
    initialized = False  # whether a GPU was used. Until then, a device mesh of torch sets the current GPU.
    in_bad_fork = False  # whether this process was forked from one that had used a GPU: CUDA does not work here
    # DTensors draw random numbers from the GPU's generator: its seed, and how many numbers have been drawn.
    random_seed = torch.initial_seed() % 2**63
    random_offset = 0


ORIGINAL_GENERATOR: Any = torch.Generator


class StandIn(type(ORIGINAL_GENERATOR)):  # type: ignore[misc]
    """A metaclass for a class in the place of torch's ``original``: isinstance and == take the two for one class."""

    original: Any
    pretended: Any = ()  # a class whose instances count as the original's, if there is one

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.original, cls.pretended))

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


def accept_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch so that it takes a GPU's number as a device.

    For a number, torch's C++ asks which accelerator the build is for, and a build for CPUs is for none.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (f"cuda:{args[0]}", *args[1:])
        elif type(kwargs.get("device")) is int:
            kwargs["device"] = f"cuda:{kwargs['device']}"
        return original(*args, **kwargs)

    return call


class device(metaclass=StandIn):
    """torch.device, which also takes a number."""

    original = torch.device
    __module__ = "torch"  # where a pickle finds it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return accept_number(cls.original)(*args, **kwargs)


class Generator(ORIGINAL_GENERATOR, metaclass=StandIn):
    """torch.Generator, also on pretended GPUs, where it draws the CPU's numbers."""

    original = ORIGINAL_GENERATOR
    on_gpus: dict[int, torch.Generator] = {}  # by address: torch's C++ hands out a new Python object each time

    def __new__(cls, device: Device = "cpu") -> "Generator":
        generator = super().__new__(cls, device="cpu")
        generator.pretended_device = torch.device("cpu")
        if is_gpu(device):
            generator.pretended_device = torch.device("cuda", gpu_of(device))
            cls.on_gpus[generator._cdata] = generator  # this keeps it alive, so that no other gets its address
        return generator

    device: Any = property(lambda self: self.pretended_device)


def patch() -> None:
    replace(torch, device=device, Generator=Generator)
    replace(torch._C._nn, _parse_to=accept_number(torch._C._nn._parse_to))


def replace(owner: Any, **attributes: Any) -> None:
    """Give a module or a class of torch these attributes, in place of its own."""
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)


def refusing(message: str) -> Callable[..., Any]:
    """A function that a rehearsal cannot run: it says what to do."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise COUNTS.refuse(message, NotImplementedError)

    return refuse


def is_gpu(device: Device) -> bool:
    """Whether a device argument means a GPU."""
    return device is not None and torch.device(device).type == "cuda"


def gpu_of(device: Device = None) -> int:
    """The number of the GPU that a device argument means. Raises CUDA's RuntimeError for one that the node lacks."""
    if Node.in_bad_fork:
        raise COUNTS.refuse(BAD_FORK)
    Node.initialized = True
    if device is None:
        return Node.current
    index = torch.device(device).index
    if index is None:
        return Node.current
    if not 0 <= index < Node.gpus:
        raise COUNTS.refuse(f"CUDA error: invalid device ordinal (cuda:{index}; this node has {Node.gpus} GPUs)")
    return index


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the rehearsal has marked a CPU tensor's memory as pinned, through this tensor or another."""
    return tensor.layout == torch.strided and getattr(tensor.untyped_storage(), "pretended_pinned", False)


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor itself, which from now on counts as pinned; nothing is really pinned."""
    tensor.untyped_storage().pretended_pinned = True  # type: ignore[attr-defined]
    return tensor


def bytes_of(*tensors: torch.Tensor) -> int:
    """The bytes of the tensors' values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
