"""The files that `python -m helpers export --slurm` writes, without a Slurm and without Kubernetes."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
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

NAME, PREFLIGHT = find_notebook("11").stem, preflight()

# Scripts for which launch files are written. Of a script's text, only these parts count: they say what it can do.
PLAIN_SCRIPT = 'parser.add_argument("--checkpoint-dir")\n'  # without --resume, it cannot go on from a checkpoint
RESUMABLE_SCRIPT = PLAIN_SCRIPT + 'parser.add_argument("--resume")\n'
STOPPABLE_SCRIPT = RESUMABLE_SCRIPT + "with StopRequest() as stop:\n"  # at a signal, it also saves and stops
BACKEND_FLAG = 'parser.add_argument("--backend", choices=["nccl", "gloo"])\n'


def texts_of_files(script=STOPPABLE_SCRIPT, name=NAME, **sizes):
    """The texts of the files that start a script on a cluster, by the ends of their names: ``{".sbatch": "#!/bin/…"}``.

    ``script`` is the script's text, and ``name`` its name. ``sizes`` are the fields of Allocation, such as ``nodes=3``.
    """
    texts = {}
    for file, text in launch_files(name, script, Allocation(**sizes), PREFLIGHT).items():
        suffix = file.removeprefix(name)
        texts[suffix] = text
    return texts


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_what_the_flags_ask_for(helpers, tmp_path):
    status, _, _ = helpers("export", "11", "--nodes=3", "--gpus-per-node=4", "--time=1-00:00:00", "--out", tmp_path)
    assert status == 0
    batch_file = (tmp_path / f"{NAME}.sbatch").read_text()

    expected = texts_of_files(BACKEND_FLAG + STOPPABLE_SCRIPT, nodes=3, gpus_per_node=4, time="1-00:00:00")
    assert batch_file == expected[".sbatch"]
    for option in ("--nodes=3", "--gpus-per-node=4", "--cpus-per-task=16", "--time=1-00:00:00"):
        assert f"#SBATCH {option}\n" in batch_file


def test_the_files_of_every_chapter_can_be_read(helpers, tmp_path):
    """bash can read the files for Slurm and for plain nodes, and a YAML parser those for Kubernetes."""
    status, _, _ = helpers("export", "--all", "--slurm", "--out", tmp_path)
    assert status == 0

    scripts = [path for path in tmp_path.glob("*.py") if path.name != ALERT]
    assert len(scripts) > 5
    for script in scripts:
        for suffix in (".sbatch", ".slurm.sh", ".nodes.sh"):
            only_read_it = ["bash", "-n", script.with_suffix(suffix)]
            subprocess.run(only_read_it, check=True)
        service, job = yaml.safe_load_all(script.with_suffix(".k8s.yaml").read_text())
        assert service["kind"] == "Service"
        assert job["kind"] == "Job"


def test_a_job_that_saves_gets_the_script_that_watches_it():
    assert texts_of_files(RESUMABLE_SCRIPT)[ALERT] == (TEMPLATES / ALERT).read_text()
    assert ALERT not in texts_of_files(PLAIN_SCRIPT)


def test_a_name_that_a_shell_would_split_is_refused():
    with pytest.raises(ExportError, match="'my notebook'.*\nRename it"):
        texts_of_files(name="my notebook")


def test_a_name_that_begins_with_a_dash_is_no_option(tmp_path):
    """The lines call a script with the name -rf ``./-rf.py``, because a program would take ``-rf.py`` for an option."""
    texts = texts_of_files(name="-rf")
    assert "sbatch ./-rf.sbatch" in texts[".sbatch"]
    assert "bash ./-rf.nodes.sh static" in texts[".nodes.sh"]
    assert "-f ./-rf.k8s.yaml" in texts[".k8s.yaml"]

    (tmp_path / "-rf.slurm.sh").write_text(texts[".slurm.sh"])
    run = run_batch(tmp_path, training="", batch_file=texts[".sbatch"], JOB_FOLDER="", SLURM_JOB_NAME="rf")
    assert run.status == 0
    assert re.search(r"^torchrun .* \./-rf\.py --checkpoint-dir rf-2 ", run.output, re.MULTILINE)


@pytest.mark.parametrize(("suffix", "lines_with_the_script"), [(".sbatch", 1), (".nodes.sh", 2), (".k8s.yaml", 1)])
def test_a_script_with_a_flag_for_the_backend_is_told_to_take_the_gpus(suffix, lines_with_the_script):
    """So a node without GPUs fails and does not train on its CPU. A reader's own flag comes later, and wins."""
    with_the_flag = texts_of_files(STOPPABLE_SCRIPT + BACKEND_FLAG)[suffix]
    without_it = texts_of_files(STOPPABLE_SCRIPT)[suffix]
    assert with_the_flag.count(f"{NAME}.py --backend nccl") == lines_with_the_script
    assert "--backend" not in without_it


# --- for Slurm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "can_stop", "can_resume"),
    [
        pytest.param(STOPPABLE_SCRIPT, True, True, id="stoppable"),
        pytest.param(RESUMABLE_SCRIPT, False, True, id="resumable"),
        pytest.param(PLAIN_SCRIPT, False, False, id="plain"),
    ],
)
def test_what_a_script_can_do_decides_what_slurm_does(script, can_stop, can_resume):
    """Slurm signals only a script that can stop at a signal, and starts only one again that can resume."""
    texts = texts_of_files(script)
    text = texts[".sbatch"] + texts[".slurm.sh"]
    for part in ("--signal=", 'trap "" USR1', "--signals-to-handle=", '-e "$JOB_FOLDER/stopped"'):
        assert (part in text) == can_stop, part
    for part in ("#SBATCH --requeue", "scontrol requeue", '--checkpoint-dir "$JOB_FOLDER" --resume'):
        assert (part in text) == can_resume, part
    assert ("#SBATCH --no-requeue" in text) == (not can_resume)


def test_the_lines_for_a_cluster_work_without_their_comment_sign():
    """The batch file has a block of lines for a reader to complete, such as ``# #SBATCH --account=ACCOUNT``.

    Without the first ``# ``, they are valid bash. Slurm reads its options, the lines that begin with #SBATCH, only
    before the first command, so in this block and after it none may come behind a command.
    """
    # The block is between two lines that begin with "# ----".
    before, block, after = re.split(r"^# ----.*\n", texts_of_files()[".sbatch"], maxsplit=2, flags=re.MULTILINE)
    uncommented_block = re.sub("^# ", "", block, flags=re.MULTILINE)

    only_read_it = ["bash", "-n"]
    bash = subprocess.run(only_read_it, input=before + uncommented_block + after, text=True)
    assert bash.returncode == 0

    beginning_of_first_command = r"^(?!#SBATCH)"
    options, commands = re.split(beginning_of_first_command, uncommented_block, maxsplit=1, flags=re.MULTILINE)
    assert "--account=" in options
    assert "#SBATCH" not in commands + after


SHOW_NODES = 'printf "NodeName=n NodeAddr=10.0.0.%s Port=1\\n" 1 2'


def scontrol(requeue="echo requeued", update='echo "$*"', show_nodes=SHOW_NODES):
    """A stand-in for Slurm's scontrol, as a line of bash for each of the subcommands that the batch file uses."""
    return f"""case "$1" in
        requeue) {requeue} ;;
        update) {update} ;;
        *) {show_nodes} ;;
        esac"""


# Bash that is executed in place of Slurm's commands, and of others that the batch file calls:
# - squeue prints which nodes are excluded already (%x), or when the job's time is over (%e).
# - srun executes its command on one node only: the second of the two, n2.
# - ip and getent say that the network interface ib7 leads to the first node.
# - torchrun prints its arguments. Then it executes the file training.sh in place of the script that it is given.
STAND_INS = {
    "scontrol": scontrol(),
    "srun": 'while [ "$1" != bash ] && [ "$1" != apptainer ]; do shift; done; exec "$@"',
    "squeue": """case "$*" in
        *%x) echo n7 ;;
        *%e) echo "$END" ;;
        esac""",
    "sleep": "",
    "apptainer": 'echo "in a container"; while [ "$1" != bash ]; do shift; done; exec "$@"',
    "getent": '[ "$2" = 10.0.0.1 ] && echo 10.0.0.1 STREAM',
    "ip": 'echo "$3 via 10.0.0.9 dev ib7 src 10.0.0.2"',
    "torchrun": 'echo "torchrun $*"; until [[ $1 = *.py || $1 = -m ]]; do shift; done; . ./training.sh',
}


@dataclass(frozen=True)
class BatchRun:
    """How a job's batch file ended."""

    status: int  # its exit status
    output: str  # what it and the stand-ins for Slurm's commands printed

    @property
    def is_requeued(self):
        """Whether it asked Slurm to start the job again: then the stand-in for scontrol prints "requeued"."""
        return "requeued" in self.output


def run_batch(folder, training, batch_file=None, **variables):
    """Run a job's batch file in a folder, with stand-ins for Slurm and torchrun. Returns a BatchRun.

    ``training`` is what is executed in place of the training script, as bash: ``"exit 1"`` for a rank that fails.
    ``batch_file`` is the batch file's text, if it is not the one for a script that can stop and resume. ``variables``
    are environment variables of the job, beside or in place of those that are set here.

    The job writes its checkpoints and logs to the subfolder ``work``, and what it has to say to a person to the file
    ``called``, which ``on_call_message`` reads.
    """
    for name, line in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    (folder / "training.sh").write_text(training)
    texts = texts_of_files()
    (folder / f"{NAME}.slurm.sh").write_text(texts[".slurm.sh"])
    if batch_file is None:
        batch_file = texts[".sbatch"]

    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "JOB_FOLDER": "work",
        "ON_CALL": "cat > called",
        "SLURM_JOB_NAME": "book",
        "SLURM_JOB_ID": "2",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NODEID": "1",
        "SLURMD_NODENAME": "n2",
    }
    environment.update(variables)
    command = ["bash", "-c", batch_file, f"{NAME}.sbatch"]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    return BatchRun(done.returncode, done.stdout)


def on_call_message(folder):
    """The last message of the jobs that ``run_batch`` ran in a folder to whoever is on call; "" if there is none."""
    path = folder / "called"
    if not path.exists():
        return ""
    return path.read_text()


SAVES_AND_STOPS = "touch work/stopped work/step_10.pt"  # as a training script does at a signal


@pytest.mark.parametrize(
    ("training", "restarts", "status", "is_requeued"),
    [
        pytest.param(SAVES_AND_STOPS, 0, 0, True, id="stop"),
        pytest.param(SAVES_AND_STOPS, 100, 0, False, id="stop after a hundred restarts, which is the limit"),
        pytest.param("exit 1", 0, 1, True, id="failure"),
        pytest.param("exit 0", 0, 0, False, id="end"),
    ],
)
def test_a_job_starts_again_after_a_stop_and_after_a_failure(tmp_path, training, restarts, status, is_requeued):
    run = run_batch(tmp_path, training, SLURM_RESTART_COUNT=str(restarts))
    assert run.status == status
    assert run.is_requeued == is_requeued, run.output


@pytest.mark.parametrize("training", [SAVES_AND_STOPS, "exit 1"], ids=["stop", "failure"])
def test_a_requeue_that_fails_three_times_ends_the_job_and_calls_a_person(tmp_path, monkeypatch, training):
    """Without the message, a job that saved and stopped would end with status 0, and nobody would hear of it."""
    monkeypatch.setitem(STAND_INS, "scontrol", scontrol(requeue="echo >> tries; exit 1"))
    run = run_batch(tmp_path, training)
    assert (tmp_path / "tries").read_text() == "\n" * 3
    assert run.status == 1
    assert on_call_message(tmp_path) == (
        "job 2 (book): it should start again, but scontrol requeue failed three times, so it ends. "
        f"Submit it again with the same flags: JOB_FOLDER=work sbatch {NAME}.sbatch\n"
    )


@pytest.mark.parametrize(
    ("training", "status"), [pytest.param(SAVES_AND_STOPS, 0, id="stop"), pytest.param("exit 1", 1, id="failure")]
)
def test_a_requeue_that_fails_twice_is_tried_a_third_time(tmp_path, monkeypatch, training, status):
    fails_twice = 'echo >> tries; [ "$(wc -l < tries)" -gt 2 ] && echo requeued'
    monkeypatch.setitem(STAND_INS, "scontrol", scontrol(requeue=fails_twice))
    run = run_batch(tmp_path, training)
    assert (tmp_path / "tries").read_text() == "\n" * 3
    assert run.status == status
    assert run.is_requeued
    assert on_call_message(tmp_path) == ""


def test_a_third_failure_at_the_same_checkpoint_ends_the_job(tmp_path):
    """A bug would fail for ever. A failure after a newer checkpoint is another one."""

    def is_requeued_after_a_failure(written_file):
        """Whether the job starts again after a start that writes this file and fails."""
        run = run_batch(tmp_path, f"touch work/{written_file}; exit 1")
        return run.is_requeued

    # Three failures before the first checkpoint.
    assert is_requeued_after_a_failure("no_checkpoint")
    assert is_requeued_after_a_failure("no_checkpoint")
    assert not is_requeued_after_a_failure("no_checkpoint")

    # After each new checkpoint, two failures are tolerated.
    for checkpoint in ("step_00000010.pt", "step_00000020.pt"):
        assert is_requeued_after_a_failure(checkpoint)
        assert is_requeued_after_a_failure("no_checkpoint")

    # The third one ends the job also if half a checkpoint was written.
    assert not is_requeued_after_a_failure("step_30.tmp")


def test_three_stops_before_the_first_save_end_the_job(tmp_path):
    """With a time that is too short, all starts would end before their first step, and nobody would hear of it."""

    def is_requeued_after_a_stop(written_file):
        """Whether Slurm is asked to start the job again after a start that was told to stop, and wrote this file."""
        run = run_batch(tmp_path, f"touch work/stopped work/{written_file}")
        assert run.is_requeued == (run.status == 0)
        return run.is_requeued

    # Each start saves before it stops, so the job goes on as often as it likes.
    for step in (10, 20, 30, 40):
        assert is_requeued_after_a_stop(f"step_{step}.pt")
    assert not (tmp_path / "work/failures").exists()

    # Two starts that save nothing are tolerated. The third one ends the job, and says so to whoever is on call.
    assert is_requeued_after_a_stop("no_checkpoint")
    assert is_requeued_after_a_stop("no_checkpoint")
    assert on_call_message(tmp_path) == ""
    assert not is_requeued_after_a_stop("no_checkpoint")
    assert on_call_message(tmp_path) == (
        "job 2 (book): it failed three times without progress, and ends. The newest checkpoint: work/step_40.pt. "
        "Nodes that failed: none none none (stopped before the first save; is --time too short?)\n"
    )

    # Somebody submits it again with more time, and it saves.
    assert is_requeued_after_a_stop("step_50.pt")


def test_only_a_new_submission_forgets_the_failures(tmp_path):
    run_batch(tmp_path, "exit 1")
    run_batch(tmp_path, "cp work/failures copy_at_a_restart", SLURM_RESTART_COUNT="1")
    assert (tmp_path / "copy_at_a_restart").exists()
    run_batch(tmp_path, "cp work/failures copy_at_a_submission || true", SLURM_RESTART_COUNT="0")
    assert not (tmp_path / "copy_at_a_submission").exists()


def test_a_node_that_failed_twice_is_excluded(tmp_path):
    first_run = run_batch(tmp_path, "exit 1")
    assert "ExcNodeList" not in first_run.output
    second_run = run_batch(tmp_path, "exit 1")
    assert "update JobId=2 ExcNodeList=n7,n2\n" in second_run.output
    assert "n2 failed 2 times, and is excluded." in second_run.output
    assert on_call_message(tmp_path).startswith("job 2 (book): n2 failed 2 times, and is excluded.")


def test_two_nodes_that_failed_once_each_are_not_excluded(tmp_path):
    for node in ("n1", "n2"):
        run = run_batch(tmp_path, "exit 1", SLURMD_NODENAME=node)
        assert run.is_requeued
        assert "ExcNodeList" not in run.output


def test_a_node_that_slurm_does_not_exclude_is_not_called_excluded(tmp_path, monkeypatch):
    monkeypatch.setitem(STAND_INS, "scontrol", scontrol(update="exit 1"))
    run_batch(tmp_path, "echo out of memory; exit 1")
    run_batch(tmp_path, "echo out of memory; exit 1")
    assert on_call_message(tmp_path) == (
        "job 2 (book): n2 failed 2 times, and could not be excluded. Its last words: out of memory\n"
    )


def test_a_job_that_ends_after_its_last_start_excludes_no_node(tmp_path):
    run_batch(tmp_path, "exit 1", SLURM_RESTART_COUNT="99")
    last_run = run_batch(tmp_path, "exit 1", SLURM_RESTART_COUNT="100")
    assert "it was started 100 times, and ends." in last_run.output
    assert "ExcNodeList" not in last_run.output


def test_progress_does_not_excuse_a_node_that_fails_again_and_again(tmp_path):
    """A job that saves each hour makes progress between two failures of a GPU that fails every three hours."""

    def is_excluded_after_a_failure(node, step):
        """Whether node n2 is excluded after a start in which ``node`` fails after a save at this step."""
        run = run_batch(tmp_path, f"touch work/step_{step:08}.pt; exit 1", SLURMD_NODENAME=node)
        assert run.is_requeued
        return "update JobId=2 ExcNodeList=n7,n2\n" in run.output

    assert not is_excluded_after_a_failure("n2", step=10)
    assert not is_excluded_after_a_failure("n1", step=20)
    assert is_excluded_after_a_failure("n2", step=30)


def test_of_nodes_that_fail_together_none_is_excluded(tmp_path):
    """If the network between the nodes is slow, each of them fails the check by itself."""
    both_nodes_fail = "echo n1 >> work/failed_nodes; exit 1"  # the batch file adds n2, on which it runs here
    for _ in range(2):
        run = run_batch(tmp_path, both_nodes_fail)
        assert run.is_requeued
        assert "ExcNodeList" not in run.output

    third_run = run_batch(tmp_path, both_nodes_fail)
    assert not third_run.is_requeued
    assert "Nodes that failed: n1,n2 n1,n2 n1,n2 \n" in third_run.output, "and n1 has not said anything"


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_that_is_switched_off_does_not_come_back(tmp_path, status):
    """The trainer has seen the file STOP, has saved, and has left the file `stopped` behind."""
    run = run_batch(tmp_path, f"touch work/STOP work/stopped; exit {status}")
    assert run.status == status
    assert not run.is_requeued
    assert on_call_message(tmp_path).startswith("job 2 (book): it ends, because there is a file work/STOP. ")

    another_job_of_the_queue = run_batch(tmp_path, training="")
    assert another_job_of_the_queue.status == 0
    assert "torchrun" not in another_job_of_the_queue.output


# What PyTorch writes when an access of a kernel was illegal, or the GPU is broken.
CUDA_ERROR = """\
torch.AcceleratorError: CUDA error: unspecified launch failure
Search for `cudaErrorLaunchFailure' in https://docs.nvidia.com/cuda/ for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""

# PyTorch prefixes each line with the rank if the process group has been started.
CUDA_ERROR_OF_RANK_1 = re.sub("^", "[rank1]: ", CUDA_ERROR, flags=re.MULTILINE)

# What follows an error of C++.
CPP_STACK = """
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7ef4bb3161b6 in /lib/torch/lib/libc10.so)
frame #1: c10::detail::torchCheckFail(char const*, char const*, unsigned int, std::string const&) + 0x64
frame #6: <unknown function> + 0x126850 (0x7fc967d26850 in /lib/x86_64-linux-gnu/libc.so.6)

"""

# What Python writes when the process is aborted: torchrun has asked it to say then where each thread is.
PYTHON_STACKS = """\
Fatal Python error: Aborted

Thread 0x00007f49a4892b80 (most recent call first):
  File "/lib/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 384 in wrapper
  File "/work/trainer.py", line 3200 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C, torch._C._errors (total: 25)
"""

# What a rank writes if NCCL's watchdog is the first to see the same error of CUDA. The watchdog ends the process.
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
CUDA_ERROR_AND_STACK = CUDA_ERROR.removeprefix("torch.AcceleratorError: ") + CPP_STACK
WATCHDOG_ERROR = f"""\
[rank1]:[E410 01:50:33.889423318 ProcessGroupNCCL.cpp:1895] {WATCHDOG}{CUDA_ERROR_AND_STACK}\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {WATCHDOG}{CUDA_ERROR_AND_STACK}\
{PYTHON_STACKS}"""

# The part of the training when rank 3 fails on node n2: torchrun redirects what the rank writes to its stderr, which is
# in the variable STDERR here, to a file. At the end, it prints the rank's exit status.
RANK_3_FAILS = """\
mkdir -p work/logs/n2/2/attempt_0/3
cat > work/logs/n2/2/attempt_0/3/stderr.log <<< "$STDERR"
echo "E1129 api.py:1010] failed (exitcode: 1) local_rank: 3 (pid: 4711) of binary: python"
exit 1
"""


@pytest.mark.parametrize(
    ("stderr", "last_words"),
    [
        pytest.param("Killed", "Killed", id="one line"),
        pytest.param("", "nothing", id="no line"),
        pytest.param(
            "[W1130 01:32:40.59 socket.cpp:207] [c10d] The hostname cannot be retrieved. err=-3",
            "nothing",
            id="only a warning",
        ),
        pytest.param(
            "KeyError: 'label'\n[rank3]:[W1129] Warning: destroy_process_group() was not called",
            "KeyError: 'label'",
            id="an error above a warning",
        ),
        pytest.param(
            "CUDA error: an illegal memory access\nframe #1: 0x7f",
            "CUDA error: an illegal memory access",
            id="an error above a stack",
        ),
        pytest.param(
            "KeyError: 'label'\n" + "100%|=====>|\r" * 1000,
            "KeyError: 'label'",
            id="an error above a progress bar",
        ),
        pytest.param(
            CUDA_ERROR,
            "torch.AcceleratorError: CUDA error: unspecified launch failure",
            id="an error of CUDA above PyTorch's advice",
        ),
        pytest.param(
            CUDA_ERROR_OF_RANK_1,
            "[rank1]: torch.AcceleratorError: CUDA error: unspecified launch failure",
            id="an error of CUDA with the rank before each line",
        ),
        pytest.param(
            WATCHDOG_ERROR,
            f"what():  {WATCHDOG}CUDA error: unspecified launch failure",
            id="an error that NCCL's watchdog sees",
        ),
        pytest.param(
            f"double free or corruption (out)\n{PYTHON_STACKS}",
            "double free or corruption (out)",
            id="an abort",
        ),
    ],
)
def test_the_message_about_a_node_has_the_last_words_of_its_rank(tmp_path, stderr, last_words):
    """An error of one's own data that only this rank meets looks like a broken node until a person reads it."""
    run_batch(tmp_path, RANK_3_FAILS, STDERR=stderr)
    run_batch(tmp_path, RANK_3_FAILS, STDERR=stderr)
    message = on_call_message(tmp_path)
    assert f"is excluded. Its last words: {last_words} (exitcode: 1) local_rank: 3. To take it back: " in message


# argparse ends Python with status 2 if it does not know a flag, and it does so on each node. `run_batch` runs only n2,
# so what the batch file would note on n1 is written here.
ENDS_WITH_STATUS_2 = RANK_3_FAILS.replace("exitcode: 1", "exitcode: 2")
STATUS_2_ON_N1 = """
mkdir -p work/logs/n1
echo "train.py: error: no flag --epoch (exitcode: 2) local_rank: 0" > work/logs/n1/last_words
"""


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        pytest.param(
            "echo 'model.toml has no width' > work/gave_up; exit 1",
            "model.toml has no width",
            id="the script says so",
        ),
        pytest.param(
            STATUS_2_ON_N1 + ENDS_WITH_STATUS_2,
            "train.py: error: no flag --epoch (exitcode: 2) local_rank",
            id="a wrong flag",
        ),
    ],
)
def test_a_job_that_no_start_can_help_ends_and_says_why(tmp_path, training, reason):
    run = run_batch(tmp_path, training, STDERR="train.py: error: no flag --epoch")
    assert run.status == 1
    assert not run.is_requeued
    assert on_call_message(tmp_path).startswith(
        f"job 2 (book): it ends, because another start would probably fail in the same way: {reason}"
    )

    next_run = run_batch(tmp_path, "exit 1")
    assert next_run.is_requeued, "the reason was of the start before"


def test_a_node_that_does_not_see_the_script_does_not_end_the_job(tmp_path):
    """Python ends with the same status as for a wrong flag. Here JOB_FOLDER is on a disk that the node does see."""
    stderr = "python: can't open file '/home/me/train.py'"
    run_batch(tmp_path, STATUS_2_ON_N1)  # The status of n1 is of an earlier start, so it does not count.

    first_run = run_batch(tmp_path, ENDS_WITH_STATUS_2, STDERR=stderr)
    assert first_run.is_requeued
    assert "ExcNodeList=n7,n2" not in first_run.output

    second_run = run_batch(tmp_path, ENDS_WITH_STATUS_2, STDERR=stderr)
    assert second_run.is_requeued
    assert "ExcNodeList=n7,n2" in second_run.output


def test_a_node_that_does_not_see_the_jobs_folder_says_so_and_makes_none(tmp_path, monkeypatch):
    """Slurm starts it in another folder then. What it wrote there would not be found."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setitem(STAND_INS, "srun", "cd elsewhere\n" + STAND_INS["srun"])
    run = run_batch(tmp_path, "exit 1")
    assert f"n2 is in {tmp_path}/elsewhere and does not see the job's folder work.\n" in run.output
    assert "torchrun" not in run.output
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert run.is_requeued


PRINT_STOP_TIME = 'echo "stop at ($STOP_AT)"'  # STOP_AT is when the ranks have to stop, in Unix seconds


def as_squeue_prints_it(seconds):
    """A time in Unix seconds as squeue prints the end of a job: 2026-11-30T07:58:00."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


@pytest.mark.parametrize(
    ("seconds_left", "signal_option", "seconds_until_stop"),
    [
        pytest.param(3600, "", 3600 - 180 - 60, id="an hour"),
        pytest.param(3600, "#SBATCH --signal=USR1@300  # seconds", 3600 - 300 - 60, id="the reader's own number"),
        pytest.param(200, "", None, id="a job that is so short that it trains until the signal"),
    ],
)
def test_ranks_that_start_after_the_signal_are_told_by_the_clock(
    tmp_path, seconds_left, signal_option, seconds_until_stop
):
    """The signal comes 180 seconds before the job's end, or as the batch file says, but up to a minute earlier."""
    (tmp_path / f"{NAME}.sbatch").write_text(f"{signal_option}\n")
    now = time.time()
    run = run_batch(tmp_path, PRINT_STOP_TIME, END=as_squeue_prints_it(now + seconds_left))
    [stop_time] = re.findall(r"stop at \((.*)\)", run.output)
    if seconds_until_stop is None:
        assert stop_time == ""
    else:
        assert int(stop_time) == pytest.approx(now + seconds_until_stop, abs=30)


def test_a_job_without_a_time_limit_has_no_last_minutes(tmp_path):
    run = run_batch(tmp_path, PRINT_STOP_TIME, END="N/A")
    assert "stop at ()" in run.output


def test_a_job_takes_no_time_from_the_job_that_submits_it(tmp_path):
    """sbatch copies the environment. The time of the other job is over, so this one would stop at once, every time."""
    run = run_batch(tmp_path, PRINT_STOP_TIME, END="", STOP_AT="1")
    assert "stop at ()" in run.output


def test_a_job_that_a_rank_submits_does_not_take_this_jobs_folder(tmp_path):
    """sbatch copies the environment. The other job would train on from this one's checkpoints."""
    run = run_batch(tmp_path, training="env")  # `env` prints the environment of a program that a rank starts
    assert "\nSTART=1\n" in run.output
    assert "\nJOB_FOLDER=" not in run.output


LOST_A_PEER = "RuntimeError: Connection closed by peer [10.0.0.1]:4711"


@pytest.mark.parametrize(
    "stderr",
    [
        LOST_A_PEER,
        "RuntimeError: Watchdog caught collective operation timeout: WorkNCCL(",
        "RuntimeError: [TC][rank=1][name=0] Operation timed out after 600012 ms",
        "RuntimeError: Timed out waiting 600000ms for recv operation to complete",
    ],
    ids=["closed", "watchdog", "operation", "recv"],
)
def test_a_node_that_only_lost_a_peer_is_not_to_blame(tmp_path, stderr):
    for _ in range(2):
        run = run_batch(tmp_path, RANK_3_FAILS, STDERR=stderr)
        assert run.is_requeued
        assert "ExcNodeList" not in run.output
    assert not (tmp_path / "work/failed_nodes").exists()


def test_a_node_that_failed_by_itself_is_to_blame(tmp_path):
    """The error is about a connection, too, but it does not say that a peer is gone."""
    run_batch(tmp_path, RANK_3_FAILS, STDERR="RuntimeError: Connection is a word of the reader's [10.0.0.1]:4711")
    assert (tmp_path / "work/failed_nodes").read_text() == "n2\n"


def test_the_rank_that_lost_a_peer_is_found_behind_the_stack_of_a_long_abort(tmp_path):
    lines_of_stack = [f'  File "/lib/torch/utils/data.py", line {line} in get\n' for line in range(300)]
    error = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\n"
    run_batch(tmp_path, RANK_3_FAILS, STDERR=error + CPP_STACK + PYTHON_STACKS + "".join(lines_of_stack))
    assert not (tmp_path / "work/failed_nodes").exists()


@pytest.mark.parametrize(
    ("error", "failed_nodes"),
    [
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "none none none"),
        ("RendezvousConnectionError: The connection to the C10d store has failed.", "none none none"),
        ("bash: line 9: torchrun: command not found", "n2 n2 n2"),
    ],
)
def test_a_node_whose_torchrun_only_waited_for_another_is_not_to_blame(tmp_path, error, failed_nodes):
    """No rank has failed then. A hung mount on n2 makes torchrun on n1 wait until its timeout, and end first."""
    for _ in range(3):
        run = run_batch(tmp_path, f'echo "{error}"; exit 1')
        assert (tmp_path / "work/failed_nodes").exists() == (failed_nodes == "n2 n2 n2")
    assert not run.is_requeued
    assert f"Nodes that failed: {failed_nodes} ({error})\n" in run.output


@pytest.mark.parametrize(
    ("status_of_rank", "last_line_of_torchrun", "is_to_blame"),
    [
        (1, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", False),
        (1, "[...].api.RendezvousConnectionError: The connection to the C10d store has failed. See inner [...]", False),
        (1, "=" * 60, True),  # the end of torchrun's report on a rank
        (2, "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", True),  # the script has a wrong flag
    ],
)
def test_a_failure_of_hours_ago_does_not_blame_the_node_that_loses_the_others_now(
    tmp_path, status_of_rank, last_line_of_torchrun, is_to_blame
):
    """A rank of n2 fails with a KeyError, and torchrun starts it again. Later torchrun ends, with this last line."""
    rank_fails = RANK_3_FAILS.replace("exitcode: 1", f"exitcode: {status_of_rank}")
    training = rank_fails.replace("exit 1", f'echo "{last_line_of_torchrun}"; exit 1')
    run_batch(tmp_path, training, STDERR="KeyError: 'label'")

    assert (tmp_path / "work/failed_nodes").exists() == is_to_blame
    last_words = (tmp_path / "work/logs/n2/last_words").read_text()
    if is_to_blame:
        assert last_words == f"KeyError: 'label' (exitcode: {status_of_rank}) local_rank: 3\n"
    else:
        assert last_words == f"{last_line_of_torchrun}\n"


def test_if_no_node_is_to_blame_the_message_has_the_words_of_the_first(tmp_path):
    words_of_n1 = 'mkdir -p work/logs/n1; echo "A peer is gone" > work/logs/n1/last_words\n'
    for _ in range(3):
        run_batch(tmp_path, words_of_n1 + RANK_3_FAILS, STDERR=LOST_A_PEER)
    assert on_call_message(tmp_path).endswith("Nodes that failed: none none none (A peer is gone)\n")


def in_one_file(texts, more_functions=""):
    """The text of a batch file with the functions in it that it would read from the file NAME.slurm.sh.

    ``texts`` are from ``texts_of_files``. ``more_functions`` are put behind these functions, and so replace some.
    """
    reads_functions = f"source ./{NAME}.slurm.sh || exit"
    assert reads_functions in texts[".sbatch"]
    return texts[".sbatch"].replace(reads_functions, texts[".slurm.sh"] + more_functions)


def test_a_node_is_noted_before_its_words_are_read(tmp_path):
    """srun ends this shell when the others leave, after 5 seconds, and a slow disk may take longer."""
    copies_the_note = 'last_words() { cp "$JOB_FOLDER/failed_nodes" note_before_the_words; }\n'
    run_batch(tmp_path, "exit 1", in_one_file(texts_of_files(), copies_the_note))
    assert (tmp_path / "note_before_the_words").read_text() == "n2\n"


# --- messages to whoever is on call -----------------------------------------------------------------------------------


@pytest.mark.parametrize("training", ["exit 0", SAVES_AND_STOPS, "exit 1"], ids=["end", "stop", "failure"])
def test_nobody_is_called_if_a_job_ends_or_starts_again(tmp_path, training):
    run_batch(tmp_path, training)
    assert on_call_message(tmp_path) == ""


def test_a_third_failure_calls_a_person(tmp_path):
    for _ in range(3):
        run_batch(tmp_path, "echo out of memory; exit 1")
    assert on_call_message(tmp_path) == (
        "job 2 (book): it failed three times without progress, and ends. "
        "The newest checkpoint: nothing. Nodes that failed: n2 n2 n2 (out of memory)\n"
    )


def test_a_stop_after_the_last_start_calls_a_person(tmp_path):
    run_batch(tmp_path, SAVES_AND_STOPS, SLURM_RESTART_COUNT="100")
    assert on_call_message(tmp_path) == "job 2 (book): it was started 100 times, and ends.\n"


def test_a_failure_of_a_script_that_cannot_resume_calls_a_person(tmp_path):
    batch_file = in_one_file(texts_of_files(PLAIN_SCRIPT))
    run_batch(tmp_path, "exit 7", batch_file)
    assert on_call_message(tmp_path) == "job 2 (book): it ended with status 7. The first node to fail: n2\n"


@pytest.mark.parametrize("command", ["", "false"], ids=["no command", "a command that fails"])
def test_a_command_on_call_that_fails_does_not_change_the_jobs_end(tmp_path, command):
    for _ in range(3):
        run = run_batch(tmp_path, "exit 1", ON_CALL=command)
    assert run.status == 1
    assert not run.is_requeued
    assert run.output.endswith("\nON_CALL failed: false\n") == (command == "false")


# --- its bash, its nodes and their network ----------------------------------------------------------------------------


def missing_shellcheck():
    """Why the next test cannot run on this machine, or None."""
    if shutil.which("shellcheck") is None:
        return "no shellcheck on this machine"
    return None


@pytest.mark.system(missing=missing_shellcheck)
@pytest.mark.parametrize("script", [STOPPABLE_SCRIPT, RESUMABLE_SCRIPT, PLAIN_SCRIPT])
def test_shellcheck_finds_nothing(script, tmp_path):
    for suffix, text in texts_of_files(script).items():
        is_bash = not suffix.endswith((".yaml", ".py"))
        if is_bash:
            (tmp_path / f"{NAME}{suffix}").write_text(text)
    files = list(tmp_path.iterdir())
    command = ["shellcheck", "--external-sources", "--severity=warning", *files]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("found", [0, 1])
def test_without_an_address_of_each_node_the_job_ends_and_says_so(tmp_path, monkeypatch, found):
    """With one too few, a node would take the address of another."""
    shows_too_few_nodes = f'echo >> tries; printf "NodeName=n NodeAddr=10.0.0.1 Port=1\\n" | head -n {found}'
    monkeypatch.setitem(STAND_INS, "scontrol", scontrol(show_nodes=shows_too_few_nodes))
    run = run_batch(tmp_path, training="")
    assert run.status == 1
    assert "torchrun" not in run.output
    assert (tmp_path / "tries").read_text() == "\n" * 3
    assert on_call_message(tmp_path) == (
        f"job 2 (book): it ends, because scontrol show node gives {found} addresses for 2 nodes. Submit it again.\n"
    )


def test_slurm_may_say_the_nodes_addresses_only_when_it_is_asked_again(tmp_path, monkeypatch):
    fails_twice = 'echo >> tries; [ "$(wc -l < tries)" -gt 2 ] || exit 1; '
    monkeypatch.setitem(STAND_INS, "scontrol", scontrol(show_nodes=fails_twice + SHOW_NODES))
    run = run_batch(tmp_path, training="")
    assert run.status == 0
    assert "--rdzv-endpoint=10.0.0.1:20002 --rdzv-id=2.1 --local-addr=10.0.0.2 " in run.output


def test_after_a_preflight_that_fails_nothing_is_trained(tmp_path):
    run = run_batch(tmp_path, "exit 3", PREFLIGHT="check.py")
    assert run.status == 3
    assert run.output.count("\ntorchrun ") == 1
    assert run.is_requeued, "on other nodes it may pass"


PRINT_INTERFACE = 'echo "gloo takes (${GLOO_SOCKET_IFNAME-what it finds})"'  # with "what it finds" if it is not set


def test_each_node_has_its_address_and_its_network_and_the_preflight_runs_first(tmp_path):
    run = run_batch(tmp_path, PRINT_INTERFACE, PREFLIGHT="-m helpers doctor")
    preflight_line, training_line = re.findall(r"^torchrun .*", run.output, re.MULTILINE)
    assert "--max-restarts=0 --rdzv-id=preflight.2.1 " in preflight_line
    assert preflight_line.endswith(" -m helpers doctor")
    assert f" {NAME}.py " in training_line
    for flag in ("--rdzv-endpoint=10.0.0.1:20002 ", "--local-addr=10.0.0.2 ", " --rdzv-conf=is_host=0,"):
        assert flag in preflight_line
        assert flag in training_line
    assert run.output.count("gloo takes (ib7)") == 2


def test_a_network_interface_that_the_reader_names_is_used(tmp_path):
    run = run_batch(tmp_path, PRINT_INTERFACE, GLOO_SOCKET_IFNAME="eth0")
    assert "gloo takes (eth0)" in run.output


def test_a_container_without_ip_leaves_the_network_to_gloo_and_says_so(tmp_path, monkeypatch, capfd):
    """An empty name would not help gloo, and would look like a choice."""
    command_not_found = "exit 127"
    monkeypatch.setitem(STAND_INS, "ip", command_not_found)
    message = "n2 cannot ask ip which network leads to 10.0.0.1. Set GLOO_SOCKET_IFNAME in the batch file.\n"

    run = run_batch(tmp_path, PRINT_INTERFACE)
    assert "gloo takes (what it finds)" in run.output
    assert message in capfd.readouterr().err

    run = run_batch(tmp_path, PRINT_INTERFACE, GLOO_SOCKET_IFNAME="eth0")
    assert "gloo takes (eth0)" in run.output
    assert message not in capfd.readouterr().err


def test_a_container_and_a_binding(tmp_path):
    """A reader may let the ranks run in a container, and on the processor to which their GPU is connected.

    The batch file has two lines for a container, and pyxis and Apptainer are two kinds. Here the one for pyxis goes.
    """
    lines = [line for line in texts_of_files()[".sbatch"].splitlines() if "pyxis" not in line]
    batch_file = re.sub(r"^# (IN_CONTAINER|NUMA_BINDING)", r"\1", "\n".join(lines), flags=re.MULTILINE)
    run = run_batch(tmp_path, training="", batch_file=batch_file)
    expected = rf"^in a container\ntorchrun .* --numa-binding=node {NAME}.py "
    assert re.search(expected, run.output, re.MULTILINE), run.output


# --- for Kubernetes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """What a file for Kubernetes says, as dictionaries."""

    service: dict
    job: dict
    pod: dict  # of a pod of the Job: its specification
    container: dict  # the pod's only container


def manifest_of(text):
    """The Manifest that is in the text of a file for Kubernetes."""
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return Manifest(service, job, pod, container)


def test_pods_are_found_by_their_number_before_they_are_ready():
    """A pod is reached as JOB-INDEX.SUBDOMAIN where a headless Service with the subdomain's name selects it."""
    manifest = manifest_of(texts_of_files(nodes=3)[".k8s.yaml"])
    name = manifest.job["metadata"]["name"]
    assert manifest.pod["subdomain"] == name
    assert manifest.service["metadata"]["name"] == name
    assert manifest.service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
    }
    job = manifest.job["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == 3
    assert job["parallelism"] == 3
    assert manifest.container["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": {"cpu": 32}}


def test_a_pod_has_more_time_to_stop_than_its_ranks():
    manifest = manifest_of(texts_of_files()[".k8s.yaml"])
    script_of_container = manifest.container["command"][2]
    shutdown_timeout = int(re.search(r"--shutdown-timeout=(\d+)", script_of_container)[1])
    assert shutdown_timeout < manifest.pod["terminationGracePeriodSeconds"]


def test_what_a_cluster_may_need_is_valid_without_its_comment_sign():
    # Such a line is, for example, "      # schedulerName: volcano". Other comments do not begin with a key.
    comment_sign_before_a_key = r"^( +)# (?=[\w/]+: )"
    text = re.sub(comment_sign_before_a_key, r"\1", texts_of_files()[".k8s.yaml"], flags=re.MULTILINE)
    manifest = manifest_of(text)
    assert manifest.job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "QUEUE"}
    assert manifest.pod["schedulerName"] == "volcano"
    assert manifest.container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert manifest.container["resources"]["limits"]["rdma/NAME"] == 1
    assert manifest.container["resources"]["requests"]["memory"] == "512Gi"


@pytest.mark.parametrize(
    ("name", "expected"), [("04_net", "net"), ("My.Net_2", "my-net-2"), ("10", "training"), ("a" * 70, "a" * 40)]
)
def test_names_for_kubernetes(name, expected):
    assert kubernetes_name(name) == expected


# --- on two hosts -----------------------------------------------------------------------------------------------------

# A script in place of the trainer's: each rank meets the others, and prints its numbers and its arguments.
REPORT_SCRIPT = """\
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_gather_object([None] * 4, "")
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"]
line = " ".join(["here", *map(os.environ.get, names), *sys.argv[1:]]) + "\\n"
os.write(1, line.encode())  # one write
dist.destroy_process_group()
"""

# A script in place of the trainer's that stops at SIGUSR1, as the trainer does.
STOP_SCRIPT = """\
import os, pathlib, signal, sys, time

def stop(number, frame):
    time.sleep(1)  # a save
    pathlib.Path("/mnt/work/stopped").touch()
    sys.exit()

signal.signal(signal.SIGUSR1, stop)
pathlib.Path("/mnt/work/ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended on a host."""

    status: int
    output: str  # stdout and stderr


def on_both(pair, folder, commands, variables=None, meanwhile=None):
    """Run a command on each of two hosts at the same time, in the same folder. Returns a list of two Ended.

    ``variables`` are added to the commands' environment. ``meanwhile`` is called with the two processes after their
    start.
    """
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if variables is not None:
        environment.update(variables)
    environment.pop("GLOO_SOCKET_IFNAME", None)  # an earlier test may have set it to the loopback interface

    processes = []
    for index, (host, command) in enumerate(zip(pair, commands, strict=True)):
        process = host.start(
            command,
            env={**environment, "JOB_COMPLETION_INDEX": str(index)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    if meanwhile is not None:
        meanwhile(processes)

    ended = []
    for process in processes:
        output, _ = process.communicate(timeout=240)
        ended.append(Ended(process.returncode, output))
    return ended


NODES_SCRIPT = f"{NAME}.nodes.sh"


@pytest.fixture
def folder_for_nodes(tmp_path):
    """A folder with the bash script that starts torchrun on a node by hand, for a job of two ranks on each node."""
    (tmp_path / NODES_SCRIPT).write_text(texts_of_files(gpus_per_node=2)[".nodes.sh"])
    (tmp_path / f"{NAME}.py").write_text(REPORT_SCRIPT)
    return tmp_path


def test_the_script_for_a_node_says_how_to_use_it_if_it_gets_no_arguments(folder_for_nodes):
    done = subprocess.run(["bash", NODES_SCRIPT], cwd=folder_for_nodes, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count(f"bash {NODES_SCRIPT}") == 2, "a line for static, and one for c10d"


@pytest.mark.system(missing=hosts.missing)
@pytest.mark.timeout(600)
def test_the_plain_lines_on_two_hosts(folder_for_nodes):
    """The script for a node starts a job on two hosts, by both ways in which torchrun's nodes find each other.

    As on Debian, each host takes its own name for an address of its loopback. The other host could not reach it there,
    so the script refuses such a name.
    """
    names_on_node0 = {**hosts.ADDRESSES, "node0": "127.0.1.1"}
    names_on_node1 = {**hosts.ADDRESSES, "node1": "127.0.1.1"}
    with unchanged(), hosts.two_hosts(names_on_node0, names_on_node1) as pair:
        with_a_name = ["bash", NODES_SCRIPT, "c10d", "node0", "0"]
        [refused, _] = on_both(pair, folder_for_nodes, [with_a_name, ["true"]])
        assert refused == Ended(2, "node0 means 127.0.1.1 on this node. Give the address of node 0.\n")

        for rendezvous in ("static", "c10d"):
            line = ["bash", NODES_SCRIPT, rendezvous, hosts.ADDRESSES["node0"]]
            commands = [[*line, "0", "--epochs", "2"], [*line, "1", "--epochs", "2"]]
            [node0, node1] = on_both(pair, folder_for_nodes, commands)
            output = node0.output + node1.output
            assert node0.status == 0, output
            assert node1.status == 0, output

            # A rank prints, for example, "here 3 1 4 2 --epochs 2": it is rank 3 of 4, and rank 1 of a node, of two.
            ranks = re.findall(r"here (\d) (\d) 4 2 --epochs 2", output)
            assert sorted(ranks) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], output


@pytest.mark.daily
@pytest.mark.system(missing=hosts.missing)
@pytest.mark.timeout(600)
def test_the_pods_command_on_two_hosts(tmp_path):
    """The container's command runs, with the variables, names and folder that Kubernetes would give it."""
    script_folder = tmp_path / "script"
    work_folder = tmp_path / "work"
    work_folder.mkdir()
    status = main(["export", "11", "--slurm", "--gpus-per-node=1", f"--out={script_folder}"])
    assert status == 0

    manifest = manifest_of((script_folder / f"{NAME}.k8s.yaml").read_text())
    *shell, text = manifest.container["command"]
    command = [*shell, text.replace("--backend nccl", "--backend gloo")]
    variables = {variable["name"]: variable["value"] for variable in manifest.container["env"]}
    job_name = manifest.job["metadata"]["name"]
    names = {}
    for index, address in enumerate(hosts.ADDRESSES.values()):
        names[f"{job_name}-{index}"] = address
        names[f"{job_name}-{index}.{job_name}"] = address

    def stop_pods(processes):
        assert wait_until(lambda: len(list(work_folder.glob("ready*"))) == 2)
        for process in processes:
            [shell_of_pod, *_] = psutil.Process(process.pid).children()
            shell_of_pod.terminate()  # as Kubernetes does

    with unchanged(), hosts.two_hosts(names, names) as pair:
        for host in pair:
            host.run("sh", "-c", f"mount --bind '{tmp_path}' /mnt")
        [pod0, pod1] = on_both(pair, tmp_path, [command, command], variables)
        output = pod0.output + pod1.output
        assert pod0.status == 0, output
        assert pod1.status == 0, output
        assert 'result {"world_size": 2, "step": 90, ' in output
        assert (work_folder / "step_00000090.pt").is_file()

        # Where a run was told to stop, a pod fails, so that Kubernetes starts it again.
        (script_folder / f"{NAME}.py").write_text(STOP_SCRIPT)
        [pod0, pod1] = on_both(pair, tmp_path, [command, command], variables, stop_pods)
        assert pod0.status == 1
        assert pod1.status == 1
        assert (work_folder / "stopped").exists(), pod0.output + pod1.output
