"""This machine's GPUs, driver and versions, and what of it would stop a run on GPUs.

``python machine.py`` prints the facts: in a process of its own, so that the command never holds a GPU.
"""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Machine:
    """What a machine has. ``error`` is what torch says where it cannot use GPUs."""

    gpus: list[str]  # names
    driver: str  # NVIDIA's, or "" where nvidia-smi fails
    torch: str
    cuda: str
    nccl: str
    python: str
    error: str = ""

    def __str__(self) -> str:
        """``8 x NVIDIA H100 80GB HBM3; driver 570.86, PyTorch …``, with a plus between models."""
        different_models = dict.fromkeys(self.gpus)  # in order, each once
        models = " + ".join(f"{self.gpus.count(name)} x {name}" for name in different_models)
        versions = f"driver {self.driver or 'none'}, PyTorch {self.torch}, CUDA {self.cuda}, NCCL {self.nccl}"
        return f"{models}; {versions}, Python {self.python}"


def examine() -> Machine:
    """The machine as torch and nvidia-smi see it from this process."""
    import torch

    error = ""
    nccl = ""
    names: list[str] = []
    try:
        torch.cuda.init()
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        if torch.version.cuda == "pretended":  # A rehearsal on PyTorch's build for CPUs has neither.
            nccl = "pretended"
    except (RuntimeError, AssertionError) as problem:  # torch asserts that it was built for GPUs
        error = str(problem).partition("\n")[0]
    return Machine(
        gpus=names,
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
    return printed.partition("\n")[0]


def obstacle(machine: Machine, requested_gpus: int | None) -> str:
    """Why this machine cannot run on so many GPUs, or on all of them for None, and what to try, in two lines.

    "" if it can.
    """
    count = len(machine.gpus)
    if count == 0:
        return (
            f"PyTorch {machine.torch} can use no GPU: {machine.error or 'none is visible'}\n"
            "Go to a machine on which nvidia-smi shows a GPU, or try the command on pretended GPUs: --rehearsal"
        )
    if requested_gpus is not None and requested_gpus > count:
        return (
            f"This machine has {count} GPUs, and --gpus asks for {requested_gpus}.\n"
            f"Take --gpus {count}, or leave it out."
        )
    return ""


if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print(json.dumps(asdict(examine())))
