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
from scripting import ROOT, rehearse_here, torchrun

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
    script, report = HERE / "rehearsal_mistakes.py", tmp_path / "report.json"
    done = rehearse_here(script, "--json", report, flags=[tmp_path])
    names = re.findall(r'^    \("(.*?)", ', script.read_text(), re.MULTILINE)
    assert len(names) >= 22
    expected = {f"seen {name} on {rank}" for name in [*names, "objects without a set device"] for rank in (0, 1)}
    expected.add("seen a group that a rank does not make on 1")
    assert set(done.stdout.splitlines()) == expected, done.stderr
    refused = {row["line"] for row in json.loads(report.read_text())["refused"]}
    lines = script.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if re.match(r'    \(".*lambda', line) and "hooked" not in line:  # the hook has its own line
            assert f"{script.name}:{number}" in refused, line
    # The script does not catch its last mistake.
    assert done.returncode == 1
    last = f"{script.name}:{len(lines)}: RuntimeError: No backend type associated with device type cpu"
    assert re.search(rf"\n{last}.*\(ranks \[0, 1\]\)\n$", done.stderr), done.stderr


def test_what_public_programs_do_is_right_on_pretended_gpus():
    script = HERE / "rehearsal_public.py"
    done = rehearse_here(script, timeout=60)
    names = re.findall(r"^    (\w+),$", script.read_text(), re.MULTILINE)
    right = {f"right {name} on {rank}" for name in names for rank in (0, 1)}
    assert set(done.stdout.splitlines()) >= right, done.stdout
    assert names and done.returncode == 0, done.stderr


ENDS = [("nccl", "os._exit"), ("cpu:gloo,cuda:nccl", "sys.exit")]  # the chapters' scripts end as others do


@pytest.mark.parametrize(("backend", "end"), ENDS, ids=[end for _, end in ENDS])
def test_counts_by_line(backend, end, tmp_path):
    script, report = HERE / "rehearsal_counted.py", tmp_path / "report.json"
    nodes = 2 if end == "sys.exit" else 1
    done = rehearse_here(script, "--nodes", str(nodes), "--json", os.path.relpath(report), flags=[backend, end])
    assert done.returncode == 0, done.stderr
    gpus = [(str(node), f"GPU-{node}-{gpu}") for node in range(nodes) for gpu in range(2)]
    assert done.stdout == f"{gpus}\n"
    assert done.stderr.count("Rehearsal on") == 1 and "cannot see real NCCL" in done.stderr
    assert json.loads(report.read_text())["steps"] == 5

    waits, uploads, copies = (counts(report, kind) for kind in ("wait", "upload", "copy"))
    every_step = waits[line_of(script, "loss.item()"), "item"]
    assert (every_step["count"], every_step["per_step"]) == (5, 1)
    once = waits[line_of(script, "bool(loss"), "item"]
    assert (once["count"], once["per_step"]) == (1, 0.25)
    upload = uploads[line_of(script, "# blocks"), "to the GPU"]
    assert (upload["count"], upload["bytes"]) == (5, 5 * 8 * 4)
    assert copies[line_of(script, "non_blocking"), "to the GPU"]["count"] == 5
    training = range(line_of(script, "for step in"), line_of(script, "assert model.module"))
    assert {line for line, _ in waits if line in training} == {line_of(script, "loss.item()"), line_of(script, "bool(")}

    collectives = counts(report, "collective")
    assert collectives[line_of(script, "dist.all_reduce(total)"), "allreduce (NCCL)"]["bytes"] == 8
    assert (line_of(script, "group=beside"), "allreduce (gloo)") in collectives
    reduced = collectives[line_of(script, "loss = (model"), "allreduce by DDP, in backward"]
    assert (reduced["count"], reduced["bytes"]) == (5, 5 * 5 * 4)


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


def test_a_rank_is_as_new_as_one_of_torchrun(tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(FACTS)
    launcher = {*os.environ, "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_DIST_USE_NCCL2"}
    launcher.add("TORCHINDUCTOR_CACHE_DIR")  # torch._dynamo sets it where it is imported
    flags = ["--steps", "3"]
    command = [sys.executable, "-m", "helpers", "rehearse", script, "--", *flags]
    rehearsal = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    runs = [rehearsal.stdout, torchrun(script, 2, {**os.environ}, *flags)[1]]
    for number, out in enumerate(runs):
        runs[number] = ranks = sorted(map(json.loads, out.splitlines()), key=lambda facts: facts["variables"]["RANK"])
        assert len({facts.pop("draw") for facts in ranks}) == 2
        for facts in ranks:
            facts["variables"] = {name: facts["variables"][name] for name in facts["variables"].keys() - launcher}
            for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
                facts["variables"][name] = bool(facts["variables"][name])
    assert runs[0] == runs[1]


LOST = [("sys.exit('rank 1 stops')", "exit status 1"), ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL")]


@pytest.mark.parametrize(("end", "cause"), LOST, ids=["its own status", "a signal"])
def test_a_rank_that_fails_ends_the_other_node(end, cause, tmp_path):
    script = tmp_path / "fails.py"
    rank_1 = f"if os.environ['RANK'] == '1':\n    {end}\n"
    script.write_text(f"import os, signal, sys, time\n{rank_1}time.sleep(100)\n")
    done = rehearse_here(script, "--nodes", "2", "--gpus", "1", timeout=90)
    stops = "rank 1 stops\n" if "stops" in end else ""
    assert (done.returncode, done.stderr.endswith(f"{stops}rank 1 failed: {cause}\n")) == (1, True), done.stderr


def test_a_hang_is_told_with_each_ranks_line(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("""\
import torch, torch.distributed as dist

dist.init_process_group("nccl")
x = torch.ones(1, device=f"cuda:{dist.get_rank()}")
if dist.get_rank() == 0:
    dist.all_reduce(x)
else:
    dist.barrier()
    dist.all_reduce(x)
""")
    done = rehearse_here(script, "--timeout", "6")
    assert done.returncode == 1
    message = "ranks still ran after timeout=6 s:\n  rank 0: at line 6 in hangs.py: dist.all_reduce(x)\n"
    assert message in done.stderr and "rank 1: at line 8 in hangs.py: dist.barrier()" in done.stderr, done.stderr


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
    assert process.returncode == 130 and errors.endswith("Interrupted; all ranks are stopped.\n")
