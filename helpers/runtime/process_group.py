"""The default process group, started and stopped by the same calls everywhere."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def start_process_group(
    backend: str | None = None, timeout: timedelta = timedelta(minutes=10)
) -> torch.device:
    """Start the default process group, and return this rank's GPU, or the CPU.

    torchrun tells each rank its number and where the others are. A process that was
    started without torchrun becomes a group of one rank. A group that is already
    running is kept. The default backend is NCCL if there are GPUs, and gloo otherwise.
    """
    if dist.is_initialized():
        if "nccl" in dist.get_backend_config():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    if not backend:  # None, or the empty default of a flag
        backend = "gloo"
        if torch.cuda.device_count() > 0:
            backend = "nccl"

    device = torch.device("cpu")
    device_id = None  # only a GPU has one
    if "nccl" in backend:  # "cpu:gloo,cuda:nccl" too
        device = gpu_of_this_rank()
        device_id = device
        torch.cuda.set_device(device)

    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        check_single_task()
        # A store in this process's memory opens no port that others could connect to.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id
        )
    print0(f"{dist.get_world_size()} rank(s), {backend} on {device}")
    return device


def gpu_of_this_rank() -> torch.device:
    """The GPU whose number is this rank's number on its node."""
    local_rank = 0
    if "RANK" in os.environ:
        if "LOCAL_RANK" not in os.environ:
            raise RuntimeError(
                "RANK is set, but LOCAL_RANK is not.\n"
                "Start the script with torchrun, which sets both."
            )
        local_rank = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise RuntimeError(
            f"Local rank {local_rank} on {os.uname().nodename} sees {gpus} GPUs.\n"
            "Start one rank per GPU, and let each rank see all GPUs of its node "
            "(no --gpus-per-task=1). On CPUs: --backend gloo."
        )
    return torch.device("cuda", local_rank)


def check_single_task() -> None:
    """Raise RuntimeError if srun or mpirun has started several ranks by itself."""
    # Slurm, Open MPI and other MPIs say in these variables how many tasks they started.
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = int(os.environ.get(name, 1))
        if tasks > 1:
            raise RuntimeError(
                "Several tasks were started without torchrun: each would train "
                f"alone ({name} is {tasks}).\n"
                "Start one torchrun on each node."
            )


def stop_process_group() -> None:
    """End the default group, if one is running."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        # Without this pause, the next line can hang after DDP's last collective
        # (pytorch#190489).
        time.sleep(0.1)
    dist.destroy_process_group()


def print0(*args: object) -> None:
    """Print on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, flush=True)
