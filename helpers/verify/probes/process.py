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
    """A result as a line of the file."""
    if isinstance(result, Text):
        return json.dumps({"text": asdict(result)})
    return json.dumps({"figure": asdict(result)})


def main(module: str, name: str, device: str, path: Path) -> None:
    """Run the probe ``name`` of a module on a device. Leave without Python's end: what it frees is not measured."""
    probe = getattr(importlib.import_module(module), name)
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    torch.manual_seed(0)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    for result in probe(place):
        if is_first_rank:
            with path.open("a", encoding="utf-8") as file:
                file.write(line_of(result) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
