"""The backend of a call's ranks: gloo on CPUs, or NCCL where each rank has a GPU."""

import os
from collections.abc import Mapping
from multiprocessing import connection

from helpers.ranks.messages import LaunchError

BACKENDS = ("gloo", "nccl", "auto")
COUNT_WITHIN = 60  # seconds for a process to say how many GPUs there are


def send_count(pipe: connection.Connection, environment: Mapping[str, str]) -> None:
    """Count the GPUs that a rank with these environment variables sees, and send the number through the pipe.

    This has to run in a process of its own, neither in the notebook's kernel nor in its forkserver: PyTorch counts GPUs
    through NVML, but where NVML does not answer, as with MIG, PyTorch initializes CUDA, and after that no fork of the
    process can use CUDA.
    """
    os.environ.clear()
    os.environ.update(environment)
    import torch

    pipe.send(torch.cuda.device_count())


def choose_backend(backend: str, nproc: int, gpus: int) -> str:
    """Which backend ``nproc`` ranks get on a machine with so many GPUs, if ``backend`` was asked for: "gloo" or "nccl".

    "auto" is NCCL where each rank has a GPU of its own, otherwise gloo. Raises LaunchError for "nccl" where a rank
    would have no GPU of its own.
    """
    if backend == "gloo":
        return "gloo"
    if gpus >= nproc:
        return "nccl"
    if backend == "auto":
        return "gloo"
    if gpus == 0:
        raise LaunchError(
            "backend='nccl' needs a GPU for each rank, and PyTorch sees no GPU on this machine.\n"
            "Use backend='gloo', which runs on CPUs. If there is a GPU: torch.version.cuda is None in a build for CPUs."
        )
    raise LaunchError(
        f"backend='nccl' needs a GPU for each rank: nproc={nproc}, and PyTorch sees {gpus}.\n"
        f"Try nproc={gpus}, or backend='gloo'. CUDA_VISIBLE_DEVICES may hide GPUs."
    )
