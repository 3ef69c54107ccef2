"""This node's simulated GPUs, what a device argument means, and which memory of the host is pinned.

Also ``replace``, with which the other modules put their functions in torch's place, and ``gpu_error``, with which they
raise what a real GPU or NCCL would raise.
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
    """What this process, which is one rank, knows of the node's simulated GPUs. It is kept on the class itself.

    CUDA keeps the same for a process: how many GPUs there are, which one is current, and whether one was used.
    """

    gpus = 1  # how many simulated GPUs this node has
    current = 0  # the number of the GPU that torch.cuda.set_device has chosen
    initialized = False  # whether a GPU was used. Until then, a device mesh of torch sets the current GPU.
    in_bad_fork = False  # whether this process was forked from one that had used a GPU: CUDA does not work here
    # DTensors draw random numbers from the GPU's generator: its seed, and how many numbers have been drawn.
    random_seed = torch.initial_seed() % 2**63
    random_offset = 0


ORIGINAL_GENERATOR: Any = torch.Generator


class StandIn(type(ORIGINAL_GENERATOR)):  # type: ignore[misc]
    """A metaclass for a class that takes the place of a class of torch, the ``original``: both count as one class.

    torch's C++ still makes instances of the original, such as ``tensor.device``. But the name torch.device now means
    the other class. ``isinstance(tensor.device, torch.device)`` and ``type(tensor.device) == torch.device`` have to be
    true nevertheless.
    """

    original: Any
    simulated: Any = ()  # a class whose instances count as the original's, if there is one

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (cls.original, cls.simulated))

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)  # classes that are equal must have one hash


def accept_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch whose first argument is a device, so that the device may be a number: 1 for cuda:1.

    torch's C++ takes a number for a device of the accelerator that the build is for. A build for CPUs is for none, so
    C++ would raise an error. That is why the wrapper turns the number into text.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        """In the place of ``original``. The device is the first argument, or the argument that is called ``device``."""
        # Not isinstance(..., int): a bool is an int as well, and names no GPU.
        if args and type(args[0]) is int:
            number, *other_args = args
            args = (f"cuda:{number}", *other_args)
        elif type(kwargs.get("device")) is int:
            number = kwargs["device"]
            kwargs["device"] = f"cuda:{number}"
        return original(*args, **kwargs)

    return call


class device(metaclass=StandIn):
    """torch.device, which also takes a GPU's number. What it makes are the original's instances."""

    original = torch.device
    __module__ = "torch"  # where a pickle finds it

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return accept_number(cls.original)(*args, **kwargs)


class Generator(ORIGINAL_GENERATOR, metaclass=StandIn):
    """torch.Generator, which may also be on a simulated GPU. There it draws the CPU's random numbers."""

    original = ORIGINAL_GENERATOR
    # {address in C++: the generator} of those on a GPU. ``check_generator`` looks an address up, because torch's C++
    # hands a generator to an operator as a new Python object, which does not say where the generator is.
    on_gpus: dict[int, torch.Generator] = {}

    def __new__(cls, device: Device = "cpu") -> "Generator":
        """Make a generator of the CPU, which says that it is on ``device``."""
        generator = super().__new__(cls, device="cpu")
        generator.simulated_device = torch.device("cpu")
        if is_gpu(device):
            generator.simulated_device = torch.device("cuda", gpu_of(device))
            cls.on_gpus[generator._cdata] = generator  # this keeps it alive, so that no other gets its address
        return generator

    device: Any = property(lambda self: self.simulated_device)


def patch() -> None:
    """Let torch accept a GPU's number as a device, and make generators of random numbers on simulated GPUs."""
    replace(torch, device=device, Generator=Generator)
    # Module.to, and Tensor.to in ``placement``, read their arguments with this function.
    replace(torch._C._nn, _parse_to=accept_number(torch._C._nn._parse_to))


def replace(owner: Any, **attributes: Any) -> None:
    """Give a module or a class of torch these attributes, in place of its own."""
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)


def gpu_error(message: str, kind: type[Exception] = RuntimeError) -> Exception:
    """Return, for ``raise``, the error that CUDA, NCCL or torch would raise on real GPUs, and note it for the report.

    The report has it with the line of the script that runs now, also if the script catches it.
    """
    return COUNTS.refuse(message, kind)


def refusing(message: str) -> Callable[..., Any]:
    """A function in the place of one that a rehearsal cannot run: it raises NotImplementedError with ``message``."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise gpu_error(message, NotImplementedError)

    return refuse


def is_gpu(device: Device) -> bool:
    """Whether a device argument means a GPU."""
    return device is not None and torch.device(device).type == "cuda"


def gpu_of(device: Device = None) -> int:
    """The number of the GPU that a device argument means, such as 1 for "cuda:1". None and "cuda" mean the current one.

    From this call on CUDA counts as initialized, because whoever asks for a GPU uses it. Raises CUDA's RuntimeError for
    a GPU that the node does not have, and in a process that was forked from one that had used a GPU.
    """
    if Node.in_bad_fork:
        raise gpu_error(BAD_FORK)
    Node.initialized = True
    if device is None:
        return Node.current
    index = torch.device(device).index
    if index is None:
        return Node.current
    if not 0 <= index < Node.gpus:
        raise gpu_error(f"CUDA error: invalid device ordinal (cuda:{index}; this node has {Node.gpus} GPUs)")
    return index


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether ``mark_pinned`` has marked a CPU tensor's memory, through this tensor or through another view of it."""
    if tensor.layout != torch.strided:
        return False  # a sparse tensor has no storage that could be marked
    return getattr(tensor.untyped_storage(), "simulated_pinned", False)  # a storage without a mark lacks the attribute


def mark_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor itself, which from now on counts as pinned; nothing is really pinned."""
    tensor.untyped_storage().simulated_pinned = True  # type: ignore[attr-defined]
    return tensor


def bytes_of(*tensors: torch.Tensor) -> int:
    """The bytes of the tensors' values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
