"""Kill ranks of chapter 13's job at random moments, and compare its last weights bit by bit.

``make soak N=200 CHAPTER=13``; kills_on_meshes.py does it with chapter 16's.

Real torchrun, real SIGKILL, any rank. One half of the moments is drawn evenly from the seconds of a start-up, the other
from the first second of training, and half of these wait for the next write of a snapshot. What is left must be the
undisturbed job's weights, to the last bit, and nothing else: no process, no half snapshot, no job that hangs.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import leftovers
import psutil

ROOT = Path(__file__).parents[1]
CHAPTER = ROOT / "notebooks" / "13_fault_tolerance.ipynb"
WINDOW = 1.0  # seconds of training in which half of the kills come
LENGTH = ["--epochs", "32"]  # 480 steps: enough for some twenty kills
PATIENCE = 180  # seconds for a restart, or for a job's end, before it counts as a hang
TORCHRUN, FORKING = ["-m", "torch.distributed.run"], [Path(__file__).with_name("forked_torchrun.py")]
TUNED = ["--monitor-interval=0.02"]
AT_ADDRESS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


def export(folder, chapter=CHAPTER):
    """Write a chapter's script into the folder; return its path."""
    command = [sys.executable, "-m", "helpers", "export", chapter, "--out", folder]
    return Path(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def alone(folder):
    """An environment for the jobs, whose temporary files are in the folder."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return found | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


class Failure(Exception):
    """What went wrong with a job."""


class Job:
    """A job under torchrun: its ranks, and what rank 0 prints, line by line with the time."""

    def __init__(self, script, nproc, environment, flags, agent=TORCHRUN):
        self.nproc, self.mark = nproc, uuid.uuid4().hex
        command = [sys.executable, *agent, f"--nproc-per-node={nproc}", "--max-restarts=1000000"]
        self.errors = open(script.parent / "errors.txt", "w")
        self.process = subprocess.Popen(
            [*command, *AT_ADDRESS, *TUNED, script, *flags],
            cwd=script.parent,
            env={**environment, leftovers.MARK: self.mark, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.lines = []  # (when, line)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def said(self, word, since=0.0):
        """The last line since a time that starts with a word, as (when, line), or None."""
        return next((pair for pair in reversed(self.lines) if pair[0] >= since and pair[1].startswith(word)), None)

    def ranks(self):
        """The processes of the ranks that run now, in order."""
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)
        return []

    def next_ranks(self, before):
        """Wait for ranks that are none of those before; an empty list when the job ends instead."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return []
            ranks = self.ranks()
            if len(ranks) == self.nproc and not set(ranks) & set(before):
                return ranks
            time.sleep(0.01)
        raise Failure("the ranks were not restarted")

    def ended_within(self, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0, seconds))
        return self.process.returncode is not None

    def outcome(self):
        """(weights, result) of a job that has ended well. Raises Failure for another one."""
        self.reader.join(5)
        left = leftovers.soon(lambda: not leftovers.processes(self.mark)) or leftovers.processes(self.mark)
        weights, result = self.said("weights "), self.said("result ")
        if self.process.returncode or not weights or not result:
            raise Failure(f"torchrun ended with status {self.process.returncode}")
        if left is not True:
            raise Failure(f"it left {left}")
        return weights[1], result[1]

    def close(self):
        if self.process.poll() is None:  # or its number may be another's by now
            self.process.kill()
        for pid in leftovers.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(5)
        self.process.stdout.close()
        self.errors.close()


def is_writing(folder, since):
    """Whether a snapshot that was begun after a time of the system's clock is being written."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.stat().st_mtime > since for path in folder.glob(".step_*.part"))
    return False  # it has got its name between the two looks


def trains(job, folder, born, clock):
    """Whether the ranks that were started at a time have begun to train: they have loaded a snapshot, or saved one."""
    with contextlib.suppress(FileNotFoundError):
        saved = any(path.stat().st_mtime > clock for path in folder.glob("step_*"))
        return saved or job.said("going on", born) is not None
    return False


def undisturbed(script, nproc, environment, flags, agent):
    """(weights, result, seconds from the ranks' start to their first line) of a job that nobody kills."""
    job = Job(script, nproc, environment, flags, agent)
    try:
        job.next_ranks([])
        start = time.monotonic()
        if not job.ended_within(PATIENCE):
            raise Failure("the undisturbed job hangs")
        return *job.outcome(), max(0, job.said("start ")[0] - start)
    finally:
        job.close()


def disturbed(script, nproc, environment, flags, agent, folder, kills, start_up, luck, hits):
    """Kill at up to ``kills`` moments, and add (when, where) to ``hits`` each time: (weights, result, job's lines)."""
    job = Job(script, nproc, environment, [*flags, "--checkpoint-dir", str(folder)], agent)
    try:
        ranks = job.next_ranks([])
        while ranks and len(hits) < kills:
            born, clock = time.monotonic(), time.time()
            if luck.random() < 0.5:
                moment = luck.uniform(0, start_up)
            else:
                leftovers.soon(
                    lambda born=born, clock=clock: trains(job, folder, born, clock) or job.ended_within(0), PATIENCE
                )
                moment = luck.uniform(0, WINDOW)
            if job.ended_within(moment):
                break
            if luck.random() < 0.5 and trains(job, folder, born, clock):  # not before the next write
                end = time.monotonic() + 0.3
                while not is_writing(folder, clock) and time.monotonic() < end:
                    time.sleep(0.001)
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                luck.choice(ranks).kill()
                writing = is_writing(folder, clock)
                began, ends = trains(job, folder, born, clock), job.said("weights ", born)
                where = "the end" if ends else "a write" if writing else "training" if began else "start-up"
                hits.append((time.monotonic(), where))
            ranks = job.next_ranks(ranks)
        if not job.ended_within(PATIENCE):
            raise Failure("it does not end")
        if strange := [path.name for path in folder.iterdir() if not path.name.startswith("step_")]:
            raise Failure(f"its folder holds {strange}")
        return *job.outcome(), job.lines
    except Failure:
        errors = Path(job.errors.name).read_text().splitlines()
        print("\n".join(["", *(line for _, line in job.lines[-10:]), *errors[-40:]]))
        raise
    finally:
        job.close()


def back_after(hits, lines):
    """Seconds from each kill of a rank that trained to the next start's first line, where no other kill came before."""
    for (when, where), (end, _) in itertools.pairwise([*hits, (float("inf"), "")]):
        again = next((at for at, line in lines if at > when and line.startswith("start ")), float("inf"))
        if where in ("training", "a write") and again < end:
            yield again - when


def kill_many(kills, nproc, seed, folder, script, agent=TORCHRUN):
    """Jobs under kills until there were as many; how many jobs went wrong."""
    luck, environment = random.Random(seed), alone(folder)
    seed_is = f"seed {seed}: python tools/kills.py --kills {kills} --nproc {nproc} --seed {seed}"
    print(seed_is, flush=True)
    flags = [*LENGTH, "--save-every", "1000", "--checkpoint-dir", str(folder / "undisturbed")]
    *expected, start_up = undisturbed(script, nproc, environment, flags, agent)
    print(f"undisturbed, {nproc} ranks: {start_up:.2f} s of start-up", flush=True)
    print("job  every  emergency  kills  start-up  training  a write  the end  went on from  result", flush=True)
    wrong, done, job, total, seconds = 0, 0, 0, Counter(), []
    while done < kills:
        job += 1
        every, emergency = luck.choice([1, 1, 2, 5]), luck.choice(["", "no-"])
        flags = [*LENGTH, "--save-every", str(every), f"--{emergency}emergency"]
        hits, lines = [], []
        try:
            *found, lines = disturbed(
                script, nproc, environment, flags, agent, folder / f"job{job}", kills - done, start_up, luck, hits
            )
            outcome = "equal" if found == expected else f"DIFFERENT: {found}, not {expected}"
        except Failure as failure:
            outcome = f"FAILED: {failure}"
        wrong += outcome != "equal"
        done += len(hits)
        where = Counter(where for _, where in hits)
        total += where
        seconds += back_after(hits, lines)
        resumed = Counter(line.split(", an ")[-1][:9] for _, line in lines if line.startswith("going on"))
        went_on = f"{sum(resumed.values()) - resumed['emergency']} + {resumed['emergency']} alone"
        print(
            f"{job:3}  {every:5}  {'yes' if not emergency else 'no':9}  {len(hits):5}  {where['start-up']:8}  "
            f"{where['training']:8}  {where['a write']:7}  {where['the end']:7}  {went_on:12}  {outcome}",
            flush=True,
        )
        if outcome.startswith("FAILED"):
            break
    back = f", {statistics.median(seconds):.1f} s from a kill to training again (median)" if seconds else ""
    places = ", ".join(f"{number} in {where}" for where, number in total.most_common())
    print(f"{done} kills ({places}) in {job} jobs: {wrong} jobs differ or failed{back}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="how many in all")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of a job")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the moments and the ranks")
    parser.add_argument("--forked", action="store_true", help="fork the ranks where torch is imported already")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing then either
    with tempfile.TemporaryDirectory() as folder:
        script = export(Path(folder) / "script")
        return kill_many(args.kills, args.nproc, args.seed, Path(folder), script, FORKING if args.forked else TORCHRUN)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
