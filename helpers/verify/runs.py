"""Runs of a script: on GPUs, on gloo, or rehearsed. Each has a time limit, and becomes a record however it ends."""

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
# Seconds that a rehearsal may take longer than its script: to import torch, and to say where ranks hang.
GRACE = 60
STACKS_WITHIN = 2  # seconds in which ranks that hang write where they are
LONGEST_LINE = 300  # characters of a message
ENDING = 4  # seconds that are left for the stacks and the page when the end of all steps stops a run

# Lines that say why a program failed.
NAME_OF_RANK = re.compile(r"^\[rank\d+\]:\s*")  # "[rank1]: " before a line that torchrun passes on
# "ValueError: no", "torch.OutOfMemoryError: CUDA", or with its place "/torch/x.cpp:83: RuntimeError: no"
EXCEPTION = re.compile(r"(\S+:\d+: )?[\w.]*(Error|Exception)\b")
SIGNAL = re.compile(r"Signal \d+")  # "Signal 9 (SIGKILL) received by PID 12"
# How a rehearsal reports a hang: a line "… still ran after timeout …", and in the next one where the ranks were.
HANG_IN_REHEARSAL = re.compile(r"still ran after timeout.*\n *(.*)")
# The last line that a script prints, such as 'result {"loss": 0.25}'
RESULT = re.compile(r"^result (\{.*\})$", re.MULTILINE)


class OutOfTime(Exception):
    """The time for all steps is over, so a run was stopped before its own limit, or never began."""


@dataclass(frozen=True)
class Finished:
    """How a program ended. ``status`` is None if it still ran after its limit."""

    status: int | None
    out: str
    errors: str


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    trouble: str  # "" or "failed: …" or "hung: …"
    result: dict[str, float]  # the numbers that the script printed in its last line
    seconds: float  # of the script, after torch is imported
    memory: list[int]  # bytes: the peak of each rank
    lines: list[dict[str, Any]]  # rank 0's counts of events at each line of the script, as helpers.counts has them


@dataclass(frozen=True)
class Launcher:
    """Runs scripts on so many ranks, on real GPUs or, if the verification is only rehearsed, on simulated ones."""

    ranks: int
    rehearsal: bool  # whether the verification is only rehearsed
    folder: Path  # for the logs
    end: float  # the moment, by time.monotonic(), at which whatever still runs is stopped
    threads: str = ""  # what the user has set OMP_NUM_THREADS to

    def command(self, script: Path, flags: list[str]) -> str:
        """The command that the page shows for a run of this script."""
        return shlex.join(["torchrun", f"--nproc-per-node={self.ranks}", script.name, *flags])

    def python(self, words: list[str], name: str, timeout: float, **variables: str) -> Finished:
        """Run ``python`` with these words behind it, such as ["-m", "helpers", "doctor"], until it ends or is killed.

        It is killed after ``timeout`` seconds. Raises OutOfTime if it has to be killed earlier because the time for all
        steps is over, or if that time is over already. ``variables`` are added to its environment. Its output goes to
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
        """Run a script in one of three ways, and return what came of it, however it ended.

        kind: "GPUs" or "gloo" runs it under torchrun, with the observer that counts what the script does. "rehearsed"
        runs it on simulated GPUs, and the rehearsal counts. timeout: in seconds. at_once: how many such runs share this
        machine's cores.
        """
        name = f"{script.stem}-{kind}"
        folder = self.folder / name
        folder.mkdir()
        # If the verification itself is only rehearsed, the run on "GPUs" gets simulated ones, too.
        on_simulated_gpus = kind == "rehearsed" or (self.rehearsal and kind == "GPUs")

        if kind == "rehearsed":
            program = str(script)
            arguments = flags
        else:
            program = str(OBSERVER)
            arguments = [str(folder), str(script), *flags]
        if on_simulated_gpus:
            options = [f"--gpus={self.ranks}", f"--timeout={timeout:g}", f"--json={folder / COUNTS_OF_REHEARSAL}"]
            words = ["-m", "helpers", "rehearse", program, *options, "--", *arguments]
            seconds_until_kill = timeout + GRACE
        else:
            words = ["-m", *TORCHRUN, f"--nproc-per-node={self.ranks}", program, *arguments]
            seconds_until_kill = timeout
        variables = {"OMP_NUM_THREADS": self.threads or str(threads_of_a_rank(self.ranks, at_once))}
        if on_simulated_gpus or kind == "gloo":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        finished = self.python(words, name, seconds_until_kill, **variables)
        return run_from_files(folder, finished, is_rehearsed=kind == "rehearsed")


def run_from_files(folder: Path, finished: Finished, is_rehearsed: bool) -> Run:
    """Make the record of a run from how its program ended and from the files that it left in a folder.

    Under torchrun each rank writes ``rank<N>.json``, with its seconds, its peak memory in bytes and its counts. A
    rehearsal writes one file, with the counts of rank 0. A run that was killed may have left no file; then its record
    has no counts and 0 seconds.
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
    """The numbers of the last line of a script's output that is like ``result {"loss": 0.25}``; {} if there is none."""
    results = RESULT.findall(out)
    if not results:
        return {}
    return json.loads(results[-1])


def threads_of_a_rank(ranks: int, at_once: int) -> int:
    """How many threads each rank gets if ``at_once`` runs, each of so many ranks, share this machine's cores."""
    return max(1, usable_cores() // (ranks * at_once))


def write_stacks(program: psutil.Process) -> None:
    """Let the ranks of a program that hangs write where they are: the observer does so when it gets this signal."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in program.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR2)
    time.sleep(STACKS_WITHIN)


def trouble_of(finished: Finished, folder: Path) -> str:
    """Why a script did not end well: "failed: ValueError: …" or "hung: rank 0: at train.py:12"; "" if it did.

    ``folder`` has the stacks that its ranks wrote when they hung.
    """
    # A rehearsal ends a script that hangs by itself, so the program has an exit status.
    hang_in_rehearsal = HANG_IN_REHEARSAL.search(finished.errors)
    if hang_in_rehearsal is not None:
        place = hang_in_rehearsal[1]
        return f"hung: {place}"
    if finished.status is None:
        line_of_rank = where(folder, ranks=[0])  # {rank: the script's line at which it is}
        return f"hung: rank 0: at {line_of_rank[0]}"
    if finished.status != 0:
        return f"failed: {cause(finished.errors)}"
    return ""


def cause(errors: str) -> str:
    """Find the line that says best why a program failed, in what it wrote to its standard error.

    It is the last line that names an exception. If none does, it is the last one that names a signal, or else the last
    line of all.
    """
    lines_with_exception = []
    lines_with_signal = []
    lines = []
    for line_with_rank in errors.splitlines():
        line = NAME_OF_RANK.sub("", line_with_rank).strip()
        lines.append(line)
        # ChildFailedError is torchrun's own and says only that a rank failed.
        if EXCEPTION.match(line) and "ChildFailedError" not in line:
            lines_with_exception.append(line)
        if SIGNAL.search(line):
            lines_with_signal.append(line)
    for candidates in (lines_with_exception, lines_with_signal, lines):
        if candidates:
            return shortened(candidates[-1])
    return "no message"


def shortened(line: str) -> str:
    """A line, of which at most LONGEST_LINE characters are kept."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]}…"
