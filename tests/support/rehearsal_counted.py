"""A script without a mistake, for test_rehearsal: what GPUs allow, and waits that the report must count by line."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
store, rank, world_size = next(dist.rendezvous("env://"))
backend = "cpu:gloo,cuda:nccl"
dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
assert dist.get_backend() == backend and dist.is_nccl_available()
assert dist.group.WORLD.bound_device_id == device

total = torch.full((2,), rank + 1.0, device=device)
dist.all_reduce(total)
assert total.tolist() == [world_size * (world_size + 1) / 2] * 2

for form in [(device,), (device.index, torch.half), (f"cuda:{device.index}", torch.half, True, True), (total, True)]:
    assert torch.ones(2).to(*form).device == device
assert total.to(torch.half, False, True).dtype == torch.half and total.to(total.dtype) is total
assert torch.fft.fftfreq(4, device=device).is_cuda and torch.ones(2).new_tensor([1], device=device).dtype == torch.float
assert torch.zeros_like(total, device="cpu").is_cpu and torch.empty_like(total, device="meta").is_meta

beside = dist.new_group(backend="gloo")
total_rank = torch.tensor([float(rank)])
dist.all_reduce(total_rank, group=beside)
assert dist.get_backend(beside) == "gloo" and total_rank.item() == sum(range(world_size))
dist.all_reduce(total_rank)

mesh = init_device_mesh("cuda", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
first = torch.full((1,), float(rank), device=device)
dist.broadcast(first, group=mesh.get_group("shard"), group_src=0)
assert first.item() == rank - rank % 2
sharded = distribute_tensor(torch.arange(8.0).to(device), mesh["shard"], [Shard(0)])
assert sharded.device == device and sharded.sum().full_tensor().item() == 28

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

names = [None] * world_size
dist.all_gather_object(names, (os.environ["GROUP_RANK"], torch.cuda.get_device_properties(device).uuid))
dist.destroy_process_group()
if rank == 0:
    print(sorted(names), flush=True)
os.chdir(os.path.dirname(__file__))  # the report's path was relative to the folder before
os._exit(0)
