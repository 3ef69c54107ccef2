"""The check for mistakes that raise no error: each kind is found, its repair is silent, and so are correct programs."""

import ast
import json
import sys
import time
import traceback

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
    report,
)

for module in (silent_mistakes, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)  # a rank cannot import it

MISTAKES = silent_mistakes.MISTAKES
CORRECT = silent_mistakes.CORRECT
FILE = ROOT / "helpers" / "training_check.py"
RANKS = [pytest.mark.ranks, pytest.mark.timeout(600)]


def checked(program, *arguments):
    """In a rank: run a program under the check. Returns the kinds found, and what went wrong apart from that."""
    silent_mistakes.GENERATOR.manual_seed(100 + dist.get_rank())
    with check_training(patience=10) as check:
        try:
            program(*arguments)
            errors = []
        except Exception:
            errors = [traceback.format_exc()]
    return sorted({found.kind for found in check.findings}), errors + check.observer.record.failures


def run_catalogue():
    """In a rank: all programs, one after the other."""
    results = {}
    for name, (_, program) in MISTAKES.items():
        results[name, "wrong"] = checked(program, True)
        results[name, "repaired"] = checked(program, False)
    for name, program in CORRECT.items():
        results[name, "correct"] = checked(program)
    return results


@pytest.fixture(scope="module")
def catalogue():
    """The results of each rank, {(name of the program, how it ran): (kinds, errors)}."""
    return launch(run_catalogue, nproc=2, timeout=300)


def pytest_generate_tests(metafunc):
    if "program" in metafunc.fixturenames:
        metafunc.parametrize("program", MISTAKES if "mistake" in metafunc.function.__name__ else CORRECT)


class TestCatalogue:
    pytestmark = RANKS

    def test_a_mistake_is_found_on_all_ranks(self, program, catalogue):
        kind, _ = MISTAKES[program]
        assert [results[program, "wrong"] for results in catalogue] == [([kind], [])] * 2

    def test_a_repaired_mistake_is_not_reported(self, program, catalogue):
        assert [results[program, "repaired"] for results in catalogue] == [([], [])] * 2

    def test_a_correct_program_has_no_findings(self, program, catalogue):
        assert [results[program, "correct"] for results in catalogue] == [([], [])] * 2


def test_each_kind_has_a_program_that_makes_the_mistake():
    assert {kind for kind, _ in MISTAKES.values()} == set(KINDS)


def test_each_page_that_a_finding_names_exists():
    for kind in KINDS.values():
        path, anchor = kind.page.split("#")
        cells = nbformat.read(ROOT / path, as_version=4).cells
        lines = [line for cell in cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
        titles = [line.lstrip("# ").replace("`", "") for line in lines if line.startswith("#")]
        assert anchor in {slugify(title) for title in titles}, kind.page


def test_a_script_can_carry_the_file():
    """It imports PyTorch and the standard library alone."""
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names <= {"torch", *sys.stdlib_module_names}


# --- training is not disturbed ----------------------------------------------------------------------------------------


def train_and_compare(check):
    """In a rank: the weights after some steps with dropout, and a random number drawn afterwards."""
    model = nn.parallel.DistributedDataParallel(silent_mistakes.network(dropout=0.5))
    silent_mistakes.GENERATOR.manual_seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    if check:
        with check_training(steps=3):
            silent_mistakes.train(model, silent_mistakes.sgd(model), steps=6)
    else:
        silent_mistakes.train(model, silent_mistakes.sgd(model), steps=6)
    return [parameter.tolist() for parameter in model.parameters()], torch.rand(1).item()


@pytest.mark.ranks
def test_training_has_the_same_bits_with_and_without_the_check():
    assert launch(train_and_compare, True, nproc=2) == launch(train_and_compare, False, nproc=2)


def test_nothing_stays_patched():
    patched = [
        (nn.Module, "__call__"),
        (torch.Tensor, "item"),
        (torch.autograd, "backward"),
        (dist, "all_reduce"),
        (nn.utils, "clip_grad_norm_"),
        (torch.utils.data.DataLoader, "__iter__"),
    ]
    before = [getattr(owner, name) for owner, name in patched]
    observer = training_check.TrainingObserver(steps=20)
    observer.start()
    assert all(getattr(owner, name) is not old for (owner, name), old in zip(patched, before, strict=True))
    observer.stop()
    observer.remove_hooks()
    assert [getattr(owner, name) for owner, name in patched] == before
    assert "item" not in vars(torch.Tensor)


def train_alone():
    model = silent_mistakes.network()
    silent_mistakes.train(model, silent_mistakes.sgd(model))


def leave_early(patience):
    """In a rank: rank 1 makes no step and leaves by an exception, rank 0 makes some. Returns the check and seconds."""
    start = time.monotonic()
    try:
        with check_training(patience=patience) as check:
            if dist.get_rank() == 1:
                raise KeyError("an error of the script")
            train_alone()
    except KeyError:
        pass
    return check.findings, check.missing, time.monotonic() - start


@pytest.mark.ranks
def test_ranks_with_other_numbers_of_steps_keep_nobody_waiting():
    (findings, missing, seconds), (_, _, seconds_of_rank_1) = launch(leave_early, 60, nproc=2)
    assert (findings, missing) == ([], [])
    assert max(seconds, seconds_of_rank_1) < 30


def one_rank_never_ends():
    """In a rank: rank 1 does not enter the check."""
    if dist.get_rank() == 1:
        dist.barrier()
        return None
    with check_training(patience=1) as check:
        train_alone()
    dist.barrier()
    return check.missing


@pytest.mark.ranks
def test_a_rank_without_notes_is_named_after_the_patience():
    assert launch(one_rank_never_ends, nproc=2) == [[1], None]


def early_report():
    """In a rank: when did rank 0 know the findings?"""
    model = silent_mistakes.network()
    optimizer = silent_mistakes.sgd(model)
    loader = silent_mistakes.divided_loader(silent_mistakes.samples(128))
    with check_training(steps=2) as check:
        for inputs, _ in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            dist.barrier()
        known = check.findings is not None
    return known, [found.kind for found in check.findings]


@pytest.mark.ranks
def test_rank_0_reports_as_soon_as_all_ranks_have_made_the_steps():
    assert launch(early_report, nproc=2) == [(True, ["drift"]), (False, ["drift"])]


# --- the comparison of more than two ranks ----------------------------------------------------------------------------


def record_of(rank, data_ranks, batches, weights, device="one kind"):
    """The notes of a rank that trains a DDP model of one parameter for a step on each batch."""
    code_line = CodeLine("train.py", 1)
    record = Record(rank=rank, world_size=4, device=device)
    record.models["DDP Net 1"] = Model("DDP", data_ranks)
    record.parameters["DDP Net 1: weight"] = Parameter("DDP Net 1", "weight", "DDP", 64, data_ranks)
    for number, (batch, weight) in enumerate(zip(batches, weights, strict=True), start=1):
        record.forwards.append(Forward("DDP Net 1", code_line, batch, elements=64))
        calls = {"DDP Net 1": Calls(to_average=number, to_broadcast=0, averaged=number, synchronized=True)}
        step = Step(0, number, code_line, (0.1,), 0, calls, after={"DDP Net 1: weight": weight})
        if number == 1:
            step.before = {"DDP Net 1: weight": 0}
        record.steps.append(step)
    return record


def test_only_the_ranks_that_share_their_samples_are_named():
    batches = [(1, 2), (3, 4), (1, 2), (5, 6)]
    records = [record_of(rank, (0, 1, 2, 3), batches[rank], (7, 8)) for rank in range(4)]
    assert [(found.kind, found.ranks) for found in compare(records)] == [("same_samples", (0, 2))]


def test_all_ranks_that_share_their_samples_are_named_at_once():
    records = [record_of(rank, (0, 1, 2, 3), (1, 2), (7, 8)) for rank in range(4)]
    [found] = compare(records)
    assert (found.ranks, found.sentence) == ((0, 1, 2, 3), "Ranks 0, 1, 2 and 3 train on the same 2 batches.")


def test_replicas_are_compared_within_their_group():
    """Two pairs, as the stages of a pipeline have, may hold different weights, and get equal batches."""
    records = [
        record_of(0, (0, 1), batches=(1, 2), weights=(0, 9)),
        record_of(1, (0, 1), batches=(3, 4), weights=(0, 9)),
        record_of(2, (2, 3), batches=(1, 2), weights=(1, 10)),
        record_of(3, (2, 3), batches=(3, 4), weights=(1, 10)),
    ]
    assert compare(records) == []

    records[3].steps[1].after = {"DDP Net 1: weight": 50}
    [found] = compare(records)
    assert found.kind == "drift"
    assert found.ranks == (2, 3)


def test_gpus_of_two_kinds_may_round_differently():
    devices = ["one kind", "one kind", "another", "another"]
    records = [record_of(rank, (0, 1, 2, 3), (rank, 9 + rank), (rank, rank), devices[rank]) for rank in range(4)]
    assert compare(records) == []


# --- what is reported -------------------------------------------------------------------------------------------------

FOUND = Finding("drift", "/x/train.py", 31, (0, 1), "The weights differ.", "Average them.", "notebooks/14.ipynb#drift")


def test_the_report_names_the_line_the_ranks_the_cure_and_the_page():
    lines = report([FOUND]).splitlines()
    assert lines[0] == "silent mistakes"
    assert lines[1].strip() == "train.py:31, ranks 0 and 1: The weights differ."
    assert [line.strip() for line in lines[2:]] == ["Average them.", "notebooks/14.ipynb#drift  (--allow drift)"]


def test_the_report_of_nothing_says_how_many_kinds_were_looked_for():
    assert report([]).splitlines()[1].strip() == f"none of the {len(KINDS)} kinds"


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no kind drifts. Known are same_samples, "):
        TrainingCheck(20, 30, allow=["drifts"])


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


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.mark.ranks
@pytest.mark.parametrize("allow", [[], ["--allow", "drift"]])
def test_a_script_runs_unchanged_under_the_check(allow, tmp_path, environment):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    carried = tmp_path / "training_check.py"
    carried.write_text(FILE.read_text())
    work = script_on_ranks(carried, 2, "--json", tmp_path / "found.json", *allow, script)
    status, out, errors, left = forked(work, environment)
    assert (status, out, left) == (0, "", []), errors
    found = [
        (record["kind"], record["line"], record["ranks"])
        for record in json.loads((tmp_path / "found.json").read_text())
    ]
    assert found == ([] if allow else [("drift", 14, [0, 1])])
    assert ("train.py:14, ranks 0 and 1: " in errors) == (not allow)


@pytest.mark.ranks
@pytest.mark.parametrize("allow", [[], ["--allow", "drift"]])
def test_a_rehearsal_names_a_silent_mistake_and_fails_unless_it_is_allowed(allow, tmp_path):
    script = tmp_path / "train.py"
    on_gpus = SCRIPT.replace('"gloo"', '"nccl"').replace("nn.Linear(8, 8)", "nn.Linear(8, 8).cuda(dist.get_rank())")
    script.write_text(on_gpus.replace("model(inputs)", "model(inputs.cuda(dist.get_rank()))"))
    report_file = tmp_path / "report.json"
    done = rehearse_here(script, "--json", report_file, *allow)
    found = [(record["kind"], record["line"]) for record in json.loads(report_file.read_text())["silent_mistakes"]]
    _, _, section = done.stderr.partition("\nsilent mistakes\n")
    if allow:
        assert (done.returncode, found) == (0, []), done.stderr
        assert section.strip() == f"none of the {len(KINDS)} kinds"
    else:
        assert (done.returncode, found) == (1, [("drift", 14)]), done.stderr
        assert section.strip().startswith("train.py:14, ranks 0 and 1: ")


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(600)
def test_pretended_gpus_change_no_finding(tmp_path):
    """The whole catalogue in a rehearsal."""
    done = rehearse_here(ROOT / "tests" / "support" / "rehearsal_silent.py", flags=[tmp_path], timeout=500)
    expected = {}
    for name, (kind, _) in MISTAKES.items():
        expected[f"{name} wrong"] = [[kind], []]
        expected[f"{name} repaired"] = [[], []]
    expected |= {f"{name} correct": [[], []] for name in CORRECT}
    for rank in range(2):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == expected, done.stderr


@pytest.mark.parametrize(
    ("with_gradients", "is_note"), [(True, False), (False, True)], ids=["with gradients", "without gradients"]
)
def test_a_call_without_gradients_on_some_ranks_is_only_a_note(with_gradients, is_note):
    """Because DDP's broadcasts of buffers pair up after it."""
    code_line = training_check.CodeLine(file="train.py", line=3)
    step = training_check.Step(optimizer=0, number=2, code_line=code_line, rates=(0.1,), settings=0, calls={})
    elsewhere = training_check.Calls(to_average=2, to_broadcast=0, averaged=2)
    alone = training_check.Calls(to_average=3, to_broadcast=0, averaged=2)
    if not with_gradients:
        alone = training_check.Calls(to_average=2, to_broadcast=1, averaged=2)
    found = training_check.compare_calls({0: alone, 1: elsewhere}, step)
    assert (found.kind, found.ranks, found.is_note) == ("rank_alone", (0,), is_note)


def loss_of_rank_0():
    """In a rank: a training that only logs its own loss."""
    silent_mistakes.GENERATOR.manual_seed(dist.get_rank())
    silent_mistakes.rank_0_logs_its_own_loss(True)


@pytest.mark.ranks
def test_launch_prints_what_it_found(capsys):
    """A note is printed below the verdict on the mistakes."""
    launch(loss_of_rank_0, nproc=2, check=True)
    out = capsys.readouterr().out
    assert out.index(f"none of the {len(KINDS)} kinds") < out.index("note: silent_mistakes.py:")


@pytest.mark.ranks
@pytest.mark.daily
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapters_script_has_no_findings(notebook, tmp_path, environment):
    script = export(notebook, tmp_path)
    carried = tmp_path / "training_check.py"
    carried.write_text(FILE.read_text())
    status, _, errors, _ = forked(script_on_ranks(carried, 2, "--json", tmp_path / "found.json", script), environment)
    assert status == 0, errors
    assert json.loads((tmp_path / "found.json").read_text()) == []
    assert "The check itself failed" not in errors
