"""Run a chapter's script again and again, or kill its ranks, and count what goes wrong: ``make soak CHAPTER=04``.

    --runs 40      any chapter's script on 2 and on 4 ranks; each run has to end well
    --kills 200    of chapter 13's job, whose last weights must be the undisturbed job's to the last bit
    --kills 1000   of chapter 16's job, which goes on on another mesh each time

Ranks, torchrun's agent and SIGKILL are real, and any rank may be the victim. No process, no half written file and no
hanging job may be left.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leftovers
import psutil
import torch
from forked import AT_ADDRESS, FORKING, TORCHRUN
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.export import chapters

PATIENCE = 180  # seconds: a start, a restart or an end that takes longer counts as a hang
# Of chapter 16's job: done once in the agent, not in each rank.
IMPORTS = ["numpy", "torch.utils.serialization"] + [
    f"torch.distributed.{name}"
    for name in "fsdp pipelining tensor.parallel checkpoint._fsspec_filesystem checkpoint.state_dict".split()
]


class Failure(Exception):
    """A job hangs, fails or leaves something behind; the message says which."""


class Agent:
    """torchrun's agent, one job of ranks after the other, and the lines that the ranks of the last job have printed.

    ``forking``: the ranks are forked from the agent, which has imported torch. Else each job has an agent of its own.
    """

    def __init__(self, folder: Path, forking: bool = True) -> None:
        self.folder, self.forking, self.mark = folder, forking, uuid.uuid4().hex
        self.lines: list[str] = []
        self.errors = folder / "errors.txt"
        self.process: Any = None  # subprocess.Popen, once a job has been started

    def start(self, script: Path, nproc: int, *flags: str, restarts: int = 0) -> None:
        """Start a job; the one before has ended."""
        words = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}", "--monitor-interval=0.02", *AT_ADDRESS]
        words += [str(script), *flags]
        self.lines.clear()
        if not self.forking:
            self.close()
            self.open([*TORCHRUN, *words], own_store=restarts > 0)
            return
        if not self.process:
            self.open([*FORKING, "--serve", *IMPORTS], own_store=True)
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def open(self, command: list[str], own_store: bool) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"TMPDIR": str(self.folder), "OMP_NUM_THREADS": "1", leftovers.MARK: self.mark}
        environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        # Ranks that start again may read dead ranks' addresses from a store that outlives them. But another program may
        # take the port of a store of their own before it starts.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(own_store))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with self.errors.open("w") as errors:
            pipes |= {"stderr": errors}
            self.process = subprocess.Popen([sys.executable, *command], cwd=self.folder, env=environment, **pipes)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def status(self) -> int | None:
        """The job's exit status; None while it runs."""
        if self.forking and self.printed("ended "):
            return int(self.lines[self.last("ended ")].split()[1])
        status = self.process.poll()
        if self.forking and status is not None:
            raise Failure(f"the agent ended with status {status}")
        return status

    def last(self, words: str) -> int:
        """The number of the last line that begins with these words, or -1."""
        numbers = range(len(self.lines) - 1, -1, -1)
        return next((number for number in numbers if self.lines[number].startswith(words)), -1)

    def printed(self, words: str, since: int = 0) -> bool:
        """Whether a line begins with these words, from line ``since`` on."""
        return self.last(words) >= since

    def wait_for(self, condition: Callable[[], object], seconds: float = PATIENCE, step: float = 0.001) -> bool:
        """Whether a condition has held before the job's end; Failure after so many seconds without either."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.status() is not None:
                return False
            time.sleep(step)
        raise Failure("it hangs")

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that run now, by rank."""
        with contextlib.suppress(psutil.Error):
            return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)
        return []

    def new_ranks(self, nproc: int, before: list[psutil.Process]) -> list[psutil.Process]:
        """Wait for ranks that were not there before; [] if the job ends."""
        ranks: list[psutil.Process] = []

        def new() -> bool:
            ranks[:] = self.ranks()
            return len(ranks) == nproc and not set(ranks) & set(before)

        return ranks if self.wait_for(new, step=0.05) else []  # a look reads all processes of the machine

    def end(self, seconds: float = PATIENCE) -> int | None:
        """Wait for the job's end: its exit status. Failure where it hangs or leaves a process."""
        self.wait_for(lambda: self.status() is not None, seconds)
        if not self.forking:
            self.reader.join(5)
        agent = {self.process.pid} if self.forking else set()  # it waits for the next job
        if not leftovers.wait_until(lambda: not leftovers.processes(self.mark).keys() - agent):
            raise Failure(f"it left {leftovers.processes(self.mark)}")
        return self.status()

    def close(self) -> None:
        if not self.process:
            return
        if self.process.poll() is None:  # after its end, the system may give its number to another process
            self.process.kill()
        for pid in leftovers.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(5)
        self.process.stdin.close()
        self.process.stdout.close()


# --- chapter 13: the agent restarts the ranks, and no bit changes -----------------------------------------------------


class Restarts:
    """Chapter 13's job. Torchrun restarts its ranks after a kill, and its last weights must not differ in a bit.

    Half of the moments are drawn evenly from the seconds of a start-up, the others from the first second of training.
    Half of those wait for the next snapshot's write. What a kill leaves, the next save removes: so a kill during the
    last save may leave its part, and an emergency save, where the next start has nothing to train.
    """

    CHAPTER = "13"
    LENGTH, STEPS = ["--epochs", "32"], 480  # long enough for some twenty kills
    WINDOW = 1.0  # seconds of training from which half of the moments are drawn

    def __init__(self, agent: Agent, script: Path, scratch: Path, luck: random.Random, nproc: int = 2) -> None:
        self.agent, self.script, self.luck, self.nproc = agent, script, luck, nproc
        self.start(scratch / "undisturbed", 1000)
        agent.new_ranks(nproc, [])
        start = time.monotonic()
        agent.wait_for(lambda: agent.printed("start "))
        self.start_up = time.monotonic() - start
        self.undisturbed = self.outcome()
        print(f"undisturbed, {nproc} ranks: {self.start_up:.2f} s of start-up", flush=True)

    def start(self, folder: Path, every: int, *flags: str) -> None:
        saves = ["--save-every", str(every), "--checkpoint-dir", str(folder)]
        self.agent.start(self.script, self.nproc, *self.LENGTH, *saves, *flags, restarts=1_000_000)

    def outcome(self) -> list[str]:
        """What the job printed at its end: the digest of its weights, and its result."""
        status, lines = self.agent.end(), self.agent.lines
        endings = [line for line in lines[self.agent.last("start ") :] if line.startswith(("weights ", "result "))]
        if status or len(endings) != 2:
            raise Failure(f"torchrun ended with status {status}")
        return endings

    def job(self, folder: Path, most: int, kills: list[str]) -> str:
        """Kill ranks of one job until it ends, at most so often; add the places to kills. Returns what it came to."""
        agent, every, emergency = self.agent, self.luck.choice([1, 1, 2, 5]), self.luck.choice(["", "no-"])
        self.start(folder, every, f"--{emergency}emergency")
        ranks = agent.new_ranks(self.nproc, [])
        while ranks and len(kills) < most and self.kill(folder, ranks, kills):
            ranks = agent.new_ranks(self.nproc, ranks)
        outcome, names = self.outcome(), r"step_.*"
        if agent.printed(f"going on from step {self.STEPS},", agent.last("start ")):  # it had nothing to train or save
            names += rf"|emergency_\d+\.pt|\.step_{self.STEPS:08}\.pt\.part"
        if strange := [path.name for path in folder.iterdir() if not re.fullmatch(names, path.name)]:
            raise Failure(f"its folder holds {strange}")
        verdict = "equal" if outcome == self.undisturbed else f"DIFFERENT: {outcome}, not {self.undisturbed}"
        return f"{verdict}; a snapshot every {every} steps, {'with' if not emergency else 'without'} emergency saves"

    def kill(self, folder: Path, ranks: list[psutil.Process], kills: list[str]) -> bool:
        """Wait for a moment and kill a rank; False if the job ends before."""
        agent, since, clock = self.agent, len(self.agent.lines), time.time()

        def newer(pattern: str) -> bool:
            with contextlib.suppress(FileNotFoundError):  # a file was renamed after glob had listed it
                return any(path.stat().st_mtime > clock for path in folder.glob(pattern))
            return False

        def trains() -> bool:
            return newer("step_*") or agent.printed("going on", since)

        moment = self.luck.uniform(0, self.start_up)
        if self.luck.random() < 0.5:
            agent.wait_for(trains)
            moment = self.luck.uniform(0, self.WINDOW)
        if ended_within(agent, moment):
            return False
        if self.luck.random() < 0.5 and trains():
            with contextlib.suppress(Failure):
                agent.wait_for(lambda: newer(".step_*.part"), 0.3)
        with contextlib.suppress(psutil.NoSuchProcess):  # the rank has ended by itself
            self.luck.choice(ranks).kill()
            where = "a write" if newer(".step_*.part") else "training" if trains() else "start-up"
            kills.append("the end" if agent.printed("weights ", since) else where)
        return True


def ended_within(agent: Agent, seconds: float) -> bool:
    end = time.monotonic() + seconds
    return not agent.wait_for(lambda: time.monotonic() >= end)


# --- chapter 16: each start is on another mesh, and no step is lost ---------------------------------------------------


class Meshes:
    """Chapter 16's job, which is started again after a kill, on a mesh that is drawn.

    A third of the moments is drawn evenly from the seconds of training, saves included; a third from the writing of a
    checkpoint; a third from its commit, which is its last file, its renaming, and the removal of the oldest. Half of
    them wait until a start has saved once. A job has passed if

    - its last weights and its optimizer's state are those of an uninterrupted job on one rank, up to TOLERANCE;
    - each step was trained once in what was kept: it printed the uninterrupted job's loss and norm;
    - each start went on from the newest checkpoint that anybody had seen complete, or from a newer one;
    - its folder holds three checkpoints and nothing else. A fourth may be there where the last start had nothing to
      train: then a kill came before the last save removed it.

    Ranks add up in another order on another mesh, so bits differ. The biases of the keys are not compared. They add
    the same number to all scores of a query, so softmax ignores them, and their gradient is rounding alone. Adam
    divides it by its own size: noise becomes steps.
    """

    CHAPTER = "16"
    # {(pp, dp, tp): how often it is drawn}. Twice the ranks take about twice the processor time.
    MESHES = {(1, 1, 1): 8, (2, 1, 1): 4, (1, 2, 1): 4, (1, 1, 2): 4}
    MESHES |= {(2, 2, 1): 2, (1, 2, 2): 2, (2, 1, 2): 2, (2, 2, 2): 1}
    STEPS, EVERY = 16, 2
    FLAGS = ["--steps", str(STEPS), "--save-every", str(EVERY), "--log-every", "1", "--backend", "gloo"]
    FLAGS += ["--width", "16", "--layers", "2", "--batch-size", "32", "--warmup", "4"]
    PLACES = ["training", "a write", "a commit"]
    COMMIT = 0.005  # seconds from a checkpoint's last file: its renaming and the removal of an old one take as long
    TOLERANCE = 1e-5  # uninterrupted jobs on these meshes differ by 0.0000005

    def __init__(self, agent: Agent, script: Path, scratch: Path, luck: random.Random, meshes: dict = MESHES) -> None:
        """Run the uninterrupted job on one rank, and note its weights, its steps and its times."""
        self.agent, self.script, self.scratch, self.luck, self.meshes = agent, script, scratch, luck, meshes
        folder = scratch / "uninterrupted"
        folder.mkdir()
        self.start((1, 1, 1), folder)
        agent.wait_for(lambda: agent.printed("starting anew"))
        start = time.monotonic()
        if not agent.wait_for(lambda: doing(folder) == "a write"):
            raise Failure("its checkpoints have their names before they are complete")
        writes = time.monotonic()
        agent.wait_for(lambda: doing(folder) != "a write")
        write = time.monotonic() - writes
        agent.wait_for(lambda: agent.printed(f"step {self.EVERY + 1}:"))
        training = time.monotonic() - start
        _, self.steps, result = self.end()
        if not result:
            raise Failure("the uninterrupted job ends without a result")
        self.weights = self.contents(folder)
        self.seconds = {"training": training, "a write": write, "a commit": self.COMMIT}
        print(f"uninterrupted: {training:.2f} s until it has saved, {write:.2f} s of a write", flush=True)

    def start(self, mesh: tuple[int, int, int], folder: Path) -> None:
        pp, dp, tp = mesh
        where = ["--checkpoint-dir", str(folder), "--resume", "--pp", str(pp), "--tp", str(tp)]
        self.agent.start(self.script, pp * dp * tp, *self.FLAGS, *where)

    def end(self) -> tuple[int, dict[int, tuple[float, float]], bool]:
        """Wait for a start's end: (the step that it went on from, {step: (loss, norm)}, whether it has a result)."""
        self.agent.end()
        text = "\n".join(self.agent.lines)
        checkpoint = re.search(r"going on from step_(\d+)", text)
        lines = re.findall(r"^step (\d+): loss (\S+), norm (\S+)$", text, re.MULTILINE)
        steps = {int(step): (float(loss), float(norm)) for step, loss, norm in lines}
        return int(checkpoint[1]) if checkpoint else 0, steps, self.agent.printed("result ")

    def contents(self, folder: Path) -> dict[str, torch.Tensor]:
        """{name: tensor} of all that the newest checkpoint holds."""
        path = self.scratch / f"{uuid.uuid4().hex}.pt"
        dcp_to_torch_save(folder / f"step_{complete(folder)[-1]:08}", path)
        tensors = {}

        def walk(name: str, value: object) -> None:
            if isinstance(value, dict):
                for key, inner in value.items():
                    walk(f"{name}.{key}", inner)
            elif isinstance(value, torch.Tensor) and "key.bias" not in name:
                tensors[name] = value.float()

        walk("", torch.load(path, weights_only=True))
        path.unlink()
        return tensors

    def kill(self, folder: Path, before: int, place: str) -> str | None:
        """Wait for a moment, then kill a rank: what the job did then, or None if it had ended."""
        agent, luck = self.agent, self.luck
        moment, number, later = self.seconds[place] * luck.random(), luck.random(), luck.random() < 0.5
        if place == "a commit" and luck.random() < 0.5:
            number = 0  # rank 0 does it; without the others it ends at its next collective
        if not agent.wait_for(lambda: agent.printed("starting anew") or agent.printed("going on")):
            return None
        ranks = agent.ranks()
        if later:
            agent.wait_for(lambda: agent.printed(f"step {before + self.EVERY + 1}:"))
        if place != "training":
            agent.wait_for(lambda: doing(folder) == place)
        moment *= max(1, len(ranks) / (os.cpu_count() or 1))
        if ended_within(agent, moment) or agent.printed("result") or not ranks:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks[int(number * len(ranks))].kill()
            return doing(folder)
        return None

    def job(self, folder: Path, most: int, kills: list[str]) -> str:
        """Start and kill a job until it ends, at most so often; add the places to kills. Returns what it came to."""
        history: dict[int, tuple[float, float]] = {}  # the steps whose weights the job goes on with
        starts, result = 0, False
        folder.mkdir()
        while not result:
            mesh, place = self.luck.choices(*zip(*self.meshes.items(), strict=True))[0], self.luck.choice(self.PLACES)
            before, starts, kill = complete(folder), starts + 1, None
            self.start(mesh, folder)
            if len(kills) < most and (kill := self.kill(folder, before[-1], place)):
                kills.append(f"{kill} on {'x'.join(map(str, mesh))}")
            after = complete(folder)
            origin, steps, result = self.end()
            if not result and not kill:
                raise Failure("it ended by itself, without a result")
            if origin != before[-1]:
                raise Failure(f"it went on from step {origin}, and the checkpoints {before} were complete")
            if complete(folder)[-1] < after[-1]:
                raise Failure(f"of the checkpoints {after}, complete at the kill, {complete(folder)} are left")
            history = {step: pair for step, pair in history.items() if step <= origin} | steps
        self.check(folder, history, bool(steps))
        weights = self.contents(folder)
        if weights.keys() != self.weights.keys():
            raise Failure(f"a checkpoint lacks {min(weights.keys() ^ self.weights.keys())}")
        apart = max((weights[name] - self.weights[name]).abs().max().item() for name in weights)
        return f"{'equal' if apart < self.TOLERANCE else 'DIFFERENT'}; {starts} starts, {apart:.1e} from one rank"

    def check(self, folder: Path, history: dict, trains: bool) -> None:
        """Raise Failure unless each step was kept once and equals the uninterrupted job's, and the folder is tidy."""
        if list(history) != list(range(1, self.STEPS + 1)):
            raise Failure(f"the steps that it kept are {list(history)}")
        for step, (loss, norm) in history.items():  # printed with three and with two digits
            if abs(loss - self.steps[step][0]) >= 0.0015 or abs(norm - self.steps[step][1]) >= 0.015:
                raise Failure(f"step {step} printed {loss, norm}, not {self.steps[step]}")
        names = sorted(path.name for path in folder.iterdir())
        newest = [f"step_{self.STEPS - self.EVERY * back:08}" for back in (3, 2, 1, 0)]
        if names != newest[1:] and (trains or names != newest):
            raise Failure(f"its folder holds {names}")


def complete(folder: Path) -> list[int]:
    """The steps of the checkpoints that have got their names, after a 0."""
    return [0, *sorted(int(path.name[5:]) for path in folder.glob("step_*"))]


def doing(folder: Path) -> str:
    """What a running job does to the checkpoints in its folder: "a write" or "a commit", or else "training"."""
    hidden = [Path(folder, name) for name in os.listdir(folder) if name.startswith(".step_")]
    if any(path.suffix != ".part" or Path(path, ".metadata").exists() for path in hidden):
        return "a commit"  # a checkpoint has all of its files but not its name, or an old one is being removed
    return "a write" if hidden else "training"


def kill_many(kind: Any, kills: int, seed: int, agent: Agent, script: Path, scratch: Path, *options: object) -> int:
    """Run jobs of a kind until ``kills`` ranks have been killed; print a line for each. Returns how many went wrong."""
    places: list[str] = []
    wrong, job = 0, 0
    print(f"seed {seed}: python tools/soak.py --chapter {kind.CHAPTER} --kills {kills} --seed {seed}", flush=True)
    try:
        jobs = kind(agent, script, scratch, random.Random(seed), *options)
        while len(places) < kills:
            job, before = job + 1, len(places)
            outcome = jobs.job(scratch / f"job{job}", kills, places)
            wrong += not outcome.startswith("equal")
            print(f"job {job}, {len(places) - before} kills: {outcome}", flush=True)
    except Failure as failure:
        wrong += 1
        print("\n".join([*agent.lines[-40:], *agent.errors.read_text().splitlines()[-40:]]))
        print(f"FAILED: {failure}", flush=True)
    counts = ", ".join(f"{number} in {place}" for place, number in Counter(places).most_common())
    print(f"{len(places)} kills ({counts}) in {job} jobs: {wrong} jobs differ or failed", flush=True)
    return wrong


# --- runs without a kill ----------------------------------------------------------------------------------------------


def run_many(agent: Agent, script: Path, nproc: int, runs: int) -> int:
    """Run a script so many times. Returns how many runs ended badly."""
    endings: Counter[str] = Counter()
    start = time.monotonic()
    for _ in range(runs):
        agent.start(script, nproc)
        try:
            status = agent.end()
            ending = f"ended with status {status}" if status else "ended well"
        except Failure as failure:
            ending = str(failure)
        endings[ending] += 1
        if ending != "ended well":
            print(ending, *agent.lines, agent.errors.read_text(), sep="\n", flush=True)
    each = (time.monotonic() - start) / runs
    summary = ", ".join(f"{count} x {ending}" for ending, count in sorted(endings.items()))
    print(f"{script.stem} {nproc} ranks: {summary} ({each:.1f} s each)", flush=True)
    return runs - endings["ended well"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapter", default="04", help="a chapter's number or name, or a notebook's path (04)")
    parser.add_argument("--runs", type=int, default=40, help="how often, on each number of ranks (40)")
    parser.add_argument("--kills", type=int, help="kill so many ranks instead; of chapter 13 or 16")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of moments, ranks and meshes")
    parser.add_argument("--forked", action="store_true", help="fork chapter 13's ranks, with torch imported")
    args = parser.parse_args(arguments)
    kinds = {kind.CHAPTER: kind for kind in (Restarts, Meshes)}
    if args.kills and args.chapter not in kinds:
        parser.error(f"ranks are killed of chapters {' and '.join(kinds)}, not of {args.chapter}")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        agent = Agent(scratch, forking=bool(args.kills) and (args.forked or args.chapter == Meshes.CHAPTER))
        with contextlib.closing(agent):
            [script] = chapters.export(args.chapter, scratch / "script")
            if args.kills:
                return kill_many(kinds[args.chapter], args.kills, args.seed, agent, script, scratch)
            return sum(run_many(agent, script, nproc, args.runs) for nproc in (2, 4))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM also cleans up
    sys.exit(1 if main() else 0)
