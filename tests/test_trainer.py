"""Chapter 11's script in a reader's hands: another model on other data, and claims that the page does not run."""

import ast
import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import nbformat
import pytest
import torch
from forked import forked, script_on_ranks
from scripting import ROOT, export, result, stand_alone
from torch.utils.data import TensorDataset

from helpers.ranks.launch import RankError, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

pytestmark = pytest.mark.ranks

NOTEBOOK = ROOT / "notebooks" / "11_trainer.ipynb"
FEW = ["--epochs", "2", "--batch-size", "64", "--lr", "0.003", "--width", "32", "--log-every", "1"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return export(NOTEBOOK, tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


def loaded(path):
    """The script as a module. ``path`` is text, which can be sent to ranks."""
    spec = importlib.util.spec_from_file_location("trainer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings(script, *flags):
    """The script's ``args`` with these flags."""
    with mock.patch("sys.argv", [str(script), *flags]):
        return loaded(script).parse_args()


# --- your own model and data ------------------------------------------------------------------------------------------


def definitions(source):
    """{name: source} of the functions and classes in some code."""
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


@pytest.fixture(scope="module")
def language_model(script, tmp_path_factory):
    """The script with the page's language model in place of its two functions."""
    cells = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT).cells
    [source] = [cell.source for cell in cells if cell.id == "own-model"]
    new, text = definitions(source), script.read_text()
    own = definitions(text)
    data, model = new.pop("load_data"), new.pop("build_model")
    text = text.replace(own["load_data"], data)
    text = text.replace(own["build_model"], "\n\n\n".join([*new.values(), model]))
    path = tmp_path_factory.mktemp("language_model") / "train.py"
    path.write_text(text)
    return path


def losses(out):
    """{step or epoch: loss} of what a run printed."""
    words = [line.replace(",", "").split() for line in out.splitlines() if line.startswith(("step", "epoch"))]
    return {f"{word[0]} {word[1]}": float(word[word.index("loss") + 1]) for word in words}


@pytest.fixture(scope="module")
def on_two_ranks(language_model, alone):
    """What the language model's run on two ranks printed."""
    status, out, errors, left = forked(script_on_ranks(language_model, 2, *FEW), alone)
    assert status == 0 and not left, errors
    assert "Warning" not in errors, errors
    return out


def test_a_language_model_on_text_takes_two_functions(language_model, alone, on_two_ranks):
    command = [sys.executable, language_model, *FEW]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    on_one, on_two = losses(done.stdout), losses(on_two_ranks)
    assert len(on_one) == 18 + 2 and on_one["step 18:"] < on_one["step 1:"] - 0.8
    assert on_two == pytest.approx(on_one, abs=0.002)
    assert {**result(done.stdout), "world_size": 2} == pytest.approx(result(on_two_ranks), abs=0.002)


def test_a_compiled_model_has_the_same_losses(language_model, alone, on_two_ranks, tmp_path):
    """The backend needs no C++ compiler, so all of torch.compile runs, except for inductor's code."""
    flags = ["--compile-with", "aot_eager", "--checkpoint-dir", str(tmp_path / "runs")]
    status, out, errors, _ = forked(script_on_ranks(language_model, 2, *FEW, *flags), alone)
    assert status == 0, errors
    assert losses(out) == pytest.approx(losses(on_two_ranks), abs=0.002)
    state = torch.load(tmp_path / "runs" / "step_00000018.pt", weights_only=True)
    assert "byte.weight" in state["model"]  # no prefix of torch.compile or of DDP
    assert state["args"]["compile_with"] == "aot_eager"


# --- what a run refuses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--accumulate", "5"], "ValueError: --batch-size must be a multiple of 5, up to 1440."),
        (["--batch-size", "1441"], "ValueError: --batch-size must be a multiple of 1, up to 1440."),
        (["--resume"], "ValueError: --resume needs --checkpoint-dir."),
        (["--checkpoint-dir", "."], "ValueError: step_00000007.pt is there: add --resume, or take another folder."),
    ],
    ids=["micro-batches", "too large", "resume from where", "a used folder"],
)
def test_refused_in_one_line(script, tmp_path, monkeypatch, flags, error):
    (tmp_path / "step_00000007.pt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError) as raised:
        launch(lambda path, args: loaded(path).main(args), str(script), settings(script, *flags), nproc=1)
    assert raised.value.failures[0].splitlines()[-1] == error


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_in_the_order_of_their_steps(script, tmp_path):
    for step in (99_999_999, 1_000_000_000, 20, 2_000_000_000):
        (tmp_path / f"step_{step:08}.pt").touch()
    (tmp_path / "unfinished.part").touch()
    names = [path.name for path in loaded(script).checkpoints(tmp_path)]
    assert names == ["step_00000020.pt", "step_99999999.pt", "step_1000000000.pt", "step_2000000000.pt"]


def save_on_a_full_disk(path, args):
    """(what a folder holds after a save that ends in the middle, what the save raised)."""
    trainer = loaded(path)
    parts = {"model": torch.nn.Linear(64, 64)}
    trainer.save_run(parts, 1, args, torch.device("cpu"))
    write = torch.save

    def full(state, file, **options):  # all_gather_object uses it too
        write(state, file, **options)
        if "model" in state:
            raise OSError(28, "No space left on device")

    torch.save = full
    try:
        trainer.save_run(parts, 2, args, torch.device("cpu"))
    except OSError as error:
        return sorted(path.name for path in trainer.Path(args.checkpoint_dir).iterdir()), str(error)


def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_file(script, tmp_path):
    args = settings(script, f"--checkpoint-dir={tmp_path / 'runs'}")
    [(names, error)] = launch(save_on_a_full_disk, str(script), args, nproc=1)
    assert names == ["step_00000001.pt"] and "No space left" in error


# --- the speed --------------------------------------------------------------------------------------------------------


def speeds_by_a_slow_clock(path, args):
    """The speeds that a run prints if a step takes a second, and a validation or a save an hour."""
    trainer, now, records = loaded(path), [0], []

    def taking(seconds, function):
        def slow(*arguments):
            now[0] += seconds
            return function(*arguments)

        return slow

    trainer.time = SimpleNamespace(perf_counter=lambda: now[0])
    trainer.take_step = taking(1, trainer.take_step)
    trainer.evaluate = taking(3600, trainer.evaluate)
    trainer.save_run = taking(3600, trainer.save_run)

    def log(args, loader, begun, total):
        return loader, lambda step, text, values: records.append((step, values.get("samples_per_second")))

    images = TensorDataset(torch.zeros(100, 64), torch.zeros(100, dtype=torch.int64))
    trainer.train(args, images, images, torch.device("cpu"), log)
    return [(step, speed) for step, speed in records if speed]


def test_the_speed_is_that_of_steps_alone(script, tmp_path):
    flags = ["--batch-size=10", "--epochs=2", "--log-every=4", "--save-every=3", f"--checkpoint-dir={tmp_path}"]
    [speeds] = launch(speeds_by_a_slow_clock, str(script), settings(script, *flags), nproc=1)
    assert speeds == [(step, 10) for step in (4, 8, 12, 16, 20)]  # with an epoch's end at 10, and saves between
