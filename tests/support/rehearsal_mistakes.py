"""A script of planted mistakes, for test_rehearsal: each is caught, and the last one ends it. It needs two GPUs."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

rendezvous = dist.rendezvous("env://")  # an iterator over (store, rank, world size)
store, rank, world_size = next(rendezvous)
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)


def start_group(store_prefix, device_id=None):
    """Make the default group. Each one has keys of its own in the store, which begin with this prefix."""
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore(store_prefix, store),
        rank=rank,
        world_size=world_size,
        device_id=device_id,
        timeout=timedelta(seconds=60),
    )


start_group("first", device_id=device)

x = torch.ones(4, 4, device=device)
labels = torch.zeros(4, dtype=torch.long, device=device)
model = DDP(nn.Linear(4, 4).to(device))
hooked = torch.ones(3, device=device, requires_grad=True)
hooked.register_hook(lambda grad: grad + torch.ones(3))
saved_on_gpu_0 = Path(sys.argv[1], f"of-gpu-0-{rank}.pt")
torch.save(torch.ones(4, device="cuda:0"), saved_on_gpu_0)


def load_to_gpu_0():
    """Load a tensor without map_location, so that it comes to cuda:0 on each rank, and use it on the rank's own GPU."""
    loaded = torch.load(saved_on_gpu_0)
    if rank == 0:
        loaded.numpy()  # on rank 0 the GPU is the right one, so it makes another mistake
    else:
        loaded + x


error_of_load = "to numpy"
if rank == 1:
    error_of_load = "cuda:0 and cuda:1"
# (name, words in the error that the mistake has to raise, mistake)
mistakes = [
    ("a CPU tensor in all_reduce", "No backend type", lambda: dist.all_reduce(torch.ones(3))),
    ("a CPU tensor in an expression", "same device", lambda: x + torch.ones(4)),
    ("numpy()", "to numpy", lambda: x.numpy()),
    ("a CPU generator", "generator", lambda: torch.randn(3, device=device, generator=torch.Generator())),
    ("an absent GPU", "invalid device ordinal", lambda: torch.ones(3, device="cuda:9")),
    ("a non-contiguous tensor", "must be contiguous", lambda: dist.all_reduce(x.t()[:, 1:])),
    ("the peer's GPU", "constrained", lambda: dist.all_reduce(torch.ones(3, device=f"cuda:{1 - device.index}"))),
    ("a CPU tensor in send", "No backend type", lambda: dist.send(torch.ones(3), 1 - rank)),
    ("labels on the CPU", "same device", lambda: cross_entropy(x, torch.zeros(4, dtype=torch.long))),
    ("an operation that NCCL lacks", "ReduceOp.BOR with NCCL", lambda: dist.all_reduce(labels, dist.ReduceOp.BOR)),
    ("a group by its members alone", "129965", lambda: dist.new_group([rank], use_local_synchronization=True)),
    ("gloo for some ranks", "ranks outside", lambda: dist.new_group([0], backend="gloo")),
    ("pinning a GPU's memory", "cannot pin", lambda: x.pin_memory()),
    ("a CPU generator in place", "generator", lambda: labels.random_(generator=torch.Generator())),
    ("a GPU's values added on the CPU", "same device", lambda: torch.ones(4, 4).add_(x)),
    ("indices on the CPU", "same device", lambda: nn.Embedding(4, 2).to(device)(torch.zeros(2, dtype=torch.long))),
    ("the wrong current device", "invalid device ordinal", lambda: torch.cuda.set_device(2)),
    ("a hook on the CPU, in backward", "same device", lambda: hooked.sum().backward()),
    ("a gradient on the CPU", "different device", lambda: setattr(model.module.weight, "grad", torch.ones(4, 4))),
    ("an input on the CPU, in DDP", "same device", lambda: model(torch.ones(4, 4))),
    ("a non-contiguous tensor in send", "contiguous", lambda: dist.send(x.t()[:, 1:], 1 - rank)),
    ("torch.load without map_location", error_of_load, load_to_gpu_0),
    ("joining both devices", "same device", lambda: torch.cat([x, torch.ones(1, 4)])),
    ("pinned memory on a GPU", "can be pinned", lambda: torch.ones(3, device=device, pin_memory=True)),
    ("the time of events without times", "enable_timing", lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event())),
    ("the time between no records", "be recorded", lambda: torch.cuda.Event(True).elapsed_time(torch.cuda.Event(True))),
    ("a type that NCCL lacks", "not supported for NCCL", lambda: dist.all_reduce(labels.short())),
    ("mp.spawn", "call the function itself, with int", lambda: torch.multiprocessing.spawn(print, nprocs=2)),
    ("a CPU tensor in a list", "No backend type", lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1))),
]


def plant(name, words, mistake):
    """Make a mistake, and print whether it raised an error with these words: "seen NAME on RANK"."""
    try:
        mistake()
    except Exception as error:
        if words in str(error):
            verdict = "seen"
        else:
            verdict = f"saw {type(error).__name__}: {error} for"
    else:
        verdict = "missed"
    print(f"{verdict} {name} on {rank}\n", end="", flush=True)


for name, words, mistake in mistakes:
    plant(name, words, mistake)
dist.destroy_process_group()

start_group("second")  # not bound to a GPU
torch.cuda.set_device(0)
plant("objects without a set device", "Duplicate GPU", lambda: dist.all_gather_object([None, None], rank))
x = torch.ones(3, device="cuda")
plant("functional on one GPU", "Duplicate GPU", lambda: all_reduce(x, "sum", dist.group.WORLD))
dist.destroy_process_group()

start_group("third", device_id=device)
if rank == 1:
    options = dist.group.WORLD._get_backend(device).simulated_options
    options._timeout = timedelta(seconds=2)
    plant("a group that a rank does not make", "ranks [0]", lambda: dist.new_group([1]))
    options._timeout = timedelta(seconds=60)
    store.set("refused", "")
store.wait(["refused"])
dist.all_reduce(torch.ones(3, device=device))
dist.all_reduce(torch.ones(3))  # the last mistake: nobody catches it
