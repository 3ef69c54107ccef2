"""A script for test_rehearsal of what public programs do: on GPUs all of it is right. It needs two GPUs."""

import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
uninitialized = not torch.cuda.is_initialized()


def a_mesh_sets_the_gpu():
    assert uninitialized
    mesh = init_device_mesh("cuda", (2,))  # it also makes the default group, with no word on the backend
    assert torch.cuda.current_device() == rank and torch.cuda.is_initialized()
    assert distribute_tensor(torch.ones(4), mesh, [Shard(0)]).device == device


def the_default_backend_is_nccl():
    try:
        dist.all_reduce(torch.ones(4, 4, device=device).t()[:, 1:])
    except ValueError as error:
        assert "contiguous" in str(error)
    else:
        raise AssertionError("NCCL accepted a tensor that is not contiguous")
    assert isinstance(dist.group.WORLD._get_backend(device), dist.ProcessGroupNCCL)
    assert torch.get_device_module() is torch.cuda


def fsdp_without_a_mesh_is_on_gpus():
    model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.device_type == "cuda" and model.weight.device == device
    model(torch.ones(2, 4, device=device)).sum().backward()
    assert model.weight.grad.device == device


def autocast_of_torch_cuda_amp():
    layer, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    with torch.cuda.amp.autocast():
        assert layer(x).dtype == torch.float16 and torch.is_autocast_enabled()
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    with torch.cuda.amp.autocast(enabled=False):
        assert layer(x).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert torch.cuda.amp.autocast()(layer.forward)(x).dtype == torch.float16
    assert not torch.is_autocast_enabled()


def a_number_is_a_device():
    assert torch.device(rank) == device and isinstance(torch.device(rank), torch.device)
    assert torch.device(device=1) == torch.device(index=1, type="cuda") == torch.device("cuda:1")
    assert torch.device(device) == device
    assert pickle.loads(pickle.dumps(torch.device(1))) == torch.device("cuda:1")
    assert type(device) == torch.device and {type(device): 1}[torch.device] == 1  # noqa: E721
    with torch.device(rank):
        assert torch.ones(2).device == device
    model = DDP(nn.Linear(4, 4).to(rank), device_ids=[rank])
    assert model.module.weight.device == device and model(torch.ones(2, 4).to(rank)).device == device
    assert nn.Linear(2, 2).to(device=rank, dtype=torch.half).weight.dtype == torch.half
    assert nn.Linear(2, 2).to(torch.device(rank)).weight.device == device


def a_dtensor_like_another_on_the_gpu():
    with torch.device("meta"):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cuda", (2,)))
    like = torch.empty_like(model.weight, device="cuda")
    assert isinstance(like, DTensor) and like.device == device and like.shape == (4, 4)
    model.to_empty(device="cuda")
    assert isinstance(model.weight, DTensor) and model.weight.to_local().device == device
    assert torch.zeros_like(torch.ones(2, device="meta"), device="cuda").tolist() == [0, 0]


def scripts_and_zero():
    @torch.jit.script
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) + torch.ones(2) * x

    @torch.jit.script
    def ramp(count: int, place: torch.device) -> torch.Tensor:
        return torch.arange(count, device=place)

    assert scale(torch.ones(2)).tolist() == [1, 1] and ramp(2, torch.device("cpu")).tolist() == [0, 1]
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(4, 4).to(device)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()


programs = [
    a_mesh_sets_the_gpu,
    the_default_backend_is_nccl,
    fsdp_without_a_mesh_is_on_gpus,
    autocast_of_torch_cuda_amp,
    a_number_is_a_device,
    a_dtensor_like_another_on_the_gpu,
    scripts_and_zero,
]
for program in programs:
    try:
        program()
        verdict = "right"
    except Exception as error:
        verdict = f"{type(error).__name__}: {error} in"
    print(f"{verdict} {program.__name__} on {rank}\n", end="", flush=True)
dist.destroy_process_group()
