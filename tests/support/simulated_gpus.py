"""For the forkserver of a test to import: its ranks then have two simulated GPUs, on which gloo stands for NCCL."""

import os

from helpers.rehearsal.rank import simulate_gpus

os.environ.setdefault("GROUP_RANK", "0")
simulate_gpus(2)
