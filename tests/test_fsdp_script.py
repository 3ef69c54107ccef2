"""What chapter 6's script promises of its flags: replicas, weights that are read and written, refusals."""

import pytest
from forked import forked, script_on_ranks
from scripting import export, result, stand_alone

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

QUICK = ["--epochs=1", "--batch-size=144", "--width=16", "--backend=gloo"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return export("06", tmp_path_factory.mktemp("script"))


def run(script, ranks, *flags):
    """Train for an epoch on so many ranks, and return the result. Fails if the script does."""
    ended = run_to_the_end(script, ranks, *flags)
    assert ended.status == 0, ended.errors
    return result(ended.out)


def errors_of(script, ranks, *flags):
    """What a run on so many ranks writes to stderr. Fails if the run does not."""
    ended = run_to_the_end(script, ranks, *flags)
    assert ended.status not in (0, None), f"{ended.status}: {ended.errors}"
    return ended.errors


def run_to_the_end(script, ranks, *flags):
    """Train for an epoch on so many ranks. Returns an Ended."""
    return forked(script_on_ranks(script, ranks, *QUICK, *flags), stand_alone(script.parent))


def test_two_replicas_of_two_ranks_train_as_one_rank_and_store_the_model_twice(script):
    """The result has the bytes for each parameter of one replica: 16, because FSDP stores four numbers in float32.

    The script divides the bytes of all four ranks by two replicas, so together they store 32.
    """
    one = run(script, 1)
    four = run(script, 4, "--replicas=2")
    assert four["val_loss"] == pytest.approx(one["val_loss"], abs=2e-3)
    assert four["bytes_per_parameter"] == pytest.approx(16, abs=0.01)


def test_replicas_that_do_not_divide_the_ranks_are_refused(script):
    errors = errors_of(script, 2, "--replicas=3")
    assert "ValueError: 2 ranks cannot form 3 equal replicas. Give --replicas the number of nodes." in errors


def test_saved_weights_go_on_where_they_were_on_another_number_of_ranks(script):
    saved = run(script, 2, "--save=weights.safetensors", "--meta")
    loaded = run(script, 1, "--load=weights.safetensors", "--lr=0")
    assert loaded["val_loss"] == pytest.approx(saved["val_loss"], abs=2e-3)


def test_a_gradient_that_is_not_finite_stops_all_ranks(script):
    errors = errors_of(script, 2, "--lr=1e30")
    assert errors.count("is non-finite, so it cannot be clipped") >= 2


def test_a_width_that_the_heads_cannot_share_is_refused(script):
    errors = errors_of(script, 1, "--width=18")
    assert "ValueError: --width 18 cannot be divided among 4 heads. Try a multiple of 4." in errors


def test_without_an_epoch_the_initial_weights_are_evaluated(script):
    initial = run(script, 1, "--epochs=0")
    assert initial["val_loss"] == pytest.approx(1.609, abs=0.4)  # ln 5: a guess among five grey levels
    assert initial["bytes_per_parameter"] == pytest.approx(4, abs=0.01)  # no gradient, and no moments
