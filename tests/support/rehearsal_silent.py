"""Run in a rehearsal: the programs of silent_mistakes.py on pretended GPUs, one after the other, each under the check.

``rehearsal_silent.py FOLDER [PROGRAM …]`` writes to the folder, for each rank, {program and how it ran: [the kinds that
were found, what went wrong]}.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import silent_mistakes
import torch
import torch.distributed as dist

from helpers import training_check


def checked(program, *arguments):
    """The kinds that are found in a program, and what went wrong."""
    silent_mistakes.GENERATOR.manual_seed(100 + dist.get_rank())
    errors = []
    with training_check.check_training(patience=10) as check:
        try:
            program(*arguments)
        except Exception:
            errors.append(traceback.format_exc())
    return sorted({found.kind for found in check.findings}), errors + check.observer.record.failures


def main(folder, *names):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    silent_mistakes.DEVICE = "cuda"
    results = {}
    for name, (_, program) in silent_mistakes.MISTAKES.items():
        if not names or name in names:
            results[f"{name} wrong"] = checked(program, True)
            results[f"{name} repaired"] = checked(program, False)
    for name, program in silent_mistakes.CORRECT.items():
        if not names or name in names:
            results[f"{name} correct"] = checked(program)
    Path(folder, f"found-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


main(*sys.argv[1:])
