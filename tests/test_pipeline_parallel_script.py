"""Which schedules chapter 8's script takes, and what it says of the others."""

import pytest
from loading import loaded
from scripting import export, stand_alone, torchrun

FITTING = {"world_size": 4, "layers": 8, "last_less": 0, "micro_batches": 8, "batch_size": 48}
TAKEN = ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return export("08", tmp_path_factory.mktemp("script"))


@pytest.mark.parametrize("schedule", TAKEN)
def test_a_schedule_with_one_stage_or_with_looped_stages_is_accepted(path, schedule):
    loaded(path).check_flags(schedule, **FITTING)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV", "1f1b", "GPipes"])
def test_a_schedule_that_the_script_cannot_run_is_refused_in_one_line(path, schedule):
    """In the two V schedules a rank has other stages, and PyTorch itself takes names in small letters."""
    with pytest.raises(ValueError) as raised:
        loaded(path).check_flags(schedule, **FITTING)
    assert str(raised.value) == f"--schedule {schedule}: choose one of {', '.join(TAKEN)}."


@pytest.mark.ranks
def test_the_script_refuses_a_schedule_before_it_asks_pytorch_for_it(path, tmp_path):
    status, _, errors, left = torchrun(path, 1, stand_alone(tmp_path), "--schedule", "GPipes")
    assert (status, left) == (1, {})
    assert f"ValueError: --schedule GPipes: choose one of {', '.join(TAKEN)}." in errors
