"""Kill ranks of chapter 16's job at random moments, each time on another mesh (``make soak N=1000``).

Torchrun's own agent, real SIGKILL, any rank. A third of the moments is drawn evenly from the seconds of training, saves
included; a third from the writing of a checkpoint; a third from its commit, which is its last file, its renaming, and
the removal of the oldest. Half of them wait until a start has saved once. After each kill the job goes on, on a mesh
that is drawn too. A job has passed if

- its last weights and its optimizer's state are those of an uninterrupted job on one rank, up to TOLERANCE;
- each step was trained once in what was kept: it printed the uninterrupted job's loss and norm;
- each start went on from the newest checkpoint that anybody had seen complete, or from a newer one;
- its folder holds three checkpoints and nothing else, and no process is left. A fourth may be there where the last
  start had nothing to train: then a kill came before the last save removed it.

Ranks add up in another order on another mesh, so bits differ. The biases of the keys are not compared. They add the
same number to all scores of a query, so softmax ignores them, and their gradient is rounding alone. Adam divides it by
its own size: noise becomes steps.
"""

import argparse
import contextlib
import json
import os
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
# {(pp, dp, tp): how often it is drawn}. Twice the ranks take about twice the processor time.
MESHES = {
    (1, 1, 1): 8,
    (2, 1, 1): 4,
    (1, 2, 1): 4,
    (1, 1, 2): 4,
    (2, 2, 1): 2,
    (1, 2, 2): 2,
    (2, 1, 2): 2,
    (2, 2, 2): 1,
}
STEPS, EVERY = 16, 2
MODEL = ["--width", "16", "--layers", "2", "--batch-size", "32", "--warmup", "4"]
FLAGS = ["--steps", str(STEPS), "--save-every", str(EVERY), "--log-every", "1", "--backend", "gloo", *MODEL]
PLACES = ["training", "a write", "a commit"]
COMMIT = 0.005  # seconds from a checkpoint's last file: its renaming and the removal of an old one take about as long
TOLERANCE = 1e-5  # uninterrupted jobs on these meshes differ by 0.0000005
IMPORTS = [  # of the job: done once in the agent, not in each rank
    "numpy",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.serialization",
]


class Agent:
    """An agent that runs one job after the other, and the lines that their ranks print, each with its time."""

    def __init__(self, environment, errors):
        self.mark, self.lines, self.errors = uuid.uuid4().hex, [], open(errors, "w")
        self.process = subprocess.Popen(
            [sys.executable, *FORKING, "--serve", *IMPORTS],
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
            time.sleep(0.001)
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


def doing(folder):
    """What a running job does to the checkpoints in its folder: "a write" or "a commit", or else "training"."""
    hidden = [Path(folder, name) for name in os.listdir(folder) if name.startswith(".step_")]
    if any(path.suffix != ".part" or Path(path, ".metadata").exists() for path in hidden):
        return "a commit"  # a checkpoint has all of its files but not its name, or an old one is being removed
    return "a write" if hidden else "training"


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


def uninterrupted(agent, script, folder, scratch):
    """(weights and optimizer, {step: (loss, norm)}, seconds to the end of the first save, of a write) on one rank."""
    agent.start(script, (1, 1, 1), folder)
    if not agent.wait_for(lambda: doing(folder) == "a write"):
        raise Failure("its checkpoints have their names before they are complete")
    begun = time.monotonic()
    agent.wait_for(lambda: doing(folder) != "a write")
    write = time.monotonic() - begun
    _, values, result = agent.end()
    if not result:
        raise Failure("the uninterrupted job ends without a result")
    seconds = agent.said(f"step {EVERY + 1}:")[0] - agent.said("starting anew")[0]
    return contents(folder, scratch), values, seconds, write


def kill_at(agent, folder, begun, place, seconds, write, luck):
    """Wait for a moment, then kill a rank: where the job stood then, or None if it had ended."""
    moment = {"training": seconds, "a write": write, "a commit": COMMIT}[place] * luck.random()
    number, later = luck.random(), luck.random() < 0.5
    if place == "a commit" and luck.random() < 0.5:
        number = 0  # rank 0 does it; without the others it ends at its next collective
    if not agent.wait_for(lambda: agent.said("starting anew") or agent.said("going on")):
        return None
    ranks = agent.ranks()
    if later:
        agent.wait_for(lambda: agent.said(f"step {begun + EVERY + 1}:"))
    if place != "training":
        agent.wait_for(lambda: doing(folder) == place)
    end = time.monotonic() + moment * max(1, len(ranks) / os.cpu_count())
    agent.wait_for(lambda: time.monotonic() >= end)
    if agent.said("ended") or agent.said("result") or not ranks:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks[int(number * len(ranks))].kill()
        return doing(folder)
    return None


def one_job(agent, script, folder, scratch, luck, meshes, expected, kills, hits):
    """Kill a job until it ends, at most so many times: (how far apart it ended, its starts). Adds to hits."""
    weights, values, *times = expected
    kept, starts, result = {}, 0, None
    while not result:
        mesh, place = luck.choices(list(meshes), meshes.values())[0], luck.choice(PLACES)
        before, starts, killed = complete(folder), starts + 1, None
        agent.start(script, mesh, folder)
        if len(hits) < kills and (killed := kill_at(agent, folder, (before or [0])[-1], place, *times, luck)):
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
    newest = [f"step_{STEPS - EVERY * back:08}" for back in (3, 2, 1, 0)]
    if names != newest[1:] and (trained or names != newest):
        raise Failure(f"its folder holds {names}")
    return apart(contents(folder, scratch), weights), starts


def kill_many(kills, seed, scratch, script, agent, meshes=MESHES):
    """Jobs under kills until there were as many; how many jobs went wrong."""
    luck = random.Random(seed)
    print(f"seed {seed}: python tools/kills_on_meshes.py --kills {kills} --seed {seed}", flush=True)
    hits, wrong, job, begun = [], 0, 0, time.monotonic()
    try:
        (scratch / "uninterrupted").mkdir()
        expected = uninterrupted(agent, script, scratch / "uninterrupted", scratch)
        print("uninterrupted: {2:.2f} s until it has saved, {3:.2f} s of a write".format(*expected), flush=True)
        print("job  starts  kills  apart from one rank", flush=True)
        while len(hits) < kills:
            job, done = job + 1, len(hits)
            folder = scratch / f"job{job}"
            folder.mkdir()
            most, starts = one_job(agent, script, folder, scratch, luck, meshes, expected, kills, hits)
            right = most < TOLERANCE
            wrong += not right
            outcome = "equal" if right else "DIFFERENT"
            print(f"{job:3}  {starts:6}  {len(hits) - done:5}  {most:.1e}  {outcome}", flush=True)
    except Failure as failure:
        wrong += 1
        errors = Path(agent.errors.name).read_text().splitlines()
        print("\n".join([*(line for _, line in agent.lines), *errors[-40:]]))
        print(f"FAILED: {failure}", flush=True)
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
        folder = Path(folder)
        script = export(folder / "script", CHAPTER)
        with contextlib.closing(Agent(alone(folder), folder / "errors.txt")) as agent:
            return kill_many(args.kills, args.seed, folder, script, agent)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
