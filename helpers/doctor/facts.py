"""What a rank knows about itself: its host, its GPU, its network interface, its versions."""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from helpers.doctor.membership import Place, plain

INTERNET = (socket.AF_INET, socket.AF_INET6)
CLOSED_PORT = 9  # of a rank that listens nowhere: the others' connections to it are refused


@dataclass(frozen=True)
class Facts:
    """What a rank knows about itself. A fact that it could not find out is None, and ``unknown`` has the reason."""

    host: str
    local_rank: int
    device: str  # cpu, cuda:0, cuda:1, ...
    interface: str
    address: str | None  # None where the interface has none
    python: str
    torch: str
    device_memory: int | None  # bytes, of the GPU or of the whole host
    memory: int | None  # bytes of shared memory that are free
    model: str = ""  # the GPU's, as are gpu_id and NCCL
    gpu_id: str = ""
    NCCL: str = ""
    unknown: dict[str, str] = field(default_factory=dict)
    port: int = CLOSED_PORT


def choose_interface(device: torch.device, master: str) -> tuple[str, str | None]:
    """(the interface that the backend will use, its address or None).

    It is the one that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names. Without the variable, gloo takes the address of
    the host's own name. NCCL ranks interfaces by their kind; this function guesses the one that leads to ``master``.
    """
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        if internet := [(entry.family, entry.address) for entry in entries if entry.family in INTERNET]:
            addresses[name] = min(internet)[1].partition("%")[0]  # IPv4 before IPv6
    nccl = device.type == "cuda"
    variable = "NCCL_SOCKET_IFNAME" if nccl else "GLOO_SOCKET_IFNAME"
    if wish := os.environ.get(variable, "").split(",")[0].strip("="):
        prefixed = [name for name in addresses if nccl and name.startswith(wish)]  # NCCL takes prefixes
        name = wish if wish in addresses or not prefixed else prefixed[0]
        return name, addresses.get(name)
    try:
        if nccl:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))  # sends nothing
                address = probe.getsockname()[0]
        else:
            address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # what gloo falls back on
    default = "loopback" if address.startswith("127.") else "no interface"
    return next((name for name, own in addresses.items() if own == address), default), address


def facts_of_rank(place: Place, backend: str | None) -> Facts:
    """What this rank knows about itself. ``backend`` is "gloo" to leave the GPUs out, or None."""
    gpus = 0 if backend == "gloo" else torch.cuda.device_count()
    device = torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu")
    questions: dict[str, Callable[[], Any]] = {
        "host": lambda: socket.gethostname().split(".")[0],
        "interface": lambda: choose_interface(device, place.host)[0],
        "address": lambda: choose_interface(device, place.host)[1],
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "device_memory": lambda: psutil.virtual_memory().total,
        "memory": lambda: shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else None,
    }
    if gpus:
        questions |= {
            "model": lambda: torch.cuda.get_device_name(device).removeprefix("NVIDIA "),
            "gpu_id": lambda: str(torch.cuda.get_device_properties(device).uuid),
            "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())),
            "device_memory": lambda: torch.cuda.get_device_properties(device).total_memory,
        }
    answers: dict[str, Any] = {"unknown": {}}
    for name, ask in questions.items():
        try:
            answers[name] = ask()
        except Exception as error:
            answers[name], answers["unknown"][name] = None, plain(error)
    return Facts(local_rank=place.local_rank, device=str(device), **answers)
