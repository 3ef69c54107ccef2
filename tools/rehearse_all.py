"""Rehearse chapters on many pretended GPUs and compare their results with one rank's on gloo (``make rehearse``)."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers.export import chapters

# (chapter, nodes, GPUs of a node, flags of the script)
RUNS = [
    ("01", 1, 8, []),
    ("02", 1, 8, []),
    ("04", 1, 8, []),
    ("06", 1, 8, []),
    ("07", 1, 8, []),
    ("13", 1, 8, []),
    ("12", 2, 8, []),
    ("16", 1, 8, ["--steps", "8", "--warmup", "2"]),  # two stages, two replicas, two slices
    ("16", 2, 8, ["--steps", "8", "--warmup", "2", "--recompute"]),  # four replicas
    ("15", 1, 8, []),
    ("08", 2, 8, ["--layers", "16", "--micro-batches", "16"]),  # one layer and one micro-batch for each stage
    ("09", 1, 8, []),  # a ring; Ulysses has four heads
]
TOLERANCE = 0.002  # as in tests/scripting.py
TIMEOUT = 900  # seconds for one rehearsal: 16 ranks may share two cores
OF_THE_LAUNCH = ("world_size", "nodes")  # keys of a result that depend on how the script was started


def equal(found, expected):
    """Whether two results have the same numbers, within TOLERANCE and without OF_THE_LAUNCH."""
    names = (found.keys() | expected.keys()) - set(OF_THE_LAUNCH)
    return all(name in found and abs(found[name] - expected.get(name, float("nan"))) <= TOLERANCE for name in names)


def result(out):
    """The numbers of a script's last line, ``result {json}``."""
    return json.loads(out.strip().splitlines()[-1].removeprefix("result "))


def alone(script, flags):
    """The result of a script on one rank and gloo."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *flags]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    return result(done.stdout)


def rehearse(script, nodes, gpus, flags):
    """(seconds, the finished process) of a script's rehearsal."""
    start = time.monotonic()
    command = [sys.executable, "-m", "helpers", "rehearse", script, "--nodes", str(nodes), "--gpus", str(gpus), "--"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=TIMEOUT)
    return time.monotonic() - start, done


def main():
    failed = 0
    print(f"{'script':24} {'GPUs':>6} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for chapter, nodes, gpus, flags in RUNS:
            [script] = chapters.export(chapter, Path(folder) / "scripts")
            seconds, done = rehearse(script, nodes, gpus, flags)
            right = done.returncode == 0 and equal(result(done.stdout), alone(script, flags))
            failed += not right
            size = f"{nodes}x{gpus}" if nodes > 1 else str(gpus)
            print(f"{script.stem:24} {size:>6} {seconds:8.1f}  {'yes' if right else 'NO'}", flush=True)
            if not right:
                print(done.stdout, done.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
