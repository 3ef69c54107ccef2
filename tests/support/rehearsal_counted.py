"""A script without a mistake, for test_rehearsal: what GPUs allow, and waits that the report must count by line.

The test looks for some lines by words in them. The script needs two GPUs on each of two nodes.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)

# A process group of both backends, from a store
rendezvous = dist.rendezvous("env://")  # an iterator over (store, rank, world size)
store, rank, world_size = next(rendezvous)
backend = "cpu:gloo,cuda:nccl"
dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
assert dist.get_backend() == backend
assert dist.is_nccl_available()
assert dist.group.WORLD.bound_device_id == device

total = torch.full((2,), rank + 1.0, device=device)
dist.all_reduce(total)
sum_over_ranks = world_size * (world_size + 1) / 2
assert total.tolist() == [sum_over_ranks, sum_over_ranks]

# The forms of Tensor.to
on_cpu = torch.ones(2)
assert on_cpu.to(device).device == device
assert on_cpu.to(device.index, torch.half).device == device
assert on_cpu.to(f"cuda:{device.index}", torch.half, True, True).device == device
assert on_cpu.to(total, True).device == device
assert total.to(torch.half, False, True).dtype == torch.half
assert total.to(total.dtype) is total

# Tensors that a function makes on a device
assert torch.fft.fftfreq(4, device=device).is_cuda
assert on_cpu.new_tensor([1], device=device).dtype == torch.float
assert torch.zeros_like(total, device="cpu").is_cpu
assert torch.empty_like(total, device="meta").is_meta

# A second group for tensors on the CPU, which the first group can send as well
gloo_group = dist.new_group(backend="gloo")
assert dist.get_backend(gloo_group) == "gloo"
sum_of_ranks = torch.tensor([float(rank)])
dist.all_reduce(sum_of_ranks, group=gloo_group)
assert sum_of_ranks.item() == sum(range(world_size))
dist.all_reduce(sum_of_ranks)

# A mesh of two dimensions: each group of "shard" has two ranks that follow each other
mesh = init_device_mesh("cuda", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
first_rank = torch.full((1,), float(rank), device=device)
dist.broadcast(first_rank, group=mesh.get_group("shard"), group_src=0)
assert first_rank.item() == rank - rank % 2
sharded = distribute_tensor(torch.arange(8.0).to(device), mesh["shard"], [Shard(0)])
assert sharded.device == device
assert sharded.sum().full_tensor().item() == sum(range(8))

# A training
model = DDP(nn.Linear(4, 1).to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pinned = torch.ones(8, 4).pin_memory()
for step in range(5):
    images = pinned.to(device, non_blocking=True)
    labels = torch.ones(8, 1).to(device)  # blocks
    optimizer.zero_grad()
    loss = (model(images) - labels).square().mean()
    loss.backward()
    loss.item()  # waits
    optimizer.step()
    if step == 2:
        bool(loss > 0)  # waits once
assert model.module.weight.grad.device == device

# What tells the GPUs of a job apart
own_gpu = (os.environ["GROUP_RANK"], torch.cuda.get_device_properties(device).uuid)
gpus = [None] * world_size
dist.all_gather_object(gpus, own_gpu)
dist.destroy_process_group()
if rank == 0:
    print(sorted(gpus), flush=True)
os.chdir(os.path.dirname(__file__))  # the report's path was relative to the folder before
os._exit(0)
