"""``launch`` on GPUs: the backend that it chooses, what each rank's torch is told, and who may ask CUDA.

No GPU is needed: the forkserver of a script here gives its ranks two simulated ones, on which gloo stands for NCCL.
tools/launch_on_gpus.py checks the same on real ones.
"""

import json
import os
import subprocess
import sys
import textwrap

import leftovers
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from launching import nothing_left, warmed_up  # noqa: F401  (fixtures)

from helpers.ranks import launch as launching_module
from helpers.ranks.gpus import choose_backend
from helpers.ranks.launch import LaunchError, launch

pytestmark = pytest.mark.ranks

# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "nproc", "gpus", "chosen"),
    [
        ("gloo", 2, 8, "gloo"),
        ("nccl", 2, 2, "nccl"),
        ("auto", 2, 2, "nccl"),
        ("auto", 3, 2, "gloo"),
    ],
)
def test_a_rank_has_a_gpu_or_gloo(backend, nproc, gpus, chosen):
    assert choose_backend(backend, nproc, gpus) == chosen


@pytest.mark.parametrize(
    ("nproc", "gpus", "what", "advice"),
    [
        (4, 2, "nproc=4, and PyTorch sees 2.", "Try nproc=2, or backend='gloo'."),
        (1, 0, "PyTorch sees no GPU on this machine.", "Use backend='gloo', which runs on CPUs."),
    ],
)
def test_fewer_gpus_than_ranks_are_refused_with_what_to_do(nproc, gpus, what, advice):
    with pytest.raises(LaunchError) as raised:
        choose_backend("nccl", nproc, gpus)
    first_line, second_line = str(raised.value).splitlines()
    assert what in first_line
    assert advice in second_line


# --- who may ask CUDA -------------------------------------------------------------------------------------------------


def test_a_process_of_its_own_counts_the_gpus(monkeypatch):
    """Where NVML does not answer, a count starts CUDA, and no fork of the process that counted can use it."""

    def refuse_to_answer(*_):
        raise AssertionError("the kernel has asked CUDA")

    for name in ("device_count", "is_available", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse_to_answer)
    assert launch(dist.get_backend, nproc=1, backend="auto") == ["gloo"]  # conftest.py hides this machine's GPUs


def test_a_count_without_an_answer_is_refused(monkeypatch):
    """The process that should count the GPUs and send their number ends instead."""
    monkeypatch.setattr(launching_module, "send_count", os._exit)
    with pytest.raises(LaunchError, match="ended without an answer.\nTry: python -c"):
        launch(dist.get_rank, nproc=1, backend="auto")


def test_the_forkserver_imports_nothing_that_asks_cuda(tmp_path):
    """It imports helpers.ranks.preload. Here torch's functions that ask CUDA note their names when they are called."""
    source = """
        import torch

        asked = []

        def noting(name):
            def note(*_):
                asked.append(name)
                return 0

            return note

        for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
            setattr(torch.cuda, name, noting(name))
        assert torch.cuda.device_count() == 0
        assert asked == ["device_count"]
        import helpers.ranks.preload

        print(asked, flush=True)  # before preload's own end of this process
    """
    environment = {**os.environ, "WORLD_SIZE_ONE_FOLDER": str(tmp_path / "none")}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "['device_count']\n"


# --- on simulated GPUs ------------------------------------------------------------------------------------------------


SCRIPT = """
import json, os, queue, signal
import torch
import torch.distributed as dist
from helpers.ranks import launch as module
from helpers.ranks.launch import RankError, launch

preload = module.context.set_forkserver_preload

def preload_with_simulated_gpus(names):
    preload([*names, "simulated_gpus"])

module.context.set_forkserver_preload = preload_with_simulated_gpus

def look(rank, size):
    x = torch.full((2,), rank + 1.0, device="cuda")  # the current device
    dist.all_reduce(x)
    return {
        "sum": x.tolist(),
        "device": str(x.device),
        "current device": torch.cuda.current_device(),
        "LOCAL_RANK": os.environ["LOCAL_RANK"],
        "bound device": str(dist.group.WORLD.bound_device_id),
        "backend": dist.get_backend(),
    }

def look_on_gloo():
    return {
        "backend": dist.get_backend(),
        "cuda is initialized": torch.cuda.is_initialized(),
        "bound device": dist.group.WORLD.bound_device_id,
    }

def start_own_group(rank, size):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return total.item(), dist.get_backend()

def reduce_cpu_tensor():
    dist.all_reduce(torch.ones(1))

def ask_for_gloo():
    dist.init_process_group("gloo")

def die():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def leave_work(rank):
    if rank == 1:
        # A call that waits for ever, in place of the wait for the GPU at the rank's end.
        torch.cuda.synchronize = queue.Queue().get

def message(fn, timeout=600):
    try:
        launch(fn, nproc=2, backend="nccl", timeout=timeout)
    except RankError as error:
        return str(error)

print(json.dumps({
    "nccl": launch(look, nproc=2, backend="nccl"),
    "auto": launch(look, nproc=2, backend="auto"),
    "more ranks than GPUs": launch(look_on_gloo, nproc=3, backend="auto"),
    "own group": launch(start_own_group, nproc=2, backend="nccl"),
    "CPU tensor": message(reduce_cpu_tensor),
    "other backend": message(ask_for_gloo),
    "killed": message(die),
    "hang at the end": message(leave_work, timeout=8),
    "afterwards": launch(dist.get_rank, nproc=2, backend="nccl"),
}))
"""


@pytest.fixture(scope="module")
def answers():
    """What SCRIPT prints: the result of each of its launches, by its name. The ranks have two simulated GPUs."""
    with leftovers.surroundings() as environment:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        environment["TORCH_DIST_USE_NCCL2"] = "0"  # the simulated NCCL is the one of before PyTorch 2.15
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
        )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_each_rank_has_its_gpu_as_under_torchrun(answers):
    """NCCL makes the communicator on the bound GPU, and refuses two ranks on one and tensors of another."""
    for rank in range(2):
        expected = {
            "sum": [3.0, 3.0],
            "device": f"cuda:{rank}",
            "current device": rank,
            "LOCAL_RANK": str(rank),
            "bound device": f"cuda:{rank}",
            "backend": "nccl",
        }
        assert answers["nccl"][rank] == expected
        assert answers["auto"][rank] == expected


def test_more_ranks_than_gpus_use_none(answers):
    without_gpu = {"backend": "gloo", "cuda is initialized": False, "bound device": None}
    assert answers["more ranks than GPUs"] == [without_gpu] * 3


def test_a_functions_own_start_on_its_gpu_is_accepted(answers):
    assert answers["own group"] == [[2.0, "nccl"]] * 2


def test_failures_on_gpus_end_as_on_gloo(answers):
    assert answers["CPU tensor"].startswith(
        "ranks 0-1 failed: RuntimeError: No backend type associated with device type cpu"
    )
    assert "whose group has backend='nccl': leave backend out" in answers["other backend"]
    assert answers["killed"].startswith("rank 1 died first: killed by SIGKILL")
    assert answers["hang at the end"].startswith(
        "1 of 2 ranks still ran after timeout=8 s:\n  rank 0: finished\n  rank 1: at its end, waiting"
    )
    assert answers["afterwards"] == [0, 1]
