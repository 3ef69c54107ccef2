"""Rehearse chapters on many pretended GPUs and compare their results with one rank's on gloo (``make rehearse``)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.export import chapters


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


def equal(numbers: dict[str, float], expected: dict[str, float]) -> bool:
    """Whether two results have the same numbers, within TOLERANCE and without OF_THE_LAUNCH."""
    names = (numbers.keys() | expected.keys()) - set(OF_THE_LAUNCH)
    return all(name in numbers and abs(numbers[name] - expected.get(name, float("nan"))) <= TOLERANCE for name in names)


def result(out: str) -> Any:
    """The numbers of a script's last line, ``result {json}``."""
    return json.loads(out.strip().splitlines()[-1].removeprefix("result "))


def python(*words: object) -> subprocess.CompletedProcess[str]:
    """A finished process of Python; alone, a script runs on one rank and gloo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)


def main() -> int:
    """Make all runs and print a table of them; return how many failed."""
    failures = 0
    print(f"{'script':24} {'GPUs':>6} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            [script] = chapters.export(run.chapter, Path(folder) / "scripts")
            start = time.monotonic()
            size = ["--nodes", run.nodes, "--gpus", run.gpus]
            rehearsal = python("-m", "helpers", "rehearse", script, "--timeout", str(TIMEOUT), *size, "--", *run.flags)
            seconds = time.monotonic() - start
            alone = python(script, *run.flags)
            right = not (rehearsal.returncode or alone.returncode) and equal(
                result(rehearsal.stdout), result(alone.stdout)
            )
            failures += not right
            gpus = f"{run.nodes}x{run.gpus}" if run.nodes > 1 else str(run.gpus)
            print(f"{script.stem:24} {gpus:>6} {seconds:8.1f}  {'yes' if right else 'NO'}", flush=True)
            if not right:
                print(rehearsal.stdout, rehearsal.stderr, alone.stderr, flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main() > 0)
