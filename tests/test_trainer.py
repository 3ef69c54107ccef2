"""Chapter 11's script: what it refuses and keeps, its clock, its averages, a compiler, and one run in a logger."""

import os
import shutil
import sys
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from forked import forked, script_on_ranks
from loading import Device, loaded
from scripting import export, result, stand_alone
from torch import nn

from helpers.export.chapters import find_notebook
from helpers.ranks.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

pytestmark = pytest.mark.ranks

NOTEBOOK = find_notebook("11")
SEVEN = ["add_flags", "load_data", "collate", "build_model", "build_optimizer", "loss_sums", "open_log"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return export(NOTEBOOK, tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


def settings(script, *flags):
    """The script's ``args`` with these flags."""
    with mock.patch("sys.argv", [str(script), *flags]):
        return loaded(script).parse_args()


def test_the_seven_functions_stand_first(script):
    lines = script.read_text().splitlines()
    names = [line.removeprefix("def ").partition("(")[0] for line in lines if line.startswith(("def ", "class "))]
    assert names[:7] == SEVEN


# --- what a run refuses -----------------------------------------------------------------------------------------------

REFUSED = {  # flags: the error
    "--accumulate=97": "--batch-size: 97 to 1440; streams need --max-steps.",
    "--batch-size=1441": "--batch-size: 1 to 1440; streams need --max-steps.",
    "--resume": "--resume needs --checkpoint-dir.",
    "--checkpoint-dir=.": "step_00000007.pt is there: add --resume, or take another folder.",
    "--checkpoint-dir=. --resume --seed=8": "step_00000007 has seed = 0, not 8: keep 0.",
}


def errors_of(path, all_args, loss_sums=None):
    """The message of the ValueError that ends each run, with this ``loss_sums`` in place of the script's own."""
    trainer = loaded(path)
    if loss_sums is not None:
        trainer.loss_sums = loss_sums
    errors = []
    for args in all_args:
        try:
            trainer.train(args, torch.device("cpu"))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_refused_in_one_line(script, tmp_path, monkeypatch):
    torch.save({"args": vars(settings(script))}, tmp_path / "step_00000007.pt")
    monkeypatch.chdir(tmp_path)
    all_args = [settings(script, *flags.split()) for flags in REFUSED]
    assert launch(errors_of, str(script), all_args, nproc=1) == [list(REFUSED.values())]


def half_precision_sums(model, batch, args):
    outputs = model(batch[0])
    return {"loss": (outputs.bfloat16().sum(), len(outputs))}


def test_sums_in_half_precision_are_refused(script):
    args = settings(script, "--max-steps=1")
    [[error]] = launch(errors_of, str(script), [args], half_precision_sums, nproc=1)
    assert "torch.bfloat16 ['loss']: always float32, ['loss']" in error


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_in_the_order_of_their_steps(script, tmp_path):
    for step in (99_999_999, 1_000_000_000, 20, 2_000_000_000):
        (tmp_path / f"step_{step:08}.pt").touch()
    (tmp_path / "unfinished.part").touch()
    names = [path.name for path in loaded(script).checkpoints(tmp_path)]
    assert names == ["step_00000020.pt", "step_99999999.pt", "step_1000000000.pt", "step_2000000000.pt"]


def save_on_a_full_disk(path, args):
    """(what a folder holds after a save that ends in the middle, what the save raised, what a resume loads)."""
    trainer = loaded(path)
    model = nn.Linear(64, 64)
    trainer.save_run({"model": model}, 1, 0.5, args)
    write = torch.save

    def full(state, file, **options):
        write(state, file, **options)
        raise OSError(28, "No space left on device")

    torch.save = full
    try:
        trainer.save_run({"model": model}, 2, 0.5, args)
    except OSError as error:
        names = sorted(path.name for path in trainer.Path(args.checkpoint_dir).iterdir())
        return names, str(error), trainer.load_run({"model": model}, args)


def test_a_full_disk_leaves_the_last_checkpoint_and_a_part_that_does_not_count(script, tmp_path):
    args = settings(script, f"--checkpoint-dir={tmp_path / 'runs'}", "--resume")
    [(names, error, run)] = launch(save_on_a_full_disk, str(script), args, nproc=1)
    assert names == ["step_00000001.pt", "unfinished.part"]
    assert "No space left" in error
    assert run == (1, 0.5)


def events_of(path, args):
    """What a run does, in order: forks, and calls that communicate."""
    trainer = loaded(path)
    events = []
    os.register_at_fork(before=lambda: events.append("fork"))

    def noted(call):
        return lambda *given, **named: events.append("collective") or call(*given, **named)

    names = ("all_reduce", "broadcast", "broadcast_object_list", "new_group")
    calls = {name: noted(getattr(dist, name)) for name in names}
    with mock.patch.multiple(dist, **calls), mock.patch.object(trainer, "DDP", noted(trainer.DDP)):
        trainer.train(args, torch.device("cpu"))
    return events


def test_no_worker_is_forked_beside_a_collective(script, tmp_path):
    args = settings(script, "--max-steps=4", "--val-every=2", "--num-workers=2", f"--checkpoint-dir={tmp_path}")
    for events in launch(events_of, str(script), args, nproc=2):
        assert events[:4] == ["fork"] * 4
        assert set(events[4:]) == {"collective"}
        assert len(events) > 20


def train_with_an_average(path, args):
    """({step: validation loss} of a run, the loss of the averaged model in its last checkpoint)."""
    trainer = loaded(path)
    log = []
    trainer.train(args, torch.device("cpu"), lambda args: lambda *record: log.append(record))
    validated = {step: values["val_loss"] for step, values in log if "val_loss" in values}
    last = torch.load(trainer.Path(args.checkpoint_dir, "step_00000012.pt"), weights_only=True)
    average = trainer.build_model(args)
    average.load_state_dict({name[7:]: x for name, x in last["ema"].items() if name.startswith("module.")})
    _, (images, labels) = (data.tensors for data in trainer.load_data(args))
    loss = nn.functional.cross_entropy(average.eval()(images), labels).item()
    return validated, loss


def test_the_average_is_validated_and_the_best_is_kept(script, tmp_path):
    flags = ["--max-steps=12", "--val-every=3", "--ema=0.9", "--keep-best", "--lr=0.5"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [(validated, loss)] = launch(train_with_an_average, str(script), args, nproc=1)
    assert list(validated) == [3, 6, 9, 12]
    assert validated[12] == pytest.approx(loss, rel=1e-4)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["best"] == min(validated.values()) == validated[best["step"]]


# --- the speed, the log, a compiler -----------------------------------------------------------------------------------


def speeds_by_a_slow_clock(path, args):
    """The speeds that a run prints if a step takes a second, on a queue, and a validation or a save an hour.

    In each question whether to stop, the host waits for another rank while the device works.
    """
    trainer = loaded(path)
    device = Device()
    records = []

    def step(*arguments):
        device.step()
        return torch.ones(2, 2, dtype=torch.float64), device  # as the norm, for whose number the host waits

    def evaluate(*arguments):
        device.hour()
        return {"val_loss": 1.0}

    def agreed(stop):
        device.wait()

    trainer.time = device
    trainer.take_step = step
    trainer.save_run = device.hour
    trainer.evaluate = evaluate
    trainer.Step.means = lambda step, totals: {"loss": 1.0}
    trainer.StopRequest.agreed = agreed
    trainer.train(args, torch.device("cpu"), lambda args: lambda *record: records.append(record))
    return [(step, values["samples/s"]) for step, values in records if "samples/s" in values]


def test_the_speed_is_that_of_steps_alone(script, tmp_path):
    """A clock that is read before the device is done counts the steps in its queue as a save's, or as a wait's."""
    flags = ["--batch-size=10", "--max-steps=20", "--log-every=4", "--save-every=3", "--val-every=7"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [speeds] = launch(speeds_by_a_slow_clock, str(script), args, nproc=1)
    assert speeds == [(step, 10) for step in (4, 8, 12, 16, 20)]


def test_a_logger_has_one_run(script, alone, tmp_path):
    text = script.read_text()
    old = text[text.index("def open_log(args)") : text.index("def seed_all")]
    new = "def open_log(args):\n    file = open(f'log{os.getpid()}', 'w')\n"
    new += "    return lambda step, values: print(step, *values, file=file, flush=True)\n\n\n"
    copy = tmp_path / "train.py"
    copy.write_text(text.replace(old, new))
    status, _, errors, _ = forked(script_on_ranks(copy, 2, "--max-steps=4", "--log-every=2"), alone)
    assert status == 0, errors
    [log] = tmp_path.glob("log*")
    steps = [line.split()[:2] for line in log.read_text().splitlines()]
    assert steps == [["2", "loss"], ["4", "loss"], ["4", "val_loss"]]


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_model_that_inductor_compiled_has_the_same_losses(script, alone, tmp_path):
    environment = {**alone, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = ["--max-steps=5", "--width=16", "--dtype=bfloat16"]
    status, plain, errors, _ = forked(script_on_ranks(script, 2, *flags), environment)
    assert status == 0, errors
    flags += ["--compile-with=inductor", f"--checkpoint-dir={tmp_path / 'runs'}"]
    status, compiled, errors, _ = forked(script_on_ranks(script, 2, *flags), environment, timeout=600)
    assert status == 0, errors
    assert result(compiled) == pytest.approx(result(plain), abs=0.02)
    state = torch.load(tmp_path / "runs" / "step_00000005.pt", weights_only=True)
    assert "0.weight" in state["model"]  # without a prefix of the compiler or of DDP
