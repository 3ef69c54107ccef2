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

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Facts:
    """What a rank knows about itself. Each rank sends its facts to the others."""

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
    """The network interface that gloo (for a CPU) or NCCL (for a GPU) will use, with its address.

    If the user names one in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, it is that one. Otherwise gloo takes the address
    of the host's own name, and NCCL ranks the interfaces by their kind. This function guesses that NCCL takes the one
    that leads to the master.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if device.type == "cuda":
        variable = "NCCL_SOCKET_IFNAME"
    first_requested = os.environ.get(variable, "").split(",")[0]
    requested = first_requested.strip("=")  # NCCL also accepts "=eth0", for exactly this name.
    if requested:
        return requested_interface(requested)
    if device.type == "cuda":
        return interface_with(address_towards(master_host))
    return interface_with(address_of_own_name())


def requested_interface(name: str) -> Interface:
    """The interface that a user names, where the beginning of its name is enough, as for NCCL: "eth" for eth0."""
    addresses = addresses_by_interface()
    for known_name in sorted(addresses):
        if known_name.startswith(name):
            return Interface(known_name, addresses[known_name])
    return Interface(name, None)


def interface_with(address: str) -> Interface:
    """The interface that has this address. If none lists it, the name is "loopback" or "no interface"."""
    for name, known_address in addresses_by_interface().items():
        if known_address == address:
            return Interface(name, address)
    if address.startswith("127."):  # such as Debian's 127.0.1.1, which no interface lists
        return Interface("loopback", address)
    return Interface("no interface", address)


def addresses_by_interface() -> dict[str, str]:
    """{name of an interface: its IPv4 address, or its IPv6 address if it has no other}, of those with an address."""
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        ip_entries = [entry for entry in entries if entry.family != psutil.AF_LINK]  # without hardware addresses
        if ip_entries:
            # AF_INET, for IPv4, sorts before AF_INET6.
            best_entry = min(ip_entries, key=lambda entry: (entry.family, entry.address))
            address, _, _ = best_entry.address.partition("%")  # "fe80::1" of "fe80::1%eth0"
            addresses[name] = address
    return addresses


def address_towards(host: str) -> str:
    """The address from which this host would send to another host, or the loopback if that host is not known."""
    any_port = 9  # Nothing is sent there: connecting a datagram socket only chooses the address to send from.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, any_port))
            own_address, _ = probe.getsockname()
            return own_address
    except OSError:
        return LOOPBACK


def address_of_own_name() -> str:
    """The address of this host's name. If the name has none it is the loopback, to which gloo falls back, too."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


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
    """Collect what this rank knows about itself, for the other ranks.

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
    """The GPU with the rank's local number, as scripts take it under torchrun; the CPU without GPUs or for "gloo"."""
    gpu_count = torch.cuda.device_count()
    if gpu_count == 0 or backend == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", launched.local_rank % gpu_count)


def with_facts_of_gpu(facts: Facts, device: torch.device) -> Facts:
    """Add to a rank's facts those about its GPU, which come from the driver and from this build of PyTorch.

    If the driver does not answer, its error is added instead.
    """
    try:
        gpu = torch.cuda.get_device_properties(device)
    except RuntimeError as error:
        return replace(facts, gpu_error=plain(error))
    unsupported = ""
    is_cuda_build = bool(torch.version.cuda)  # A build for ROCm has architectures of other names.
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
