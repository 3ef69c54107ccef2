"""The default process group, started and stopped by the same calls everywhere."""

import atexit
import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def start_process_group(
    backend: str | None = None, timeout: timedelta = timedelta(minutes=10)
) -> torch.device:
    """Start the default group, unless one runs; return this rank's GPU, or the CPU."""
    if dist.group.WORLD is not None:
        return dist.group.WORLD.bound_device_id or torch.device("cpu")
    where: tuple = ("env://",)  # torch's error names a variable that is missing
    if not os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:  # no launcher
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        where = (f"file://{folder.name}/store", 0, 1)
    local_rank = int(os.environ["LOCAL_RANK"]) if "RANK" in os.environ else 0
    store, rank, world_size = next(dist.rendezvous(*where, timeout=timeout))
    gpus = torch.cuda.device_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))  # on this node
    backend = backend or ("nccl" if gpus else "gloo")
    on_gpus = "nccl" in backend  # also in "cpu:gloo,cuda:nccl"
    few = f"{gpus} GPUs for {ranks} ranks" if on_gpus and gpus < ranks else ""
    compare(store, rank, world_size, few or backend)
    device = torch.device("cuda", local_rank) if on_gpus else None
    if device:
        torch.cuda.set_device(device)
    options = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timeout, device_id=device, **options)
    print0(f"{world_size} rank(s), {backend} on {device or 'cpu'}")
    return device or torch.device("cpu")


def compare(store: dist.Store, rank: int, world_size: int, choice: str) -> None:
    """Raise RuntimeError on every rank, naming hosts, unless all use one backend."""
    store.set(f"backend of rank {rank}", f"{choice} on {os.uname().nodename}")
    if rank == 0:  # the store's timeout names a key, and with it the missing rank
        picks = {store.get(f"backend of rank {r}").decode() for r in range(world_size)}
        choices = {pick.split(" on ")[0] for pick in picks}
        agreed = len(choices) == 1 and "GPUs for" not in choices.pop()
        store.set("word of rank 0", "" if agreed else ", ".join(sorted(picks)))
    if wrong := store.get("word of rank 0").decode():
        store.set(f"rank {rank} knows", "")  # rank 0 waits: it may serve the store
        if rank == 0:
            store.wait([f"rank {r} knows" for r in range(world_size)])
        raise RuntimeError(
            f"No common backend: {wrong}. A node's ranks must all see its GPUs (so no "
            "--gpus-per-task), and need one each. On CPUs: --backend gloo."
        )


def stop_process_group() -> None:
    """End the default group, if one runs."""
    if dist.is_initialized():
        if dist.get_backend() == "gloo":
            time.sleep(0.1)  # else it can hang after DDP's last work (pytorch#190489)
        dist.destroy_process_group()


def print0(*args: object) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        print(*args, flush=True)
