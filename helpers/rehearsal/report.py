"""The report of a rehearsal: rank 0's counts, as a table for the screen and as JSON."""

import json
import os
import sys

from helpers.rehearsal.counts import COLLECTIVE, COPY, COUNTS, UPLOAD, WAIT
from helpers.rehearsal.wrappers import BUCKETS

TITLES = {
    WAIT: "the host waits for the GPU",
    UPLOAD: "the host waits for a copy to the GPU",
    COPY: "copies that nobody waits for",
    COLLECTIVE: "collectives",
}
UNSEEN = """\
This was a rehearsal, not a test on GPUs. It cannot see real NCCL, streams and timing, CUDA's memory, kernels and random
numbers, autocast's lists of operators, SyncBatchNorm, torch.compile, or torch's C++ (DDP's buckets, backward).
"""


def numbers():
    """All counts of this rank as a dict, which --json writes."""
    return {
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "steps": len(COUNTS.marks),
        "ddp_buckets": list(BUCKETS.values()),
        "lines": COUNTS.table(),
        "refused": COUNTS.refusals,
    }


def in_units(size):
    """A number of bytes as text: 512 B, 1.5 kB, 3.0 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000


def text(counted):
    """The report as text for the screen."""
    gpus = f"{counted['world_size']} pretended GPU" + ("s" if counted["world_size"] > 1 else "")
    lines = [f"Rehearsal on {gpus}: rank {counted['rank']}, {counted['steps']} optimizer steps."]
    width = max([len(row["line"]) for row in counted["lines"]], default=0)
    for kind, title in TITLES.items():
        rows = [row for row in counted["lines"] if row["kind"] == kind]
        if not rows:
            continue
        lines.append(f"  {title}")
        for row in rows:
            size = in_units(row["bytes"]) if row["bytes"] else ""
            often = f"{row['count']:6} times {row['per_step']:7.2f} a step {size:>10}"
            lines.append(f"    {row['line']:{width}}  {row['what']:29} {often}".rstrip())
    for found in counted["ddp_buckets"]:
        each = " + ".join(map(in_units, found["bytes"]))
        lines.append(f"  DDP's buckets ({found['line']}): {each}")
    return "\n".join([*lines, UNSEEN.rstrip()])


def tell(path):
    """On rank 0 alone: print the report to stderr and write it as JSON to the path, unless that is None."""
    if os.environ.get("RANK", "0") != "0":
        return
    with COUNTS.paused():
        counted = numbers()
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(counted, file, indent=1)
    print(text(counted), file=sys.stderr, flush=True)
