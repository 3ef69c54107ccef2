"""What chapter 7's script refuses, and which of its steps it measures."""

import pytest
from loading import loaded
from scripting import export

from helpers.ranks.launch import launch

ARGUMENTS_THAT_FIT = {
    "world_size": 4,
    "tp": 2,
    "width": 32,
    "heads": 4,
    "batch_size": 48,
    "epochs": 1,
    "check": 2,
    "dtype": "float32",
    "compile_blocks": False,
}
# {what does not fit: (the arguments that differ, the beginning of the message)}
REFUSED = {
    "ranks": ({"tp": 3}, "--tp 3: choose a number that divides 4 ranks"),
    "heads of a width": ({"width": 30}, "--width 30: choose a multiple of --heads 4"),
    "heads": ({"world_size": 8, "tp": 8}, "--tp 8: choose a number that divides 4 heads"),
    "levels": ({"world_size": 16, "tp": 16, "heads": 16}, "--tp 16: choose a number that divides 8 levels"),
    "replicas": ({"batch_size": 3}, "--batch-size 3: 2 replicas need a multiple of 2"),
    "epochs": ({"epochs": 0}, "--epochs 0: choose 1 or more"),
    "check in bfloat16": ({"dtype": "bfloat16"}, "--check 2 compares in float32"),
    "check of compiled blocks": ({"compile_blocks": True}, "--check 2 compares in float32"),
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return loaded(export("07", tmp_path_factory.mktemp("script")))


def test_arguments_that_fit_are_accepted(script):
    script.check_arguments(**ARGUMENTS_THAT_FIT)


def test_without_a_check_the_blocks_may_be_compiled_and_in_bfloat16(script):
    without_check = {"dtype": "bfloat16", "compile_blocks": True, "check": 0}
    script.check_arguments(**{**ARGUMENTS_THAT_FIT, **without_check})


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(script, case):
    differences, message = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        script.check_arguments(**{**ARGUMENTS_THAT_FIT, **differences})
    assert str(raised.value).startswith(message)


def test_the_median_step_is_not_one_of_the_first_five(script):
    times = [0, 9, 18, 27, 36, 45, 46, 47, 49]  # between two steps: the first five took 9 s, the others 1, 1 and 2
    assert script.median_step(times) == 1


def test_the_median_step_of_a_short_run_is_one_of_its_steps(script):
    assert script.median_step([0, 9, 18]) == 9


def compare_with_zero_projections(path):
    """The largest difference that the script's comparison finds between two equal models.

    The last layers of each block have zero weights, so the blocks add nothing yet.
    """
    script = loaded(path)
    mesh = script.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        script.torch.manual_seed(0)
        model = script.PixelTransformer(width=8, layers=1, levels=script.LEVELS)
        last_layer_of_attention = model.blocks[0].out
        last_layer_of_mlp = model.blocks[0].mlp[2]
        for layer in (last_layer_of_attention, last_layer_of_mlp):
            script.nn.init.zeros_(layer.weight)
            script.nn.init.zeros_(layer.bias)
        models.append(model)
    grey = script.torch.randint(script.LEVELS, (4, 64))
    labels = script.torch.randint(10, (4,))
    differences = script.equal_to_one_process(*models, grey, labels, mesh)
    return max(differences.values())


def test_a_model_with_zero_projections_is_equal_to_itself(script):
    """Nanochat and LoRA begin so: then outputs and gradients before the zeros are zero on both sides."""
    assert launch(compare_with_zero_projections, script.__file__, nproc=1) == [0.0]
