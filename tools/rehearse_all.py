"""Rehearse chapters on many pretended GPUs and compare their results with one rank's on gloo (``make rehearse``)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from helpers.export import chapters
from helpers.verify.compare import numbers


@dataclass(frozen=True)
class Run:
    """A chapter's script on so many nodes of so many pretended GPUs, with these flags."""

    chapter: str
    nodes: int
    gpus: int
    flags: tuple[str, ...] = ()


RUNS = [
    Run("01", 1, 8),
    Run("02", 1, 8),
    Run("04", 1, 8),
    Run("06", 1, 8),
    Run("07", 1, 8),
    Run("13", 1, 8),
    Run("12", 2, 8),
    Run("16", 1, 8, ("--steps", "8", "--warmup", "2")),  # two stages, two replicas, two slices
    Run("16", 2, 8, ("--steps", "8", "--warmup", "2", "--recompute")),  # four replicas
    Run("15", 1, 8),
    Run("08", 2, 8, ("--layers", "16", "--micro-batches", "16")),  # one layer and one micro-batch for each stage
    Run("09", 1, 8),  # a ring; Ulysses has four heads
]
TOLERANCE = 0.002  # as in tests/support/scripting.py
TIMEOUT = 900  # seconds for one rehearsal: 16 ranks may share two cores
OF_THE_LAUNCH = ("world_size", "nodes")  # keys of a result that depend on how the script was started


def result(*words: object) -> dict[str, float]:
    """The numbers that Python prints last, as ``result {json}``; none, and all that it printed, where it fails."""
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode:
        print(done.stdout, done.stderr, flush=True)
        return {}
    return json.loads(done.stdout.strip().splitlines()[-1].removeprefix("result "))


def main() -> int:
    """Make all runs and print a table of them; return how many failed."""
    failures = 0
    print(f"{'script':24} {'GPUs':>6} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            [script] = chapters.export(run.chapter, Path(folder) / "scripts")
            start = time.monotonic()
            size = ["--nodes", run.nodes, "--gpus", run.gpus, "--timeout", TIMEOUT]
            rehearsed = result("-m", "helpers", "rehearse", script, *size, "--", *run.flags)
            seconds = time.monotonic() - start
            differences = numbers(rehearsed, result(script, *run.flags), TOLERANCE)  # alone, a script runs on gloo
            wrong = [line for line in differences if not line.startswith(OF_THE_LAUNCH)]
            failures += bool(wrong)
            gpus = f"{run.nodes}x{run.gpus}" if run.nodes > 1 else str(run.gpus)
            print(
                f"{script.stem:24} {gpus:>6} {seconds:8.1f}  {'; '.join(['NO', *wrong]) if wrong else 'yes'}",
                flush=True,
            )
    return failures


if __name__ == "__main__":
    sys.exit(main() > 0)
