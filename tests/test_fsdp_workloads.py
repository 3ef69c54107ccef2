"""Chapter 6's script trains chapter 11's kinds of projects, with the same functions in place of its own."""

import pytest
import torch
from forked import forked, script_on_ranks
from scripting import export, stand_alone
from test_trainer_workloads import STEPS, TARGETS, Project, each_made_once, of
from workloads_run import gap

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


class Sharded(Project):
    """Chapter 6's script with a workload. It keeps weights and no checkpoints."""

    chapter = "06"
    flags = ()
    files_of_whole_run = ("--save=weights",)


project = each_made_once(Sharded)


@of("two_inputs")  # where no rank used a branch, DDP gives None, and FSDP zero
def test_two_ranks_have_the_losses_of_one(project):
    two = project.run(2)
    assert len(two.losses()) == STEPS
    assert gap(two.losses(), project.run(1).losses()) < 1e-4


@of("lengths")
def test_two_micro_batches_have_the_losses_of_one(project):
    assert gap(project.run(1, "--accumulate", "2").losses(), project.run(1).losses()) < 1e-4


@of("batch_norm", "contrastive", "lengths")
def test_a_validation_on_three_ranks_is_complete_and_has_the_result_of_two(project):
    trained = project.whole().result() | {"step": 0, "bytes_per_parameter": 0}
    run = project.run(3, "--load=weights", "--epochs=0", "--max-steps=0")
    sums = run.validation()
    result = run.result() | {"bytes_per_parameter": 0}
    assert sums["loss"][1] == TARGETS.get(project.name, 23)
    means = {f"val_{name}": total / count for name, (total, count) in sums.items()}
    assert result == pytest.approx(trained | {"world_size": 3}, rel=1e-4, abs=1e-6)
    assert result == pytest.approx(result | means, rel=1e-4, abs=1e-6)


def errors_of_one_rank(folder, old, new, *flags):
    """What chapter 6's script says on standard error if ``old`` in its text is replaced by ``new``."""
    environment = stand_alone(folder)
    script = export("06", folder / "script")
    text = script.read_text()
    assert old in text
    script.write_text(text.replace(old, new))
    _, _, errors, _ = forked(script_on_ranks(script, 1, "--max-steps=1", "--width=16", *flags), environment)
    return errors


def test_tied_weights_are_refused_on_the_meta_device(tmp_path):
    own = "model.reset_parameters = lambda: nn.init.normal_(model.position)"
    tied = f"{own}; model.head.weight = model.level.weight"
    errors = errors_of_one_rank(tmp_path, own, tied, "--meta")
    assert "ValueError: --meta would draw a shared parameter twice." in errors


def test_a_pytorch_without_what_find_unused_needs_is_refused_by_name(tmp_path):
    main = "def main(args):"
    hidden = f"del FSDPModule.set_reduce_scatter_unused_params\n\n\n{main}"
    errors = errors_of_one_rank(tmp_path, main, hidden, "--find-unused")
    what = "--find-unused needs FSDPModule.set_reduce_scatter_unused_params"
    assert f"RuntimeError: {what}, which PyTorch {torch.__version__} does not have: use 2.13 or newer." in errors
