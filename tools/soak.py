"""Run a chapter's script again and again, or kill its ranks, and count what goes wrong: ``make soak CHAPTER=04``.

    --runs 40      any chapter's script on 2 and on 4 ranks; each run has to end well
    --kills 1000   of chapter 11's job, with DDP and with --shard, on 1 to 4 ranks, also while it saves
    --kills 200    of chapter 13's job, whose last weights must be the undisturbed job's to the last bit
    --kills 1000   of chapter 16's job, which is started again on another mesh each time

Ranks, torchrun's agent and SIGKILL are real, and any rank may be the victim. No process, no half-written file and no
hanging job may be left. Where ranks are killed, they are forked from the agent, which has imported torch: so a start
takes a tenth of a second, and a thousand kills are possible.
"""

import argparse
import contextlib
import enum
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import leftovers
import psutil
import torch
from forked import AT_ADDRESS, FORKING
from scripting import stand_alone, torchrun

from helpers.export import chapters

LONGEST_WAIT = 180  # seconds: a start, a restart or an end that takes longer counts as a hang
# What the scripts of chapters 11 and 16 import. The agent imports it before it forks ranks, so that no rank has to,
# which would take far longer than the training.
IMPORTS = [
    "numpy",
    "torch.utils.serialization",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
]


class Failure(Exception):
    """A job hangs, fails, loses something or leaves something behind; the message says which."""


class Agent:
    """torchrun's agent in a process of its own, which runs one job of ranks after the other.

    The process is tests/support/forked_torchrun.py: with ``--serve`` it reads a job's arguments from its standard
    input, runs the job, prints ``ended STATUS``, and waits for the next one. ``lines`` are what the latest job has
    printed, and the file ``errors`` has what all jobs wrote to standard error.
    """

    def __init__(self, folder: Path) -> None:
        """Start the agent in ``folder``, where it and its jobs may leave temporary files."""
        # The agent and all processes of its jobs have this text in an environment variable, by which they are found.
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.job_status: int | None = None  # of the latest job, when it has ended
        self.errors = folder / "errors.txt"
        # FORKING is the path of forked_torchrun.py, after the options with which Python has to start it. With --serve
        # the agent imports the modules IMPORTS, so that the ranks that it forks have them, and then waits for jobs.
        command = [sys.executable, *FORKING, "--serve", *IMPORTS]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment_of_agent(folder, self.mark),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Collect what the jobs print, in a thread, until the agent ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ended "):
                self.job_status = int(line.removeprefix("ended "))
            self.lines.append(line.rstrip())

    def start(self, script: Path, nproc: int, *flags: str, restarts: int = 0) -> None:
        """Start a script on ``nproc`` ranks, which torchrun may restart ``restarts`` times. No other job may run."""
        arguments = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}"]
        arguments.append("--monitor-interval=0.02")  # seconds after which the agent looks for dead ranks
        arguments += AT_ADDRESS  # the ranks meet at a free port of this machine
        arguments += [str(script), *flags]
        self.lines.clear()
        self.job_status = None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)  # the agent reads a job from each line

    def printed(self, beginning: str) -> bool:
        """Whether a line of the job begins with these words."""
        return any(line.startswith(beginning) for line in self.lines)

    def status(self) -> int | None:
        """The job's exit status; None while it runs. Raises Failure if the agent itself has ended."""
        if self.job_status is None and self.process.poll() is not None:
            raise Failure(f"the agent ended with status {self.process.returncode}")
        return self.job_status

    def wait_for(self, condition: Callable[[], object], seconds: float = LONGEST_WAIT, step: float = 0.001) -> bool:
        """Wait until a condition holds, and return True; or until the job has ended, and return False.

        The condition is looked at every ``step`` seconds. Raises Failure if after ``seconds`` the job still runs.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            if self.status() is not None:
                return False
            time.sleep(step)
        raise Failure("it hangs")

    def ends_within(self, seconds: float) -> bool:
        """Wait for so many seconds, or until the job has ended; return whether it has."""
        end = time.monotonic() + seconds
        time_is_over_first = self.wait_for(lambda: time.monotonic() >= end)
        return not time_is_over_first

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks that run now, by rank."""
        with contextlib.suppress(psutil.Error):  # a process that ends just now
            # The agent forks them in the order of their ranks, so that their process ids grow.
            return sorted(psutil.Process(self.process.pid).children(), key=lambda child: child.pid)
        return []

    def end(self) -> int | None:
        """Wait for the job's end; return its exit status. Raises Failure if it hangs or leaves a process behind."""

        def only_the_agent_is_left() -> bool:
            return leftovers.processes(self.mark).keys() == {self.process.pid}

        self.wait_for(lambda: self.status() is not None, step=0.005)
        if not leftovers.wait_until(only_the_agent_is_left):
            raise Failure(f"it left {leftovers.processes(self.mark)}")
        return self.status()

    def close(self) -> None:
        """End the agent, and the ranks of a job that still runs."""
        for pid in leftovers.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        self.reader.join(5)


def environment_of_agent(folder: Path, mark: str) -> dict[str, str]:
    """The environment variables of torchrun's agent, which its ranks inherit.

    ``folder`` is where they write temporary files. ``mark`` is a text that no other process has among its variables:
    it shows which processes are still there when a job has ended, also those whose parent has ended before them.
    """
    # A chapter's script must run without this project, so it gets no PYTHONPATH, by which it could find the project.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment[leftovers.MARK] = mark
    environment["TMPDIR"] = str(folder)
    environment["OMP_NUM_THREADS"] = "1"
    environment["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"  # the loopback interface
    # torchrun's ranks usually share the agent's store of addresses. It outlives them, so ranks that are restarted might
    # read the addresses of dead ranks there. With this variable, each start of the ranks gets a store of its own.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


def kill(rank: psutil.Process) -> None:
    """Kill a rank, unless it has ended by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.kill()


class Phase(enum.Enum):
    """What a job is doing at a moment."""

    TRAINING = "it trains"
    WRITING = "it writes the files of a checkpoint"
    COMMITTING = "a checkpoint is complete: it is renamed, and the oldest one is removed"


def phase_of_job(folder: Path) -> Phase:
    """What a running job is doing, as far as the names of the checkpoints in its folder show it.

    While the checkpoint of step 8 is written, its name is ``.step_00000008.tmp``. When it is complete, it is renamed
    to ``step_00000008``. Then the oldest checkpoint is renamed, for example to ``.step_00000002.old``, and removed.
    """
    hidden_checkpoints = list(folder.glob(".step_*"))
    if not hidden_checkpoints:
        return Phase.TRAINING
    for checkpoint in hidden_checkpoints:
        is_being_removed = checkpoint.suffix == ".old"
        is_complete = Path(checkpoint, ".metadata").exists()  # the file that is written last
        if is_being_removed or is_complete:
            return Phase.COMMITTING
    return Phase.WRITING


# --- chapter 11: each start has another number of ranks, with DDP or FSDP2 --------------------------------------------


class Trainers:
    """Chapter 11's job, which is started again after a kill until it ends by itself.

    A job has one of three ways to start: each time with DDP, each time with --shard, or with either, drawn for each
    start. Its number of ranks is drawn for each start from 1 to 4, or it is 2 at all starts. A third of the kills comes
    while the ranks start, a third in training, and a third while a file is written. The
    victim is rank 0, which writes the files, or another rank, or all ranks at once. A job has passed if

    - each start went on from the newest checkpoint that anybody had seen complete, or from a newer one;
    - each step that was kept printed the loss of the undisturbed job;
    - its last weights, its averaged weights and its optimizer's state are those of the undisturbed job: in each bit if
      all starts were on 2 ranks in one way, and within ``TOLERANCE`` if not, because ranks add up in another order;
    - its folder holds three checkpoints, the best and the last weights, the lock, and nothing else. A fourth checkpoint
      may be there where the last start had no step to train: then a kill came before the last save removed it.
    """

    CHAPTER = "11"
    WAYS: ClassVar = {"DDP": ["--no-shard"], "--shard": ["--shard"], "either": ["--no-shard", "--shard"]}
    STEPS = 60
    SAVE_EVERY = 2
    MOST_STEPS = 8  # in a start, after which a kill may come in training
    FLAGS = ["--max-steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--log-every", "1", "--backend", "gloo"]
    FLAGS += ["--width", "512", "--ema", "0.9", "--val-every", "10", "--keep-best", "--resume"]
    TOLERANCE = 1e-5  # by which a weight may differ; weights are about 0.1
    TOLERANCE_OF_LOSS = 2e-3  # the share of a loss by which it may differ, because it is printed with a few digits
    LONGEST_WRITE = 0.01  # seconds after the begin of a write in which a kill may come

    def __init__(self, agent: Agent, script: Path, scratch: Path, luck: random.Random) -> None:
        """Run the job undisturbed on 2 ranks in both ways, to know its losses, its files and its seconds.

        ``agent`` is torchrun's agent, ``script`` is the chapter's, and ``scratch`` is a folder for the jobs' files.
        ``luck`` draws all that is random.
        """
        self.agent = agent
        self.script = script
        self.luck = luck
        self.kills_by_way: Counter[str] = Counter()
        self.kills_in_a_write = 0
        self.largest_difference = 0.0

        ddp_tensors = self.run_undisturbed("--no-shard", scratch / "undisturbed-ddp")
        self.expected_losses = self.printed_losses()
        fsdp_tensors = self.run_undisturbed("--shard", scratch / "undisturbed-fsdp")
        self.compare(ddp_tensors, fsdp_tensors, bitwise=False)
        # {flag of a start: what the files of the undisturbed job with this flag have}
        self.expected_tensors = {"--no-shard": ddp_tensors, "--shard": fsdp_tensors}

    def run_undisturbed(self, flag: str, folder: Path) -> dict[str, torch.Tensor]:
        """Run the job on 2 ranks without a kill, note how long its start and a step take, and return its result."""
        agent = self.agent
        begin = time.monotonic()
        self.start(2, folder, flag)
        agent.wait_for(lambda: agent.printed("step 1:"))
        begin_of_training = time.monotonic()
        if agent.end() != 0:
            raise Failure("the undisturbed job ended with an error")
        end = time.monotonic()
        self.start_up_seconds = begin_of_training - begin
        self.seconds_of_step = (end - begin_of_training) / self.STEPS
        return self.result_in(folder)

    def start(self, nproc: int, folder: Path, *flags: str) -> None:
        """Start the job on so many ranks. It goes on from the newest checkpoint in ``folder``."""
        self.agent.start(self.script, nproc, *self.FLAGS, "--checkpoint-dir", str(folder), *flags)

    def printed_losses(self) -> dict[int, float]:
        """{step: loss} of the latest start, from the lines that it has printed, such as "step 12: loss 0.345, …"."""
        losses = {}
        for line in list(self.agent.lines):  # a copy, because a thread adds lines meanwhile
            printed = re.match(r"step (\d+): loss ([^,\s]+)", line)
            if printed is not None:
                losses[int(printed[1])] = float(printed[2])
        return losses

    def result_in(self, folder: Path) -> dict[str, torch.Tensor]:
        """{name: tensor} of a job that has ended: its last checkpoint, its best weights and its last weights.

        A name has the file and the tensor's place in it, such as "weights.pt['net.0.weight']". The best loss counts as
        a tensor, too.
        """
        tensors = {}
        for file in (f"step_{self.STEPS:08}.pt", "best.pt", "weights.pt"):
            contents = torch.load(folder / file, weights_only=True)
            for path, leaf in torch.utils._pytree.tree_leaves_with_path(contents):
                place = torch.utils._pytree.keystr(path)
                if isinstance(leaf, torch.Tensor) or "best_loss" in place:
                    tensors[file + place] = torch.as_tensor(leaf)
        return tensors

    def compare(self, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], bitwise: bool) -> None:
        """Raise Failure if two results differ, in a bit or by more than the tolerance."""
        if one.keys() != other.keys():
            raise Failure(f"the files do not hold the same: {sorted(one.keys() ^ other.keys())}")
        for name, tensor in one.items():
            if torch.equal(tensor, other[name]):
                continue
            differences = (tensor.double() - other[name].double()).abs()
            difference = differences.max().item()
            self.largest_difference = max(self.largest_difference, difference)
            is_within_tolerance = difference < self.TOLERANCE  # False also for NaN
            if bitwise or not is_within_tolerance:
                raise Failure(f"{name} differs by {difference:.1e}")

    def run_and_kill(self, folder: Path, max_kills: int) -> int:
        """Start the job again and again, killing ranks each time, until a start trains to the end.

        After ``max_kills`` kills the next start is left alone. Returns the number of kills. Raises Failure if a step or
        a checkpoint was lost, or if something was left behind.
        """
        way = self.luck.choice(list(self.WAYS))
        has_fixed_ranks = self.luck.random() < 0.3
        background = self.luck.choice(["--save-in-background", "--no-save-in-background"])
        kept_losses: dict[int, float] = {}
        kills = 0
        while True:
            if has_fixed_ranks:
                nproc = 2
            else:
                # Each rank takes processor time, so many ranks are drawn seldom.
                [nproc] = self.luck.choices([1, 2, 3, 4], weights=[4, 4, 2, 2])
            flag = self.luck.choice(self.WAYS[way])
            num_workers = "0"
            if self.luck.random() < 0.1:
                num_workers = "1"
            newest_before = newest_checkpoint(folder)
            self.start(nproc, folder, flag, background, "--num-workers", num_workers)

            was_killed = kills < max_kills and self.kill(folder)
            newest_at_kill = newest_checkpoint(folder)
            status = self.agent.end()
            if was_killed:
                kills += 1
                self.kills_by_way[f"{flag} on {nproc}"] += 1
            self.check_start(folder, newest_before, newest_at_kill)

            # Steps after the newest checkpoint were lost by an earlier kill, and were trained again in this start.
            for step in list(kept_losses):
                if step > newest_before:
                    del kept_losses[step]
            kept_losses |= self.printed_losses()
            if status == 0:
                break
            if not was_killed:
                raise Failure(f"it ended by itself with status {status}")

        self.check_losses(kept_losses)
        is_bitwise = has_fixed_ranks and way != "either"
        self.compare(self.result_in(folder), self.expected_tensors[flag], is_bitwise)
        self.check_names(folder, trained=bool(self.printed_losses()))
        self.print_summary(way, has_fixed_ranks, background, kills, is_bitwise)
        shutil.rmtree(folder)
        return kills

    def print_summary(self, way: str, has_fixed_ranks: bool, background: str, kills: int, is_bitwise: bool) -> None:
        """Print how a job was started, how often its ranks were killed, and what is known of all jobs so far."""
        ranks = "1 to 4 ranks"
        if has_fixed_ranks:
            ranks = "2 ranks"
        how_equal = "equal"
        if is_bitwise:
            how_equal = "equal in each bit"
        print(f"{way} on {ranks}, {background}: {kills} kills, {how_equal}")
        counts = ", ".join(f"{way}: {count}" for way, count in sorted(self.kills_by_way.items()))
        print(f"  {counts}; {self.kills_in_a_write} in a write; differences up to {self.largest_difference:.1e}")

    def kill(self, folder: Path) -> bool:
        """Kill ranks at a random moment; return False if the job ended before that moment.

        The moment is a random time after the ranks have started, after they have trained some steps, or after they have
        begun to write a checkpoint. Killed are rank 0, a random rank or all ranks.
        """
        agent = self.agent
        moment = self.luck.choice(["starting", "training", "writing"])
        if moment == "starting":
            agent.wait_for(agent.ranks, step=0.01)
            longest_wait = self.start_up_seconds
        elif moment == "training":
            steps = self.luck.randint(1, self.MOST_STEPS)
            has_trained = agent.wait_for(lambda: len(self.printed_losses()) >= steps, step=0.005)
            if not has_trained:
                return False
            longest_wait = self.seconds_of_step
        else:
            number_of_write = self.luck.choice([1, 2])
            for _ in range(number_of_write):
                agent.wait_for(lambda: not is_writing(folder), step=0.001)
                has_begun_to_write = agent.wait_for(lambda: is_writing(folder), step=0.001)
                if not has_begun_to_write:
                    return False
            longest_wait = self.luck.choice([0.0, self.LONGEST_WRITE])
        time.sleep(self.luck.uniform(0, longest_wait))

        ranks = agent.ranks()
        has_ended = len(ranks) == 0 or agent.printed("result")
        if has_ended:
            return False
        rank_0 = ranks[0]
        any_rank = self.luck.choice(ranks)
        victims = self.luck.choice([[rank_0], [any_rank], ranks])
        if is_writing(folder):
            self.kills_in_a_write += 1
        for rank in victims:
            kill(rank)
        return True

    def check_start(self, folder: Path, newest_before: int, newest_at_kill: int) -> None:
        """Raise Failure if the latest start did not go on from the newest checkpoint, or if one is lost."""
        text = "\n".join(self.agent.lines)
        checkpoint = re.search(r"^going on from step_(\d+)", text, re.MULTILINE)
        if checkpoint is not None and int(checkpoint[1]) != newest_before:
            raise Failure(f"it went on from step {int(checkpoint[1])}, and the newest was of step {newest_before}")
        if newest_before > 0 and self.agent.printed("starting anew"):
            raise Failure(f"it started anew, and there was a checkpoint of step {newest_before}")
        if "damaged" in text or list(folder.glob("*.damaged*")):
            raise Failure("it found a damaged checkpoint")
        if newest_checkpoint(folder) < newest_at_kill:
            raise Failure(f"the checkpoint of step {newest_at_kill} is lost")

    def check_losses(self, kept_losses: dict[int, float]) -> None:
        """Raise Failure unless each step was kept once, with the undisturbed job's loss but for its last digit."""
        if sorted(kept_losses) != sorted(self.expected_losses):
            raise Failure(f"the steps that it kept are {sorted(kept_losses)}")
        for step, loss in kept_losses.items():
            expected = self.expected_losses[step]
            if abs(loss - expected) > self.TOLERANCE_OF_LOSS * expected:
                raise Failure(f"step {step} printed the loss {loss}, not {expected}")

    def check_names(self, folder: Path, trained: bool) -> None:
        """Raise Failure unless the folder of a job that has ended holds what it should, and nothing else."""
        names = {path.name for path in folder.iterdir()}
        expected = {"best.pt", "lock", "weights.pt"}
        for saves_before_the_last in range(3):
            step = self.STEPS - saves_before_the_last * self.SAVE_EVERY
            expected.add(f"step_{step:08}.pt")
        if names == expected:
            return
        # The trainer keeps three checkpoints. It removes the one before these when it has saved, so after a start that
        # only found the job complete, a fourth one may still be there.
        fourth = f"step_{self.STEPS - 3 * self.SAVE_EVERY:08}.pt"
        if not trained and names == expected | {fourth}:
            return
        raise Failure(f"its folder differs by {sorted(names ^ expected)}")


def is_writing(folder: Path) -> bool:
    """Whether the trainer is writing a file in its folder."""
    with contextlib.suppress(FileNotFoundError):
        return any(name.endswith(".part") for name in os.listdir(folder))
    return False


# --- chapter 13: the agent restarts the ranks, and no bit changes -----------------------------------------------------


class Restarts:
    """Chapter 13's job. Torchrun restarts its ranks after a kill, and its last weights must not differ in a bit.

    The moments of kills are drawn evenly from a start-up and a second of training. Half of the kills then wait a little
    until the next checkpoint is being written. What a kill leaves behind is removed by the next save. Only after a kill
    during the last save there is no next one, because the job that is started again has nothing left to train.
    """

    CHAPTER = "13"
    NPROC = 2
    EPOCHS = 32  # long enough for some twenty kills
    STEPS = 480  # of all epochs
    TRAINING = 1.0  # seconds after a start-up in which a kill may come
    WAIT_FOR_A_WRITE = 0.3  # seconds

    def __init__(self, agent: Agent, script: Path, scratch: Path, luck: random.Random) -> None:
        """Run the job once without a kill, to know what it prints at its end, and how long it takes to start.

        ``agent`` is torchrun's agent, ``script`` is the chapter's, and ``scratch`` is a folder for the job's files.
        ``luck`` draws all that is random, so that a run with the same seed kills at the same moments.
        """
        self.agent = agent
        self.script = script
        self.luck = luck
        begin = time.monotonic()
        self.start(scratch / "undisturbed", save_every=1000)  # more steps than the job has, so it saves only at its end
        agent.wait_for(lambda: agent.printed("start "))  # a line that the script prints when it begins to train
        self.start_up_seconds = time.monotonic() - begin
        self.outcome_without_kill = self.outcome()

    def start(self, folder: Path, save_every: int, *flags: str) -> None:
        """Start a job that saves its checkpoints in ``folder``, and that torchrun restarts as often as it is killed."""
        all_flags = ["--epochs", str(self.EPOCHS), "--save-every", str(save_every)]
        all_flags += ["--checkpoint-dir", str(folder), *flags]
        self.agent.start(self.script, self.NPROC, *all_flags, restarts=1_000_000)  # more than there are kills

    def outcome(self) -> list[str]:
        """Wait for the job's end; return the two lines that it prints there: its weights' digest and its result.

        Raises Failure if it ends without them.
        """
        status = self.agent.end()
        endings = [line for line in self.agent.lines if line.startswith(("weights ", "result "))]
        last_two = endings[-2:]
        first_words = [line.split()[0] for line in last_two]
        if status != 0 or first_words != ["weights", "result"]:
            raise Failure(f"torchrun ended with status {status}")
        return last_two

    def run_and_kill(self, folder: Path, max_kills: int) -> int:
        """Run the job once, and kill its ranks again and again until it ends, but not more than ``max_kills`` times.

        ``folder`` is for the checkpoints. Returns the number of kills. Raises Failure if the job's last weights or its
        result are not those of the job without a kill, or if it leaves files that it should have removed.
        """
        save_every = self.luck.choice([1, 1, 2, 5])
        emergency = self.luck.choice(["--emergency", "--no-emergency"])
        self.start(folder, save_every, emergency)
        kills = 0
        ranks = self.new_ranks(before=[])
        while ranks and kills < max_kills:
            was_killed = self.kill_one(folder, ranks)
            if not was_killed:
                break
            kills += 1
            ranks = self.new_ranks(before=ranks)

        outcome = self.outcome()
        if outcome != self.outcome_without_kill:
            raise Failure(f"it is DIFFERENT: {outcome}, not {self.outcome_without_kill}")
        self.check_names(folder)
        return kills

    def check_names(self, folder: Path) -> None:
        """Raise Failure if a job that has ended left files in its folder that are not its checkpoints.

        A kill during the last save may leave files that no later save removes, because the job that was then started
        again found all its steps done. After such a start these files are allowed.
        """
        allowed = [r"step_.*"]  # step_00000480.pt
        last_start_had_no_steps_to_do = self.agent.printed(f"going on from step {self.STEPS},")
        if last_start_had_no_steps_to_do:
            allowed.append(rf"\.step_{self.STEPS:08}\.pt\.part")  # .step_00000480.pt.part, which is half written
            allowed.append(r"emergency_node\d+\.pt")  # emergency_node0.pt
        any_allowed = "|".join(allowed)
        names = [path.name for path in folder.iterdir()]
        forbidden = [name for name in names if not re.fullmatch(any_allowed, name)]
        if forbidden:
            raise Failure(f"its folder holds {forbidden}")

    def new_ranks(self, before: list[psutil.Process]) -> list[psutil.Process]:
        """Wait until torchrun has replaced the ranks ``before`` by new ones; return the new ones' processes.

        When one rank was killed, torchrun first ends its peers, and then starts all ranks again. At the first start
        ``before`` is empty. Returns an empty list if the job ends, so that no new ranks come.
        """

        def all_are_new() -> bool:
            ranks = self.agent.ranks()
            return len(ranks) == self.NPROC and not set(ranks) & set(before)

        # A longer step than usual, because psutil reads all processes of the machine each time.
        if self.agent.wait_for(all_are_new, step=0.05):
            return self.agent.ranks()
        return []

    def kill_one(self, folder: Path, ranks: list[psutil.Process]) -> bool:
        """Kill one of the ranks at a random moment; return False if the job ended before that moment.

        Half of the kills then wait until the job is writing a checkpoint into ``folder``.
        """
        seconds_until_kill = self.luck.uniform(0, self.start_up_seconds + self.TRAINING)
        if self.agent.ends_within(seconds_until_kill):
            return False
        waits_for_a_write = self.luck.random() < 0.5
        if waits_for_a_write:
            with contextlib.suppress(Failure):  # if no write begins in this time, the rank is killed all the same
                self.agent.wait_for(lambda: phase_of_job(folder) is Phase.WRITING, self.WAIT_FOR_A_WRITE)
        kill(self.luck.choice(ranks))
        return True


# --- chapter 16: each start is on another mesh, and no step is lost ---------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a step printed: with three and with two digits."""

    loss: float
    norm: float

    def agrees_with(self, other: "Step") -> bool:
        """Whether the two are equal but for the last digit that is printed, which may be rounded the other way."""
        return abs(self.loss - other.loss) < 0.0015 and abs(self.norm - other.norm) < 0.015


@dataclass(frozen=True)
class Start:
    """What came of one start of a job, until it ended or a rank of it was killed."""

    was_killed: bool
    checkpoint_step: int  # the step of the checkpoint from which it went on; 0 if it began anew
    steps: dict[int, Step]  # {number of a step: what it printed} of the steps that it trained itself
    has_result: bool  # whether it trained to the end, and printed its result


class Meshes:
    """Chapter 16's job, which is started again after a kill, on a mesh that is drawn.

    A third of the moments is drawn evenly from the time between two saves; a third from the writing of a checkpoint; a
    third from its commit, which is its last file, its renaming, and the removal of the oldest. A job has passed if

    - each step was trained once in what was kept: it printed the loss and the norm of an uninterrupted job on one rank,
      which depend on all weights and moments before it;
    - each start went on from the newest checkpoint that anybody had seen complete, or from a newer one;
    - its folder holds three checkpoints and nothing else. A fourth may be there where the last start had nothing to
      train: then a kill came before the last save removed it.

    Ranks add up in another order on another mesh, so bits differ, and what is printed is compared with three digits.
    """

    CHAPTER = "16"
    # {(pipeline stages, data-parallel ranks, tensor-parallel ranks): how often the mesh is drawn}. Twice the ranks take
    # about twice the processor time, so large meshes are drawn seldom.
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
    STEPS = 16
    SAVE_EVERY = 2
    FLAGS = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--log-every", "1", "--backend", "gloo"]
    FLAGS += ["--width", "16", "--layers", "2", "--batch-size", "32", "--warmup", "4"]
    # How long a phase lasts, as a share of the seconds between two saves: a kill comes so long after its begin at most.
    LENGTH_OF_PHASE = {Phase.TRAINING: 1.0, Phase.WRITING: 0.2, Phase.COMMITTING: 0.02}

    def __init__(self, agent: Agent, script: Path, scratch: Path, luck: random.Random) -> None:
        """Run the job once without a kill, on one rank, to know what its steps print and the seconds between saves.

        ``agent`` is torchrun's agent, ``script`` is the chapter's, and ``scratch`` is a folder for the job's files.
        ``luck`` draws all that is random, so that a run with the same seed kills at the same moments.
        """
        self.agent = agent
        self.script = script
        self.luck = luck

        folder = scratch / "uninterrupted"
        folder.mkdir()
        self.start((1, 1, 1), folder)
        was_seen_writing = agent.wait_for(lambda: phase_of_job(folder) is Phase.WRITING)
        if not was_seen_writing:
            raise Failure("its checkpoints have their names before they are complete")
        # The first checkpoint is being written, after SAVE_EVERY steps. Two more saves follow until 3 * SAVE_EVERY.
        begin = time.monotonic()
        agent.wait_for(lambda: agent.printed(f"step {3 * self.SAVE_EVERY}:"))
        self.seconds_between_saves = (time.monotonic() - begin) / 2
        uninterrupted = self.end(was_killed=False)
        if not uninterrupted.has_result:
            raise Failure("the uninterrupted job ends without a result")
        self.steps = uninterrupted.steps

    def start(self, mesh: tuple[int, int, int], folder: Path) -> None:
        """Start the job on a mesh of (pp, dp, tp) ranks. It goes on from the newest checkpoint in ``folder``."""
        pp, dp, tp = mesh
        flags = [*self.FLAGS, "--checkpoint-dir", str(folder), "--resume", "--pp", str(pp), "--tp", str(tp)]
        self.agent.start(self.script, pp * dp * tp, *flags)

    def end(self, was_killed: bool) -> Start:
        """Wait until the job that was started has ended, and read what it printed."""
        self.agent.end()
        text = "\n".join(self.agent.lines)
        checkpoint_step = 0
        checkpoint = re.search(r"going on from step_(\d+)", text)
        if checkpoint is not None:
            checkpoint_step = int(checkpoint[1])
        steps = {}
        for number, loss, norm in re.findall(r"^step (\d+): loss (\S+), norm (\S+)$", text, re.MULTILINE):
            steps[int(number)] = Step(float(loss), float(norm))
        return Start(was_killed, checkpoint_step, steps, has_result=self.agent.printed("result "))

    def kill_one(self, folder: Path) -> bool:
        """Kill a rank at a random moment of a random phase; return False if the job ended before that moment.

        A phase is training, writing a checkpoint, or committing one. ``folder`` has the job's checkpoints.
        """
        agent = self.agent
        phase = self.luck.choice(list(Phase))
        length_of_phase = self.LENGTH_OF_PHASE[phase] * self.seconds_between_saves
        seconds_after_its_begin = self.luck.uniform(0, length_of_phase)

        trains = agent.wait_for(lambda: agent.printed("starting anew") or agent.printed("going on"))
        if not trains:
            return False
        ranks = agent.ranks()
        if phase is not Phase.TRAINING:
            agent.wait_for(lambda: phase_of_job(folder) is phase)

        if agent.ends_within(seconds_after_its_begin):
            return False
        if agent.printed("result"):  # the job is about to end
            return False
        if not ranks:  # they had ended before their processes could be listed
            return False
        kill(self.luck.choice(ranks))
        return True

    def run_and_kill(self, folder: Path, max_kills: int) -> int:
        """Start the job again and again, killing a rank each time, until a start trains to the end.

        After ``max_kills`` kills the next start is left alone. ``folder`` is for the checkpoints. Returns the number of
        kills. Raises Failure if a step or a checkpoint was lost.
        """
        kept_steps: dict[int, Step] = {}  # the steps that are in the weights with which the job goes on, by number
        folder.mkdir()
        kills = 0
        has_result = False
        while not has_result:
            # `start` says from which checkpoint the job went on, which steps it then trained, whether a rank was killed
            # meanwhile, and whether the job came to its result.
            start = self.start_and_kill(folder, may_kill=kills < max_kills)
            if start.was_killed:
                kills += 1
            # The kill before this start lost the steps that were trained after the checkpoint. They are trained again.
            kept_steps = {number: step for number, step in kept_steps.items() if number <= start.checkpoint_step}
            kept_steps |= start.steps
            has_result = start.has_result

        self.check_steps(kept_steps)
        self.check_names(folder, trained=bool(start.steps))
        return kills

    def start_and_kill(self, folder: Path, may_kill: bool) -> Start:
        """Start the job on a random mesh and, if ``may_kill``, kill one of its ranks; return what came of the start.

        ``folder`` has the checkpoints. Raises Failure if the job did not go on from the newest one, or if one is lost.
        """
        mesh = self.random_mesh()
        newest_before = newest_checkpoint(folder)
        self.start(mesh, folder)
        was_killed = False
        if may_kill:
            was_killed = self.kill_one(folder)
        newest_at_kill = newest_checkpoint(folder)
        start = self.end(was_killed)
        newest_after = newest_checkpoint(folder)

        if not start.has_result and not was_killed:
            raise Failure("it ended by itself, without a result")
        if start.checkpoint_step != newest_before:
            raise Failure(
                f"it went on from step {start.checkpoint_step}, and its newest checkpoint was of step {newest_before}"
            )
        if newest_after < newest_at_kill:
            raise Failure(f"the checkpoint of step {newest_at_kill} is lost: the newest one is now {newest_after}")
        return start

    def random_mesh(self) -> tuple[int, int, int]:
        """A random mesh of (pp, dp, tp) ranks. Small ones are drawn more often than large ones."""
        [mesh] = self.luck.choices(list(self.MESHES), weights=list(self.MESHES.values()), k=1)
        return mesh

    def check_steps(self, kept_steps: dict[int, Step]) -> None:
        """Raise Failure unless each step was kept once, and printed what the uninterrupted job's did."""
        if list(kept_steps) != list(range(1, self.STEPS + 1)):
            raise Failure(f"the steps that it kept are {list(kept_steps)}")
        for number, step in kept_steps.items():
            if not step.agrees_with(self.steps[number]):
                raise Failure(f"step {number} printed {step}, not {self.steps[number]}")

    def check_names(self, folder: Path, trained: bool) -> None:
        """Raise Failure unless the folder of a job that has ended holds its last three checkpoints and nothing else.

        ``trained`` says whether the last start had steps to train. If it had none, a kill may have come before the last
        save removed the oldest of four checkpoints, and no later save could remove it.
        """
        names = sorted(path.name for path in folder.iterdir())
        all_checkpoints = [f"step_{step:08}" for step in range(self.SAVE_EVERY, self.STEPS + 1, self.SAVE_EVERY)]
        last_four = all_checkpoints[-4:]
        last_three = all_checkpoints[-3:]
        if names == last_three:
            return
        if names == last_four and not trained:
            return
        raise Failure(f"its folder holds {names}")


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest complete checkpoint in a folder, such as 8 of ``step_00000008``; 0 if there is none."""
    prefix = "step_"
    steps = [int(path.stem.removeprefix(prefix)) for path in folder.glob(f"{prefix}*") if path.suffix in ("", ".pt")]
    return max(steps, default=0)


def kill_many(
    job_class: type[Trainers] | type[Restarts] | type[Meshes],
    kills: int,
    seed: int,
    agent: Agent,
    script: Path,
    scratch: Path,
) -> int:
    """Run jobs of a chapter until ``kills`` ranks have been killed in all, and compare each with one without a kill.

    ``job_class`` is the class of the chapter's jobs, and ``script`` is the chapter's. ``agent`` is torchrun's agent,
    which starts the ranks, and ``scratch`` is a folder for the jobs' files. Prints a line for each job. Returns 1 if a
    job fails, or 0.
    """
    print(f"seed {seed}: python tools/soak.py --chapter {job_class.CHAPTER} --kills {kills} --seed {seed}", flush=True)
    killed = 0
    number = 0
    try:
        job = job_class(agent, script, scratch, random.Random(seed))  # it runs once without a kill, to compare with
        while killed < kills:
            number += 1
            killed += job.run_and_kill(scratch / f"job{number}", max_kills=kills - killed)
            print(f"job {number} is as the undisturbed one, after {killed} kills in all", flush=True)
    except Failure as failure:
        last_output = agent.lines[-40:]
        last_errors = agent.errors.read_text().splitlines()[-40:]
        print("\n".join([*last_output, *last_errors]))
        print(f"FAILED: {failure}", flush=True)
        return 1
    print(f"{killed} kills in {number} jobs: nothing was lost", flush=True)
    return 0


# --- runs without a kill ----------------------------------------------------------------------------------------------


def run_many(script: Path, nproc: int, runs: int, scratch: Path) -> int:
    """Run a script so many times under torchrun, and print those that end badly. Returns how many there were."""
    bad = 0
    start = time.monotonic()
    for _ in range(runs):
        status, out, errors, processes_left = torchrun(script, nproc, stand_alone(scratch), timeout=LONGEST_WAIT)
        if status != 0 or processes_left:
            bad += 1
            print(f"status {status}, processes left: {processes_left}", out, errors, sep="\n", flush=True)
    seconds_of_a_run = (time.monotonic() - start) / runs
    print(f"{script.stem}, {nproc} ranks: {bad} of {runs} runs ended badly ({seconds_of_a_run:.1f} s each)", flush=True)
    return bad


# {number of a chapter: the class of its jobs}
JOBS: dict[str, type[Trainers] | type[Restarts] | type[Meshes]] = {
    Trainers.CHAPTER: Trainers,
    Restarts.CHAPTER: Restarts,
    Meshes.CHAPTER: Meshes,
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the flags of the command line, or of ``arguments`` in its place. Ends the program if they are wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapter", default="04", help="a chapter's number or name, or a notebook's path (04)")
    parser.add_argument("--runs", type=int, default=40, help="how often, on each number of ranks (40)")
    parser.add_argument("--kills", type=int, help="kill so many ranks instead; of chapter 11, 13 or 16")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of moments, ranks and meshes")
    args = parser.parse_args(arguments)
    if args.kills and args.chapter not in JOBS:
        parser.error(f"ranks are killed of chapters {' and '.join(JOBS)}, not of {args.chapter}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Carry out the command line, or ``arguments`` in its place; return how many runs or jobs went wrong."""
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        script = chapters.export_script(args.chapter, scratch / "script")
        if args.kills:
            with contextlib.closing(Agent(scratch)) as agent:
                return kill_many(JOBS[args.chapter], args.kills, args.seed, agent, script, scratch)
        bad_runs_on_2_ranks = run_many(script, 2, args.runs, scratch)
        bad_runs_on_4_ranks = run_many(script, 4, args.runs, scratch)
        return bad_runs_on_2_ranks + bad_runs_on_4_ranks


def exit_on_sigterm(*_: object) -> None:
    """End the program by an exception, so that it removes its files and ends its processes. 143 is SIGTERM's status."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    failures = main()
    sys.exit(1 if failures else 0)
