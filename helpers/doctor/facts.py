"""What a rank knows about itself: its host, its GPU, its network interface, its versions."""

import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, replace

import psutil
import torch

from helpers.doctor.driver import Health, health_of_gpu
from helpers.doctor.membership import LaunchedRank, plain


@dataclass(frozen=True)
class Facts:
    """What a rank knows about itself. It travels to the other ranks."""

    host: str
    port: int  # where the rank listens
    local_rank: int
    device: str  # cpu, cuda:0, cuda:1, ...
    interface: str
    address: str | None  # of the interface; None where it has none
    python: str
    torch: str
    device_memory: int  # bytes, of the GPU or of the whole host
    shared_memory: int | None  # bytes that are free; None on a system without /dev/shm
    # The rest is about the GPU, and empty without one.
    gpu_model: str = ""
    gpu_id: str = ""
    nccl: str = ""
    gpu_error: str = ""  # why the GPU could not be asked
    unsupported_gpu: str = ""  # "sm_120, only for sm_80 sm_90" where this PyTorch has no code for the GPU
    health: Health | None = None  # what the driver says of the GPU

    @property
    def versions(self) -> dict[str, str]:
        """{program: its version}; "" for NCCL without a GPU."""
        return {"python": self.python, "torch": self.torch, "NCCL": self.nccl}


@dataclass(frozen=True)
class Interface:
    """A network interface, and its address or None."""

    name: str
    address: str | None


def choose_interface(device: torch.device, master_host: str) -> Interface:
    """The network interface that the backend of this device will use, with its address.

    Users name it in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. If they do not, gloo takes the address of the host's own
    name. NCCL ranks the interfaces by their kind; this function guesses that it takes the one that leads to the master.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if device.type == "cuda":
        variable = "NCCL_SOCKET_IFNAME"
    requested = os.environ.get(variable, "").split(",")[0].strip("=")  # NCCL reads also "=eth0,eth1"
    if requested:
        return requested_interface(requested)
    address = address_of_own_name()
    if device.type == "cuda":
        address = address_towards(master_host)
    return interface_with(address)


def requested_interface(name: str) -> Interface:
    """The interface that a user names. For NCCL the beginning of a name is enough: "eth" for eth0."""
    addresses = addresses_by_interface()
    for known_name in sorted(addresses):
        if known_name.startswith(name):
            return Interface(known_name, addresses[known_name])
    return Interface(name, None)


def interface_with(address: str) -> Interface:
    """The interface that has this address, or its kind in words if no interface lists it."""
    for name, known_address in addresses_by_interface().items():
        if known_address == address:
            return Interface(name, address)
    if address.startswith("127."):  # such as Debian's 127.0.1.1, which no interface lists
        return Interface("loopback", address)
    return Interface("no interface", address)


def addresses_by_interface() -> dict[str, str]:
    """{interface: its address, IPv4 if it has one}, without the interfaces that have none."""
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        internet = [(entry.family, entry.address) for entry in entries if entry.family != psutil.AF_LINK]
        if internet:
            _, address = min(internet)  # AF_INET sorts before AF_INET6
            without_interface, _, _ = address.partition("%")  # "fe80::1" of "fe80::1%eth0"
            addresses[name] = without_interface
    return addresses


def address_towards(host: str) -> str:
    """The address from which this host would send to another one, or the loopback if that one is not known."""
    any_port = 9  # nothing is sent there: a datagram socket that connects only chooses its own address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, any_port))
            own_address, _ = probe.getsockname()
            return own_address
    except OSError:
        return "127.0.0.1"


def address_of_own_name() -> str:
    """The address of this host's name, or the loopback, which gloo falls back on too."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def has_code_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a build of PyTorch has code that runs on a GPU of this compute capability, such as (9, 0) for an H100.

    ``architectures`` are those of the build (torch.cuda.get_arch_list()), such as ["sm_80", "sm_90a", "compute_90"].
    An "sm" is machine code. A "compute" is an intermediate code, PTX, which the driver compiles for the GPU.
    """
    for architecture in architectures:
        parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if parts is None:
            continue
        kind, major, minor, suffix = parts.groups()
        built_for = (int(major), int(minor))
        is_for_one_gpu = suffix == "a"
        is_intermediate_code = kind == "compute" and suffix == ""
        if is_for_one_gpu:
            runs = built_for == capability
        elif is_intermediate_code:  # the driver compiles it when the program starts, for this GPU and newer ones
            runs = built_for <= capability
        else:  # machine code runs on its own major version, from its minor version on
            runs = built_for[0] == capability[0] and built_for <= capability
        if runs:
            return True
    return False


def facts_of_rank(launched: LaunchedRank, port: int, backend: str | None) -> Facts:
    """What this rank knows about itself, for the other ranks.

    ``port`` is where it listens for their connections. ``backend`` is "gloo" to leave the GPUs out.
    """
    device = device_of_rank(launched, backend)
    free_shared_memory = None
    if os.path.isdir("/dev/shm"):
        free_shared_memory = shutil.disk_usage("/dev/shm").free
    interface = choose_interface(device, launched.host)
    short_name_of_host = socket.gethostname().split(".")[0]
    facts = Facts(
        host=short_name_of_host,
        port=port,
        local_rank=launched.local_rank,
        device=str(device),
        interface=interface.name,
        address=interface.address,
        python=platform.python_version(),
        torch=torch.__version__,
        device_memory=psutil.virtual_memory().total,
        shared_memory=free_shared_memory,
    )
    if device.type == "cpu":
        return facts
    return with_facts_of_gpu(facts, device)


def device_of_rank(launched: LaunchedRank, backend: str | None) -> torch.device:
    """The GPU with the rank's local number, as a script takes it under torchrun; the CPU without GPUs or on "gloo"."""
    gpu_count = torch.cuda.device_count()
    if gpu_count == 0 or backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", launched.local_rank % gpu_count)


def with_facts_of_gpu(facts: Facts, device: torch.device) -> Facts:
    """The facts with those of the rank's GPU, as the driver and this build of PyTorch know it.

    If the driver does not answer, they have its error instead.
    """
    try:
        gpu = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        return replace(facts, gpu_error=plain(error))
    unsupported = ""
    is_cuda_build = bool(torch.version.cuda)  # a build for ROCm has other architectures
    if is_cuda_build:
        architectures = torch.cuda.get_arch_list()
        if architectures and not has_code_for((gpu.major, gpu.minor), architectures):
            unsupported = f"sm_{gpu.major}{gpu.minor}, only for {' '.join(architectures)}"
    nccl_version = torch.cuda.nccl.version()  # such as (2, 28, 3)
    return replace(
        facts,
        gpu_model=gpu.name.removeprefix("NVIDIA "),
        gpu_id=str(gpu.uuid),
        nccl=".".join(map(str, nccl_version)),
        device_memory=gpu.total_memory,
        unsupported_gpu=unsupported,
        health=health_of_gpu(str(gpu.uuid)),
    )
