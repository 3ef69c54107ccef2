"""Chapter 6's script trains chapter 11's eight kinds of projects, with the same functions in place of its own."""

import pytest
import torch
from forked import forked, script_on_ranks
from scripting import TOLERANCE, export, result, stand_alone
from test_trainer_workloads import NAMES, STEPS, TARGETS, Project, each_made_once, of, with_bug
from workloads_run import gap

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


class Sharded(Project):
    """Chapter 6's script with a workload. It keeps weights and no checkpoints."""

    chapter = "06"
    flags = ()
    files_of_whole_run = ("--save=weights",)

    def validate(self, ranks):
        """A run that only validates the weights of the undisturbed run."""
        return self.run(ranks, "--load=weights", "--epochs=0", "--max-steps=0")


project = each_made_once(Sharded)


@of(*sorted(set(NAMES) - {"two_inputs"}))  # where no rank used a branch, DDP gives None, and FSDP zero
def test_losses_are_those_of_chapter_11(project, tmp_path):
    ddp = Project(project.name, tmp_path, project.environment).run(2, *project.random_flags)
    assert gap(project.whole().losses(), ddp.losses()) < 1e-4


@of("two_inputs")
def test_two_ranks_have_the_losses_of_one(project):
    two = project.run(2)
    assert len(two.losses()) == STEPS
    assert gap(two.losses(), project.run(1).losses()) < 1e-4


@of("lengths", "regression")
def test_two_micro_batches_have_the_losses_of_one(project):
    assert gap(project.run(1, "--accumulate", "2").losses(), project.run(1).losses()) < 1e-4


@of(*NAMES)
def test_a_validation_is_complete_and_true_on_1_and_3_ranks(project):
    trained = project.whole().result() | {"step": 0, "bytes_per_parameter": 0}  # on two ranks
    for ranks in (1, 3):
        run = project.validate(ranks)
        sums = run.validation()
        result = run.result() | {"bytes_per_parameter": 0}
        assert not any(run.calls(training=True))
        assert sums["loss"][1] == TARGETS[project.name]
        means = {f"val_{name}": total / count for name, (total, count) in sums.items()}
        assert result == pytest.approx(trained | {"world_size": ranks}, rel=1e-4, abs=1e-6)
        assert result == pytest.approx(result | means, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function that runs chapter 6's script for some steps: its last loss, or what it says on standard error."""
    environment = stand_alone(tmp_path_factory.mktemp("path"))
    script = export("06", tmp_path_factory.mktemp("script"))
    text = script.read_text()

    def run(ranks, *flags, changes=("", "")):
        old, new = changes
        assert old in text
        script.write_text(text.replace(old, new) if old else text)
        small = ["--max-steps=8", "--width=16", "--warmup=2"]
        status, out, errors, left = forked(script_on_ranks(script, ranks, *small, *flags), environment)
        assert not left
        return result(out)["val_loss"] if status == 0 else errors

    return run


@pytest.mark.daily
def test_a_block_drawn_alone_has_its_weights_on_any_number_of_ranks(train):
    plain, drawn = train(2), train(1, "--meta")
    assert abs(plain - drawn) > TOLERANCE  # the CPU draws a model's weights in another order
    assert train(2, "--meta", "--recompute", "--accumulate=2") == pytest.approx(drawn, abs=TOLERANCE)
    assert train(3, "--meta", "--offload") == pytest.approx(drawn, abs=TOLERANCE)
    assert train(3, "--recompute") == pytest.approx(plain, abs=TOLERANCE)


def test_what_meta_cannot_draw_is_refused(train):
    own = "model.reset_parameters = lambda: nn.init.normal_(model.position)"
    assert "'PixelTransformer' object has no attribute 'reset_parameters'" in train(1, "--meta", changes=(own, "pass"))
    tied = f"{own}; model.head.weight = model.level.weight"
    assert "ValueError: --meta would draw a shared parameter twice." in train(1, "--meta", changes=(own, tied))
    assert isinstance(train(1, changes=(own, tied)), float)


def test_a_pytorch_without_what_find_unused_needs_is_refused_by_name(train):
    hidden = ("def main(args):", "del FSDPModule.set_reduce_scatter_unused_params\n\n\ndef main(args):")
    assert isinstance(train(1, changes=hidden), float)
    errors = train(1, "--find-unused", changes=hidden)
    what = "--find-unused needs FSDPModule.set_reduce_scatter_unused_params"
    assert f"RuntimeError: {what}, which PyTorch {torch.__version__} does not have: use 2.13 or newer." in errors


RANKS = test_two_ranks_have_the_losses_of_one
VALIDATION = test_a_validation_is_complete_and_true_on_1_and_3_ranks
BUGS = {
    "FSDP's division is forgotten": ("args.batch_size * ranks /", "args.batch_size /", "two_inputs", RANKS),
    "each rank divides by its own count": ("dist.all_reduce(number", "(number", "masked_language", RANKS),
    "a gradient is missing on a rank": ("params(True)", "params(False)", "two_inputs", RANKS),
    "the model is the root": ("fully_shard(module, **", "fully_shard(module.model, **", "contrastive", RANKS),
    "each rank judges its own BatchNorm": ("dist.broadcast(buffer, src=0)", "pass", "batch_norm", VALIDATION),
    "a validation leaves out its rest": ("if len(block) >= self.least > 0:", "if False:", "regression", VALIDATION),
}


@pytest.mark.daily
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name, tmp_path):
    old, new, workload, check = BUGS[name]
    sharded = with_bug(Sharded, workload, tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(sharded)
