"""The default process group, started and stopped by the same two calls in a notebook and under torchrun.

Run-time module: what a chapter uses from here is copied into its exported script.
"""

import atexit
import gc
import os
import shutil
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def launcher_variables():
    """What torchrun told this process, ``{"RANK": 0, …}``, or ``{}`` when no launcher started it.

    Raises RuntimeError when only some of the variables are set, or when they contradict each other.
    """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    if not any(os.environ.get(name) for name in names[:3]):
        return {}  # MASTER_ADDR alone is often exported by a shell; it makes no rank
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"The launcher's variables are half set: {', '.join(missing)} missing.\n"
            "Start with `torchrun --nproc-per-node=N script.py`, or unset RANK, LOCAL_RANK and WORLD_SIZE."
        )
    try:
        numbers = {name: int(os.environ[name]) for name in names if name != "MASTER_ADDR"}
    except ValueError as error:
        raise RuntimeError(
            f"A launcher variable is not a whole number ({error}).\nStart with `torchrun`, which sets them all."
        ) from None
    for rank, size in [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]:
        if not 0 <= numbers[rank] < numbers[size]:
            raise RuntimeError(
                f"{rank}={numbers[rank]} is impossible with {size}={numbers[size]}: ranks count from 0 to {size} - 1.\n"
                "Start with `torchrun`, which numbers them, or correct the variable."
            )
    return numbers


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
        if dist.get_backend() == "nccl":
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("cpu")

    ranks = launcher_variables()
    gpus, needed = torch.cuda.device_count(), ranks.get("LOCAL_WORLD_SIZE", 1)
    if backend is None:
        backend = "nccl" if ranks and gpus >= needed else "gloo"
    if backend == "nccl" and gpus < needed:
        raise RuntimeError(
            f"NCCL needs a GPU for every local rank: {needed} needed on this node, {gpus} found.\n"
            "Ask for backend='gloo', or start one rank per GPU (`torchrun --nproc-per-node=gpu`)."
        )
    device = torch.device("cuda", ranks.get("LOCAL_RANK", 0)) if backend == "nccl" else torch.device("cpu")
    device_id = device if backend == "nccl" else None
    if ranks:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            backend, init_method=f"file://{private_folder()}/store", rank=0, world_size=1,
            timeout=timeout, device_id=device_id,
        )  # fmt: skip
        atexit.register(stop_process_group)
    return device


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
    """Remove this process's folder, and what processes left that were killed."""
    for folder in Path(tempfile.gettempdir()).glob("one-rank-*-*"):
        owner = int(folder.name.split("-")[2])
        try:
            os.kill(owner, 0)
            gone = owner == os.getpid()
        except ProcessLookupError:
            gone = True
        except PermissionError:
            gone = False  # another user's process
        if gone:
            shutil.rmtree(folder, ignore_errors=True)


def print0(*args, **kwargs):
    """Print on rank 0 only, or wherever there is no process group."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs, flush=True)


def run_and_exit(main, args):
    """Call ``main(args)``, then end this process: status 0, or 1 after the traceback.

    It leaves with ``os._exit``: the interpreter's own teardown can hang or abort while gloo's threads still
    hold DDP's last work (pytorch#190489).
    """
    status = 1
    try:
        main(args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
