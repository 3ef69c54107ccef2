"""Rehearsals on pretended GPUs: each planted mistake is caught, lines have the right counts, and nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

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
    """{(line, name): row} of the events of one kind in a report's JSON."""
    rows = json.loads(path.read_text())["lines"]
    return {(int(row["line"].partition(":")[2]), row["what"]): row for row in rows if row["kind"] == kind}


def line_of(script, words):
    """The number of the one line of a script that contains these words."""
    [number] = [number for number, line in enumerate(script.read_text().splitlines(), 1) if words in line]
    return number


def test_every_planted_mistake_is_seen_with_its_line(tmp_path):
    script = HERE / "rehearsal_mistakes.py"
    report = tmp_path / "report.json"
    done = rehearse_here(script, "--json", report, flags=[tmp_path])
    lines = script.read_text().splitlines()

    # The script prints "seen NAME on RANK" for each mistake of its table, and for three that come after it.
    names_in_table = re.findall(r'^    \("(.*?)", ', script.read_text(), re.MULTILINE)
    expected = {"seen a group that a rank does not make on 1"}
    for name in [*names_in_table, "objects without a set device", "functional on one GPU"]:
        expected.add(f"seen {name} on 0")
        expected.add(f"seen {name} on 1")
    assert set(done.stdout.splitlines()) == expected, done.stderr

    refused = {row["line"] for row in json.loads(report.read_text())["refused"]}
    for number, line in enumerate(lines, 1):
        is_mistake = re.match(r'    \(".*lambda', line)
        if is_mistake and "hooked" not in line:  # the hook has its own line
            assert f"{script.name}:{number}" in refused, line

    # The script does not catch its last mistake.
    assert done.returncode == 1
    last = f"{script.name}:{len(lines)}: RuntimeError: No backend type associated with device type cpu"
    assert re.search(rf"\n{last}.*\(ranks \[0, 1\]\)\n$", done.stderr), done.stderr


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
    text = f"$ cat {script.name}\n{LOSS_ON_THE_CPU}\n$ python -m helpers rehearse {script.name} --gpus 2\n"
    text += done.stderr.splitlines()[-1]
    recorded.compare("rehearsal_refused", text, "python -m pytest tests/test_rehearsal.py -k refusal")


def test_what_public_programs_do_is_right_on_pretended_gpus():
    script = HERE / "rehearsal_public.py"
    done = rehearse_here(script)
    names = re.findall(r"^    (\w+),$", script.read_text(), re.MULTILINE)
    right = {f"right {name} on {rank}" for name in names for rank in (0, 1)}
    assert set(done.stdout.splitlines()) >= right, done.stdout
    assert names and done.returncode == 0, done.stderr


def test_counts_by_line(tmp_path):
    script = HERE / "rehearsal_counted.py"
    report = tmp_path / "report.json"
    done = rehearse_here(script, "--nodes", 2, "--json", os.path.relpath(report))
    assert done.returncode == 0, done.stderr
    gpus = [(str(node), f"GPU-{node}-{gpu}") for node in range(2) for gpu in range(2)]
    assert done.stdout == f"{gpus}\n"
    assert done.stderr.count("Rehearsal on") == 1 and "cannot see real NCCL" in done.stderr
    assert json.loads(report.read_text())["steps"] == 5

    # The script makes five steps. The first one warms up, so the mean of a step is over the other four.
    waits = counts(report, "wait")
    line_of_item = line_of(script, "loss.item()")
    line_of_bool = line_of(script, "bool(loss")
    every_step = waits[line_of_item, "item"]
    assert every_step["count"] == 5 and every_step["per_step"] == 1
    once = waits[line_of_bool, "item"]
    assert once["count"] == 1 and once["per_step"] == 1 / 4
    lines_of_training = range(line_of(script, "for step in"), line_of(script, "assert model.module"))
    assert {line for line, _ in waits if line in lines_of_training} == {line_of_item, line_of_bool}

    upload = counts(report, "upload")[line_of(script, "# blocks"), "to the GPU"]
    assert upload["count"] == 5 and upload["bytes"] == 5 * 8 * 4  # eight labels of four bytes
    copy = counts(report, "copy")[line_of(script, "non_blocking"), "to the GPU"]
    assert copy["count"] == 5

    collectives = counts(report, "collective")
    assert collectives[line_of(script, "dist.all_reduce(total)"), "allreduce (NCCL)"]["bytes"] == 8
    assert (line_of(script, "group=beside"), "allreduce (gloo)") in collectives
    reduced = collectives[line_of(script, "loss = (model"), "allreduce by DDP, in backward"]
    assert reduced["count"] == 5 and reduced["bytes"] == 5 * 5 * 4  # four weights and a bias, of four bytes


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
atexit.register(lambda: os.write(1, f"{json.dumps(facts)}\\n".encode()))  # one write: no other cuts it
"""


def facts_of_ranks(out):
    """What the ranks of FACTS have printed, in their order, without what may differ between the two launchers."""
    of_launcher = {*os.environ, "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_DIST_USE_NCCL2"}
    of_launcher.add("TORCHINDUCTOR_CACHE_DIR")  # torch._dynamo sets it where it is imported
    ranks = [json.loads(line) for line in out.splitlines()]
    ranks.sort(key=lambda facts: facts["variables"]["RANK"])
    draws = {facts.pop("draw") for facts in ranks}
    assert len(draws) == 2  # each rank draws a number of its own
    for facts in ranks:
        variables = {name: value for name, value in facts["variables"].items() if name not in of_launcher}
        for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
            variables[name] = variables[name] != ""  # each run has its own; only whether it is set is compared
        facts["variables"] = variables
    return ranks


def test_a_rank_is_as_new_as_one_of_torchrun(tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    flags = ["--steps", "3"]
    command = [sys.executable, "-m", "helpers", "rehearse", script, "--", *flags]
    rehearsed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    _, out, _, _ = torchrun(script, 2, {**os.environ}, *flags)
    assert facts_of_ranks(rehearsed.stdout) == facts_of_ranks(out)


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
    assert done.returncode == 1 and done.stderr.endswith("rank 1 stops\nrank 1 failed: exit status 1\n"), done.stderr


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
# The last line of the rehearsal, with the lines and calls of the rank that came first and of the other one.
DIFFER = r"apart.py:\d+: RuntimeError: NCCL would hang or mix up values here: rank . at apart.py:{} calls {}, but "
DIFFER += r"rank . at apart.py:{} {} \(ranks \[.\]\)\n"
SUM, MEAN = "all_reduce of 4 elements of float32", "all_reduce of 1 elements of float32"
BACKWARD = r"DDP's all_reduce of 20 gradients"
# What rank 0 and rank 1 do at lines 11 and 13 of APART, and what the last line says that they call there.
MEETINGS = {
    "orders": ("dist.broadcast(x, 0)", "dist.all_reduce(x)", "broadcast of 4 elements of float32", SUM),
    "DDP's backward": ("dist.all_reduce(x.mean())", "model(x).sum().backward()", MEAN, BACKWARD),
}


@pytest.mark.parametrize(("line_0", "line_1", "call_0", "call_1"), MEETINGS.values(), ids=MEETINGS)
def test_ranks_that_do_not_meet_are_told_both_lines(line_0, line_1, call_0, call_1, tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format(line_0, line_1))
    done = rehearse_here(script)
    rank_0_came_first = DIFFER.format(11, call_0, 13, call_1)
    rank_1_came_first = DIFFER.format(13, call_1, 11, call_0)
    last_line = rf"\n({rank_0_came_first}|{rank_1_came_first})$"
    assert done.returncode == 1 and re.search(last_line, done.stderr), done.stderr


def test_a_rank_that_has_ended_is_missed_in_a_collective(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "pass"))
    done = rehearse_here(script)
    missed = "apart.py:11: RuntimeError: NCCL would hang here: ranks [1] of the group did not come"
    ended = ", and ranks [1] have ended (ranks [0])\n"
    assert done.returncode == 1 and done.stderr.endswith(missed + ended), done.stderr


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
    ("module", "number"), [("nn.Linear(4, 4)", 11), ("nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))", 10)]
)
def test_ddp_with_a_batch_fewer_on_a_rank_tells_who_has_ended(module, number, tmp_path):
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN.format(module))
    done = rehearse_here(script)
    missed = f"uneven.py:{number}: RuntimeError: NCCL would hang here: ranks [1] of the group did not come"
    ended = ", and ranks [1] have ended (ranks [0])\n"
    assert done.returncode == 1 and done.stderr.endswith(missed + ended), done.stderr


RAISES = """\
import os, sys, torch

if os.environ["RANK"] == "1":
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))
{}
"""


def test_the_last_line_names_the_scripts_line_and_its_error(tmp_path):
    script = tmp_path / "raises.py"
    script.write_text(RAISES.format("torch.distributed.init_process_group('nccl')"))
    done = rehearse_here(script)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("raises.py:4: RuntimeError: ") and last.endswith("(ranks [1])"), done.stderr


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
    last = done.stderr.splitlines()[-1]
    assert last.startswith("worker.py:12: RuntimeError: RuntimeError: Cannot re-initialize CUDA in forked"), done.stderr


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
    """It imports the script, from a path that Python makes absolute with the folder in which the process began."""
    monkeypatch.chdir(tmp_path)
    Path("squares.py").write_text(NOT_FORKED)
    done = rehearse_here("squares.py", "--gpus", 1)
    assert done.returncode == 0 and "[0, 1, 4]" in done.stdout, done.stdout + done.stderr


def test_an_error_on_one_rank_is_not_missed_for_a_peers_hang(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "raise ValueError('planted')"))
    done = rehearse_here(script)
    assert done.returncode == 1 and "ValueError: planted" in done.stderr and "did not come" not in done.stderr, (
        done.stderr
    )


def test_a_hang_is_told_with_each_ranks_line(tmp_path):
    script = tmp_path / "apart.py"
    script.write_text(APART.format("dist.all_reduce(x)", "time.sleep(1000)"))
    # Programs that sleep stand for the ranks, whose last stacks would be in these files.
    for rank, line in ((0, 11), (1, 13)):
        (tmp_path / f"stack{rank}").write_text(f'File "{script}", line {line} in <module>\n')
    ranks = [processes.start(["sleep", "1000"]) for _ in range(2)]
    trouble = wait(ranks, tmp_path, timeout=0.1)
    processes.end(ranks, grace=0)
    assert trouble.message == (
        "2 of 2 ranks still ran after timeout=0.1 s:\n"
        "  rank 0: at line 11 in apart.py: dist.all_reduce(x)\n"
        "  rank 1: at line 13 in apart.py: time.sleep(1000)"
    )


def test_an_interrupted_rehearsal_leaves_nothing(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text("import os, time\nos.write(1, b'training\\n')\nwhile True:\n    time.sleep(1)\n")
    command = [sys.executable, "-m", "helpers", "rehearse", script, "--nodes", "2", "--gpus", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with leftovers.surroundings() as environment:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0, **pipes)
        assert [process.stdout.readline() for _ in range(2)] == ["training\n"] * 2
        assert len(psutil.Process(process.pid).children(recursive=True)) == 2
        os.killpg(process.pid, signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
        assert not leftovers.processes(environment[leftovers.MARK]) and not leftovers.listing(environment["TMPDIR"])
    assert (process.returncode, errors) == (130, "Interrupted; all ranks are stopped.\n")
