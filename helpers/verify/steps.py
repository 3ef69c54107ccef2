"""The steps of a verification: the doctor, a chapter's script in three ways, and the speed that a script measures."""

import os
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.export.facts import Script as Facts
from helpers.verify.compare import differences, times
from helpers.verify.record import Step
from helpers.verify.runs import Launcher, cause

KINDS = ("GPUs", "gloo", "rehearsed")
CORES_AT_ONCE = 3  # cores for each rank with which a chapter's three runs go on together


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


def chapter(launcher: Launcher, script: Path, facts: Facts, timeout: float) -> Step:
    """A script on GPUs, on gloo and rehearsed, and what differed."""
    start = time.monotonic()
    flags = facts.quick_flags.split()
    at_once = 1
    if (os.cpu_count() or 1) >= CORES_AT_ONCE * launcher.ranks:
        at_once = len(KINDS)
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(launcher.run, kind, script, flags, timeout, at_once) for kind in KINDS]
    gpus, gloo, rehearsed = (future.result() for future in futures)
    totals, _ = times(gpus.lines)
    waits = sum(count for event, count in totals.items() if event.endswith(" waits"))
    collectives = sum(count for event, count in totals.items() if event) - waits
    return Step(
        seconds=time.monotonic() - start,
        differences=differences(gpus, gloo, rehearsed, facts.tolerance),
        summary=f"result as on gloo; {waits} waits and {collectives} collectives as rehearsed",
        command=launcher.command(script, flags),
        result=gpus.result,
        script_seconds=[gpus.seconds, gloo.seconds],
        memory=gpus.memory,
    )


def speed(launcher: Launcher, script: Path, facts: Facts, timeout: float) -> Step:
    """What a script that measures prints on GPUs, without the observer."""
    start = time.monotonic()
    if launcher.rehearsal:
        flags = facts.quick_flags.split()
    else:
        flags = facts.speed_flags.split()
    run = launcher.run("speed", script, flags, timeout)
    lines = []
    if run.trouble:
        lines.append(f"on GPUs it {run.trouble}")
    return Step(time.monotonic() - start, lines, "measured", launcher.command(script, flags), printed=run.printed)
