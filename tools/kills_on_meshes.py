"""Kill ranks of chapter 16's job at random moments, each time on another mesh (``make soak N=1000``).

Torchrun's own agent, real SIGKILL, any rank. A third of the moments is drawn evenly from the seconds of training, saves
included; a third from the writing of a checkpoint; a third from its commit, which is its last file, its renaming, and
the removal of the oldest. After each kill the job goes on, on a mesh that is drawn too. A job has passed if

- its last weights and its optimizer's state are those of an uninterrupted job on one rank, up to TOLERANCE;
- each step was trained once in what was kept: it printed the uninterrupted job's loss and norm;
- each start went on from the newest checkpoint that anybody had seen complete, or from a newer one;
- its folder holds three checkpoints and nothing else, and no process is left.

Ranks add up in another order on another mesh, so bits differ. Uninterrupted jobs run on all meshes first, and it is
printed what they differ by. The biases of the keys are not compared. They add the same number to all scores of a query,
so softmax ignores them, and their gradient is rounding alone. Adam divides it by its own size: noise becomes steps.
"""

import argparse
import contextlib
import json
import random
import re
import signal
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
import torch
from kills import AT_ADDRESS, FORKING, PATIENCE, ROOT, Failure, alone, export
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

CHAPTER = ROOT / "notebooks" / "16_capstone.ipynb"
# {(pp, dp, tp): how often it is drawn}. Eight ranks take the longest to start.
MESHES = {
    (1, 1, 1): 6,
    (2, 1, 1): 6,
    (1, 2, 1): 6,
    (1, 1, 2): 6,
    (2, 2, 1): 4,
    (1, 2, 2): 4,
    (2, 1, 2): 4,
    (2, 2, 2): 1,
}
STEPS, EVERY = 16, 2
MODEL = ["--width", "16", "--layers", "2", "--batch-size", "32", "--warmup", "4"]
FLAGS = ["--steps", str(STEPS), "--save-every", str(EVERY), "--log-every", "1", "--backend", "gloo", *MODEL]
PLACES = ["training", "a write", "a commit"]
COMMIT = 0.01  # seconds from a checkpoint's last file, about as long as its renaming and the removal of an old one take
TOLERANCE = 1e-5  # uninterrupted jobs on these meshes differ by 0.0000005


class Agent:
    """An agent that runs one job after the other, and the lines that their ranks print, each with its time."""

    def __init__(self, environment, errors):
        self.mark, self.lines, self.errors = uuid.uuid4().hex, [], open(errors, "w")
        self.process = subprocess.Popen(
            [sys.executable, *FORKING, "--serve"],
            env={**environment, leftovers.MARK: self.mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def start(self, script, mesh, folder):
        """Start the job on a mesh."""
        pp, dp, tp = mesh
        self.lines.clear()
        where = ["--checkpoint-dir", str(folder), "--resume", "--pp", str(pp), "--tp", str(tp)]
        agent = [f"--nproc-per-node={pp * dp * tp}", "--monitor-interval=0.02", *AT_ADDRESS]
        self.process.stdin.write(json.dumps([*agent, str(script), *FLAGS, *where]) + "\n")
        self.process.stdin.flush()

    def said(self, word):
        """The first line that starts with a word, as (when, line), or None."""
        return next((pair for pair in list(self.lines) if pair[1].startswith(word)), None)

    def wait_for(self, condition, seconds=PATIENCE):
        """Whether a condition has held before the job's end; Failure after so many seconds without either."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.said("ended"):
                return False
            if self.process.poll() is not None:
                raise Failure(f"the agent ended with status {self.process.returncode}")
            time.sleep(0.0005)
        raise Failure("it hangs")

    def ranks(self):
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)
        return []

    def end(self):
        """Wait for the job's end: (the step that it went on from, {step: (loss, norm)}, its result or None)."""
        self.wait_for(lambda: self.said("ended"))
        if left := [child for child in self.ranks() if child.status() != psutil.STATUS_ZOMBIE]:
            raise Failure(f"it left {left}")
        text = "\n".join(line for _, line in self.lines)
        begun = re.search(r"going on from step_(\d+)", text)
        steps = re.findall(r"^step (\d+): loss (\S+), norm (\S+)$", text, re.MULTILINE)
        values = {int(step): (float(loss), float(norm)) for step, loss, norm in steps}
        return int(begun[1]) if begun else 0, values, re.search(r"^result (.*)$", text, re.MULTILINE)

    def close(self):
        self.process.kill()
        for pid in leftovers.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                psutil.Process(pid).kill()
        self.process.wait()
        self.reader.join(5)
        for file in (self.process.stdin, self.process.stdout, self.errors):
            file.close()


def complete(folder):
    """The steps of the checkpoints that have got their names."""
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def is_written(folder, since):
    """Whether a checkpoint is being written that was begun after a time of the system's clock."""
    with contextlib.suppress(FileNotFoundError):  # it has got its name between the two looks
        return any(path.stat().st_mtime > since for path in folder.glob(".step_*.part"))
    return False


def is_committed(folder, since):
    """Whether a checkpoint has all of its files but not its name, or an old one is being removed."""
    whole = any(folder.glob(".step_*.part/.metadata")) and is_written(folder, since)
    return whole or any(path.suffix != ".part" for path in folder.glob(".step_*"))


def contents(folder, scratch):
    """{name: tensor} of all that the newest checkpoint holds."""
    path = scratch / f"{uuid.uuid4().hex}.pt"
    dcp_to_torch_save(folder / f"step_{complete(folder)[-1]:08}", path)
    found = {}

    def walk(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{name}.{key}", inner)
        elif isinstance(value, torch.Tensor) and "key.bias" not in name:
            found[name] = value.float()

    walk("", torch.load(path, weights_only=True))
    path.unlink()
    return found


def apart(one, other):
    """The largest difference of two {name: tensor}, which must have the same names."""
    if one.keys() != other.keys():
        raise Failure(f"a checkpoint lacks {min(one.keys() ^ other.keys())}")
    return max((one[name] - other[name]).abs().max().item() for name in one)


def close(one, other):
    """Whether two (loss, norm) are the same, printed with three and with two digits."""
    return abs(one[0] - other[0]) < 0.0015 and abs(one[1] - other[1]) < 0.015


def uninterrupted(agent, script, mesh, folder, scratch):
    """(weights and optimizer, {step: (loss, norm)}, seconds of training, of a write) of a job that nobody kills."""
    since = time.time()
    agent.start(script, mesh, folder)
    if not agent.wait_for(lambda: is_written(folder, since)):
        raise Failure("its checkpoints have their names before they are complete")
    begun = time.monotonic()
    agent.wait_for(lambda: not is_written(folder, since))
    write = time.monotonic() - begun
    _, values, result = agent.end()
    if not result:
        raise Failure(f"the uninterrupted job ends without a result on {mesh}")
    seconds = agent.said(f"step {STEPS}:")[0] - agent.said("starting anew")[0]
    return contents(folder, scratch), values, seconds, write


def kill_at(agent, folder, place, seconds, write, luck):
    """Wait for a moment, then kill a rank: where the job stood then, or None if it had ended."""
    since = time.time()
    moment = {"training": seconds, "a write": write, "a commit": COMMIT}[place] * luck.random()
    number, skipped = luck.random(), luck.randrange(3)  # of the saves
    if place == "a commit" and luck.random() < 0.5:
        number = 0  # rank 0 does it; without the others it ends at its next collective
    if not agent.wait_for(lambda: agent.said("starting anew") or agent.said("going on")):
        return None
    ranks = agent.ranks()
    if place != "training":
        for _ in range(skipped):
            agent.wait_for(lambda: is_written(folder, since))
            agent.wait_for(lambda: not is_written(folder, since))
        begins = is_written if place == "a write" else is_committed
        agent.wait_for(lambda: begins(folder, since))
    end = time.monotonic() + moment
    agent.wait_for(lambda: time.monotonic() >= end)
    if agent.said("ended") or agent.said("result") or not ranks:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks[int(number * len(ranks))].kill()
        return "a commit" if is_committed(folder, since) else "a write" if is_written(folder, since) else "training"
    return None


def one_job(agent, script, folder, scratch, luck, meshes, known, expected, kills, hits):
    """Kill a job until it ends, at most so many times: (how far apart it ended, its starts). Adds to hits."""
    weights, values = expected
    kept, starts, result = {}, 0, None
    while not result:
        mesh, place = luck.choices(list(meshes), meshes.values())[0], luck.choice(PLACES)
        before, starts, killed = complete(folder), starts + 1, None
        agent.start(script, mesh, folder)
        if len(hits) < kills and (killed := kill_at(agent, folder, place, *known[mesh], luck)):
            hits.append((mesh, killed))
        seen = complete(folder)
        begun, trained, result = agent.end()
        if not result and not killed:
            raise Failure("it ended by itself, without a result")
        if begun != (before or [0])[-1]:
            raise Failure(f"it went on from step {begun}, and the checkpoints {before} were complete")
        after = complete(folder)
        if (after or [0])[-1] < (seen or [0])[-1]:
            raise Failure(f"of the checkpoints {seen}, complete at the kill, {after} are left")
        kept = {step: pair for step, pair in kept.items() if step <= begun} | trained
    if list(kept) != list(range(1, STEPS + 1)):
        raise Failure(f"the steps that it kept are {list(kept)}")
    if wrong := [step for step, pair in kept.items() if not close(pair, values[step])]:
        raise Failure(f"step {wrong[0]} printed {kept[wrong[0]]}, not {values[wrong[0]]}")
    names = sorted(path.name for path in folder.iterdir())
    if names != [f"step_{STEPS - EVERY * back:08}" for back in (2, 1, 0)]:
        raise Failure(f"its folder holds {names}")
    return apart(contents(folder, scratch), weights), starts


def kill_many(kills, seed, scratch, script, meshes=MESHES):
    """Jobs under kills until there were as many; how many jobs went wrong."""
    luck, environment = random.Random(seed), alone(scratch)
    print(f"seed {seed}: python tools/kills_on_meshes.py --kills {kills} --seed {seed}", flush=True)
    agent = Agent(environment, scratch / "errors.txt")
    hits, wrong, job, known, largest, expected = [], 0, 0, {}, 0.0, None
    begun = time.monotonic()
    try:
        print("uninterrupted  seconds  of a write  apart from one rank", flush=True)
        for mesh in meshes:
            folder = scratch / "uninterrupted" / "x".join(map(str, mesh))
            weights, values, *known[mesh] = uninterrupted(agent, script, mesh, folder, scratch)
            expected = expected or (weights, values)
            most = apart(weights, expected[0])
            largest = max(largest, most)
            print(
                f"{'x'.join(map(str, mesh)):13}  {known[mesh][0]:7.2f}  {known[mesh][1]:10.2f}  {most:.1e}", flush=True
            )
        if largest > TOLERANCE / 5:
            raise Failure(f"uninterrupted jobs differ by {largest:.1e}: the tolerance of {TOLERANCE} means little")
        print("job  starts  kills  apart from one rank", flush=True)
        while len(hits) < kills:
            job, done = job + 1, len(hits)
            folder = scratch / f"job{job}"
            folder.mkdir()
            most, starts = one_job(agent, script, folder, scratch, luck, meshes, known, expected, kills, hits)
            right = most < TOLERANCE
            wrong += not right
            outcome = "equal" if right else "DIFFERENT"
            print(f"{job:3}  {starts:6}  {len(hits) - done:5}  {most:.1e}  {outcome}", flush=True)
    except Failure as failure:
        wrong += 1
        errors = Path(agent.errors.name).read_text().splitlines()
        print("\n".join([*(line for _, line in agent.lines), *errors[-40:]]))
        print(f"FAILED: {failure}", flush=True)
    finally:
        agent.close()
    places = ", ".join(f"{number} in {where}" for where, number in Counter(where for _, where in hits).most_common())
    meshes = ", ".join(
        f"{number} on {'x'.join(map(str, mesh))}" for mesh, number in sorted(Counter(mesh for mesh, _ in hits).items())
    )
    each = (time.monotonic() - begun) / max(1, len(hits))
    print(
        f"{len(hits)} kills ({places}; {meshes}) in {job} jobs, {each:.1f} s each: {wrong} jobs differ or failed",
        flush=True,
    )
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="how many in all (25)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of moments, ranks and meshes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave nothing then either
    with tempfile.TemporaryDirectory() as folder:
        script = export(Path(folder) / "script", CHAPTER)
        return kill_many(args.kills, args.seed, Path(folder), script)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
