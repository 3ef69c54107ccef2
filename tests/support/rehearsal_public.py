"""A script for test_rehearsal of what public programs do: on GPUs all of it is right. It needs two GPUs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
uninitialized = not torch.cuda.is_initialized()


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


torch.cuda.set_device(device)
dist.init_process_group()
programs = [
    the_default_backend_is_nccl,
    fsdp_without_a_mesh_is_on_gpus,
    autocast_of_torch_cuda_amp,
]
for program in programs:
    try:
        program()
        verdict = "right"
    except Exception as error:
        verdict = f"{type(error).__name__}: {error} in"
    print(f"{verdict} {program.__name__} on {rank}\n", end="", flush=True)
dist.destroy_process_group()
