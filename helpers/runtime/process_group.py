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

    torchrun tells each rank its number and where the others are. Without torchrun
    this process is a group of one. A group that is already running is kept.
    ``backend`` defaults to NCCL if there is a GPU, and to gloo otherwise. Raises
    RuntimeError if NCCL is asked for and there is no GPU for this rank, and if srun or
    mpirun has started several processes that do not know of each other.
    """
    if dist.is_initialized():
        if "nccl" in dist.get_backend_config():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not backend:  # None, or the empty default of a flag
        backend = "nccl" if gpus > 0 else "gloo"
    launched = "RANK" in os.environ  # by torchrun
    if not launched:
        # How many tasks srun, Open MPI or another MPI has started
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if int(os.environ.get(name, 1)) > 1:
                raise RuntimeError(
                    "Several tasks were started without torchrun: each would train "
                    f"alone ({name} is {os.environ[name]}).\n"
                    "Start one torchrun on each node."
                )
    device = None  # stays None on CPUs
    if "nccl" in backend:  # "cpu:gloo,cuda:nccl" too
        local_rank = int(os.environ["LOCAL_RANK"]) if launched else 0
        if local_rank >= gpus:
            raise RuntimeError(
                f"Local rank {local_rank} on {os.uname().nodename} sees {gpus} GPUs.\n"
                "Start one rank per GPU, and let each rank see all GPUs of its node "
                "(no --gpus-per-task). On CPUs: --backend gloo."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if launched:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        # A store in this process's memory opens no port that others could connect to.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device
        )
    print0(f"{dist.get_world_size()} rank(s), {backend} on {device or 'cpu'}")
    return device or torch.device("cpu")


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
