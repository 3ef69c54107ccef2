"""How chapter 14 reads a GPU's trace: on a trace made by hand, as the profiler writes it with CUDA."""

import runpy

import pytest

from helpers.export import chapters

COMPUTE, NCCL = 7, 20  # streams
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)"


def complete(cat, name, ts, dur, pid, tid):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": {}}


def step_of_a_gpu(number, begin, gpu):
    """A step of 1000 us: kernels at 100-500 and 700-900, an all-reduce at 400-800, which they hide by half.

    The CPU is ahead: it launches everything in the step's first 90 us, under names that a CPU's trace has too.
    """
    arrow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    return [
        complete("user_annotation", f"ProfilerStep#{number}", begin, 1000, 4242, 4242),
        complete("gpu_user_annotation", f"ProfilerStep#{number}", begin + 100, 800, gpu, COMPUTE),
        complete("cpu_op", "aten::addmm", begin + 10, 30, 4242, 4242),
        complete("cuda_runtime", "cudaLaunchKernel", begin + 20, 5, 4242, 4242),
        complete("user_annotation", "nccl:all_reduce", begin + 50, 40, 4242, 4242),
        {**arrow, "ph": "s", "pid": 4242, "tid": 4242, "ts": begin + 20},
        {**arrow, "ph": "f", "pid": gpu, "tid": COMPUTE, "ts": begin + 100, "bp": "e"},
        complete("kernel", "ampere_sgemm_128x64_tn", begin + 100, 300, gpu, COMPUTE),
        complete("kernel", KERNEL, begin + 400, 100, gpu, COMPUTE),
        complete("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", begin + 60, 20, gpu, COMPUTE),
        complete("kernel", ALL_REDUCE, begin + 400, 400, gpu, NCCL),
        complete("kernel", "ampere_sgemm_128x64_nn", begin + 700, 200, gpu, COMPUTE),
    ]


def trace(gpu, ahead=0.0):
    """A rank's trace of two steps on a GPU, by a clock that is ``ahead`` us ahead."""
    names = {"ph": "M", "name": "process_name", "pid": gpu, "tid": 0, "ts": ahead, "args": {"name": "python"}}
    spans = complete("Trace", "PyTorch Profiler (0)", ahead, 2100, "Spans", "PyTorch Profiler")
    events = [event for number in (0, 1) for event in step_of_a_gpu(number, ahead + 50 + 1000 * number, gpu)]
    return {"deviceProperties": [{"id": gpu, "name": "GPU"}], "traceEvents": [names, spans, *events]}


@pytest.fixture(scope="module")
def chapter(tmp_path_factory):
    """The functions of chapter 14's script."""
    [script] = chapters.export("14", tmp_path_factory.mktemp("script"))
    return runpy.run_path(str(script))


def test_kernels_and_nothing_else_are_compute_and_communication(chapter):
    summary = chapter["summary"](trace(0))
    expected = {"steps": 2, "step": 1, "compute": 0.6, "communication": 0.4, "overlap": 0.5, "waiting": 0.2, "own": 0.8}
    assert summary == pytest.approx(expected)


def test_ranks_are_merged_on_one_clock(chapter):
    traces = [trace(0), trace(1, ahead=7_000_000.0)]
    merged = chapter["merge_traces"](traces)["traceEvents"]
    for name in ("ncclDevKernel", "ampere_sgemm_128x64_tn", "ProfilerStep#1"):
        events = [event for event in merged if event["name"].startswith(name) and event["ph"] == "X"]
        times = {0: [], 1: []}
        for event in events:
            times[event["pid"] // 1000].append(event["ts"])
        assert times[0] and sorted(times[0]) == pytest.approx(sorted(times[1]))
    arrows = [event["id"] for event in merged if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) == 4
