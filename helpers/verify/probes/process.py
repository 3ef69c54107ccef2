"""One probe in a process of its own: ``python -m helpers.verify.probes.process MODULE NAME DEVICE FILE``.

Rank 0 appends what the probe yields to the file, a line of JSON each.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from helpers.verify.probes.results import Text
from helpers.verify.record import Figure


def line_of(result: Figure | Text) -> str:
    """A result as a line of the file that ``measuring.add_results`` reads."""
    if isinstance(result, Text):
        return json.dumps({"text": asdict(result)})
    return json.dumps({"figure": asdict(result)})


def main(module: str, name: str, device: str, path: Path) -> None:
    """Run the probe ``name``, a function of a module, on "cpu" or "cuda", and append its results to the file.

    Each result is written as soon as the probe yields it, so that it is kept if the probe hangs later. Under torchrun
    only rank 0 writes. In the end the process exits at once, without the time that Python would take to free memory.
    """
    probe = getattr(importlib.import_module(module), name)
    own_device = torch.device(device)
    if own_device.type == "cuda":
        own_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own_device)
    torch.manual_seed(0)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    for result in probe(own_device):
        if is_first_rank:
            with path.open("a", encoding="utf-8") as file:
                file.write(line_of(result) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _, module_of_probe, name_of_probe, kind_of_device, file_for_results = sys.argv
    main(module_of_probe, name_of_probe, kind_of_device, Path(file_for_results))
