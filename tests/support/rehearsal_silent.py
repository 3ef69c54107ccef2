"""Run in a rehearsal: the programs of silent_mistakes.py on simulated GPUs, one after the other, each under the check.

``rehearsal_silent.py FOLDER [PROGRAM …]`` runs all programs, or those that are named. Each rank writes to the folder,
as JSON, what ``silent_mistakes.run_catalogue`` returned.
"""

import json
import os
import sys
from pathlib import Path

import silent_mistakes
import torch
import torch.distributed as dist


def main(folder, *names):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    silent_mistakes.DEVICE = "cuda"
    results = silent_mistakes.run_catalogue(names)
    Path(folder, f"results-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


main(*sys.argv[1:])
