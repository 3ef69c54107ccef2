"""The verification of the book on GPUs: rehearsed here, with planted differences, each of which is named."""

import dataclasses
import json
import subprocess
import sys

import pytest
import recorded
from scripting import ROOT

from helpers.verify.compare import differences
from helpers.verify.machine import Machine, obstacle
from helpers.verify.page import page
from helpers.verify.record import Step
from helpers.verify.runs import Run, cause

SCRIPT = """\
import json
import os
import time

import torch
import torch.distributed as dist

gpu = torch.cuda.is_available()
observed = gpu and torch.cuda.get_sync_debug_mode() == 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
loss = torch.ones((), device=device)
dist.all_reduce(loss)
dist.barrier()
PLANTED
result = {"world_size": dist.get_world_size(), "loss": loss.item()}
if dist.get_rank() == 0:
    print("result", json.dumps(result), flush=True)
dist.destroy_process_group()
"""
PLANTED = {
    "equal": "torch.ones(2).to(device)",
    "differs": "loss += gpu\nif observed:\n    loss.item()\n    dist.all_reduce(torch.ones(1, device=device))",
    "hangs": "if observed or not gpu:\n    time.sleep(1000)",
}


@pytest.mark.daily
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_planted_differences_are_named_and_what_has_ended_is_kept(helpers, tmp_path):
    scripts = {name: tmp_path / f"{name}.py" for name in PLANTED}
    for name, lines in PLANTED.items():
        scripts[name].write_text(SCRIPT.replace("PLANTED", lines))
    hanging = scripts.pop("hangs")
    command = ["verify", "--rehearsal", "--out", tmp_path / "out", "--chapters", *scripts.values()]
    status, out, errors = helpers(*command)
    progress = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    assert (status, errors) == (1, ""), out
    assert "2 x pretended GPU" in progress["machine"] and "nothing is wrong" in progress["doctor"]
    assert progress["equal"].endswith("result as on gloo; 3 waits and 2 collectives as rehearsed")
    assert "DIFFERS differs.py:19 waits: 1 times on GPUs" in progress["differs"] and "2 more" in progress["differs"]
    shown = [line for line in out.splitlines() if line.startswith(("doctor", *scripts))]
    recorded.compare("verify", "\n".join(shown), "python -m pytest tests/test_verify.py", [r" +\d+ s "])

    status, out, errors = helpers(*command, hanging, "--timeout", "40")
    again = {line[:26].strip(): line[26:].strip() for line in out.splitlines()}
    kept = ["machine", "doctor", *scripts]
    assert [again[name] for name in kept] == [progress[name].partition(" s  ")[2] or progress[name] for name in kept]
    assert status == 1 and "on GPUs it hung: rank" in again["hangs"] and "time.sleep(1000)" in again["hangs"]
    [on_gloo] = [line for line in (tmp_path / "out" / "page.md").read_text().splitlines() if "on gloo it hung" in line]
    assert on_gloo.startswith("- hangs: on gloo it hung: rank 0: at line 18 in hangs.py: time.sleep(1000)")
    text = (tmp_path / "out" / "page.md").read_text()
    for line in (
        "- differs: differs.py:19 waits: 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: differs.py:20 allreduce (NCCL): 1 times on GPUs, 0 as rehearsed, outside of the steps",
        "- differs: loss is 3.0 on GPUs and 2.0 on gloo (tolerance 0.01)",
        "`torchrun --nproc-per-node=2 equal.py` | world_size 2, loss 2 |",
    ):
        assert line in text, text
    assert text.startswith("# The book on GPUs: rehearsed, not run on a GPU\n") and "- equal" not in text


@pytest.mark.ranks
def test_a_machine_without_gpus_and_a_wrong_start(helpers, tmp_path):
    status, out, errors = helpers("verify", "--out", tmp_path, "--chapters", "04")
    assert (status, out) == (1, "") and errors.startswith("error: ") and errors.count("\n") == 2
    assert helpers("verify", "--rehearsal", "--record", "--out", tmp_path)[0] == 1
    assert "no chapter" in helpers("verify", "--out", tmp_path, "--chapters", "99")[2]


def test_paths_of_scripts_need_nothing_of_the_export(tmp_path):
    """A machine with GPUs may have neither nbformat nor ruff."""
    code = f"""\
import sys
from pathlib import Path

for name in ("IPython", "jinja2", "nbformat", "ruff"):
    sys.modules[name] = None  # no import gets it

from helpers.__main__ import main
from helpers.verify.command import scripts_of

print(*scripts_of(["one.py", "two.py"], Path("out")))
sys.exit(main(["verify", "--rehearsal", "--record", "--chapters", "one.py", "--out", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{ROOT}/one.py {ROOT}/two.py\n" and "ModuleNotFoundError" not in done.stderr, done.stderr
    assert done.returncode == 1 and done.stderr.startswith("error: --record is for real GPUs"), done.stderr


NONE = Machine([], "570.86", "2.13.0", "12.8", "", "3.12.3")
MACHINES = [
    (dataclasses.replace(NONE, driver=""), "nvidia-smi is missing"),
    (dataclasses.replace(NONE, cuda=""), "build for CPUs"),
    (dataclasses.replace(NONE, error="The NVIDIA driver on your system is too old (found 12000)"), "570.86 is too old"),
    (NONE, "PyTorch sees no GPU: none is visible"),
    (dataclasses.replace(NONE, gpus=["H100"] * 2), "This machine has 2 GPUs, and --gpus asks for 4"),
]


@pytest.mark.parametrize(("machine", "words"), MACHINES, ids=[words for _, words in MACHINES])
def test_what_stops_a_machine_is_said_in_two_lines(machine, words):
    text = obstacle(machine, 4)
    assert words in text and text.count("\n") == 1


def run(trouble="", loss=1.0, **counts):
    rows = [{"line": "x.py:1", "kind": "wait", "what": what, "count": n, "in_steps": n} for what, n in counts.items()]
    return Run(trouble, "", {"loss": loss}, 1.0, [2_000_000], rows)


def test_differences():
    assert differences(run(item=2, mask=1), run(), run(item=3), 0.01) == []
    assert differences(run(loss=1.04), run(), run(), 0.05) == []
    [line] = differences(run(item=2), run(), run(item=1), 0.01)
    assert line == "x.py:1 waits: 2 times on GPUs, 1 as rehearsed, in the steps"
    [line] = differences(run(loss=float("nan")), run(), run(), 0.01)
    assert line.startswith("loss is nan on GPUs and 1.0 on gloo")
    [line] = differences(run("failed: NCCL Error 5"), run(), run(), 0.01)
    assert line == "on GPUs it failed: NCCL Error 5; the rehearsal accepted it"
    lines = differences(run(), run("failed: A"), run("failed: B"), 0.01)
    assert lines == ["on GPUs it ran, and the rehearsal failed: B", "on gloo it failed: A"]


def test_the_cause_of_a_failure():
    lines = ["[rank1]: Traceback", "[rank1]: torch.cuda.OutOfMemoryError: CUDA out of memory", "  ChildFailedError:"]
    assert cause("\n".join(lines)) == "torch.cuda.OutOfMemoryError: CUDA out of memory"
    assert cause("E failed\nSignal 9 (SIGKILL) received by PID 12\n--") == "Signal 9 (SIGKILL) received by PID 12"
    assert cause("") == "no message"


def test_a_page_of_real_gpus():
    facts = {"machine": str(dataclasses.replace(NONE, gpus=["H100"] * 8)), "commit": "abc"}
    steps = {"one": Step(9.0, [], "as on gloo", "torchrun one.py", {"loss": 1.0}, [1.0, 2.0], [2_000_000] * 2)}
    steps["02, speed"] = Step(9.0, [], "", "torchrun 02.py", printed="all_reduce 480 GB/s\n")
    text = page(facts, False, steps, ["other"], {"one": 0.01, "other": 0.2})
    assert text.startswith("# The book on GPUs: 8 x H100\n") and "Nothing." in text and "run yet: other" in text
    assert "| `torchrun one.py` | loss 1 | 1.0, 2.0 | 2, 2 |" in text and "480 GB/s\n```\n" in text
    assert "The tolerance of results is 0.01, and 0.2 in other. Not compared:" in text
    assert json.dumps(text) and (ROOT / "book" / "measured").is_dir()
