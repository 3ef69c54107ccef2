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


def alone(script: Path, run: Run) -> Any:
    """The result of a script on one rank and gloo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *run.flags]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    return result(done.stdout)


def rehearse(script: Path, run: Run) -> subprocess.CompletedProcess[str]:
    """The finished process of a script's rehearsal."""
    size = ["--nodes", str(run.nodes), "--gpus", str(run.gpus)]
    command = [sys.executable, "-m", "helpers", "rehearse", str(script), *size, "--", *run.flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


def main() -> int:
    """Make all runs and print a table of them; return how many failed."""
    failed = 0
    print(f"{'script':24} {'GPUs':>6} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            [script] = chapters.export(run.chapter, Path(folder) / "scripts")
            start = time.monotonic()
            done = rehearse(script, run)
            seconds = time.monotonic() - start
            right = done.returncode == 0 and equal(result(done.stdout), alone(script, run))
            failed += not right
            size = f"{run.nodes}x{run.gpus}" if run.nodes > 1 else str(run.gpus)
            print(f"{script.stem:24} {size:>6} {seconds:8.1f}  {'yes' if right else 'NO'}", flush=True)
            if not right:
                print(done.stdout, done.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
