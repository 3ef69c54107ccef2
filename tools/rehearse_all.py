"""Rehearse chapters on many pretended GPUs and compare their results with one rank's on gloo (``make rehearse``).

On how many GPUs, and with which flags, a notebook says under ``script.rehearsals`` (helpers/export/facts.py).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers.export import chapters
from helpers.export.facts import facts_at
from helpers.verify.compare import numbers

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
        runs = [(path, run) for path in chapters.chapters() for run in facts_at(path).script.rehearsals]
        for path, run in runs:
            [script] = chapters.export(path, Path(folder) / "scripts")
            flags = run.flags.split()
            start = time.monotonic()
            size = ["--nodes", run.nodes, "--gpus", run.gpus, "--timeout", TIMEOUT]
            rehearsed = result("-m", "helpers", "rehearse", script, *size, "--", *flags)
            seconds = time.monotonic() - start
            differences = numbers(rehearsed, result(script, *flags), TOLERANCE)  # alone, a script runs on gloo
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
