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
        """Run ``python words`` for at most so many seconds, with these environment variables added.

        Its output goes to logs of this name. Raises OutOfTime where all steps must end earlier.
        """
        left = self.end - ENDING - time.monotonic()
        if left <= 0:
            raise OutOfTime
        paths = [str(ROOT), os.environ.get("PYTHONPATH")]
        environment = {
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **variables,
        }
        log = self.folder / name
        with open(f"{log}.out", "w") as out, open(f"{log}.err", "w") as errors:
            program = processes.start(
                [sys.executable, *words],
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )
            statuses = processes.wait([program], min(timeout, left))
            if not statuses:
                write_stacks(program)
                processes.end([program], grace=0)
        status = statuses.get(0)
        if status is None and left < timeout:
            raise OutOfTime
        return Finished(
            status,
            Path(f"{log}.out").read_text("utf-8", "replace"),
            Path(f"{log}.err").read_text("utf-8", "replace"),
        )

    def run(self, kind: str, script: Path, flags: list[str], timeout: float, at_once: int = 1) -> Run:
        """Run a script in one of three ways: on GPUs or on gloo, both observed, or rehearsed.

        ``kind`` is "GPUs", "gloo" or "rehearsed". ``at_once`` says how many such runs share the cores.
        """
        name = f"{script.stem}-{kind}"
        folder = self.folder / name
        folder.mkdir()
        counts = folder / "counts.json"  # A rehearsal writes it; the observer writes a file for each rank.
        pretended = kind == "rehearsed" or (self.rehearsal and kind != "gloo")

        program = [str(script), *flags]
        if kind != "rehearsed":
            program = [str(OBSERVER), str(folder), *program]
        if pretended:
            file, *arguments = program
            options = [f"--gpus={self.ranks}", f"--timeout={timeout:g}", f"--json={counts}"]
            words = ["-m", "helpers", "rehearse", file, *options, "--", *arguments]
            limit = timeout + GRACE
        else:
            words = ["-m", *TORCHRUN, f"--nproc-per-node={self.ranks}", *program]
            limit = timeout
        variables = {"OMP_NUM_THREADS": self.threads or str(threads_of_a_rank(self.ranks, at_once))}
        if pretended or kind == "gloo":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        finished = self.python(words, name, limit, **variables)

        records = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        seconds = 0.0
        lines: list[dict[str, Any]] = []
        if records:
            rank_0 = records[0]
            seconds = rank_0["seconds"]
            lines = rank_0["lines"]
        if kind == "rehearsed" and counts.exists():
            lines = json.loads(counts.read_text())["lines"]
        return Run(
            trouble=trouble_of(finished, folder),
            result=result_in(finished.out),
            seconds=seconds,
            memory=[record["memory"] for record in records],
            lines=lines,
        )


def result_in(out: str) -> dict[str, float]:
    """The numbers of a script's last line ``result {…}``; {} where it printed none."""
    results = re.findall(r"^result (\{.*\})$", out, re.MULTILINE)
    if not results:
        return {}
    return json.loads(results[-1])


def threads_of_a_rank(ranks: int, at_once: int) -> int:
    """How many threads each rank gets where so many runs share this machine's cores."""
    return max(1, usable_cores() // (ranks * at_once))


def write_stacks(program: psutil.Process) -> None:
    """Let the ranks of a program that hangs write where they are: the observer does it at this signal."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for rank in program.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGUSR2)
    time.sleep(STACKS_WITHIN)


def trouble_of(finished: Finished, folder: Path) -> str:
    """``failed: …`` or ``hung: …``, or "" where a script ended well. The folder has the stacks of its ranks."""
    hang = re.search(r"still ran after timeout.*\n *(.*)", finished.errors)  # as a rehearsal says it
    if hang:
        return f"hung: {hang[1]}"
    if finished.status is None:
        return f"hung: rank 0: at {where(folder, [0])[0]}"
    if finished.status != 0:
        return f"failed: {cause(finished.errors)}"
    return ""


def cause(errors: str) -> str:
    """The line of a standard error that says why a program failed: its last exception, or signal, or last line."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in errors.splitlines()]
    exceptions = []
    for line in lines:
        is_exception = re.match(r"(\S+:\d+: )?[\w.]*(Error|Exception)\b", line)
        # ChildFailedError is torchrun's own, which only says that a rank failed.
        if is_exception and "ChildFailedError" not in line:
            exceptions.append(line)
    signals = [line for line in lines if re.search(r"Signal \d+", line)]
    for candidates in (exceptions, signals, lines):
        if candidates:
            return shortened(candidates[-1])
    return "no message"


def shortened(line: str) -> str:
    """A line, cut where it is long."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]}…"
