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
from helpers.verify.runs import Launcher

AT_ONCE = 3  # cores for each rank with which a chapter's three runs go on together


def doctor(launcher: Launcher, gpus: int, timeout: float) -> Step:
    """The doctor on all GPUs, in a rehearsal on gloo; a problem is a difference."""
    start, words = time.monotonic(), ["-m", "helpers", "doctor", f"--nproc={gpus}"]
    words += ["--backend=gloo"] * launcher.rehearsal
    status, out, errors = launcher.python(words, "doctor", timeout)
    problems = re.findall(r"^WRONG +(.+(?:\n {7}.+)*\n  try: .+(?:\n {7}.+)*)", out, re.MULTILINE)
    if status != 0 and not problems:
        problems = [f"it hung for {timeout:.0f} s" if status is None else errors.strip().rpartition("\n")[2]]
    lines = [" ".join(problem.split()) for problem in problems]
    return Step(time.monotonic() - start, lines, "nothing is wrong", shlex.join(["python", *words]))


def chapter(launcher: Launcher, script: Path, facts: Facts, timeout: float) -> Step:
    """A script on GPUs, on gloo and rehearsed, and what differed."""
    start = time.monotonic()
    flags = facts.quick_flags.split()
    with ThreadPoolExecutor(3 if (os.cpu_count() or 1) >= AT_ONCE * launcher.ranks else 1) as pool:
        kinds = [pool.submit(launcher.run, kind, script, flags, timeout) for kind in ("GPUs", "gloo", "rehearsed")]
    gpus, gloo, rehearsed = (kind.result() for kind in kinds)
    lines = differences(gpus, gloo, rehearsed, facts.tolerance)
    totals, _ = times(gpus.lines)
    waits = sum(count for event, count in totals.items() if event.endswith(" waits"))
    collectives = sum(count for event, count in totals.items() if event) - waits
    summary = f"result as on gloo; {waits} waits and {collectives} collectives as rehearsed"
    command = launcher.command(script, flags)
    return Step(
        time.monotonic() - start, lines, summary, command, gpus.result, [gpus.seconds, gloo.seconds], gpus.memory
    )


def speed(launcher: Launcher, script: Path, facts: Facts, timeout: float) -> Step:
    """What a script that measures prints on GPUs, without the observer."""
    start = time.monotonic()
    if launcher.rehearsal:
        flags = facts.quick_flags.split()
    else:
        flags = facts.speed_flags.split()
    run = launcher.run("speed", script, flags, timeout)
    lines = [f"on GPUs it {run.trouble}"] if run.trouble else []
    return Step(time.monotonic() - start, lines, "measured", launcher.command(script, flags), printed=run.printed)
