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
model = DDP(nn.Linear(8, 1).to(device))  # the end of a gloo group could hang on it
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
    """Environment variables for a script that must run without this project."""
    (tmp_path / "path").mkdir()
    return stand_alone(tmp_path / "path")


def test_a_rank_that_raises_ends_the_job_and_is_named(alone, tmp_path):
    script = export(write_notebook(tmp_path, FAILING), tmp_path / "empty")
    ended = torchrun(script, 2, alone, "--fail", "1", "--steps", "100000000")
    assert ended.status == 1
    assert not ended.left
    assert 'raise ValueError(f"rank {args.fail} cannot go on")' in ended.errors  # a line of the rank's own traceback
    assert "ValueError: rank 1 cannot go on" in ended.errors

    # torchrun's summary has two lines for each rank that failed: "rank      : 1 (local_rank: 1)", "exitcode  : 1 (...".
    _, _, summary = ended.errors.partition("sample.py FAILED\n")
    status_of_rank = dict(re.findall(r"rank      : (\d) \(local_rank: \d\)\n +exitcode  : (-?\d+) ", summary))
    # Rank 1 must not be aborted, with status -6. If rank 0, which loses its peer, ends first, torchrun sends SIGTERM.
    rank_0_ended_first = status_of_rank == {"0": "1", "1": "-15"}
    assert status_of_rank["1"] == "1" or rank_0_ended_first, ended.errors


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


TRACEBACK_OF_RANK_0 = r"\[rank0\]: Traceback (.*\n)*\[rank0\]: ValueError: no data\n"


@pytest.mark.parametrize(
    ("end", "status", "expected_errors"),
    [pytest.param("exit 3", 3, "", id="exit"), pytest.param("raise", 1, TRACEBACK_OF_RANK_0, id="raise")],
)
def test_a_scripts_status_is_its_own_its_handlers_run_and_it_leaves_nothing(
    end, status, expected_errors, alone, tmp_path
):
    notebook = write_notebook(tmp_path, ENDING, parameters='end: str = ""')
    script = export(notebook, tmp_path / "empty")
    command = [sys.executable, script, "--end", end]
    process = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120)
    assert process.returncode == status
    assert process.stdout == "1 rank(s), gloo on cpu\nhandler\n"
    assert re.fullmatch(expected_errors, process.stderr), process.stderr
    temporary_files = list(Path(alone["TMPDIR"]).glob("tmp*"))
    assert temporary_files == []


# Three ranks run the script NAME, but rank 1 sleeps and so does not come. The others meet before they run it, so the
# time that their start takes does not count. They meet again before they end, because torchrun sends SIGTERM to the
# other when one has ended, and both have to say why.
RANK_1_DOES_NOT_COME = """\
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
    """Rank 0 and rank 2 each say that rank 1 has not come, and the table has a row for each of the two."""
    script = export(CHAPTER_12, tmp_path / "empty")
    script_without_rank_1 = script.with_name("missing.py")
    script_without_rank_1.write_text(RANK_1_DOES_NOT_COME.replace("NAME", repr(script.name)))
    environment = {**alone, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # so rank 0 serves the store
    ended = forked(script_on_ranks(script_without_rank_1, 3, "--patience", "5"), environment)

    assert ended.status == 1
    assert not ended.left
    assert ended.errors.count("ranks [1] have not come; localhost has 2 of its 3 ranks") == 2
    first_column = [line.split()[0] for line in ended.out.splitlines()]
    assert first_column == ["rank", "0", "2"]


@pytest.fixture
def running(tmp_path):
    """The process of a ``python -m helpers run`` that a terminal might have started. The test has to interrupt it.

    After the test, the run must have ended as an interrupted one does, and have left no process and no file.
    """
    mark = uuid.uuid4().hex
    notebook = write_notebook(tmp_path, FAILING)
    started = subprocess.Popen(
        [sys.executable, "-m", "helpers", "run", notebook, "--nproc", "2", "--", "--steps", "100000000"],
        cwd=ROOT,
        env={**os.environ, leftovers.MARK: mark, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started as process:
        try:
            yield process
            _, errors = process.communicate(timeout=60)
        finally:
            for pid in leftovers.processes(mark):  # only if the interruption has failed
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert errors == "Interrupted; all ranks are stopped.\n"
    assert process.returncode == 130
    assert leftovers.wait_until(lambda: not leftovers.processes(mark))
    assert not list(tmp_path.glob("tmp*"))


def test_a_run_that_an_impatient_user_interrupts_leaves_nothing(running):
    """The fixture checks what is left."""
    assert running.stdout.readline() == "2 rank(s), gloo on cpu\n"
    assert running.stdout.readline() == "training\n"
    assert leftovers.wait_until(lambda: len(psutil.Process(running.pid).children()) == 2)
    for _ in range(3):
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        time.sleep(0.01)


def test_what_ignores_sigterm_is_killed(tmp_path):
    ignores_sigterm = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    source = f"""
        import subprocess
        from helpers.ranks.torchrun import folder_until_a_signal
        with folder_until_a_signal():
            subprocess.run(["sh", "-c", {ignores_sigterm!r}], start_new_session=True)
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
    """Each rank gets the flag --steps 7, with which it fails, and its share of the cores.

    The error at the end is one line, without torchrun's traceback.
    """
    notebook = write_notebook(tmp_path, GROUPLESS)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "helpers", "run", notebook, "--nproc", "2", "--", "--steps", "7"]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    assert process.returncode == 1, process.stderr
    threads = max(1, usable_cores() // 2)
    lines = set(process.stdout.splitlines())  # one or two equal ones: a rank can end the other before it prints
    assert lines == {f"7 {threads}"}
    last_error = process.stderr.splitlines()[-1]
    assert re.fullmatch("error: rank [01] ended (with status 1|by SIGTERM); what the ranks said is above.", last_error)
    assert "distributed/run.py" not in process.stderr


def test_nbconvert_writes_the_same_script_and_refuses_with_the_reason_and_no_file(tmp_path):
    """nbconvert gets two notebooks: it writes a script for a chapter, and refuses one that starts no process group."""
    script = export(CHAPTER_12, tmp_path / "ours")
    groupless = write_notebook(tmp_path, "loss = 1\nprint(loss)")
    theirs = tmp_path / "theirs"
    command = [sys.executable, "-m", "nbconvert", "--log-level=ERROR", "--to", "torchrun", CHAPTER_12, groupless]
    command += ["--output-dir", theirs]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert process.returncode == 1
    assert process.stderr.startswith("error: sample starts no process group")
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert os.listdir(theirs) == [script.name]
    assert (theirs / script.name).read_text() == script.read_text()
