"""The steps of a verification beside the probes: a chapter's script, its speed, the doctor, and launch on GPUs."""

import os
import re
import shlex
import time
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
LAUNCH_SECONDS = 180  # They take about a minute.


def chapter(launcher: Launcher, script: Path, facts: ScriptFacts, timeout: float) -> Step:
    """A script on GPUs, on gloo and rehearsed, and what differed."""
    start = time.monotonic()
    flags = facts.quick_flags.split()
    at_once = 1
    if (os.cpu_count() or 1) >= CORES_FOR_RUNS_AT_ONCE * launcher.ranks:
        at_once = len(KINDS)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(launcher.run, kind, script, flags, timeout, at_once) for kind in KINDS]
    on_gpus, on_gloo, rehearsed = (future.result() for future in futures)
    counts = event_counts(on_gpus.lines)
    waits = sum(count.in_all for event, count in counts.items() if event.endswith(" waits"))
    collectives = sum(count.in_all for count in counts.values()) - waits
    return Step(
        seconds=time.monotonic() - start,
        differences=differences(on_gpus, on_gloo, rehearsed, facts.tolerance),
        summary=f"result as on gloo; {waits} waits and {collectives} collectives as rehearsed",
        command=launcher.command(script, flags),
        result=on_gpus.result,
        script_seconds=[on_gpus.seconds, on_gloo.seconds],
        memory=on_gpus.memory,
    )


def speed(launcher: Launcher, script: Path, facts: ScriptFacts, timeout: float) -> Step:
    """What a script that measures prints on GPUs, without the observer."""
    start = time.monotonic()
    flags = facts.speed_flags.split()
    if launcher.rehearsal:
        flags = facts.quick_flags.split()
    run = launcher.run("speed", script, flags, timeout)
    lines = []
    if run.trouble:
        lines.append(f"on GPUs it {run.trouble}")
    return Step(time.monotonic() - start, lines, "measured", launcher.command(script, flags), printed=run.printed)


def doctor(launcher: Launcher, gpus: int, timeout: float) -> Step:
    """The doctor on all GPUs, in a rehearsal on gloo; a problem is a difference."""
    start = time.monotonic()
    words = ["-m", "helpers", "doctor", f"--nproc={gpus}"]
    if launcher.rehearsal:
        words.append("--backend=gloo")
    finished = launcher.python(words, "doctor", timeout)
    problems = re.findall(r"^WRONG +(.+(?:\n {7}.+)*\n  try: .+(?:\n {7}.+)*)", finished.out, re.MULTILINE)
    lines = [" ".join(problem.split()) for problem in problems]
    if finished.status is None:
        lines.append(f"it hung for {timeout:.0f} s")
    elif finished.status != 0 and not problems:
        lines.append(cause(finished.errors))
    return Step(time.monotonic() - start, lines, "nothing is wrong", shlex.join(["python", *words]))


def launch_checks(launcher: Launcher, checks: Path = LAUNCH_CHECKS, timeout: float = LAUNCH_SECONDS) -> Step:
    """The checks that ranks of a cell use GPUs, a program that prints a line for each; one that fails is a difference.

    The program ends with a status above 0 where a check failed or could not begin.
    """
    start = time.monotonic()
    finished = launcher.python([str(checks)], "launch_on_gpus", timeout)
    lines = finished.out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    passed = [line for line in lines if line.startswith("ok")]
    if finished.status is None:
        failed.append(f"it hung: it still ran after {timeout:g} s, when {len(passed)} checks had passed")
    elif finished.status != 0 and not failed:
        reason = cause(finished.errors)
        if lines:
            reason = lines[-1]
        failed.append(reason)
    return Step(
        seconds=time.monotonic() - start,
        differences=failed,
        summary=f"{len(passed)} checks passed",
        command=f"python tools/{checks.name}",
        printed=finished.out,
    )
