"""Chapter 11's script trains eight kinds of projects, which replace its first functions and nothing else."""

import re
import shutil

import pytest
import torch
from scripting import export, stand_alone
from workloads_run import WORKLOADS, Run, checkpoints, gap, newest, same_bits, with_workload

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

NAMES = sorted(path.stem for path in WORKLOADS.glob("*.py"))
STEPS = 10
FLAGS = ["--epochs=2", "--batch-size=12", "--lr=0.05", "--warmup=2", "--log-every=1"]
FLAGS_OF = {  # of one workload
    "stream": ["--max-steps=10"],
    "two_inputs": ["--find-unused", "--max-norm=0"],
    "lengths": ["--batch-size=13", "--max-steps=10"],
    "low_rank": ["--adapt"],
}
RANDOM_FLAGS = {"regression": ["--dropout=0.3"], "batch_norm": ["--num-workers=1"]}  # with which a run draws numbers
TARGETS = {"masked_language": 78, "lengths": 110, "contrastive": 24}  # in the validation set; 23 in the others'


class Project:
    """A chapter's script with a workload's functions in place of its own, and its runs, each made once."""

    chapter = "11"
    flags = ("--save-every=3",)
    files_of_whole_run = ("--checkpoint-dir=undisturbed",)

    def __init__(self, name, folder, environment):
        self.name = name
        self.folder = folder
        self.environment = environment
        self.runs = {}
        self.random_flags = RANDOM_FLAGS.get(name, [])
        self.script = folder / "train.py"
        text = export(self.chapter, folder).read_text()
        self.script.write_text(with_workload(text, (WORKLOADS / f"{name}.py").read_text()))

    def start(self, ranks, *flags, mischief=""):
        flags = [*FLAGS, *self.flags, *FLAGS_OF.get(self.name, []), *flags]
        return Run(self.script, ranks, self.environment, *flags, mischief=mischief)

    def run(self, ranks, *flags):
        if (ranks, flags) == (2, ()) and not self.random_flags:
            return self.whole()
        if (ranks, flags) not in self.runs:
            self.runs[ranks, flags] = self.start(ranks, *flags).end()
        return self.runs[ranks, flags]

    def whole(self):
        """The undisturbed run on two ranks, whose files stay."""
        return self.run(2, *self.files_of_whole_run, *self.random_flags)

    def resume(self, source, name, ranks=2, more=()):
        """A run that goes on from a copy of a folder with checkpoints, or from the copy that is there."""
        if not (self.folder / name).exists():
            shutil.copytree(self.folder / source, self.folder / name)
        return self.start(ranks, f"--checkpoint-dir={name}", "--resume", *self.random_flags, *more).end()

    def interrupted(self):
        """A run that gets SIGTERM in its seventh step; its checkpoints are in ``stopped``."""
        if "interrupted" not in self.runs:
            run = self.start(2, "--checkpoint-dir=stopped", *self.random_flags, mischief="stop [true, 7]")
            self.runs["interrupted"] = run.end(ok=False)
        return self.runs["interrupted"]


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


def states_in(folder):
    """What a folder's checkpoints hold, the oldest first."""
    return [torch.load(path, weights_only=True) for path in checkpoints(folder)]


project = each_made_once(Project)


def of(*names):
    return pytest.mark.parametrize("project", names, indirect=True)


@of(*NAMES)
def test_two_ranks_have_the_losses_of_one_and_print_them(project):
    micro_batches = []
    if project.name == "batch_norm":  # its loss depends on the size of a micro-batch
        micro_batches = ["--accumulate", "2"]
    one = project.run(1, *micro_batches)
    two = project.run(2)
    assert len(two.losses()) == STEPS
    assert gap(two.losses(), one.losses()) < 1e-4
    assert two.console() == pytest.approx(dict(enumerate(two.losses(), start=1)), rel=1e-3)


@of("lengths", "regression")
def test_two_micro_batches_have_the_losses_of_one(project):
    assert gap(project.run(1, "--accumulate", "2").losses(), project.run(1).losses()) < 1e-4


@of("batch_norm", "contrastive", "low_rank", "masked_language")
def test_a_sharded_model_has_the_losses_of_ddp(project):
    sharded = project.run(2, "--shard", *project.random_flags)
    assert gap(sharded.losses(), project.whole().losses()) < 1e-4
    assert sharded.result() == pytest.approx(project.whole().result(), rel=1e-3)


@of("low_rank", "regression")
def test_a_run_that_was_stopped_is_resumed_by_the_other_way_to_wrap(project):
    project.interrupted()
    shutil.copytree(project.folder / "stopped", project.folder / "across")
    run = project.resume("stopped", "across", more=["--shard"])
    step = STEPS - len(run.losses())
    assert gap(run.losses(), project.whole().losses()[step:]) < 1e-4


@of("masked_language", "stream")
def test_workers_change_no_loss(project):
    assert gap(project.run(2, "--num-workers=2").losses(), project.run(2).losses()) < 1e-6


@of("batch_norm", "contrastive", "lengths", "stream")
def test_a_validation_on_three_ranks_is_complete_and_has_the_result_of_two(project):
    on_two = project.whole().result()
    run = project.resume("undisturbed", "validation", ranks=3)
    sums = run.validation()
    assert sums["loss"][1] == TARGETS.get(project.name, 23)
    means = {f"val_{name}": total / count for name, (total, count) in sums.items()}
    assert run.result() == pytest.approx({**means, "world_size": 3, "step": STEPS}, rel=1e-4, abs=1e-6)
    assert {**on_two, "world_size": 3} == pytest.approx(run.result(), rel=1e-4, abs=1e-6)


@of("batch_norm", "low_rank", "regression", "stream")
def test_a_stopped_run_ends_with_the_bits_of_an_undisturbed_one(project):
    assert "stopped by SIGTERM at step " in project.interrupted().out
    step = newest(project.folder / "stopped")["step"]
    assert step in (7, 8, 9)
    assert (project.folder / "stopped" / "stopped").exists()
    run = project.resume("stopped", "resumed")
    assert f"going on from step_{step:08}" in run.out
    assert len(run.losses()) == STEPS - step
    project.whole()
    assert same_bits(newest(project.folder / "resumed")["model"], newest(project.folder / "undisturbed")["model"])


@of("low_rank")
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_taken(project):
    project.interrupted()
    project.whole()
    shutil.copytree(project.folder / "stopped", project.folder / "torn")
    path = checkpoints(project.folder / "torn")[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    run = project.resume("stopped", "torn")
    assert f"{path.name} is damaged" in run.out
    assert "going on from step_00000006" in run.out
    assert same_bits(newest(project.folder / "torn")["model"], newest(project.folder / "undisturbed")["model"])


@of("low_rank", "batch_norm")
def test_a_nan_leaves_no_checkpoint_that_is_not_finite(project):
    run = project.start(2, "--checkpoint-dir=nan", mischief="poison [true, 4]").end()
    assert re.findall(r"^step (\d+): .* norm nan,", run.out, re.MULTILINE) == ["4"]
    states = states_in(project.folder / "nan")
    assert [state["step"] for state in states] == [6, 9, 10]
    for state in states:
        values = list(state["model"].values())
        for of_parameter in state["optimizer"]["state"].values():
            values += of_parameter.values()
        assert all(value.isfinite().all() for value in values if torch.is_tensor(value))
    assert not same_bits(states[0]["model"], states[1]["model"])


@of("low_rank")
def test_groups_keep_the_ratio_of_their_rates(project):
    project.whole()
    highest_rates = []
    for state in states_in(project.folder / "undisturbed"):
        low, high = state["optimizer"]["param_groups"]
        assert low["lr"] * 100 == pytest.approx(high["lr"])
        highest_rates.append(high["lr"])
    assert highest_rates[0] > highest_rates[1] > 0


@of("regression")
def test_a_signal_in_a_validation_or_save_is_heard_there(project):
    flags = ["--batch-size=6", "--val-every=4", "--checkpoint-dir=validating"]
    validating = project.start(2, *flags, mischief="stop [false, 1]")
    saving = project.start(2, "--checkpoint-dir=saving", mischief="stop_in_save")
    validating.end(ok=False)
    saving.end(ok=False)
    assert newest(project.folder / "validating")["step"] == 4
    assert len(validating.calls(training=False)[0]) == 2  # of 4 batches
    assert [path.name for path in checkpoints(project.folder / "saving")] == ["step_00000003.pt"]
    assert "stopped by SIGTERM at step 3:" in saving.out
