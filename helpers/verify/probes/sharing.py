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
    """DDP of two gloo ranks with tensors on one GPU: whether the gradient is the mean, and a step's time."""
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
    _, mean, seconds = done.stdout.strip().splitlines()[-1].split()
    yield Figure("gradient; the mean of the ranks' 8 and 16 is 12", float(mean), "")
    yield Figure("forward and backward, 4 MB of gradients", 1e3 * float(seconds), "ms")
