"""Two ranks that share one GPU: NCCL refuses them, gloo copies through the host."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from helpers.ranks.leash import leashed
from helpers.verify.record import Figure
from helpers.verify.runs import TORCHRUN, cause

PROGRAM = """\
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(1024, 1024).to(device))
images = torch.ones(8, 1024, device=device) * (rank + 1)
model(images).sum().backward()
start = time.perf_counter()
for _ in range(5):
    model.zero_grad()
    model(images).sum().backward()
mean = model.module.weight.grad.mean().item()  # Of 8 samples, of ones on rank 0 and of twos on rank 1.
if rank == 0:
    print("result", mean, (time.perf_counter() - start) / 5)
dist.destroy_process_group()
"""


def shared_gpu(device: torch.device) -> Iterator[Figure]:
    """DDP on two gloo ranks whose tensors are on one GPU: whether the gradient is the mean, and a step's time.

    The ranks of PROGRAM have 8 samples each, of ones on rank 0 and of twos on rank 1, so their gradients are 8 and 16.
    The weight is 1024 x 1024 float32 numbers, so its gradient has 4 MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "two_ranks.py")
        script.write_text(PROGRAM)
        done = subprocess.run(
            leashed([sys.executable, "-m", *TORCHRUN, "--nproc-per-node=2", str(script), str(device)]),
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode != 0:
        raise RuntimeError(cause(done.stderr))
    last_line = done.stdout.strip().splitlines()[-1]
    _, mean, seconds = last_line.split()  # "result", and what rank 0 of PROGRAM has measured
    yield Figure("gradient; the mean of the ranks' 8 and 16 is 12", float(mean), "")
    yield Figure("forward and backward, 4 MB of gradients", 1e3 * float(seconds), "ms")
