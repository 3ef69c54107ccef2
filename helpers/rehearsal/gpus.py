"""torch.cuda for pretended GPUs: their number and names, streams and events, memory, random numbers, autocast."""

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.types import Device

from helpers.rehearsal.counts import COUNTS, WAIT
from helpers.rehearsal.devices import Node, gpu_of, replace

MEMORY = 80 << 30  # bytes of each pretended GPU

# Functions of torch.cuda by their answer.
TRUE = "is_available is_bf16_supported can_device_access_peer".split()
ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization".split()
NOTHING = (
    "_lazy_call set_stream empty_cache ipc_collect reset_peak_memory_stats "
    "reset_accumulated_memory_stats reset_max_memory_allocated set_per_process_memory_fraction "
    "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all"
).split()
OF_ACCELERATORS = (  # also functions of torch.accelerator
    "is_available device_count synchronize current_stream set_stream empty_cache reset_peak_memory_stats "
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
).split()


def nothing(*args: Any, **kwargs: Any) -> None:
    """What orders the work on a GPU has nothing to do here, where every operation runs when it is called."""


class Stream:
    """A CUDA stream."""

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", gpu_of(device))
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0
        self.device_index, self.device_type = self.device.index, 1  # torch's number of CUDA

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        COUNTS.add(WAIT, "stream.synchronize")

    def __enter__(self) -> "Stream":
        return self

    wait_event = wait_stream = __exit__ = nothing


class Event:
    """A CUDA event that notes the host's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        COUNTS.add(WAIT, "event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two records by the host's clock: the CPU's work took them, not a GPU's."""
        if self.time is None or end.time is None:
            raise COUNTS.refuse(ValueError("Both events must be recorded before calculating elapsed time"))
        return (end.time - self.time) * 1000

    wait = nothing


@contextlib.contextmanager
def current_device(device: Device) -> Iterator[None]:
    """``with torch.cuda.device(k)``."""
    before, Node.current = Node.current, gpu_of(device)
    try:
        yield
    finally:
        Node.current = before


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


def set_device(device: Device) -> None:
    Node.current = gpu_of(device)


def initialize() -> None:
    Node.initialized = True


def set_sync_debug_mode(debug_mode: int | str) -> None:
    modes = {"default": 0, "warn": 1, "error": 2}
    COUNTS.sync_debug_mode = modes[debug_mode] if isinstance(debug_mode, str) else debug_mode


def returning(value: Any) -> Callable[..., Any]:
    """A new function that always returns this value. torch._dynamo wants a different function for each name."""
    return lambda *args, **kwargs: value


def patch() -> None:
    current = Stream()
    stubs: dict[str, Any] = {
        "device_count": lambda: Node.gpus,
        "is_initialized": lambda: Node.initialized,
        "init": initialize,
        "_lazy_init": initialize,
        "current_device": lambda: gpu_of(None),
        "set_device": set_device,
        "_get_device_index": lambda device=None, optional=False, allow_cpu=False: gpu_of(device),
        "device": current_device,
        "device_of": lambda tensor: current_device(tensor.device.index if tensor.is_cuda else None),
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: COUNTS.sync_debug_mode,
        "synchronize": lambda device=None: COUNTS.add(WAIT, "cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "stream": contextlib.nullcontext,
        "StreamContext": contextlib.nullcontext,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "A rehearsal has no CUDA memory.",
        # A pretended GPU draws the CPU's random numbers, so that results compare with gloo's. GPU seeds do nothing.
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * Node.gpus,
    }
    stubs |= {name: returning(True) for name in TRUE} | {name: returning(0) for name in ZERO}
    stubs |= {name: returning(None) for name in NOTHING}
    Node.initialized = False  # the stream above has set it
    replace(torch.cuda, **stubs)
    for module in (torch.cuda.memory, torch.cuda.random):
        replace(module, **{name: stub for name, stub in stubs.items() if hasattr(module, name)})
    replace(
        torch.accelerator,
        **{name: stubs[name] for name in OF_ACCELERATORS},
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        current_device_index=lambda: Node.current,
        current_device_idx=lambda: Node.current,
        set_device_index=set_device,
        set_device_idx=set_device,
        device_index=current_device,
    )
    # FSDP's mesh, a group's backend and the modules of torch ask C++.
    replace(torch._C, _get_accelerator=lambda check=None: torch.device("cuda"))
    replace(torch._utils, _get_available_device_type=lambda: "cuda", _get_current_device_index=lambda: Node.current)
    replace(torch.cuda.nccl, version=lambda: (2, 29, 7), is_available=returning(True))
    replace(torch.version, cuda=torch.version.cuda or "pretended")
    patch_autocast()
    patch_profiler()


def patch_autocast() -> None:
    """Make autocast("cuda") the CPU's autocast, in bfloat16 or float16, with the CPU's lists of operators."""
    autocast: Any = torch.autocast  # changed in place: torch.cuda.amp has a subclass of it
    start, enabled_for = autocast.__init__, torch.is_autocast_enabled

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        start(self, device_type, dtype, *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return enabled_for("cpu" if device_type == "cuda" else device_type)

    replace(autocast, __init__=init)
    replace(torch, is_autocast_enabled=is_autocast_enabled)


def patch_profiler() -> None:
    """Make the profiler leave CUDA out of its activities."""

    class profile(torch.profiler.profile):
        def __init__(self, *, activities: Any = None, **kwargs: Any) -> None:
            if activities is not None:
                activities = [item for item in activities if item != torch.profiler.ProfilerActivity.CUDA]
            super().__init__(activities=activities, **kwargs)

    for module in (torch.profiler, torch.profiler.profiler):
        replace(module, profile=profile)
