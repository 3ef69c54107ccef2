"""Rehearse chapters on many pretended GPUs and compare their results with one rank's on gloo (``make rehearse``).

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
    """Rehearse a script on pretended GPUs, compare it with a run on one rank with gloo, and print a line of the table.

    ``run`` says on how many GPUs of how many nodes, and with which flags. Returns whether both runs have the same
    result, but for the numbers that depend on how the script was started.
    """
    flags = run.flags.split()
    start = time.monotonic()
    options = ["--nodes", run.nodes, "--gpus", run.gpus, "--timeout", TIMEOUT]
    try:
        rehearsed = result(script.parent, "-m", "helpers", "rehearse", script, *options, "--", *flags)
        on_gloo = result(script.parent, script, *flags)
    except Failed as failure:
        are_equal = False
        verdict = f"NO: {failure}"
    else:
        differences = []
        for difference in numbers(rehearsed, on_gloo, TOLERANCE):  # each begins with the key of a number
            if not difference.startswith(KEYS_OF_THE_LAUNCH):
                differences.append(difference)
        are_equal = not differences
        verdict = "yes" if are_equal else "; ".join(["NO", *differences])
    seconds = time.monotonic() - start
    print(f"{script.stem:24} {run.nodes:5} x {run.gpus:2} {seconds:8.1f}  {verdict}", flush=True)
    return are_equal


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
