"""Rehearse chapters on many simulated GPUs and compare their results with one rank's on gloo (``make rehearse``).

On how many GPUs, and with which flags, a notebook says under ``script.rehearsals`` (helpers/export/facts.py).
"""

import sys
import tempfile
import time
from pathlib import Path

from run_scripts import TIMEOUT, TOLERANCE, Failed, result

from helpers.export import chapters
from helpers.export.facts import Rehearsal, facts_at
from helpers.verify.compare import numbers

KEYS_OF_THE_LAUNCH = ("world_size", "nodes")  # numbers of a result that depend on how the script was started


def rehearse(script: Path, run: Rehearsal) -> bool:
    """Rehearse a script on simulated GPUs, compare it with a run on one rank with gloo, and print a line of the table.

    ``run`` says on how many GPUs of how many nodes, and with which flags. Returns whether both runs have the same
    result, but for the numbers that depend on how the script was started.
    """
    start = time.monotonic()
    try:
        differences = differences_from_gloo(script, run)
    except Failed as failure:
        are_equal = False
        verdict = f"NO: {failure}"
    else:
        are_equal = not differences
        if are_equal:
            verdict = "yes"
        else:
            verdict = "; ".join(["NO", *differences])
    seconds = time.monotonic() - start
    print(f"{script.stem:24} {run.nodes:5} x {run.gpus:2} {seconds:8.1f}  {verdict}", flush=True)
    return are_equal


def differences_from_gloo(script: Path, run: Rehearsal) -> list[str]:
    """Run a script on simulated GPUs and on one rank with gloo, and return how the two results differ, as texts.

    Raises Failed if one of the two runs fails.
    """
    flags = run.flags.split()
    options = ["--nodes", run.nodes, "--gpus", run.gpus, "--timeout", TIMEOUT]
    on_simulated_gpus = result(script.parent, "-m", "helpers", "rehearse", script, *options, "--", *flags)
    on_gloo = result(script.parent, script, *flags)
    differences = []
    for difference in numbers(on_simulated_gpus, on_gloo, TOLERANCE):  # each begins with the key of a number
        if not difference.startswith(KEYS_OF_THE_LAUNCH):
            differences.append(difference)
    return differences


def main() -> int:
    """Make all runs and print a table of them; return 1 where one differed."""
    all_equal = True
    print(f"{'script':24} {'GPUs':>10} {'seconds':>8}  equal to gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(folder) / "scripts"
        for notebook in chapters.chapters():
            what_the_chapter_says = facts_at(notebook)
            for run in what_the_chapter_says.script.rehearsals:
                script = chapters.export_script(notebook, scripts)
                if not rehearse(script, run):
                    all_equal = False
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
