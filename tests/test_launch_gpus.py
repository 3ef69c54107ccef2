"""``launch`` on GPUs: the backend that it chooses, what each rank's torch is told, and who may ask CUDA.

No GPU is needed: the forkserver of a script here gives its ranks two pretended ones, on which gloo stands for NCCL.
tools/launch_on_gpus.py checks the same on real ones.
"""

import json
import os
import subprocess
import sys
import textwrap
import warnings

import leftovers
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from launching import failure, nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks import launch as launching_module
from helpers.ranks.collecting import innermost
from helpers.ranks.gpus import choose_backend
from helpers.ranks.launch import LaunchError, launch

pytestmark = pytest.mark.ranks

# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "nproc", "gpus", "chosen"),
    [
        ("gloo", 2, 8, "gloo"),
        ("nccl", 2, 2, "nccl"),
        ("nccl", 1, 8, "nccl"),
        ("auto", 2, 2, "nccl"),
        ("auto", 3, 2, "gloo"),
        ("auto", 1, 0, "gloo"),
    ],
)
def test_a_rank_has_a_gpu_or_gloo(backend, nproc, gpus, chosen):
    assert choose_backend(backend, nproc, gpus) == chosen


@pytest.mark.parametrize(
    ("nproc", "gpus", "said"),
    [
        (4, 2, ["nproc=4, and PyTorch sees 2.", "Try nproc=2, or backend='gloo'."]),
        (1, 0, ["PyTorch sees no GPU on this machine.", "Use backend='gloo', which runs on CPUs."]),
    ],
)
def test_fewer_gpus_than_ranks_are_refused_with_what_to_do(monkeypatch, nproc, gpus, said):
    monkeypatch.setattr(launching_module, "count_gpus", lambda environment: gpus)
    monkeypatch.setattr(launching_module, "results", lambda *_: pytest.fail("a rank was started"))
    with pytest.raises(LaunchError) as refusal:
        launch(dist.get_rank, nproc=nproc, backend="nccl")
    lines = str(refusal.value).splitlines()
    assert len(lines) == 2 and all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.parametrize("backend", ["mpi", "NCCL", None, "cpu:gloo,cuda:nccl"])
def test_an_unknown_backend_is_refused(backend):
    with pytest.raises(LaunchError, match="is not a backend of launch.\nUse 'gloo'"):
        launch(dist.get_rank, nproc=2, backend=backend)


def test_gpus_are_counted_only_for_nccl_and_with_the_ranks_variables(monkeypatch):
    counted = []

    def count(environment):
        counted.append(environment["CUDA_VISIBLE_DEVICES"])
        return 0

    monkeypatch.setattr(launching_module, "count_gpus", count)
    assert launch(dist.get_backend, nproc=2, env={"CUDA_VISIBLE_DEVICES": "1"}) == ["gloo"] * 2
    assert counted == []
    assert launch(dist.get_backend, nproc=1, env={"CUDA_VISIBLE_DEVICES": "1"}, backend="auto") == ["gloo"]
    assert counted == ["1"]


# --- who may ask CUDA -------------------------------------------------------------------------------------------------


def test_a_process_of_its_own_counts_the_gpus(monkeypatch):
    """Where NVML does not answer, a count starts CUDA, and no fork of the process that counted can use it."""

    def refuse(*_):
        raise AssertionError("the kernel has asked CUDA")

    for name in ("device_count", "is_available", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    expected = "gloo"
    if subprocess.run([sys.executable, "-c", "import torch; assert torch.cuda.device_count()"]).returncode == 0:
        expected = "nccl"
    assert launch(dist.get_backend, nproc=1, backend="auto") == [expected]


def test_a_count_without_an_answer_is_refused(monkeypatch):
    monkeypatch.setattr(launching_module, "send_count", os._exit)
    with pytest.raises(LaunchError, match="ended without an answer.\nTry: python -c"):
        launch(dist.get_rank, nproc=1, backend="auto")


def test_a_caller_that_has_used_cuda_can_start_ranks():
    """Its own forks could not use CUDA; its ranks are forks of the forkserver, which has not asked CUDA anything."""
    torch.cuda.is_available()
    if torch.version.cuda is not None:  # a build for CPUs has nothing to start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, from Python 3.12 on
            child = os.fork()
        if child == 0:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert launch(torch.cuda._is_in_bad_fork, nproc=2) == [False, False]


def test_the_forkserver_imports_nothing_that_asks_cuda(tmp_path):
    source = """
        import torch

        asked = []
        for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
            setattr(torch.cuda, name, lambda *_, name=name: asked.append(name) or 0)
        assert torch.cuda.device_count() == 0 and asked == ["device_count"]
        import helpers.ranks.preload

        print(asked, flush=True)  # before preload's own end of this process
    """
    environment = {**os.environ, "WORLD_SIZE_ONE_FOLDER": str(tmp_path / "none")}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "['device_count']\n"


# --- on pretended GPUs ------------------------------------------------------------------------------------------------


START = """
import json, os, queue, signal
import torch
import torch.distributed as dist
from helpers.ranks import launch as module
from helpers.ranks.launch import RankError, launch

preload = module.context.set_forkserver_preload
module.context.set_forkserver_preload = lambda names: preload([*names, "pretended_gpus"])
"""


def on_two_gpus(body):
    """What a script prints as JSON, whose ranks have two pretended GPUs."""
    with leftovers.surroundings() as environment:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        environment["TORCH_DIST_USE_NCCL2"] = "0"  # the pretended NCCL is the one of before PyTorch 2.15
        command = [sys.executable, "-c", START + textwrap.dedent(body)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_each_rank_has_its_gpu_as_under_torchrun():
    """NCCL makes the communicator on the bound GPU, and refuses two ranks on one and tensors of another."""
    answers = on_two_gpus("""
        def work(rank, size):
            x = torch.full((2,), rank + 1.0, device="cuda")  # the current device
            dist.all_reduce(x)
            group = str(dist.group.WORLD.bound_device_id), dist.get_backend()
            return x.tolist(), str(x.device), torch.cuda.current_device(), os.environ["LOCAL_RANK"], *group

        def where():
            return dist.get_backend(), torch.cuda.is_initialized(), dist.group.WORLD.bound_device_id

        both = launch(work, nproc=2, backend="nccl"), launch(work, nproc=2, backend="auto")
        print(json.dumps([*both, launch(where, nproc=3, backend="auto"), launch(where, nproc=1)]))
    """)
    ranks = [[[3.0, 3.0], f"cuda:{rank}", rank, str(rank), f"cuda:{rank}", "nccl"] for rank in range(2)]
    assert answers == [ranks, ranks, [["gloo", False, None]] * 3, [["gloo", False, None]]]


def test_a_functions_own_start_on_its_gpu_is_accepted():
    answers = on_two_gpus("""
        def main(rank, size):
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
            dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
            dist.all_reduce(total := torch.ones(1, device=device))
            dist.destroy_process_group()
            dist.init_process_group("cpu:gloo,cuda:nccl")
            return total.item(), dist.get_backend()

        print(json.dumps(launch(main, nproc=2, backend="nccl")))
    """)
    assert answers == [[2.0, "nccl"]] * 2


def test_failures_on_gpus_end_as_on_gloo():
    cpu, other, killed, hang, at_end, after = on_two_gpus("""
        def message(fn, **options):
            try:
                launch(fn, nproc=2, backend="nccl", **options)
            except RankError as error:
                return str(error)

        def cpu_tensor():
            dist.all_reduce(torch.ones(1))

        def other_backend():
            dist.init_process_group("gloo")

        def kill():
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        def hang():
            if dist.get_rank() == 0:
                dist.barrier()

        def leave_work(rank):
            if rank == 1:
                torch.cuda.synchronize = queue.Queue().get  # which waits for ever, and is no line of this test

        failures = [message(cpu_tensor), message(other_backend), message(kill), message(hang, timeout=5)]
        failures.append(message(leave_work, timeout=8))  # a busy machine takes long to get there
        print(json.dumps([*failures, launch(dist.get_rank, nproc=2, backend="nccl")]))
    """)
    assert cpu.startswith("ranks 0-1 failed: RuntimeError: No backend type associated with device type cpu")
    assert "whose group has backend='nccl': leave backend out" in other
    assert killed.startswith("rank 1 died first: killed by SIGKILL")
    assert "still ran after timeout=5 s:\n  rank 0: at line " in hang and hang.endswith("rank 1: finished")
    assert at_end.startswith(
        "1 of 2 ranks still ran after timeout=8 s:\n  rank 0: finished\n  rank 1: at its end, waiting"
    )
    assert after == [0, 1]


def test_a_wait_for_the_gpu_is_told_from_a_line_of_the_readers():
    ours = f'  File "{launching_module.__file__}", line 9 in '
    assert innermost(f"{ours}wait_for_gpu\n{ours}run\n").startswith("its end, waiting for its GPU")
    theirs = '  File "/x/mine.py", line 3 in wait_for_gpu\n'
    assert innermost(theirs).startswith("line 3 of wait_for_gpu in mine.py")
    forkservers = '  File "<string>", line 1 in <module>\n'
    assert innermost(f"{ours}run\n{ours}rank_main\n{forkservers}") == "no line of its own code"


def test_the_message_about_nccl_on_gloo_names_the_launch_that_works():
    error = failure(lambda: dist.init_process_group("nccl"), nproc=2)
    assert "leave backend out, or start the ranks with launch(..., backend='nccl')." in str(error)
