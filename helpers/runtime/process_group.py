"""The default process group, started and stopped by the same two calls in a notebook and under torchrun.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def launcher_variables():
    """torchrun's variables, ``{"RANK": 0, "WORLD_SIZE": 4, …}``, or ``{}`` when no launcher set them.

    Raises RuntimeError when they are half set or impossible.
    """
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    if not any(os.environ.get(name) for name in names[:3]):
        return {}  # MASTER_ADDR alone is often exported by a shell; it makes no rank
    found = {name: int(value) if (value := os.environ.get(name, "")).isdecimal() else -1 for name in names}
    if not (
        0 <= found["RANK"] < found["WORLD_SIZE"]
        and 0 <= found["LOCAL_RANK"] < found["LOCAL_WORLD_SIZE"]
        and found["MASTER_PORT"] >= 0
        and os.environ.get("MASTER_ADDR")
    ):
        given = ", ".join(f"{name}={os.environ.get(name, 'missing')}" for name in [*names, "MASTER_ADDR"])
        raise RuntimeError(
            f"The launcher's variables are half set or impossible: {given}.\n"
            "Start with `torchrun --nproc-per-node=N script.py`, or unset RANK, WORLD_SIZE and LOCAL_RANK."
        )
    return found


def start_process_group(backend=None, timeout=timedelta(minutes=10)):
    """Start the default process group, unless it runs already, and return this rank's torch.device.

    Under torchrun: ``env://``, with NCCL bound to ``cuda:LOCAL_RANK`` where every local rank has a GPU, gloo on
    the CPU otherwise. With no launcher: one rank on gloo, ``file://`` in a private folder, loopback only.

    Raises RuntimeError for half-set launcher variables, for NCCL with too few GPUs, and when a group with
    another backend is running.
    """
    if dist.is_initialized():
        if backend not in (None, dist.get_backend()):
            raise RuntimeError(
                f"A process group on {dist.get_backend()} is running, and {backend} was asked for.\n"
                "Call stop_process_group() first."
            )
        on_gpu = dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    launched = launcher_variables()
    gpus, needed = torch.cuda.device_count(), launched.get("LOCAL_WORLD_SIZE", 1)
    if backend is None:
        backend = "nccl" if launched and gpus >= needed else "gloo"
    if backend == "nccl" and gpus < needed:
        raise RuntimeError(
            f"NCCL needs a GPU for every local rank: {needed} needed on this node, {gpus} found.\n"
            "Ask for backend='gloo', or start one rank per GPU (`torchrun --nproc-per-node=gpu`)."
        )
    device, options = torch.device("cpu"), {"timeout": timeout}
    if backend == "nccl":
        device = options["device_id"] = torch.device("cuda", launched.get("LOCAL_RANK", 0))
        torch.cuda.set_device(device)
    if not launched:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        options |= {"init_method": f"file://{private_folder()}/store", "rank": 0, "world_size": 1}
        atexit.register(stop_process_group)
    try:
        if launched and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            rank, world_size = launched["RANK"], launched["WORLD_SIZE"]
            store = fresh_store(rank, world_size, timeout)
            options |= {"store": store, "rank": rank, "world_size": world_size}
        dist.init_process_group(backend, **options)
    except BaseException:
        remove_private_folders()
        raise
    return device


def fresh_store(rank, world_size, timeout):
    """torchrun's store, under a name that all ranks of this start share and none of an earlier start knows.

    torchrun keeps one store for all its restarts, so without that name a rank could read the address of a peer that
    is dead. The count of restarts is no such name: each node has its own.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    name = uuid.uuid4().hex
    if rank == 0:
        store.set("leader", name)
        peers = [store.get(f"{name}/{peer}").decode() for peer in range(1, world_size)]  # waits for each of them
        store.set(f"{name}/peers", ",".join(peers))
        return dist.PrefixStore(name, store)
    answered, end = None, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        leader = store.get("leader").decode()  # perhaps a dead one's, who named dead peers, or none
        if leader != answered:
            store.set(f"{leader}/{rank}", name)
            answered = leader
        if store.check([f"{leader}/peers"]) and name in store.get(f"{leader}/peers").decode():
            return dist.PrefixStore(leader, store)
        time.sleep(0.02)
    raise dist.DistStoreError(f"Rank {rank} waited {timeout} for rank 0.\nDid all nodes start with the same command?")


def stop_process_group():
    """End the default process group, if one runs, once every rank has come to this call."""
    if not dist.is_initialized():
        return
    if dist.get_world_size() > 1:
        if sys.exc_info()[0] is not None:
            return  # this rank is failing: its peers may never come, and its end closes the group
        dist.barrier()
        gc.collect()
        time.sleep(0.1)  # gloo's threads let go of DDP's last work, or the next line may hang (pytorch#190489)
    dist.destroy_process_group()
    remove_private_folders()


def private_folder():
    """A new folder that only this user can read, named after this process."""
    remove_private_folders()
    return tempfile.mkdtemp(prefix=f"one-rank-{os.getpid()}-")


def remove_private_folders():
    """Remove this process's folder, and those of processes that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob("one-rank-*-*"):
        owner = folder.name.split("-")[2]
        if owner.isdecimal() and (int(owner) == os.getpid() or not is_running(int(owner))):
            shutil.rmtree(folder, ignore_errors=True)


def is_running(pid):
    """Whether there is a process with this id, this user's or another's."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def print0(*args, **kwargs):
    """Print on rank 0 only, before the group's start and after its end too."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK") or 0)
    if rank == 0:
        print(*args, **kwargs, flush=True)


def run_and_exit(main, args):
    """Call ``main(args)``, then end this process: status 0, or 1 after the traceback, which torchrun gets too.

    It leaves with ``os._exit``: the interpreter's own teardown can hang or abort while gloo's threads still
    hold DDP's last work (pytorch#190489).
    """

    @record
    def recorded():
        try:
            main(args)
        except BaseException:
            # torchrun's agent sends SIGTERM once another rank has ended, then reads what this one has recorded. From a
            # half written file the agent itself would die.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise

    status = 1
    try:
        recorded()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where a closed pipe reads the output no more
            os._exit(status)
