"""The probes of a verification: what is predicted for them, and what becomes of one that fails or hangs."""

import ast
import importlib
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import psutil
import pytest
import torch
from markdown_it import MarkdownIt
from scripting import ROOT

from helpers.export.chapters import export
from helpers.verify.measuring import measure, read_results
from helpers.verify.order import PROBES
from helpers.verify.predictions import PRESETS, predictions_for
from helpers.verify.probes import catalog, messages, products
from helpers.verify.probes.catalog import Task
from helpers.verify.record import Figure, Prediction, read
from helpers.verify.runs import Launcher

H100 = "NVIDIA H100 80GB HBM3"


def test_the_predictions_for_an_h100():
    predictions = predictions_for(H100, 1)
    step, peak, states = predictions["planned"]
    assert [round(number, 1) for number in (step.value, step.low, step.high)] == [124.6, 105.6, 199.3]
    assert (round(peak.value, 1), round(states.value, 2)) == (17.9, 4.26)
    assert "bus_bandwidth" not in predictions and "bus_bandwidth" in predictions_for(H100, 8)
    assert predictions_for(H100, 10).keys() == predictions_for(H100, 8).keys()
    assert predictions_for("NVIDIA GeForce RTX 4090", 1) == {} and "float8" not in predictions_for([*PRESETS][0], 1)


@pytest.mark.parametrize("name", ["rates", "float8"])
def test_what_is_predicted_is_measured_under_the_same_name(name, monkeypatch):
    monkeypatch.setattr(products, "seconds_of", lambda call, device: 1.0)
    figures = getattr(products, name)(torch.device("meta"))  # which has the sizes of a GPU, and no numbers
    measured = {(figure.name, figure.unit) for figure in figures}
    predicted = {(prediction.name, prediction.unit) for prediction in predictions_for(H100, 1)[name]}
    assert predicted <= measured


def test_the_sizes_of_all_reduces_end_with_the_one_that_is_predicted():
    sizes = [1 << 10]
    while sizes[-1] < catalog.MESSAGE:
        sizes.append(4 * sizes[-1])
    names = [catalog.all_reduce_name(size) for size in sizes]
    assert names[0] == "all-reduce, 1 KiB" and names[-1] == "all-reduce, 1 GiB"
    assert predictions_for(H100, 8)["bus_bandwidth"][0].name == names[-1]


@pytest.mark.parametrize("task", PROBES.values(), ids=[*PROBES])
def test_a_probe_is_a_function_of_its_module_and_has_its_row(task):
    assert callable(getattr(importlib.import_module(task.module), task.name))
    assert 0 < task.seconds <= 100 and task.title


PROBE = """\
import time

from helpers.verify.probes.results import Text
from helpers.verify.record import Figure


def fails(device):
    yield Figure("before", 1.0, "ms")
    yield Text("said", "a line")
    raise ValueError(f"not on {device}")


def hangs(device):
    yield Figure("before", 1.0, "ms")
    time.sleep(1000)
"""


def test_a_probe_that_fails_or_hangs_is_a_line_and_keeps_what_it_measured(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = Launcher(1, True, tmp_path, time.monotonic() + 200)
    predictions = [Prediction("before", "ms", 2.0)]
    failed = measure(launcher, Task("fails", "broken", "A probe", 60), 1, predictions)
    assert failed.trouble == "failed: ValueError: not on cpu" and failed.texts == {"said": "a line"}
    assert failed.figures == [Figure("before", 1.0, "ms", 2.0)]
    hung = measure(launcher, Task("hangs", "broken", "A probe", 15), 1, predictions)
    assert hung.trouble == "hung: it still ran after 15 s" and hung.figures == failed.figures


def test_what_a_mistake_should_print_is_quoted_by_the_book_or_said_by_the_rehearsal():
    files = [ROOT / "book" / "error_messages.txt", *(ROOT / "helpers" / "rehearsal").glob("*.py")]
    said = "\n".join(path.read_text() for path in files)
    names = [mistake.name for mistake in messages.MISTAKES]
    assert len({*names}) == len(names)
    for mistake in messages.MISTAKES:
        ast.parse(messages.PROGRAM.format(code=mistake.code))
        for words in mistake.expected:
            as_written = words.replace("BAND", "{operation.name}").replace("cuda:0", "{self.device}")
            assert words in said or as_written in said, words


def test_a_long_output_keeps_its_beginning_and_its_end():
    assert messages.shortened("short") == "short"
    text = messages.shortened("a" * 5000 + "end")
    assert text.startswith("a" * messages.BEGINNING + "\n...\n") and text.endswith("end") and len(text) < 3100


PARENT = """\
import subprocess
import sys
import time

from helpers.ranks.leash import leashed

print(subprocess.Popen(leashed([sys.executable, "-c", "import time; time.sleep(1000)"])).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_what_a_killed_command_has_started_ends_too():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    leftovers.wait_until(
        lambda: "time.sleep(1000)" in " ".join(child.cmdline()) and "leash" not in str(child.cmdline()), 20
    )
    parent.kill()
    parent.communicate()
    child.wait(20)


@pytest.mark.ranks
def test_a_probe_goes_a_gpus_way_on_a_pretended_one(tmp_path):
    """The others have too much to compute for a CPU there."""
    task = catalog.NCCL_MEMORY
    words = [task.module, task.name, "cuda", tmp_path / "results"]
    program = "helpers.verify.probes.process"
    command = [sys.executable, "-m", "helpers", "rehearse", "-m", program, "--gpus", "1", "--", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    figures, _ = read_results(tmp_path / "results")
    assert done.returncode == 0 and len(figures) == 3, done.stderr


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(900)
def test_every_probe_runs_on_the_cpu_with_small_sizes(helpers, tmp_path):
    status, out, errors = helpers("verify", "--rehearsal", "--out", tmp_path / "out", "--probes", *PROBES)
    record = read(tmp_path / "out" / "results.json")
    assert (errors, {*record.probes}) == ("", {*PROBES}), out
    assert [probe.trouble for probe in record.probes.values() if probe.trouble] == [] and status == 0
    assert all(probe.figures for probe in record.probes.values()), out
    [gradient] = [figure for figure in record.probes["shared_gpu"].figures if "gradient, " in figure.name]
    assert gradient.ratio == 1
    text = (tmp_path / "out" / "page.md").read_text()
    assert all(f"## {task.title}\n" in text for task in PROBES.values())


ONE_RANK = """\
import json
import os

import torch
import torch.distributed as dist

device = torch.device("cpu")
backend = "gloo"
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    backend = "nccl"
dist.init_process_group(backend)
loss = torch.ones((), device=device)
dist.all_reduce(loss)
print("result", json.dumps({"loss": loss.item()}), flush=True)
dist.destroy_process_group()
"""
KILLS = 10


def is_page(text):
    """Whether a text is a whole page: Markdown with its first table, and all of its headings."""
    tokens = MarkdownIt().enable("table").parse(text)
    headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    whole = {"What differed from gloo, the pages' backend, and from the rehearsal", "What agreed", "Scripts"}
    return headings[0].startswith("The book on GPUs: ") and whole <= {*headings} and tokens[3].type == "table_open"


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(1200)
def test_ten_kills_leave_a_page_and_a_record_and_the_command_goes_on(tmp_path):
    """Each kill comes at a random moment after the command has begun to write. Nothing that it started outlives it."""
    scripts = [tmp_path / "one.py", tmp_path / "two.py"]
    for script in scripts:
        script.write_text(ONE_RANK)
    out = tmp_path / "out"
    probes = ["rates", "launch", "copies", "nccl_memory"]
    command = [sys.executable, "-m", "helpers", "verify", "--rehearsal", "--gpus", "1", "--out", out]
    command += ["--chapters", *scripts, "--probes", *probes]
    moments = random.Random(39)
    with leftovers.surroundings() as environment:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options = {"cwd": ROOT, "env": environment, "text": True, **pipes}
        kills = 0
        again = []
        while kills < KILLS:
            process = subprocess.Popen([*command, *again], **options)
            leftovers.wait_until((out / "results.json").exists, 60)
            time.sleep(moments.uniform(0, 20))
            again = []
            if process.poll() is None:
                kills += 1
                process.kill()
            else:
                again = ["--again"]  # It had ended before its moment came.
            process.communicate()
            assert is_page((out / "page.md").read_text())
            record = read(out / "results.json")
            leftovers.wait_until(lambda: not leftovers.processes(environment[leftovers.MARK]), 60)
        done = subprocess.run(command, **options)
        shutil.rmtree(environment["TMPDIR"])  # A killed command leaves its scripts and logs there.
        Path(environment["TMPDIR"]).mkdir()
    assert done.returncode == 0, done.stdout
    steps = [line for line in done.stdout.splitlines() if line.split()[0] in [*probes, "one", "two", "doctor"]]
    kept = [line for line in steps if not line[26:32].strip()]  # without seconds
    assert len(kept) == len(record.steps) + len(record.probes), done.stdout
    record = read(out / "results.json")
    assert {*record.probes} == {*probes} and {*record.steps} == {"one", "two", "doctor"}


REFUSED = """\
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("IPython", "nbconvert", "nbformat", "ruff"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_copy_without_git_nbformat_and_ruff_takes_the_scripts_that_came_along(tmp_path):
    """What a machine with GPUs has: PyTorch, a copy of the repository, and the folder that `make scripts` wrote."""
    copy = tmp_path / "copy"
    for name in ("helpers", "notebooks", "book"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    [script] = export("01", copy / "scripts")
    (copy / "scripts" / "COMMIT").write_text("fb68594\n")
    (tmp_path / "sitecustomize.py").write_text(REFUSED)
    out = tmp_path / "out"
    words = ["--rehearsal", "--gpus", "1", "--chapters", "01", "--probes", "rates", "--out", out, "--timeout", "200"]
    done = subprocess.run(
        [sys.executable, "-m", "helpers", "verify", *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    record = read(out / "results.json")
    assert record.facts["commit"] == "fb68594" and record.steps[script.stem].result == {
        "world_size": 1,
        "sum_over_expected": 1.0,
    }
    assert [*record.probes] == ["rates"] and record.probes["rates"].figures
