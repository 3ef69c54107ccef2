"""A script for test_rehearsal: it calls each name of torch.cuda that a rehearsal does not refuse, and then the others.

It runs on one simulated GPU, and prints what does not behave as helpers/rehearsal/cuda_names.py says.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import torch

from helpers.rehearsal.cuda_names import REFUSED

folder = Path(tempfile.mkdtemp())
t = torch.ones(2, device="cuda")
event = torch.cuda.Event(enable_timing=True)
other = torch.cuda.Event(enable_timing=True)


def streams_are_current_within():
    """Whether a stream is the current one within each context that is there for it, and only there."""
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream=stream):
        assert torch.cuda.current_stream() == stream
    with stream:
        assert torch.cuda.current_stream() == stream
    with torch.cuda.StreamContext(stream), torch.cuda.stream(None):  # None changes nothing
        assert torch.cuda.current_stream() is stream
    assert torch.cuda.default_stream() == torch.cuda.default_stream("cuda:0")
    return torch.cuda.current_stream() == torch.cuda.default_stream()


class Doubled(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.cuda.amp.custom_bwd
    def backward(ctx, grad):
        return grad * 2


def tuned():
    """Call torch.cuda.tunable, which would search for the fastest matrix products. Return whether it stays off."""
    module = torch.cuda.tunable
    module.enable()
    module.tuning_enable()
    module.record_untuned_enable()
    module.set_filename("results.csv")
    module.set_max_tuning_duration(1)
    module.set_max_tuning_iterations(1)
    module.set_rotating_buffer_size(1)
    module.get_filename()
    module.get_max_tuning_duration()
    module.get_max_tuning_iterations()
    module.get_results()
    module.get_rotating_buffer_size()
    module.get_validators()
    module.read_file("results.csv")
    # Not every PyTorch has the following names.
    if hasattr(module, "write_file"):
        module.write_file()
        module.write_file_on_exit(True)
    if hasattr(module, "wildcard_fallback_enable"):
        module.wildcard_fallback_enable()
        assert not module.wildcard_fallback_is_enabled()
        module.set_cublaslt_requested_algo_count(1)
        module.get_cublaslt_requested_algo_count()
        module.set_numerical_check_tolerances(True)
        with module.dynamic_dims_mask():
            pass
    return not (module.is_enabled() or module.tuning_is_enabled() or module.record_untuned_is_enabled())


def annotated():
    """Call torch.cuda.graph_annotations, which is about CUDA graphs. Return whether it finds none."""
    module = importlib.import_module("torch.cuda.graph_annotations")
    with module.mark_kernels("a part"):
        t.sum()
    module.clear_kernel_annotations()
    if hasattr(module, "dump_kernel_py_stacks"):  # from PyTorch 2.15 on
        module.dump_kernel_py_stacks(str(folder / "stacks"))
        assert not module.get_kernel_py_stacks()
    return not (module.is_available() or module.get_kernel_annotations())


def traced():
    """Record a history of the GPU's memory, and write it to a file. Return whether it is empty."""
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    torch.cuda.memory._record_memory_history(enabled=None)
    return torch.cuda.memory._snapshot()["segments"] == torch.cuda.memory_snapshot() == []


def hooked():
    """Register a hook for each event of a CUDA graph, of which there is none that could call it."""

    def hook(*arguments):
        return None

    for event_of_graph in ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy"):
        register = getattr(torch.cuda.graphs, f"register_graph_{event_of_graph}_hook")
        register(hook)
    return True


# Each of these expressions is true on a GPU. They are texts, so that one that fails can be printed.
TRUE = """
torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.device_count() == 1
torch.cuda.init() is None and torch.cuda.set_device(0) is None and torch.cuda.current_device() == 0
torch.cuda.device(0).__enter__() is None and torch.cuda.device_of(t).__enter__() is None
torch.cuda.get_device_name() == torch.cuda.get_device_properties("cuda").name
torch.cuda.get_device_capability() >= (7, 0) and torch.cuda.get_device_properties(0).warp_size == 32
torch.cuda.get_arch_list() and "sm_" in torch.cuda.get_gencode_flags()
torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported() and torch.cuda.can_device_access_peer(0, 0)
torch.cuda.has_half in (True, False) and torch.cuda.has_magma in (True, False)
streams_are_current_within()
torch.cuda.set_stream(torch.cuda.Stream()) is None and torch.cuda.ExternalStream(7, device=0).cuda_stream == 7
torch.cuda.get_stream_from_external(7).query() and torch.Stream(device="cuda").query()
isinstance(torch.cuda.current_stream(), torch.Stream) and isinstance(torch.Event("cuda"), torch.cuda.Event)
event.record() or other.record() or event.elapsed_time(other) >= 0
torch.cuda.synchronize() is None and torch.cuda._sleep(100) is None and torch.cuda.ipc_collect() is None
not torch.cuda.is_current_stream_capturing() and len(torch.cuda.graph_pool_handle()) == 2
torch.cuda.default_generators[0].device == torch.device("cuda:0")
torch.cuda.default_generators[0].manual_seed(3).initial_seed() == 3
torch.cuda.manual_seed(1) is torch.cuda.manual_seed_all(1) and torch.cuda.seed() is torch.cuda.seed_all()
torch.cuda.initial_seed() >= 0 and torch.cuda.set_rng_state(torch.cuda.get_rng_state()) is None
torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all()) is None
torch.cuda.set_sync_debug_mode("default") is None and torch.cuda.get_sync_debug_mode() == 0
torch.cuda.cudart().cudaProfilerStart() == torch.cuda.cudart().cudaProfilerStop() == 0
torch.cuda.check_error(0) is None and torch.cuda.cudaStatus.SUCCESS == 0
issubclass(torch.cuda.CudaError, RuntimeError) and issubclass(torch.cuda.DeferredCudaCallError, Exception)
torch.cuda.profiler.start() is torch.cuda.profiler.stop() is None and torch.cuda.profiler.profile().__enter__() is None
torch.cuda.nvtx.mark("a") is torch.cuda.nvtx.range("a").__enter__() is torch.cuda.nvtx.range_end(0) is None
torch.cuda.nvtx.range_push("a") == torch.cuda.nvtx.range_pop() == torch.cuda.nvtx.range_start("a") == 0
"OOMs: 0" in torch.cuda.memory_summary() and torch.cuda.empty_cache() is None
torch.cuda.memory_stats()["num_ooms"] == torch.cuda.memory_stats_as_nested_dict()["num_ooms"] == 0
torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
torch.cuda.max_memory_reserved() == torch.cuda.memory_cached() == torch.cuda.max_memory_cached() == 0
torch.cuda.reset_max_memory_allocated() is torch.cuda.reset_max_memory_cached() is None
torch.cuda.reset_peak_memory_stats() is torch.cuda.reset_accumulated_memory_stats() is None
torch.cuda.host_memory_stats() == torch.cuda.host_memory_stats_as_nested_dict() == {}
torch.cuda.reset_peak_host_memory_stats() is torch.cuda.reset_accumulated_host_memory_stats() is None
torch.cuda.set_per_process_memory_fraction(0.5) is None and torch.cuda.get_per_process_memory_fraction() == 1.0
torch.cuda.mem_get_info()[0] <= torch.cuda.mem_get_info()[1] == torch.cuda.get_device_properties(0).total_memory
torch.cuda.get_allocator_backend() == "native" and torch.cuda.caching_allocator_enable(True) is None
torch.cuda.caching_allocator_disabled().__enter__() is None
torch.cuda.use_mem_pool(torch.cuda.MemPool()).__enter__() or torch.cuda.MemPool().id[1] > 0
traced() and torch.cuda.memory._set_allocator_settings("expandable_segments:True") is None
torch.cuda.current_blas_handle() == torch.cuda.current_solver_handle() == 0
torch.cuda.utilization() == torch.cuda.memory_usage() == torch.cuda.device_memory_used() == 0
torch.cuda.temperature() == torch.cuda.power_draw() == torch.cuda.clock_rate() == 0
torch.cuda.list_gpu_processes()
torch.cuda.nccl.version() > (2,) and torch.cuda.nccl.is_available([t])
not hasattr(torch.cuda.gds, "is_available") or not torch.cuda.gds.is_available()
torch.cuda.amp.GradScaler().is_enabled() and torch.cuda.amp.autocast().__enter__() is not None
torch.cuda.amp.amp_definitely_not_available() is False
Doubled.apply(torch.ones(1, device="cuda", requires_grad=True)).item() == 2
tuned()
not hasattr(torch.cuda, "graph_annotations") or annotated()
not hasattr(torch.cuda.graphs, "register_graph_destroy_hook") or hooked()
t.type() == "torch.cuda.FloatTensor" and isinstance(t, torch.cuda.FloatTensor)
not isinstance(t, torch.cuda.HalfTensor) and not isinstance(t.cpu(), torch.cuda.FloatTensor)
torch.cuda.FloatTensor([1.0]).device.type == "cuda" and torch.cuda.LongTensor([1]).dtype == torch.long
torch.cuda.ByteTensor(2).dtype == torch.uint8 and torch.cuda.CharTensor(2).dtype == torch.int8
torch.cuda.ShortTensor(2).dtype == torch.int16 and torch.cuda.IntTensor(2).dtype == torch.int32
torch.cuda.DoubleTensor(2).dtype == torch.double and torch.cuda.BoolTensor(2).dtype == torch.bool
torch.cuda.HalfTensor(2).dtype == torch.half and torch.cuda.BFloat16Tensor(2).dtype == torch.bfloat16
torch.ones(2).type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"
t.type(torch.FloatTensor).device.type == "cpu" and t.type(torch.cuda.LongTensor).dtype == torch.long
torch.backends.cudnn.version() > 8000 and torch.backends.cuda.is_built()
torch.backends.cuda.preferred_linalg_library("cusolver") is None
torch.set_default_tensor_type(torch.cuda.FloatTensor) or torch.ones(1).is_cuda
torch.set_default_tensor_type("torch.FloatTensor") or not torch.ones(1).is_cuda
""".strip().splitlines()


def refuses(name):
    """Whether a call of torch.cuda's ``name``, such as "comm.gather", raises the error that REFUSED has for it.

    True also for what this PyTorch does not have.
    """
    submodule, _, last_part = name.rpartition(".")
    try:
        module = importlib.import_module(f"torch.cuda.{submodule}".rstrip("."))
        function = getattr(module, last_part)
    except (ModuleNotFoundError, AttributeError):
        return True
    try:
        function()
    except NotImplementedError as error:
        return str(error) == f"torch.cuda.{name}: {REFUSED[name]}"
    return False


if __name__ == "__main__":
    for line in TRUE:
        try:
            if not eval(line):
                print("not true:", line)
        except Exception as error:
            print(f"{type(error).__name__}: {error} in:", line)
    for name in REFUSED:
        if not refuses(name):
            print("not refused:", name)
    print("all names called")
    sys.exit(3)  # the test looks whether this status comes out of the rehearsal
