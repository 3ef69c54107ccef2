"""The report of a rehearsal: rank 0's counts, as a table for the screen and as JSON."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers.command_line import of_bytes
from helpers.counts import COLLECTIVE, COPY, COUNTS, UPLOAD, WAIT, Refusal, Row
from helpers.rehearsal.wrappers import BUCKETS, Buckets

TITLES = {
    WAIT: "the host waits for the GPU",
    UPLOAD: "the host waits for a copy to the GPU",
    COPY: "copies that nobody waits for",
    COLLECTIVE: "collectives",
}
# The report's last lines: what a rehearsal cannot see.
UNSEEN = """\
This was a rehearsal, not a test on GPUs. It cannot see real NCCL, streams and timing, CUDA's memory, kernels and random
numbers, autocast's lists of operators, torch.compile, or torch's C++ (DDP's buckets, backward).
"""


@dataclass(frozen=True)
class Report:
    """All counts of one rank. --json writes its fields."""

    rank: int
    world_size: int
    steps: int  # the training steps: those of the optimizer that has made the most
    ddp_buckets: list[Buckets]  # of each DDP model
    lines: list[Row]  # what happened how often, at each line of the script
    refused: list[Refusal]  # the errors that a GPU or NCCL would have raised


def text(report: Report) -> str:
    """The report as text for the screen: a section for each kind of event, with a row for each line of the script."""
    gpus = "1 simulated GPU"
    if report.world_size > 1:
        gpus = f"{report.world_size} simulated GPUs"
    lines = [f"Rehearsal on {gpus}: rank {report.rank}, {report.steps} optimizer steps."]
    width = max([len(row.line) for row in report.lines], default=0)
    for kind, title in TITLES.items():
        rows = [row for row in report.lines if row.kind == kind]
        if rows:
            lines.append(f"  {title}")
        for row in rows:
            lines.append(text_of_row(row, width))
    for buckets in report.ddp_buckets:
        sizes = " + ".join(of_bytes(size) for size in buckets.bytes)
        lines.append(f"  DDP's buckets ({buckets.line}): {sizes}")
    lines.append(UNSEEN.rstrip())
    return "\n".join(lines)


def text_of_row(row: Row, width: int) -> str:
    """A row as text, whose first column, the script's line, is ``width`` characters wide."""
    size = ""
    if row.bytes > 0:
        size = of_bytes(row.bytes)
    counts = f"{row.count:6} times {row.per_step:7.2f} a step {size:>10}"
    return f"    {row.line:{width}}  {row.what:29} {counts}".rstrip()


def write(path: Path | None) -> None:
    """On rank 0 alone: print the report to stderr and then write it as JSON to the path, unless that is None."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        return
    report = Report(
        rank=rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        steps=len(COUNTS.events_at_step),
        ddp_buckets=[*BUCKETS.values()],
        lines=COUNTS.rows(),
        refused=COUNTS.refusals,
    )
    print(text(report), file=sys.stderr, flush=True)
    if path:
        path.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
