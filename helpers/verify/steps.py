"""The steps of a verification beside the probes: a chapter's script, the doctor, and launch on GPUs."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.export.facts import Script as ScriptFacts
from helpers.verify.compare import differences, event_counts
from helpers.verify.record import Step
from helpers.verify.runs import Launcher, cause
from helpers.verify.sources import ROOT

KINDS = ("GPUs", "gloo", "rehearsed")
CORES_FOR_RUNS_AT_ONCE = 3  # With so many cores for each rank, a chapter's three runs go on together.
LAUNCH_CHECKS = ROOT / "tools" / "launch_on_gpus.py"
LAUNCH_SECONDS = 180  # The checks take about a minute.


def chapter(launcher: Launcher, script: Path, facts: ScriptFacts, timeout: float) -> Step:
    """Run a chapter's script on GPUs, on gloo and on pretended GPUs, and compare the three runs.

    They run at once if there are cores for it. ``facts`` are what the chapter says of its script, such as how much the
    numbers of its result may differ. ``timeout`` is in seconds, for each run.
    """
    flags = facts.quick_flags.split()
    at_once = 1
    if (os.cpu_count() or 1) >= CORES_FOR_RUNS_AT_ONCE * launcher.ranks:
        at_once = len(KINDS)
    with ThreadPoolExecutor(at_once) as pool:
        runs = [pool.submit(launcher.run, kind, script, flags, timeout, at_once) for kind in KINDS]
    on_gpus, on_gloo, rehearsed = (run.result() for run in runs)

    waits = 0
    collectives = 0
    for event, count in event_counts(on_gpus.lines).items():
        if event.endswith(" waits"):
            waits += count.in_all
        else:
            collectives += count.in_all
    return Step(
        differences=differences(on_gpus, on_gloo, rehearsed, facts.tolerance),
        summary=f"result as on gloo; {waits} waits and {collectives} collectives as rehearsed",
        command=launcher.command(script, flags),
        result=on_gpus.result,
        script_seconds=[on_gpus.seconds, on_gloo.seconds],
        memory=on_gpus.memory,
    )


def doctor(launcher: Launcher, gpus: int, timeout: float) -> Step:
    """Run the doctor on all GPUs, in a rehearsal on gloo; a problem that it finds is a difference."""
    words = ["-m", "helpers", "doctor", f"--nproc={gpus}"]
    if launcher.rehearsal:
        words.append("--backend=gloo")
    return checking_program(launcher, "doctor", words, timeout, bad="WRONG", summary="nothing is wrong")


def launch_checks(launcher: Launcher, checks: Path = LAUNCH_CHECKS, timeout: float = LAUNCH_SECONDS) -> Step:
    """Run the checks that ranks of a notebook's cell use GPUs; a check that fails is a difference."""
    words = [str(checks)]
    return checking_program(launcher, "launch on GPUs", words, timeout, bad="FAILED", summary="all checks passed")


def checking_program(launcher: Launcher, name: str, words: list[str], timeout: float, bad: str, summary: str) -> Step:
    """Run ``python`` with these words behind it: a program that prints a line for each thing that it checks.

    Lines that begin with the word ``bad``, such as "FAILED", become the differences of the step, and so do a hang and
    another exit status than 0. ``summary`` is what the step says if there are none. ``name`` is that of the logs.
    """
    finished = launcher.python(words, name, timeout)
    problems = [line for line in finished.out.splitlines() if line.startswith(bad)]
    if finished.status is None:
        problems.append(f"it hung for {timeout:.0f} s")
    elif finished.status != 0 and not problems:
        problems.append(cause(finished.errors or finished.out))
    return Step(differences=problems, summary=summary)
