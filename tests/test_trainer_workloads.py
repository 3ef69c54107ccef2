"""Chapter 11's script trains eight kinds of projects, which replace its first functions and nothing else.

Two micro-batches on one rank do what two ranks do, so both have one kind of check. For BatchNorm and a contrastive loss
another number of micro-batches is another loss.
"""

import math
import shutil

import pytest
import torch
from scripting import export, stand_alone
from workloads_run import WORKLOADS, Run, checkpoints, gap, newest, same_bits, with_workload

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

FLAGS = ["--epochs=2", "--batch-size=12", "--lr=0.05", "--warmup=2", "--log-every=1"]
MORE = {
    "stream": ["--max-steps=10"],
    "two_inputs": ["--find-unused", "--max-norm=0"],
    "lengths": ["--batch-size=13", "--max-steps=10"],
    "low_rank": ["--adapt"],
}
DRAWS = {"regression": ["--dropout=0.3"], "batch_norm": ["--num-workers=1"]}  # for what is resumed
NAMES = sorted(path.stem for path in WORKLOADS.glob("*.py"))
BY_MICRO_BATCH = {"batch_norm", "contrastive"}
TARGETS = {"masked_language": 78, "lengths": 110, "contrastive": 24}  # of the validation; of the others 23


class Project:
    """A chapter's script with a workload, and its runs, each made once."""

    def __init__(self, name, folder, environment, plant=("", ""), chapter="11", flags=("--save-every=3",)):
        self.name, self.folder, self.environment, self.runs = name, folder, environment, {}
        self.script, self.flags = folder / "train.py", [*FLAGS, *flags, *MORE.get(name, [])]
        text = export(chapter, folder).read_text()
        assert text.count(plant[0]) == 1 or not plant[0], plant
        text = text.replace(*plant) if plant[0] else text
        self.script.write_text(with_workload(text, (WORKLOADS / f"{name}.py").read_text()))

    def start(self, ranks, *flags, mischief=""):
        return Run(self.script, ranks, self.environment, *self.flags, *flags, mischief=mischief)

    def run(self, ranks, *flags):
        if (ranks, flags) == (2, ()) and self.name not in DRAWS:
            return self.whole()
        key = ranks, flags
        if key not in self.runs:
            self.runs[key] = self.start(ranks, *flags).end()
        return self.runs[key]

    def whole(self):
        """The run on two ranks; its checkpoints are in ``undisturbed``."""
        return self.run(2, "--checkpoint-dir=undisturbed", *DRAWS.get(self.name, []))

    def resume(self, source, name, ranks=2):
        """A run that goes on from a copy of a folder with checkpoints."""
        if not (self.folder / name).exists():
            shutil.copytree(self.folder / source, self.folder / name)
        flags = [f"--checkpoint-dir={name}", "--resume", *DRAWS.get(self.name, [])]
        return self.start(ranks, *flags).end()

    def interrupt(self):
        """A run that is told to stop in its seventh step; its checkpoints are in ``stopped``."""
        if "stopped" not in self.runs:
            flags = ["--checkpoint-dir=stopped", *DRAWS.get(self.name, [])]
            self.runs["stopped"] = self.start(2, *flags, mischief="stop [true, 7]").end(ok=False)
        return self.runs["stopped"]


def each_made_once(kind):
    """A fixture: the project of the parameter's name, of this kind."""
    projects = {}

    @pytest.fixture
    def project(request, tmp_path_factory):
        if request.param not in projects:
            path = stand_alone(tmp_path_factory.mktemp("path"))
            projects[request.param] = kind(request.param, tmp_path_factory.mktemp(request.param), path)
        return projects[request.param]

    return project


def with_bug(kind, workload, folder, old, new):
    """A project of this kind with ``new`` in its script. Raises AssertionError where ``old`` is not in it once."""
    (folder / "path").mkdir()
    (folder / "run").mkdir()
    return kind(workload, folder / "run", stand_alone(folder / "path"), (old, new))


project = each_made_once(Project)


def of(names):
    return pytest.mark.parametrize("project", names, indirect=True)


@of(NAMES)
def test_two_ranks_have_the_losses_of_one(project):
    parts = ["--accumulate", "2"] if project.name == "batch_norm" else []
    one, two = project.run(1, *parts), project.run(2)
    assert len(two.losses()) == 10
    assert gap(two.losses(), one.losses()) < 1e-4


@of([name for name in NAMES if name not in BY_MICRO_BATCH])
def test_two_micro_batches_have_the_losses_of_one(project):
    draws = DRAWS.get(project.name, [])  # dropout draws for each micro-batch of each rank
    assert gap(project.run(1, "--accumulate", "2").losses(), project.run(1).losses()) < 1e-4
    assert gap(project.run(1, "--accumulate", "2", *draws).losses(), project.whole().losses()) < 1e-4


@of(NAMES)
def test_workers_change_no_loss_and_told_losses_are_the_true_ones(project):
    workers = project.run(2, *DRAWS.get(project.name, []), "--num-workers=2")
    draws = project.run(2) if project.name == "batch_norm" else project.whole()  # without workers
    assert gap(workers.losses(), draws.losses()) < 1e-6
    true = dict(enumerate(workers.losses(), start=1))
    assert workers.console() == pytest.approx(true, rel=1e-3)


@of(NAMES)
def test_a_validation_is_whole_and_true_on_1_2_and_3_ranks(project):
    on_two = project.whole().result()
    runs = {ranks: project.resume("undisturbed", f"validation_{ranks}", ranks) for ranks in (1, 3)}
    sums = {ranks: run.validation() for ranks, run in runs.items()}
    counts = [{name: count for name, (_, count) in pairs.items()} for pairs in sums.values()]
    assert counts[0] == counts[1] and counts[0]["loss"] == TARGETS.get(project.name, 23)
    for ranks, run in runs.items():
        true = {f"val_{name}": total / count for name, (total, count) in sums[ranks].items()}
        assert run.result() == pytest.approx({**true, "world_size": ranks, "step": 10}, rel=1e-4, abs=1e-6)
        assert {**on_two, "world_size": ranks} == pytest.approx(run.result(), rel=1e-4, abs=1e-6)


@of(NAMES)
def test_a_stopped_run_ends_with_the_bits_of_an_undisturbed_one(project):
    assert "stopped by SIGTERM at step " in project.interrupt().out
    step = newest(project.folder / "stopped")["step"]
    assert step in (7, 8, 9) and (project.folder / "stopped/stopped").exists()
    run = project.resume("stopped", "resumed")
    assert f"going on from step_{step:08}" in run.out and len(run.losses()) == 10 - step
    project.whole()
    assert same_bits(newest(project.folder / "resumed")["model"], newest(project.folder / "undisturbed")["model"])


@of(NAMES)
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_taken(project):
    project.interrupt(), project.whole()
    shutil.copytree(project.folder / "stopped", project.folder / "torn")
    path = checkpoints(project.folder / "torn")[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = project.resume("stopped", "torn")
    assert f"{path.name} is damaged" in run.out and "going on from step_00000006" in run.out
    assert same_bits(newest(project.folder / "torn")["model"], newest(project.folder / "undisturbed")["model"])


@of(NAMES)
def test_a_nan_leaves_no_checkpoint_that_is_not_finite(project):
    run = project.start(2, "--checkpoint-dir=nan", mischief="poison [true, 4]").end()
    norms = [float(line.split(" norm ")[1].split(",")[0]) for line in run.out.splitlines() if " norm " in line]
    assert [step for step, norm in enumerate(norms, start=1) if math.isnan(norm)] == [4]
    kept = [torch.load(path, weights_only=True) for path in checkpoints(project.folder / "nan")]
    assert [state["step"] for state in kept] == [6, 9, 10]
    optimizer = [tensors.values() for state in kept for tensors in state["optimizer"]["state"].values()]
    tensors = [tensor for state in kept for tensor in state["model"].values()] + [x for row in optimizer for x in row]
    assert all(tensor.isfinite().all() for tensor in tensors if torch.is_tensor(tensor))
    assert not same_bits(kept[0]["model"], kept[1]["model"])


@of(["low_rank"])
def test_groups_keep_the_ratio_of_their_rates(project):
    project.whole()
    states = [torch.load(path, weights_only=True) for path in checkpoints(project.folder / "undisturbed")]
    rates = [[group["lr"] for group in state["optimizer"]["param_groups"]] for state in states]
    assert all(low * 100 == pytest.approx(high) for low, high in rates) and rates[0][1] > rates[1][1] > 0


@of(["regression"])
def test_a_signal_in_a_long_validation_or_save_is_heard_there(project):
    flags = ["--batch-size=6", "--wait=0.7", "--val-every=4"]
    judging = project.start(2, *flags, "--checkpoint-dir=judging", mischief="stop [false, 1]")
    saving = project.start(2, "--checkpoint-dir=saving", mischief="stop_in_save 3")
    judging.end(ok=False), saving.end(ok=False)
    assert newest(project.folder / "judging")["step"] == 4
    assert len(judging.calls(training=False)[0]) in (2, 3)  # of 4 batches
    assert [path.name for path in checkpoints(project.folder / "saving")] == ["step_00000003.pt"]
    assert "stopped by SIGTERM at step 3:" in saving.out
