"""The batch file that `python -m helpers export --slurm` writes, unchanged, on a real Slurm."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time

import psutil
import pytest
import recorded
import slurm_cluster
import torch
from forked import AT_ADDRESS, FORKING
from leftovers import unchanged

pytestmark = [pytest.mark.system(missing=slurm_cluster.missing), pytest.mark.timeout(600)]

FLAGS = ["--epochs", "8", "--batch-size", "8", "--lr", "0.02", "--log-every", "15", "--save-every", "90"]
FLAGS += ["--backend", "gloo"]  # the batch file asks for NCCL, and the last flag wins
KEPT = r"start \d|.*(rank\(s\)|starting anew|going on from|stopped by|result \{|Node failure on)"
PROGRESS = r"\[default0\]:(step|epoch) \d+: "
VARYING = [r"step_\d+", r"at step \d+", r"(step|epoch) \d+: .*", r"job \d+", r"-\d+\.out"]


@pytest.fixture(scope="module")
def cluster():
    with unchanged(), slurm_cluster.slurm() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with chapter 11's script and its launch files for two nodes with one GPU each.

    Two ranks, because the sum of two gradients has one value; that of more depends, in its last bits, on their order,
    which DDP changes after the first step of a run and of a resumed run.
    """
    folder = tmp_path_factory.mktemp("exported")
    export = ["export", "11", "--slurm", "--nodes=2", "--gpus-per-node=1", "--time=00:30:00", f"--out={folder}"]
    subprocess.run([sys.executable, "-m", "helpers", *export], check=True, stdout=subprocess.DEVNULL)
    return folder


class Job:
    """A submitted job, and the file that it writes."""

    def __init__(self, cluster, folder, *options, flags=(), script="11_trainer.sbatch"):
        self.cluster, self.folder = cluster, folder
        self.command = ["sbatch", *options, script, *flags]
        self.number = cluster.submit(*options, script, *flags, cwd=folder)
        self.output = folder / f"{script.removesuffix('.sbatch')}-{self.number}.out"
        self.work = self.output.with_suffix("")

    def starts(self):
        """[what the job wrote] after each of its starts."""
        text = self.output.read_text() if self.output.exists() else ""
        return re.split(r"^(?=start \d+ on )", text, flags=re.MULTILINE)[1:]

    def trains(self, start):
        """Whether the job has trained since this start."""
        return len(self.starts()) > start and re.search(PROGRESS, self.starts()[start]) is not None

    def wait_for(self, condition, seconds=300):
        """Wait for a condition. If it does not come true, the error shows what the job wrote."""
        try:
            self.cluster.wait(condition, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output.read_text() if self.output.exists() else ''}") from None

    def ranks(self):
        """The processes of the script, without torchrun's."""
        ranks = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if self.work.name in line and "-u" in line and process.cwd() == str(self.folder):
                    ranks.append(process)
        return ranks

    def record(self, name, first):
        """Compare two starts of the job with what the book shows: one, and the next until it trains or ends.

        Most lines of the training are left out.
        """
        lines = [f"$ {' '.join(self.command)}", f"Submitted batch job {self.number}", f"$ cat {self.output.name}"]
        lines = lines if first == 0 else ["…"]
        for number, start in enumerate(self.starts()[first : first + 2], first):
            progress = False
            for line in start.splitlines():
                if progress and first < number < len(self.starts()) - 1:
                    break
                if re.match(PROGRESS, line) and not progress:
                    lines += [line, "…"]
                    progress = True
                elif re.match(KEPT, line):
                    lines.append(line)
        version = self.cluster.run("sbatch", "--version").split()[1]
        recorded.compare(name, "\n".join(lines), "python -m pytest tests/test_slurm.py", VARYING, slurm=version)


def result_of(text, work):
    """(the numbers that a script has printed at its end, its last checkpoint)."""
    last = json.loads(re.search(r"result (\{.*\})", text)[1])
    return last, torch.load(work / f"step_{last['step']:08}.pt", weights_only=True)


def undisturbed(folder, cluster):
    """The result of chapter 11's script on two ranks without Slurm. The agent forks them, which saves their imports."""
    flags = [*FLAGS, "--checkpoint-dir", "undisturbed"]
    command = [sys.executable, *FORKING, "--nproc-per-node=2", *AT_ADDRESS, "11_trainer.py", *flags]
    environment = {**cluster.environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return result_of(process.stdout, folder / "undisturbed")


def test_a_job_that_is_stopped_preempted_and_loses_a_node_ends_as_if_nothing_had_happened(cluster, folder):
    job = Job(cluster, folder, flags=FLAGS)

    # The time limit is cut so that the signal is due at once. The controller looks every 30 s. Until then the ranks are
    # stopped, because a fast machine would end the job before.
    job.wait_for(lambda: job.trains(0))
    ranks = job.ranks()
    assert len(ranks) == 2
    for rank in ranks:
        rank.suspend()
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=3")
    time.sleep(max(0, cluster.until_limits_are_checked() - 0.5))
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):  # Slurm's signal has already woken and ended them
            rank.resume()
    job.wait_for(lambda: cluster.state(job.number) == "PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    assert re.search(r"stopped by SIGUSR1 at step \d+: go on with --resume\n", job.starts()[0])
    assert "result" not in job.starts()[0]

    # A job in a partition that may take this job's nodes.
    cluster.requeue_soon(job.number)
    job.wait_for(lambda: job.trains(1))
    options = ["--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.submit(*options, cwd=folder)
    cluster.requeue_soon(job.number)
    assert re.search(r"stopped by SIGTERM at step \d+: go on with --resume\n", job.starts()[1])

    # A node loses its power.
    job.wait_for(lambda: job.trains(2))
    assert job.starts()[2].startswith("start 2 on n[1-2]\n")
    cluster.nodes["n2"].end()
    cluster.requeue_soon(job.number)
    assert "Node failure on n2" in job.starts()[2] and "stopped by" not in job.starts()[2]
    job.wait_for(lambda: cluster.state(job.number) is None)

    beginnings = [re.search(r"going on from step_(\d+)|starting anew", start) for start in job.starts()]
    assert [beginning[0] == "starting anew" for beginning in beginnings] == [True, False, False, False]
    steps = [int(beginning[1]) for beginning in beginnings[1:]]
    assert 0 < steps[0] < steps[1] <= steps[2] < 1440
    for number in (0, 1):  # it went on from the step at which it was told to stop
        assert f"at step {steps[number]}:" in job.starts()[number]
    assert job.starts()[3].startswith("start 3 on n[1,3]\n")
    result, checkpoint = result_of(job.starts()[-1], job.work)
    expected, expected_checkpoint = undisturbed(folder, cluster)
    assert result == expected
    torch.testing.assert_close(checkpoint["model"], expected_checkpoint["model"], rtol=0, atol=0)
    states = [saved["optimizer"]["state"] for saved in (checkpoint, expected_checkpoint)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert result["world_size"] == 2 and result["step"] == 1440
    for node, starts in {"n1": 4, "n2": 3, "n3": 1}.items():
        logs = list((job.work / "logs" / node).glob("*/attempt_0/*/stdout.log"))
        assert len(logs) == starts

    job.record("slurm_time_limit", 0)
    job.record("slurm_preempted", 1)
    job.record("slurm_node_lost", 2)


def test_the_capstone_goes_on_from_shards_of_two_nodes(cluster, tmp_path):
    export = ["export", "16", "--slurm", "--nodes=2", "--gpus-per-node=1", "--time=00:30:00", f"--out={tmp_path}"]
    subprocess.run([sys.executable, "-m", "helpers", *export], check=True, stdout=subprocess.DEVNULL)
    flags = "--steps 60 --warmup 5 --log-every 5 --save-every 10 --pp 2 --backend gloo".split()
    forking = tmp_path / "bin" / "torchrun"  # the same agent; its ranks do not import torch
    forking.parent.mkdir()
    forking.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(FORKING[0])])} "$@"\n')
    forking.chmod(0o755)
    path = f"--export=ALL,PATH={forking.parent}:{cluster.environment['PATH']}"
    job = Job(cluster, tmp_path, path, flags=flags, script="16_capstone.sbatch")
    job.wait_for(lambda: job.trains(0))
    options = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.submit(*options, cwd=tmp_path)
    cluster.requeue_soon(job.number)
    stopped = re.search(r"stopped by SIGTERM at step (\d+): go on with --resume\n", job.starts()[0])
    job.wait_for(lambda: cluster.state(job.number) is None, 300)
    assert len(job.starts()) == 2, job.output.read_text()
    assert f"going on from step_{int(stopped[1]):08}" in job.starts()[1]
    result = json.loads(re.search(r"result (\{.*\})", job.starts()[1])[1])
    assert result["world_size"] == 2 and result["step"] == 60
    assert (job.work / "step_00000060" / ".metadata").exists() and not (job.work / "stopped").exists()


POLITE = """\
import os, pathlib, signal, sys, time

def stop(number, frame):
    pathlib.Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1], "stopped").touch()
    sys.exit()

signal.signal(signal.SIGTERM, stop)
print("epoch 1: ready", flush=True)
time.sleep(60)
"""
DEAF = "import time\nprint('epoch 1: ready', flush=True)\ntime.sleep(60)\n"


def in_place_of_the_script(folder, tmp_path, text):
    """A folder with the exported batch file, and with a short script in place of chapter 11's."""
    (tmp_path / "11_trainer.sbatch").write_bytes((folder / "11_trainer.sbatch").read_bytes())
    (tmp_path / "11_trainer.py").write_text(text)
    return tmp_path


def test_a_job_that_its_user_ends_does_not_come_back(cluster, folder, tmp_path):
    job = Job(cluster, in_place_of_the_script(folder, tmp_path, POLITE), "--nodes=1")
    job.wait_for(lambda: job.trains(0))
    cluster.run("scancel", str(job.number))
    job.wait_for(lambda: cluster.state(job.number) is None)
    assert (job.work / "stopped").exists()
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", str(job.number))
    time.sleep(1)
    assert len(job.starts()) == 1


def test_a_rank_that_does_not_train_yet_outlives_the_signal_and_the_job_comes_back(cluster, folder, tmp_path):
    job = Job(cluster, in_place_of_the_script(folder, tmp_path, DEAF), "--nodes=1", "--nodelist=n1")
    job.wait_for(lambda: job.trains(0))
    cluster.run("scontrol", "update", "PartitionName=main", "GraceTime=1")
    options = ["--partition=urgent", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.submit(*options, cwd=tmp_path)
    cluster.wait(lambda: cluster.state(job.number) == "PENDING")  # Slurm does it, after the grace time
    assert not (job.work / "stopped").exists()
    assert "Restarts=1 " in cluster.run("scontrol", "show", "job", str(job.number))
    cluster.run("scancel", str(job.number))


CRASHING = """\
import os, pathlib, sys

start = int(os.environ["START"])
print("epoch 1: crash", flush=True)
if start < 2:
    pathlib.Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1], f"step_{start}.pt").touch()
sys.exit(1)
"""


def test_a_job_that_crashes_comes_back_as_long_as_its_checkpoints_move(cluster, folder, tmp_path):
    job = Job(cluster, in_place_of_the_script(folder, tmp_path, CRASHING), "--nodes=1")
    for start in (0, 1):
        job.wait_for(lambda start=start: job.trains(start))
        cluster.requeue_soon(job.number)
    job.wait_for(lambda: cluster.state(job.number) is None)
    assert "JobState=FAILED" in cluster.run("scontrol", "show", "job", str(job.number))
    assert len(job.starts()) == 3


SLOW_TO_SAVE = """\
import os, pathlib, signal, sys, time

def stop(number, frame):
    (folder / "signal").touch()
    sys.exit()

folder = pathlib.Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1])
signal.signal(signal.SIGUSR1, stop)
(folder / "unfinished.part").touch()
time.sleep(35)
(folder / "unfinished.part").rename(folder / "step_1.pt")
print("epoch 1: saved", flush=True)
time.sleep(200)
"""


def test_a_job_whose_saves_take_long_is_told_earlier(cluster, folder, tmp_path):
    """With three minutes, the signal comes 60 s + 3 x 35 s before the end, though Slurm was asked for one second."""
    options = ["--nodes=1", "--time=3", "--signal=USR1@1"]
    job = Job(cluster, in_place_of_the_script(folder, tmp_path, SLOW_TO_SAVE), *options)
    job.wait_for(lambda: cluster.state(job.number) is None)
    save, signal = ((job.work / name).stat().st_ctime for name in ("step_1.pt", "signal"))
    assert 0 < signal - save < 60  # by itself, Slurm would send it later: in the job's last minute


def test_the_preflight_of_chapter_12(cluster, folder, tmp_path):
    """It checks every link before the script begins. If a check fails, the script does not begin."""
    place = in_place_of_the_script(folder, tmp_path, "print('epoch 1: trained')")
    export = ["export", "12", f"--out={place}"]
    subprocess.run([sys.executable, "-m", "helpers", *export], check=True, stdout=subprocess.DEVNULL)
    job = Job(cluster, place)
    job.wait_for(lambda: cluster.state(job.number) is None)
    preflight, training = job.output.read_text().split("epoch 1: trained", 1)
    assert re.search(r"between nodes +0,1 +yes ", preflight) and "all-reduce" not in training

    check = place / "12_multi_node.py"
    check.write_text(check.read_text().replace("pattern * total", "pattern * total + 1"))
    job = Job(cluster, place)
    job.wait_for(lambda: cluster.state(job.number) is None)
    assert "Wrong sums: node 0, node 1, between nodes, all ranks" in job.output.read_text(), job.output.read_text()
    assert "trained" not in job.output.read_text() and len(job.starts()) == 1


def test_slurm_accepts_the_file(cluster, folder, tmp_path):
    cluster.run("sbatch", "--test-only", "11_trainer.sbatch", cwd=folder)
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text((folder / "11_trainer.sbatch").read_text().replace("--nodes=2", "--nodes=200"))
    with pytest.raises(AssertionError, match="sbatch --test-only .*status 1"):
        cluster.run("sbatch", "--test-only", str(wrong), cwd=folder)
    complete = tmp_path / "complete.sbatch"
    text = (folder / "11_trainer.sbatch").read_text().replace("# #SBATCH", "#SBATCH")
    complete.write_text(text.replace("PARTITION", "main"))
    cluster.run("sbatch", "--test-only", str(complete), cwd=folder)
    complete.write_text(text)
    with pytest.raises(AssertionError, match="sbatch --test-only .*status 1"):  # the line is read
        cluster.run("sbatch", "--test-only", str(complete), cwd=folder)


def test_doctor_under_srun(cluster, folder):
    """If a node's name in Slurm has no address, the doctor says what it needs."""
    doctor = [sys.executable, "-m", "helpers", "doctor", "--backend=gloo"]
    line = ["srun", "--nodes=2", "--nodelist=n[1,3]", "--time=5"]
    with pytest.raises(AssertionError, match="The host name n1 has no address here.* give an address in MASTER_ADDR"):
        cluster.run(*line, *doctor, cwd=recorded.FOLDER.parents[1], timeout=240)
    line = ["env", "MASTER_ADDR=10.88.0.11", *line, "--ntasks-per-node=2", *doctor]
    report = cluster.run(*line, cwd=recorded.FOLDER.parents[1], timeout=240)
    nodes = re.findall(r"^[\d-]+ +[\d-]+ +(compute\d) ", report, re.MULTILINE)
    assert nodes == ["compute1", "compute3"] and "4 ranks on 2 hosts, gloo" in report, report
