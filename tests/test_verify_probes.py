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
    assert round(step.value, 1) == 127.7
    assert round(step.low, 1) == 105.2
    assert round(step.high, 1) == 155.0
    assert round(peak.value, 1) == 17.9
    assert round(states.value, 2) == 4.26

    # What was predicted for the same figure before any GPU had run the step never changes.
    assert first.name == step.name
    assert first.unit == step.unit
    assert (first.value, first.low, first.high) == (124.6, 105.6, 199.3)


def test_nothing_is_predicted_for_a_gpu_that_the_planner_does_not_know():
    assert predictions_for("NVIDIA GeForce RTX 4090", ranks=1) == {}


def test_a_product_alone_is_predicted_faster_than_in_a_step():
    predictions = predictions_for(H100, ranks=1)["rates"]
    tflops = {prediction.name: prediction.value for prediction in predictions}
    alone = tflops[catalog.product_name("bfloat16", catalog.MATRIX)]
    in_a_step = PRESETS["h100"]["peaks"]["bfloat16"] * FITTED.matmul * CORRECTIONS.h100 / 1e12
    assert alone == pytest.approx(580, abs=0.1)
    assert in_a_step < 500


@pytest.mark.parametrize(("name", "probe"), [("rates", products.rates), ("float8", products.float8)])
def test_what_is_predicted_is_measured_under_the_same_name(name, probe, monkeypatch):
    """Each predicted figure is one that the probe measures, in the same unit."""

    def simulated_seconds(call, device):
        return 1.0

    monkeypatch.setattr(products, "seconds_of", simulated_seconds)
    on_meta = torch.device("meta")  # Tensors have the sizes of a GPU's there, and no numbers.
    measured = {(figure.name, figure.unit) for figure in probe(on_meta)}
    predictions = predictions_for(H100, ranks=1)[name]
    predicted = {(prediction.name, prediction.unit) for prediction in predictions}
    assert predicted <= measured


def test_bus_bandwidth_is_predicted_for_the_largest_all_reduce_of_several_gpus():
    assert "bus_bandwidth" not in predictions_for(H100, ranks=1)
    [prediction] = predictions_for(H100, ranks=8)["bus_bandwidth"]
    assert prediction.name == "all-reduce, 1 GiB"
    assert prediction.name == catalog.all_reduce_name(catalog.MESSAGE)


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
def deviations(monkeypatch):
    """A list that gets a number for each call of torch.mm: the smaller standard deviation of its two matrices.

    It is 0 if all numbers of one matrix are equal, and about 1 if both are random.
    """
    original = torch.mm
    found = []

    def watched_product(a, b):
        deviation_of_a = a.float().std().item()
        deviation_of_b = b.float().std().item()
        found.append(min(deviation_of_a, deviation_of_b))
        return original(a, b)

    monkeypatch.setattr(torch, "mm", watched_product)
    return found


def test_the_doctor_multiplies_random_matrices(deviations):
    """A GPU would multiply matrices of equal numbers faster."""
    try_matmul("float32", torch.device("cpu"))
    assert min(deviations) > 0.9


def test_the_probe_multiplies_random_matrices_and_says_where_ones(deviations):
    for figure in products.rates(torch.device("cpu")):
        if "of ones" in figure.name:
            assert max(deviations) == 0, figure.name
        elif deviations:  # The last figure is a copy, without a product.
            assert min(deviations) > 0.9, figure.name
        deviations.clear()


def test_a_probe_that_fails_keeps_what_it_measured(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    launcher = Launcher(ranks=1, rehearsal=True, folder=tmp_path, end=time.monotonic() + 600)
    task = Task(name="fails", module="broken", title="A probe", seconds=200)
    failed = measure(launcher, task, gpus=1)
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
    page = (out / "page.md").read_text()
    assert set(record.probes) == set(PROBES)
    for name, task in PROBES.items():
        assert record.probes[name].figures, printed
        assert f"## {task.title}\n" in page
    mean_gradient = record.probes["shared_gpu"].figures[0]
    assert mean_gradient.value == 12


# --- messages ---------------------------------------------------------------------------------------------------------


def test_what_a_mistake_should_print_is_quoted_by_the_book_or_said_by_the_rehearsal():
    book = ROOT / "book" / "error_messages.txt"
    rehearsal = (ROOT / "helpers" / "rehearsal").glob("*.py")
    quoted = "\n".join(path.read_text() for path in (book, *rehearsal))
    for mistake in messages.MISTAKES:
        ast.parse(messages.PROGRAM.format(code=mistake.code))
        for message in mistake.expected:
            # In the rehearsal's source a message may be an f-string.
            in_source = message.replace("BAND", "{operation.name}").replace("cuda:0", "{self.device}")
            assert message in quoted or in_source in quoted, message


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
    """The command is killed several times, each time at a random moment after it has begun to write its files.

    They are complete then, and no process that the command started outlives it.
    """
    script = tmp_path / "script.py"
    script.write_text(ONE_RANK)
    command = [sys.executable, "-m", "helpers", "verify", "--rehearsal", "--gpus", "1", "--minutes", "60"]
    command += ["--chapters", script, "--probes", "rates", "launch", "copies", "nccl_memory"]
    moments = random.Random(39)
    with leftovers.surroundings() as environment:

        def all_processes_are_gone():
            return not leftovers.processes(environment[leftovers.MARK])

        options = {"cwd": ROOT, "env": environment, "text": True, "stdout": subprocess.PIPE}
        for number in range(KILLS):
            out = tmp_path / str(number)
            process = subprocess.Popen([*command, "--out", out], **options)
            assert leftovers.wait_until((out / "results.json").exists, 200)
            time.sleep(moments.uniform(0, 10))
            process.kill()
            process.communicate()

            page = (out / "page.md").read_text()
            for heading in HEADINGS:
                assert heading in page
            read(out / "results.json")  # It raises an error for a file that is not complete.
            assert leftovers.wait_until(all_processes_are_gone, 60)
        shutil.rmtree(environment["TMPDIR"])  # A killed command leaves its scripts and logs there.
        Path(environment["TMPDIR"]).mkdir()


# --- a machine with GPUs has little else ------------------------------------------------------------------------------

# A sitecustomize.py, which Python imports when it starts. With it, some modules cannot be imported.
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
    """A machine with GPUs has PyTorch, a copy of the repository, and the folder that `make scripts` wrote."""
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
