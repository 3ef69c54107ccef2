"""Runs of a script: on GPUs, on gloo, rehearsed. Each has a limit of time, and becomes a record, however it ends."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.ranks import processes
from helpers.ranks.collecting import where
from helpers.ranks.ports import LOOPBACK
from helpers.ranks.rank import usable_cores
from helpers.ranks.torchrun import ON_THIS_MACHINE
from helpers.verify.sources import ROOT

OBSERVER = Path(__file__).with_name("observer.py")
COUNTS_OF_REHEARSAL = "counts.json"  # a file that a rehearsal writes
TORCHRUN = ["torch.distributed.run", *ON_THIS_MACHINE]
GRACE = 60  # seconds more for a rehearsal: it begins to count when torch is imported, and says where ranks were
STACKS_WITHIN = 2  # seconds in which ranks that hang write where they are
LONGEST_LINE = 300  # characters of a message
ENDING = 4  # seconds before the end of all steps at which a run is stopped: for the stacks and the page


class OutOfTime(Exception):
    """The time of all steps is over, so a run was stopped within its own limit, or never began."""


@dataclass(frozen=True)
class Finished:
    """How a program ended. ``status`` is None if it still ran after its limit."""

    status: int | None
    out: str
    errors: str


@dataclass(frozen=True)
class Run:
    """What became of a run. ``lines`` are rank 0's counts, ``memory`` is each rank's peak in bytes."""

    trouble: str  # "" or ``failed: …`` or ``hung: …``
    result: dict[str, float]
    seconds: float  # of the script, after torch is imported
    memory: list[int]
    lines: list[dict[str, Any]]


@dataclass(frozen=True)
class Launcher:
    """Runs scripts on so many ranks, on real GPUs or, in a rehearsal of the verification, on pretended ones.

    Logs go to the folder. Nothing runs longer than to the moment ``end``, of time.monotonic(). ``threads`` is what the
    user has set OMP_NUM_THREADS to, if he has.
    """

    ranks: int
    rehearsal: bool
    folder: Path
    end: float
    threads: str = ""

    def command(self, script: Path, flags: list[str]) -> str:
        """The command that the page shows."""
        return shlex.join(["torchrun", f"--nproc-per-node={self.ranks}", script.name, *flags])

    def python(self, words: list[str], name: str, timeout: float, **variables: str) -> Finished:
        """Run ``python`` with these words behind it, such as ["-m", "helpers", "doctor"], until it ends or is killed.

        It is killed after ``timeout`` seconds. Raises OutOfTime if it had to be killed earlier, because the time of all
        steps was over, or if that time is over already. ``variables`` are added to its environment. Its output goes to
        the logs ``name.out`` and ``name.err``.
        """
        seconds_left = self.end - ENDING - time.monotonic()
        if seconds_left <= 0:
            raise OutOfTime
        paths = [str(ROOT)]
        if os.environ.get("PYTHONPATH"):
            paths.append(os.environ["PYTHONPATH"])
        environment = {
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            **variables,
        }
        out = self.folder / f"{name}.out"
        errors = self.folder / f"{name}.err"
        with out.open("w") as out_file, errors.open("w") as errors_file:
            program = processes.start(
                [sys.executable, *words],
                cwd=self.folder,
                env=environment,
                stdout=out_file,
                stderr=errors_file,
                stdin=subprocess.DEVNULL,
            )
            statuses = processes.wait([program], min(timeout, seconds_left))  # {0: status}, or {} if it still runs
            still_runs = not statuses
            if still_runs:
                write_stacks(program)
                processes.end([program], grace=0)
        if still_runs and seconds_left < timeout:
            raise OutOfTime
        return Finished(
            status=statuses.get(0),
            out=out.read_text("utf-8", "replace"),
            errors=errors.read_text("utf-8", "replace"),
        )

    def run(self, kind: str, script: Path, flags: list[str], timeout: float, at_once: int = 1) -> Run:
        """Run a script in one of three ways, and return what became of it, however it ended.

        ``kind`` is "GPUs" or "gloo", under torchrun with the observer that counts what the script does, or "rehearsed",
        on pretended GPUs, where the rehearsal counts. ``timeout`` is in seconds. ``at_once`` says how many such runs
        share the cores.
        """
        name = f"{script.stem}-{kind}"
        folder = self.folder / name
        folder.mkdir()
        # If the whole verification is only rehearsed, the run on "GPUs" gets pretended ones, too.
        on_pretended_gpus = kind == "rehearsed" or (self.rehearsal and kind != "gloo")

        if kind == "rehearsed":
            program = str(script)
            arguments = flags
        else:
            program = str(OBSERVER)
            arguments = [str(folder), str(script), *flags]
        if on_pretended_gpus:
            options = [f"--gpus={self.ranks}", f"--timeout={timeout:g}", f"--json={folder / COUNTS_OF_REHEARSAL}"]
            words = ["-m", "helpers", "rehearse", program, *options, "--", *arguments]
            seconds_until_kill = timeout + GRACE
        else:
            words = ["-m", *TORCHRUN, f"--nproc-per-node={self.ranks}", program, *arguments]
            seconds_until_kill = timeout
        variables = {"OMP_NUM_THREADS": self.threads or str(threads_of_a_rank(self.ranks, at_once))}
        if on_pretended_gpus or kind == "gloo":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        finished = self.python(words, name, seconds_until_kill, **variables)
        return run_from_files(folder, finished, is_rehearsed=kind == "rehearsed")


def run_from_files(folder: Path, finished: Finished, is_rehearsed: bool) -> Run:
    """Make the record of a run, from how its program ended and from the files that it has left in a folder.

    Under torchrun each rank has written ``rank<N>.json``: its seconds, its peak of memory in bytes, and its counts. A
    rehearsal has written one file, with the counts of rank 0. A run that was killed may have left no file; then it has
    no counts, and 0 seconds.
    """
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]  # one for each rank
    seconds = 0.0
    counts: list[dict[str, Any]] = []  # what rank 0 did at each line of the script
    if reports:
        report_of_rank_0 = reports[0]
        seconds = report_of_rank_0["seconds"]
        counts = report_of_rank_0["lines"]
    file_of_rehearsal = folder / COUNTS_OF_REHEARSAL
    if is_rehearsed and file_of_rehearsal.exists():
        counts = json.loads(file_of_rehearsal.read_text())["lines"]
    return Run(
        trouble=trouble_of(finished, folder),
        result=result_in(finished.out),
        seconds=seconds,
        memory=[report["memory"] for report in reports],
        lines=counts,
    )


def result_in(out: str) -> dict[str, float]:
    """The numbers of a script's last line ``result {…}``; {} where it printed none."""
    results = re.findall(r"^result (\{.*\})$", out, re.MULTILINE)
    if not results:
        return {}
    return json.loads(results[-1])


def threads_of_a_rank(ranks: int, at_once: int) -> int:
    """How many threads each rank gets, if so many runs of so many ranks each share this machine's cores."""
    return max(1, usable_cores() // (ranks * at_once))


def write_stacks(program: psutil.Process) -> None:
    """Let the ranks of a program that hangs write where they are, which the observer does at this signal."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in program.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR2)
    time.sleep(STACKS_WITHIN)


def trouble_of(finished: Finished, folder: Path) -> str:
    """Why a script did not end well: "failed: ValueError: …" or "hung: rank 0: at train.py:12"; "" if it did.

    ``folder`` has the stacks that its ranks wrote when they hung.
    """
    # A rehearsal ends a hang itself, and says in the next line where the ranks were.
    hang_in_rehearsal = re.search(r"still ran after timeout.*\n *(.*)", finished.errors)
    if hang_in_rehearsal is not None:
        return f"hung: {hang_in_rehearsal[1]}"
    if finished.status is None:
        line_of_rank = where(folder, ranks=[0])  # {rank: the script's line at which it is}
        return f"hung: rank 0: at {line_of_rank[0]}"
    if finished.status != 0:
        return f"failed: {cause(finished.errors)}"
    return ""


def cause(errors: str) -> str:
    """The line that says best why a program failed, among all that it wrote to its standard error.

    It is the last one that names an exception; without any, the last one that names a signal, or else the last line.
    """
    lines_that_name_exception = []
    lines_that_name_signal = []
    lines = []
    for line in errors.splitlines():
        line = re.sub(r"^\[rank\d+\]:\s*", "", line).strip()
        lines.append(line)
        names_exception = re.match(r"(\S+:\d+: )?[\w.]*(Error|Exception)\b", line) is not None
        # ChildFailedError is torchrun's own, which only says that a rank failed.
        if names_exception and "ChildFailedError" not in line:
            lines_that_name_exception.append(line)
        if re.search(r"Signal \d+", line) is not None:
            lines_that_name_signal.append(line)
    for candidates in (lines_that_name_exception, lines_that_name_signal, lines):
        if candidates:
            return shortened(candidates[-1])
    return "no message"


def shortened(line: str) -> str:
    """A line, cut where it is long."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]}…"
