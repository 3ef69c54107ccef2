"""For the forkserver of a test to import: its ranks then have two pretended GPUs, on which gloo stands for NCCL."""

import os

from helpers.rehearsal.rank import pretend

os.environ.setdefault("GROUP_RANK", "0")
pretend(2)
