"""What becomes of each public name of torch.cuda and its submodules in a rehearsal, decided name by name.

Each name is in one of the four tables. A name that only a submodule has is written with the submodule: nvtx.mark. A
name that torch.cuda has too, such as each of torch.cuda.memory, is written without. ``gpus`` follows the tables, and a
test fails for each public name of the installed torch.cuda that is in none of them.
"""

from typing import Any

# `gpus` and `placement` have functions and classes of their own in the place of these.
SIMULATED = frozenset(
    """
    Stream ExternalStream Event get_stream_from_external current_stream default_stream set_stream synchronize
    device_count is_initialized init get_device_properties default_generators cudart check_error nccl.version
    mem_get_info memory_stats memory_stats_as_nested_dict MemPool use_mem_pool caching_allocator_disabled
    initial_seed manual_seed manual_seed_all get_rng_state set_rng_state set_sync_debug_mode get_sync_debug_mode
    BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor ShortTensor
    """.split()
)

# torch's own functions and classes stay, because they ask only what is simulated, or ask no GPU.
UNCHANGED = frozenset(
    """
    stream StreamContext current_device set_device device device_of
    get_device_name get_device_capability get_gencode_flags is_tf32_supported has_half has_magma
    memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
    memory_summary reset_max_memory_allocated reset_max_memory_cached get_rng_state_all set_rng_state_all
    CudaError DeferredCudaCallError cudaStatus
    amp.GradScaler amp.autocast amp.custom_fwd amp.custom_bwd
    amp.amp_definitely_not_available
    nvtx.range profiler.start profiler.stop profiler.profile
    graph_annotations.clear_kernel_annotations graph_annotations.dump_kernel_py_stacks
    graph_annotations.get_kernel_annotations graph_annotations.get_kernel_py_stacks graph_annotations.mark_kernels
    graphs.register_graph_capture_start_hook graphs.register_graph_capture_end_hook
    graphs.register_graph_instantiate_hook graphs.register_graph_destroy_hook
    graphs.register_graph_replay_start_hook graphs.register_graph_replay_end_hook
    tunable.dynamic_dims_mask
    """.split()
)

# {name: value} of functions that do nothing and return the value. A name with an underscore is private, but programs
# call it.
NOTHING: dict[str, Any] = {
    "is_available": True,
    "is_bf16_supported": True,
    "can_device_access_peer": True,
    "get_arch_list": ["sm_90"],
    # Adam asks before each step. PyTorch's build for CUDA would start the driver, which is not here.
    "is_current_stream_capturing": False,
    "graph_pool_handle": (0, 0),
    "graph_annotations.is_available": False,
    # Programs call this one to start cuBLAS before they measure.
    "current_blas_handle": 0,
    "current_solver_handle": 0,
    "_sleep": None,
    # Memory: a simulated GPU's is the host's, which nobody counts.
    "empty_cache": None,
    "ipc_collect": None,
    "get_allocator_backend": "native",
    "caching_allocator_enable": None,
    "get_per_process_memory_fraction": 1.0,
    "set_per_process_memory_fraction": None,
    "host_memory_stats": {},
    "host_memory_stats_as_nested_dict": {},
    "reset_accumulated_host_memory_stats": None,
    "reset_accumulated_memory_stats": None,
    "reset_peak_host_memory_stats": None,
    "reset_peak_memory_stats": None,
    "memory_snapshot": [],
    "memory._snapshot": {"segments": [], "device_traces": []},
    "memory._record_memory_history": None,
    "memory._set_allocator_settings": None,
    # A simulated GPU draws the CPU's random numbers, so that results compare with gloo's.
    "seed": None,
    "seed_all": None,
    # What nvidia-smi shows.
    "utilization": 0,
    "memory_usage": 0,
    "device_memory_used": 0,
    "temperature": 0,
    "power_draw": 0,
    "clock_rate": 0,
    "list_gpu_processes": "no processes are running",
    # Marks for Nsight Systems.
    "nvtx.mark": None,
    "nvtx.range_push": 0,
    "nvtx.range_pop": 0,
    "nvtx.range_start": 0,
    "nvtx.range_end": None,
    # The search for the fastest matrix products.
    "tunable.enable": None,
    "tunable.is_enabled": False,
    "tunable.tuning_enable": None,
    "tunable.tuning_is_enabled": False,
    "tunable.record_untuned_enable": None,
    "tunable.record_untuned_is_enabled": False,
    "tunable.wildcard_fallback_enable": None,
    "tunable.wildcard_fallback_is_enabled": False,
    "tunable.set_filename": None,
    "tunable.get_filename": "",
    "tunable.set_max_tuning_duration": None,
    "tunable.get_max_tuning_duration": 0,
    "tunable.set_max_tuning_iterations": None,
    "tunable.get_max_tuning_iterations": 0,
    "tunable.set_rotating_buffer_size": None,
    "tunable.get_rotating_buffer_size": 0,
    "tunable.set_cublaslt_requested_algo_count": None,
    "tunable.get_cublaslt_requested_algo_count": 0,
    "tunable.set_numerical_check_tolerances": None,
    "tunable.get_results": (),
    "tunable.get_validators": (),
    "tunable.read_file": False,
    "tunable.write_file": False,
    "tunable.write_file_on_exit": None,
    "nccl.is_available": True,
    "gds.is_available": False,
}

NO_GRAPHS = "a rehearsal has no CUDA graphs: rehearse without them"
NO_ADDRESSES = "a simulated GPU has no memory of its own: rehearse without this allocator"
NO_SOURCE = "a simulated GPU runs no CUDA source: rehearse with a function of PyTorch in its place"
ONE_PROCESS = "it moves tensors among the GPUs of one process: give each rank its own GPU, and use torch.distributed"
NO_PARTS = "a simulated GPU cannot be divided: rehearse without green contexts"
NO_STORAGE = "a simulated GPU has no storages: make a tensor"
NO_SPARSE_TYPES = "a simulated GPU has no sparse types: use torch.sparse_coo_tensor"
NO_TUNING = "a simulated GPU's matrix products cannot be timed: rehearse without tuning"
NO_FILES = "a simulated GPU reads no files by itself: rehearse with torch.load and torch.save"

# {name: reason} of what stops the script, with the reason as the rehearsal's last line.
REFUSED: dict[str, str] = {
    "CUDAGraph": NO_GRAPHS,
    "graph": NO_GRAPHS,
    "make_graphed_callables": NO_GRAPHS,
    "export_dot": NO_GRAPHS,
    "export_graph_data": NO_GRAPHS,
    "CUDAPluggableAllocator": NO_ADDRESSES,
    "change_current_allocator": NO_ADDRESSES,
    "caching_allocator_alloc": NO_ADDRESSES,
    "caching_allocator_delete": NO_ADDRESSES,
    "jiterator._create_jit_fn": NO_SOURCE,
    "jiterator._create_multi_output_jit_fn": NO_SOURCE,
    "_compile_kernel": NO_SOURCE,
    "comm.broadcast": ONE_PROCESS,
    "comm.broadcast_coalesced": ONE_PROCESS,
    "comm.reduce_add": ONE_PROCESS,
    "comm.reduce_add_coalesced": ONE_PROCESS,
    "comm.scatter": ONE_PROCESS,
    "comm.gather": ONE_PROCESS,
    "nccl.all_reduce": ONE_PROCESS,
    "nccl.reduce": ONE_PROCESS,
    "nccl.broadcast": ONE_PROCESS,
    "nccl.all_gather": ONE_PROCESS,
    "nccl.reduce_scatter": ONE_PROCESS,
    "nccl.init_rank": ONE_PROCESS,
    "nccl.unique_id": ONE_PROCESS,
    "GreenContext": NO_PARTS,
    "green_contexts.SMPartition": NO_PARTS,
    "green_contexts.get_num_locality_domains": NO_PARTS,
    "green_contexts.is_localization_supported": NO_PARTS,
    "BFloat16Storage": NO_STORAGE,
    "BoolStorage": NO_STORAGE,
    "ByteStorage": NO_STORAGE,
    "CharStorage": NO_STORAGE,
    "ComplexDoubleStorage": NO_STORAGE,
    "ComplexFloatStorage": NO_STORAGE,
    "DoubleStorage": NO_STORAGE,
    "FloatStorage": NO_STORAGE,
    "HalfStorage": NO_STORAGE,
    "IntStorage": NO_STORAGE,
    "LongStorage": NO_STORAGE,
    "ShortStorage": NO_STORAGE,
    "sparse.BFloat16Tensor": NO_SPARSE_TYPES,
    "sparse.ByteTensor": NO_SPARSE_TYPES,
    "sparse.CharTensor": NO_SPARSE_TYPES,
    "sparse.DoubleTensor": NO_SPARSE_TYPES,
    "sparse.FloatTensor": NO_SPARSE_TYPES,
    "sparse.HalfTensor": NO_SPARSE_TYPES,
    "sparse.IntTensor": NO_SPARSE_TYPES,
    "sparse.LongTensor": NO_SPARSE_TYPES,
    "sparse.ShortTensor": NO_SPARSE_TYPES,
    "tunable.tune_gemm_in_file": NO_TUNING,
    "tunable.mgpu_tune_gemm_in_file": NO_TUNING,
    "gds.GdsFile": NO_FILES,
    "gds.gds_register_buffer": NO_FILES,
    "gds.gds_deregister_buffer": NO_FILES,
}
