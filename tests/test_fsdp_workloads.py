"""Chapter 6's script trains chapter 11's eight kinds of projects, with the same functions in place of its own."""

import pytest
import torch
from forked import forked, script_on_ranks
from scripting import TOLERANCE, export, result, stand_alone
from test_trainer_workloads import (  # noqa: F401  # its tests run here, too, with this file's project
    DRAWS,
    NAMES,
    TARGETS,
    Project,
    each_made_once,
    of,
    test_two_micro_batches_have_the_losses_of_one,
    test_two_ranks_have_the_losses_of_one,
    test_workers_change_no_loss_and_told_losses_are_the_true_ones,
    with_bug,
)
from workloads_run import gap

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


class Sharded(Project):
    """Chapter 6's script with a workload. It keeps weights and no checkpoints."""

    def __init__(self, name, folder, environment, plant=("", "")):
        super().__init__(name, folder, environment, plant, "06", [])

    def whole(self):
        """The run on two ranks; its weights are in the file ``weights``."""
        return self.run(2, "--save=weights", *DRAWS.get(self.name, []))

    def judge(self, ranks):
        """A run that only validates those weights."""
        return self.run(ranks, "--load=weights", "--epochs=0", "--max-steps=0")


project = each_made_once(Sharded)


@of([name for name in NAMES if name != "two_inputs"])  # where no rank used a branch, DDP gives None, and FSDP zero
def test_losses_are_those_of_chapter_11(project, tmp_path):
    ddp = Project(project.name, tmp_path, project.environment).run(2, *DRAWS.get(project.name, []))
    assert gap(project.whole().losses(), ddp.losses()) < 1e-4


@of(NAMES)
def test_a_validation_is_whole_and_true_on_1_2_and_3_ranks(project):
    trained = project.whole().result() | {"step": 0, "bytes_per_parameter": 0}
    for ranks in (1, 2, 3):
        run = project.judge(ranks)
        told, sums = run.result() | {"bytes_per_parameter": 0}, run.validation()
        assert not any(run.calls(training=True)) and sums["loss"][1] == TARGETS.get(project.name, 23)
        true = {f"val_{name}": total / count for name, (total, count) in sums.items()}
        assert told == pytest.approx(trained | {"world_size": ranks}, rel=1e-4, abs=1e-6)
        assert told == pytest.approx(told | true, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A function that runs chapter 6's script for some steps: its result, or what it says on standard error."""
    path, folder = stand_alone(tmp_path_factory.mktemp("path")), tmp_path_factory.mktemp("script")
    whole = export("06", folder)

    def run(ranks, *flags, plant=("", "")):
        assert plant[0] in whole.read_text()
        (folder / "train.py").write_text(whole.read_text().replace(*plant) if plant[0] else whole.read_text())
        fewer = ["--max-steps=8", "--width=16", "--warmup=2", *flags]
        status, out, errors, left = forked(script_on_ranks(folder / "train.py", ranks, *fewer), path)
        assert not left
        return result(out)["val_loss"] if status == 0 else errors

    return run


@pytest.mark.daily
def test_a_block_drawn_alone_has_its_weights_on_any_number_of_ranks(script):
    plain, drawn = script(2), script(1, "--meta")
    assert abs(plain - drawn) > TOLERANCE  # the CPU draws a model's weights in another order
    assert script(2, "--meta", "--recompute", "--accumulate=2") == pytest.approx(drawn, abs=TOLERANCE)
    assert script(3, "--meta", "--offload") == pytest.approx(drawn, abs=TOLERANCE)
    assert script(3, "--recompute") == pytest.approx(plain, abs=TOLERANCE)


def test_what_meta_cannot_draw_is_refused(script):
    own = "model.reset_parameters = lambda: nn.init.normal_(model.position)"
    assert "'PixelTransformer' object has no attribute 'reset_parameters'" in script(1, "--meta", plant=(own, "pass"))
    tied = f"{own}; model.head.weight = model.level.weight"
    assert "ValueError: --meta would draw a shared parameter twice." in script(1, "--meta", plant=(own, tied))
    assert isinstance(script(1, plant=(own, tied)), float)


def test_a_pytorch_without_what_find_unused_needs_is_refused_by_name(script):
    hidden = ("def main(args):", "del FSDPModule.set_reduce_scatter_unused_params\n\n\ndef main(args):")
    assert isinstance(script(1, plant=hidden), float)
    errors = script(1, "--find-unused", plant=hidden)
    what = "--find-unused needs FSDPModule.set_reduce_scatter_unused_params"
    assert f"RuntimeError: {what}, which PyTorch {torch.__version__} does not have: use 2.13 or newer." in errors


RANKS, JUDGED = test_two_ranks_have_the_losses_of_one, test_a_validation_is_whole_and_true_on_1_2_and_3_ranks
BUGS = {
    "FSDP's division is forgotten": ("args.batch_size * ranks /", "args.batch_size /", "two_inputs", RANKS),
    "each rank divides by its own count": ("dist.all_reduce(number", "(number", "masked_language", RANKS),
    "a gradient is missing on a rank": ("params(True)", "params(False)", "two_inputs", RANKS),
    "the model is the root": ("fully_shard(module, **", "fully_shard(module.model, **", "contrastive", RANKS),
    "each rank judges its own BatchNorm": ("dist.broadcast(buffer, src=0)", "pass", "batch_norm", JUDGED),
    "a validation leaves out its rest": ("if len(block) >= self.least > 0:", "if False:", "regression", JUDGED),
}


@pytest.mark.daily
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_noticed(name, tmp_path):
    old, new, workload, check = BUGS[name]
    sharded = with_bug(Sharded, workload, tmp_path, old, new)
    with pytest.raises(AssertionError):
        check(sharded)
