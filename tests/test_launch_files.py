"""The files that `python -m helpers export --slurm` writes, without a Slurm and without Kubernetes."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hosts
import psutil
import pytest
import yaml
from leftovers import unchanged, wait_until

from helpers.__main__ import main
from helpers.export.chapters import find_notebook, preflight
from helpers.export.launch_files import ALERT, TEMPLATES, Allocation, kubernetes_name, launch_files
from helpers.export.notebook import ExportError

PLAIN = 'parser.add_argument("--checkpoint-dir")\n'  # but not --resume
RESUMES = 'parser.add_argument("--checkpoint-dir")\nparser.add_argument("--resume")\n'
STOPS = RESUMES + "with StopRequest() as stop:\n"
BACKEND = 'parser.add_argument("--backend", choices=["nccl", "gloo"])\n'
NAME, PREFLIGHT = find_notebook("11").stem, preflight()


def files(script=STOPS, name=NAME, **sizes):
    """{suffix: text} of the launch files."""
    texts = launch_files(name, script, Allocation(**sizes), PREFLIGHT)
    return {file.removeprefix(name): text for file, text in texts.items()}


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_the_flags_ask_for(helpers, tmp_path):
    status, _, _ = helpers("export", "11", "--nodes=3", "--gpus-per-node=4", "--time=1-00:00:00", "--out", tmp_path)
    assert status == 0
    text = (tmp_path / f"{NAME}.sbatch").read_text()
    assert text == files(BACKEND + STOPS, nodes=3, gpus_per_node=4, time="1-00:00:00")[".sbatch"]
    for option in ("--nodes=3", "--gpus-per-node=4", "--cpus-per-task=16", "--time=1-00:00:00"):
        assert f"#SBATCH {option}\n" in text


def test_the_files_of_every_chapter_can_be_read(helpers, tmp_path):
    assert helpers("export", "--all", "--slurm", "--out", tmp_path)[0] == 0
    scripts = [path.stem for path in tmp_path.glob("*.py") if path.name != ALERT]
    assert len(scripts) > 5
    for name in scripts:
        for suffix in (".sbatch", ".slurm.sh", ".nodes.sh"):
            subprocess.run(["bash", "-n", tmp_path / f"{name}{suffix}"], check=True)
        service, job = yaml.safe_load_all((tmp_path / f"{name}.k8s.yaml").read_text())
        assert (service["kind"], job["kind"]) == ("Service", "Job")


def test_a_job_that_saves_gets_the_script_that_watches_it():
    assert files(RESUMES)[ALERT] == (TEMPLATES / ALERT).read_text()
    assert ALERT not in files(PLAIN)


def test_a_name_that_a_shell_would_split_is_refused():
    with pytest.raises(ExportError, match="'my notebook'.*\nRename it"):
        files(name="my notebook")


def test_a_name_that_begins_with_a_dash_is_no_option(tmp_path):
    texts = files(name="-rf")
    assert "sbatch ./-rf.sbatch" in texts[".sbatch"]
    (tmp_path / "-rf.slurm.sh").write_text(texts[".slurm.sh"])
    assert "bash ./-rf.nodes.sh static" in texts[".nodes.sh"]
    assert "-f ./-rf.k8s.yaml" in texts[".k8s.yaml"]
    status, text = run_batch(tmp_path, "", texts[".sbatch"], JOB_FOLDER="", SLURM_JOB_NAME="rf")
    assert status == 0
    assert re.search(r"^torchrun .* \./-rf\.py --checkpoint-dir rf-2 ", text, re.MULTILINE)


def test_a_script_that_can_is_told_to_take_the_gpus():
    """So a node without GPUs fails and does not train on its CPU. A reader's own flag comes later, and wins."""
    texts = files(STOPS + BACKEND)
    for suffix, times in ((".sbatch", 1), (".nodes.sh", 2), (".k8s.yaml", 1)):
        assert texts[suffix].count(f"{NAME}.py --backend nccl") == times
        assert "--backend" not in files(STOPS)[suffix]


# --- for Slurm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "stops", "resumes"), [(STOPS, True, True), (RESUMES, False, True), (PLAIN, False, False)]
)
def test_what_a_script_can_do_decides_what_slurm_does(script, stops, resumes):
    text = files(script)[".sbatch"] + files(script)[".slurm.sh"]
    for part in ("--signal=", 'trap "" USR1', "--signals-to-handle=", '-e "$JOB_FOLDER/stopped"'):
        assert (part in text) == stops
    for part in ("#SBATCH --requeue", "scontrol requeue", '--checkpoint-dir "$JOB_FOLDER" --resume'):
        assert (part in text) == resumes
    assert ("#SBATCH --no-requeue" in text) == (not resumes)


def test_the_lines_for_a_cluster_work_without_their_comment_sign():
    """Slurm reads its options only before the first command."""
    before, block, after = re.split(r"^# ----.*\n", files()[".sbatch"], maxsplit=2, flags=re.MULTILINE)
    uncommented = re.sub("^# ", "", block, flags=re.MULTILINE)
    assert subprocess.run(["bash", "-n"], input=before + uncommented + after, text=True).returncode == 0
    options, commands = re.split(r"^(?!#SBATCH)", uncommented, maxsplit=1, flags=re.MULTILINE)
    assert "--account=" in options
    assert "#SBATCH" not in commands + after


# Stand-ins for Slurm's commands, and for torchrun, which runs the file `script` with the real script's name and flags.
# `ip` and `getent` say that the interface ib7 leads to the other node.
STAND_INS = {
    "scontrol": """case "$1" in
        requeue) echo requeued ;;
        update) echo "$*" ;;
        *) printf "NodeName=n NodeAddr=10.0.0.%s Port=1\\n" 1 2 ;;
        esac""",
    "srun": 'while [ "$1" != bash ] && [ "$1" != apptainer ]; do shift; done; exec "$@"',
    "squeue": """case "$*" in
        *%x) echo n7 ;;  # is excluded already
        *%e) echo "$END" ;;
        esac""",
    "sleep": "",
    "apptainer": 'echo "in a container"; while [ "$1" != bash ]; do shift; done; exec "$@"',
    "getent": '[ "$2" = 10.0.0.1 ] && echo 10.0.0.1 STREAM',
    "ip": 'echo "$3 via 10.0.0.9 dev ib7 src 10.0.0.2"',
    "torchrun": 'echo "torchrun $*"; until [[ $1 = *.py || $1 = -m ]]; do shift; done; . ./script',
}


def run_batch(folder, script, text=None, **variables):
    """Run a batch file with stand-ins for Slurm and torchrun. Returns (status, output)."""
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    (folder / "script").write_text(script)
    (folder / f"{NAME}.slurm.sh").write_text(files()[".slurm.sh"])
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_FOLDER": "work"}
    environment |= {"SLURM_JOB_NAME": "book", "SLURM_RESTART_COUNT": "1", "ON_CALL": "cat > called"}
    environment |= {f"SLURM_{name}": "2" for name in ("CPUS_PER_TASK", "NNODES", "JOB_ID")}
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2", **variables}
    command = ["bash", "-c", text or files()[".sbatch"], f"{NAME}.sbatch"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("script", "start", "status", "again"),
    [
        ("touch work/stopped work/step_10.pt", 0, 0, True),
        ("touch work/stopped work/step_10.pt", 100, 0, False),  # the limit
        ("exit 1", 0, 1, True),
        ("exit 0", 0, 0, False),
    ],
)
def test_a_job_starts_again_after_a_stop_and_after_a_failure(tmp_path, script, start, status, again):
    ended, text = run_batch(tmp_path, script, SLURM_RESTART_COUNT=str(start))
    assert ended == status
    assert ("requeued" in text) == again, text


@pytest.mark.parametrize("script", ["touch work/stopped work/step_10.pt", "exit 1"])
@pytest.mark.parametrize(("failures", "status_after_a_stop"), [(2, 0), (3, 1)])
def test_a_requeue_that_fails_is_tried_again_and_then_told(
    tmp_path, monkeypatch, script, failures, status_after_a_stop
):
    """Without the message, a job that saved and stopped would end with status 0, and nobody would hear of it."""
    requeue = f'requeue) echo >> tries; [ "$(wc -l < tries)" -gt {failures} ] && echo requeued ;;'
    monkeypatch.setitem(STAND_INS, "scontrol", STAND_INS["scontrol"].replace("requeue) echo requeued ;;", requeue))
    status, text = run_batch(tmp_path, script)
    assert (tmp_path / "tries").read_text() == "\n" * 3
    if script == "exit 1":
        assert status == 1
    else:
        assert status == status_after_a_stop
    if failures < 3:
        assert "requeued" in text
        assert not (tmp_path / "called").exists()
    else:
        assert (tmp_path / "called").read_text() == (
            "job 2 (book): it should start again, but scontrol requeue failed three times, so it ends. "
            f"Submit it again with the same flags: JOB_FOLDER=work sbatch {NAME}.sbatch\n"
        )


def test_a_third_failure_at_the_same_checkpoint_ends_the_job(tmp_path):
    """A bug would fail for ever. A failure after a newer checkpoint is another one."""

    def fails(written):
        """Whether the job starts again after a start that writes a file and fails."""
        _, text = run_batch(tmp_path, f"touch work/{written}; exit 1")
        return "requeued" in text

    assert [fails("x"), fails("x"), fails("x")] == [True, True, False], "there is no checkpoint"
    assert [fails("step_00000010.pt"), fails("x"), fails("step_00000020.pt"), fails("x")] == [True] * 4
    assert not fails("step_30.tmp"), "half a checkpoint"


def test_three_stops_before_the_first_save_end_the_job(tmp_path):
    """With a time that is too short, all starts would end before their first step, and nobody would hear of it."""

    def is_requeued_after_a_stop(written_file):
        """Whether Slurm is asked to start the job again after a start that was told to stop, and wrote this file."""
        status, text = run_batch(tmp_path, f"touch work/stopped work/{written_file}")
        is_requeued = "requeued" in text
        assert is_requeued == (status == 0)
        return is_requeued

    # Each start saves before it stops, so the job goes on as often as it likes.
    for step in (10, 20, 30, 40):
        assert is_requeued_after_a_stop(f"step_{step}.pt")
    assert not (tmp_path / "work/failures").exists()

    # Two starts that save nothing are tolerated. The third one ends the job, and says so to whoever is on call.
    assert is_requeued_after_a_stop("no_checkpoint")
    assert is_requeued_after_a_stop("no_checkpoint")
    assert not (tmp_path / "called").exists()
    assert not is_requeued_after_a_stop("no_checkpoint")
    assert (tmp_path / "called").read_text() == (
        "job 2 (book): it failed three times without progress, and ends. The newest checkpoint: work/step_40.pt. "
        "Nodes that failed: none none none (stopped before the first save; is --time too short?)\n"
    )

    # Somebody submits it again with more time, and it saves.
    assert is_requeued_after_a_stop("step_50.pt")


def test_only_a_new_submission_forgets_the_failures(tmp_path):
    run_batch(tmp_path, "exit 1")
    run_batch(tmp_path, "cp work/failures kept", SLURM_RESTART_COUNT="1")
    assert (tmp_path / "kept").exists()
    run_batch(tmp_path, "cp work/failures forgotten || true", SLURM_RESTART_COUNT="0")
    assert not (tmp_path / "forgotten").exists()


def test_a_node_that_failed_twice_is_excluded(tmp_path):
    _, first = run_batch(tmp_path, "exit 1")
    assert "ExcNodeList" not in first
    _, second = run_batch(tmp_path, "exit 1")
    assert "update JobId=2 ExcNodeList=n7,n2\n" in second
    assert "n2 failed 2 times, and is excluded." in second
    assert (tmp_path / "called").read_text().startswith("job 2 (book): n2 failed 2 times, and is excluded.")

    for node in ("n1", "n2"):
        _, text = run_batch(tmp_path, "exit 1", SLURMD_NODENAME=node, JOB_FOLDER="another")
        assert "requeued" in text
        assert "ExcNodeList" not in text, "each of the two nodes failed once"


def test_a_node_that_slurm_does_not_exclude_is_not_called_excluded(tmp_path, monkeypatch):
    fails = STAND_INS["scontrol"].replace('update) echo "$*" ;;', "update) exit 1 ;;")
    monkeypatch.setitem(STAND_INS, "scontrol", fails)
    for _ in range(2):
        run_batch(tmp_path, "echo out of memory; exit 1")
    said = (tmp_path / "called").read_text()
    assert said == "job 2 (book): n2 failed 2 times, and could not be excluded. Its last words: out of memory\n"


def test_a_job_that_ends_after_its_last_start_excludes_no_node(tmp_path):
    for start in (99, 100):
        _, text = run_batch(tmp_path, "exit 1", SLURM_RESTART_COUNT=str(start))
    assert "it was started 100 times, and ends." in text
    assert "ExcNodeList" not in text


def test_progress_does_not_excuse_a_node_that_fails_again_and_again(tmp_path):
    """A job that saves each hour makes progress between two failures of a GPU that fails every three hours."""
    excluded = []
    for start, node in enumerate(["n2", "n1", "n2"]):
        script = f"touch work/step_{start:08}.pt; exit 1"
        _, text = run_batch(tmp_path, script, SLURMD_NODENAME=node)
        assert "requeued" in text
        excluded.append("update JobId=2 ExcNodeList=n7,n2\n" in text)
    assert excluded == [False, False, True]


def test_of_nodes_that_fail_together_none_is_excluded(tmp_path):
    """If the network between the nodes is slow, each of them fails the check by itself."""
    both = "echo n1 >> work/failed_nodes; exit 1"  # and n2 is added
    for _ in range(2):
        _, text = run_batch(tmp_path, both)
        assert "requeued" in text
        assert "ExcNodeList" not in text
    _, text = run_batch(tmp_path, both)
    assert "requeued" not in text
    assert "Nodes that failed: n1,n2 n1,n2 n1,n2 \n" in text, "and n1 has not said anything"


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_that_is_switched_off_does_not_come_back(tmp_path, status):
    """The trainer has seen the file STOP, has saved, and has left the file `stopped` behind."""
    ended, text = run_batch(tmp_path, f"touch work/STOP work/stopped; exit {status}")
    assert ended == status
    assert "requeued" not in text
    assert (tmp_path / "called").read_text().startswith("job 2 (book): it ends, because there is a file work/STOP. ")

    ended, text = run_batch(tmp_path, "")  # another job of the queue
    assert ended == 0
    assert "torchrun" not in text


# What PyTorch writes when an access of a kernel was illegal, or the GPU is broken.
CUDA_ERROR = """\
torch.AcceleratorError: CUDA error: unspecified launch failure
Search for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""

# The same, when the watchdog of NCCL is the first to see it. It ends the process, and torchrun has asked Python to say
# then where each thread was.
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
FRAMES = """
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7ef4bb3161b6 in /lib/torch/lib/libc10.so)
frame #1: c10::detail::torchCheckFail(char const*, char const*, unsigned int, std::string const&) + 0x64
frame #6: <unknown function> + 0x126850 (0x7fc967d26850 in /lib/x86_64-linux-gnu/libc.so.6)

"""
ABORTED = """\
Fatal Python error: Aborted

Thread 0x00007f49a4892b80 (most recent call first):
  File "/lib/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 384 in wrapper
  File "/work/trainer.py", line 3200 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C, torch._C._errors (total: 25)
"""
AFTER_TYPE = CUDA_ERROR.removeprefix("torch.AcceleratorError: ") + FRAMES
WATCHDOG_ENDS = f"""\
[rank1]:[E410 01:50:33.889423318 ProcessGroupNCCL.cpp:1895] {WATCHDOG}{AFTER_TYPE}\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {WATCHDOG}{AFTER_TYPE}\
{ABORTED}"""

LAST_LINES = """\
mkdir -p work/logs/n2/2/attempt_0/3
cat > work/logs/n2/2/attempt_0/3/stderr.log <<< "$LINES"
echo "E1129 api.py:1010] failed (exitcode: 1) local_rank: 3 (pid: 4711) of binary: python"
exit 1
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("KeyError: 'label'\n[rank3]:[W1129] Warning: destroy_process_group() was not called", "KeyError: 'label'"),
        ("CUDA error: an illegal memory access\nframe #1: 0x7f", "CUDA error: an illegal memory access"),
        ("Killed", "Killed"),
        ("", "nothing"),
        ("[W1130 01:32:40.59 socket.cpp:207] [c10d] The hostname cannot be retrieved. err=-3", "nothing"),
        (CUDA_ERROR, "torch.AcceleratorError: CUDA error: unspecified launch failure"),
        (re.sub("(?m)^", "[rank1]: ", CUDA_ERROR), f"[rank1]: {CUDA_ERROR.splitlines()[0]}"),
        (WATCHDOG_ENDS, f"what():  {WATCHDOG}CUDA error: unspecified launch failure"),
        (f"double free or corruption (out)\n{ABORTED}", "double free or corruption (out)"),
        ("KeyError: 'label'\n" + "100%|=====>|\r" * 1000, "KeyError: 'label'"),
    ],
)
def test_the_message_about_a_node_has_the_last_words_of_its_rank(tmp_path, lines, words):
    """An error of one's own data that only this rank meets looks like a broken node until a person reads it."""
    for _ in range(2):
        run_batch(tmp_path, LAST_LINES, LINES=lines)
    said = (tmp_path / "called").read_text()
    assert f"is excluded. Its last words: {words} (exitcode: 1) local_rank: 3. To take it back: scontrol " in said


# A flag that argparse does not know. Each node says so; run_batch runs only one of the two.
WRONG_FLAG = LAST_LINES.replace("exitcode: 1", "exitcode: 2")
ALSO_ON_N1 = """
mkdir -p work/logs/n1
echo "train.py: error: no flag --epoch (exitcode: 2) local_rank: 0" > work/logs/n1/last_words
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'model.toml has no width' > work/gave_up; exit 1", "model.toml has no width"),
        (ALSO_ON_N1 + WRONG_FLAG, "train.py: error: no flag --epoch (exitcode: 2) local_rank"),
    ],
)
def test_a_job_that_no_start_can_help_ends_and_says_why(tmp_path, script, reason):
    status, text = run_batch(tmp_path, script, LINES="train.py: error: no flag --epoch")
    assert status == 1
    assert "requeued" not in text
    said = (tmp_path / "called").read_text()
    assert said.startswith(
        f"job 2 (book): it ends, because another start would probably fail in the same way: {reason}"
    )

    status, text = run_batch(tmp_path, "exit 1")
    assert "requeued" in text, "the file was of the start before"


def test_a_node_that_does_not_see_the_script_does_not_end_the_job(tmp_path):
    """Python ends with the same status as for a wrong flag. Here JOB_FOLDER is on a disk that the node does see."""
    run_batch(tmp_path, ALSO_ON_N1)  # in an earlier start
    for is_excluded in (False, True):
        _, text = run_batch(tmp_path, WRONG_FLAG, LINES="python: can't open file '/home/me/train.py'")
        assert "requeued" in text
        assert ("ExcNodeList=n7,n2" in text) == is_excluded


def test_a_node_that_does_not_see_the_jobs_folder_says_so_and_makes_none(tmp_path, monkeypatch):
    """Slurm starts it in another folder then. What it wrote there would not be found."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setitem(STAND_INS, "srun", "cd elsewhere\n" + STAND_INS["srun"])
    _, text = run_batch(tmp_path, "exit 1")
    assert f"n2 is in {tmp_path}/elsewhere and does not see the job's folder work.\n" in text
    assert "torchrun" not in text
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "requeued" in text


def time_after(seconds):
    """So many seconds from now, as squeue prints the end of a job."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


@pytest.mark.parametrize(
    ("end", "line", "seconds_until"),
    [
        (3600, "", 3600 - 180 - 60),
        (3600, "#SBATCH --signal=USR1@300  # seconds", 3600 - 300 - 60),  # the reader's own number
        (200, "", None),  # a job that is so short trains until the signal
    ],
)
def test_ranks_that_start_after_the_signal_are_told_by_the_clock(tmp_path, end, line, seconds_until):
    (tmp_path / f"{NAME}.sbatch").write_text(f"{line}\n")
    before = time.time()
    _, text = run_batch(tmp_path, 'echo "stop at ($STOP_AT)"', END=time_after(end))
    [stop_at] = re.findall(r"stop at \((.*)\)", text)
    if seconds_until is None:
        assert stop_at == ""
    else:
        assert abs(int(stop_at) - before - seconds_until) < 30


def test_a_job_without_a_time_limit_has_no_last_minutes(tmp_path):
    assert "stop at ()" in run_batch(tmp_path, 'echo "stop at ($STOP_AT)"', END="N/A")[1]


def test_a_job_takes_no_time_from_the_job_that_submits_it(tmp_path):
    """sbatch copies the environment. The time of the other job is over, so this one would stop at once, every time."""
    assert "stop at ()" in run_batch(tmp_path, 'echo "stop at ($STOP_AT)"', END="", STOP_AT="1")[1]


def test_a_job_that_a_rank_submits_does_not_take_this_jobs_folder(tmp_path):
    """sbatch copies the environment. The other job would train on from this one's checkpoints."""
    _, text = run_batch(tmp_path, "env")  # what a program sees that the ranks start
    assert "\nSTART=1\n" in text
    assert "\nJOB_FOLDER=" not in text


LOST_A_PEER = """\
mkdir -p work/logs/n2/2/attempt_0/3
echo "RuntimeError: Connection closed by peer [10.0.0.1]:4711" > work/logs/n2/2/attempt_0/3/stderr.log
echo "E1129 api.py:1010] failed (exitcode: 1) local_rank: 3 (pid: 4711) of binary: python"
exit 1
"""


@pytest.mark.parametrize(
    "last_words",
    [
        "closed by peer",
        "Watchdog caught collective operation timeout: WorkNCCL(",
        "[TC][rank=1][name=0] Operation timed out after 600012 ms",
        "Timed out waiting 600000ms for recv operation to complete",
    ],
)
def test_a_node_that_only_lost_a_peer_is_not_to_blame(tmp_path, last_words):
    for _ in range(2):
        _, text = run_batch(tmp_path, LOST_A_PEER.replace("closed by peer", last_words))
        assert "requeued" in text
        assert "ExcNodeList" not in text
    assert not (tmp_path / "work/failed_nodes").exists()
    _, text = run_batch(tmp_path, LOST_A_PEER.replace("closed by peer", "is a word of the reader's"))
    assert (tmp_path / "work/failed_nodes").read_text() == "n2\n"
    assert "requeued" not in text, "the third failure"


def test_the_rank_that_lost_a_peer_is_found_behind_the_stack_of_a_long_abort(tmp_path):
    stack = "".join(f'  File "/lib/torch/utils/data.py", line {line} in get\n' for line in range(300))
    lines = f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\n{FRAMES}{ABORTED}{stack}"
    run_batch(tmp_path, LAST_LINES, LINES=lines)
    assert not (tmp_path / "work/failed_nodes").exists()


@pytest.mark.parametrize(
    ("error", "to_blame"),
    [
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", False),
        ("RendezvousConnectionError: The connection to the C10d store has failed.", False),
        ("bash: line 9: torchrun: command not found", True),
    ],
)
def test_a_node_whose_torchrun_only_waited_for_another_is_not_to_blame(tmp_path, error, to_blame):
    """No rank has failed then. A hung mount on n2 makes torchrun on n1 wait until its timeout, and end first."""
    for _ in range(3):
        _, text = run_batch(tmp_path, f'echo "{error}"; exit 1')
        assert (tmp_path / "work/failed_nodes").exists() == to_blame
    assert "requeued" not in text
    nodes = "none none none"
    if to_blame:
        nodes = "n2 n2 n2"
    assert f"Nodes that failed: {nodes} ({error})\n" in text


@pytest.mark.parametrize(
    ("status", "last_line", "to_blame"),
    [
        (1, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", False),
        (1, "[...].api.RendezvousConnectionError: The connection to the C10d store has failed. See inner [...]", False),
        (1, "=" * 60, True),  # the end of torchrun's report on a rank
        (2, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", True),  # the script has a wrong flag
    ],
)
def test_a_failure_of_hours_ago_does_not_blame_the_node_that_loses_the_others_now(
    tmp_path, status, last_line, to_blame
):
    earlier = LAST_LINES.replace("exitcode: 1", f"exitcode: {status}").replace("exit 1", f'echo "{last_line}"; exit 1')
    run_batch(tmp_path, earlier, LINES="KeyError: 'label'")
    assert (tmp_path / "work/failed_nodes").exists() == to_blame
    said = (tmp_path / "work/logs/n2/last_words").read_text()
    if to_blame:
        assert said == f"KeyError: 'label' (exitcode: {status}) local_rank: 3\n"
    else:
        assert said == f"{last_line}\n"


def test_if_no_node_is_to_blame_the_message_has_the_words_of_the_first(tmp_path):
    for _ in range(3):
        run_batch(tmp_path, 'mkdir -p work/logs/n1; echo "A peer is gone" > work/logs/n1/last_words; ' + LOST_A_PEER)
    said = (tmp_path / "called").read_text()
    assert said.endswith("Nodes that failed: none none none (A peer is gone)\n")


def test_a_node_is_noted_before_its_words_are_read(tmp_path):
    """srun ends this shell when the others leave, after 5 seconds, and a slow disk may take longer."""
    functions = files()[".slurm.sh"] + 'last_words() { cp "$JOB_FOLDER/failed_nodes" noted; }\n'
    run_batch(tmp_path, "exit 1", files()[".sbatch"].replace(f"source ./{NAME}.slurm.sh || exit", functions))
    assert (tmp_path / "noted").read_text() == "n2\n"


def test_whoever_is_on_duty_hears_only_of_what_needs_a_person(tmp_path):
    """The command gets one line, on what happened. If it fails, or there is none, the job's end is the same."""

    def heard(script, text=None, **variables):
        (tmp_path / "called").unlink(missing_ok=True)
        run_batch(tmp_path, script, text, **variables)
        if not (tmp_path / "called").exists():
            return ""
        return (tmp_path / "called").read_text()

    fails = "echo out of memory; exit 1"
    assert heard("exit 0") == heard("touch another/stopped another/step_10.pt", JOB_FOLDER="another") == ""
    assert heard(fails) == ""
    heard(fails)
    assert heard(fails) == (
        "job 2 (book): it failed three times without progress, and ends. "
        "The newest checkpoint: nothing. Nodes that failed: n2 n2 n2 (out of memory)\n"
    )
    last = heard("touch third/stopped third/step_10.pt", JOB_FOLDER="third", SLURM_RESTART_COUNT="100")
    assert last == "job 2 (book): it was started 100 times, and ends.\n"

    (tmp_path / f"{NAME}.slurm.sh").write_text("")
    plain = files(PLAIN)
    text = plain[".sbatch"].replace(f"source ./{NAME}.slurm.sh || exit", plain[".slurm.sh"])
    assert heard("exit 7", text) == "job 2 (book): it ended with status 7. The first node to fail: n2\n"

    for command in ("", "false"):
        status, text = run_batch(tmp_path, "exit 1", ON_CALL=command)
        assert status == 1
        assert text.endswith("\nON_CALL failed: false\n") == (command == "false")


@pytest.mark.system(missing=lambda: None if shutil.which("shellcheck") else "no shellcheck on this machine")
@pytest.mark.parametrize("script", [STOPS, RESUMES, PLAIN])
def test_shellcheck_finds_nothing(script, tmp_path):
    for suffix, text in files(script).items():
        if not suffix.endswith((".yaml", ".py")):
            (tmp_path / f"{NAME}{suffix}").write_text(text)
    shellcheck = ["shellcheck", "--external-sources", "--severity=warning", *tmp_path.iterdir()]
    done = subprocess.run(shellcheck, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("found", [0, 1])
def test_without_an_address_of_each_node_the_job_ends_and_says_so(tmp_path, monkeypatch, found):
    """With one too few, a node would take the address of another."""
    addresses = 'printf "NodeName=n NodeAddr=10.0.0.%s Port=1\\n"'
    monkeypatch.setitem(STAND_INS, "scontrol", f"echo >> tries; {addresses} 1 | head -n {found}")
    status, text = run_batch(tmp_path, "")
    assert status == 1
    assert "torchrun" not in text
    assert (tmp_path / "tries").read_text() == "\n" * 3
    assert (tmp_path / "called").read_text() == (
        f"job 2 (book): it ends, because scontrol show node gives {found} addresses for 2 nodes. Submit it again.\n"
    )


def test_slurm_may_say_the_nodes_addresses_only_when_it_is_asked_again(tmp_path, monkeypatch):
    fails_twice = 'echo >> tries; [ "$(wc -l < tries)" -gt 2 ] || exit 1\n'
    monkeypatch.setitem(STAND_INS, "scontrol", fails_twice + STAND_INS["scontrol"])
    status, text = run_batch(tmp_path, "")
    assert status == 0
    assert "--rdzv-endpoint=10.0.0.1:20002 --rdzv-id=2.1 --local-addr=10.0.0.2 " in text


def test_after_a_preflight_that_fails_nothing_is_trained(tmp_path):
    status, text = run_batch(tmp_path, "exit 3", PREFLIGHT="check.py")
    assert status == 3
    assert text.count("\ntorchrun ") == 1
    assert "requeued" in text, "on other nodes it may pass"


def test_each_node_has_its_address_and_its_network_and_the_preflight_runs_first(tmp_path):
    report = 'echo "gloo takes ($GLOO_SOCKET_IFNAME)"'
    _, text = run_batch(tmp_path, report, PREFLIGHT="-m helpers doctor")
    first, second = re.findall(r"^torchrun .*", text, re.MULTILINE)
    assert "--max-restarts=0 --rdzv-id=preflight.2.1 " in first
    assert first.endswith(" -m helpers doctor")
    assert f" {NAME}.py " in second
    for words in ("--rdzv-endpoint=10.0.0.1:20002 ", "--local-addr=10.0.0.2 ", " --rdzv-conf=is_host=0,"):
        assert words in first
        assert words in second
    assert text.count("gloo takes (ib7)") == 2
    assert "gloo takes (eth0)" in run_batch(tmp_path, report, GLOO_SOCKET_IFNAME="eth0")[1], "as the reader says"


def test_a_container_without_ip_leaves_the_network_to_gloo_and_says_so(tmp_path, monkeypatch, capfd):
    """An empty name would not help gloo, and would look like a choice."""
    monkeypatch.setitem(STAND_INS, "ip", "exit 127")
    report = 'echo "gloo takes (${GLOO_SOCKET_IFNAME-what it finds})"'
    message = "n2 cannot ask ip which network leads to 10.0.0.1. Set GLOO_SOCKET_IFNAME in the batch file.\n"
    assert "gloo takes (what it finds)" in run_batch(tmp_path, report)[1]
    assert message in capfd.readouterr().err
    assert "gloo takes (eth0)" in run_batch(tmp_path, report, GLOO_SOCKET_IFNAME="eth0")[1]
    assert message not in capfd.readouterr().err


def test_a_container_and_a_binding(tmp_path):
    lines = [line for line in files()[".sbatch"].splitlines() if "pyxis" not in line]
    text = re.sub(r"^# (IN_CONTAINER|NUMA_BINDING)", r"\1", "\n".join(lines), flags=re.MULTILINE)
    _, out = run_batch(tmp_path, "", text)
    assert re.search(rf"^in a container\ntorchrun .* --numa-binding=node {NAME}.py ", out, re.MULTILINE), out


# --- for Kubernetes ---------------------------------------------------------------------------------------------------


def documents(text):
    """(the Service, the Job, the Job's pod, the pod's container) of a file for Kubernetes."""
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    return service, job, pod, pod["containers"][0]


def test_pods_are_found_by_their_number_before_they_are_ready():
    """A pod is reached as JOB-INDEX.SUBDOMAIN where a headless Service with the subdomain's name selects it."""
    service, job, pod, container = documents(files(nodes=3)[".k8s.yaml"])
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] == name
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": 32}}


def test_a_pod_has_more_time_to_stop_than_its_ranks():
    _, _, pod, container = documents(files()[".k8s.yaml"])
    shutdown_timeout = int(re.search(r"--shutdown-timeout=(\d+)", container["command"][2])[1])
    assert shutdown_timeout < pod["terminationGracePeriodSeconds"]


def test_what_a_cluster_may_need_is_valid_without_its_comment_sign():
    text = re.sub(r"^( +)# (?=[\w/]+: )", r"\1", files()[".k8s.yaml"], flags=re.MULTILINE)
    _, job, pod, container = documents(text)
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "QUEUE"}
    assert pod["schedulerName"] == "volcano"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["resources"]["limits"]["rdma/NAME"] == 1
    assert container["resources"]["requests"]["memory"] == "512Gi"


def test_names_for_kubernetes():
    for name, expected in (("04_net", "net"), ("My.Net_2", "my-net-2"), ("10", "training"), ("a" * 70, "a" * 40)):
        assert kubernetes_name(name) == expected


# --- on two hosts -----------------------------------------------------------------------------------------------------

REPORT = """\
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_gather_object([None] * 4, "")
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"]
line = " ".join(["here", *map(os.environ.get, names), *sys.argv[1:]]) + "\\n"
os.write(1, line.encode())  # one write
dist.destroy_process_group()
"""

STOPPED = """\
import os, pathlib, signal, sys, time

def stop(number, frame):
    time.sleep(1)  # a save
    pathlib.Path("/mnt/work/stopped").touch()
    sys.exit()

signal.signal(signal.SIGUSR1, stop)
pathlib.Path("/mnt/work/ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


def on_both(pair, folder, commands, variables=None, meanwhile=lambda processes: None):
    """Run a command on each of two hosts, with these environment variables; return [(output, status)]."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(variables or {})}
    environment.pop("GLOO_SOCKET_IFNAME", None)  # an earlier test may have set it to the loopback interface
    options = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [
        host.start(command, env={**environment, "JOB_COMPLETION_INDEX": str(index)}, **options)
        for index, (host, command) in enumerate(zip(pair, commands, strict=True))
    ]
    meanwhile(processes)
    return [(process.communicate(timeout=240)[0], process.returncode) for process in processes]


@pytest.mark.system(missing=hosts.missing)
@pytest.mark.timeout(600)
def test_the_plain_lines_on_two_hosts(tmp_path):
    (tmp_path / f"{NAME}.nodes.sh").write_text(files(gpus_per_node=2)[".nodes.sh"])
    (tmp_path / f"{NAME}.py").write_text(REPORT)
    usage = subprocess.run(["bash", f"{NAME}.nodes.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert usage.returncode == 2 and usage.stderr.count(f"bash {NAME}.nodes.sh") == 2
    own = [{**hosts.ADDRESSES, name: "127.0.1.1"} for name in hosts.ADDRESSES]  # as Debian has it
    with unchanged(), hosts.two_hosts(*own) as pair:
        [(text, status), _] = on_both(pair, tmp_path, [["bash", f"{NAME}.nodes.sh", "c10d", "node0", "0"], ["true"]])
        assert (text, status) == ("node0 means 127.0.1.1 on this node. Give the address of node 0.\n", 2)
        for how in ("static", "c10d"):
            line = ["bash", f"{NAME}.nodes.sh", how, hosts.ADDRESSES["node0"]]
            done = on_both(pair, tmp_path, [[*line, str(node), "--epochs", "2"] for node in (0, 1)])
            assert [status for _, status in done] == [0, 0], done
            ranks = re.findall(r"here (\d) (\d) 4 2 --epochs 2", done[0][0] + done[1][0])
            assert sorted(ranks) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], done


@pytest.mark.daily
@pytest.mark.system(missing=hosts.missing)
@pytest.mark.timeout(600)
def test_the_pods_command_on_two_hosts(tmp_path):
    """The container's command runs, with the variables, names and folder that Kubernetes would give it."""
    script = tmp_path / "script"
    work = tmp_path / "work"
    work.mkdir()
    assert main(["export", "11", "--slurm", "--gpus-per-node=1", f"--out={script}"]) == 0
    _, job, _, container = documents((script / f"{NAME}.k8s.yaml").read_text())
    *shell, text = container["command"]
    command = [*shell, text.replace("--backend nccl", "--backend gloo")]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    job_name = job["metadata"]["name"]
    names = {}
    for index, address in enumerate(hosts.ADDRESSES.values()):
        names[f"{job_name}-{index}"] = address
        names[f"{job_name}-{index}.{job_name}"] = address

    def stop_pods(processes):
        assert wait_until(lambda: len(list(work.glob("ready*"))) == 2)
        for process in processes:
            psutil.Process(process.pid).children()[0].terminate()  # the shell, as Kubernetes does

    with unchanged(), hosts.two_hosts(names, names) as pair:
        for host in pair:
            host.run("sh", "-c", f"mount --bind '{tmp_path}' /mnt")
        done = on_both(pair, tmp_path, [command] * 2, variables)
        assert [status for _, status in done] == [0, 0], done
        assert 'result {"world_size": 2, "step": 90, ' in done[0][0] + done[1][0]
        assert (work / "step_00000090.pt").is_file()

        # Where a run was told to stop, a pod fails, so that Kubernetes starts it again.
        (script / f"{NAME}.py").write_text(STOPPED)
        done = on_both(pair, tmp_path, [command] * 2, variables, stop_pods)
        assert [status for _, status in done] == [1, 1]
        assert (work / "stopped").exists(), done
