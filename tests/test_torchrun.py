"""Scripts from start to end: alone, under torchrun and under ``helpers run``, when they fail or are interrupted."""

import contextlib
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
import psutil
import pytest
from forked import forked, script_on_ranks
from scripting import ROOT, export, stand_alone, torchrun, write_notebook

from helpers.export.chapters import find_notebook
from helpers.ranks.rank import usable_cores

CHAPTER_12 = find_notebook("12")

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

FAILING = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.export.chapters import find_notebook
from helpers.runtime.process_group import print0, start_process_group, stop_process_group

device = start_process_group()
model = DDP(nn.Linear(8, 1).to(device))  # what a group's end on gloo can hang on
for step in range(steps):
    if step == 3 and dist.get_rank() == fail:
        raise ValueError(f"rank {fail} cannot go on")
    model(torch.ones(4, 8, device=device)).sum().backward()
    if step == 5:
        print0("training")
stop_process_group()
"""

# A script that starts no group and does not import torch, so that its start takes little time.
GROUPLESS = """\
import os

if steps < 0:
    from torch.distributed import init_process_group

    init_process_group()

print(f"{steps} {os.environ['OMP_NUM_THREADS']}\\n", end="")  # one write: the ranks share this stream
assert steps < 5
"""


@pytest.fixture
def alone(tmp_path):
    (tmp_path / "path").mkdir()
    return stand_alone(tmp_path / "path")


def test_a_rank_that_raises_ends_the_job_and_is_named(alone, tmp_path):
    script = export(write_notebook(tmp_path, FAILING), tmp_path / "empty")
    status, _, errors, left = torchrun(script, 2, alone, "--fail", "1", "--steps", "100000000")
    assert status == 1 and not left
    assert 'raise ValueError(f"rank {args.fail} cannot go on")' in errors  # the rank's own traceback, with its line
    assert "ValueError: rank 1 cannot go on" in errors
    summary = errors.partition("sample.py FAILED\n")[2]
    statuses = dict(re.findall(r"rank      : (\d) \(local_rank: \d\)\n +exitcode  : (-?\d+) ", summary))
    # It is not the status of SIGABRT. But torchrun sends SIGTERM where rank 0, which sees the loss, ends first.
    assert statuses["1"] == "1" or statuses == {"0": "1", "1": "-15"}, errors


ENDING = """\
import atexit
import os
import sys

from helpers.runtime.process_group import print0, start_process_group, stop_process_group

device = start_process_group()
atexit.register(os.write, 1, b"handler\\n")
if end == "exit 3":
    sys.exit(3)
if end == "raise":
    raise ValueError("no data")
stop_process_group()
"""


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    [("exit 3", 3, "^$"), ("raise", 1, r"^\[rank0\]: Traceback (.*\n)*\[rank0\]: ValueError: no data\n$")],
)
def test_a_scripts_status_is_its_own_its_handlers_run_and_it_leaves_nothing(end, status, errors, alone, tmp_path):
    notebook = write_notebook(tmp_path, ENDING, parameters='end: str = ""')
    script = export(notebook, tmp_path / "empty")
    command = [sys.executable, script, "--end", end]
    process = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120)
    assert process.returncode == status
    assert process.stdout == "1 rank(s), gloo on cpu\nhandler\n"
    assert re.match(errors, process.stderr), process.stderr
    left = list(Path(alone["TMPDIR"]).glob("tmp*"))
    assert left == []


# The ranks that come meet before they wait, so the time that their start takes does not count. They meet again before
# they end, because torchrun sends SIGTERM to the other when one has ended, and both have to say why.
MISSING = """\
import os
import runpy
import sys
import time
from pathlib import Path

if os.environ["RANK"] == "1":
    time.sleep(600)


def meet(word):
    Path(word + os.environ["RANK"]).touch()
    while len(list(Path().glob(word + "*"))) < 2:
        time.sleep(0.01)


meet("here")
try:
    runpy.run_path(NAME, run_name="__main__")
except SystemExit as end:
    print(end.code, file=sys.stderr, flush=True)  # as it would be printed after the end
    meet("reason")
    sys.exit(1)
"""


def test_chapter_12_names_a_rank_that_is_missing_where_rank_0_serves_the_store(alone, tmp_path):
    script = export(CHAPTER_12, tmp_path / "empty").with_name("missing.py")
    script.write_text(MISSING.replace("NAME", repr(f"{CHAPTER_12.stem}.py")))
    environment = {**alone, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    status, out, errors, left = forked(script_on_ranks(script, 3, "--patience", "5"), environment)
    assert status == 1 and not left
    assert errors.count("ranks [1] have not come; localhost has 2 of its 3 ranks") == 2
    assert [line.split()[0] for line in out.splitlines()] == ["rank", "0", "2"]


@pytest.fixture
def running(tmp_path):
    """``python -m helpers run``, started as by a terminal, for a test to interrupt. At the end nothing may be left."""
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
            for pid in leftovers.processes(mark):  # only if the interruption has failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert (process.returncode, errors) == (130, "Interrupted; all ranks are stopped.\n")
    assert leftovers.wait_until(lambda: not leftovers.processes(mark))
    assert not list(tmp_path.glob("tmp*"))


def test_a_run_that_an_impatient_user_interrupts_leaves_nothing(running):
    assert [running.stdout.readline() for _ in range(2)] == ["2 rank(s), gloo on cpu\n", "training\n"]
    assert leftovers.wait_until(lambda: len(psutil.Process(running.pid).children()) == 2)
    for _ in range(3):
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        time.sleep(0.01)


def test_what_ignores_sigterm_is_killed(tmp_path):
    shell = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    source = f"""
        import subprocess
        from helpers.ranks.torchrun import folder_until_a_signal
        with folder_until_a_signal():
            subprocess.run(["sh", "-c", {shell!r}], start_new_session=True)
    """
    environment = {**os.environ, leftovers.MARK: uuid.uuid4().hex, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == 130
    assert not list(tmp_path.iterdir())
    assert leftovers.wait_until(lambda: not leftovers.processes(environment[leftovers.MARK]))


def test_run_passes_flags_and_status(tmp_path):
    notebook = write_notebook(tmp_path, GROUPLESS)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "helpers", "run", notebook, "--nproc", "2", "--", "--steps", "7"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    threads = max(1, usable_cores() // 2)
    assert process.returncode == 1, process.stderr
    assert set(process.stdout.splitlines()) == {f"7 {threads}"}  # one rank can end the other before it prints
    last = process.stderr.splitlines()[-1]
    assert re.match("error: rank [01] ended (with status 1|by SIGTERM); what the ranks said is above.$", last)
    assert "distributed/run.py" not in process.stderr  # as in a traceback of torchrun


def test_nbconvert_writes_the_same_script_and_refuses_with_the_reason_and_no_file(tmp_path):
    script = export(CHAPTER_12, tmp_path / "ours")
    groupless = write_notebook(tmp_path, "loss = 1\nprint(loss)")
    command = [sys.executable, "-m", "nbconvert", "--log-level=ERROR", "--to", "torchrun", CHAPTER_12, groupless]
    process = subprocess.run(
        [*command, "--output-dir", tmp_path / "theirs"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 1 and process.stderr.startswith("error: sample starts no process group")
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert os.listdir(tmp_path / "theirs") == [script.name]
    assert (tmp_path / "theirs" / script.name).read_text() == script.read_text()
