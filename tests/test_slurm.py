"""The batch file that `python -m helpers export --slurm` writes, unchanged, on a real Slurm."""

import contextlib
import json
import re
import shutil
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
pytestmark = [pytest.mark.system(missing=slurm_cluster.missing), pytest.mark.timeout(900)]

LAST_STEP = 1440
FLAGS = ["--epochs", "8", "--batch-size", "8", "--lr", "0.02", "--log-every", "15", "--save-every", "90"]
FLAGS += ["--backend", "gloo"]  # The batch file asks for NCCL, and the last flag wins.
SHOWN = r"(?m)^start \d.*|^.*(?:rank\(s\)|starting anew|going on from|stopped by|result \{|Node failure on).*"
PROGRESS = r"\[default0\]:(?:step|epoch) \d+: "
VARYING = [r"step_\d+", r"at step \d+", r"(step|epoch) \d+: .*", r"job \d+", r"-\d+\.out"]


@pytest.fixture(scope="module")
def cluster():
    with unchanged(), slurm_cluster.slurm() as cluster:
        yield cluster


@pytest.fixture
def cluster_that_loses_a_node():
    """A cluster for one test: a host that has ended does not come back."""
    with unchanged(), slurm_cluster.slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the trainer's script and its launch files for two nodes with one GPU each.

    Two ranks, because the sum of two gradients has one value; that of more depends, in its last bits, on their order,
    which DDP changes after the first step of a run and of a resumed run.
    """
    folder = tmp_path_factory.mktemp("exported")
    chapters.export("11", folder, allocation=Allocation(nodes=2, gpus_per_node=1, time="00:30:00"))
    return folder


@pytest.fixture
def submit(cluster, folder, tmp_path):
    """A function that submits the exported batch file with another text in place of the trainer's script."""
    for suffix in (".sbatch", ".slurm.sh"):
        shutil.copy(folder / f"{TRAINER}{suffix}", tmp_path)

    def submit(text, *options):
        (tmp_path / f"{TRAINER}.py").write_text(text)
        return Job(cluster, tmp_path, options)

    return submit


class Job:
    """A submitted job, and the file that it writes."""

    def __init__(self, cluster, folder, options=(), flags=()):
        self.cluster = cluster
        self.folder = folder
        arguments = [*options, f"{TRAINER}.sbatch", *flags]
        self.command_line = " ".join(["sbatch", *arguments])
        self.number = cluster.submit(*arguments, cwd=folder)
        self.output = folder / f"{TRAINER}-{self.number}.out"
        self.work = self.output.with_suffix("")

    def starts(self):
        """What the job wrote after each of its starts."""
        if not self.output.exists():
            return []
        return re.split(r"^(?=start \d+ on )", self.output.read_text(), flags=re.MULTILINE)[1:]

    def wait_for_start(self, number):
        self.cluster.wait_for(lambda: len(self.starts()) > number, self.output)

    def wait_for_training(self, number):
        """Wait until the job has trained since this start."""
        self.wait_for_start(number)
        self.cluster.wait_for(lambda: re.search(PROGRESS, self.starts()[number]), self.output)

    def state(self):
        """Such as PENDING; "" after the job's end, when Slurm has forgotten it."""
        queue = ["squeue", "--noheader", "--format=%T", f"--job={self.number}"]
        return self.cluster.run(*queue, check=False).strip()

    def wait_for_state(self, state):
        self.cluster.wait_for(lambda: self.state() == state, self.output)

    def wait_for_end(self):
        """What Slurm then says of the job."""
        self.wait_for_state("")
        return self.cluster.run("scontrol", "show", "job", str(self.number))

    def update(self, setting):
        self.cluster.run("scontrol", "update", f"JobId={self.number}", setting)

    def requeue_soon(self):
        """Wait until the job is queued again, then let it start soon: by itself, Slurm would wait much longer.

        It cannot start at once: Slurm counts whole seconds since it has withdrawn the last start's credential.
        """
        self.wait_for_state("PENDING")
        self.update("StartTime=now+2")

    def preempt(self):
        """Submit a short job for all nodes to the partition that may take this job's nodes."""
        urgent = ["--partition=urgent", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 1"]
        self.cluster.submit(*urgent, cwd=self.folder)

    def cancel(self):
        self.cluster.run("scancel", str(self.number))

    def ranks(self):
        """The script's processes on all nodes, without torchrun. They have other process numbers there."""
        ranks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-u", f"{TRAINER}.py"] and process.cwd() == str(self.folder):
                    ranks.append(process)
        return ranks

    def compare_with_book(self, name, first_start):
        """Compare two starts of the job with what the book shows: one, and the next until it trains or ends.

        Most lines of the training are left out.
        """
        lines = ["…"]
        if first_start == 0:
            lines = [
                f"$ {self.command_line}",
                f"Submitted batch job {self.number}",
                f"$ cat {self.output.name}",
            ]
        starts = self.starts()
        for start in starts[first_start : first_start + 2]:
            before, progress, after = re.split(rf"(?m)^({PROGRESS}.*)$", start, maxsplit=1)
            lines += [*re.findall(SHOWN, before), progress, "…"]
            if start in (starts[first_start], starts[-1]):
                lines += re.findall(SHOWN, after)
        version = self.cluster.run("sbatch", "--version").split()[1]
        recorded.compare(name, "\n".join(lines), "python -m pytest tests/test_slurm.py", VARYING, slurm=version)


# --- a training that is interrupted -----------------------------------------------------------------------------------


def result_of(text):
    """The numbers that a script has printed at its end."""
    return json.loads(re.search(r"result (\{.*\})", text)[1])


def state_of(work):
    """The last checkpoint's weights and optimizer's state."""
    checkpoint = torch.load(work / f"step_{LAST_STEP:08}.pt", weights_only=True)
    return [checkpoint["model"], checkpoint["optimizer"]["state"]]


@pytest.mark.daily
def test_a_job_that_is_stopped_preempted_and_loses_a_node_ends_as_if_nothing_had_happened(
    cluster_that_loses_a_node, folder
):
    cluster = cluster_that_loses_a_node
    job = Job(cluster, folder, flags=FLAGS)

    # The time limit is cut so that the signal is due at once. The controller looks every 30 s. Until then the ranks are
    # stopped, because a fast machine would end the job before.
    job.wait_for_training(0)
    ranks = job.ranks()
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    job.update("TimeLimit=3")
    time.sleep(max(0, cluster.seconds_until_limits_are_checked() - 0.5))
    for rank in ranks:
        rank.resume()
    job.requeue_soon()
    job.update("TimeLimit=30")

    # A job in a partition that may take this job's nodes.
    job.wait_for_training(1)
    job.preempt()
    job.requeue_soon()

    # A node loses its power.
    job.wait_for_training(2)
    cluster.nodes["n2"].end()
    job.requeue_soon()
    job.wait_for_end()

    stopped_by_limit, preempted, lost_node, ended = job.starts()
    assert "starting anew" in stopped_by_limit
    first_steps = []
    for start in (preempted, lost_node, ended):
        first_steps.append(int(re.search(r"going on from step_(\d+)", start)[1]))
    assert 0 < first_steps[0] < first_steps[1] <= first_steps[2] < LAST_STEP
    assert f"stopped by SIGUSR1 at step {first_steps[0]}: go on with --resume\n" in stopped_by_limit
    assert f"stopped by SIGTERM at step {first_steps[1]}: go on with --resume\n" in preempted
    assert "stopped by" not in lost_node
    assert "Node failure on n2" in lost_node
    assert lost_node.startswith("start 2 on n[1-2]\n")
    assert ended.startswith("start 3 on n[1,3]\n")

    # The same on two ranks without Slurm. Its agent forks them, which saves their imports.
    command = [sys.executable, *FORKING, "--nproc-per-node=2", *AT_ADDRESS, f"{TRAINER}.py", *FLAGS]
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command += ["--checkpoint-dir", "undisturbed"]
    process = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result = result_of(ended)
    assert result == result_of(process.stdout)
    assert (result["world_size"], result["step"]) == (2, LAST_STEP)
    torch.testing.assert_close(state_of(job.work), state_of(folder / "undisturbed"), rtol=0, atol=0)
    for node, starts_there in {"n1": 4, "n2": 3, "n3": 1}.items():
        assert len(list((job.work / "logs" / node).glob("*/attempt_0/*/stdout.log"))) == starts_there

    job.compare_with_book("slurm_time_limit", first_start=0)
    job.compare_with_book("slurm_preempted", first_start=1)
    job.compare_with_book("slurm_node_lost", first_start=2)


# --- when a job comes back --------------------------------------------------------------------------------------------

WAITING = """\
import pathlib, signal, sys, time

def stop(number, frame):
    (folder / "stopped").touch()
    sys.exit()

folder = pathlib.Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1])
signal.signal(signal.SIGTERM, stop)
print("epoch 1: ready", flush=True)
time.sleep(1000)
"""


def test_a_job_that_its_user_ends_does_not_come_back(cluster, submit):
    job = submit(WAITING, "--nodes=1")
    job.wait_for_training(0)
    assert f" {job.number} " in job.cluster.run("squeue", "--me")
    job.cancel()
    assert "JobState=CANCELLED" in job.wait_for_end()
    assert (job.work / "stopped").exists()
    assert len(job.starts()) == 1


@pytest.mark.daily
def test_a_job_that_its_user_signals_saves_and_comes_back(cluster, submit):
    """The rehearsal of a time limit that chapter 13b advises, and the settings that chapter 12c asks for."""
    config = cluster.run("scontrol", "show", "config")
    # Slurm 22.05 has no PreemptParameters: there SchedulerParameters may have preempt_send_user_signal.
    assert "KillWait " in config and re.search("PreemptParameters |SchedulerParameters ", config)
    assert "GraceTime=" in cluster.run("scontrol", "show", "partition")
    job = submit(WAITING.replace("SIGTERM", "SIGUSR1"), "--nodes=1")
    job.wait_for_training(0)
    cluster.run("scancel", "--signal=USR1", str(job.number))
    job.requeue_soon()
    job.wait_for_training(1)
    job.cancel()
    assert len(job.starts()) == 2


@pytest.mark.daily
def test_the_rollback_of_chapter_13b(cluster, folder):
    """The lines of the page, with the number and the checkpoints of a job that trains here."""
    flags = ["--epochs", "50", "--batch-size", "8", "--save-every", "300", "--backend", "gloo"]
    job = Job(cluster, folder, flags=flags)
    cluster.wait_for(lambda: len(list(job.work.glob("step_*.pt"))) == 3, job.output)
    page = chapters.find_notebook("13b").read_text()
    [source] = [cell["source"] for cell in json.loads(page)["cells"] if cell["id"] == "spike-why"]
    [lines] = re.findall(r"(?s)```bash\n(cd \S+-4711 .*?)```", "".join(source))
    # The job goes on while this test looks, so the oldest may be gone already. The newest stays for 900 steps.
    good = max(job.work.glob("step_*.pt")).stem
    lines = lines.replace("4711", str(job.number)).replace("step_00000060", good)
    lines = lines.replace("--epochs 50", " ".join(flags))
    said = cluster.run("bash", "-e", "-c", lines, cwd=folder)
    number = re.search(r"Submitted batch job (\d+)", said)[1]
    output = folder / f"{TRAINER}-{number}.out"
    cluster.wait_for(lambda: output.exists() and f"going on from {good}" in output.read_text(), output)
    cluster.run("scancel", number)
    spoiled = [path.stem for path in (job.work / "spoiled").iterdir()]
    assert good not in spoiled
    assert max(spoiled) > good, "the job saved once more when it was ended"


# --- before a job -----------------------------------------------------------------------------------------------------


@pytest.mark.daily
def test_the_preflight_of_chapter_12(submit, tmp_path):
    """It checks every link before the script begins. If a check fails, the script does not begin."""
    chapters.export("12", tmp_path)
    job = submit("print('epoch 1: trained')")
    job.wait_for_end()
    preflight, training = job.output.read_text().split("epoch 1: trained", 1)
    assert re.search(r"between nodes +0,1 +yes ", preflight) and "all-reduce" not in training

    job = submit("print('epoch 1: trained')", f"--export=ALL,PREFLIGHT={chapters.preflight()}.py --network-floor 1000")
    job.wait_for_start(0)
    job.wait_for_state("PENDING")
    job.cancel()
    [start] = job.starts()
    assert "Too slow between nodes: between nodes, all ranks. " in start, start
    assert (job.work / "failures").read_text() == "nothing n1,n2\n", "none of the two is to blame"
    assert "inside a node" not in start
    assert "trained" not in start

    # Two ranks on each node, and a floor for the links between these two.
    batch_file = tmp_path / f"{TRAINER}.sbatch"
    text = batch_file.read_text()
    for option in ("--gpus-per-node=", "--nproc-per-node="):
        text = text.replace(f"{option}1", f"{option}2")
    batch_file.write_text(text)
    job = submit("print('epoch 1: trained')", f"--export=ALL,PREFLIGHT={chapters.preflight()}.py --node-floor 1000")
    job.wait_for_start(0)
    job.wait_for_state("PENDING")
    job.cancel()
    [start] = job.starts()
    assert "Too slow inside a node: node 0, node 1. " in start, start
    assert "between nodes: " not in start
    assert "trained" not in start


# --- when a job fails -------------------------------------------------------------------------------------------------

# A command for whoever is on duty: it adds the line that it reads to a file.
ON_CALL = "--export=ALL,ON_CALL=cat >> called"
FAILS = "import sys; sys.exit('a bug')"


@pytest.mark.daily
def test_a_job_that_fails_three_times_without_progress_ends_and_says_so(submit):
    job = submit(FAILS, "--nodes=1", "--exclude=n2", ON_CALL)
    for start in range(2):
        job.wait_for_start(start)
        job.requeue_soon()
    assert "JobState=FAILED" in job.wait_for_end()
    assert len(job.starts()) == 3
    *_, line = (job.folder / "called").read_text().splitlines()
    assert line.startswith(f"job {job.number} ({TRAINER}): it failed three times without progress, and ends. ")
    assert line in job.output.read_text()


# Rank 1 dies on n2, as with a broken GPU. Rank 0, on another node, loses its connection, and fails too.
FAILS_ON_N2 = """\
import os, signal, time

import torch
import torch.distributed as dist

print("no start in", int(os.environ["STOP_AT"]) - time.time())
dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 5 and os.environ["SLURMD_NODENAME"] == "n2":
        os.kill(os.getpid(), signal.SIGKILL)
print("epoch 1: trained")
dist.destroy_process_group()
"""


@pytest.mark.daily
def test_the_node_of_the_root_cause_is_excluded_when_it_has_failed_twice(submit):
    job = submit(FAILS_ON_N2, "--nodes=2", ON_CALL)
    for start in range(2):
        job.wait_for_start(start)
        job.requeue_soon()
    job.wait_for_end()
    nodes = [re.match(r"start \d on (\S+)", start)[1] for start in job.starts()]
    assert nodes == ["n[1-2]", "n[1-2]", "n[1,3]"]
    assert "epoch 1: trained" in job.starts()[2]
    [line] = (job.folder / "called").read_text().splitlines()
    assert line.startswith(f"job {job.number} ({TRAINER}): n2 failed 2 times, and is excluded. ")
    assert " Its last words: nothing (exitcode: -9) local_rank: 0. To take it back: " in line
    assert line in job.starts()[1]
    seconds = float(re.search(r"no start in (\S+)", job.starts()[0])[1])
    assert abs(seconds - (30 * 60 - 180 - 60)) < 60, "the end of the job's time, as Slurm says it"

    shown = r"(?m)^start \d.*|^job .*|^.*epoch 1: trained$"
    lines = [
        f"$ {job.command_line.replace(ON_CALL, repr(ON_CALL))}",
        f"Submitted batch job {job.number}",
        f"$ cat {job.output.name}",
    ]
    for text in job.starts():
        lines += [*re.findall(shown, text), "…"]
    version = job.cluster.run("sbatch", "--version").split()[1]
    recording = "python -m pytest tests/test_slurm.py -k root_cause"
    recorded.compare("slurm_bad_node", "\n".join(lines[:-1]), recording, [*VARYING, r"JobId=\d+"], slurm=version)


def test_slurm_reads_the_lines_that_a_reader_may_complete(cluster, folder, tmp_path):
    text = (folder / f"{TRAINER}.sbatch").read_text().replace("# #SBATCH", "#SBATCH")
    batch = tmp_path / "complete.sbatch"
    batch.write_text(text.replace("PARTITION", "main"))
    cluster.run("sbatch", "--test-only", batch)
    batch.write_text(text)
    with pytest.raises(AssertionError, match="sbatch --test-only .*status 1"):  # There is no PARTITION.
        cluster.run("sbatch", "--test-only", batch)


@pytest.mark.daily
def test_doctor_under_srun(cluster):
    """If a node's name in Slurm has no address, the doctor says what it needs."""
    doctor = [sys.executable, "-m", "helpers", "doctor", "--backend=gloo"]
    srun = ["srun", "--nodes=2", "--nodelist=n[1,3]", "--time=5"]
    with pytest.raises(AssertionError, match="The host name n1 has no address here.* give an address in MASTER_ADDR"):
        cluster.run(*srun, *doctor, cwd=ROOT, timeout=240)
    with_address = ["env", "MASTER_ADDR=10.88.0.11", f"GLOO_SOCKET_IFNAME={hosts.INTERFACE}"]
    report = cluster.run(*with_address, *srun, "--ntasks-per-node=2", *doctor, cwd=ROOT, timeout=240)
    assert "4 ranks on 2 hosts, gloo" in report
    nodes = re.findall(r"^[\d-]+ +[\d-]+ +(compute\d) ", report, re.MULTILINE)
    assert nodes == ["compute1", "compute3"], report
