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

# The lines of a job's output that the book shows, such as "start 0 on n[1-2]" and "[default0]:starting anew".
SHOWN_LINE = r"(?m)^start \d.*|^.*(?:rank\(s\)|starting anew|going on from|stopped by|result \{|Node failure on).*"
# The beginning of a line that says that the job trains: "[default0]:step 15: loss 2.295, ...".
PROGRESS = r"\[default0\]:(?:step|epoch) \d+: "
# What changes from run to run: "step_00000141", "at step 141", "step 15: loss 2.295, ...", "job 1", "train-1.out".
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
    """A function that submits the exported batch file, with another script in place of the trainer's. Returns its Job.

    For example, ``submit("print('hello')", "--nodes=1")``, with the options of sbatch.
    """
    for suffix in (".sbatch", ".slurm.sh"):
        shutil.copy(folder / f"{TRAINER}{suffix}", tmp_path)

    def submit_script(text, *options):
        (tmp_path / f"{TRAINER}.py").write_text(text)
        return Job(cluster, tmp_path, options)

    return submit_script


class Job:
    """A job that runs the trainer's batch file in a folder. It is submitted when the object is made.

    ``options`` are sbatch's, and ``flags`` are for the script.
    """

    def __init__(self, cluster, folder, options=(), flags=()):
        self.cluster = cluster
        self.folder = folder
        arguments = [*options, f"{TRAINER}.sbatch", *flags]
        self.command_line = " ".join(["sbatch", *arguments])
        self.number = cluster.submit(*arguments, cwd=folder)
        self.output = folder / f"{TRAINER}-{self.number}.out"  # the file with what the job prints
        self.work = self.output.with_suffix("")  # the folder with its checkpoints and logs

    def starts(self):
        """What the job has printed, as a list with a text for each of its starts."""
        if not self.output.exists():
            return []
        before_the_first, *starts = re.split(r"^(?=start \d+ on )", self.output.read_text(), flags=re.MULTILINE)
        return starts

    def wait_for_start(self, number):
        """Wait until the job has been started. The first start has the number 0."""
        self.cluster.wait_for(lambda: len(self.starts()) > number, self.output)

    def wait_for_training(self, number):
        """Wait until the job has trained since this start."""
        self.wait_for_start(number)
        self.cluster.wait_for(lambda: re.search(PROGRESS, self.starts()[number]), self.output)

    def state(self):
        """What Slurm calls the state of the job, such as PENDING. It is "" after the job's end."""
        queue = ["squeue", "--noheader", "--format=%T", f"--job={self.number}"]
        return self.cluster.run(*queue, check=False).strip()

    def wait_for_state(self, state):
        self.cluster.wait_for(lambda: self.state() == state, self.output)

    def wait_for_end(self):
        """Wait until the job has ended. Returns what Slurm then says of it, with "JobState=FAILED", for example."""
        self.wait_for_state("")
        return self.cluster.run("scontrol", "show", "job", str(self.number))

    def update(self, setting):
        """Change a setting of the job: "TimeLimit=3"."""
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
        """The script's processes on all nodes, without torchrun, as processes of this machine."""
        ranks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-u", f"{TRAINER}.py"] and process.cwd() == str(self.folder):
                    ranks.append(process)
        return ranks

    def compare_with_book(self, name, first_start):
        """Compare two starts of the job with what the book shows: one, and the next until it trains or ends.

        ``name`` is the recorded file's. Of the training's lines, only the first is shown, and those like SHOWN_LINE.
        """
        if first_start == 0:
            lines = self.lines_of_submission()
        else:
            lines = ["…"]
        starts = self.starts()
        for number in (first_start, first_start + 1):
            first_progress = rf"(?m)^({PROGRESS}.*)$"
            before, progress, after = re.split(first_progress, starts[number], maxsplit=1)
            lines += [*re.findall(SHOWN_LINE, before), progress, "…"]
            is_last = number == len(starts) - 1
            if number == first_start or is_last:
                lines += re.findall(SHOWN_LINE, after)
        self.compare_lines(name, lines, "python -m pytest tests/test_slurm.py", VARYING)

    def lines_of_submission(self):
        """What a reader types and sees to submit the job and to look at its output."""
        return [
            f"$ {self.command_line}",
            f"Submitted batch job {self.number}",
            f"$ cat {self.output.name}",
        ]

    def compare_lines(self, name, lines, command, varying):
        """Compare lines with the recorded ones of the book, but for what varies. ``command`` records them."""
        _, version = self.cluster.run("sbatch", "--version").split()
        recorded.compare(name, "\n".join(lines), command, varying, slurm=version)


# --- a training that is interrupted -----------------------------------------------------------------------------------


def result_of(text):
    """The dictionary that a script prints at its end: ``result {"world_size": 2, "step": 1440}``."""
    return json.loads(re.search(r"result (\{.*\})", text)[1])


def state_of(work):
    """The weights and the optimizer's state in a training's last checkpoint."""
    checkpoint = torch.load(work / f"step_{LAST_STEP:08}.pt", weights_only=True)
    return [checkpoint["model"], checkpoint["optimizer"]["state"]]


def stop_by_time_limit(cluster, job):
    """Cut the job's time limit, so that Slurm signals it when the controller next checks the limits, every 30 s.

    Until then the ranks are suspended, because a fast machine would end the job before.
    """
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


def train_without_slurm(environment, folder, checkpoint_folder):
    """Run the trainer on two ranks, with the flags of the job. Returns what it prints.

    Its agent forks the ranks, which saves their imports.
    """
    command = [sys.executable, *FORKING, "--nproc-per-node=2", *AT_ADDRESS, f"{TRAINER}.py", *FLAGS]
    command += ["--checkpoint-dir", checkpoint_folder]
    environment = {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return process.stdout


@pytest.mark.daily
def test_a_job_that_is_stopped_preempted_and_loses_a_node_ends_as_if_nothing_had_happened(
    cluster_that_loses_a_node, folder
):
    cluster = cluster_that_loses_a_node
    job = Job(cluster, folder, flags=FLAGS)

    job.wait_for_training(0)
    stop_by_time_limit(cluster, job)

    job.wait_for_training(1)
    job.preempt()
    job.requeue_soon()

    job.wait_for_training(2)
    cluster.nodes["n2"].end()  # it loses its power
    job.requeue_soon()
    job.wait_for_end()

    # Each start goes on where the one before has saved.
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

    # The last start is on another node, and each start has written the logs of its nodes.
    assert lost_node.startswith("start 2 on n[1-2]\n")
    assert ended.startswith("start 3 on n[1,3]\n")
    for node, starts_there in {"n1": 4, "n2": 3, "n3": 1}.items():
        logs = list((job.work / "logs" / node).glob("*/attempt_0/*/stdout.log"))
        assert len(logs) == starts_there

    # A training that nothing disturbs has the same result, and the same weights, to the last bit.
    undisturbed_output = train_without_slurm(cluster.environment, folder, checkpoint_folder="undisturbed")
    result = result_of(ended)
    assert result == result_of(undisturbed_output)
    assert result["world_size"] == 2
    assert result["step"] == LAST_STEP
    torch.testing.assert_close(state_of(job.work), state_of(folder / "undisturbed"), rtol=0, atol=0)

    job.compare_with_book("slurm_time_limit", first_start=0)
    job.compare_with_book("slurm_preempted", first_start=1)
    job.compare_with_book("slurm_node_lost", first_start=2)


# --- when a job comes back --------------------------------------------------------------------------------------------

# A script that waits until SIGTERM stops it. As it says that it trains, its Job can wait for that.
WAITING_SCRIPT = """\
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
    job = submit(WAITING_SCRIPT, "--nodes=1")
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
    assert "KillWait " in config
    assert re.search("PreemptParameters |SchedulerParameters ", config)
    assert "GraceTime=" in cluster.run("scontrol", "show", "partition")
    job = submit(WAITING_SCRIPT.replace("SIGTERM", "SIGUSR1"), "--nodes=1")
    job.wait_for_training(0)
    cluster.run("scancel", "--signal=USR1", str(job.number))
    job.requeue_soon()
    job.wait_for_training(1)
    job.cancel()
    assert len(job.starts()) == 2


@pytest.mark.daily
def test_the_rollback_of_chapter_13b(cluster, folder):
    """The page has lines that roll job 4711 back to its checkpoint step_00000060. They work for a job that trains here.

    They end the job, move the newer checkpoints away, and submit another job, which goes on from the good checkpoint.
    """
    flags = ["--epochs", "50", "--batch-size", "8", "--save-every", "300", "--backend", "gloo"]
    job = Job(cluster, folder, flags=flags)
    cluster.wait_for(lambda: len(list(job.work.glob("step_*.pt"))) == 3, job.output)
    # The job goes on while this test looks, so the oldest may be gone already. The newest stays for 900 steps.
    good = max(job.work.glob("step_*.pt")).stem

    lines = rollback_lines_of_the_page()
    lines = lines.replace("4711", str(job.number))
    lines = lines.replace("step_00000060", good)
    lines = lines.replace("--epochs 50", " ".join(flags))
    printed = cluster.run("bash", "-e", "-c", lines, cwd=folder)

    number = re.search(r"Submitted batch job (\d+)", printed)[1]
    output = folder / f"{TRAINER}-{number}.out"
    cluster.wait_for(lambda: output.exists() and f"going on from {good}" in output.read_text(), output)
    cluster.run("scancel", number)
    spoiled = [path.stem for path in (job.work / "spoiled").iterdir()]
    assert good not in spoiled
    assert max(spoiled) > good, "the job saved once more when it was ended"


def rollback_lines_of_the_page():
    """The lines of bash for a rollback in chapter 13b: ``cd train-4711 && mkdir good spoiled && …``."""
    notebook = json.loads(chapters.find_notebook("13b").read_text())
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == "spike-why"]
    [lines] = re.findall(r"```bash\n(cd \S+-4711 .*?)```", "".join(cell["source"]), flags=re.DOTALL)
    return lines


# --- before a job -----------------------------------------------------------------------------------------------------


TRAINED = "print('epoch 1: trained')"  # a script that has trained at once


def preflight_with(flags):
    """The option of sbatch with which a job's preflight is chapter 12's script with these flags."""
    return f"--export=ALL,PREFLIGHT={chapters.preflight()}.py {flags}"


def only_start(job):
    """What a job has printed that fails at its first start. It is cancelled before it starts again."""
    job.wait_for_start(0)
    job.wait_for_state("PENDING")
    job.cancel()
    [start] = job.starts()
    return start


@pytest.mark.daily
def test_the_preflight_of_chapter_12_checks_links_between_nodes(submit, tmp_path):
    """It checks every link before the script begins. If a check fails, the script does not begin."""
    chapters.export("12", tmp_path)
    job = submit(TRAINED)
    job.wait_for_end()
    preflight, training = job.output.read_text().split("epoch 1: trained", 1)
    assert re.search(r"between nodes +0,1 +yes ", preflight)
    assert "all-reduce" not in training

    job = submit(TRAINED, preflight_with("--network-floor 1000"))
    start = only_start(job)
    assert "Too slow between nodes: between nodes, all ranks. " in start, start
    assert "inside a node" not in start
    assert "trained" not in start
    assert (job.work / "failures").read_text() == "nothing n1,n2\n", "none of the two is to blame"


@pytest.mark.daily
def test_the_preflight_of_chapter_12_checks_links_inside_a_node(submit, tmp_path):
    """There are two ranks on each node, and a floor for the link between them that it cannot reach."""
    chapters.export("12", tmp_path)
    batch_file = tmp_path / f"{TRAINER}.sbatch"
    text = batch_file.read_text()
    for option in ("--gpus-per-node=", "--nproc-per-node="):
        assert f"{option}1" in text
        text = text.replace(f"{option}1", f"{option}2")
    batch_file.write_text(text)

    job = submit(TRAINED, preflight_with("--node-floor 1000"))
    start = only_start(job)
    assert "Too slow inside a node: node 0, node 1. " in start, start
    assert "between nodes: " not in start
    assert "trained" not in start


# --- when a job fails -------------------------------------------------------------------------------------------------

# An option of sbatch. ON_CALL is a command for whoever is on duty: here it adds the line that it reads to a file.
ON_CALL = "--export=ALL,ON_CALL=cat >> called"


@pytest.mark.daily
def test_a_job_that_fails_three_times_without_progress_ends_and_says_so(submit):
    job = submit("import sys; sys.exit('a bug')", "--nodes=1", "--exclude=n2", ON_CALL)
    for start in range(2):
        job.wait_for_start(start)
        job.requeue_soon()
    assert "JobState=FAILED" in job.wait_for_end()
    assert len(job.starts()) == 3
    *_, last_message = (job.folder / "called").read_text().splitlines()
    assert last_message.startswith(f"job {job.number} ({TRAINER}): it failed three times without progress, and ends. ")
    assert last_message in job.output.read_text()


# A script whose rank on n2 dies, as with a broken GPU. The other rank, on another node, loses its connection, and fails
# too. It prints how many seconds the job trains before it has to stop.
DIES_ON_N2 = """\
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
    job = submit(DIES_ON_N2, "--nodes=2", ON_CALL)
    for start in range(2):
        job.wait_for_start(start)
        job.requeue_soon()
    job.wait_for_end()

    first_start, second_start, third_start = job.starts()
    assert first_start.startswith("start 0 on n[1-2]\n")
    assert second_start.startswith("start 1 on n[1-2]\n")
    assert third_start.startswith("start 2 on n[1,3]\n")
    assert "epoch 1: trained" in third_start

    [message] = (job.folder / "called").read_text().splitlines()
    assert message.startswith(f"job {job.number} ({TRAINER}): n2 failed 2 times, and is excluded. ")
    assert " Its last words: nothing (exitcode: -9) local_rank: 0. To take it back: " in message
    assert message in second_start

    # The job has 30 minutes. The ranks have to stop when the signal may come, from 240 seconds before its end.
    seconds_to_train = float(re.search(r"no start in (\S+)", first_start)[1])
    assert abs(seconds_to_train - (30 * 60 - 180 - 60)) < 60

    shown = r"(?m)^start \d.*|^job .*|^.*epoch 1: trained$"
    command_line, *lines = job.lines_of_submission()
    lines = [command_line.replace(ON_CALL, repr(ON_CALL)), *lines]
    lines += [*re.findall(shown, first_start), "…"]
    lines += [*re.findall(shown, second_start), "…"]
    lines += re.findall(shown, third_start)
    recording = "python -m pytest tests/test_slurm.py -k root_cause"
    job.compare_lines("slurm_bad_node", lines, recording, [*VARYING, r"JobId=\d+"])


def test_slurm_reads_the_lines_that_a_reader_may_complete(cluster, folder, tmp_path):
    """The batch file has options that a reader may complete, such as ``# #SBATCH --partition=PARTITION``.

    Without the first "# ", Slurm reads such a line: it accepts a partition that the cluster has, and refuses another.
    """
    batch_file = (folder / f"{TRAINER}.sbatch").read_text()
    with_placeholders = batch_file.replace("# #SBATCH", "#SBATCH")

    complete_file = tmp_path / "complete.sbatch"
    complete_file.write_text(with_placeholders.replace("PARTITION", "main"))  # the cluster has a partition "main"
    cluster.run("sbatch", "--test-only", complete_file)

    unknown_partition = tmp_path / "unknown_partition.sbatch"
    unknown_partition.write_text(with_placeholders)
    with pytest.raises(AssertionError, match="sbatch --test-only .*status 1"):
        cluster.run("sbatch", "--test-only", unknown_partition)


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
