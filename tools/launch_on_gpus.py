"""Check ``launch`` on this machine's GPUs, one rank on each: results, errors, hangs, kills, and what is left behind.

    python tools/launch_on_gpus.py

It prints a line for each check, and ends with 1 if one fails, or with 2 where there is no GPU. It takes about a minute.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (after the path)
import torch.distributed as dist  # noqa: E402

from helpers.ranks.launch import RankError, count_gpus, launch, warm  # noqa: E402

TIMEOUT = 20  # seconds of a call that hangs on purpose
SLACK = 200 << 20  # bytes of a GPU that other programs may take or free between two looks


def use_gpu_and_nccl(rank: int) -> str:
    """In a rank: check that it uses the GPU of its own number, and that NCCL adds up a tensor over all ranks.

    Raises AssertionError if not. Returns the GPU's name.
    """
    world_size = dist.get_world_size()
    device = torch.device("cuda", rank)
    assert int(os.environ["LOCAL_RANK"]) == rank
    assert torch.cuda.current_device() == rank
    group = dist.group.WORLD
    assert group is not None and group.bound_device_id == device
    assert dist.get_backend() == "nccl"
    tensor = torch.full((1024,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    one_to_world_size = range(1, world_size + 1)
    expected = torch.full((1024,), float(sum(one_to_world_size)))
    assert torch.equal(tensor.cpu(), expected)
    return torch.cuda.get_device_name(device)


def raise_an_error() -> None:
    """In a rank: the last rank raises while its peers wait for it on their GPUs."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("no data")
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def raise_on_the_gpu() -> None:
    """In a rank: start a kernel that fails after this function has returned, because its index is out of bounds."""
    index = torch.full((1,), 10, device="cuda")
    torch.zeros(2, device="cuda")[index]


def hang() -> None:
    """In a rank: the GPU of rank 0 is busy for longer than the call's timeout, and its peers wait for it."""
    if dist.get_rank() == 0:
        torch.cuda._sleep(10**12)  # clock cycles: some ten minutes
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


def be_killed() -> None:
    """In a rank: the last rank takes a gigabyte of its GPU, and is killed."""
    memory = torch.ones(1 << 28, device="cuda")  # numbers of four bytes
    torch.cuda.synchronize()
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(memory)
    torch.cuda.synchronize()


def free_bytes() -> list[int]:
    """In one rank without a peer: the free memory of each GPU."""
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]


def device_of(tensor: torch.Tensor) -> str:
    """In a rank: the device on which a tensor of the caller has arrived, such as "cuda:0"."""
    return str(tensor.device)


def message_of_failure(fn: Callable[[], None], nproc: int, timeout: float = 120) -> str:
    """Launch a function that has to fail, with NCCL; return the message of the RankError.

    Raises AssertionError if the launch does not fail.
    """
    try:
        launch(fn, nproc=nproc, timeout=timeout, backend="nccl")
    except RankError as error:
        return str(error)
    raise AssertionError(f"{fn.__name__} ended without an error")


def check_results(gpus: int) -> str:
    """Ranks compute on their own GPUs, whether NCCL is asked for or chosen by "auto"."""
    names = launch(use_gpu_and_nccl, nproc=gpus, backend="nccl")
    assert launch(use_gpu_and_nccl, nproc=gpus, backend="auto") == names
    return f"{gpus} x {names[0]}"


def check_error(gpus: int) -> str:
    """An exception on one rank is reported although its peers wait for it on their GPUs."""
    message = message_of_failure(raise_an_error, nproc=gpus)
    assert message.startswith(f"rank {gpus - 1} failed"), message
    assert "ValueError: no data" in message, message
    return message


def check_error_on_the_gpu(gpus: int) -> str:
    """An error of a kernel is reported although the function that started it has returned before."""
    message = message_of_failure(raise_on_the_gpu, nproc=gpus)
    assert "device-side assert" in message, message
    return message


def check_hang(gpus: int) -> str:
    """Ranks whose GPUs are busy are ended soon after the call's timeout."""
    start = time.monotonic()
    message = message_of_failure(hang, nproc=gpus, timeout=TIMEOUT)
    assert f"still ran after timeout={TIMEOUT} s" in message, message
    assert time.monotonic() - start < TIMEOUT + 60
    return message


def check_kill(gpus: int) -> str:
    """A rank that is killed is reported, and all memory that the ranks held on the GPUs is free again."""
    [free_before] = launch(free_bytes, nproc=1, backend="nccl")
    message = message_of_failure(be_killed, nproc=gpus)
    assert message.startswith(f"rank {gpus - 1} died"), message
    [free_after] = launch(free_bytes, nproc=1, backend="nccl")
    for before, after in zip(free_before, free_after, strict=True):
        lost = before - after
        assert lost < SLACK, f"{lost} bytes of a GPU are not free again"
    return f"{message}; no process is left on a GPU"


def check_caller_that_has_used_cuda(gpus: int) -> str:
    """Ranks start, and get a tensor of the caller's GPU, although the caller has used CUDA.

    A fork of a process that has used CUDA cannot use CUDA itself. So ranks that were forks of the caller would fail.
    """
    tensor_of_caller = torch.ones(1, device="cuda")
    launch(use_gpu_and_nccl, nproc=gpus, backend="nccl")
    [device_in_rank] = launch(device_of, tensor_of_caller, nproc=1, backend="nccl")
    assert device_in_rank == "cuda:0"
    return "ranks start although this process has used CUDA, and a tensor of cuda:0 arrives on cuda:0"


# {name: a function that takes the number of GPUs, raises AssertionError if the check fails, and returns what to print}
CHECKS: dict[str, Callable[[int], str]] = {
    "results": check_results,
    "error": check_error,
    "error on the GPU": check_error_on_the_gpu,
    "hang": check_hang,
    "killed rank": check_kill,
    "caller with CUDA": check_caller_that_has_used_cuda,  # the last one, because CUDA stays in this process
}


def main() -> int:
    """Run all checks, and print a line for each; return the exit status: 0, or 1 if one failed, or 2 without a GPU."""
    warm()  # starts the process from which `launch` forks ranks
    gpus = count_gpus(dict(os.environ))
    if gpus == 0:
        print("nothing was checked: this machine has no GPU that PyTorch can use")
        return 2
    failed = 0
    for name, check in CHECKS.items():
        try:
            outcome = check(gpus).replace("\n", " ")
            print(f"ok      {name}: {outcome}", flush=True)
        except Exception as error:  # whatever went wrong, the other checks are run all the same
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failed > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
