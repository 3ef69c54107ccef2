"""Every notebook's script under real torchrun: alone in an empty folder, on 1, 2 and 4 ranks, with equal results.

A script's last line is ``result {json}``, printed by rank 0. Its ``world_size`` must be the launched one; its other
numbers must not depend on it.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import leftovers
import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

pytestmark = pytest.mark.scripts

ROOT = Path(__file__).parents[1]
CHAPTERS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
NOTEBOOKS = [*CHAPTERS, ROOT / "notebooks" / "template.ipynb"]
RANKS = (1, 2, 4)
TOLERANCE = 0.002  # of every number in a result: they are rounded to three digits
GOOD_ENOUGH = {
    "01_process_groups": lambda result: result["pairs"] > 0.99,
    "02_collectives": lambda result: result["correct"] == result["checked"] >= 54,
    "03_samplers": lambda result: result["val_accuracy"] > 0.9,
    "04_ddp": lambda result: result["val_accuracy"] > 0.95,
    "05_amp": lambda result: result["learned"] > 0.9,
    "06_fsdp": lambda result: result["val_loss"] < 0.85 and result["bytes_per_parameter"] == pytest.approx(16, abs=0.1),
    "07_checkpointing": lambda result: result["val_accuracy"] > 0.94 and result["step"] == 120,
    "08_trainer": lambda result: result["val_accuracy"] > 0.94 and result["step"] == 90,
    "09_fault_tolerance": lambda result: result["val_accuracy"] > 0.95 and result["step"] == 120,
    "10_multi_node": lambda result: result["checks"] == result["right"] == 3,
    "11_profiling_debugging": lambda result: (
        result["steps"] == 8
        and result["ranks_without_trace"] == result["tensors_that_differ"] == 0
        and result["loss"] < 1.2
    ),
    "13_pipeline_parallel": lambda result: result["val_loss"] < 1.0,
}

# Put before everything else on a rank's path, this hides the project however it is installed. And a fifth of a rank's
# start-up is a search for garbage among what it imports: here it is made less often.
SITECUSTOMIZE = """\
import gc
import sys

gc.set_threshold(1_000_000)


class Hidden:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "helpers":
            raise ModuleNotFoundError("helpers is hidden: a script stands alone", name=name)


sys.meta_path.insert(0, Hidden)
"""

FAILING = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.runtime.process_group import print0, start_process_group, stop_process_group

device = start_process_group()
model = DDP(nn.Linear(8, 1).to(device))
for step in range(steps):
    if step == 3 and dist.get_rank() == fail:
        raise ValueError(f"rank {fail} cannot go on")
    model(torch.ones(4, 8, device=device)).sum().backward()
    if step == 5:
        print0("training")
stop_process_group()
"""


# A script whose group is quick to start: it never starts.
GROUPLESS = """\
import os

import torch.distributed as dist

if steps < 0:
    dist.init_process_group()
print(steps, os.environ["OMP_NUM_THREADS"])
assert steps < 5
"""


def write_notebook(folder, source, parameters="steps: int = 10\nfail: int = -1"):
    """A notebook of three cells, as folder/sample.ipynb."""
    cells = [
        new_markdown_cell("# Sample"),
        new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        new_code_cell(source, metadata={"tags": ["export"]}),
    ]
    path = folder / "sample.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return path


def stand_alone(folder):
    """The environment of a machine that does not have this project; ``folder`` is for what that takes."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    alone = {"PYTHONPATH": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    return {**environment, **alone, "CUDA_VISIBLE_DEVICES": ""}


def export(notebook, folder):
    """Write a notebook's script into the folder, through the command line; return its path."""
    command = [sys.executable, "-m", "helpers", "export", notebook, "--out", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def torchrun(script, nproc, environment, *flags, timeout=120):
    """Run a script under torchrun in its own folder, as (exit status, stdout, stderr, processes that it left).

    The status is None when it hung for ``timeout`` seconds and was killed.
    """
    mark = uuid.uuid4().hex
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", *where, script, *flags]
    process = subprocess.Popen(
        command,
        cwd=script.parent,
        env={**environment, leftovers.MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout)
        status = process.returncode
    except subprocess.TimeoutExpired:
        status = None
    leftovers.soon(lambda: status is None or not leftovers.processes(mark))
    left = leftovers.processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if status is None:
        out, errors = process.communicate()
    return status, out, errors, left


def result(out):
    """The numbers of a script's last line."""
    word, _, numbers = out.strip().splitlines()[-1].partition(" ")
    assert word == "result", out
    return json.loads(numbers)


@pytest.fixture
def alone(tmp_path):
    (tmp_path / "path").mkdir()
    return stand_alone(tmp_path / "path")


def test_the_ranks_cannot_import_helpers(alone, tmp_path):
    line = [sys.executable, "-c", "import helpers.runtime.data"]
    assert subprocess.run(line, cwd=ROOT).returncode == 0
    done = subprocess.run(line, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 1 and "helpers is hidden" in done.stderr

    (tmp_path / "cheat").mkdir()
    script = tmp_path / "cheat" / "cheat.py"
    script.write_text("import helpers.runtime.data")
    status, _, errors, _ = torchrun(script, 1, alone)
    assert status == 1 and "helpers is hidden" in errors


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_script(notebook, alone, tmp_path):
    folder = tmp_path / "empty"
    script = export(notebook, folder)
    assert os.listdir(folder) == [f"{notebook.stem}.py"]
    compile(script.read_text(), str(script), "exec")
    for command in (["check", "--select=E,F,I,B,UP"], ["format", "--check"]):
        style = ["--isolated", "--line-length=88", "--target-version=py311"]
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *style, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout

    results = {}
    for nproc in RANKS:
        status, out, errors, left = torchrun(script, nproc, alone)
        assert status == 0, f"{nproc} ranks: {'hung' if status is None else status}\n{out}{errors}"
        assert not left and "Warning" not in errors, errors
        assert f"{nproc} rank(s), gloo on cpu\n" in out
        results[nproc] = result(out)
        assert results[nproc].pop("world_size") == nproc
    assert results[1]
    for nproc in RANKS:
        assert results[nproc] == pytest.approx(results[1], abs=TOLERANCE)
    if notebook in CHAPTERS:
        assert GOOD_ENOUGH[notebook.stem](results[1]), results[1]
    assert set(os.listdir(folder)) <= {script.name, "__pycache__"}


def test_every_named_result_is_of_a_chapter():
    assert set(GOOD_ENOUGH) == {path.stem for path in CHAPTERS}


def test_without_torchrun_a_script_is_one_rank(alone, tmp_path):
    script = export(write_notebook(tmp_path, FAILING), tmp_path / "empty")
    done = subprocess.run([sys.executable, script], env=alone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 rank(s), gloo on cpu\ntraining\n", "")


def test_a_rank_that_raises_ends_the_job_and_is_named(alone, tmp_path):
    script = export(write_notebook(tmp_path, FAILING), tmp_path / "empty")
    status, out, errors, left = torchrun(script, 4, alone, "--fail", "2", "--steps", "1000000")
    assert status == 1 and not left
    assert 'raise ValueError(f"rank {args.fail} cannot go on")' in errors  # the rank's own traceback, with its line
    assert "ValueError: rank 2 cannot go on" in errors
    summary = errors.partition("sample.py FAILED\n")[2]
    assert re.search(r"rank      : 2 \(local_rank: 2\)\n +exitcode  : 1 ", summary)  # its own, not SIGABRT's


ENDING = """\
import atexit
import os
import sys

from helpers.runtime.process_group import print0, start_process_group, stop_process_group

device = start_process_group()
atexit.register(os.write, 1, b"handler\\n")
if end == "exit":
    sys.exit()
if end == "exit 3":
    sys.exit(3)
if end == "raise":
    raise ValueError("no data")
stop_process_group()
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("exit", 0), ("exit 3", 3), ("raise", 1)])
def test_a_scripts_status_is_its_own_and_its_handlers_run(end, status, alone, tmp_path):
    script = export(write_notebook(tmp_path, ENDING, parameters='end: str = ""'), tmp_path / "empty")
    done = subprocess.run([sys.executable, script, "--end", end], env=alone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "1 rank(s), gloo on cpu\nhandler\n")
    if end == "raise":
        assert "Traceback (most recent call last):" in done.stderr
        assert done.stderr.endswith("ValueError: no data\n")
    else:
        assert done.stderr == ""


@pytest.mark.parametrize("end", ["", "exit 3"])
def test_a_ranks_status_is_its_own_and_its_handlers_run(end, alone, tmp_path):
    script = export(write_notebook(tmp_path, ENDING, parameters='end: str = ""'), tmp_path / "empty")
    status, out, errors, left = torchrun(script, 2, alone, "--end", end)
    assert status == (1 if end else 0) and not left  # torchrun's own
    assert "exitcode  : 3 " in errors if end else out.count("handler\n") == 2


# The ranks that come do so together: how long their imports take is not counted as patience.
MISSING = """\
import os
import runpy
import time
from pathlib import Path

import torch.distributed

if os.environ["RANK"] == "1":
    time.sleep(600)
Path("here" + os.environ["RANK"]).touch()
while len(list(Path().glob("here*"))) < 2:
    time.sleep(0.01)
runpy.run_path("01_process_groups.py", run_name="__main__")
"""


@pytest.mark.parametrize("own_store", ["0", "1"], ids=["the agent serves the store", "rank 0 serves the store"])
def test_chapter_1_names_a_rank_that_is_missing(own_store, alone, tmp_path):
    script = export(CHAPTERS[0], tmp_path / "empty").with_name("missing.py")
    script.write_text(MISSING)
    environment = {**alone, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store}
    status, out, errors, left = torchrun(script, 3, environment, "--patience", "5")
    assert status == 1 and not left
    assert errors.count("ranks [1] have not come; localhost has 2 of its 3 ranks") == 2
    assert [line.split()[0] for line in out.splitlines()] == ["rank", "0", "2"]


@pytest.fixture
def running(tmp_path):
    """A call that starts ``python -m helpers run`` as a terminal does; at the end, check how it was interrupted."""
    mark = uuid.uuid4().hex
    notebook = write_notebook(tmp_path, FAILING)
    command = [sys.executable, "-m", "helpers", "run", notebook, "--nproc", "2", "--", "--steps", "100000000"]
    environment = {**os.environ, leftovers.MARK: mark, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0, **pipes) as process:
        try:
            yield process
            _, errors = process.communicate(timeout=60)
        finally:
            for pid in leftovers.processes(mark):  # where the interruption failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert (process.returncode, errors) == (130, "Interrupted; all ranks are stopped.\n")
    assert not leftovers.processes(mark)
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize(
    ("send", "numbers"),
    [(os.killpg, [signal.SIGINT] * 3), (os.kill, [signal.SIGTERM])],
    ids=["impatient Ctrl-C at a terminal", "SIGTERM"],
)
def test_an_interrupted_run_leaves_nothing(running, send, numbers):
    assert [running.stdout.readline() for _ in range(2)] == ["2 rank(s), gloo on cpu\n", "training\n"]
    assert len(psutil.Process(running.pid).children()) == 2
    for number in numbers:
        send(running.pid, number)
        time.sleep(0.01)


def test_a_run_is_interrupted_before_it_has_ranks(running, tmp_path):
    assert leftovers.soon(lambda: list(tmp_path.glob("tmp*")))
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)


def test_what_ignores_sigterm_is_killed(tmp_path):
    shell = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    source = f"""
        import subprocess
        from helpers.ranks.torchrun import stop_at_signals
        stop_at_signals({str(tmp_path / "folder")!r})
        subprocess.run(["sh", "-c", {shell!r}], start_new_session=True)
    """
    (tmp_path / "folder").mkdir()
    environment = {**os.environ, leftovers.MARK: uuid.uuid4().hex}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == 130
    assert not leftovers.processes(environment[leftovers.MARK]) and not (tmp_path / "folder").exists()


def test_run_passes_flags_and_status(tmp_path):
    notebook = write_notebook(tmp_path, GROUPLESS)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for steps, status in (("3", 0), ("7", 1)):
        command = [sys.executable, "-m", "helpers", "run", notebook, "--nproc", "2", "--", "--steps", steps]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        threads = max(1, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else os.cpu_count() // 2)
        assert done.returncode == status, done.stderr
        assert set(done.stdout.splitlines()) == {f"{steps} {threads}"}  # one rank can end the other before it prints
        assert ("Root Cause" in done.stderr) == (status == 1)
        assert "distributed/run.py" not in done.stderr  # torchrun's own traceback


def test_nbconvert_writes_the_same_script(tmp_path):
    script = export(NOTEBOOKS[0], tmp_path / "ours")
    command = [sys.executable, "-m", "nbconvert", "--to", "torchrun", NOTEBOOKS[0], "--output-dir", tmp_path / "theirs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs" / script.name).read_text() == script.read_text()


def test_nbconvert_refuses_with_the_reason_and_no_file(tmp_path):
    notebook = write_notebook(tmp_path, "rank = 0\nprint(rank)")
    command = [sys.executable, "-m", "nbconvert", "--to", "torchrun", notebook]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "cell 3 (`rank = 0`) hard-codes `rank = 0`" in done.stderr
    assert os.listdir(tmp_path) == [notebook.name]
