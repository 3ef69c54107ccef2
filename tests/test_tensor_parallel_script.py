"""What chapter 7's script refuses, and which of its steps it measures."""

import pytest
from loading import loaded
from scripting import export

from helpers.ranks.launch import launch

FITTING = {
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
REFUSED = {  # {what does not fit: (arguments, the beginning of the message)}
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
    script.check_arguments(**FITTING)
    script.check_arguments(**FITTING | {"dtype": "bfloat16", "compile_blocks": True, "check": 0})


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(script, case):
    changed, message = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        script.check_arguments(**FITTING | changed)
    assert str(raised.value).startswith(message)


def test_the_median_step_is_not_one_of_the_first_five(script):
    assert script.median_step([0, 9, 18, 27, 36, 45, 46, 47, 49]) == 1
    assert script.median_step([0, 9, 18]) == 9  # there are no others


def compare_with_zero_projections(path):
    """The largest difference of a model, whose blocks add nothing yet, from itself."""
    script = loaded(path)
    mesh = script.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    models = []
    for _ in range(2):
        script.torch.manual_seed(0)
        model = script.PixelTransformer(width=8, layers=1, levels=script.LEVELS)
        for layer in (model.blocks[0].out, model.blocks[0].mlp[2]):
            script.nn.init.zeros_(layer.weight)
            script.nn.init.zeros_(layer.bias)
        models.append(model)
    grey = script.torch.randint(script.LEVELS, (4, 64))
    labels = script.torch.randint(10, (4,))
    return max(script.equal_to_one_process(*models, grey, labels, mesh).values())


def test_a_model_with_zero_projections_is_equal_to_itself(script):
    """Nanochat and LoRA begin so: then outputs and gradients before the zeros are zero on both sides."""
    assert launch(compare_with_zero_projections, script.__file__, nproc=1) == [0.0]
