"""What a rank knows about itself: its host, its GPU, its network interface, its versions."""

import os
import platform
import shutil
import socket
import sys
from functools import partial

import psutil
import torch

from helpers.doctor.membership import plain


def choose_interface(device, master):
    """(the interface that the backend will use, its address or None).

    It is the one that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names. Without the variable, gloo takes the address of
    the host's own name. NCCL ranks interfaces by their kind; this function guesses the one that leads to ``master``.
    """
    addresses = {}
    for name, entries in psutil.net_if_addrs().items():
        found = sorted(
            (entry.family, entry.address) for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if found:
            addresses[name] = found[0][1].partition("%")[0]
    variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
    if wanted := os.environ.get(variable, "").split(",")[0].strip("="):
        name = next((name for name in addresses if name == wanted), wanted)
        if device.type == "cuda":
            name = next((name for name in addresses if name.startswith(wanted)), name)  # NCCL takes prefixes
        return name, addresses.get(name)
    try:
        if device.type == "cuda":
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((master, 9))  # sends nothing
                address = probe.getsockname()[0]
        else:
            address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"  # what gloo falls back on
    default = "loopback" if address.startswith("127.") else "no interface"
    return next((name for name, own in addresses.items() if own == address), default), address


def facts_of_rank(place, backend):
    """What this rank knows about itself, as a dict for JSON.

    A fact that could not be found out is None, and the dict under "unknown" has the reason. ``memory`` is in bytes.
    """
    gpus = 0 if backend == "gloo" else torch.cuda.device_count()
    device = torch.device("cuda", place["LOCAL_RANK"] % gpus) if gpus else torch.device("cpu")
    on_gpu = device.type == "cuda"
    interface = partial(choose_interface, device, place["MASTER_ADDR"])
    questions = {
        "host": lambda: socket.gethostname().split(".")[0],
        "local_rank": lambda: place["LOCAL_RANK"],
        "device": lambda: str(device),
        "model": lambda: torch.cuda.get_device_name(device).removeprefix("NVIDIA ") if on_gpu else "",
        "gpu_id": lambda: str(torch.cuda.get_device_properties(device).uuid) if on_gpu else "",
        "interface": lambda: interface()[0],
        "address": lambda: interface()[1],
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "NCCL": lambda: ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        "device_memory": lambda: (
            torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
        ),
        "memory": lambda: shutil.disk_usage("/dev/shm").free if sys.platform == "linux" else None,
    }
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception as error:
            found[name] = None
            found.setdefault("unknown", {})[name] = plain(error)
    return found
