"""A script for test_rehearsal of what public programs do: on GPUs all of it is right. It needs two GPUs."""

import os

import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
uninitialized = not torch.cuda.is_initialized()


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
dist.init_process_group("nccl")
programs = [
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
