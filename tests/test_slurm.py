"""The batch file that `python -m helpers export --slurm` writes, unchanged, on a real Slurm."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import hosts
import psutil
import pytest
import recorded
import slurm_cluster
import torch
from forked import AT_ADDRESS, FORKING
from leftovers import unchanged
from scripting import ROOT

from helpers.export import chapters
from helpers.export.launch_files import Allocation

TRAINER = chapters.find_notebook("11").stem
pytestmark = [pytest.mark.system(missing=slurm_cluster.missing), pytest.mark.timeout(600)]

FLAGS = ["--epochs", "8", "--batch-size", "8", "--lr", "0.02", "--log-every", "15", "--save-every", "90"]
FLAGS += ["--backend", "gloo"]  # the batch file asks for NCCL, and the last flag wins
KEPT = r"(?m)^start \d.*|^.*(?:rank\(s\)|starting anew|going on from|stopped by|result \{|Node failure on).*"
PROGRESS = r"\[default0\]:(?:step|epoch) \d+: "
VARYING = [r"step_\d+", r"at step \d+", r"(step|epoch) \d+: .*", r"job \d+", r"-\d+\.out"]


@pytest.fixture(scope="module")
def cluster():
    with unchanged(), slurm_cluster.slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two chapters' scripts and their launch files for two nodes with one GPU each.

    Two ranks, because the sum of two gradients has one value; that of more depends, in its last bits, on their order,
    which DDP changes after the first step of a run and of a resumed run.
    """
    folder = tmp_path_factory.mktemp("exported")
    for chapter in ("11", "16"):
        chapters.export(chapter, folder, allocation=Allocation(nodes=2, gpus_per_node=1, time="00:30:00"))
    return folder


class Job:
    """A submitted job, and the file that it writes."""

    def __init__(self, cluster, folder, *options, flags=(), script=f"{TRAINER}.sbatch"):
        self.cluster, self.folder = cluster, folder
        self.command = ["sbatch", *options, script, *flags]
        self.number = cluster.submit(*options, script, *flags, cwd=folder)
        self.output = folder / f"{script.removesuffix('.sbatch')}-{self.number}.out"
        self.work = self.output.with_suffix("")

    def starts(self):
        """[what the job wrote] after each of its starts."""
        text = self.output.read_text() if self.output.exists() else ""
        return re.split(r"^(?=start \d+ on )", text, flags=re.MULTILINE)[1:]

    def wait_for_training(self, start):
        """Wait until the job has trained since this start."""
        self.cluster.wait(lambda: len(self.starts()) > start and re.search(PROGRESS, self.starts()[start]), self.output)

    def wait_for_start(self, start):
        self.cluster.wait(lambda: len(self.starts()) > start, self.output)

    def wait_for_state(self, state):
        """Wait for a state such as PENDING. None comes after the job's end, when Slurm has forgotten it."""
        queue = ["squeue", "--noheader", "--format=%T", f"--job={self.number}"]
        self.cluster.wait(lambda: (self.cluster.run(*queue, check=False).strip() or None) == state, self.output)

    def wait_for_end(self):
        """What Slurm then says of the job."""
        self.wait_for_state(None)
        return self.cluster.run("scontrol", "show", "job", str(self.number))

    def update(self, setting):
        self.cluster.run("scontrol", "update", f"JobId={self.number}", setting)

    def requeue_soon(self):
        """Wait until the job is queued again, then let it start soon: by itself, Slurm would wait much longer.

        It cannot start at once: Slurm counts whole seconds since it has withdrawn the last start's credential.
        """
        self.wait_for_state("PENDING")
        self.update("StartTime=now+2")

    def preempt(self, *options):
        """Submit a short job to the partition that may take this job's nodes."""
        urgent = ["--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
        self.cluster.submit(*urgent, *options, cwd=self.folder)

    def signal(self, number):
        """Send the script's ranks a signal, but not torchrun; return how many there are."""
        ranks = []
        for process in psutil.process_iter():  # those of the nodes too: their process numbers here are other ones
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-u", f"{TRAINER}.py"] and process.cwd() == str(self.folder):
                    ranks.append(process)
        for process in ranks:
            process.send_signal(number)
        return len(ranks)

    def record(self, name, first):
        """Compare two starts of the job with what the book shows: one, and the next until it trains or ends.

        Most lines of the training are left out.
        """
        lines = [f"$ {' '.join(self.command)}", f"Submitted batch job {self.number}", f"$ cat {self.output.name}"]
        lines = lines if first == 0 else ["…"]
        starts = self.starts()
        for start in starts[first : first + 2]:
            before, progress, after = re.split(rf"(?m)^({PROGRESS}.*)$", start, maxsplit=1)
            lines += [*re.findall(KEPT, before), progress, "…"]
            if start in (starts[first], starts[-1]):
                lines += re.findall(KEPT, after)
        version = self.cluster.run("sbatch", "--version").split()[1]
        recorded.compare(name, "\n".join(lines), "python -m pytest tests/test_slurm.py", VARYING, slurm=version)


def result_of(text, work):
    """(the numbers that a script has printed at its end, its last checkpoint's weights and optimizer's state)."""
    result = json.loads(re.search(r"result (\{.*\})", text)[1])
    checkpoint = torch.load(work / f"step_{result['step']:08}.pt", weights_only=True)
    return result, [checkpoint["model"], checkpoint["optimizer"]["state"]]


@pytest.mark.daily
def test_a_job_that_is_stopped_preempted_and_loses_a_node_ends_as_if_nothing_had_happened(cluster, folder):
    job = Job(cluster, folder, flags=FLAGS)

    # The time limit is cut so that the signal is due at once. The controller looks every 30 s. Until then the ranks are
    # stopped, because a fast machine would end the job before.
    job.wait_for_training(0)
    assert job.signal(signal.SIGSTOP) == 2
    job.update("TimeLimit=3")
    time.sleep(max(0, cluster.until_limits_are_checked() - 0.5))
    job.signal(signal.SIGCONT)
    job.requeue_soon()
    job.update("TimeLimit=30")

    # A job in a partition that may take this job's nodes.
    job.wait_for_training(1)
    job.preempt("--nodes=3")
    job.requeue_soon()

    # A node loses its power.
    job.wait_for_training(2)
    cluster.nodes["n2"].end()
    job.requeue_soon()
    job.wait_for_end()

    starts = job.starts()
    beginnings = [re.search(r"starting anew|going on from step_(\d+)", start) for start in starts]
    assert [beginning[1] is None for beginning in beginnings] == [True, False, False, False]
    steps = [int(beginning[1]) for beginning in beginnings[1:]]
    assert 0 < steps[0] < steps[1] <= steps[2] < 1440
    for start, name, step in zip(starts, ("SIGUSR1", "SIGTERM"), steps, strict=False):  # it goes on where it stopped
        assert f"stopped by {name} at step {step}: go on with --resume\n" in start and "result" not in start
    assert "Node failure on n2" in starts[2] and "stopped by" not in starts[2]
    assert starts[2].startswith("start 2 on n[1-2]\n") and starts[3].startswith("start 3 on n[1,3]\n")
    result, state = result_of(starts[3], job.work)

    # The same on two ranks without Slurm. Its agent forks them, which saves their imports.
    command = [sys.executable, *FORKING, "--nproc-per-node=2", *AT_ADDRESS, f"{TRAINER}.py", *FLAGS]
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command += ["--checkpoint-dir", "undisturbed"]
    process = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    expected, expected_state = result_of(process.stdout, folder / "undisturbed")
    assert result == expected and result["world_size"] == 2 and result["step"] == 1440
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    for node, count in {"n1": 4, "n2": 3, "n3": 1}.items():
        assert len(list((job.work / "logs" / node).glob("*/attempt_0/*/stdout.log"))) == count

    job.record("slurm_time_limit", 0)
    job.record("slurm_preempted", 1)
    job.record("slurm_node_lost", 2)


@pytest.mark.daily
def test_the_capstone_goes_on_from_shards_of_two_nodes(cluster, folder):
    flags = "--steps 60 --warmup 5 --log-every 5 --save-every 10 --pp 2 --backend gloo".split()
    job = Job(cluster, folder, flags=flags, script=f"{chapters.find_notebook('16').stem}.sbatch")
    job.wait_for_training(0)
    job.preempt("--nodes=2")
    job.requeue_soon()
    job.wait_for_end()
    first, second = job.starts()
    stopped = re.search(r"stopped by SIGTERM at step (\d+): go on with --resume\n", first)
    assert f"going on from step_{int(stopped[1]):08}" in second
    result = json.loads(re.search(r"result (\{.*\})", second)[1])
    assert result["world_size"] == 2 and result["step"] == 60
    assert (job.work / "step_00000060" / ".metadata").exists() and not (job.work / "stopped").exists()


@pytest.fixture
def submit(cluster, folder, tmp_path):
    """A function that submits the exported batch file with another text in place of chapter 11's script."""
    shutil.copy(folder / f"{TRAINER}.sbatch", tmp_path)

    def job(text, *options):
        (tmp_path / f"{TRAINER}.py").write_text(text)
        return Job(cluster, tmp_path, *options)

    return job


WAITING = """\
import pathlib, signal, sys, time

def stop(number, frame):
    (folder / "stopped").touch()
    sys.exit()

folder = pathlib.Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1])
for name in {handled}:
    signal.signal(getattr(signal, name), stop)
(folder / "step_1.pt").touch()
print("epoch 1: ready", flush=True)
time.sleep(200)
"""


def test_a_job_that_its_user_ends_does_not_come_back(cluster, submit):
    job = submit(WAITING.format(handled=["SIGTERM"]), "--nodes=1")
    job.wait_for_training(0)
    cluster.run("scancel", str(job.number))
    assert "JobState=CANCELLED" in job.wait_for_end()
    assert (job.work / "stopped").exists()
    time.sleep(1)
    assert len(job.starts()) == 1


@pytest.mark.daily
def test_a_rank_that_does_not_train_yet_outlives_the_signal_and_the_job_comes_back(cluster, submit):
    job = submit(WAITING.format(handled=[]), "--nodes=1", "--nodelist=n1")
    job.wait_for_training(0)
    cluster.run("scancel", "--signal=TERM", str(job.number))
    time.sleep(1)
    assert job.signal(0) == 1
    cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=1")
    job.preempt("--nodelist=n1")
    job.wait_for_state("PENDING")  # Slurm does it, after the grace time
    assert not (job.work / "stopped").exists()
    cluster.run("scancel", str(job.number))
    assert "Restarts=1 " in job.wait_for_end()


@pytest.mark.daily
def test_the_preflight_of_chapter_12(cluster, submit, tmp_path):
    """It checks every link before the script begins. If a check fails, the script does not begin."""
    [check] = chapters.export("12", tmp_path)
    job = submit("print('epoch 1: trained')")
    job.wait_for_end()
    preflight, training = job.output.read_text().split("epoch 1: trained", 1)
    assert re.search(r"between nodes +0,1 +yes ", preflight) and "all-reduce" not in training

    job = submit("print('epoch 1: trained')", f"--export=ALL,PREFLIGHT={chapters.preflight()}.py --floor 1000")
    job.wait_for_state("PENDING")
    cluster.run("scancel", str(job.number))
    [start] = job.starts()
    assert "Below 1000 GB/s: between nodes, all ranks. Run again" in start and "trained" not in start, start

    check.write_text(check.read_text().replace("pattern * total", "pattern * total + 1"))
    job = submit("print('epoch 1: trained')")
    job.wait_for_state("PENDING")
    cluster.run("scancel", str(job.number))
    [start] = job.starts()
    assert "Wrong sums: node 0, node 1, between nodes, all ranks" in start and "trained" not in start, start


@pytest.mark.daily
def test_a_job_whose_first_node_comes_too_late_starts_again(cluster, submit, tmp_path):
    """At its first start node 0 is later than the agents wait, here for some seconds: no rank begins."""
    batch = tmp_path / f"{TRAINER}.sbatch"
    late = '[ "$SLURM_NODEID" != 0 ] || sleep $((START == 0 ? 40 : 2))\n    torchrun --nnodes'
    batch.write_text(batch.read_text().replace("torchrun --nnodes", late).replace("read_timeout=900", "read_timeout=4"))
    job = submit("print('epoch 1: trained')")
    job.wait_for_start(0)
    job.requeue_soon()
    job.wait_for_end()
    first, second = job.starts()
    assert "RendezvousConnectionError" in first and "trained" not in first and "epoch 1: trained" in second, first


FAILS_ON_N1 = """\
import os, sys

if os.environ["SLURMD_NODENAME"] == "n1":
    sys.exit("a broken GPU")
print("epoch 1: trained")
"""


def test_a_node_that_was_the_first_to_fail_twice_is_excluded(cluster, submit):
    job = submit(FAILS_ON_N1, "--nodes=1")
    for start in range(2):
        job.wait_for_start(start)
        job.requeue_soon()
    job.wait_for_end()
    nodes = [re.match(r"start \d on (\w+)", start)[1] for start in job.starts()]
    assert nodes == ["n1", "n1", "n2"]
    assert "n1 failed twice, and is excluded." in job.starts()[1]
    assert "epoch 1: trained" in job.starts()[2]


def test_slurm_reads_the_lines_that_a_reader_may_complete(cluster, folder, tmp_path):
    text = (folder / f"{TRAINER}.sbatch").read_text().replace("# #SBATCH", "#SBATCH")
    batch = tmp_path / "complete.sbatch"
    batch.write_text(text.replace("PARTITION", "main"))
    cluster.run("sbatch", "--test-only", batch)
    batch.write_text(text)
    with pytest.raises(AssertionError, match="sbatch --test-only .*status 1"):  # there is no PARTITION
        cluster.run("sbatch", "--test-only", batch)


@pytest.mark.daily
def test_doctor_under_srun(cluster):
    """If a node's name in Slurm has no address, the doctor says what it needs."""
    doctor = [sys.executable, "-m", "helpers", "doctor", "--backend=gloo"]
    line = ["srun", "--nodes=2", "--nodelist=n[1,3]", "--time=5"]
    with pytest.raises(AssertionError, match="The host name n1 has no address here.* give an address in MASTER_ADDR"):
        cluster.run(*line, *doctor, cwd=ROOT, timeout=240)
    addressed = ["env", "MASTER_ADDR=10.88.0.11", f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}", *line]
    report = cluster.run(*addressed, "--ntasks-per-node=2", *doctor, cwd=ROOT, timeout=240)
    nodes = re.findall(r"^[\d-]+ +[\d-]+ +(compute\d) ", report, re.MULTILINE)
    assert nodes == ["compute1", "compute3"] and "4 ranks on 2 hosts, gloo" in report, report
