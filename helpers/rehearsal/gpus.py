"""torch.cuda for simulated GPUs: their number and names, streams and events, memory, random numbers, autocast.

``cuda_names`` says what becomes of each name of torch.cuda. Here are the functions and classes in the place of those
that are simulated.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.types import Device

from helpers.counts import COUNTS, WAIT
from helpers.rehearsal.cuda_names import NOTHING, REFUSED
from helpers.rehearsal.devices import Generator, Node, StandIn, gpu_error, gpu_of, is_gpu, refusing, replace

MEMORY = 80 << 30  # bytes of each simulated GPU
SIMULATED_NCCL = (2, 29, 7)  # NCCL's version, if PyTorch was built without it
CUDNN_VERSION = 91900  # cuDNN's version, if PyTorch was built without it
MEMORY_UNITS = (
    "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes "
    "requested_bytes"
).split()  # what torch.cuda.memory_stats counts
SUCCESS = 0  # what the functions of CUDA's runtime return


def returning(value: Any) -> Callable[..., Any]:
    """Make a function that takes any arguments and returns this value. It takes the place of one of torch.cuda.

    Each name of torch.cuda gets a function of its own: torch._dynamo has a rule for each name, and raises an error if
    one function has two different rules.
    """

    def return_value(*args: Any, **kwargs: Any) -> Any:
        return value

    return return_value


class Stream:
    """torch.cuda.Stream for a simulated GPU. It has no work to order: every operation runs when it is called."""

    query = returning(True)  # all its work is done
    is_capturing = returning(False)
    wait_event = returning(None)
    wait_stream = returning(None)
    priority_range = staticmethod(returning((0, -5)))  # the lowest and the highest priority of a GPU's streams
    ids = itertools.count(1)

    def __init__(self, device: Device = None, priority: int = 0, **kwargs: Any) -> None:
        """Make a stream of the GPU, or of the current one for None, with the attributes that a script may read."""
        self.device = torch.device("cuda", gpu_of(device))
        self.device_index = self.device.index
        self.device_type = 1  # torch's number of CUDA
        self.priority = priority
        self.stream_id = next(self.ids)
        self.cuda_stream = self.stream_id  # CUDA's address of the stream
        # The streams that were current when a with statement made this one current. They are so again at its end.
        self.before: list[Stream] = []

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on this stream, a new one if none is given, and return it."""
        if event is None:
            event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        COUNTS.count(WAIT, "stream.synchronize")

    def __enter__(self) -> "Stream":
        """Begin ``with stream:``, in which this stream is the current one of its GPU."""
        self.before.append(current_stream(self.device))
        set_stream(self)
        return self

    def __exit__(self, *exception: object) -> None:
        set_stream(self.before.pop())


class ExternalStream(Stream):
    """A stream that another library has made, at an address of CUDA's."""

    def __init__(self, stream_ptr: int, device: Device = None, **kwargs: Any) -> None:
        super().__init__(device)
        self.cuda_stream = stream_ptr


class Event:
    """torch.cuda.Event for a simulated GPU. It records the time of the host's clock."""

    query = returning(True)  # what was called before it is done
    wait = returning(None)
    ipc_handle = refusing("a simulated GPU's event cannot be sent to another process: rehearse without it")

    def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
        self.enable_timing = enable_timing
        self.time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        COUNTS.count(WAIT, "event.synchronize")

    def elapsed_time(self, end: "Event") -> float:
        """The milliseconds between the records of this event and ``end``: how long the CPU took, not a GPU."""
        if not (self.enable_timing and end.enable_timing):
            raise gpu_error("Both events must be created with argument 'enable_timing=True'.", ValueError)
        if self.time is None or end.time is None:
            raise gpu_error("Both events must be recorded before calculating elapsed time", ValueError)
        return (end.time - self.time) * 1000


class AnyStream(metaclass=StandIn):
    """In the place of torch.Stream. ``isinstance(stream, torch.Stream)`` is true for a simulated stream, too."""

    original = torch.Stream
    simulated = Stream
    __module__ = "torch"

    def __new__(cls, device: Device = "cuda", **kwargs: Any) -> Any:
        if is_gpu(device):
            return Stream(device, **kwargs)
        return cls.original(device, **kwargs)


class AnyEvent(metaclass=StandIn):
    """In the place of torch.Event. ``isinstance(event, torch.Event)`` is true for a simulated event, too."""

    original = torch.Event
    simulated = Event
    __module__ = "torch"

    def __new__(cls, device: Device = "cuda", **kwargs: Any) -> Any:
        if is_gpu(device):
            return Event(**kwargs)
        return cls.original(device, **kwargs)


class MemPool:
    """A pool of a GPU's memory. A simulated GPU takes all its memory from the host, so the pool stays empty."""

    use_count = returning(1)
    snapshot = returning([])
    allocator = None
    ids = itertools.count(1)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.id = (0, next(self.ids))


def exchange(index: int) -> int:
    """Make a GPU the current one, and return the number of the GPU that was current before.

    A number below 0 changes nothing, as with CUDA.
    """
    previous = Node.current
    if index >= 0:
        Node.current = gpu_of(index)
    return previous


@dataclass(frozen=True)
class Properties:
    """What torch.cuda.get_device_properties returns for a simulated GPU: the numbers of an H100."""

    pci_bus_id: int
    uuid: str
    name: str = "simulated GPU"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = MEMORY
    pci_device_id: int = 0
    pci_domain_id: int = 0
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    clock_rate: int = 1980000  # kHz
    memory_clock_rate: int = 2619000  # kHz
    memory_bus_width: int = 5120
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


def properties(device: Device = None) -> Properties:
    """torch.cuda.get_device_properties. Each GPU of a job has its own uuid, such as "GPU-1-0" for GPU 0 on node 1."""
    index = gpu_of(device)
    node = os.environ.get("GROUP_RANK", "0")
    return Properties(pci_bus_id=index, uuid=f"GPU-{node}-{index}")


def manual_seed(seed: int) -> None:
    """torch.cuda.manual_seed: the numbers that DTensors draw begin anew from this seed."""
    Node.random_seed = seed % 2**63  # so that it fits into the 64 bits of ``get_rng_state``, of which one is the sign
    Node.random_offset = 0


def get_rng_state(device: Device = None) -> torch.Tensor:
    """The seed and the offset as 16 bytes, as CUDA's generator has them."""
    return torch.tensor([Node.random_seed, Node.random_offset]).view(torch.uint8)


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    """torch.cuda.set_rng_state, for a state that ``get_rng_state`` has returned.

    Such a state has 16 bytes. A longer one comes from a CPU's generator, and changes nothing here.
    """
    if state.numel() != 16:
        return
    seed, offset = state.cpu().view(torch.int64).tolist()
    Node.random_seed = seed
    Node.random_offset = offset


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """torch.cuda.set_sync_debug_mode: whether torch says nothing, warns or raises where the host waits for a GPU."""
    if isinstance(debug_mode, str):
        debug_mode = {"default": 0, "warn": 1, "error": 2}[debug_mode]
    COUNTS.sync_debug_mode = debug_mode


def synchronize(device: Device = None) -> None:
    COUNTS.count(WAIT, "cuda.synchronize")


CURRENT_STREAMS: dict[int, Stream] = {}  # of each GPU on which another stream than the default one is current


def current_stream(device: Device = None) -> Stream:
    """torch.cuda.current_stream: the one that ``set_stream`` has chosen for a GPU, or else the GPU's default stream."""
    index = gpu_of(device)
    return CURRENT_STREAMS.get(index) or default_stream(index)


def set_stream(stream: Stream) -> None:
    CURRENT_STREAMS[stream.device_index] = stream


def default_stream(device: Device = None) -> Stream:
    return default_stream_of(gpu_of(device))


default_stream_of = functools.cache(Stream)  # {a GPU's number: its default stream}, which is made when it is asked for


def init() -> None:
    """torch.cuda.init, which raises CUDA's error in a process that was forked from one that had used a GPU."""
    gpu_of()


def memory_stats(device: Device = None) -> dict[str, int]:
    """CUDA's counts of memory by their names, such as "allocated_bytes.all.peak". All are 0: the memory is the host's.

    A name that only another version of PyTorch has is 0 as well, because the dict is a defaultdict.
    """
    counts: dict[str, int] = defaultdict(int)
    for unit in MEMORY_UNITS:
        for pool in ("all", "large_pool", "small_pool"):
            for moment in ("current", "peak", "allocated", "freed"):
                counts[f"{unit}.{pool}.{moment}"] = 0
    for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
        counts[name] = 0
    return counts


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """The free bytes and all bytes of a GPU."""
    return MEMORY, MEMORY


def check_error(result: int) -> None:
    """torch.cuda.check_error: raise RuntimeError where a function of CUDA's runtime has returned an error."""
    if result != SUCCESS:
        raise gpu_error(f"CUDA error: {result}")


# CUDA's runtime, as far as programs call it: they mark what a profile shows, and pin memory.
RUNTIME = SimpleNamespace(
    cudaError=SimpleNamespace(success=SUCCESS),
    cudaGetErrorString=lambda code: f"CUDA error {code}",
    cudaProfilerStart=returning(SUCCESS),
    cudaProfilerStop=returning(SUCCESS),
    cudaDeviceSynchronize=returning(SUCCESS),
    cudaStreamCreate=returning(SUCCESS),
    cudaStreamDestroy=returning(SUCCESS),
    cudaHostRegister=returning(SUCCESS),
    cudaHostUnregister=returning(SUCCESS),
    cudaMemGetInfo=mem_get_info,
)


def patch() -> None:
    """Replace those functions of torch.cuda and torch.accelerator that ask CUDA. Their other functions use these."""
    follow_tables()
    patch_torch_cuda()
    patch_accelerator()
    # PyTorch's build for CUDA knows its versions of NCCL, CUDA and cuDNN, and keeps them.
    if not torch.distributed.is_nccl_available():
        replace(torch.cuda.nccl, version=lambda: SIMULATED_NCCL)
    if not torch.version.cuda:
        replace(torch.version, cuda="simulated")
    replace(torch.backends.cuda, is_built=returning(True), preferred_linalg_library=returning(None))
    if not torch.backends.cudnn.is_available():
        replace(torch.backends.cudnn, version=returning(CUDNN_VERSION))
    patch_contexts()


def follow_tables() -> None:
    """Replace what ``cuda_names`` lists: the functions that do nothing, and those that a rehearsal cannot run."""
    for qualified_name, value in NOTHING.items():
        replace_name(qualified_name, returning(value))
    for qualified_name, reason in REFUSED.items():
        replace_name(qualified_name, refusing(f"torch.cuda.{qualified_name}: {reason}"))


def replace_name(qualified_name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of a name of torch.cuda, such as "nvtx.mark", in each module that has the name.

    - Of a class only ``__new__`` is replaced, because programs use the class in isinstance.
    - The sparse types are replaced themselves: torch's C++ has made these classes, and they take no attribute.
    - A name that this PyTorch does not have is left out.
    """
    submodule, _, name = qualified_name.rpartition(".")  # "nvtx" and "mark"; for "empty_cache" the first is ""
    try:
        modules = [importlib.import_module(f"torch.cuda.{submodule}".rstrip("."))]
    except ModuleNotFoundError:  # An older PyTorch has no such module.
        return
    if submodule == "":
        modules += [torch.cuda.graphs, torch.cuda.memory, torch.cuda.random]  # torch.cuda imports names from them
    if submodule == "comm":
        modules.append(torch.nn.parallel.comm)  # DataParallel finds them here
    for module in modules:
        original = getattr(module, name, None)
        if original is None:
            continue
        if inspect.isclass(original) and submodule != "sparse":
            replace(original, __new__=function)
        else:
            replace(module, **{name: function})


def note_fork() -> None:
    """Python calls this in a process that the script has forked. CUDA does not work there if a GPU was used before."""
    Node.in_bad_fork = Node.initialized


def patch_torch_cuda() -> None:
    """Put the functions and classes above in the place of torch.cuda's, also where its submodules have them."""
    os.register_at_fork(after_in_child=note_fork)
    stubs: dict[str, Any] = {
        "_lazy_call": returning(None),
        "_is_in_bad_fork": lambda: Node.in_bad_fork,
        "device_count": lambda: Node.gpus,
        "is_initialized": lambda: Node.initialized and not Node.in_bad_fork,
        "init": init,
        "_lazy_init": init,
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": properties,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: COUNTS.sync_debug_mode,
        "synchronize": synchronize,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "get_stream_from_external": ExternalStream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "cudart": lambda: RUNTIME,
        "check_error": check_error,
        "default_generators": tuple(Generator(f"cuda:{index}") for index in range(Node.gpus)),
        "mem_get_info": mem_get_info,
        "memory_stats": memory_stats,
        "memory_stats_as_nested_dict": memory_stats,
        "MemPool": MemPool,
        "use_mem_pool": contextlib.nullcontext,
        "caching_allocator_disabled": contextlib.nullcontext,
        # A simulated GPU draws the CPU's random numbers, so that results compare with gloo's. Only DTensors draw by the
        # seed and the state of the GPU's generator, which these functions set and return.
        "initial_seed": torch.initial_seed,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
    }
    submodules = (torch.cuda.graphs, torch.cuda.memory, torch.cuda.profiler, torch.cuda.random, torch.cuda.streams)
    for module in (torch.cuda, *submodules):
        for name, stub in stubs.items():
            if hasattr(module, name):
                setattr(module, name, stub)
    replace(torch, Stream=AnyStream, Event=AnyEvent)
    Node.initialized = False  # the generators above have used the GPUs, and the script has not


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
        "setStream": set_stream,
        "synchronizeDevice": synchronize,
        "isAllocatorInitialized": returning(False),
    }
    for name, stub in accelerator.items():
        setattr(torch._C, f"_accelerator_{name}", stub)
    # FSDP's mesh and the backend of a process group ask these functions.
    replace(torch._C, _get_accelerator=lambda check=None: gpu, _cuda_getDevice=lambda: Node.current)
    replace(torch._C, _cuda_setDevice=exchange)


def patch_contexts() -> None:
    """Make torch.autocast("cuda") the CPU's autocast, and leave CUDA out of profiles.

    The operators run on the CPU, so only the CPU's autocast, with its own lists of operators, changes their types. Only
    the constructors of the classes are replaced, because other classes derive from them.
    """
    original_init_autocast = torch.autocast.__init__
    original_init_profile = torch.profiler.profile.__init__
    original_is_autocast_enabled = torch.is_autocast_enabled

    def init_autocast_on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        """In the place of the constructor of torch.autocast, whose arguments these are."""
        if device_type == "cuda":
            device_type = "cpu"
            if dtype is None:
                dtype = torch.get_autocast_dtype("cuda")  # float16, where the CPU's own default is bfloat16
        original_init_autocast(self, device_type, dtype, *args, **kwargs)

    def init_profile_of_cpu(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        """In the place of the constructor of torch.profiler.profile, whose arguments these are."""
        if activities:
            cuda = torch.profiler.ProfilerActivity.CUDA
            activities = [activity for activity in activities if activity != cuda]
        original_init_profile(self, activities=activities, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        """In the place of torch.is_autocast_enabled."""
        if device_type == "cuda":
            device_type = "cpu"
        return original_is_autocast_enabled(device_type)

    replace(torch.autocast, __init__=init_autocast_on_cpu)
    replace(torch.profiler.profile, __init__=init_profile_of_cpu)
    replace(torch, is_autocast_enabled=is_autocast_enabled)
