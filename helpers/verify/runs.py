"""Runs of a script: on GPUs, on gloo, rehearsed. Each has a limit of time, and becomes a record, however it ends."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from helpers.ranks.collecting import where

ROOT = Path(__file__).resolve().parents[2]
OBSERVER = Path(__file__).with_name("observer.py")
TORCHRUN = ["torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
GRACE = 60  # seconds more for a rehearsal: it begins to count when torch is imported, and says where ranks were


@dataclass(frozen=True)
class Run:
    """What became of a run. ``lines`` are rank 0's counts, ``memory`` is each rank's peak in bytes."""

    trouble: str  # "" or ``failed: …`` or ``hung: …``
    printed: str
    result: dict[str, float]
    seconds: float  # of the script, after torch is imported
    memory: list[int]
    lines: list[dict[str, Any]]


@dataclass(frozen=True)
class Launcher:
    """Runs scripts on so many ranks; their GPUs are real, or pretended in a rehearsal. Logs go to the folder."""

    ranks: int
    rehearsal: bool
    folder: Path

    def command(self, script: Path, flags: list[str]) -> str:
        """The command that the page shows."""
        return shlex.join(["torchrun", f"--nproc-per-node={self.ranks}", script.name, *flags])

    def python(self, words: list[str], name: str, timeout: float, **variables: str) -> tuple[int | None, str, str]:
        """(exit status or None for a hang, stdout, stderr) of ``python words``."""
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, **variables}
        log, status = self.folder / name, None
        with open(f"{log}.out", "w") as out, open(f"{log}.err", "w") as errors:
            streams: Any = {"stdout": out, "stderr": errors, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen([sys.executable, *words], cwd=self.folder, env=environment, **streams)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                ranks = psutil.Process(process.pid).children(recursive=True)
                for rank in ranks:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.send_signal(signal.SIGUSR2)  # at which the observer writes where its rank is
                time.sleep(2)
                for each in [*ranks, process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                process.wait()
        return (
            status,
            Path(f"{log}.out").read_text("utf-8", "replace"),
            Path(f"{log}.err").read_text("utf-8", "replace"),
        )

    def run(self, kind: str, script: Path, flags: list[str], timeout: float) -> Run:
        """Run a script; ``kind`` is GPUs or gloo, with the observer, or speed (on GPUs) or rehearsed, without it."""
        name = f"{script.stem}-{kind}"
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        words = [*[str(OBSERVER), str(folder)] * (kind in ("GPUs", "gloo")), str(script), *flags]
        pretended = kind == "rehearsed" or (self.rehearsal and kind != "gloo")
        if pretended:
            options = [f"--gpus={self.ranks}", f"--timeout={timeout:g}", f"--json={folder / 'counts.json'}"]
            line = ["-m", "helpers", "rehearse", words[0], *options, "--", *words[1:]]
        else:
            line = ["-m", *TORCHRUN, f"--nproc-per-node={self.ranks}", *words]
        variables = {"CUDA_VISIBLE_DEVICES": ""} if pretended or kind == "gloo" else {}
        status, out, errors = self.python(line, name, timeout + GRACE * pretended, **variables)
        records = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
        first = (records or [{"lines": [], "seconds": 0.0}])[0]
        if kind == "rehearsed" and (folder / "counts.json").exists():
            first["lines"] = json.loads((folder / "counts.json").read_text())["lines"]
        hang = re.search(r"still ran after timeout.*\n *(.*)", errors)  # as a rehearsal says it
        if hang or status is None:
            place = hang[1] if hang else f"rank 0: at {where(folder, [0])[0]}"
            trouble = f"hung: {place}"
        else:
            trouble = f"failed: {cause(errors)}" if status else ""
        results = re.findall(r"^result (\{.*\})$", out, re.MULTILINE)
        result = json.loads(results[-1]) if results else {}
        return Run(trouble, out, result, first["seconds"], [record["memory"] for record in records], first["lines"])


def cause(errors: str) -> str:
    """The line of a standard error that says why a script failed."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in errors.splitlines()]
    exceptions = [line for line in lines if re.match(r"(\S+:\d+: )?[\w.]*(Error|Exception)\b", line)]
    signals = [line for line in lines if re.search(r"Signal \d+", line)]
    return ([line for line in exceptions if "ChildFailedError" not in line] or signals or lines or ["no message"])[-1]
