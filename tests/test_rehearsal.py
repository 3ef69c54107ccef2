"""Rehearsals on simulated GPUs: each planted mistake is caught, lines have the right counts, and nothing is left."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import leftovers
import psutil
import pytest
import recorded
from scripting import ROOT, rehearse_here, torchrun

from helpers.ranks import processes
from helpers.rehearsal.command import wait

pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent / "support"


def counts(path, kind):
    """{(line number, name): row} of the events of one kind in a report's JSON, such as {(49, "item"): {"count": 5}}."""
    report = json.loads(path.read_text())
    rows = {}
    for row in report["lines"]:
        if row["kind"] == kind:
            _, _, number = row["line"].partition(":")  # the line is written as "script.py:49"
            rows[int(number), row["what"]] = row
    return rows


def line_of(script, words):
    """The number of the one line of a script that contains these words."""
    numbers = []
    for number, line in enumerate(script.read_text().splitlines(), 1):
        if words in line:
            numbers.append(number)
    [number] = numbers
    return number


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A script after its rehearsal."""

    script: Path
    done: subprocess.CompletedProcess[str]
    report: dict[str, Any]  # what --json has written


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The rehearsal of a script of planted mistakes. The script catches each one's error, but not the last one's."""
    folder = tmp_path_factory.mktemp("planted")
    script = HERE / "rehearsal_mistakes.py"
    report = folder / "report.json"
    done = rehearse_here(script, "--json", report, flags=[folder])
    return Rehearsed(script, done, json.loads(report.read_text()))


def test_every_planted_mistake_raises_its_error(planted):
    """The script prints "seen NAME on RANK" for each mistake of its table, and for three that come after it."""
    # A row of the table begins like this one: ("numpy()", "to numpy", lambda: x.numpy()),
    names_in_table = re.findall(r'^    \("(.*?)", ', planted.script.read_text(), re.MULTILINE)
    expected = {"seen a group that a rank does not make on 1"}
    for name in [*names_in_table, "objects without a set device", "functional on one GPU"]:
        expected.add(f"seen {name} on 0")
        expected.add(f"seen {name} on 1")
    assert set(planted.done.stdout.splitlines()) == expected, planted.done.stderr


def test_the_report_has_every_planted_mistake_with_its_line(planted):
    refused_lines = {refusal["line"] for refusal in planted.report["refused"]}
    for number, line in enumerate(planted.script.read_text().splitlines(), 1):
        is_mistake = re.match(r'    \(".*lambda', line)
        is_made_elsewhere = "hooked" in line  # the hook that makes this mistake is defined on another line
        if is_mistake and not is_made_elsewhere:
            assert f"{planted.script.name}:{number}" in refused_lines, line


def test_a_mistake_that_the_script_does_not_catch_ends_the_rehearsal(planted):
    last_line = len(planted.script.read_text().splitlines())
    error = f"{planted.script.name}:{last_line}: RuntimeError: No backend type associated with device type cpu"
    assert planted.done.returncode == 1
    assert re.search(rf"\n{error}.*\(ranks \[0, 1\]\)\n$", planted.done.stderr), planted.done.stderr


LOSS_ON_THE_CPU = """\
import os

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
loss = torch.tensor(1.0)
dist.all_reduce(loss)
"""


def test_the_refusal_on_the_page(tmp_path):
    script = tmp_path / "mean_loss.py"
    script.write_text(LOSS_ON_THE_CPU)
    done = rehearse_here(script, "--gpus", 2)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    text = f"$ cat {script.name}\n{LOSS_ON_THE_CPU}\n$ python -m helpers rehearse {script.name} --gpus 2\n{last_line}"
    recorded.compare("rehearsal_refused", text, "python -m pytest tests/test_rehearsal.py -k refusal")


def test_what_public_programs_do_is_right_on_simulated_gpus():
    script = HERE / "rehearsal_public.py"
    done = rehearse_here(script)
    assert done.returncode == 0, done.stderr

    names = re.findall(r"^@program\ndef (\w+)", script.read_text(), re.MULTILINE)
    assert names != []
    printed = done.stdout.splitlines()
    for name in names:
        assert f"right {name} on 0" in printed, done.stdout
        assert f"right {name} on 1" in printed, done.stdout


def test_counts_by_line(tmp_path):
    """The report says how often each line of a script made the host wait, copied, or called a collective."""
    script = HERE / "rehearsal_counted.py"
    report = tmp_path / "report.json"
    done = rehearse_here(script, "--nodes", 2, "--json", os.path.relpath(report))
    assert done.returncode == 0, done.stderr
    gpus = [("0", "GPU-0-0"), ("0", "GPU-0-1"), ("1", "GPU-1-0"), ("1", "GPU-1-1")]  # (node, uuid)
    assert done.stdout == f"{gpus}\n"
    assert done.stderr.count("Rehearsal on") == 1
    assert "cannot see real NCCL" in done.stderr

    # The first step warms up, so the mean of a step is over the others.
    steps = 5
    assert json.loads(report.read_text())["steps"] == steps
    waits = counts(report, "wait")
    line_of_item = line_of(script, "loss.item()")
    line_of_bool = line_of(script, "bool(loss")
    in_every_step = waits[line_of_item, "item"]
    assert in_every_step["count"] == steps
    assert in_every_step["per_step"] == 1
    in_one_step = waits[line_of_bool, "item"]
    assert in_one_step["count"] == 1
    assert in_one_step["per_step"] == 1 / (steps - 1)

    lines_of_training = range(line_of(script, "for step in"), line_of(script, "assert model.module"))
    lines_that_wait = {line for line, _ in waits if line in lines_of_training}
    assert lines_that_wait == {line_of_item, line_of_bool}

    bytes_of_float32 = 4
    upload = counts(report, "upload")[line_of(script, "# blocks"), "to the GPU"]
    labels_of_batch = 8
    assert upload["count"] == steps
    assert upload["bytes"] == steps * labels_of_batch * bytes_of_float32
    copy = counts(report, "copy")[line_of(script, "non_blocking"), "to the GPU"]
    assert copy["count"] == steps

    collectives = counts(report, "collective")
    total = collectives[line_of(script, "dist.all_reduce(total)"), "allreduce (NCCL)"]
    assert total["bytes"] == 2 * bytes_of_float32
    assert (line_of(script, "group=gloo_group"), "allreduce (gloo)") in collectives
    gradients = collectives[line_of(script, "loss = (model"), "allreduce by DDP, in backward"]
    parameters_of_model = 5  # four weights and a bias
    assert gradients["count"] == steps
    assert gradients["bytes"] == steps * parameters_of_model * bytes_of_float32


# A script that prints, at the end of its process, what its process was given.
FACTS = """
import atexit, json, multiprocessing, os, signal, sys, threading
import numpy
signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
facts = {
    "variables": dict(os.environ),
    "signals": [str(signal.getsignal(number)) for number in signals],
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "leads a session": os.getsid(0) == os.getpid(),
    "line": [__name__, __file__, *sys.argv, sys.path[0]],
    "processes": [str(multiprocessing.current_process()), multiprocessing.get_start_method()],
    "threads": len(threading.enumerate()),
    "draw": numpy.random.rand(),
}

def write():
    os.write(1, f"{json.dumps(facts)}\\n".encode())  # in one call, so that no other rank writes in between

atexit.register(write)
"""

# Environment variables in which a rank of a rehearsal may differ from one of torchrun.
VARIABLES_OF_THE_LAUNCHER = {
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "TORCH_DIST_USE_NCCL2",
    "TORCHINDUCTOR_CACHE_DIR",  # torch._dynamo sets it where it is imported
}
# Variables whose values are other ones in each run. They only have to be set.
VARIABLES_OF_THE_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


def facts_of_ranks(out):
    """What the ranks of FACTS have printed, in the order of the ranks, without what may differ between two launchers.

    Fails if the ranks have drawn the same random number.
    """
    ranks = [json.loads(line) for line in out.splitlines()]
    ranks.sort(key=lambda facts: facts["variables"]["RANK"])

    draws = [facts.pop("draw") for facts in ranks]
    assert len(set(draws)) == 2

    inherited = set(os.environ)  # by both launchers
    for facts in ranks:
        variables = {}
        for name, value in facts["variables"].items():
            if name in VARIABLES_OF_THE_RUN:
                variables[name] = value != ""
            elif name not in VARIABLES_OF_THE_LAUNCHER | inherited:
                variables[name] = value
        facts["variables"] = variables
    return ranks


def test_a_rank_is_as_new_as_one_of_torchrun(tmp_path):
    """A rank of a rehearsal, which is a fork, finds the same process around it as one that torchrun has started."""
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    flags = ["--steps", "3"]
    environment = dict(os.environ)
    rehearsed = subprocess.run(
        [sys.executable, "-m", "helpers", "rehearse", script, "--", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    _, out_of_torchrun, _, _ = torchrun(script, 2, environment, *flags)
    assert facts_of_ranks(rehearsed.stdout) == facts_of_ranks(out_of_torchrun)


OWN_HELPERS = """
import torch
from helpers.answers import ANSWER

x = torch.ones(ANSWER, device="cuda")
torch.save(x, "x.pt")
print("saved", torch.load("x.pt").shape, __name__, __spec__ and __spec__.name)
"""


def test_a_script_may_be_a_module_and_have_its_own_helpers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package", "train.py").write_text(OWN_HELPERS)
    Path("helpers").mkdir()
    Path("helpers", "answers.py").write_text("ANSWER = 42\n")
    done = rehearse_here("package.train", "-m", "--gpus", "1")
    assert done.stdout == "saved torch.Size([42]) __main__ package.train\n", done.stderr


FAILING = """\
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1 stops")
time.sleep(1000)
"""


def test_a_rank_that_fails_ends_the_other_node(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    done = rehearse_here(script, "--nodes", "2", "--gpus", "1")
    assert done.returncode == 1
    assert done.stderr.endswith("rank 1 stops\nrank 1 failed: exit status 1\n"), done.stderr


APART = """\
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(4, device="cuda")
model = DDP(torch.nn.Linear(4, 4).cuda())
dist.all_reduce(x)
if rank == 0:
    {}
else:
    {}
"""
# The numbers of the two lines that are filled in.
LINE_OF_RANK_0 = 11
LINE_OF_RANK_1 = 13


@dataclasses.dataclass(frozen=True)
class Call:
    """What a rank of APART does after the first all-reduce: its line of code, and the collective's name in an error."""

    code: str
    name: str


BROADCAST = Call("dist.broadcast(x, 0)", "broadcast of 4 elements of float32")
SUM = Call("dist.all_reduce(x)", "all_reduce of 4 elements of float32")
MEAN = Call("dist.all_reduce(x.mean())", "all_reduce of 1 elements of float32")
BACKWARD = Call("model(x).sum().backward()", "DDP's all_reduce of 20 gradients")


def error_on_different_calls(first_line, first_call, second_line, second_call):
    """A regular expression for the last line of a rehearsal whose ranks call different collectives.

    The first line and call are those of the rank that came first. The error is on the rank that came second:

        apart.py:13: RuntimeError: NCCL would hang or mix up values here: rank 0 at apart.py:11 calls broadcast of 4
        elements of float32, but rank 1 at apart.py:13 all_reduce of 4 elements of float32 (ranks [1])
    """
    return (
        r"apart.py:\d+: RuntimeError: NCCL would hang or mix up values here: "
        rf"rank . at apart.py:{first_line} calls {first_call.name}, "
        rf"but rank . at apart.py:{second_line} {second_call.name} \(ranks \[.\]\)\n"
    )


@pytest.mark.parametrize(("call_0", "call_1"), [(BROADCAST, SUM), (MEAN, BACKWARD)], ids=["orders", "DDP's backward"])
def test_ranks_that_do_not_meet_are_told_both_lines(call_0, call_1, tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format(call_0.code, call_1.code))
    done = rehearse_here(script)
    assert done.returncode == 1
    if_rank_0_came_first = error_on_different_calls(LINE_OF_RANK_0, call_0, LINE_OF_RANK_1, call_1)
    if_rank_1_came_first = error_on_different_calls(LINE_OF_RANK_1, call_1, LINE_OF_RANK_0, call_0)
    assert re.search(rf"\n({if_rank_0_came_first}|{if_rank_1_came_first})$", done.stderr), done.stderr


def error_on_ended_rank(line):
    """The last line of a rehearsal in which rank 0 waits in a collective and rank 1 has ended. ``line``: of rank 0."""
    missing = "NCCL would hang here: ranks [1] of the group did not come, and ranks [1] have ended"
    return f"{line}: RuntimeError: {missing} (ranks [0])\n"


def test_a_rank_that_has_ended_is_missed_in_a_collective(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "pass"))
    done = rehearse_here(script)
    assert done.returncode == 1
    assert done.stderr.endswith(error_on_ended_rank(f"apart.py:{LINE_OF_RANK_0}")), done.stderr


# Rank 0 has three batches, and rank 1 has two. The model is filled in.
UNEVEN = """\
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
model = DDP({}.cuda())
for batch in range(3 - rank):
    out = model(torch.randn(3, 4, device="cuda"))
    out.sum().backward()
"""


@pytest.mark.parametrize(
    ("model", "collective"),
    [
        ("nn.Linear(4, 4)", "out.sum().backward()"),  # averages the gradients
        ("nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))", "out = model("),  # broadcasts the buffers
    ],
)
def test_ddp_with_a_batch_fewer_on_a_rank_tells_who_has_ended(model, collective, tmp_path):
    """The error is at the line with DDP's first collective in the batch that rank 1 does not have."""
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN.format(model))
    done = rehearse_here(script)
    assert done.returncode == 1
    assert done.stderr.endswith(error_on_ended_rank(f"uneven.py:{line_of(script, collective)}")), done.stderr


RAISES = """\
import os, torch

if os.environ["RANK"] == "1":
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
torch.distributed.init_process_group('nccl')
"""


def test_the_last_line_names_the_scripts_line_and_its_error(tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    done = rehearse_here(script)
    assert done.returncode == 1
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith(f"raises.py:{line_of(script, 'linear')}: RuntimeError: "), done.stderr
    assert last_line.endswith("(ranks [1])"), done.stderr


WORKER = """\
import torch
from torch.utils.data import DataLoader, Dataset

class OnTheGPU(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, device="cuda")

torch.ones(2, device="cuda")
for batch in DataLoader(OnTheGPU(), num_workers=1, multiprocessing_context="fork"):  # not the default from 3.14 on
    print(batch)
"""


def test_a_gpu_in_a_forked_worker_is_refused_as_by_cuda(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = rehearse_here(script, "--gpus", 1)
    last_line = done.stderr.splitlines()[-1]
    error = "RuntimeError: RuntimeError: Cannot re-initialize CUDA in forked"
    assert last_line.startswith(f"worker.py:{line_of(script, 'for batch')}: {error}"), done.stderr


NOT_FORKED = """\
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index**2

if __name__ == "__main__":
    print(list(DataLoader(Squares(), None, num_workers=1, multiprocessing_context="forkserver")))
"""


def test_a_worker_that_is_not_forked_finds_a_script_that_was_named_without_its_folder(tmp_path, monkeypatch):
    """A worker that is not forked imports the script. Python makes the path absolute, from where the process began."""
    monkeypatch.chdir(tmp_path)
    Path("squares.py").write_text(NOT_FORKED)
    done = rehearse_here("squares.py", "--gpus", 1)
    assert done.returncode == 0, done.stderr
    assert "[0, 1, 4]" in done.stdout


def test_an_error_on_one_rank_is_not_missed_for_a_peers_hang(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "raise ValueError('planted')"))
    done = rehearse_here(script)
    assert done.returncode == 1
    assert "ValueError: planted" in done.stderr
    assert "did not come" not in done.stderr


def test_a_hang_is_told_with_each_ranks_line(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "time.sleep(1000)"))
    # Each rank of a rehearsal writes every second to such a file at which line it is.
    (tmp_path / "stack0").write_text(f'File "{script}", line {LINE_OF_RANK_0} in <module>\n')
    (tmp_path / "stack1").write_text(f'File "{script}", line {LINE_OF_RANK_1} in <module>\n')
    sleeping_ranks = [processes.start(["sleep", "1000"]), processes.start(["sleep", "1000"])]

    trouble = wait(sleeping_ranks, tmp_path, timeout=0.1)
    processes.end(sleeping_ranks, grace=0)

    assert trouble.message == (
        "2 of 2 ranks still ran after timeout=0.1 s:\n"
        "  rank 0: at line 11 in apart.py: dist.all_reduce(x)\n"
        "  rank 1: at line 13 in apart.py: time.sleep(1000)"
    )


ENDLESS = """\
import os, time
os.write(1, b"training\\n")
while True:
    time.sleep(1)
"""


def test_an_interrupted_rehearsal_leaves_nothing(tmp_path):
    """After Ctrl-C in the terminal, no process and no temporary file of the rehearsal is left."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    ranks = 2
    with leftovers.surroundings() as environment:
        process = subprocess.Popen(
            [sys.executable, "-m", "helpers", "rehearse", script, "--nodes", "2", "--gpus", "1"],
            cwd=ROOT,
            env=environment,
            process_group=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(ranks):
            assert process.stdout.readline() == "training\n"
        assert len(psutil.Process(process.pid).children(recursive=True)) == ranks

        os.killpg(process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole process group, too
        _, errors = process.communicate(timeout=60)
        assert leftovers.processes(environment[leftovers.MARK]) == {}
        assert leftovers.listing(environment["TMPDIR"]) == []
    assert process.returncode == 130
    assert errors == "Interrupted; all ranks are stopped.\n"
