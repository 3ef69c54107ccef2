"""torch.cuda for pretended GPUs: their number and names, streams and events, memory, random numbers, autocast."""

import contextlib
import os
import time
import types
from collections import defaultdict

import torch

from helpers.rehearsal.counts import COUNTS, WAIT
from helpers.rehearsal.tensor import State, gpu_of

MEMORY = 80 << 30  # bytes of each pretended GPU


class Stream:
    """A CUDA stream. Here every operation runs when it is called, so a stream has nothing to order."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, device=None, priority=0, **kwargs):
        self.device = torch.device("cuda", gpu_of(State.current if device is None else device))
        self.priority, self.cuda_stream, self.stream_id = priority, 0, 0
        self.device_index, self.device_type = self.device.index, 1  # torch's number of CUDA

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def query(self):
        return True

    def is_capturing(self):
        return False

    def synchronize(self):
        COUNTS.add(WAIT, "stream.synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


class Event:
    """A CUDA event that notes the host's time."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, **kwargs):
        self.time = None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        COUNTS.add(WAIT, "event.synchronize")

    def elapsed_time(self, end):
        """Milliseconds between two records by the host's clock: the CPU's work took them, not a GPU's."""
        return (end.time - self.time) * 1000


class Device:
    """``with torch.cuda.device(k)``."""

    def __init__(self, device):
        self.index = gpu_of(device) if device is not None else State.current

    def __enter__(self):
        self.before, State.current = State.current, self.index

    def __exit__(self, *error):
        State.current = self.before


def properties(device=None):
    """Made-up answers for torch.cuda.get_device_properties."""
    index = State.current if device is None else gpu_of(device)
    node = os.environ.get("GROUP_RANK", "0")
    return types.SimpleNamespace(
        name="pretended GPU",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=MEMORY,
        gcnArchName="",
        uuid=f"GPU-{node}-{index}",
        pci_bus_id=index,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048,
    )


def set_device(device):
    State.current = gpu_of(device)


def device_index(device=None, optional=False, allow_cpu=False):
    """A device argument as the number of a GPU, read as torch.cuda reads it."""
    if device is None:
        return State.current
    if allow_cpu and not isinstance(device, int) and torch.device(device).type == "cpu":
        return -1
    return gpu_of(device)


def synchronize(device=None):
    COUNTS.add(WAIT, "cuda.synchronize")


@contextlib.contextmanager
def stream_context(stream):
    yield stream


def returning(value):
    """A new function that always returns this value. torch._dynamo wants a different function for each name."""
    return lambda *args, **kwargs: value


def graphless():
    """A function for CUDA graphs that raises RuntimeError."""

    def refuse(*args, **kwargs):
        raise RuntimeError("A rehearsal has no CUDA graphs: run this part on a GPU.")

    return refuse


def patch():
    cuda, current = torch.cuda, Stream()
    stubs = {
        "is_available": returning(True),
        "is_initialized": returning(True),
        "is_bf16_supported": returning(True),
        "init": returning(None),
        "_lazy_init": returning(None),
        "_lazy_call": returning(None),
        "device_count": lambda: State.gpus,
        "current_device": lambda: State.current,
        "set_device": set_device,
        "_get_device_index": device_index,
        "device": Device,
        "device_of": lambda tensor: Device(tensor.device.index if tensor.is_cuda else None),
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": returning(True),
        "synchronize": synchronize,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: current,
        "default_stream": lambda device=None: current,
        "set_stream": returning(None),
        "stream": stream_context,
        "StreamContext": stream_context,
        "empty_cache": returning(None),
        "ipc_collect": returning(None),
        "reset_peak_memory_stats": returning(None),
        "reset_accumulated_memory_stats": returning(None),
        "reset_max_memory_allocated": returning(None),
        "set_per_process_memory_fraction": returning(None),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_summary": lambda *args, **kwargs: "A rehearsal has no CUDA memory.",
        "memory_snapshot": lambda *args: [],
        "utilization": returning(0),
        # A pretended GPU draws the CPU's random numbers, so that results compare with gloo's. GPU seeds do nothing.
        "manual_seed": returning(None),
        "manual_seed_all": returning(None),
        "seed": returning(None),
        "seed_all": returning(None),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * State.gpus,
        "set_rng_state": returning(None),
        "set_rng_state_all": returning(None),
        "CUDAGraph": graphless(),
        "graph": graphless(),
        "make_graphed_callables": graphless(),
    }
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stubs[name] = returning(0)
    for name, stub in stubs.items():
        setattr(cuda, name, stub)
    for module in (cuda.memory, cuda.random):
        for name in set(vars(module)) & set(stubs):
            setattr(module, name, stubs[name])
    torch._utils._get_available_device_type = lambda: "cuda"
    torch._utils._get_current_device_index = lambda: State.current
    cuda.nccl.version = lambda: (2, 29, 7)
    cuda.nccl.is_available = returning(True)
    torch.version.cuda = torch.version.cuda or "pretended"
    patch_accelerator()
    patch_autocast()
    patch_profiler()


def patch_accelerator():
    accelerator = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: State.gpus
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.current_device_index = lambda: State.current
    accelerator.current_device_idx = accelerator.current_device_index
    accelerator.set_device_index = accelerator.set_device_idx = set_device
    accelerator.synchronize = synchronize
    accelerator.current_stream = torch.cuda.current_stream
    accelerator.set_stream = torch.cuda.set_stream
    accelerator.device_index = Device
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(accelerator, name, lambda device=None: 0)
    accelerator.empty_cache = torch.cuda.empty_cache
    accelerator.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats


def patch_autocast():
    """Make autocast("cuda") the CPU's autocast, in bfloat16 or float16, with the CPU's lists of operators."""
    original = torch.autocast

    class autocast(original):
        def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
            super().__init__(device_type, dtype, enabled, cache_enabled)

    for module in (torch, torch.amp, torch.amp.autocast_mode):
        module.autocast = autocast
    enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda *args: enabled(*("cpu" if place == "cuda" else place for place in args))


def patch_profiler():
    """Make the profiler leave CUDA out of its activities."""
    original = torch.profiler.profile

    class profile(original):
        def __init__(self, *, activities=None, **kwargs):
            if activities is not None:
                activities = [item for item in activities if item != torch.profiler.ProfilerActivity.CUDA]
            super().__init__(activities=activities, **kwargs)

    torch.profiler.profile = torch.profiler.profiler.profile = profile
