"""Kill ranks of chapter 13's job at random moments, and compare its last weights bit by bit.

``make soak N=200 CHAPTER=13``; kills_on_meshes.py does it with chapter 16's.

The torchrun and the SIGKILL are real, and any rank may be the victim. Half of the moments are drawn evenly from the
seconds of a start-up, the others from the first second of training. Half of those wait for the next snapshot's write.
At the end the weights must equal the undisturbed job's to the last bit, and no process, no half written snapshot and no
hanging job may be left. What a kill leaves, the next save removes: so a kill during the last save may leave its part,
and an emergency save, where the next start has nothing to train.
"""

import argparse
import contextlib
import itertools
import os
import random
import re
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
WINDOW = 1.0  # seconds of training from which half of the moments are drawn
LENGTH, STEPS = ["--epochs", "32"], 480  # long enough for some twenty kills
PATIENCE = 180  # seconds: a restart or a job's end that takes longer counts as a hang
TORCHRUN, FORKING = ["-m", "torch.distributed.run"], [ROOT / "tests/support/forked_torchrun.py"]
TUNED = ["--monitor-interval=0.02"]
AT_ADDRESS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]


def export(folder, chapter=CHAPTER):
    """Write a chapter's script into the folder; return its path."""
    command = [sys.executable, "-m", "helpers", "export", chapter, "--out", folder]
    return Path(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def alone(folder):
    """Environment variables for the jobs, which make them put temporary files into the folder."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return found | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


class Failure(Exception):
    """A job hangs, fails or leaves something behind; the message says which."""


class Job:
    """A job under torchrun, with its ranks and the time of each line that rank 0 prints."""

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
        """(when, line) of the last line that starts with the word and came after ``since``, or None."""
        return next((pair for pair in reversed(self.lines) if pair[0] >= since and pair[1].startswith(word)), None)

    def ranks(self):
        """The processes of the ranks that run now, by rank."""
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)
        return []

    def next_ranks(self, before):
        """Wait for new ranks; return their processes, or [] if the job ends. Raises Failure if neither comes."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return []
            ranks = self.ranks()
            if len(ranks) == self.nproc and not set(ranks) & set(before):
                return ranks
            time.sleep(0.05)  # a look reads all processes of the machine
        raise Failure("the ranks were not restarted")

    def ended_within(self, seconds):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0, seconds))
        return self.process.returncode is not None

    def outcome(self):
        """(weights, result) that the job printed. Raises Failure if it ended with another status than 0."""
        self.reader.join(5)
        left = leftovers.soon(lambda: not leftovers.processes(self.mark)) or leftovers.processes(self.mark)
        weights, result = self.said("weights "), self.said("result ")
        if self.process.returncode or not weights or not result:
            raise Failure(f"torchrun ended with status {self.process.returncode}")
        if left is not True:
            raise Failure(f"it left {left}")
        return weights[1], result[1]

    def close(self):
        if self.process.poll() is None:  # after its end, the system may give its number to another process
            self.process.kill()
        for pid in leftovers.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(5)
        self.process.stdout.close()
        self.errors.close()


def is_writing(folder, since):
    """Whether a snapshot is being written whose file was made after ``since``, a time of time.time()."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.stat().st_mtime > since for path in folder.glob(".step_*.part"))
    return False  # the file was renamed after glob had found it


def trains(job, folder, born, clock):
    """Whether the ranks of a start have begun to train: they have loaded a snapshot, or saved one."""
    with contextlib.suppress(FileNotFoundError):
        saved = any(path.stat().st_mtime > clock for path in folder.glob("step_*"))
        return saved or job.said("going on", born) is not None
    return False


def undisturbed(script, nproc, environment, flags, agent):
    """(weights, result, seconds from the ranks' start to their first line) of a job without a kill."""
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
    """Run a job and kill its ranks up to ``kills`` times. Returns (weights, result, the job's lines).

    Each kill is added to ``hits`` as (when, where). Raises Failure if the job fails, hangs or leaves something behind.
    """
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
            if luck.random() < 0.5 and trains(job, folder, born, clock):  # then the kill waits for the next write
                end = time.monotonic() + 0.3
                while not is_writing(folder, clock) and time.monotonic() < end:
                    time.sleep(0.001)
            with contextlib.suppress(psutil.NoSuchProcess):  # the rank has ended by itself
                luck.choice(ranks).kill()
                writing = is_writing(folder, clock)
                began, ends = trains(job, folder, born, clock), job.said("weights ", born)
                where = "the end" if ends else "a write" if writing else "training" if began else "start-up"
                hits.append((time.monotonic(), where))
            ranks = job.next_ranks(ranks)
        if not job.ended_within(PATIENCE):
            raise Failure("it does not end")
        found, names = job.outcome(), r"step_.*"
        if job.said(f"going on from step {STEPS},", job.said("start ")[0]):  # it had nothing to train, or to save
            names += rf"|emergency_\d+\.pt|\.step_{STEPS:08}\.pt\.part"
        if strange := [path.name for path in folder.iterdir() if not re.fullmatch(names, path.name)]:
            raise Failure(f"its folder holds {strange}")
        return *found, job.lines
    except Failure:
        errors = Path(job.errors.name).read_text().splitlines()
        print("\n".join(["", *(line for _, line in job.lines[-10:]), *errors[-40:]]))
        raise
    finally:
        job.close()


def back_after(hits, lines):
    """[seconds from a kill to the next start's first line], for kills of training ranks that no other kill follows."""
    for (when, where), (end, _) in itertools.pairwise([*hits, (float("inf"), "")]):
        again = next((at for at, line in lines if at > when and line.startswith("start ")), float("inf"))
        if where in ("training", "a write") and again < end:
            yield again - when


def kill_many(kills, nproc, seed, folder, script, agent=TORCHRUN):
    """Run jobs until ``kills`` ranks have been killed; print a line for each. Returns how many jobs went wrong."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM also cleans up
    with tempfile.TemporaryDirectory() as folder:
        script = export(Path(folder) / "script")
        return kill_many(args.kills, args.nproc, args.seed, Path(folder), script, FORKING if args.forked else TORCHRUN)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
