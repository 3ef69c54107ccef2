"""``python -m helpers verify``: its arguments, and its steps one after the other. The page is written after each."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from helpers.command_line import positive_int, positive_seconds
from helpers.export.facts import Script as ScriptFacts
from helpers.ranks.torchrun import folder_until_a_signal
from helpers.verify import steps
from helpers.verify.archive import keep_logs
from helpers.verify.machine import Machine, obstacle
from helpers.verify.measuring import measure
from helpers.verify.order import DOCTOR, LAUNCH, PROBES, ordered, probes_of
from helpers.verify.page import page, rounded
from helpers.verify.predictions import predictions_for
from helpers.verify.record import Probe, Record, Step
from helpers.verify.runs import Launcher, OutOfTime, cause
from helpers.verify.sources import commit, facts_of_chapters, scripts_of
from helpers.writing import write_text

NUMBERS_OF_RANKS = (8, 4, 2, 1)  # numbers of ranks by which the chapters' batches, heads and layers can be divided
SECONDS_PER_MINUTE = 60
# The default limit of one run of a script: a tenth of the seconds for all steps, but at most 120.
LONGEST_RUN = 120
RUNS_IN_ALL = 10
SHORTEST_STEP = 20  # seconds: a step is not begun if fewer are left
MACHINE_SECONDS = 300  # in which a process must import torch and ask for the GPUs
REHEARSED = "on simulated GPUs: no figure here was measured on a GPU"

TakeStep = Callable[[], Probe | Step]  # a function that takes a step and returns its results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify`` to its parser."""
    parser.description = (
        "Run probes, every chapter's script and the doctor on this machine's GPUs, and compare with predictions, gloo "
        "and the rehearsal. The results are written after each step. The exit status is 1 where something differs or "
        "is left."
    )
    parser.add_argument("--gpus", type=positive_int, metavar="N", help="GPUs to use (default: all; in a rehearsal 2)")
    parser.add_argument(
        "--chapters", nargs="+", metavar="CHAPTER", help="run only these chapters, or these scripts, and no probes"
    )
    parser.add_argument(
        "--probes", nargs="+", choices=[*PROBES], metavar="NAME", help=f"run only these probes, of {' '.join(PROBES)}"
    )
    parser.add_argument("--out", type=Path, default=Path("verify"), metavar="DIR", help="folder (default: verify)")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="S",
        help="the most seconds that one run may take (default: a tenth of --minutes, at most 120)",
    )
    parser.add_argument(
        "--minutes",
        type=positive_seconds,
        default=20,
        metavar="M",
        help="the most minutes that all steps may take; what is left then is not run (default: 20)",
    )
    parser.add_argument("--rehearsal", action="store_true", help="try the command on simulated GPUs")


def main(args: argparse.Namespace) -> int:
    """Verify the book. Returns 1 if a step differed or is left, or if this machine cannot do it; otherwise 0."""
    end = time.monotonic() + SECONDS_PER_MINUTE * args.minutes
    try:
        with folder_until_a_signal() as folder:
            return verify(args, Path(folder), end)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def verify(args: argparse.Namespace, folder: Path, end: float) -> int:
    """Run the steps of a verification until the moment ``end`` (by time.monotonic()), and return the exit status.

    ``folder`` is a temporary folder for scripts and logs. Raises ValueError with two lines if the verification cannot
    begin.
    """
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{args.out} is no folder: {error.strerror}.\nName another one: --out DIR") from None
    keep_earlier(args.out)
    logs = folder / "logs"
    logs.mkdir()
    scripts: list[Path] = []
    only_probes = bool(args.probes) and not args.chapters
    if not only_probes:
        scripts = scripts_of(args.chapters or [], folder / "scripts")

    launcher_of_machine = Launcher(
        ranks=args.gpus or 2,  # in a rehearsal, how many GPUs are simulated
        rehearsal=args.rehearsal,
        folder=logs,
        end=end,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
    )
    machine = machine_of(launcher_of_machine)
    reason = obstacle(machine, args.gpus)
    if reason:
        raise ValueError(reason)

    gpus = args.gpus or len(machine.gpus)
    ranks_of_scripts = max(number for number in NUMBERS_OF_RANKS if number <= gpus)
    launcher = replace(launcher_of_machine, ranks=ranks_of_scripts)
    planned_steps = steps_to_take(args, launcher, gpus, scripts)
    record = Record(facts_of(machine, launcher), predictions_for(machine.gpus[0], gpus))
    say("machine", f"{machine}; scripts on {launcher.ranks}")
    steps_left = take_all(planned_steps, record, launcher, args.out)
    if steps_left:
        say("left", f"{len(steps_left)} steps after {args.minutes:g} minutes: {' '.join(steps_left)}")
    say("page", str(args.out / "page.md"))

    something_differs = any(step.differences for step in record.steps.values())
    a_probe_failed = any(probe.trouble for probe in record.probes.values())
    if steps_left or something_differs or a_probe_failed:
        return 1
    return 0


def steps_to_take(args: argparse.Namespace, launcher: Launcher, gpus: int, scripts: list[Path]) -> dict[str, TakeStep]:
    """The steps of a verification with these arguments: {a step's name: the function that takes it}, in order.

    ``order.ordered`` has the order of all steps. Some of them are left out here.
    """
    probes = probes_of(args.probes, gpus)
    only_chapters = bool(args.chapters) and not args.probes
    if only_chapters:
        probes = []
    seconds_in_all = SECONDS_PER_MINUTE * args.minutes
    timeout = args.timeout or min(LONGEST_RUN, seconds_in_all / RUNS_IN_ALL)
    facts = facts_of_chapters()

    functions: dict[str, TakeStep] = {DOCTOR: partial(steps.doctor, launcher, gpus, timeout)}
    # Ranks of a notebook's cell cannot use simulated GPUs. Their checks take a while, so they are only made when all
    # chapters are verified.
    if steps.LAUNCH_CHECKS.exists() and not args.rehearsal and not args.chapters:
        functions[LAUNCH] = partial(steps.launch_checks, launcher)
    for task in probes:
        functions[task.name] = partial(measure, launcher, task, gpus)
    for script in scripts:
        facts_of_script = facts.get(script.stem, ScriptFacts())  # A script that belongs to no chapter has the defaults.
        functions[script.stem] = partial(steps.chapter, launcher, script, facts_of_script, timeout)

    order = ordered(probes, [script.stem for script in scripts])
    return {name: functions[name] for name in order if name in functions}


def take_all(planned_steps: Mapping[str, TakeStep], record: Record, launcher: Launcher, out: Path) -> list[str]:
    """Take the steps one after the other until the time is over. Returns the names of the steps that are left.

    planned_steps: {a step's name: the function that takes it}. The results of each step are added to the record, and
    then the record's files in ``out`` are written again. So whoever stops the command has what was measured until then.
    """
    steps_left = list(planned_steps)
    write_files(record, steps_left, out)
    for name, take_step in planned_steps.items():
        start = time.monotonic()
        if launcher.end - start < SHORTEST_STEP:
            break
        try:
            outcome = take_step()
        except OutOfTime:
            break
        finally:
            keep_logs(launcher.folder, out)
        if isinstance(outcome, Probe):
            record.probes[name] = outcome
            line = line_of_probe(outcome)
        else:
            record.steps[name] = outcome
            line = line_of_step(outcome)
        steps_left.remove(name)
        write_files(record, steps_left, out)
        say(name, line, seconds=time.monotonic() - start)
    return steps_left


def keep_earlier(out: Path) -> None:
    """Rename the files of an earlier run, so that this run does not overwrite what a borrowed GPU measured.

    results.json becomes results-1.json, or results-2.json if there is a results-1.json already. The other files get the
    same number.
    """
    if not (out / "results.json").exists():
        return
    number = 1
    while (out / f"results-{number}.json").exists():
        number += 1
    for name in ("results.json", "page.md", "logs.zip"):
        path = out / name
        if path.exists():
            path.rename(out / f"{path.stem}-{number}{path.suffix}")


def write_files(record: Record, missing: list[str], out: Path) -> None:
    """Write results.json and page.md. If the command is killed meanwhile, the old ones stay, not half of a new one."""
    write_text(out / "results.json", json.dumps(asdict(record), indent=1))
    write_text(out / "page.md", page(record, missing))


# --- lines of progress ------------------------------------------------------------------------------------------------


def say(name: str, text: str, seconds: float | None = None) -> None:
    """Print a line of progress in columns: a step's name, how long it took, and its results."""
    duration = ""
    if seconds is not None:
        duration = f"{seconds:.0f} s"
    print(f"{name:26}{duration:>6}  {text}", flush=True)


def line_of_probe(probe: Probe) -> str:
    """The results of a probe in a line: its first two figures, or ``hung: … (measured before: …)``."""
    texts = []
    for figure in probe.figures[:2]:
        text = f"{figure.name} {rounded(figure.value)} {figure.unit}"
        texts.append(text.strip())  # Some figures have no unit.
    figures = "; ".join(texts)
    if not probe.trouble:
        return figures
    return f"{probe.trouble} (measured before: {figures or 'nothing'})"


def line_of_step(step: Step) -> str:
    """The results of a step in a line: its first difference and how many more there are, or what agreed."""
    if not step.differences:
        return step.summary
    more = ""
    if len(step.differences) > 1:
        more = f" (and {len(step.differences) - 1} more on the page)"
    return f"DIFFERS {step.differences[0]}{more}"


# --- the machine ------------------------------------------------------------------------------------------------------


def facts_of(machine: Machine, launcher: Launcher) -> dict[str, str]:
    """The first rows of the page, {what: value}, which say where and how the figures were measured."""
    facts = {
        "machine": str(machine),
        "ranks of the scripts": str(launcher.ranks),
        "commit": commit(),
        "command": f"`{shlex.join(['python', '-m', 'helpers', *sys.argv[1:]])}`",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    if launcher.rehearsal:
        facts["rehearsed"] = REHEARSED
    return facts


def machine_of(launcher: Launcher) -> Machine:
    """What this machine has. Another process asks PyTorch for it, so that this one never holds a GPU.

    Raises ValueError if that process fails or hangs.
    """
    program = str(Path(__file__).with_name("machine.py"))
    words = [program]
    if launcher.rehearsal:
        words = ["-m", "helpers", "rehearse", program, f"--gpus={launcher.ranks}"]
    try:
        finished = launcher.python(words, name="machine", timeout=MACHINE_SECONDS)
        if finished.status == 0:
            return Machine(**json.loads(finished.out))
        if finished.status is None:
            reason = f"it hung for {MACHINE_SECONDS} s"
        else:
            reason = cause(finished.errors)
    except OutOfTime:
        reason = "the time was over before it answered"
    raise ValueError(f"PyTorch cannot be asked for its GPUs: {reason}\nTry nvidia-smi, and python -c 'import torch'.")
