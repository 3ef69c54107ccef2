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
    """The result and standard error of a run on so many ranks; the result is None if it fails."""
    environment = stand_alone(script.parent)
    status, out, errors, _ = forked(script_on_ranks(script, ranks, *QUICK, *flags), environment)
    if status != 0:
        return None, errors
    return result(out), errors


def test_two_replicas_of_two_ranks_train_as_one_rank_and_store_the_model_twice(script):
    one, _ = run(script, 1)
    four, _ = run(script, 4, "--replicas=2")
    assert four["val_loss"] == pytest.approx(one["val_loss"], abs=2e-3)
    assert four["bytes_per_parameter"] == pytest.approx(16, abs=0.01)


def test_replicas_that_do_not_divide_the_ranks_are_refused(script):
    refused, errors = run(script, 2, "--replicas=3")
    assert refused is None
    assert "ValueError: 2 ranks cannot form 3 equal replicas. Give --replicas the number of nodes." in errors


def test_saved_weights_go_on_where_they_were_on_another_number_of_ranks(script):
    saved, _ = run(script, 2, "--save=weights.safetensors", "--meta")
    loaded, _ = run(script, 1, "--load=weights.safetensors", "--lr=0")
    assert loaded["val_loss"] == pytest.approx(saved["val_loss"], abs=2e-3)


def test_a_gradient_that_is_not_finite_stops_all_ranks(script):
    stopped, errors = run(script, 2, "--lr=1e30")
    assert stopped is None
    assert errors.count("is non-finite, so it cannot be clipped") >= 2


def test_a_width_that_the_heads_cannot_share_is_refused(script):
    refused, errors = run(script, 1, "--width=18")
    assert refused is None
    assert "ValueError: --width 18 cannot be divided among 4 heads. Try a multiple of 4." in errors


def test_without_an_epoch_the_initial_weights_are_evaluated(script):
    initial, _ = run(script, 1, "--epochs=0")
    assert initial["val_loss"] == pytest.approx(1.609, abs=0.4)  # ln 5: a guess among five grey levels
    assert initial["bytes_per_parameter"] == pytest.approx(4, abs=0.01)  # no gradient, and no moments
