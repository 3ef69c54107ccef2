"""Say when a job on Slurm needs a person, for example because it hangs or does not save.

Start it every five minutes, for example with cron, on a machine that is not in the job:

    python3 alert.py 4711 trainer-4711 --step-seconds 2.0 --save-hours 2

It prints nothing while the job trains or waits for nodes, and it names each trouble once.
It asks squeue, reads alive.log in the job's folder, and looks how old the newest
checkpoint is. It needs Python 3.7 or newer, and no PyTorch.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

# A line of alive.log, for example: 2026-11-13T07:29:57 step 8000 seconds 2.0000
LOG_LINE = re.compile(r"(\S+) step \d+ seconds (\d+\.\d+)")
RECENT_LINES = 20  # The last 20 lines say how fast the job is now.
SLOWER = 1.1  # A step is slow if it takes more than 1.1 times as long as on a good day.


@dataclass
class QueueEntry:
    """What squeue says of a job that runs, or waits in the queue."""

    state: str  # for example RUNNING or PENDING
    started: datetime | None  # None: it waits, so squeue names no time
    reason: str  # why it waits


@dataclass
class LogLine:
    """One line of alive.log."""

    written: datetime
    step_seconds: float


@dataclass
class Job:
    """What is known of the job at one moment."""

    now: datetime
    entry: QueueEntry | None  # None: the job is not in the queue any more
    log: list[LogLine] | None  # None: there is no alive.log
    newest_save: datetime | None  # None: there is no checkpoint


@dataclass
class Limits:
    """How much a person accepts before they want to be told."""

    step_seconds: float  # of a step on a good day
    save_hours: float  # the longest time between two checkpoints
    silent_minutes: float  # more than the longest save, evaluation or start takes


@dataclass
class Trouble:
    """What needs a person."""

    name: str  # such as HANGS: the same as long as the trouble lasts
    text: str  # what the person reads


# ---- What is wrong with a job ----


def find_troubles(job: Job, limits: Limits) -> list[Trouble]:
    """Return all troubles of a job. A job that waits for nodes, or that trains, has none."""
    if job.entry is None:
        return [Trouble("ENDED", "it is not in the queue any more")]
    reason = job.entry.reason
    if "held" in reason.lower() or reason == "BadConstraints":
        return [Trouble("HELD", f"{reason}. It waits for a person, not for nodes")]
    started = job.entry.started
    if job.entry.state != "RUNNING" or started is None:
        return []  # It waits for nodes, and nobody has to do anything.
    troubles = [
        find_silence(job, started, limits),
        find_slow_steps(job, limits),
        find_old_checkpoint(job, started, limits),
    ]
    return [trouble for trouble in troubles if trouble is not None]


def find_silence(job: Job, started: datetime, limits: Limits) -> Trouble | None:
    """Return a trouble if the job has made no step for too long, or else None.

    The time counts from the job's start, or from the log's last line, if that is later.
    """
    last_sign = started
    if job.log:
        last_sign = max(started, job.log[-1].written)
    minutes = (job.now - last_sign).total_seconds() / 60
    if minutes <= limits.silent_minutes:
        return None
    if job.log is None:
        return Trouble("NO LOG", "no alive.log. Is the new open_log in the trainer?")
    return Trouble("HANGS", f"no step for {minutes:.0f} minutes")


def find_slow_steps(job: Job, limits: Limits) -> Trouble | None:
    """Return a trouble if recent steps take longer than on a good day, or else None."""
    if job.log is None or len(job.log) < RECENT_LINES:
        return None
    # The median, not the mean, because one step that saves may take minutes.
    recent = statistics.median(line.step_seconds for line in job.log[-RECENT_LINES:])
    if recent <= SLOWER * limits.step_seconds:
        return None
    return Trouble("SLOW", f"{recent:.1f} s a step, not {limits.step_seconds:.1f} s")


def find_old_checkpoint(job: Job, started: datetime, limits: Limits) -> Trouble | None:
    """Return a trouble if there is no new checkpoint for too long, or else None.

    The time counts from the newest checkpoint, or from the start, if that is later.
    """
    last_save = started
    if job.newest_save is not None:
        last_save = max(started, job.newest_save)
    hours = (job.now - last_save).total_seconds() / 3600
    if hours <= limits.save_hours:
        return None
    return Trouble("OLD", f"no new checkpoint for {hours:.1f} h")


# ---- Where the answers come from ----


class SqueueFailed(Exception):
    """squeue gave no answer, so nothing is known of the job."""


def ask_squeue(job_id: str, pause: float) -> QueueEntry | None:
    """Return the job's entry in the queue; None if Slurm does not know the job any more.

    squeue fails while Slurm's controller is busy. So it is asked up to three times, with
    a pause of so many seconds. Raises SqueueFailed if it fails each time.
    """
    command = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T %S %r"]
    for _ in range(3):
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return read_entry(answer.stdout)
        if "Invalid job id" in answer.stderr:
            return None
        time.sleep(pause)
    raise SqueueFailed(answer.stderr)


def read_entry(text: str) -> QueueEntry | None:
    """Read what squeue has printed, such as "PENDING N/A Priority"; None if it is empty.

    In the place of N/A, a job that runs has the time of its start: 2026-11-13T07:29:57.
    """
    if text.strip() == "":
        return None
    state, start, reason = text.strip().split(maxsplit=2)
    started = None
    if start != "N/A":
        started = datetime.fromisoformat(start)
    return QueueEntry(state, started, reason)


def read_log(path: Path) -> list[LogLine] | None:
    """Read the lines of alive.log; return None if there is no such file."""
    if not path.exists():
        return None
    lines = []
    for text in path.read_text().splitlines():
        match = LOG_LINE.fullmatch(text)
        if match:  # The job may be writing the last line, which is not complete then.
            lines.append(LogLine(datetime.fromisoformat(match[1]), float(match[2])))
    return lines


def find_newest_save(folder: Path) -> datetime | None:
    """Return when the newest checkpoint was written; None if there is none."""
    times = [path.stat().st_mtime for path in folder.glob("step_*")]
    if not times:
        return None
    return datetime.fromtimestamp(max(times))


# ---- The command ----


def print_news(job_id: str, troubles: list[Trouble], memory: Path) -> None:
    """Print each trouble that the call before this one has not found.

    The file ``memory`` has the names of what that call has found, and then of these.
    """
    known = []
    if memory.exists():
        known = memory.read_text().splitlines()
    for trouble in troubles:
        if trouble.name not in known:
            print(f"job {job_id}: {trouble.name}: {trouble.text}")
    memory.write_text("\n".join(trouble.name for trouble in troubles))


def main() -> None:
    """Look at the job once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job_id", help="the job's number")
    parser.add_argument("folder", type=Path, help="of its checkpoints and alive.log")
    parser.add_argument("--step-seconds", type=float, required=True, help="usually")
    parser.add_argument("--save-hours", type=float, required=True, help="at most")
    parser.add_argument("--silent-minutes", type=float, default=15, help="at most")
    parser.add_argument("--pause", type=float, default=60, help="seconds between tries")
    args = parser.parse_args()
    limits = Limits(args.step_seconds, args.save_hours, args.silent_minutes)

    try:
        job = Job(
            entry=ask_squeue(args.job_id, args.pause),
            log=read_log(args.folder / "alive.log"),
            newest_save=find_newest_save(args.folder),
            now=datetime.now(),
        )
        troubles = find_troubles(job, limits)
    except SqueueFailed:
        troubles = [Trouble("NO ANSWER", "squeue failed three times")]
    # The memory is beside the folder, which does not exist before the first start.
    memory = args.folder.with_name(f"{args.folder.name}.said")
    print_news(args.job_id, troubles, memory)


if __name__ == "__main__":
    main()
