"""Chapter 11's script trains fifteen kinds of projects, which replace its first functions and nothing else."""

import itertools
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from loading import loaded
from scripting import export, stand_alone
from workloads_run import WORKLOADS, Run, checkpoints, gap, newest, same_bits, with_workload

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

NAMES = sorted(path.stem for path in WORKLOADS.glob("*.py"))
STEPS = 10
FLAGS = ["--epochs=2", "--batch-size=12", "--lr=0.05", "--warmup=2", "--log-every=1"]
FLAGS_OF = {  # of one workload
    "stream": ["--max-steps=10"],
    "packed_language": ["--max-steps=10"],
    "two_inputs": ["--find-unused", "--max-norm=0"],
    "alternating": ["--find-unused", "--max-norm=0"],
    "foreign": ["--init-from=foreign.pt"],
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
        if name == "foreign":
            torch.save(foreign_weights(), folder / "foreign.pt")

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


def foreign_weights():
    """A model of fewer words, as another program has saved it, with a part that the workload does not have."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"words.weight": (29, 8), "body.weight": (8, 8), "body.bias": (8,), "pooler.weight": (8, 8)}
    return {f"_orig_mod.module.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


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


NEW_KINDS = ["alternating", "detection", "f1", "foreign", "gan", "packed_language"]


def in_one_process(script, flags, steps):
    """(the losses, the last weights) of a loop in one process: no DDP, no micro-batches, no scaler.

    From the script it takes the workload's functions, the order of the samples, the seeds and the schedule.
    """
    with mock.patch("sys.argv", [str(script), *flags]), mock.patch.dict("os.environ", MISCHIEF=""):
        trainer = loaded(script)
        args = trainer.parse_args()
    train_set, _ = trainer.load_data(args)
    trainer.seed_all("model", args.seed)
    model = trainer.build_model(args)
    if args.init_from:
        foreign = {name.removeprefix("_orig_mod.module."): value for name, value in foreign_weights().items()}
        model.load_state_dict({name: foreign[name] for name in ("body.weight", "body.bias")}, strict=False)
    optimizer = trainer.build_optimizer(model, args)
    peak_lrs = [group["lr"] for group in optimizer.param_groups]
    losses = []
    stream = iter(train_set) if not hasattr(train_set, "__getitem__") else None
    for step in range(1, steps + 1):
        if stream is not None:
            samples = list(itertools.islice(stream, args.batch_size))
        else:
            epoch, step_in_epoch = divmod(step - 1, len(train_set) // args.batch_size)
            order = trainer.shuffled(np.arange(len(train_set)), len(train_set), repr(("order", args.seed, epoch)))
            samples = []
            for index in order[step_in_epoch * args.batch_size :][: args.batch_size].tolist():
                trainer.seed_all("sample", args.seed, epoch, index)
                samples.append(train_set[index])
        for group, peak_lr in zip(optimizer.param_groups, peak_lrs, strict=True):
            group["lr"] = peak_lr * trainer.lr_factor(step, steps, args)
        optimizer.zero_grad()
        terms = trainer.loss_sums_of_workload(model, trainer.collate(samples), args)["loss"]
        loss = sum(total / count for total, count in (terms if isinstance(terms, list) else [terms]))
        loss.backward()
        if args.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def flags_of(name):
    return [*FLAGS, *Project.flags, *FLAGS_OF.get(name, [])]


@of(*NEW_KINDS, "low_rank", "masked_language")
@pytest.mark.parametrize("shard", ["--no-shard", "--shard"])
def test_two_ranks_have_the_losses_and_weights_of_a_loop_in_one_process(project, shard, monkeypatch):
    monkeypatch.chdir(project.folder)
    folder = f"one_process{shard}"
    run = project.run(2, shard, f"--checkpoint-dir={folder}")
    losses, weights = in_one_process(project.script, flags_of(project.name), STEPS)
    assert run.losses() == pytest.approx(losses, rel=2e-6, abs=1e-6)
    found = torch.load(project.folder / folder / "weights.pt", weights_only=True)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert torch.allclose(found[name].double(), expected.double(), rtol=0, atol=2e-6), name


@of(*NEW_KINDS)
def test_a_new_kind_is_resumed_with_the_bits_of_an_undisturbed_run(project):
    assert "stopped by SIGTERM at step " in project.interrupted().out
    run = project.resume("stopped", "resumed")
    assert 0 < len(run.losses()) < STEPS
    project.whole()
    resumed, undisturbed = (newest(project.folder / name) for name in ("resumed", "undisturbed"))
    assert same_bits(resumed["model"], undisturbed["model"])
    states = zip(resumed["optimizer"]["state"].values(), undisturbed["optimizer"]["state"].values(), strict=True)
    assert all(same_bits(one, other) for one, other in states)


@of("foreign")
def test_a_foreign_file_says_what_matched(project):
    out = project.whole().out
    assert "foreign.pt: 2 of the model's 7 tensors match" in out
    assert "1 not in the model: pooler.weight" in out
    assert "1 of another shape: words.weight" in out


@of("f1")
def test_f1_and_the_exact_area_under_the_curve_are_those_of_one_rank(project):
    """The metrics, from the weights that the run has left."""
    result = project.whole().result()
    trainer_result = {}
    for ranks in (1, 3):
        run = project.resume("undisturbed", f"on{ranks}", ranks=ranks)
        trainer_result[ranks] = run.result()
    with mock.patch.dict("os.environ", MISCHIEF=""):
        trainer = loaded(project.script)
    model = trainer.build_model(None)
    model.load_state_dict(torch.load(project.folder / "undisturbed" / "weights.pt", weights_only=True))
    inputs, targets = trainer.load_data(None)[1].tensors
    scores = model(inputs)[:, 0]
    found = scores > 0
    right = (found & (targets > 0)).sum().item()
    pairs = scores[targets > 0][:, None] - scores[targets == 0][None]
    expected = {
        "val_f1": 2 * right / (found.sum() + targets.sum()).item(),
        "val_recall": right / targets.sum().item(),
        "val_auc": ((pairs > 0).float() + 0.5 * (pairs == 0).float()).mean().item(),
    }
    for values in (result, *trainer_result.values()):
        assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@of("detection")
def test_terms_that_count_different_things_are_exact_over_micro_batches(project):
    assert gap(project.run(1, "--accumulate", "3").losses(), project.run(1).losses()) < 1e-5


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
