"""What a rank knows about itself: its host, its GPU, its network interface, its versions."""

import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, replace

import psutil
import torch

from helpers.doctor.membership import Place, plain


@dataclass(frozen=True)
class Facts:
    """What a rank knows about itself."""

    host: str
    port: int  # where the rank listens
    local_rank: int
    device: str  # cpu, cuda:0, cuda:1, ...
    interface: str
    address: str | None  # None where the interface has none
    python: str
    torch: str
    device_memory: int  # bytes, of the GPU or of the whole host
    memory: int | None  # bytes of shared memory that are free; None where a host has none
    model: str = ""  # the GPU's, as are gpu_id and NCCL
    gpu_id: str = ""
    NCCL: str = ""
    fault: str = ""  # why the GPU did not tell of itself
    no_code: str = ""  # "sm_120, only for sm_80 sm_90" where this PyTorch has no code for the GPU


def choose_interface(device: torch.device, master: str) -> tuple[str, str | None]:
    """(the interface that the backend will use, its address or None).

    It is the one that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names. Without the variable, gloo takes the address of
    the host's own name. NCCL ranks interfaces by their kind; this function guesses the one that leads to ``master``.
    """
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        if internet := [(entry.family, entry.address) for entry in entries if entry.family != psutil.AF_LINK]:
            addresses[name] = min(internet)[1].partition("%")[0]  # IPv4 before IPv6
    nccl = device.type == "cuda"
    if wish := os.environ.get("NCCL_SOCKET_IFNAME" if nccl else "GLOO_SOCKET_IFNAME", "").split(",")[0].strip("="):
        name = min((name for name in addresses if nccl and name.startswith(wish)), default=wish)  # NCCL takes prefixes
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


def has_code_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a build for these architectures (torch.cuda.get_arch_list()) runs on a
    GPU of this capability (torch.cuda.get_device_capability()).
    """
    for architecture in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if not parts:
            continue
        built_for = int(parts[2]), int(parts[3])
        if parts[4] == "a":  # for this one only
            fits = built_for == capability
        elif parts[1] == "compute" and not parts[4]:  # compiled at the start
            fits = built_for <= capability
        else:  # machine code: this major version, from this minor version on
            fits = built_for[0] == capability[0] and built_for <= capability
        if fits:
            return True
    return False


def facts_of_rank(place: Place, port: int, backend: str | None) -> Facts:
    """What this rank, which listens at ``port``, knows about itself. ``backend`` is "gloo" to leave the GPUs out."""
    gpus = 0 if backend == "gloo" else torch.cuda.device_count()
    device = torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu")
    interface, address = choose_interface(device, place.host)
    own = Facts(
        host=socket.gethostname().split(".")[0],
        port=port,
        local_rank=place.local_rank,
        device=str(device),
        interface=interface,
        address=address,
        python=platform.python_version(),
        torch=torch.__version__,
        device_memory=psutil.virtual_memory().total,
        memory=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
    )
    if not gpus:
        return own
    try:
        gpu = torch.cuda.get_device_properties(device)
    except RuntimeError as error:  # the driver's
        return replace(own, fault=plain(error))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    model = gpu.name.removeprefix("NVIDIA ")
    own = replace(own, model=model, gpu_id=str(gpu.uuid), NCCL=nccl, device_memory=gpu.total_memory)
    architectures = torch.cuda.get_arch_list() if torch.version.cuda else []  # not with ROCm
    if architectures and not has_code_for((gpu.major, gpu.minor), architectures):
        return replace(own, no_code=f"sm_{gpu.major}{gpu.minor}, only for {' '.join(architectures)}")
    return own
