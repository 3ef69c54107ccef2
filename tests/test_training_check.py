"""The check for mistakes that raise no error: each kind is found, its repair is silent, and so are correct programs."""

import ast
import json
import sys
import time

import cloudpickle
import nbformat
import pytest
import silent_mistakes
import torch
import torch.distributed as dist
from forked import forked, script_on_ranks
from mdit_py_plugins.anchors.index import slugify
from scripting import CHAPTERS, ROOT, export, rehearse_here, stand_alone
from torch import nn

from helpers import training_check
from helpers.ranks.launch import launch
from helpers.training_check import (
    KINDS,
    Calls,
    CodeLine,
    Finding,
    Forward,
    Model,
    Parameter,
    Record,
    Step,
    TrainingCheck,
    check_training,
    compare,
    compare_calls,
    report,
)

for module in (silent_mistakes, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # a rank cannot import it

MISTAKES = silent_mistakes.MISTAKES
CORRECT = silent_mistakes.CORRECT
FILE = ROOT / "helpers" / "training_check.py"


# --- every mistake of the catalogue -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def catalogue():
    """What ``run_catalogue`` returned on each of two ranks, as a list."""
    return launch(silent_mistakes.run_catalogue, nproc=2, timeout=300)


NO_FINDINGS = {"kinds": [], "errors": []}


@pytest.mark.ranks
@pytest.mark.timeout(600)
class TestCatalogue:
    @pytest.mark.parametrize("program", MISTAKES)
    def test_a_mistake_is_found_on_all_ranks(self, program, catalogue):
        kind, _ = MISTAKES[program]
        expected = {"kinds": [kind], "errors": []}
        assert [results[f"{program} wrong"] for results in catalogue] == [expected, expected]

    @pytest.mark.parametrize("program", MISTAKES)
    def test_a_repaired_mistake_is_not_reported(self, program, catalogue):
        assert [results[f"{program} repaired"] for results in catalogue] == [NO_FINDINGS, NO_FINDINGS]

    @pytest.mark.parametrize("program", CORRECT)
    def test_a_correct_program_has_no_findings(self, program, catalogue):
        assert [results[f"{program} correct"] for results in catalogue] == [NO_FINDINGS, NO_FINDINGS]


def test_each_kind_has_a_program_that_makes_the_mistake():
    assert {kind for kind, _ in MISTAKES.values()} == set(KINDS)


def test_each_page_that_a_finding_names_exists():
    for kind in KINDS.values():
        path, anchor = kind.page.split("#")
        assert anchor in anchors_of(ROOT / path), kind.page


def anchors_of(notebook):
    """The anchors of a notebook's headings: "who-gets-what" for the heading "## Who gets what?"."""
    anchors = set()
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("#"):
                    title = line.lstrip("# ").replace("`", "")
                    anchors.add(slugify(title))
    return anchors


def test_a_script_can_carry_the_file():
    """The file imports only PyTorch and the standard library, so it works when it is copied beside a script."""
    imported_modules = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            imported_modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported_modules.add(node.module)
    packages = {module.partition(".")[0] for module in imported_modules}
    assert packages <= {"torch", *sys.stdlib_module_names}


# --- training is not disturbed ----------------------------------------------------------------------------------------


def train_with_dropout(is_checked):
    """In a rank: make six steps with dropout, of which the check observes three if there is one.

    Returns {"weights": the weights after them, "next random number": a number drawn after them}.
    """
    model = nn.parallel.DistributedDataParallel(silent_mistakes.network(dropout=0.5))
    silent_mistakes.GENERATOR.manual_seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    if is_checked:
        with check_training(steps=3):
            silent_mistakes.train(model, silent_mistakes.sgd(model), steps=6)
    else:
        silent_mistakes.train(model, silent_mistakes.sgd(model), steps=6)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"weights": weights, "next random number": torch.rand(1).item()}


@pytest.mark.ranks
def test_training_has_the_same_bits_with_and_without_the_check():
    assert launch(train_with_dropout, True, nproc=2) == launch(train_with_dropout, False, nproc=2)


def test_nothing_stays_patched():
    patched = [
        (nn.Module, "__call__"),
        (torch.Tensor, "item"),
        (torch.autograd, "backward"),
        (dist, "all_reduce"),
        (nn.utils, "clip_grad_norm_"),
        (torch.utils.data.DataLoader, "__iter__"),
    ]
    observer = training_check.TrainingObserver(steps=20)

    before = [getattr(owner, name) for owner, name in patched]
    observer.start()
    during = [getattr(owner, name) for owner, name in patched]
    observer.stop()
    observer.remove_hooks()
    after = [getattr(owner, name) for owner, name in patched]

    for original, replacement in zip(before, during, strict=True):
        assert replacement is not original
    assert after == before
    assert "item" not in vars(torch.Tensor)  # it is inherited again


def train_alone():
    """In a rank: train a model that is not wrapped, for a few steps without communication."""
    model = silent_mistakes.network()
    silent_mistakes.train(model, silent_mistakes.sgd(model))


def rank_1_fails_before_its_first_step(patience):
    """In a rank: rank 1 leaves the check by an exception, and rank 0 makes its steps.

    Returns what the rank's check knows at the end, and how many seconds that took.
    """
    start = time.monotonic()
    try:
        with check_training(patience=patience) as check:
            if dist.get_rank() == 1:
                raise KeyError("an error of the script")
            train_alone()
    except KeyError:
        pass
    seconds = time.monotonic() - start
    return {"findings": check.findings, "missing": check.missing, "seconds": seconds}


@pytest.mark.ranks
def test_ranks_with_other_numbers_of_steps_keep_nobody_waiting():
    patience = 60
    rank_0, rank_1 = launch(rank_1_fails_before_its_first_step, patience, nproc=2)
    assert rank_0["findings"] == []
    assert rank_0["missing"] == []
    assert rank_0["seconds"] < patience / 2
    assert rank_1["seconds"] < patience / 2


def rank_1_has_no_check():
    """In a rank: rank 0 waits one second for the record of rank 1. Returns the ranks that rank 0 has missed."""
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    with check_training(patience=1) as check:
        train_alone()
    dist.barrier()
    return check.missing


@pytest.mark.ranks
def test_a_rank_without_notes_is_named_after_the_patience():
    rank_0, _ = launch(rank_1_has_no_check, nproc=2)
    assert rank_0 == [1]


def train_longer_than_it_is_observed():
    """In a rank: train an unwrapped model for eight steps, of which two are observed.

    Returns {"known before the end": whether the rank had the findings within the context, "kinds": those of them}.
    """
    model = silent_mistakes.network()
    optimizer = silent_mistakes.sgd(model)
    loader = silent_mistakes.divided_loader(silent_mistakes.samples(128))
    with check_training(steps=2) as check:
        for inputs, _ in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            dist.barrier()
        is_known = check.findings is not None
    kinds = [finding.kind for finding in check.findings]
    return {"known before the end": is_known, "kinds": kinds}


@pytest.mark.ranks
def test_rank_0_reports_as_soon_as_all_ranks_have_made_the_steps():
    rank_0, rank_1 = launch(train_longer_than_it_is_observed, nproc=2)
    assert rank_0 == {"known before the end": True, "kinds": ["drift"]}
    assert rank_1 == {"known before the end": False, "kinds": ["drift"]}  # rank 1 gets them at the end


# --- the comparison of more than two ranks ----------------------------------------------------------------------------


def record_of(rank, data_ranks, batches, weights, device="one kind"):
    """The record of one of four ranks, which trains a DDP model of one parameter and makes a step on each batch.

    ``data_ranks``: the ranks in its DDP group. ``batches``: a checksum of each batch. ``weights``: a checksum of the
    parameter after each step. Before the first step it is 0 on all ranks.
    """
    model = "DDP Net 1"
    key = f"{model}: weight"
    code_line = CodeLine("train.py", 1)
    record = Record(rank=rank, world_size=4, device=device)
    record.models[model] = Model(wrapper="DDP", data_ranks=data_ranks)
    record.parameters[key] = Parameter(model=model, name="weight", kind="DDP", size=64, replicas=data_ranks)
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), start=1):
        record.forwards.append(Forward(model=model, code_line=code_line, inputs=batch, elements=64))
        step = Step(
            optimizer=0,
            number=number,
            code_line=code_line,
            learning_rates=(0.1,),
            settings=0,
            calls={model: Calls(to_average=number, to_broadcast=0, averaged=number, synchronized=True)},
            weights_after={key: weight},
        )
        if number == 1:
            step.weights_before = {key: 0}
        record.steps.append(step)
    return record


ALL_RANKS = (0, 1, 2, 3)


def test_only_the_ranks_that_share_their_samples_are_named():
    records = [
        record_of(0, ALL_RANKS, batches=(1, 2), weights=(7, 8)),
        record_of(1, ALL_RANKS, batches=(3, 4), weights=(7, 8)),
        record_of(2, ALL_RANKS, batches=(1, 2), weights=(7, 8)),
        record_of(3, ALL_RANKS, batches=(5, 6), weights=(7, 8)),
    ]
    [found] = compare(records)
    assert found.kind == "same_samples"
    assert found.ranks == (0, 2)


def test_all_ranks_that_share_their_samples_are_named_at_once():
    records = [record_of(rank, ALL_RANKS, batches=(1, 2), weights=(7, 8)) for rank in ALL_RANKS]
    [found] = compare(records)
    assert found.ranks == ALL_RANKS
    assert found.sentence == "Ranks 0, 1, 2 and 3 train on the same 2 batches."


def test_replicas_are_compared_within_their_group():
    """Two DDP groups of two ranks each, like two stages of a pipeline, may have different weights and equal batches."""
    records = [
        record_of(0, (0, 1), batches=(1, 2), weights=(0, 9)),
        record_of(1, (0, 1), batches=(3, 4), weights=(0, 9)),
        record_of(2, (2, 3), batches=(1, 2), weights=(1, 10)),
        record_of(3, (2, 3), batches=(3, 4), weights=(1, 10)),
    ]
    assert compare(records) == []

    records[3].steps[1].weights_after = {"DDP Net 1: weight": 50}
    [found] = compare(records)
    assert found.kind == "drift"
    assert found.ranks == (2, 3)


def test_gpus_of_two_kinds_may_round_differently():
    """The weights of all four ranks differ after the first step, which is no finding."""
    records = [
        record_of(0, ALL_RANKS, batches=(0, 9), weights=(0, 0), device="one kind"),
        record_of(1, ALL_RANKS, batches=(1, 10), weights=(1, 1), device="one kind"),
        record_of(2, ALL_RANKS, batches=(2, 11), weights=(2, 2), device="another kind"),
        record_of(3, ALL_RANKS, batches=(3, 12), weights=(3, 3), device="another kind"),
    ]
    assert compare(records) == []


# --- what is reported -------------------------------------------------------------------------------------------------


def test_the_report_names_the_line_the_ranks_the_cure_and_the_page():
    finding = Finding(
        kind="drift",
        file="/x/train.py",
        line=31,
        ranks=(0, 1),
        sentence="The weights differ.",
        cure="Average them.",
        page="notebooks/14.ipynb#drift",
    )
    assert report([finding]).splitlines() == [
        "silent mistakes",
        "  train.py:31, ranks 0 and 1: The weights differ.",
        "    Average them.",
        "    notebooks/14.ipynb#drift  (--allow drift)",
    ]


def test_the_report_of_nothing_says_how_many_kinds_were_looked_for():
    assert report([]).splitlines() == ["silent mistakes", f"  none of the {len(KINDS)} kinds"]


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no kind drifts. Known are same_samples, "):
        TrainingCheck(20, 30, allow=["drifts"])


# A script that wraps its model in nothing, so the weights drift apart. The step is in line DRIFT_LINE.
SCRIPT = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 8))
for [inputs] in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
DRIFT_LINE = 14


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment variables with which a script cannot import this project."""
    return stand_alone(tmp_path_factory.mktemp("path"))


def run_under_carried_check(script, environment, *options):
    """Run a script on two ranks by a copy of the check beside it: ``torchrun training_check.py options script``.

    Returns what it printed to stdout and stderr, and the findings of its JSON file. Fails if the script fails.
    """
    carried = script.parent / "training_check.py"
    carried.write_text(FILE.read_text())
    json_file = script.parent / "found.json"
    work = script_on_ranks(carried, 2, "--json", json_file, *options, script)
    status, out, errors, processes_left = forked(work, environment)
    assert status == 0, errors
    assert processes_left == []
    return {"out": out, "errors": errors, "findings": json.loads(json_file.read_text())}


@pytest.mark.ranks
def test_a_script_runs_unchanged_under_the_check(tmp_path, environment):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    done = run_under_carried_check(script, environment)
    assert done["out"] == ""
    [finding] = done["findings"]
    assert finding["kind"] == "drift"
    assert finding["line"] == DRIFT_LINE
    assert finding["ranks"] == [0, 1]
    assert f"train.py:{DRIFT_LINE}, ranks 0 and 1: " in done["errors"]

    done = run_under_carried_check(script, environment, "--allow", "drift")
    assert done["out"] == ""
    assert done["findings"] == []
    assert "train.py:" not in done["errors"]


@pytest.mark.ranks
def test_a_rehearsal_names_a_silent_mistake_and_fails_unless_it_is_allowed(tmp_path):
    on_gpus = SCRIPT.replace('"gloo"', '"nccl"')
    on_gpus = on_gpus.replace("nn.Linear(8, 8)", "nn.Linear(8, 8).cuda(dist.get_rank())")
    on_gpus = on_gpus.replace("model(inputs)", "model(inputs.cuda(dist.get_rank()))")
    script = tmp_path / "train.py"
    script.write_text(on_gpus)
    json_file = tmp_path / "report.json"

    done = rehearse_here(script, "--json", json_file)
    assert done.returncode == 1, done.stderr
    [finding] = json.loads(json_file.read_text())["silent_mistakes"]
    assert finding["kind"] == "drift"
    assert finding["line"] == DRIFT_LINE
    assert section_on_mistakes(done.stderr).startswith(f"train.py:{DRIFT_LINE}, ranks 0 and 1: ")

    done = rehearse_here(script, "--json", json_file, "--allow", "drift")
    assert done.returncode == 0, done.stderr
    assert json.loads(json_file.read_text())["silent_mistakes"] == []
    assert section_on_mistakes(done.stderr) == f"none of the {len(KINDS)} kinds"


def section_on_mistakes(printed):
    """What a rehearsal has printed under the title *silent mistakes*, which is its last section."""
    _, _, section = printed.partition("\nsilent mistakes\n")
    return section.strip()


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(600)
def test_simulated_gpus_change_no_finding(tmp_path):
    """In a rehearsal, the programs of the catalogue have the same findings as on real devices."""
    done = rehearse_here(ROOT / "tests" / "support" / "rehearsal_silent.py", flags=[tmp_path], timeout=500)
    expected = {}
    for name, (kind, _) in MISTAKES.items():
        expected[f"{name} wrong"] = {"kinds": [kind], "errors": []}
        expected[f"{name} repaired"] = NO_FINDINGS
    for name in CORRECT:
        expected[f"{name} correct"] = NO_FINDINGS
    for rank in range(2):
        results = json.loads((tmp_path / f"results-{rank}.json").read_text())
        assert results == expected, done.stderr


STEP = Step(optimizer=0, number=2, code_line=CodeLine("train.py", 3), learning_rates=(0.1,), settings=0, calls={})


def test_a_call_with_gradients_on_some_ranks_is_a_mistake():
    rank_0 = Calls(to_average=3, to_broadcast=0, averaged=2)
    rank_1 = Calls(to_average=2, to_broadcast=0, averaged=2)
    found = compare_calls({0: rank_0, 1: rank_1}, STEP)
    assert (found.kind, found.ranks, found.is_note) == ("rank_alone", (0,), False)


def test_a_call_without_gradients_on_some_ranks_is_only_a_note():
    """Because DDP's broadcasts of buffers pair up after it."""
    rank_0 = Calls(to_average=2, to_broadcast=1, averaged=2)
    rank_1 = Calls(to_average=2, to_broadcast=0, averaged=2)
    found = compare_calls({0: rank_0, 1: rank_1}, STEP)
    assert (found.kind, found.ranks, found.is_note) == ("rank_alone", (0,), True)


def train_and_log_loss_of_rank_0():
    """In a rank: a training in which rank 0 reads the loss of its own share, which is reported as a note."""
    silent_mistakes.GENERATOR.manual_seed(dist.get_rank())
    silent_mistakes.rank_0_logs_its_own_loss(True)


@pytest.mark.ranks
def test_launch_prints_what_it_found(capsys):
    """``launch(…, check=True)`` prints a note below the verdict on the mistakes."""
    launch(train_and_log_loss_of_rank_0, nproc=2, check=True)
    out = capsys.readouterr().out
    assert out.index(f"none of the {len(KINDS)} kinds") < out.index("note: silent_mistakes.py:")


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_script_has_no_findings(notebook, tmp_path, environment):
    script = export(notebook, tmp_path)
    done = run_under_carried_check(script, environment)
    assert done["findings"] == []
    assert "The check itself failed" not in done["errors"]
