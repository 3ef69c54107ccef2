"""torch.cuda for pretended GPUs: their number and names, streams and events, memory, random numbers, autocast."""

import contextlib
import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.types import Device

from helpers.counts import COUNTS, WAIT
from helpers.rehearsal.devices import Node, gpu_of, replace

MEMORY = 80 << 30  # bytes of each pretended GPU
PRETENDED_NCCL = (2, 29, 7)  # NCCL's version, if PyTorch was built without it

RETURN_TRUE = "is_available is_bf16_supported can_device_access_peer".split()  # functions of torch.cuda
RETURN_NONE = (
    "_lazy_call set_stream empty_cache ipc_collect reset_peak_memory_stats "
    "reset_accumulated_memory_stats reset_max_memory_allocated set_per_process_memory_fraction seed seed_all"
).split()


def returning(value: Any) -> Callable[..., Any]:
    """A new function that always returns this value. It is a new one each time, because torch._dynamo wants that."""
    return lambda *args, **kwargs: value


class Stream:
    """A CUDA stream. It has no work to order: every operation runs when it is called."""

    query = returning(True)
    is_capturing = returning(False)
    wait_event = returning(None)
    wait_stream = returning(None)
    __exit__ = returning(None)

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", gpu_of(device))
        self.device_index = self.device.index
        self.device_type = 1  # torch's number of CUDA
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    def record_event(self, event: "Event | None" = None) -> "Event":
        if event is None:
            event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        COUNTS.count(WAIT, "stream.synchronize")

    def __enter__(self) -> "Stream":
        return self


class Event:
    """A CUDA event that notes the host's time."""

    query = returning(True)
    wait = returning(None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        COUNTS.count(WAIT, "event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two records by the host's clock: the CPU's work took them, not a GPU's."""
        if self.time is None or end.time is None:
            raise COUNTS.refuse("Both events must be recorded before calculating elapsed time", ValueError)
        return (end.time - self.time) * 1000


def exchange(index: int) -> int:
    """Make a GPU the current one, and return the number of the one before. A number below 0 changes nothing."""
    before = Node.current
    if index >= 0:
        Node.current = gpu_of(index)
    return before


@dataclass(frozen=True)
class Properties:
    """Made-up answers for torch.cuda.get_device_properties."""

    pci_bus_id: int
    uuid: str
    name: str = "pretended GPU"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = MEMORY


def properties(device: Device = None) -> Properties:
    index = gpu_of(device)
    return Properties(index, f"GPU-{os.environ.get('GROUP_RANK', '0')}-{index}")


def manual_seed(seed: int) -> None:
    Node.random_seed = seed % 2**63
    Node.random_offset = 0


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The seed and the offset as 16 bytes, as CUDA's generator has them."""
    return torch.tensor([Node.random_seed, Node.random_offset]).view(torch.uint8)


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    if state.numel() == 16:  # the state of a CPU's generator is longer
        Node.random_seed, Node.random_offset = state.cpu().view(torch.int64).tolist()


def set_sync_debug_mode(debug_mode: int | str) -> None:
    if isinstance(debug_mode, str):
        debug_mode = {"default": 0, "warn": 1, "error": 2}[debug_mode]
    COUNTS.sync_debug_mode = debug_mode


def synchronize(device: Device = None) -> None:
    COUNTS.count(WAIT, "cuda.synchronize")


def current_stream(device: Device = None) -> Stream:
    return stream_of(gpu_of(device))


stream_of = functools.cache(Stream)


def patch() -> None:
    """Replace those functions of torch.cuda and torch.accelerator that ask CUDA. Their other functions use these."""
    patch_torch_cuda()
    patch_accelerator()
    if not torch.distributed.is_nccl_available():  # a build for CUDA knows the version that it has
        replace(torch.cuda.nccl, version=lambda: PRETENDED_NCCL)
    replace(torch.cuda.nccl, is_available=returning(True))
    replace(torch.version, cuda=torch.version.cuda or "pretended")
    patch_contexts()


def patch_torch_cuda() -> None:
    """Replace functions and classes of torch.cuda, also where its submodules have them by the same names."""
    stubs: dict[str, Any] = {
        "device_count": lambda: Node.gpus,
        "is_initialized": lambda: Node.initialized,
        "init": gpu_of,
        "_lazy_init": gpu_of,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": properties,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: COUNTS.sync_debug_mode,
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": contextlib.nullcontext,
        "StreamContext": contextlib.nullcontext,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: defaultdict(int),
        # A pretended GPU draws the CPU's random numbers, so that results compare with gloo's. GPU seeds are DTensors'.
        "initial_seed": torch.initial_seed,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "utilization": returning(0),
        # Adam asks before each step. PyTorch's build for CUDA would start the driver, which is not here.
        "is_current_stream_capturing": returning(False),
    }
    for name in RETURN_TRUE:
        stubs[name] = returning(True)
    for name in RETURN_NONE:
        stubs[name] = returning(None)
    for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random):
        replace(module, **{name: stub for name, stub in stubs.items() if hasattr(module, name)})


def patch_accelerator() -> None:
    """Replace torch's C++ functions that say which accelerator there is, and which one of its devices is current."""
    gpu = torch.device("cuda")
    accelerator: dict[str, Any] = {
        "getAccelerator": lambda: gpu,
        "getDeviceIndex": lambda: Node.current,
        "setDeviceIndex": exchange,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "getStream": current_stream,
        "setStream": returning(None),
        "synchronizeDevice": synchronize,
        "isAllocatorInitialized": returning(False),
    }
    replace(torch._C, **{f"_accelerator_{name}": stub for name, stub in accelerator.items()})
    # FSDP's mesh and the backend of a process group ask these functions.
    replace(torch._C, _get_accelerator=lambda check=None: gpu, _cuda_getDevice=lambda: Node.current)
    replace(torch._C, _cuda_setDevice=exchange)


def patch_contexts() -> None:
    """Make autocast("cuda") the CPU's autocast, with the CPU's lists of operators, and leave CUDA out of profiles.

    Only the constructors of the classes are replaced, because other classes derive from them.
    """
    init_autocast = torch.autocast.__init__
    init_profile = torch.profiler.profile.__init__
    torch_is_autocast_enabled = torch.is_autocast_enabled

    def init_autocast_on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type = "cpu"
            dtype = dtype or torch.get_autocast_dtype("cuda")
        init_autocast(self, device_type, dtype, *args, **kwargs)

    def init_profile_of_cpu(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        if activities:
            activities = [item for item in activities if item != torch.profiler.ProfilerActivity.CUDA]
        init_profile(self, activities=activities, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        if device_type == "cuda":
            device_type = "cpu"
        return torch_is_autocast_enabled(device_type)

    replace(torch.autocast, __init__=init_autocast_on_cpu)
    replace(torch.profiler.profile, __init__=init_profile_of_cpu)
    replace(torch, is_autocast_enabled=is_autocast_enabled)
