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
from workloads_run import (
    WORKLOADS,
    Run,
    checkpoints,
    newest,
    relative_difference,
    same_bits,
    terms_of,
    with_workload,
)

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

NAMES = sorted(path.stem for path in WORKLOADS.glob("*.py"))
# These have several losses, several optimizers, a metric that is no ratio of sums, or weights from elsewhere.
UNUSUAL_NAMES = ["alternating", "detection", "f1", "foreign", "gan", "packed_language"]
STEPS = 10
FLAGS = ["--epochs=2", "--batch-size=12", "--lr=0.05", "--warmup=2", "--log-every=1", "--save-every=3"]
FLAGS_OF = {  # of one workload
    "stream": ["--max-steps=10"],
    "packed_language": ["--max-steps=10"],
    "two_inputs": ["--find-unused", "--max-norm=0"],
    "alternating": ["--find-unused", "--max-norm=0"],
    "foreign": ["--init-from=foreign.pt"],
    "lengths": ["--batch-size=13", "--max-steps=10"],
    "low_rank": ["--adapt"],
}
RANDOM_FLAGS = {"regression": ["--dropout=0.3"], "batch_norm": ["--num-workers=1"]}  # with them a run is random
NUM_TARGETS = {"masked_language": 78, "lengths": 110, "contrastive": 24}  # in the validation set; 23 in the others'


class Project:
    """Chapter 11's script with a workload's functions in place of its own, and its runs, each made once."""

    def __init__(self, name, folder, environment):
        self.name = name
        self.folder = folder
        self.environment = environment
        self.flags = [*FLAGS, *FLAGS_OF.get(name, [])]
        self.random_flags = RANDOM_FLAGS.get(name, [])
        self.runs = {}
        script = export("11", folder).read_text()
        workload = (WORKLOADS / f"{name}.py").read_text()
        self.script = folder / "train.py"
        self.script.write_text(with_workload(script, workload))
        if name == "foreign":
            torch.save(foreign_weights(), folder / "foreign.pt")

    def load(self):
        """The script as a module. Its probe reads MISCHIEF when it is imported."""
        with mock.patch.dict("os.environ", MISCHIEF=""):
            return loaded(self.script)

    def start(self, ranks, *flags, mischief=""):
        return Run(self.script, ranks, self.environment, *self.flags, *flags, mischief=mischief)

    def run(self, ranks, *flags):
        """The finished run on so many ranks with these flags."""
        if ranks == 2 and not flags and not self.random_flags:
            return self.undisturbed()  # it has the same losses
        if (ranks, flags) not in self.runs:
            self.runs[ranks, flags] = self.start(ranks, *flags).end()
        return self.runs[ranks, flags]

    def undisturbed(self):
        """The run on two ranks whose checkpoints are in the folder ``undisturbed``."""
        return self.run(2, "--checkpoint-dir=undisturbed", *self.random_flags)

    def interrupted(self):
        """A run that gets SIGTERM in its seventh step. Its checkpoints are in the folder ``stopped``."""
        if "interrupted" not in self.runs:
            run = self.start(2, "--checkpoint-dir=stopped", *self.random_flags, mischief="stop [true, 7]")
            self.runs["interrupted"] = run.end(ok=False)
        return self.runs["interrupted"]

    def resume(self, folder, *flags, ranks=2):
        """A finished run that goes on from the checkpoints in a folder."""
        return self.start(ranks, f"--checkpoint-dir={folder}", "--resume", *self.random_flags, *flags).end()

    def resume_copy(self, folder, copy, *flags, ranks=2):
        """A finished run that goes on from a copy of a folder with checkpoints."""
        shutil.copytree(self.folder / folder, self.folder / copy)
        return self.resume(copy, *flags, ranks=ranks)


def foreign_weights():
    """A model of fewer words, as another program has saved it, with a part that the workload does not have."""
    generator = torch.Generator().manual_seed(9)
    shapes = {"words.weight": (29, 8), "body.weight": (8, 8), "body.bias": (8,), "pooler.weight": (8, 8)}
    return {f"_orig_mod.module.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def load_foreign_body(model):
    """Copy those foreign weights into the model that fit: the body's."""
    foreign = foreign_weights()
    weights = {name: foreign[f"_orig_mod.module.{name}"] for name in ("body.weight", "body.bias")}
    model.load_state_dict(weights, strict=False)


@pytest.fixture(scope="module")
def projects():
    """The projects that were made so far, by their names. The tests of a project share its runs."""
    return {}


@pytest.fixture
def project(request, projects, tmp_path_factory):
    """The project of the name that ``for_projects`` gives."""
    name = request.param
    if name not in projects:
        environment = stand_alone(tmp_path_factory.mktemp("path"))
        projects[name] = Project(name, tmp_path_factory.mktemp(name), environment)
    return projects[name]


def for_projects(*names):
    return pytest.mark.parametrize("project", names, indirect=True)


def states_in(folder):
    """What a folder's checkpoints hold, the oldest first."""
    return [torch.load(path, weights_only=True) for path in checkpoints(folder)]


@for_projects(*NAMES)
def test_two_ranks_have_the_losses_of_one_and_print_them(project):
    micro_batches = []
    if project.name == "batch_norm":  # its loss depends on the size of a micro-batch
        micro_batches = ["--accumulate", "2"]
    losses_of_one = project.run(1, *micro_batches).losses()
    run = project.run(2)
    losses = run.losses()
    assert len(losses) == STEPS
    assert relative_difference(losses, losses_of_one) < 1e-4
    losses_by_step = dict(enumerate(losses, start=1))
    assert run.printed_losses() == pytest.approx(losses_by_step, rel=1e-3)


def batches_in_order(trainer, train_set, args):
    """Yield the list of samples of each step, in the order of the trainer, and with its seed for each sample."""
    if not hasattr(train_set, "__getitem__"):
        stream = iter(train_set)
        while True:
            yield list(itertools.islice(stream, args.batch_size))

    num_samples = len(train_set)
    for epoch in itertools.count():
        key = repr(("order", args.seed, epoch))
        order = trainer.shuffled(np.arange(num_samples), num_samples, key).tolist()
        for batch in range(num_samples // args.batch_size):
            first = batch * args.batch_size
            samples = []
            for index in order[first : first + args.batch_size]:
                trainer.seed_all("sample", args.seed, epoch, index)
                samples.append(train_set[index])
            yield samples


def train_in_one_process(trainer, flags, num_steps):
    """Train by a plain loop, without DDP, micro-batches and a scaler. Returns (the losses, the last weights).

    From the script it takes the workload's functions, the order of the samples, the seeds and the schedule.
    """
    with mock.patch("sys.argv", ["train.py", *flags]):
        args = trainer.parse_args()
    train_set, _ = trainer.load_data(args)
    trainer.seed_all("model", args.seed)
    model = trainer.build_model(args)
    if args.init_from:
        load_foreign_body(model)
    optimizer = trainer.build_optimizer(model, args)
    peak_lrs = [group["lr"] for group in optimizer.param_groups]

    losses = []
    batches = batches_in_order(trainer, train_set, args)
    for step, samples in zip(range(1, num_steps + 1), batches, strict=False):
        lr_factor = trainer.lr_factor(step, num_steps, args)
        for group, peak_lr in zip(optimizer.param_groups, peak_lrs, strict=True):
            group["lr"] = peak_lr * lr_factor

        optimizer.zero_grad()
        sums = trainer.loss_sums_of_workload(model, trainer.collate(samples), args)
        loss = sum(total / count for total, count in terms_of(sums["loss"]))
        loss.backward()
        if args.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@for_projects(*UNUSUAL_NAMES, "low_rank", "masked_language")
@pytest.mark.parametrize("shard", ["--no-shard", "--shard"])
def test_two_ranks_have_the_losses_and_weights_of_a_loop_in_one_process(project, shard, monkeypatch):
    monkeypatch.chdir(project.folder)
    folder = f"one_process{shard}"
    run = project.run(2, shard, f"--checkpoint-dir={folder}")
    weights = torch.load(project.folder / folder / "weights.pt", weights_only=True)

    expected_losses, expected_weights = train_in_one_process(project.load(), project.flags, STEPS)
    assert run.losses() == pytest.approx(expected_losses, rel=2e-6, abs=1e-6)
    assert weights.keys() == expected_weights.keys()
    for name, expected in expected_weights.items():
        assert torch.allclose(weights[name].double(), expected.double(), rtol=0, atol=2e-6), name


@for_projects(*UNUSUAL_NAMES)
def test_an_unusual_kind_is_resumed_with_the_bits_of_an_undisturbed_run(project):
    assert "stopped by SIGTERM at step " in project.interrupted().out
    run = project.resume_copy("stopped", "resumed")
    assert 0 < len(run.losses()) < STEPS

    project.undisturbed()
    resumed = newest(project.folder / "resumed")
    undisturbed = newest(project.folder / "undisturbed")
    assert same_bits(resumed["model"], undisturbed["model"])
    resumed_states = resumed["optimizer"]["state"]
    undisturbed_states = undisturbed["optimizer"]["state"]
    assert resumed_states.keys() == undisturbed_states.keys()
    for key, state in resumed_states.items():
        assert same_bits(state, undisturbed_states[key]), key


@for_projects("foreign")
def test_a_foreign_file_says_what_matched(project):
    out = project.undisturbed().out
    assert "foreign.pt: 2 of the model's 7 tensors match" in out
    assert "1 not in the model: pooler.weight" in out
    assert "1 of another shape: words.weight" in out


@for_projects("f1")
def test_f1_and_the_exact_area_under_the_curve_are_those_of_one_rank(project):
    """On one, two and three ranks the script's metrics are those that its last weights have in this process."""
    results = [project.undisturbed().result()]
    for ranks in (1, 3):
        run = project.resume_copy("undisturbed", f"on{ranks}", ranks=ranks)
        results.append(run.result())

    trainer = project.load()
    model = trainer.build_model(None)
    model.load_state_dict(torch.load(project.folder / "undisturbed" / "weights.pt", weights_only=True))
    _, val_set = trainer.load_data(None)
    inputs, targets = val_set.tensors
    scores = model(inputs)[:, 0]
    is_predicted = scores > 0
    is_positive = targets > 0
    num_predicted = is_predicted.sum().item()
    num_positives = is_positive.sum().item()
    true_positives = (is_predicted & is_positive).sum().item()
    differences = scores[is_positive][:, None] - scores[~is_positive][None, :]  # of each positive to each negative
    wins = (differences > 0).float() + 0.5 * (differences == 0).float()
    expected = {
        "val_f1": 2 * true_positives / (num_predicted + num_positives),
        "val_recall": true_positives / num_positives,
        "val_auc": wins.mean().item(),
    }
    for result in results:
        metrics = {name: result[name] for name in expected}
        assert metrics == pytest.approx(expected, abs=1e-5)


@for_projects("detection")
def test_terms_that_count_different_things_are_exact_over_micro_batches(project):
    losses = project.run(1, "--accumulate", "3").losses()
    losses_of_whole_batches = project.run(1).losses()
    assert relative_difference(losses, losses_of_whole_batches) < 1e-5


@for_projects("lengths", "regression")
def test_two_micro_batches_have_the_losses_of_one(project):
    losses = project.run(1, "--accumulate", "2").losses()
    losses_of_whole_batches = project.run(1).losses()
    assert relative_difference(losses, losses_of_whole_batches) < 1e-4


@for_projects("batch_norm", "contrastive", "low_rank", "masked_language")
def test_a_sharded_model_has_the_losses_of_ddp(project):
    with_ddp = project.undisturbed()
    sharded = project.run(2, "--shard", *project.random_flags)
    assert relative_difference(sharded.losses(), with_ddp.losses()) < 1e-4
    assert sharded.result() == pytest.approx(with_ddp.result(), rel=1e-3)


@for_projects("low_rank", "regression")
def test_a_run_that_was_stopped_is_resumed_by_the_other_way_to_wrap(project):
    project.interrupted()
    losses = project.resume_copy("stopped", "across", "--shard").losses()
    step = STEPS - len(losses)
    losses_with_ddp = project.undisturbed().losses()[step:]
    assert relative_difference(losses, losses_with_ddp) < 1e-4


@for_projects("masked_language", "stream")
def test_workers_change_no_loss(project):
    losses = project.run(2, "--num-workers=2").losses()
    losses_without_workers = project.run(2).losses()
    assert relative_difference(losses, losses_without_workers) < 1e-6


@for_projects("batch_norm", "contrastive", "lengths", "stream")
def test_a_validation_on_three_ranks_is_complete_and_has_the_result_of_two(project):
    """A finished run that is resumed has no step to take, and validates once more."""
    result_of_two = project.undisturbed().result()
    run = project.resume_copy("undisturbed", "validation", ranks=3)
    result_of_three = run.result()

    totals = run.validation_totals()
    _, num_targets = totals["loss"]
    assert num_targets == NUM_TARGETS.get(project.name, 23)
    expected = {"world_size": 3, "step": STEPS}
    for name, (total, count) in totals.items():
        expected[f"val_{name}"] = total / count
    assert result_of_three == pytest.approx(expected, rel=1e-4, abs=1e-6)

    result_of_two["world_size"] = 3
    assert result_of_two == pytest.approx(result_of_three, rel=1e-4, abs=1e-6)


@for_projects("batch_norm", "low_rank", "regression", "stream")
def test_a_stopped_run_ends_with_the_bits_of_an_undisturbed_one(project):
    assert "stopped by SIGTERM at step " in project.interrupted().out
    assert (project.folder / "stopped" / "stopped").exists()
    step = newest(project.folder / "stopped")["step"]
    assert step in (7, 8, 9)

    run = project.resume_copy("stopped", "resumed")
    assert f"going on from step_{step:08}" in run.out
    assert len(run.losses()) == STEPS - step

    project.undisturbed()
    resumed = newest(project.folder / "resumed")
    undisturbed = newest(project.folder / "undisturbed")
    assert same_bits(resumed["model"], undisturbed["model"])


@for_projects("low_rank")
def test_a_truncated_checkpoint_is_named_and_the_one_before_it_is_taken(project):
    project.interrupted()
    project.undisturbed()
    shutil.copytree(project.folder / "stopped", project.folder / "torn")
    path = checkpoints(project.folder / "torn")[-1]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])

    run = project.resume("torn")
    assert f"{path.name} is damaged" in run.out
    assert "going on from step_00000006" in run.out
    resumed = newest(project.folder / "torn")
    undisturbed = newest(project.folder / "undisturbed")
    assert same_bits(resumed["model"], undisturbed["model"])


def tensors_of(state):
    """All tensors of a model and its optimizer in the state of a checkpoint."""
    values = list(state["model"].values())
    for parameter_state in state["optimizer"]["state"].values():
        values += parameter_state.values()
    return [value for value in values if torch.is_tensor(value)]


@for_projects("low_rank", "batch_norm")
def test_a_nan_leaves_no_checkpoint_that_is_not_finite(project):
    """Step 4, whose batch is nan, is skipped, and the training goes on."""
    run = project.start(2, "--checkpoint-dir=nan", mischief="poison [true, 4]").end()
    nan_line = re.compile(r"^step (\d+): .* norm nan,", re.MULTILINE)  # "step 4: loss nan, norm nan, ..."
    assert nan_line.findall(run.out) == ["4"]

    states = states_in(project.folder / "nan")
    assert [state["step"] for state in states] == [6, 9, 10]
    for state in states:
        for tensor in tensors_of(state):
            assert tensor.isfinite().all()
    assert not same_bits(states[0]["model"], states[1]["model"])


@for_projects("low_rank")
def test_groups_keep_the_ratio_of_their_rates(project):
    project.undisturbed()
    adapter_lrs = []
    for state in states_in(project.folder / "undisturbed"):
        head, adapter = state["optimizer"]["param_groups"]
        assert head["lr"] * 100 == pytest.approx(adapter["lr"])
        adapter_lrs.append(adapter["lr"])
    assert adapter_lrs[0] > adapter_lrs[1] > 0


@for_projects("regression")
def test_a_signal_in_a_validation_or_save_is_heard_there(project):
    """A validation has four batches. The signal comes in the first, and the ranks stop after the second."""
    flags = ["--batch-size=6", "--val-every=4", "--checkpoint-dir=validating"]
    validating = project.start(2, *flags, mischief="stop [false, 1]")
    saving = project.start(2, "--checkpoint-dir=saving", mischief="stop_in_save")
    validating.end(ok=False)
    saving.end(ok=False)

    assert newest(project.folder / "validating")["step"] == 4
    calls_of_rank_0, _ = validating.calls(training=False)
    assert len(calls_of_rank_0) == 2
    assert [path.name for path in checkpoints(project.folder / "saving")] == ["step_00000003.pt"]
    assert "stopped by SIGTERM at step 3:" in saving.out
