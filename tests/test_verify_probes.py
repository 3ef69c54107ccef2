"""The probes of a verification: what is predicted for them, and what becomes of one that fails."""

import ast
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import pytest
import torch
from scripting import ROOT

from helpers.doctor.trials import try_matmul
from helpers.export.chapters import export
from helpers.planner.cluster import PRESETS
from helpers.planner.corrections import CORRECTIONS
from helpers.planner.step_time import FITTED
from helpers.verify.measuring import measure
from helpers.verify.order import PROBES
from helpers.verify.predictions import predictions_for
from helpers.verify.probes import catalog, messages, products
from helpers.verify.probes.catalog import Task
from helpers.verify.record import Figure, read
from helpers.verify.runs import Launcher

H100 = "NVIDIA H100 80GB HBM3"


# --- predictions ------------------------------------------------------------------------------------------------------


def test_the_predictions_for_an_h100():
    step, first, peak, states = predictions_for(H100, ranks=1)["planned"]
    assert [round(number, 1) for number in (step.value, step.low, step.high)] == [127.7, 105.2, 155.0]
    assert (first.name, first.unit) == (step.name, step.unit)
    assert (first.value, first.low, first.high) == (124.6, 105.6, 199.3), "said before any GPU had run it: stays"
    assert round(peak.value, 1) == 17.9
    assert round(states.value, 2) == 4.26
    assert predictions_for("NVIDIA GeForce RTX 4090", ranks=1) == {}, "the planner does not know this GPU"


def test_a_product_alone_is_predicted_faster_than_in_a_step():
    alone = {prediction.name: prediction.value for prediction in predictions_for(H100, ranks=1)["rates"]}
    in_steps = PRESETS["h100"]["peaks"]["bfloat16"] * FITTED.matmul * CORRECTIONS.h100 / 1e12
    assert alone[catalog.product_name("bfloat16", catalog.MATRIX)] == pytest.approx(580, abs=0.1)
    assert in_steps < 500


@pytest.mark.parametrize("name", ["rates", "float8"])
def test_what_is_predicted_is_measured_under_the_same_name(name, monkeypatch):
    monkeypatch.setattr(products, "seconds_of", lambda call, device: 1.0)
    on_meta = torch.device("meta")  # It has the sizes of a GPU, and no numbers.
    measured = {(figure.name, figure.unit) for figure in getattr(products, name)(on_meta)}
    predicted = {(prediction.name, prediction.unit) for prediction in predictions_for(H100, ranks=1)[name]}
    assert predicted <= measured


def test_bus_bandwidth_is_predicted_for_the_largest_all_reduce_of_several_gpus():
    assert "bus_bandwidth" not in predictions_for(H100, ranks=1)
    [prediction] = predictions_for(H100, ranks=8)["bus_bandwidth"]
    assert prediction.name == catalog.all_reduce_name(catalog.MESSAGE) == "all-reduce, 1 GiB"


# --- one probe --------------------------------------------------------------------------------------------------------


PROBE = """\
from helpers.verify.probes.results import Text
from helpers.verify.record import Figure


def fails(device):
    yield Figure("before", 1.0, "ms")
    yield Text("said", "a line")
    raise ValueError(f"not on {device}")
"""


@pytest.fixture
def spreads(monkeypatch):
    """Of the matrices of each product, the smaller standard deviation: 0 if all numbers of one are equal."""
    product = torch.mm
    spreads = []

    def watched(a, b):
        spreads.append(min(a.float().std().item(), b.float().std().item()))
        return product(a, b)

    monkeypatch.setattr(torch, "mm", watched)
    return spreads


def test_the_doctor_multiplies_random_matrices(spreads):
    """Of equal numbers a GPU multiplies faster."""
    try_matmul("float32", torch.device("cpu"))
    assert min(spreads) > 0.9


def test_the_probe_multiplies_random_matrices_and_says_where_ones(spreads):
    for figure in products.rates(torch.device("cpu")):
        if "of ones" in figure.name:
            assert max(spreads) == 0, figure.name
        elif spreads:
            assert min(spreads) > 0.9, figure.name
        spreads.clear()


def test_a_probe_that_fails_keeps_what_it_measured(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = Launcher(1, True, tmp_path, time.monotonic() + 600)
    failed = measure(launcher, Task("fails", "broken", "A probe", 200), gpus=1)
    assert failed.trouble == "failed: ValueError: not on cpu"
    assert failed.figures == [Figure("before", 1.0, "ms")]
    assert failed.texts == {"said": "a line"}


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(900)
def test_every_probe_runs_on_the_cpu_with_small_sizes(helpers, tmp_path):
    out = tmp_path / "out"
    status, printed, errors = helpers("verify", "--rehearsal", "--minutes", "60", "--out", out, "--probes", *PROBES)
    assert (status, errors) == (0, ""), printed
    record = read(out / "results.json")
    assert {*record.probes} == {*PROBES}
    assert all(probe.figures for probe in record.probes.values()), printed
    text = (out / "page.md").read_text()
    assert all(f"## {task.title}\n" in text for task in PROBES.values())
    assert record.probes["shared_gpu"].figures[0].value == 12


# --- messages ---------------------------------------------------------------------------------------------------------


def test_what_a_mistake_should_print_is_quoted_by_the_book_or_said_by_the_rehearsal():
    files = [ROOT / "book" / "error_messages.txt", *(ROOT / "helpers" / "rehearsal").glob("*.py")]
    quoted = "\n".join(path.read_text() for path in files)
    for mistake in messages.MISTAKES:
        ast.parse(messages.PROGRAM.format(code=mistake.code))
        for message in mistake.expected:
            as_in_source = message.replace("BAND", "{operation.name}").replace("cuda:0", "{self.device}")
            assert message in quoted or as_in_source in quoted, message


# --- kills ------------------------------------------------------------------------------------------------------------

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
KILLS = 5
HEADINGS = (
    "# The book on GPUs: ",
    "## What differed from gloo, the pages' backend, and from the rehearsal",
    "## What agreed",
    "## Scripts",
)


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(1200)
def test_kills_leave_a_whole_page_and_record(tmp_path):
    """Each kill comes at a random moment after the command has begun to write. Nothing that it started outlives it."""
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK)
    command = [sys.executable, "-m", "helpers", "verify", "--rehearsal", "--gpus", "1", "--minutes", "60"]
    command += ["--chapters", script, "--probes", "rates", "launch", "copies", "nccl_memory"]
    moments = random.Random(39)
    with leftovers.surroundings() as environment:
        options = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE}
        for number in range(KILLS):
            out = tmp_path / str(number)
            process = subprocess.Popen([*command, "--out", out], **options)
            assert leftovers.wait_until((out / "results.json").exists, 200)
            time.sleep(moments.uniform(0, 10))
            process.kill()
            process.communicate()
            text = (out / "page.md").read_text()
            assert all(heading in text for heading in HEADINGS)
            read(out / "results.json")
            assert leftovers.wait_until(lambda: not leftovers.processes(environment[leftovers.MARK]), 60)
        shutil.rmtree(environment["TMPDIR"])  # A killed command leaves its scripts and logs there.
        Path(environment["TMPDIR"]).mkdir()


# --- a machine with GPUs has little else ------------------------------------------------------------------------------

REFUSED = """\
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("IPython", "nbconvert", "nbformat", "ruff"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(900)
def test_a_copy_without_git_nbformat_and_ruff_takes_the_scripts_that_came_along(tmp_path):
    """What a machine with GPUs has: PyTorch, a copy of the repository, and the folder that `make scripts` wrote."""
    copy = tmp_path / "copy"
    for name in ("helpers", "notebooks", "book"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    [script] = export("01", copy / "scripts")
    (copy / "scripts" / "COMMIT").write_text("fb68594\n")
    (tmp_path / "sitecustomize.py").write_text(REFUSED)
    out = tmp_path / "out"
    words = ["--rehearsal", "--gpus", "1", "--chapters", "01", "--probes", "rates", "--out", out, "--minutes", "60"]
    done = subprocess.run(
        [sys.executable, "-m", "helpers", "verify", *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    record = read(out / "results.json")
    assert record.facts["commit"] == "fb68594"
    assert record.steps[script.stem].result == {"world_size": 1, "sum_is_right": True}
    assert record.probes["rates"].figures
