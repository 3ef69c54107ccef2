"""Two ranks that share one GPU: NCCL refuses them, gloo copies through the host."""

import json
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

SAMPLES = 8  # of each rank
WIDTH = 1024
PROGRAM = f"""\
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

device = torch.device(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(torch.nn.Linear({WIDTH}, {WIDTH}).to(device))
images = torch.ones({SAMPLES}, {WIDTH}, device=device) * (rank + 1)
model(images).sum().backward()
start = time.perf_counter()
for _ in range(5):
    model.zero_grad()
    model(images).sum().backward()
gradient = model.module.weight.grad.mean().item()  # This waits for the GPU.
seconds = (time.perf_counter() - start) / 5
if rank == 0:
    print(json.dumps({{"gradient": gradient, "seconds": seconds}}))
dist.destroy_process_group()
"""


def shared_gpu(device: torch.device) -> Iterator[Figure]:
    """Run DDP on two gloo ranks that share one GPU. Yields the gradient, which should be the mean, and a step's time.

    The ranks of PROGRAM have 8 samples each: ones on rank 0, twos on rank 1. The loss is the sum of the outputs, so the
    gradient of each weight is the sum of the samples: 8 on rank 0 and 16 on rank 1, which DDP averages to 12. The
    weight has 1024 x 1024 float32 numbers, so its gradient has 4 MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "two_ranks.py")
        script.write_text(PROGRAM)
        command = [sys.executable, "-m", *TORCHRUN, "--nproc-per-node=2", str(script), str(device)]
        finished = subprocess.run(
            leashed(command),  # it ends when this probe is killed
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if finished.returncode != 0:
        raise RuntimeError(cause(finished.stderr))
    last_line = finished.stdout.strip().splitlines()[-1]
    measured = json.loads(last_line)  # by rank 0 of PROGRAM
    yield Figure("gradient; the mean of the ranks' 8 and 16 is 12", measured["gradient"], "")
    yield Figure("forward and backward, 4 MB of gradients", 1e3 * measured["seconds"], "ms")
