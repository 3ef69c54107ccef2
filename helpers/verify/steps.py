"""The steps of a verification that are not probes: a chapter's script, the doctor, and the checks of ``launch``."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.export.facts import Script as ScriptFacts
from helpers.verify.compare import differences, event_counts
from helpers.verify.record import Step
from helpers.verify.runs import Launcher, Run, cause
from helpers.verify.sources import ROOT

RUNS_OF_CHAPTER = 3  # on GPUs, on gloo, and rehearsed
CORES_FOR_RUNS_AT_ONCE = 3  # With so many cores for each rank, a chapter's three runs run at the same time.
LAUNCH_CHECKS = ROOT / "tools" / "launch_on_gpus.py"
LAUNCH_SECONDS = 180  # The checks take about a minute.


def chapter(launcher: Launcher, script: Path, facts: ScriptFacts, timeout: float) -> Step:
    """Run a chapter's script on GPUs, on gloo and on simulated GPUs, and compare the three runs.

    They run at the same time if there are enough cores. facts: what the chapter says about its script, such as how much
    the numbers of its result may differ. timeout: in seconds, for each run.
    """
    flags = facts.quick_flags.split()
    at_once = 1
    if (os.cpu_count() or 1) >= CORES_FOR_RUNS_AT_ONCE * launcher.ranks:
        at_once = RUNS_OF_CHAPTER
    with ThreadPoolExecutor(at_once) as threads:
        on_gpus_later = threads.submit(launcher.run, "GPUs", script, flags, timeout, at_once)
        on_gloo_later = threads.submit(launcher.run, "gloo", script, flags, timeout, at_once)
        rehearsed_later = threads.submit(launcher.run, "rehearsed", script, flags, timeout, at_once)
    on_gpus = on_gpus_later.result()
    on_gloo = on_gloo_later.result()
    rehearsed = rehearsed_later.result()
    return Step(
        differences=differences(on_gpus, on_gloo, rehearsed, facts.tolerance),
        summary=f"result as on gloo; {events_in_words(on_gpus)} as rehearsed",
        command=launcher.command(script, flags),
        result=on_gpus.result,
        script_seconds=[on_gpus.seconds, on_gloo.seconds],
        memory=on_gpus.memory,
    )


def events_in_words(run: Run) -> str:
    """How many waits and collectives a run had, as text: "3 waits and 2 collectives"."""
    waits = 0
    collectives = 0
    for event, count in event_counts(run.lines).items():
        if event.endswith(" waits"):
            waits += count.in_all
        else:
            collectives += count.in_all
    return f"{waits} waits and {collectives} collectives"


def doctor(launcher: Launcher, gpus: int, timeout: float) -> Step:
    """Run the doctor on all GPUs, or in a rehearsal on gloo. Each problem that it finds is a difference."""
    words = ["-m", "helpers", "doctor", f"--nproc={gpus}"]
    if launcher.rehearsal:
        words.append("--backend=gloo")
    return checking_program(launcher, "doctor", words, timeout, bad="WRONG", summary="nothing is wrong")


def launch_checks(launcher: Launcher, checks: Path = LAUNCH_CHECKS, timeout: float = LAUNCH_SECONDS) -> Step:
    """Check that the ranks of a notebook's cell use the GPUs. Each check that fails is a difference."""
    words = [str(checks)]
    return checking_program(launcher, "launch on GPUs", words, timeout, bad="FAILED", summary="all checks passed")


def checking_program(launcher: Launcher, name: str, words: list[str], timeout: float, bad: str, summary: str) -> Step:
    """Run a program that checks several things and prints a line for each: ``python`` with these words behind it.

    Its lines that begin with the word ``bad``, such as "FAILED", become the differences of the step. So does a hang,
    and without such lines an exit status other than 0. summary: what the step says if there are no differences. name:
    the name of its logs.
    """
    finished = launcher.python(words, name, timeout)
    problems = [line for line in finished.out.splitlines() if line.startswith(bad)]
    if finished.status is None:
        problems.append(f"it hung for {timeout:.0f} s")
    elif finished.status != 0 and not problems:
        problems.append(cause(finished.errors or finished.out))
    return Step(differences=problems, summary=summary)
