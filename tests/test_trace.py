"""How chapter 14 reads a GPU's trace: on a trace made by hand, as the profiler writes it with CUDA."""

import runpy

import pytest

from helpers.export import chapters

# The numbers of a GPU's two CUDA streams: PyTorch computes on the one, and NCCL communicates on the other.
COMPUTE_STREAM = 7
NCCL_STREAM = 20
CPU_PROCESS = 4242
STEP_MICROSECONDS = 1000
# Names of GPU kernels, as the profiler writes them.
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"


def span(category, name, start, duration, process, thread):
    """An event that lasts for some time, in the format of Chrome's traces. Times are in microseconds."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": duration,
        "pid": process,
        "tid": thread,
        "args": {},
    }


def events_on_cpu(step, begin):
    """What the CPU does in a step: it launches all work of the GPU in the step's first 90 us.

    The names of these events are also in the trace of a program that has no GPU.
    """

    def on_cpu(category, name, start, duration):
        return span(category, name, begin + start, duration, CPU_PROCESS, thread=CPU_PROCESS)

    return [
        on_cpu("user_annotation", f"ProfilerStep#{step}", 0, STEP_MICROSECONDS),
        on_cpu("cpu_op", "aten::addmm", 10, 30),
        on_cpu("cuda_runtime", "cudaLaunchKernel", 20, 5),
        on_cpu("user_annotation", "nccl:all_reduce", 50, 40),
    ]


def events_on_gpu(step, begin, gpu):
    """What a GPU does in a step: kernels compute at 100-500 and 700-900 us, an all-reduce runs at 400-800 us.

    So half of the all-reduce overlaps with kernels that compute.
    """

    def on_gpu(category, name, start, duration, stream=COMPUTE_STREAM):
        return span(category, name, begin + start, duration, gpu, thread=stream)

    return [
        on_gpu("gpu_user_annotation", f"ProfilerStep#{step}", 100, 800),
        on_gpu("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 60, 20),
        on_gpu("kernel", "ampere_sgemm_128x64_tn", 100, 300),
        on_gpu("kernel", ELEMENTWISE, 400, 100),
        on_gpu("kernel", ALL_REDUCE, 400, 400, stream=NCCL_STREAM),
        on_gpu("kernel", "ampere_sgemm_128x64_nn", 700, 200),
    ]


def arrow_from_launch_to_kernel(step, begin, gpu):
    """The arrow that a viewer draws from the launch on the CPU to the kernel on the GPU: its start and its end."""
    arrow = {"id": step, "cat": "ac2g", "name": "ac2g"}  # from an asynchronous CPU call to the GPU
    return [
        {**arrow, "ph": "s", "pid": CPU_PROCESS, "tid": CPU_PROCESS, "ts": begin + 20},
        {**arrow, "ph": "f", "pid": gpu, "tid": COMPUTE_STREAM, "ts": begin + 100, "bp": "e"},
    ]


def trace(gpu, clock_offset=0.0):
    """The trace of a rank that runs two steps on a GPU. The rank's clock is ``clock_offset`` microseconds ahead."""
    process_name = {
        "ph": "M",
        "name": "process_name",
        "pid": gpu,
        "tid": 0,
        "ts": clock_offset,
        "args": {"name": "python"},
    }
    whole_recording = span("Trace", "PyTorch Profiler (0)", clock_offset, 2100, "Spans", "PyTorch Profiler")
    events = [process_name, whole_recording]
    for step in range(2):
        begin = clock_offset + 50 + STEP_MICROSECONDS * step
        events += events_on_cpu(step, begin)
        events += events_on_gpu(step, begin, gpu)
        events += arrow_from_launch_to_kernel(step, begin, gpu)
    return {"deviceProperties": [{"id": gpu, "name": "GPU"}], "traceEvents": events}


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The functions of chapter 14's script."""
    [script] = chapters.export("14", tmp_path_factory.mktemp("script"))
    return runpy.run_path(str(script))


def test_kernels_and_nothing_else_are_compute_and_communication(chapter):
    expected = {
        "steps": 2,
        "step": 1,  # milliseconds, as the following times
        "compute": 0.6,  # 400 and 200 us
        "communication": 0.4,
        "overlap": 0.5,  # half of the communication
        "waiting": 0.2,
        "own": 0.8,
    }
    assert chapter["summary"](trace(gpu=0)) == pytest.approx(expected)


def test_ranks_are_merged_on_one_clock(chapter):
    """The clocks of two ranks differ by seven seconds. In the merged trace, they say the same of the same event."""
    traces = [trace(gpu=0), trace(gpu=1, clock_offset=7_000_000.0)]
    merged = chapter["merge_traces"](traces)["traceEvents"]

    for name in ["ncclDevKernel", "ampere_sgemm_128x64_tn", "ProfilerStep#1"]:
        times_by_rank = {0: [], 1: []}
        for event in merged:
            if event["ph"] == "X" and event["name"].startswith(name):
                rank = event["pid"] // 1000  # the merged trace numbers the processes of rank 1 from 1000 on
                times_by_rank[rank].append(event["ts"])
        assert times_by_rank[0] != []
        assert sorted(times_by_rank[0]) == pytest.approx(sorted(times_by_rank[1]))

    ids_of_arrows = [event["id"] for event in merged if event["ph"] == "s"]
    assert len(ids_of_arrows) == 4
    assert len(set(ids_of_arrows)) == 4, "an arrow of one rank may not lead to the other"
