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

from helpers.command_line import positive, whole
from helpers.export.facts import Script as Facts
from helpers.ranks.torchrun import folder_until_a_signal
from helpers.verify import steps
from helpers.verify.archive import keep_logs
from helpers.verify.machine import Machine, obstacle
from helpers.verify.measuring import measure
from helpers.verify.order import DOCTOR, PROBES, SPEED, ordered, probes_of
from helpers.verify.page import page, rounded
from helpers.verify.predictions import predictions_for
from helpers.verify.record import Probe, Record, Step, read, write, write_whole
from helpers.verify.runs import Launcher, OutOfTime
from helpers.verify.sources import ROOT, commit, facts_of_chapters, scripts_of

SIZES = (8, 4, 2, 1)  # ranks among which the chapters' batches, heads and layers can be divided
LIBRARY = ROOT / "book" / "measured"
LONGEST_RUN = 120  # seconds of one run of a script, by default; less where all must end soon
RUNS_IN_ALL = 10  # so many such runs fit into all the time
LEAST = 20  # seconds: a step that cannot have so many is not begun
SAME = ("machine", "ranks of the scripts", "commit", "rehearsed")  # facts that a record must share to be gone on with
REHEARSED = "on pretended GPUs: no figure here was measured on a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify`` to its parser."""
    parser.description = (
        "Run probes, every chapter's script and the doctor on this machine's GPUs, and compare with predictions, gloo "
        "and the rehearsal. Steps that have ended are kept: the same command goes on. The exit status is 1 where "
        "something differs or is left."
    )
    parser.add_argument("--gpus", type=whole, metavar="N", help="GPUs to use (default: all; in a rehearsal 2)")
    parser.add_argument("--chapters", nargs="+", metavar="CHAPTER", help="these alone, or paths of scripts; no probes")
    parser.add_argument(
        "--probes", nargs="+", choices=[*PROBES], metavar="NAME", help=f"these alone: {' '.join(PROBES)}"
    )
    parser.add_argument("--out", type=Path, default=Path("verify"), metavar="DIR", help="folder (default: verify)")
    parser.add_argument("--again", action="store_true", help="repeat these steps, though they are kept there")
    parser.add_argument(
        "--timeout", type=positive, metavar="S", help="seconds of a run (default: a tenth of the minutes, at most 120)"
    )
    parser.add_argument(
        "--minutes", type=positive, default=20, metavar="M", help="for everything; what is left then is left (20)"
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
    begin(out)
    logs = folder / "logs"
    logs.mkdir()
    launcher = Launcher(args.gpus or 2, args.rehearsal, logs, end, os.environ.get("OMP_NUM_THREADS", ""))
    scripts: list[Path] = []
    if args.chapters or not args.probes:
        scripts = scripts_of(args.chapters or [], folder / "scripts")
    machine = machine_of(launcher)
    why = obstacle(machine, args.gpus)
    if why:
        raise ValueError(why)
    gpus = args.gpus or len(machine.gpus)
    launcher = replace(launcher, ranks=next(size for size in SIZES if size <= gpus))

    of_chapters = facts_of_chapters()
    facts = {script: of_chapters.get(script.stem, Facts()) for script in scripts}
    names = args.probes
    if args.chapters and not names:
        names = []
    probes = probes_of(names, gpus)
    work = Work(
        launcher=launcher,
        gpus=gpus,
        timeout=args.timeout or min(LONGEST_RUN, 60 * args.minutes / RUNS_IN_ALL),
        scripts={script.stem: script for script in scripts},
        facts={script.stem: own for script, own in facts.items()},
    )
    record = Record(facts_of(machine, launcher))
    record.predictions = predictions_for(machine.gpus[0], gpus)
    results = Results(
        out=out,
        record=record,
        names=ordered(probes, facts, doctor=bool(scripts), ranks=launcher.ranks),
        tolerances={name: own.tolerance for name, own in of_chapters.items()},
        copy=f"{datetime.now(UTC):%Y-%m-%d}-{gpus}-gpus" if args.record else "",
    )
    say("machine", None, f"{machine}; scripts on {launcher.ranks}")
    results.take_up(again=args.again)
    results.write()
    do_all(work, results, args.minutes)
    say("page", None, str(args.out / "page.md"))
    return int(bool(results.missing or results.has_trouble))


@dataclass(frozen=True)
class Work:
    """What is needed to take a step by its name."""

    launcher: Launcher
    gpus: int
    timeout: float  # of one run of a script
    scripts: dict[str, Path]
    facts: dict[str, Facts]  # of the scripts

    def do(self, name: str, record: Record) -> None:
        """Take a step, and put what it came to into the record. Raises OutOfTime where it had to be stopped."""
        if name in PROBES:
            predictions = record.predictions.get(name, [])
            record.probes[name] = measure(self.launcher, PROBES[name], self.gpus, predictions)
        elif name == DOCTOR:
            record.steps[name] = steps.doctor(self.launcher, self.gpus, self.timeout)
        elif name.endswith(SPEED):
            script = name.removesuffix(SPEED)
            record.steps[name] = steps.speed(self.launcher, self.scripts[script], self.facts[script], self.timeout)
        else:
            record.steps[name] = steps.chapter(self.launcher, self.scripts[name], self.facts[name], self.timeout)


@dataclass
class Results:
    """The record, and its files in the folder ``out``: results.json, page.md, logs.zip."""

    out: Path
    record: Record
    names: list[str]  # of the steps, in order
    tolerances: dict[str, float]
    copy: str  # the name of the copies in book/measured; "" for none

    @property
    def missing(self) -> list[str]:
        """The steps that have not ended."""
        return [name for name in self.names if name not in self.record.steps and name not in self.record.probes]

    @property
    def has_trouble(self) -> bool:
        """Whether a step differed, or a probe did not end well."""
        differed = any(step.differences for step in self.record.steps.values())
        return differed or any(probe.trouble for probe in self.record.probes.values())

    def take_up(self, again: bool) -> None:
        """Take the steps of an earlier start, with its predictions, if it was of this machine and this commit."""
        path = self.out / "results.json"
        if not path.exists():
            return
        try:
            earlier = read(path)
        except ValueError as error:
            raise ValueError(f"{error}\nDelete it, or choose another folder: --out DIR") from None
        if not earlier.steps and not earlier.probes:
            return
        if any(earlier.facts.get(name) != self.record.facts.get(name) for name in SAME):
            say("results", None, f"{path} is of another machine or commit: all steps run again")
            return
        self.record.predictions = earlier.predictions
        self.record.steps = earlier.steps
        self.record.probes = earlier.probes
        if again:
            for name in self.names:
                self.record.steps.pop(name, None)
                self.record.probes.pop(name, None)

    def write(self) -> None:
        """Write both files, each at once: whoever kills the command leaves whole ones."""
        self.record.facts |= facts_of_the_run()
        self.out.mkdir(parents=True, exist_ok=True)
        text = page(self.record, self.missing, self.tolerances)
        write(self.record, self.out / "results.json")
        write_whole(text, self.out / "page.md")
        if self.copy:
            write(self.record, LIBRARY / f"{self.copy}.json")
            write_whole(text, LIBRARY / f"{self.copy}.md")


def do_all(work: Work, results: Results, minutes: float) -> None:
    """Take all steps that are not in the record, until the time is over, and write the files after each one."""
    left = results.missing
    for name in results.names:
        if name not in left:
            say(name, None, outcome(results.record, name))
            continue
        start = time.monotonic()
        if work.launcher.end - start < LEAST:
            break
        try:
            work.do(name, results.record)
        except OutOfTime:
            break
        finally:
            keep_logs(work.launcher.folder, results.out)
        results.write()
        say(name, time.monotonic() - start, outcome(results.record, name))
    if results.missing:
        count = len(results.missing)
        say("left", None, f"{count} steps after {minutes:g} minutes; the same command goes on with them")


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


def say(name: str, seconds: float | None, text: str) -> None:
    """A line of progress; ``seconds`` is None for what is kept from an earlier start."""
    passed = ""
    if seconds is not None:
        passed = f"{seconds:.0f} s"
    print(f"{name:26}{passed:>6}  {text}", flush=True)


def begin(out: Path) -> None:
    """Write a page and a record that say no more than that the command has begun, unless there are some."""
    if (out / "results.json").exists():
        return
    record = Record({"machine": "not examined yet", "commit": commit()})
    Results(out, record, names=[], tolerances={}, copy="").write()


def facts_of_the_run() -> dict[str, str]:
    """The command and today's date."""
    command = shlex.join(["python", "-m", "helpers", *sys.argv[1:]])
    return {"command": f"`{command}`", "date": f"{datetime.now(UTC):%Y-%m-%d}"}


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
        finished = launcher.python(words, "machine", 120)
    except OutOfTime:
        raise ValueError("The time was over before the machine was examined.\nGive more: --minutes 8") from None
    if finished.status != 0:
        why = "it hung for 120 s"
        if finished.status is not None:
            why = finished.errors.strip().rpartition("\n")[2]
        raise ValueError(f"PyTorch cannot be asked for its GPUs: {why}\nTry nvidia-smi, and python -c 'import torch'.")
    return Machine(**json.loads(finished.out))
