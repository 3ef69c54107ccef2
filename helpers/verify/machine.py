"""This machine's GPUs, driver and versions, and whether they allow a run on GPUs.

``python machine.py`` prints them as JSON. It is a process of its own, so that the command never holds a GPU.
"""

import json
import os
import platform
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Machine:
    """The GPUs of a machine, by the names of their models, and the versions of its programs."""

    gpus: list[str]  # such as ["NVIDIA H200", "NVIDIA H200"]
    driver: str  # version of NVIDIA's driver, or "" if nvidia-smi fails
    torch: str
    cuda: str
    nccl: str
    python: str
    error: str = ""  # what torch says if it cannot use GPUs

    def __str__(self) -> str:
        """In a line, ``8 x NVIDIA H100 80GB HBM3; driver 570.86, PyTorch …``, with a plus between different models."""
        models = []
        for name, count in Counter(self.gpus).items():
            models.append(f"{count} x {name}")
        versions = [
            f"driver {self.driver or 'none'}",
            f"PyTorch {self.torch}",
            f"CUDA {self.cuda}",
            f"NCCL {self.nccl}",
            f"Python {self.python}",
        ]
        return f"{' + '.join(models)}; {', '.join(versions)}"


def examine() -> Machine:
    """Ask torch and nvidia-smi what this machine has."""
    import torch

    error = ""
    nccl = ""
    gpus: list[str] = []
    try:
        torch.cuda.init()
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        nccl_version = torch.cuda.nccl.version()  # such as (2, 28, 3)
        nccl = ".".join(map(str, nccl_version))
        if torch.version.cuda == "simulated":
            nccl = "simulated"  # A rehearsal on PyTorch's build for CPUs has neither CUDA nor NCCL.
    except (RuntimeError, AssertionError) as problem:  # AssertionError comes from a torch that is built without CUDA.
        error, _, _ = str(problem).partition("\n")  # only the first line
    return Machine(
        gpus=gpus,
        driver=driver_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        nccl=nccl,
        python=platform.python_version(),
        error=error,
    )


def driver_version() -> str:
    """The version of NVIDIA's driver, or "" where nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    first_line, _, _ = printed.partition("\n")  # nvidia-smi prints the same line for each GPU.
    return first_line


def obstacle(machine: Machine, requested_gpus: int | None) -> str:
    """Why this machine cannot run on so many GPUs, and what to try, in two lines. "" if it can.

    requested_gpus: None for all GPUs of the machine, which must have at least one.
    """
    count = len(machine.gpus)
    if count == 0:
        return (
            f"PyTorch {machine.torch} can use no GPU: {machine.error or 'none is visible'}\n"
            "Go to a machine on which nvidia-smi shows a GPU, or try the command on simulated GPUs: --rehearsal"
        )
    if requested_gpus is not None and requested_gpus > count:
        return (
            f"This machine has {count} GPUs, and --gpus asks for {requested_gpus}.\n"
            f"Take --gpus {count}, or leave it out."
        )
    return ""


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print(json.dumps(asdict(examine())))
