"""``python -m helpers verify``: its arguments, its steps one after the other, and the page after each of them."""

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from helpers.command_line import positive_int, positive_seconds
from helpers.export.facts import Script as ScriptFacts
from helpers.ranks.torchrun import folder_until_a_signal
from helpers.verify import steps
from helpers.verify.archive import keep_logs
from helpers.verify.machine import Machine, obstacle
from helpers.verify.measuring import measure
from helpers.verify.order import DOCTOR, LAUNCH, PROBES, SPEED, ordered, probes_of
from helpers.verify.page import page, rounded
from helpers.verify.predictions import predictions_for
from helpers.verify.record import Probe, Record, Step, read, write, write_whole
from helpers.verify.runs import Launcher, OutOfTime
from helpers.verify.sources import ROOT, commit, facts_of_chapters, scripts_of

NUMBERS_OF_RANKS = (8, 4, 2, 1)  # The chapters' batches, heads and layers can be divided by these.
LIBRARY = ROOT / "book" / "measured"
LONGEST_RUN = 120  # seconds of one run of a script, by default
RUNS_IN_ALL = 10  # If there are few minutes in all, a run gets so small a part of them.
SHORTEST_STEP = 20  # seconds: a step that cannot have so many is not begun
MACHINE_SECONDS = 120  # to import torch and to ask for the GPUs
REHEARSED = "on pretended GPUs: no figure here was measured on a GPU"
# An earlier record is continued if it has the same of these facts.
IDENTITY = ("machine", "ranks of the scripts", "commit", "rehearsed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify`` to its parser."""
    parser.description = (
        "Run probes, every chapter's script and the doctor on this machine's GPUs, and compare with predictions, gloo "
        "and the rehearsal. Steps that have ended are kept in the folder: the same command goes on. The exit status "
        "is 1 where something differs or is left."
    )
    parser.add_argument("--gpus", type=positive_int, metavar="N", help="GPUs to use (default: all; in a rehearsal 2)")
    parser.add_argument("--chapters", nargs="+", metavar="CHAPTER", help="these alone, or paths of scripts; no probes")
    parser.add_argument(
        "--probes", nargs="+", choices=[*PROBES], metavar="NAME", help=f"these alone: {' '.join(PROBES)}"
    )
    parser.add_argument("--out", type=Path, default=Path("verify"), metavar="DIR", help="folder (default: verify)")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="S",
        help="seconds of a run (default: a tenth of the minutes, at most 120)",
    )
    parser.add_argument(
        "--minutes",
        type=positive_seconds,
        default=20,
        metavar="M",
        help="for everything; what is left then is left (20)",
    )
    parser.add_argument("--rehearsal", action="store_true", help="try the command on pretended GPUs")
    parser.add_argument("--record", action="store_true", help="write the page and results to book/measured, too")


def main(args: argparse.Namespace) -> int:
    """Verify; return 0, or 1 where a step differed or is left, or where the machine cannot do it."""
    end = time.monotonic() + 60 * args.minutes
    try:
        with folder_until_a_signal() as folder:
            return verify(args, Path(folder), end)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def verify(args: argparse.Namespace, folder: Path, end: float) -> int:
    """As ``main``, until the moment ``end``, with scripts and logs in a folder. ValueError where it cannot begin."""
    if args.record and (args.rehearsal or not LIBRARY.is_dir()):
        raise ValueError("--record is for real GPUs, in a copy of the repository.\nLeave it out.")
    out = args.out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{args.out} is no folder: {error.strerror}.\nName another one: --out DIR") from None
    logs = folder / "logs"
    logs.mkdir()
    launcher = Launcher(args.gpus or 2, args.rehearsal, logs, end, os.environ.get("OMP_NUM_THREADS", ""))
    scripts: list[Path] = []
    if args.chapters or not args.probes:
        scripts = scripts_of(args.chapters or [], folder / "scripts")
    machine = machine_of(launcher)
    reason = obstacle(machine, args.gpus)
    if reason:
        raise ValueError(reason)

    gpus = args.gpus or len(machine.gpus)
    ranks = next(number for number in NUMBERS_OF_RANKS if number <= gpus)
    launcher = replace(launcher, ranks=ranks)
    facts_by_chapter = facts_of_chapters()
    facts = {script.stem: facts_by_chapter.get(script.stem, ScriptFacts()) for script in scripts}
    probes = probes_of(args.probes, gpus)
    if args.chapters and not args.probes:
        probes = []
    # Pretended GPUs cannot have ranks of a cell, and only a verification of everything takes the time for their checks.
    with_launch_checks = steps.LAUNCH_CHECKS.exists() and not args.rehearsal and not args.chapters
    work = Work(
        launcher=launcher,
        gpus=gpus,
        timeout=args.timeout or min(LONGEST_RUN, 60 * args.minutes / RUNS_IN_ALL),
        scripts={script.stem: script for script in scripts},
        facts=facts,
    )
    results = Results(
        out=out,
        record=Record(facts_of(machine, launcher), predictions=predictions_for(machine.gpus[0], gpus)),
        names=ordered(probes, facts, ranks, with_launch_checks),
        tolerances={name: chapter.tolerance for name, chapter in facts_by_chapter.items()},
    )
    if args.record:
        results.name_in_library = f"{datetime.now(UTC):%Y-%m-%d}-{gpus}-gpus"
    say("machine", f"{machine}; scripts on {launcher.ranks}")
    results.continue_earlier_record()
    results.write()
    take_all_steps(work, results, args.minutes)
    say("page", str(args.out / "page.md"))
    return int(bool(results.missing) or results.has_trouble)


def take_all_steps(work: "Work", results: "Results", minutes: float) -> None:
    """Take all steps that are not in the record, until the time is over, and write the files after each one."""
    missing = results.missing
    for name in results.names:
        if name not in missing:
            say(name, outcome(results.record, name))
            continue
        start = time.monotonic()
        if work.launcher.end - start < SHORTEST_STEP:
            break
        try:
            work.take_step(name, results.record)
        except OutOfTime:
            break
        finally:
            keep_logs(work.launcher.folder, results.out)
        results.write()
        say(name, outcome(results.record, name), seconds=time.monotonic() - start)
    if results.missing:
        count = len(results.missing)
        say("left", f"{count} steps after {minutes:g} minutes; the same command goes on with them")


@dataclass(frozen=True)
class Work:
    """What is needed to take a step by its name."""

    launcher: Launcher
    gpus: int
    timeout: float  # seconds of one run of a script
    scripts: dict[str, Path]
    facts: dict[str, ScriptFacts]

    def take_step(self, name: str, record: Record) -> None:
        """Take a step, and put what it came to into the record. Raises OutOfTime where it had to be stopped."""
        if name in PROBES:
            predictions = record.predictions.get(name, [])
            record.probes[name] = measure(self.launcher, PROBES[name], self.gpus, predictions)
        elif name == DOCTOR:
            record.steps[name] = steps.doctor(self.launcher, self.gpus, self.timeout)
        elif name == LAUNCH:
            record.steps[name] = steps.launch_checks(self.launcher)
        elif name.endswith(SPEED):
            script = name.removesuffix(SPEED)
            record.steps[name] = steps.speed(self.launcher, self.scripts[script], self.facts[script], self.timeout)
        else:
            record.steps[name] = steps.chapter(self.launcher, self.scripts[name], self.facts[name], self.timeout)


@dataclass
class Results:
    """The record, and its files in the folder ``out``: results.json and page.md."""

    out: Path
    record: Record
    names: list[str]  # of the steps, in order
    tolerances: dict[str, float]  # of the chapters' results
    name_in_library: str = ""  # of the copies in book/measured; "" for none

    @property
    def missing(self) -> list[str]:
        """The steps that have not ended."""
        return [name for name in self.names if name not in self.record.steps and name not in self.record.probes]

    @property
    def has_trouble(self) -> bool:
        """Whether a step differed, or a probe did not end well."""
        steps_differ = any(step.differences for step in self.record.steps.values())
        return steps_differ or any(probe.trouble for probe in self.record.probes.values())

    def continue_earlier_record(self) -> None:
        """Keep the steps and predictions of an earlier start, if it was of this machine and this commit."""
        path = self.out / "results.json"
        if not path.exists():
            return
        try:
            earlier = read(path)
        except ValueError as error:
            raise ValueError(f"{error}\nDelete it, or choose another folder: --out DIR") from None
        if any(earlier.facts.get(name) != self.record.facts.get(name) for name in IDENTITY):
            say("results", f"{path} is of another machine or commit: all steps run again")
            return
        self.record.predictions = earlier.predictions
        self.record.steps = earlier.steps
        self.record.probes = earlier.probes

    def write(self) -> None:
        """Write both files, each at once: whoever kills the command leaves complete ones."""
        self.record.facts["command"] = f"`{shlex.join(['python', '-m', 'helpers', *sys.argv[1:]])}`"
        self.record.facts["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
        text = page(self.record, self.missing, self.tolerances)
        write(self.record, self.out / "results.json")
        write_whole(text, self.out / "page.md")
        if self.name_in_library:
            write(self.record, LIBRARY / f"{self.name_in_library}.json")
            write_whole(text, LIBRARY / f"{self.name_in_library}.md")


# --- lines of progress ------------------------------------------------------------------------------------------------


def say(name: str, text: str, seconds: float | None = None) -> None:
    """Print a line of progress. A step that is kept from an earlier start has no seconds."""
    duration = ""
    if seconds is not None:
        duration = f"{seconds:.0f} s"
    print(f"{name:26}{duration:>6}  {text}", flush=True)


def outcome(record: Record, name: str) -> str:
    """What a step came to, in a line."""
    if name in record.probes:
        return outcome_of_probe(record.probes[name])
    return outcome_of_step(record.steps[name])


def outcome_of_probe(probe: Probe) -> str:
    """``hung: …``, or the first figures."""
    figures = "; ".join(f"{figure.name} {rounded(figure.value)} {figure.unit}".strip() for figure in probe.figures[:2])
    if not probe.trouble:
        return figures
    return f"{probe.trouble} (measured before: {figures or 'nothing'})"


def outcome_of_step(step: Step) -> str:
    """The first difference and how many there are, or what agreed."""
    if not step.differences:
        return step.summary
    more = ""
    if len(step.differences) > 1:
        more = f" (and {len(step.differences) - 1} more on the page)"
    return f"DIFFERS {step.differences[0]}{more}"


# --- the machine ------------------------------------------------------------------------------------------------------


def facts_of(machine: Machine, launcher: Launcher) -> dict[str, str]:
    """The first rows of the page."""
    facts = {"machine": str(machine), "ranks of the scripts": str(launcher.ranks), "commit": commit()}
    if launcher.rehearsal:
        facts["rehearsed"] = REHEARSED
    return facts


def machine_of(launcher: Launcher) -> Machine:
    """The machine, as a process of its own sees it. Raises ValueError where that fails."""
    words = [str(Path(__file__).with_name("machine.py"))]
    if launcher.rehearsal:
        words = ["-m", "helpers", "rehearse", *words, f"--gpus={launcher.ranks}"]
    try:
        finished = launcher.python(words, "machine", MACHINE_SECONDS)
    except OutOfTime:
        raise ValueError("The time was over before the machine was examined.\nGive more: --minutes 8") from None
    if finished.status == 0:
        return Machine(**json.loads(finished.out))
    reason = f"it hung for {MACHINE_SECONDS} s"
    if finished.status is not None:
        reason = finished.errors.strip().rpartition("\n")[2]
    raise ValueError(f"PyTorch cannot be asked for its GPUs: {reason}\nTry nvidia-smi, and python -c 'import torch'.")
