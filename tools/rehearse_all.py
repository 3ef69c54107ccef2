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
from helpers.export.facts import Rehearsal, facts_at
from helpers.verify.compare import numbers

TOLERANCE = 0.002  # as in tests/support/scripting.py
TIMEOUT = 900  # seconds for one rehearsal: 16 ranks may share two cores
OF_THE_LAUNCH = ("world_size", "nodes")  # keys of a result that depend on how the script was started


def result(*words: object) -> dict[str, float]:
    """The numbers that Python prints last, as ``result {json}``; none, and all that it printed, where it fails."""
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode != 0:
        print(done.stdout, done.stderr, flush=True)
        return {}
    last_line = done.stdout.strip().splitlines()[-1]
    return json.loads(last_line.removeprefix("result "))


def rehearse(script: Path, run: Rehearsal) -> bool:
    """Rehearse a script and run it alone, on gloo. Print a line of the table; return whether the results are equal."""
    flags = run.flags.split()
    start = time.monotonic()
    size = ["--nodes", run.nodes, "--gpus", run.gpus, "--timeout", TIMEOUT]
    rehearsed = result("-m", "helpers", "rehearse", script, *size, "--", *flags)
    seconds = time.monotonic() - start
    differences = []
    for line in numbers(rehearsed, result(script, *flags), TOLERANCE):
        if not line.startswith(OF_THE_LAUNCH):
            differences.append(line)
    gpus = str(run.gpus)
    if run.nodes > 1:
        gpus = f"{run.nodes}x{run.gpus}"
    verdict = "yes"
    if differences:
        verdict = "; ".join(["NO", *differences])
    print(f"{script.stem:24} {gpus:>6} {seconds:8.1f}  {verdict}", flush=True)
    return not differences


def main() -> int:
    """Make all runs and print a table of them; return 1 where one differed."""
    all_equal = True
    print(f"{'script':24} {'GPUs':>6} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in chapters.chapters():
            for run in facts_at(path).script.rehearsals:
                [script] = chapters.export(path, Path(folder) / "scripts")
                if not rehearse(script, run):
                    all_equal = False
    return int(not all_equal)


if __name__ == "__main__":
    sys.exit(main())
