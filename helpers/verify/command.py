"""``python -m helpers verify``: its arguments, its steps one after the other, and the page at the end."""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from helpers.command_line import positive, whole
from helpers.export.facts import Script as Facts
from helpers.export.facts import facts_at
from helpers.ranks.torchrun import folder_until_a_signal, set_defaults
from helpers.verify import steps
from helpers.verify.machine import Machine, obstacle
from helpers.verify.page import page
from helpers.verify.record import Step
from helpers.verify.runs import ROOT, Launcher

SIZES = (8, 4, 2, 1)  # ranks among which the chapters' batches, heads and layers can be divided


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify`` to its parser."""
    parser.description = (
        "Run the doctor and every chapter's script on this machine's GPUs, and compare with gloo and the rehearsal. "
        "Steps that have ended are kept: the same command goes on. The exit status is 1 where something differs."
    )
    parser.add_argument("--gpus", type=whole, metavar="N", help="GPUs to use (default: all; in a rehearsal 2)")
    parser.add_argument("--chapters", nargs="+", metavar="CHAPTER", help="these alone, or paths of scripts")
    parser.add_argument("--out", type=Path, default=Path("verify"), metavar="DIR", help="folder (default: verify)")
    parser.add_argument("--again", action="store_true", help="repeat these steps, though they are kept there")
    parser.add_argument("--timeout", type=positive, default=120, metavar="S", help="seconds of a run (default: 120)")
    parser.add_argument(
        "--minutes", type=positive, default=20, metavar="M", help="for all steps; the others are left (default: 20)"
    )
    parser.add_argument("--rehearsal", action="store_true", help="try the command on pretended GPUs")
    parser.add_argument("--record", action="store_true", help="write the page to book/measured, too")


def main(args: argparse.Namespace) -> int:
    """Verify; return 0, or 1 where a step differed or is left, or where the machine cannot do it."""
    try:
        with folder_until_a_signal():
            return verify(args, time.monotonic() + 60 * args.minutes)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def verify(args: argparse.Namespace, end: float) -> int:
    """As ``main``, until the moment ``end``. Raises ValueError where it cannot begin."""
    library = ROOT / "book" / "measured"
    if args.record and (args.rehearsal or not library.is_dir()):
        raise ValueError("--record is for real GPUs, in a copy of the repository.\nLeave it out.")
    logs = args.out.absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    scripts = scripts_of(args.chapters or [None], args.out)
    machine = machine_of(Launcher(args.gpus or 2, args.rehearsal, logs))
    if why := obstacle(machine, args.gpus):
        raise ValueError(why)
    gpus = args.gpus or len(machine.gpus)
    launcher = Launcher(next(size for size in SIZES if size <= gpus), args.rehearsal, logs)
    set_defaults(launcher.ranks)
    facts = {"machine": str(machine), "ranks of the scripts": str(launcher.ranks), "commit": commit()}
    say("machine", None, f"{machine}; scripts on {launcher.ranks}")

    tasks: dict[str, Callable[[float], Step]] = {"doctor": partial(steps.doctor, launcher, gpus)}
    of_chapters = facts_of_chapters()
    of_scripts = {script: of_chapters.get(script.stem, Facts()) for script in scripts}
    for script, own in of_scripts.items():
        tasks[script.stem] = partial(steps.chapter, launcher, script, own)
    for script, own in of_scripts.items():
        if own.speed_flags:
            tasks[f"{script.stem}, speed"] = partial(steps.speed, launcher, script, own)
    results, records = args.out / "results.json", dict[str, Step]()
    if results.exists():
        earlier = json.loads(results.read_text("utf-8"))
        repeats = tasks.keys() if args.again else ()
        if earlier["facts"] == facts:
            records = {name: Step(**step) for name, step in earlier["steps"].items() if name not in repeats}
        else:
            say("results", None, f"{results} is of another machine or commit: all steps run again")
    for name, task in tasks.items():
        if fresh := name not in records:
            if end - time.monotonic() < min(args.timeout, 30 * args.minutes):  # it might end too late
                continue
            records[name] = task(args.timeout)
            text = json.dumps({"facts": facts, "steps": {each: asdict(records[each]) for each in records}}, indent=1)
            results.with_suffix(".part").write_text(text, "utf-8")
            results.with_suffix(".part").replace(results)  # whole, though the command be killed
        step = records[name]
        more = f" (and {len(step.differences) - 1} more on the page)" if len(step.differences) > 1 else ""
        what = f"DIFFERS {step.differences[0]}{more}" if step.differences else step.summary
        say(name, step.seconds if fresh else None, what)
    rest = [name for name in tasks if name not in records]
    if rest:
        say("left", None, f"{len(rest)} steps after {args.minutes:g} minutes; the same command goes on with them")
    facts["command"] = f"`{shlex.join(['python', '-m', 'helpers', *sys.argv[1:]])}`"
    facts["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    tolerances = {name: own.tolerance for name, own in of_chapters.items()}
    for path in [args.out / "page.md", *[library / f"{facts['date']}-{gpus}-gpus.md"] * args.record]:
        path.write_text(page(facts, args.rehearsal, records, rest, tolerances), "utf-8")
        say("page", None, str(path))
    return int(bool(rest or any(step.differences for step in records.values())))


def say(name: str, seconds: float | None, text: str) -> None:
    """A line of progress; ``seconds`` is None for what is kept from an earlier start."""
    print(f"{name:26}{'' if seconds is None else f'{seconds:.0f} s':>6}  {text}", flush=True)


def scripts_of(names: list[str | None], out: Path) -> list[Path]:
    """The paths of scripts: those of chapters, or of all for None, are written to a folder of ``out``."""
    paths = [Path(name).absolute() for name in names if name and name.endswith(".py")]
    if len(paths) == len(names):
        return paths

    # The export takes a second to import, and needs nbformat and ruff, which a machine with GPUs may not have.
    from helpers.export import chapters

    scripts: list[Path] = []
    try:
        for name in names:
            if name and name.endswith(".py"):
                scripts.append(Path(name))
            else:
                scripts += chapters.export(name, out / "scripts", force=True)
    except chapters.ExportError as error:
        raise ValueError(str(error)) from None
    return [script.absolute() for script in scripts]


def facts_of_chapters() -> dict[str, Facts]:
    """{name: what the chapter says of its script}, in the chapters' order."""
    from helpers.export.chapters import chapters  # here, because it takes a second

    return {path.stem: facts_at(path).script for path in chapters()}


def machine_of(launcher: Launcher) -> Machine:
    """The machine, as a process of its own sees it. Raises ValueError where that fails."""
    words = [str(Path(__file__).with_name("machine.py"))]
    if launcher.rehearsal:
        words = ["-m", "helpers", "rehearse", *words, f"--gpus={launcher.ranks}"]
    status, out, errors = launcher.python(words, "machine", 120)
    if status != 0:
        why = "it hung for 120 s" if status is None else errors.strip().rpartition("\n")[2]
        raise ValueError(f"PyTorch cannot be asked for its GPUs: {why}\nTry nvidia-smi, and python -c 'import torch'.")
    return Machine(**json.loads(out))


def commit() -> str:
    """The repository's commit, with ``-dirty`` where files differ from it; or why there is none."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    if not (ROOT / ".git").exists():  # git would take a repository around site-packages
        return "an installed package"
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
