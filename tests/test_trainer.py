"""Chapter 11's script: what it refuses, what it keeps, when it stops, its speed, its logs, and both ways to wrap."""

import contextlib
import csv
import dataclasses
import io
import itertools
import os
import random
import re
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import Forked, forked, script_alone, script_on_ranks
from leftovers import wait_until
from loading import Device, loaded
from scripting import export, result, stand_alone, torchrun
from torch import nn

from helpers.export.chapters import find_notebook
from helpers.ranks.launch import RankError, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

pytestmark = pytest.mark.ranks

NOTEBOOK = find_notebook("11")
SEVEN = ["add_flags", "load_data", "collate", "build_model", "build_optimizer", "loss_sums", "open_log"]
CPU = torch.device("cpu")


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


def changed(script, folder, old, new, count=1):
    """A copy of the script in which a text is replaced."""
    text = script.read_text()
    assert text.count(old) == count, old
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(text.replace(old, new))
    return path


def errors_of(path, all_args, replacements=None):
    """The name and message of the error that ends each run, with these functions in place of the script's own.

    "none" if a run ends without an error.
    """
    trainer = loaded(path)
    for name, function in (replacements or {}).items():
        setattr(trainer, name, function)
    errors = []
    for args in all_args:
        try:
            trainer.train(args, CPU)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("none")
    return errors


def train_and_log(trainer, args):
    """Train, and return (what was logged: [(step, {name: value})], the metrics of the last validation)."""
    lines = []

    def log(step, values):
        lines.append((step, values))

    def open_log(args):
        return log

    _, metrics = trainer.train(args, CPU, open_log)
    return lines, metrics


def is_of_training(values):
    """Whether a logged line is about steps. The line of a validation has no norm of the gradient."""
    return "norm" in values


def blank_samples(number):
    """A data set of images that are all 0, with the label 0."""
    image = torch.zeros(64)
    label = 0
    return [(image, label)] * number


def copy_of(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def all_equal(tensors, others):
    return all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_seven_functions_stand_first(script):
    lines = script.read_text().splitlines()
    names = [line.removeprefix("def ").partition("(")[0] for line in lines if line.startswith(("def ", "class "))]
    assert names[:7] == SEVEN


# --- what a run refuses, before its first step ------------------------------------------------------------------------

REFUSED = {  # flags: the error
    "--accumulate=97": "--batch-size 96 is too small: give 97 or more, a sample for each of 1 rank(s)",
    "--batch-size=1441": "--batch-size 1441 is too large: the training set has 1440 sample(s).",
    "--resume": "--resume needs --checkpoint-dir.",
    "--checkpoint-dir=.": "step_00000007.pt is there: add --resume, or take another folder.",
    "--checkpoint-dir=. --resume --seed=8": "step_00000007 has seed = 0, not 8: keep 0, or add --allow-change seed.",
    "--checkpoint-dir=. --resume --allow-change=sed": "--allow-change sed: there is no such flag.",
    "--epochs=0": "--epochs 0 is too small: give 1 or more.",
    "--epochs=-1": "--epochs -1 is too small: give 1 or more.",
    "--max-steps=-5": "--max-steps -5 is too small: give 0 or more.",
    "--batch-size=0": "--batch-size 0 is too small: give 1 or more.",
    "--accumulate=0": "--accumulate 0 is too small: give 1 or more.",
    "--log-every=0": "--log-every 0 is too small: give 1 or more.",
    "--save-every=0": "--save-every 0 is too small: give 1 or more.",
    "--keep=0": "--keep 0 is too small: give 1 or more.",
    "--lr=-1": "--lr -1.0 must be greater than 0.",
    "--ema=1.5": "--ema 1.5 must be at least 0 and less than 1.",
    "--backend=gloom": "--backend gloom is none of nccl and gloo.",
    "--log-to=wandb": "--log-to wandb: this package is not installed.",
    "--backend=nccl": "--backend nccl needs GPUs, and there are none here.",
    "--compile-with=inductr": "--compile-with inductr is none of",
    "--replicas=2": "--replicas, --meta and --offload need --shard.",
    "--shard --replicas=2": "--replicas 2 must divide 1 rank(s).",
    "--init-from=nowhere.pt": "--init-from nowhere.pt: there is no such file.",
    "--checkpoint-dir=file/below": "--checkpoint-dir file/below: Not a directory.",
}


def test_refused_in_one_line(script, tmp_path, monkeypatch):
    """All flags of REFUSED are tried in a folder that has a checkpoint of step 7."""
    default_flags = {name: repr(value) for name, value in vars(settings(script)).items()}
    checkpoint = {
        "model": {},
        "optimizer": {},
        "scaler": {},
        "step": 7,
        "best_loss": 1.0,
        "flags": default_flags,
    }
    torch.save(checkpoint, tmp_path / "step_00000007.pt")
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)

    all_args = [settings(script, *flags.split()) for flags in REFUSED]
    [errors] = launch(errors_of, str(script), all_args, nproc=1)
    for (flags, expected), error in zip(REFUSED.items(), errors, strict=True):
        assert error.startswith(f"UsageError: {expected}"), f"{flags}: {error}"


@pytest.mark.parametrize("size", [0, 1])
def test_a_validation_set_that_is_too_small_is_refused_before_the_first_step(script, size):
    def load_data(args):
        return blank_samples(200), blank_samples(size)

    [[error], _] = launch(errors_of, str(script), [settings(script)], {"load_data": load_data}, nproc=2)
    assert error.startswith(f"UsageError: The validation set has {size} sample(s), fewer than the ranks.")


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_unequal_shapes_are_one_line_of_the_rank_that_has_them(script, alone, tmp_path, workers):
    old = "    return train_set, val_set\n"
    new = "    return [(torch.zeros(64 if i else 63), 0) for i in range(96)], None\n"
    path = changed(script, tmp_path / "unequal", old, new)
    # torchrun itself, because a worker of a forked rank cannot send an error of a class of the script.
    status, _, errors, _ = torchrun(path, 2, alone, "--max-steps=11", f"--num-workers={workers}")
    assert status not in (0, None)
    [line] = re.findall(r"^.*UsageError: (.*)$", errors, re.M)
    assert line.startswith("samples of different shapes need a collate() of your own (")


def test_a_model_without_a_trained_weight_and_an_optimizer_of_another_model_are_refused(script):
    def frozen(args):
        return nn.Linear(64, 10).requires_grad_(False)

    def of_another_model(model, args):
        return torch.optim.SGD(nn.Linear(64, 10).parameters(), args.lr)

    def of_nothing(model, args):
        return torch.optim.SGD([], args.lr)

    def of_frozen_parameters(model, args):
        return torch.optim.SGD(nn.Linear(64, 10).requires_grad_(False).parameters(), args.lr)

    for replacements, message in [
        ({"build_model": frozen}, "build_model has frozen all parameters: nothing is trained."),
        ({"build_optimizer": of_another_model}, "build_optimizer has parameters of another model."),
        ({"build_optimizer": of_nothing}, "build_optimizer: the optimizer has no parameters."),
        ({"build_optimizer": of_frozen_parameters}, "build_optimizer: the optimizer has no parameters to train."),
    ]:
        [[error]] = launch(errors_of, str(script), [settings(script)], replacements, nproc=1)
        assert error == f"UsageError: {message}"


WRONG_SUMS = {  # what loss_sums returns, with the model's logits and their sum as loss: the error
    "loss": 'loss_sums must return {"loss": (sum, count)}, not tensor(',
    "{'accuracy': (loss, 1)}": 'loss_sums must return {"loss": (sum, count)}, not {',
    "{'loss': loss}": "loss_sums must give (sum, count), not tensor(",
    "{'loss': (logits, 1)}": 'loss_sums: the sum of "loss" must be one number.',
    "{'loss': (loss.bfloat16(), 1)}": 'loss_sums: the sum of "loss" is torch.bfloat16: always float32.',
    "{'loss': (logits.mean(), 96)}": 'loss_sums: the sum of "loss" is a mean, and its count is 96: take reduction=',
    "{'loss': (F.cross_entropy(logits, labels), 96)}": 'loss_sums: the sum of "loss" is a mean, and its count is 96',
    "{'loss': (F.mse_loss(logits, logits.detach()), torch.tensor(9))}": 'loss_sums: the sum of "loss" is a mean',
}
RIGHT_SUMS = [
    "{'loss': (F.cross_entropy(logits, labels, reduction='sum'), 96)}",
    "{'loss': (F.cross_entropy(logits, labels) * 96, 96)}",
    "{'loss': (F.cross_entropy(logits, labels), 1)}",  # the mean of the ranks' means, for who wants it
    "{'loss': (logits.mean(0).sum(), 96)}",
]


def loss_sums_returning(expression):
    """A ``loss_sums`` that returns the value of a Python expression, such as ``{'loss': (logits.sum(), 96)}``."""

    def loss_sums(model, batch, args):
        images, labels = batch
        logits = model(images)
        names = {"logits": logits, "loss": logits.sum(), "labels": labels, "F": nn.functional, "torch": torch}
        return eval(expression, names)

    return loss_sums


def errors_of_sums(path, args, expressions):
    """{expression: the error of a run whose ``loss_sums`` returns its value}."""
    errors = {}
    for expression in expressions:
        replacements = {"loss_sums": loss_sums_returning(expression)}
        [errors[expression]] = errors_of(path, [args], replacements)
    return errors


def test_sums_of_another_form_are_refused_and_no_others(script):
    args = settings(script, "--max-steps=12")
    [errors] = launch(errors_of_sums, str(script), args, [*WRONG_SUMS, *RIGHT_SUMS], nproc=1)
    for expression, expected in WRONG_SUMS.items():
        assert errors[expression].startswith(f"UsageErrorOfRank: {expected}"), expression
    for expression in RIGHT_SUMS:
        assert errors[expression] == "none", expression


def loss_sums_with_a_score_on_rank_0(model, batch, args):
    images, _ = batch
    total = model(images).sum()
    sums = {"loss": (total, 1)}
    if dist.get_rank() == 0:
        sums["score"] = (total, 1)
    return sums


def test_ranks_whose_sums_have_other_names_are_refused_on_all(script):
    replacements = {"loss_sums": loss_sums_with_a_score_on_rank_0}
    errors = launch(errors_of, str(script), [settings(script)], replacements, nproc=2)
    message = "loss_sums returns 1 loss(es), ['score'] on rank 0 and 1 loss(es), [] on rank 1."
    assert errors == [[f"UsageError: {message}"]] * 2


@pytest.mark.parametrize("default", [None, [1, 2]])
def test_flags_without_a_type_are_refused(script, capsys, default):
    def add_flags(add):
        add("--layers", default, "layers")

    trainer = loaded(script)
    trainer.add_flags = add_flags
    with mock.patch("sys.argv", [str(script)]), pytest.raises(SystemExit):
        trainer.parse_args()
    assert f"error: --layers: a flag cannot have the type of {default}\n" in capsys.readouterr().err


def test_a_warmup_that_does_not_end_is_said(script, alone):
    _, out, errors, _ = forked(script_on_ranks(script, 1, "--warmup=500", "--max-steps=2"), alone)
    assert "\n--warmup 500: the rate does not reach --lr in 2 steps\n" in out, errors


def test_a_usage_error_is_one_line_and_the_exit_status_is_not_0(script, alone, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()  # as Slurm's batch file does
    flags = ["--batch-size=1", f"--checkpoint-dir={folder}"]
    status, _, errors, _ = forked(script_on_ranks(script, 2, *flags), alone)
    assert status != 0
    assert len(re.findall(r"^UsageError: --batch-size 1 is too small", errors, re.M)) == 1
    assert "train(args, device)" not in errors  # no traceback into the script
    # The batch file reads there that another start cannot help. The next start removes it.
    reason = (folder / "gave_up").read_text()
    assert reason.startswith("--batch-size 1 is too small: give 2 or more")
    status, _, errors, _ = forked(script_alone(script, "--max-steps=1", f"--checkpoint-dir={folder}"), alone)
    assert status == 0, errors
    assert "gave_up" not in names_in(folder)


def test_an_error_that_only_one_rank_has_gives_up_too(script, alone, tmp_path):
    """The same batch would come to this rank in each start, and its node would be excluded for it."""
    old = '    return {"loss": (loss, len(labels)),'
    new = '    if os.environ["RANK"] == "1":\n        return {"loss": loss}\n'
    path = changed(script, tmp_path / "wrong", old, new + old)
    status, _, errors, _ = forked(script_on_ranks(path, 2, f"--checkpoint-dir={tmp_path}"), alone)
    assert status != 0
    assert "UsageError: loss_sums must give (sum, count), not " in errors
    assert (tmp_path / "gave_up").read_text().startswith("rank 1: loss_sums must give (sum, count), not ")


def test_an_error_that_another_start_may_not_have_does_not_give_up(script, alone, tmp_path):
    flags = ["--resume", "--must-resume", f"--checkpoint-dir={tmp_path}"]
    status, _, errors, _ = forked(script_alone(script, *flags), alone)
    assert status == 1
    assert "has no checkpoint. Is it mounted?" in errors
    assert names_in(tmp_path) == ["lock"]


def test_a_config_file_comes_before_the_defaults_and_after_the_command_line(script, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("lr = 1\nbatch_size = 48\nshard = true\n")
    args = settings(script, f"--config={file}", "--batch-size=24")
    assert (args.lr, args.batch_size, args.shard, args.epochs) == (1.0, 24, True, 6)
    file.write_text("learning_rate = 1\n")
    with pytest.raises(SystemExit):
        settings(script, f"--config={file}")
    assert "there is no flag learning_rate" in capsys.readouterr().err


# --- nothing good is lost ---------------------------------------------------------------------------------------------


def test_checkpoints_are_in_the_order_of_their_steps(script, tmp_path):
    for step in (99_999_999, 1_000_000_000, 20, 2_000_000_000):
        (tmp_path / f"step_{step:08}.pt").touch()
    (tmp_path / "step_1a.pt").touch()
    names = [path.name for path in loaded(script).list_checkpoints(tmp_path)]
    assert names == ["step_00000020.pt", "step_99999999.pt", "step_1000000000.pt", "step_2000000000.pt"]


def save_on_a_full_disk(path, args):
    """Save step 1, and then step 2 on a disk that is full in the middle of the file.

    The system's limit of a file's length is the full disk. Returns (the names in the folder, the step that a resume
    goes on from).
    """
    import resource

    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    checkpoints = trainer.Checkpoints(args)
    training.step = 1
    checkpoints.save(training)

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # or the signal would end this process
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard_limit))
    training.step = 2
    with pytest.raises(trainer.UsageError, match=r"step_00000002.pt cannot be written: File too large\."):
        checkpoints.save(training)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard_limit, hard_limit))

    resumed = trainer.build_training(args, CPU)
    trainer.Checkpoints(args).load(resumed)
    return names_in(Path(args.checkpoint_dir)), resumed.step


@pytest.mark.parametrize("background", ["--save-in-background", "--no-save-in-background"])
def test_a_full_disk_leaves_the_last_checkpoint(script, tmp_path, background):
    args = settings(script, f"--checkpoint-dir={tmp_path / 'runs'}", "--resume", background)
    if background == "--save-in-background":
        [error] = launch(error_of_the_next_save, str(script), args, nproc=1)
        assert error == "No space left on device"
    else:
        [(names, step)] = launch(save_on_a_full_disk, str(script), args, nproc=1)
        assert names == ["step_00000001.pt"]
        assert step == 1


def error_of_the_next_save(path, args):
    """Start a save in the background, on a full disk, and return the error of the call that waits for it."""
    trainer = loaded(path)
    checkpoints = trainer.Checkpoints(args)

    def write_on_a_full_disk(*arguments, **options):
        raise OSError(28, "No space left on device")

    trainer.write_file = write_on_a_full_disk
    checkpoints.save(trainer.build_training(args, CPU))
    try:
        checkpoints.wait()
    except OSError as error:
        return error.strerror


@pytest.fixture
def folder(script, tmp_path):
    """A folder with checkpoints of steps 3, 6, 9 of a run that is to have 12."""
    args = settings(script, "--max-steps=9", "--save-every=3", f"--checkpoint-dir={tmp_path / 'runs'}")
    assert launch(errors_of, str(script), [args], nproc=1) == [["none"]]
    (tmp_path / "runs" / "weights.pt").unlink()
    return tmp_path / "runs"


def settings_to_go_on(script, folder, *flags):
    flags = ["--max-steps=12", "--save-every=3", "--allow-change=max_steps", f"--checkpoint-dir={folder}", *flags]
    return settings(script, *flags)


def cut(path):
    """Remove the second half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def garble(path):
    """Flip all bits of eight bytes in the file's largest tensor, where only a checksum shows the damage."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content = bytearray(path.read_bytes())
    middle = largest.header_offset + largest.file_size // 2
    for position in range(middle, middle + 8):
        content[position] ^= 0b11111111
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, garble])
def test_a_damaged_checkpoint_is_set_aside_and_never_overwritten(script, folder, harm):
    (folder / "step_00000009.damaged1").write_text("of an earlier time")
    harm(folder / "step_00000009.pt")
    content = (folder / "step_00000009.pt").read_bytes()
    args = settings_to_go_on(script, folder, "--resume")
    assert launch(errors_of, str(script), [args], nproc=1) == [["none"]]
    assert (folder / "step_00000009.damaged1").read_text() == "of an earlier time"
    assert (folder / "step_00000009.damaged2").read_bytes() == content
    assert (folder / "step_00000012.pt").exists()


def test_what_a_killed_job_left_of_a_save_is_removed(script, folder):
    (folder / ".step_00000012.pt.host.7.part").write_text("half")
    (folder / ".probe_0123456789abcdef").touch()
    assert launch(errors_of, str(script), [settings_to_go_on(script, folder, "--resume")], nproc=1) == [["none"]]
    assert names_in(folder) == [*(f"step_{step:08}.pt" for step in (6, 9, 12)), "weights.pt"]


def test_nothing_is_touched_without_resume(script, folder):
    cut(folder / "step_00000009.pt")
    before = names_in(folder)
    [[error]] = launch(errors_of, str(script), [settings_to_go_on(script, folder)], nproc=1)
    assert "is there: add --resume" in error
    assert names_in(folder) == before


def test_a_job_stops_if_no_checkpoint_is_whole(script, folder):
    for path in folder.glob("step_*.pt"):
        cut(path)
    before = names_in(folder)
    for _ in range(2):  # a job that is requeued must not start anew either
        [[error]] = launch(errors_of, str(script), [settings_to_go_on(script, folder, "--resume")], nproc=1)
        assert "None of the 3 checkpoint(s)" in error
        assert names_in(folder) == before


def error_of_a_bad_disk(path, args):
    """The error of a run whose disk cannot read a checkpoint. The trainer opens one with ``zipfile.ZipFile``."""
    trainer = loaded(path)

    def fail_to_read(*arguments):
        raise OSError(5, "Input/output error")

    trainer.zipfile = SimpleNamespace(ZipFile=fail_to_read, BadZipFile=zipfile.BadZipFile)
    try:
        trainer.train(args, CPU)
    except trainer.UsageError as error:
        return str(error)


def test_a_passing_read_error_ends_the_job_and_touches_nothing(script, folder):
    before = names_in(folder)
    args = settings_to_go_on(script, folder, "--resume")
    [error] = launch(error_of_a_bad_disk, str(script), args, nproc=1)
    assert error == f"{folder / 'step_00000009.pt'} cannot be read: Input/output error."
    assert names_in(folder) == before


def test_a_type_that_is_not_loaded_safely_ends_the_job_and_touches_nothing(script, folder):
    newest = folder / "step_00000009.pt"
    torch.save({**torch.load(newest, weights_only=True), "path": newest}, newest)
    before = names_in(folder)
    [[error]] = launch(errors_of, str(script), [settings_to_go_on(script, folder, "--resume")], nproc=1)
    assert error.startswith("UsageError:") and "is whole, but cannot be loaded: Weights only load failed" in error
    assert names_in(folder) == before


def test_a_file_of_another_program_is_named(script, folder):
    torch.save({"weights": {}}, folder / "step_00000099.pt")
    [[error]] = launch(errors_of, str(script), [settings_to_go_on(script, folder, "--resume")], nproc=1)
    assert "step_00000099.pt is no checkpoint of this script" in error


def test_a_flag_may_be_a_path_and_a_later_flag_locks_no_checkpoint(script, folder, tmp_path):
    """The checkpoints are of a script without --data and --s. The first run with these flags resumes from them."""
    width = '    add("--width", 256, "neurons in the hidden layer")\n'
    data = '    add("--data", Path("data"), "a folder")\n'
    size = '    add("--s", 0.5, "s")\n'
    later = changed(script, tmp_path / "later", width, width + data + size)
    for steps in (12, 15):
        args = settings_to_go_on(later, folder, "--resume", f"--max-steps={steps}")
        assert launch(errors_of, str(later), [args], nproc=1) == [["none"]]
    assert (folder / "step_00000015.pt").exists()

    args = settings_to_go_on(later, folder, "--resume", "--s=0.1")
    [[error]] = launch(errors_of, str(later), [args], nproc=1)
    assert "has s = 0.5, not 0.1: keep 0.5, or add --allow-change s." in error


OTHER_VALUES = {
    "epochs": 7,
    "max_steps": 13,
    "batch_size": 48,
    "lr": 0.2,
    "min_lr": 0.1,
    "warmup": 3,
    "max_norm": 2.0,
    "dtype": "bfloat16",
    "ema": 0.5,
    "seed": 1,
    "train_samples": 1441,
    "width": 128,
}


def test_each_flag_that_decides_is_compared(script):
    trainer = loaded(script)
    assert OTHER_VALUES.keys() == trainer.DECIDING_FLAGS | {"width"}
    saved = {name: repr(value) for name, value in vars(settings(script)).items()}
    saved["train_samples"] = "1440"

    def resume_with(changes, allowed=""):
        """Compare the flags of a checkpoint, "step", with those of a run that resumes from it."""
        trainer.check_same_flags(saved, {**saved, **changes}, allowed, "step")

    resume_with({"num_workers": "1", "log_every": "1"})  # these do not decide the weights
    for name, value in OTHER_VALUES.items():
        change = {name: repr(value)}
        with pytest.raises(trainer.UsageError, match=f"step has {name} = .*, not {value!r}: keep .*--allow-change"):
            resume_with(change)
        resume_with(change, allowed=name)


def test_a_flag_of_ones_own_may_have_choices(script, tmp_path):
    """It is parsed with the type of its default, and a resume compares it."""
    new = '    add("--width", 256, "neurons in the hidden layer")\n'
    size = '    add("--size", 3, "a size", choices=[1, 3])\n'
    with_choices = changed(script, tmp_path / "choices", new, new + size)
    flags = ["--max-steps=10", f"--checkpoint-dir={tmp_path / 'runs'}", "--resume"]
    for _ in range(2):
        args = settings(with_choices, *flags, "--size=3")
        assert launch(errors_of, str(with_choices), [args], nproc=1) == [["none"]]
    [[error]] = launch(errors_of, str(with_choices), [settings(with_choices, *flags, "--size=1")], nproc=1)
    assert "has size = 3, not 1" in error


def test_a_resume_with_more_samples_is_refused_unless_told(script, folder):
    def load_data(args):
        return blank_samples(1441), blank_samples(9)

    replacements = {"load_data": load_data}
    args = settings_to_go_on(script, folder, "--resume")
    [[error]] = launch(errors_of, str(script), [args], replacements, nproc=1)
    assert "has train_samples = 1440, not 1441: keep 1440, or add --allow-change train_samples." in error

    args = settings_to_go_on(script, folder, "--resume", "--allow-change=max_steps,train_samples")
    assert launch(errors_of, str(script), [args], replacements, nproc=1) == [["none"]]


@pytest.mark.parametrize("kept", ["best.pt", "weights.pt"])
def test_a_result_without_its_checkpoints_is_not_overwritten(script, tmp_path, kept):
    (tmp_path / kept).write_text("of an earlier run")
    flags = ["--max-steps=10", "--keep-best", f"--checkpoint-dir={tmp_path}"]
    all_args = [settings(script, *flags, "--no-resume"), settings(script, *flags, "--resume")]
    [[error_of_a_new_run, error_of_a_resume]] = launch(errors_of, str(script), all_args, nproc=1)
    assert kept in error_of_a_new_run and "take another folder" in error_of_a_new_run
    if kept == "weights.pt":  # a job that was killed before its first checkpoint may have a best.pt
        assert "weights.pt of a run that has ended" in error_of_a_resume
        assert (tmp_path / kept).read_text() == "of an earlier run"


def test_a_job_that_must_resume_does_not_start_anew(script, tmp_path):
    args = settings(script, "--resume", "--must-resume", f"--checkpoint-dir={tmp_path}")
    [[error]] = launch(errors_of, str(script), [args], nproc=1)
    assert error == f"UsageError: --must-resume: {tmp_path} has no checkpoint. Is it mounted?"


def errors_on_a_disk_of_its_own(path, args, folder):
    if dist.get_rank() == 1:
        os.makedirs(f"{folder}/local", exist_ok=True)
        os.chdir(f"{folder}/local")  # where ``runs`` is another folder
    else:
        os.chdir(folder)
    return errors_of(path, [args])


def test_a_folder_that_only_rank_0_sees_is_refused(script, tmp_path):
    args = settings(script, "--max-steps=10", "--checkpoint-dir=runs")
    errors = launch(errors_on_a_disk_of_its_own, str(script), args, str(tmp_path), nproc=2)
    for [error] in errors:
        assert error.startswith("UsageError: rank 1: --checkpoint-dir runs: ")
        assert error.endswith(" does not see rank 0's files there.")
    assert names_in(tmp_path / "runs") == []


def error_after_a_change_of_shapes(path, args):
    """The error of a resume whose model has the same number of weights in another shape."""
    trainer = loaded(path)

    def build_training(*shape):
        def build_model(args):
            return nn.ParameterDict({"weight": torch.ones(shape)})

        trainer.build_model = build_model
        return trainer.build_training(args, CPU)

    training = build_training(64, 8)
    trainer.Checkpoints(args).save(training)
    training = build_training(8, 64)
    try:
        trainer.Checkpoints(args).load(training)
    except trainer.UsageError as error:
        return str(error)


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_weight_of_another_shape_is_not_reshaped(script, tmp_path, shard):
    args = settings(script, shard, "--resume", f"--checkpoint-dir={tmp_path}")
    for error in launch(error_after_a_change_of_shapes, str(script), args, nproc=2):
        assert error.startswith("weight is [64, 8] in the file, and [8, 64] in the model")


def test_a_checkpoint_that_the_host_cannot_hold_is_refused_at_the_start(script, tmp_path):
    def available_memory():
        return 10_000  # bytes

    args = settings(script, "--shard", f"--checkpoint-dir={tmp_path}")
    replacements = {"available_memory": available_memory}
    [[error]] = launch(errors_of, str(script), [args], replacements, nproc=1)
    assert error.startswith("UsageError: A checkpoint takes 0 GiB of rank 0's host")
    assert names_in(tmp_path) == []


def test_the_memory_of_a_job_is_what_its_cgroups_allow(script, tmp_path):
    """Slurm sets the limit of the job, two folders above that of the rank. The machine may have much more."""
    trainer = loaded(script)
    job = tmp_path / "system.slice/slurmstepd.scope/job_4711"
    rank = job / "step_0/user/task_0"
    rank.mkdir(parents=True)
    for folder, limit in ((job, "128000"), (rank, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.stat").write_text("anon 28000\nfile 90000\nanon_thp 1\n")
    own_cgroup = f"1:cpu:/other\n0::/{rank.relative_to(tmp_path)}\n"
    assert trainer.memory_limits(own_cgroup, tmp_path) == [100_000]
    assert trainer.memory_limits("4:memory:/slurm/job_4711\n", tmp_path) == [], "version 1"
    (tmp_path / "memory.max").write_text("64000\n")  # a container sees its own cgroup as the root
    (tmp_path / "memory.stat").write_text("anon 4000\n")
    assert trainer.memory_limits("0::/\n", tmp_path) == [60_000]
    assert 0 < trainer.available_memory() < 2**50


def test_a_start_may_read_for_longer_than_the_patience(script, alone, tmp_path):
    """Rank 0 reads a large file to see whether it is damaged, and the others wait."""
    reads = "    paths = list_checkpoints(folder)\n    if not paths and"
    slow = changed(script, tmp_path / "slow", reads, f"    time.sleep(8)\n{reads}")
    flags = ["--patience=4", "--max-steps=2", f"--checkpoint-dir={tmp_path / 'run'}"]
    status, _, errors, _ = forked(script_on_ranks(slow, 2, *flags), alone)
    assert status == 0, errors


def test_a_rank_that_reads_a_checkpoint_from_a_slow_disk_is_waited_for(script, alone, tmp_path):
    """Its node reads the file for longer than --patience, and that of rank 0 has it in memory."""
    flags = ["--patience=4", "--max-steps=2", f"--checkpoint-dir={tmp_path / 'run'}", "--resume"]
    status, _, errors, _ = forked(script_on_ranks(script, 2, *flags), alone)
    assert status == 0, errors
    reads = "        checkpoint = read_checkpoint(path)\n"
    slow = changed(script, tmp_path / "slow", reads, f"        time.sleep(8 * dist.get_rank())\n{reads}")
    status, out, errors, _ = forked(script_on_ranks(slow, 2, *flags), alone)
    assert status == 0, errors
    assert "going on from step_00000002" in out


def lock_beside_a_worker(path, folder):
    """Lock a folder after the job that had locked it has ended, but a process that it forked has not.

    A loader's worker may outlive its job like this. Returns "locked", or the error.
    """
    trainer = loaded(path)
    with trainer.locked(folder):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write_end, b"forked")  # its handlers of a fork have run
            signal.pause()
        os.read(read_end, 6)
    try:
        with trainer.locked(folder):
            return "locked"
    except trainer.UsageError as error:
        return str(error)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_worker_does_not_keep_the_lock(script, tmp_path):
    assert launch(lock_beside_a_worker, str(script), str(tmp_path), nproc=1) == ["locked"]


class ModelWithOddState(nn.Module):
    """Its checkpoint has an infinite mask, a buffer of eight bits, and the number of calls as an extra state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def calls_after_each_run(path, all_args):
    """How many calls of its model each run counts at its end, with those of the run that it goes on from."""
    trainer = loaded(path)

    def build_model(args):
        return ModelWithOddState()

    trainer.build_model = build_model
    calls = []
    for args in all_args:
        model, _ = trainer.train(args, CPU)
        calls.append(model.calls)
    return calls


def test_a_mask_an_extra_state_and_eight_bits_are_saved(script, tmp_path):
    flags = ["--max-steps=20", "--save-every=10", f"--checkpoint-dir={tmp_path}"]
    all_args = [settings(script, *flags), settings(script, *flags, "--resume")]
    [(first, resumed)] = launch(calls_after_each_run, str(script), all_args, nproc=1)
    assert names_in(tmp_path) == ["step_00000010.pt", "step_00000020.pt", "weights.pt"]
    assert first >= 20
    assert resumed > first  # it has no step to take, but validates once more


def save_spoilt(path, args, spoil):
    """Save a training that the function ``spoil`` has changed."""
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    spoil(training)
    trainer.Checkpoints(args).save(training)


def with_a_weight_that_is_not_finite(training):
    training.model[0].weight.data[0, 0] = torch.nan


def with_a_setting_that_only_pickle_loads(training):
    training.optimizer.param_groups[0]["owner"] = Path("home")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_a_weight_that_is_not_finite, "step_00000000 is not finite, so it was not saved"),
        (with_a_setting_that_only_pickle_loads, "Weights only load failed"),
    ],
)
def test_a_spoilt_training_is_noticed_at_its_save_and_leaves_no_file(spoil, message, script, tmp_path):
    args = settings(script, f"--checkpoint-dir={tmp_path}")
    with pytest.raises(Exception, match=message):
        launch(save_spoilt, str(script), args, spoil, nproc=1)
    assert names_in(tmp_path) == []


def lock_twice(path, folder):
    """The error of a job that locks the folder of another job."""
    trainer = loaded(path)
    with trainer.locked(folder):
        try:
            with trainer.locked(folder):
                return "both"
        except trainer.UsageError as error:
            return str(error)


def test_two_jobs_in_one_folder_notice_each_other(script, tmp_path):
    [error] = launch(lock_twice, str(script), str(tmp_path), nproc=1)
    assert re.fullmatch(rf"Another job writes to {tmp_path}: process \d+ on .+\.", error)


def save_steps_1_to_9(path, args):
    trainer = loaded(path)
    checkpoints = trainer.Checkpoints(args)
    training = trainer.build_training(args, CPU)
    for step in range(1, 10):
        training.step = step
        checkpoints.save(training)
    checkpoints.wait()


def test_the_newest_and_every_nth_checkpoint_stay(script, tmp_path):
    flags = ["--keep=2", "--keep-every=4", "--save-in-background"]
    launch(save_steps_1_to_9, str(script), settings(script, f"--checkpoint-dir={tmp_path}", *flags), nproc=1)
    assert names_in(tmp_path) == [f"step_{step:08}.pt" for step in (4, 8, 9)]


def train_until_sigterm(path, args):
    """Train, and get SIGTERM when step 44 is logged."""

    def log(step, values):
        if step == 44:
            os.kill(os.getpid(), signal.SIGTERM)

    def open_log(args):
        return log

    loaded(path).train(args, CPU, open_log)


def test_the_save_at_a_signal_removes_the_oldest_checkpoint(script, tmp_path):
    """So whoever rolls back has to move the good checkpoint away before he ends the job, as chapter 13b says."""
    flags = ["--epochs=50", "--log-every=1", "--save-every=10", f"--checkpoint-dir={tmp_path}"]
    launch(train_until_sigterm, str(script), settings(script, *flags), nproc=1)
    *regular, at_signal = [name for name in names_in(tmp_path) if name.startswith("step_")]
    assert regular == ["step_00000030.pt", "step_00000040.pt"]
    assert at_signal in ("step_00000045.pt", "step_00000046.pt")


# --- it stops when it should ------------------------------------------------------------------------------------------


def always_nan(model, batch, args):
    total = model(batch[0]).sum()
    return {"loss": (total * torch.nan, len(batch[0]))}


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_run_without_a_finite_gradient_stops_on_all_ranks_and_saves_nothing(script, tmp_path, shard):
    flags = ["--max-bad-steps=4", "--save-every=2", f"--checkpoint-dir={tmp_path}", shard]
    errors = launch(errors_of, str(script), [settings(script, *flags)], {"loss_sums": always_nan}, nproc=2)
    message = "stopped at step 4: the gradient was not finite in 4 steps in a row; no step of this run was good"
    assert errors == [[f"NotFiniteError: {message}"]] * 2
    assert names_in(tmp_path) == []


def test_its_exit_status_is_not_0(script, alone, tmp_path):
    nan = changed(script, tmp_path / "nan", 'reduction="sum")\n', 'reduction="sum") * math.nan\n')
    status, out, errors, _ = forked(script_on_ranks(nan, 2, "--max-bad-steps=3"), alone)
    assert status != 0
    assert "result" not in out
    assert len(re.findall("^NotFiniteError: stopped at step 3", errors, re.M)) == 1


def spoil_losses(trainer, calls):
    """Make the loss nan in these calls of ``loss_sums``, counted from 1. So the trainer skips their steps."""
    own_loss_sums = trainer.loss_sums
    call_numbers = itertools.count(1)

    def loss_sums(model, batch, args):
        sums = own_loss_sums(model, batch, args)
        if next(call_numbers) in calls:
            total, count = sums["loss"]
            sums["loss"] = (total * torch.nan, count)
        return sums

    trainer.loss_sums = loss_sums


def lines_around_skipped_steps(path, args):
    """What is logged of the steps of a run whose second and third step are skipped."""
    trainer = loaded(path)
    spoil_losses(trainer, calls=(2, 3))
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines if is_of_training(values)]


def step_with_a_large_norm(path, args):
    """Take a step whose gradient has elements of about 1e22, so that the sum of their squares overflows.

    Returns (the norm of the gradient, whether the step left all weights as they were).
    """
    trainer = loaded(path)
    own_loss_sums = trainer.loss_sums
    batch = (torch.ones(96, 64), torch.zeros(96, dtype=torch.int64))
    factor = 1.0

    def loss_sums(model, batch, args):
        sums = own_loss_sums(model, batch, args)
        total, count = sums["loss"]
        sums["loss"] = (total * factor, count)
        return sums

    trainer.loss_sums = loss_sums
    training = trainer.build_training(args, CPU)
    trainer.take_step(training, [batch], 1, args)  # now there is a momentum
    before = copy_of(training.model.parameters())
    factor = 1e24
    _, norm = trainer.take_step(training, [batch], 2, args)
    return norm.item(), all_equal(before, training.model.parameters())


@pytest.mark.parametrize("max_norm", [0, 1])
def test_a_norm_that_is_not_finite_skips_the_step_though_each_element_is(script, max_norm):
    args = settings(script, f"--max-norm={max_norm}")
    [(norm, is_skipped)] = launch(step_with_a_large_norm, str(script), args, nproc=1)
    assert norm == float("inf")
    assert is_skipped


def skip_the_first_step(path, args):
    """Take step 1 with an infinite batch and step 2 with a good one.

    Returns (whether step 1 left all weights as they were, whether all weights are finite after step 2).
    """
    torch.use_deterministic_algorithms(True)  # so new memory is filled with nan
    trainer = loaded(path)
    labels = torch.zeros(96, dtype=torch.int64)
    infinite_batch = (torch.full((96, 64), torch.inf), labels)
    good_batch = (torch.ones(96, 64), labels)

    training = trainer.build_training(args, CPU)
    before = copy_of(training.model.parameters())
    trainer.take_step(training, [infinite_batch], 1, args)
    is_skipped = all_equal(before, training.model.parameters())
    trainer.take_step(training, [good_batch], 2, args)
    are_finite = all(param.isfinite().all().item() for param in training.model.parameters())
    return is_skipped, are_finite


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_first_step_may_be_skipped(script, dtype):
    [(is_skipped, are_finite)] = launch(skip_the_first_step, str(script), settings(script, f"--dtype={dtype}"), nproc=1)
    assert is_skipped
    assert are_finite


def test_skipped_steps_are_counted_and_leave_the_mean_loss_finite(script):
    args = settings(script, "--max-steps=15", "--log-every=5", "--peak-tflops=1e-3")
    [lines] = launch(lines_around_skipped_steps, str(script), args, nproc=1)
    assert [values["skipped"] for values in lines] == [2, 2, 2]
    first = lines[0]
    assert first["loss"] == pytest.approx(2.3, abs=0.2)
    # The skipped steps have taken their time, too. The model has 19,210 parameters, and one target for each image.
    assert "tokens/s" not in first
    assert first["mfu"] == pytest.approx(6 * 19_210 * first["samples/s"] / 1e9)


def test_ctrl_c_ends_with_a_checkpoint(script, alone, tmp_path):
    flags = ["--epochs=5000", "--log-every=5", "--save-every=100000", f"--checkpoint-dir={tmp_path / 'runs'}"]
    run = Forked(script_alone(script, *flags), alone)
    out = Path(run.output.name, "out")
    wait_until(lambda: out.exists() and "step 5:" in out.read_text(), seconds=120)
    os.kill(run.pid, signal.SIGINT)
    status, text, errors, _ = run.end()
    assert status == 0, errors
    [step] = re.findall(r"^stopped by SIGTERM at step (\d+): go on with --resume$", text, re.M)
    assert names_in(tmp_path / "runs") == ["lock", f"step_{int(step):08}.pt", "stopped"]


LOADS_DATA = '    path = "sklearn/datasets/data/digits.csv.gz"\n'
CHOOSES = "    paths = list_checkpoints(folder)\n    if not paths and"
MOMENTS = {  # the function in which a signal comes: (the line before which it comes, what the run says)
    "load_data": (LOADS_DATA, "before a checkpoint was read"),
    "choose_checkpoint": (CHOOSES, "at step 0: go on with --resume"),
}


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize("function", MOMENTS)
def test_a_signal_that_comes_before_the_first_step_is_not_lost(script, alone, tmp_path, function, name):
    """The batch file's shell ignores the signal, and so do its ranks until they say otherwise."""
    line, said = MOMENTS[function]
    early = changed(script, tmp_path / "early", line, f"    signal.raise_signal(signal.{name})\n{line}")
    text = early.read_text()
    text = text.replace("import atexit\n", "import atexit\nimport signal\n", 1)
    ignores = f"signal.signal(signal.{name}, signal.SIG_IGN)\n"
    text = text.replace("\n\ndef add_flags(", f"\n{ignores}\n\ndef add_flags(", 1)
    early.write_text(text)

    flags = ["--max-steps=50", f"--checkpoint-dir={tmp_path / 'run'}"]
    status, out, errors, _ = forked(script_alone(early, *flags), alone)
    assert status == 0, errors
    assert f"stopped by {name} {said}\n" in out
    assert names_in(tmp_path / "run") == ["lock", "stopped"]


def test_ranks_that_start_after_the_signal_stop_before_they_load(script, alone, tmp_path):
    """STOP_AT is from the batch file. Ranks that torchrun has started again did not get the signal."""
    flags = ["--max-steps=3", "--save-every=2", f"--checkpoint-dir={tmp_path}", "--resume"]
    late = {**alone, "STOP_AT": str(time.time() - 1)}
    status, out, errors, _ = forked(script_on_ranks(script, 2, *flags), late)
    assert status == 0, errors
    assert "stopped by SIGUSR1 before a checkpoint was read\n" in out
    assert names_in(tmp_path) == ["lock", "stopped"]

    early = {**alone, "STOP_AT": str(time.time() + 1000)}
    status, out, errors, _ = forked(script_on_ranks(script, 2, *flags), early)
    assert status == 0, errors
    assert '"step": 3' in out
    assert "stopped" not in names_in(tmp_path)


# --- data that scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 60, 1440, 10_007])
def test_a_shuffle_is_a_permutation_and_each_key_has_its_own(script, size):
    shuffled = loaded(script).shuffled
    positions = np.arange(size)
    order = shuffled(positions, size, "a")
    assert sorted(order.tolist()) == list(range(size))

    # A rank asks only for its own positions, and gets the same samples.
    for rank in range(3):
        own_positions = positions[rank::3]
        assert np.array_equal(shuffled(own_positions, size, "a"), order[rank::3])

    if size >= 60:  # two short orders may be alike by chance
        other_order = shuffled(positions, size, "b")
        assert (order != other_order).mean() > 0.8
        correlation = np.corrcoef(order, positions)[0, 1]
        assert abs(correlation) < 0.35


def test_all_orders_of_three_are_about_equally_frequent(script):
    shuffled = loaded(script).shuffled
    counts = {}
    for key in range(1200):
        order = tuple(shuffled(np.arange(3), 3, str(key)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(120 < count < 280 for count in counts.values())


class TenMillionNumbers:
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return index


def memory_and_positions(path, args):
    """Resume late in an epoch of a large data set, and read one batch.

    Returns (the MiB that this takes, for how many positions of the shuffled order the sample was calculated).
    """
    import resource

    trainer = loaded(path)
    own_shuffled = trainer.shuffled
    num_positions = 0

    def shuffled(positions, size, key):
        nonlocal num_positions
        num_positions += len(positions)
        return own_shuffled(positions, size, key)

    trainer.shuffled = shuffled
    batches = trainer.MicroBatches(TenMillionNumbers(), args)
    batches.start_step.fill_(9_900_000 // args.batch_size)
    trainer.shuffled(np.arange(3), 3, "a")  # so what the first call imports is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    next(iter(batches))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024, num_positions


def test_ten_million_samples_need_no_memory_and_a_late_resume_skips_what_is_done(script):
    """A list of ten million indices takes 459 MiB in each process."""
    [(memory, positions)] = launch(memory_and_positions, str(script), settings(script), nproc=1)
    assert memory < 20
    assert positions < 20_000


class DrawsSeldom(torch.utils.data.Dataset):
    """Only every fiftieth sample is random, by one of the three generators. It is less than 1."""

    def __len__(self):
        return 1440

    def __getitem__(self, index):
        if index % 50 != 7:
            return float(index)
        generator = index // 50 % 3
        if generator == 0:
            return torch.rand(()).item()
        if generator == 1:
            return np.random.rand()
        return random.random()


def samples_and_seeds(path, args, num_steps):
    """Read the samples of some steps, and count how often the trainer seeds the generators for a sample.

    Returns (the samples, the number of seeds before the data set first drew, the samples if each one is seeded).
    """
    trainer = loaded(path)
    own_seed_all = trainer.seed_all
    num_seeds = 0

    def seed_all(*place):
        nonlocal num_seeds
        if place[0] == "sample":
            num_seeds += 1
        own_seed_all(*place)

    trainer.seed_all = seed_all
    batches = trainer.MicroBatches(DrawsSeldom(), args)
    samples = []
    expected = []
    seeds_at_first_draw = None
    for micro_batch in trainer.islice(batches.of_map_style(0), num_steps):
        samples += batches.read_samples(micro_batch)
        if not batches.dataset_draws:
            seeds_at_first_draw = num_seeds
        for index in micro_batch.samples.tolist():
            own_seed_all("sample", args.seed, micro_batch.epoch, index)
            expected.append(batches.dataset[index])
    return samples, seeds_at_first_draw, expected


def test_a_sample_is_seeded_by_its_place_if_the_data_set_draws_and_not_at_all_if_it_does_not(script):
    args = settings(script, "--batch-size=8")
    [(samples, seeds_at_first_draw, expected)] = launch(samples_and_seeds, str(script), args, 180, nproc=1)
    assert samples == expected
    assert sum(sample < 1 for sample in samples) == 30  # 29 are random, and sample 0 is 0
    assert seeds_at_first_draw == 0


class Shards:
    """A stream of shards of unequal lengths, which records the numbers of the shards that were asked for."""

    num_shards = 8

    def __init__(self, index=None, lengths=(5, 6, 7, 8, 9, 10, 11, 12)):
        self.index = index
        self.lengths = lengths
        self.read = set()

    def shard(self, num_shards, index):
        assert num_shards == self.num_shards
        self.read.add(index)
        return Shards(index, self.lengths)

    def __iter__(self):
        for number in range(self.lengths[self.index]):
            yield 100 * self.index + number + torch.rand(()).item() / 2


def samples_of_shards(path, args, start_step, steps):
    """({(step, number of the micro-batch): its samples}, the shards that this rank has read)."""
    trainer = loaded(path)
    stream = Shards()
    batches = trainer.MicroBatches(stream, args).of_shards(start_step)
    samples = {}
    for batch in trainer.islice(batches, steps * args.accumulate):
        samples[batch.step, batch.number] = batch.samples
    return samples, stream.read


def test_each_rank_reads_its_own_shards_and_all_ways_to_cut_give_the_same(script):
    """Four micro-batches on one rank have the samples of two on each of two ranks, and of a run that is resumed."""
    args = settings(script, "--batch-size=16", "--accumulate=4")
    [(samples, _)] = launch(samples_of_shards, str(script), args, 0, 6, nproc=1)

    args_of_two = settings(script, "--batch-size=16", "--accumulate=2")
    of_ranks = launch(samples_of_shards, str(script), args_of_two, 0, 6, nproc=2)
    (samples_of_rank_0, shards_of_rank_0), (samples_of_rank_1, shards_of_rank_1) = of_ranks
    assert samples_of_rank_0 | samples_of_rank_1 == samples
    assert shards_of_rank_0 == {0, 2, 4, 6}
    assert shards_of_rank_1 == {1, 3, 5, 7}

    start_step = 4
    [(late_samples, _)] = launch(samples_of_shards, str(script), args, start_step, 2, nproc=1)
    expected = {}
    for (step, number), batch in samples.items():
        if step >= start_step:
            expected[step, number] = batch
    assert late_samples == expected


class ShuffledShards(Shards):
    """Shards of three samples, (the shard, the epoch, the number), in another order in each pass. They can skip."""

    def __init__(self, index=None, lengths=(3,) * 8, epoch=0, skipped=0):
        super().__init__(index, lengths)
        self.epoch = epoch
        self.skipped = skipped

    def shard(self, num_shards, index):
        return ShuffledShards(index)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def skip(self, number):
        return ShuffledShards(self.index, self.lengths, 0, number)

    def __len__(self):
        return self.lengths[self.index]

    def __iter__(self):
        for number in range(self.skipped, self.lengths[self.index]):
            yield self.index, self.epoch, (number + self.epoch) % self.lengths[self.index]


def samples_of_shard_0(path, args, start_step, steps):
    """The samples of shard 0 in some steps."""
    trainer = loaded(path)
    batches = trainer.MicroBatches(ShuffledShards(), args).of_shards(start_step)
    samples = []
    for batch in trainer.islice(batches, steps):
        for sample in batch.samples:
            shard, _, _ = sample
            if shard == 0:
                samples.append(sample)
    return samples


def test_each_pass_over_a_shard_has_an_epoch_of_its_own(script):
    """A step takes one sample of each of the eight shards."""
    args = settings(script, "--batch-size=8")
    [samples] = launch(samples_of_shard_0, str(script), args, 0, 7, nproc=1)
    epochs = [epoch for _, epoch, _ in samples]
    assert epochs == [0, 0, 0, 1, 1, 1, 2]
    [samples_from_step_4] = launch(samples_of_shard_0, str(script), args, 4, 3, nproc=1)
    assert samples_from_step_4 == samples[4:]


class SlowToResume(torch.utils.data.IterableDataset):
    """A stream of which rank 1 gets the first sample late, as when a resumed job reads up to where it stopped."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        if dist.get_rank() == 1:
            time.sleep(self.seconds)
        while True:
            yield torch.zeros(64), 0


def error_of_a_slow_stream(path, args, seconds):
    """The error of a run whose stream is slow to resume. It fails if a rank waits 3 seconds for another in a step."""
    trainer = loaded(path)
    own_take_step = trainer.take_step

    def load_data(args):
        return SlowToResume(seconds), None

    def take_step(training, micro_batches, step, args):
        start = time.monotonic()
        dist.barrier()
        if time.monotonic() - start > 3:
            raise RuntimeError("a rank has waited in its step")
        return own_take_step(training, micro_batches, step, args)

    trainer.load_data = load_data
    trainer.take_step = take_step
    return error_of_run(trainer, args)


def test_no_rank_waits_in_a_step_for_one_that_reads_the_stream_again(script, tmp_path):
    """In a step it would wait for --patience only; before the step it waits for days."""
    flags = [f"--checkpoint-dir={tmp_path}", "--resume", "--allow-change=max_steps", "--warmup=1"]
    args = settings(script, *flags, "--max-steps=2")
    assert launch(error_of_a_slow_stream, str(script), args, 0, nproc=2) == ["none"] * 2
    args = settings(script, *flags, "--max-steps=4")
    assert launch(error_of_a_slow_stream, str(script), args, 8, nproc=2) == ["none"] * 2
    assert (tmp_path / "step_00000004.pt").exists()


# --- DDP or FSDP ------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Blocks in a ModuleList, BatchNorm, a scalar parameter, and a frozen one."""

    def __init__(self):
        super().__init__()
        # Without a bias: BatchNorm subtracts it again, so its gradient would be rounding errors alone.
        self.first = nn.Linear(64, 30, bias=False)
        self.norm = nn.BatchNorm1d(30)
        self.blocks = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.last = nn.Linear(30, 10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x).relu() * self.gain
        return self.last(x) * self.frozen


def losses_of_blocks(path, all_args, optimizer="AdamW", last_step=None):
    """Train ``Blocks`` with each of these settings. Of each run: ({step: loss}, the metrics of its last validation).

    With last_step a run ends after it, with a checkpoint. Its learning rates remain those of --max-steps.
    """
    trainer = loaded(path)

    def build_model(args):
        return Blocks()

    def build_optimizer(model, args):
        trained = [param for param in model.parameters() if param.requires_grad]
        return getattr(torch.optim, optimizer)(trained, args.lr, fused=True)

    trainer.build_model = build_model
    trainer.build_optimizer = build_optimizer
    if last_step is not None:
        end_early(trainer, last_step)

    runs = []
    for args in all_args:
        lines, metrics = train_and_log(trainer, args)
        losses = {step: values["loss"] for step, values in lines if is_of_training(values)}
        runs.append((losses, metrics))
    return runs


def end_early(trainer, last_step):
    """End the trainer's loop after a step, and keep the learning rates of a run of --max-steps."""
    own_plan_steps = trainer.plan_steps
    own_lr_factor = trainer.lr_factor

    def plan_steps(train_set, val_set, args):
        return dataclasses.replace(own_plan_steps(train_set, val_set, args), total=last_step)

    def lr_factor(step, total_steps, args):
        return own_lr_factor(step, args.max_steps, args)

    trainer.plan_steps = plan_steps
    trainer.lr_factor = lr_factor


BLOCKS = ["--max-steps=12", "--warmup=2", "--log-every=1", "--lr=0.01", "--save-every=4", "--ema=0.9"]


WAYS_TO_WRAP = {  # the name of the run's folder: its flags
    "ddp": ["--no-shard"],
    "fsdp": ["--shard"],
    "fsdp_recompute": ["--shard", "--recompute"],
    "fsdp_offload": ["--shard", "--offload"],
}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_sharded_run_has_the_losses_of_ddp(script, tmp_path, optimizer):
    all_args = []
    for name, flags in WAYS_TO_WRAP.items():
        all_args.append(settings(script, *BLOCKS, *flags, f"--checkpoint-dir={tmp_path / name}"))
    runs, _ = launch(losses_of_blocks, str(script), all_args, optimizer, nproc=2)

    (losses_of_ddp, metrics_of_ddp), *sharded_runs = runs
    for losses, metrics in sharded_runs:
        assert losses == pytest.approx(losses_of_ddp, rel=1e-4)
        assert metrics == pytest.approx(metrics_of_ddp, rel=1e-3)

    weights_of_ddp = torch.load(tmp_path / "ddp" / "weights.pt", weights_only=True)
    weights_of_fsdp = torch.load(tmp_path / "fsdp" / "weights.pt", weights_only=True)
    assert list(weights_of_ddp) == list(Blocks().state_dict())
    for name, weight in weights_of_ddp.items():
        assert torch.allclose(weight, weights_of_fsdp[name].reshape(weight.shape), atol=1e-4), name


def test_replicas_of_a_sharded_model_have_the_losses_of_ddp(script):
    with_ddp = settings(script, *BLOCKS, "--accumulate=2")
    with_replicas = settings(script, *BLOCKS, "--accumulate=2", "--shard", "--replicas=2")
    runs_of_ranks = launch(losses_of_blocks, str(script), [with_ddp, with_replicas], nproc=4)
    (losses, metrics), (losses_of_replicas, metrics_of_replicas) = runs_of_ranks[0]
    assert losses_of_replicas == pytest.approx(losses, rel=1e-4)
    assert metrics_of_replicas == pytest.approx(metrics, rel=1e-3)


def printed_of_replicas(path, args):
    """What the trainer prints about replicas of two ranks if a node has three."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loaded(path).sharding_options(args, CPU)
    return out.getvalue()


def test_replicas_that_are_cut_by_the_border_of_a_node_are_said(script, capsys):
    """After --nodes=7 in place of 8, --replicas 8 divides 56 ranks as well."""
    args = settings(script, "--shard", "--replicas=2")
    printed, *_ = launch(printed_of_replicas, str(script), args, nproc=4)
    assert printed.startswith("--replicas: 2 ranks make a replica, and a node has 3, so some ")

    trainer = loaded(script)
    for num_shards in (4, 8, 16):  # they divide a node of 8 ranks, or fill several
        trainer.warn_of_cut_replicas(num_shards, ranks_per_node=8)
    assert capsys.readouterr().out == ""
    for num_shards in (7, 12):
        trainer.warn_of_cut_replicas(num_shards, ranks_per_node=8)
        printed = capsys.readouterr().out
        assert printed.startswith(f"--replicas: {num_shards} ranks make a replica, and a node has 8, so some ")


def test_a_checkpoint_is_resumed_across_ddp_and_fsdp_and_numbers_of_ranks(script, tmp_path):
    """A run in three parts has the losses of a whole one.

    BatchNorm's loss depends on the micro-batches, so each run has four in a step, of all ranks together.
    """
    args = settings(script, *BLOCKS, "--accumulate=4")
    [[(whole_losses, whole_metrics)]] = launch(losses_of_blocks, str(script), [args], nproc=1)

    parts = [  # (ranks, last step, flags)
        (2, 4, ["--accumulate=2"]),
        (4, 8, ["--shard", "--replicas=2", "--resume"]),
        (2, 12, ["--shard", "--accumulate=2", "--resume"]),
    ]
    for ranks, last_step, flags in parts:
        args = settings(script, *BLOCKS, f"--checkpoint-dir={tmp_path}", *flags)
        runs_of_ranks = launch(losses_of_blocks, str(script), [args], "AdamW", last_step, nproc=ranks)
        [(losses, metrics)] = runs_of_ranks[0]
        assert max(losses) == last_step
        expected = {step: whole_losses[step] for step in losses}
        assert losses == pytest.approx(expected, rel=1e-3)
    assert metrics["val_accuracy"] == pytest.approx(whole_metrics["val_accuracy"], abs=0.02)


def test_a_model_on_the_meta_device_is_initialized_block_by_block(script):
    args = settings(script, "--shard", "--meta", "--max-steps=30", "--dtype=bfloat16")
    errors = launch(errors_of, str(script), [args], nproc=2)
    assert errors == [["none"]] * 2


def weights_of_the_script(script):
    """The weights of a model that the script has built and not yet trained."""
    args = settings(script)
    torch.manual_seed(5)
    return loaded(script).build_model(args).state_dict()


def test_a_run_starts_from_weights_and_says_what_matched(script, alone, tmp_path):
    """The file has two prefixes before each name, one weight of another shape, and one that the model has not."""
    file = tmp_path / "foreign.pt"
    weights = {f"_orig_mod.module.{name}": weight for name, weight in weights_of_the_script(script).items()}
    weights["_orig_mod.module.3.weight"] = torch.ones(11, 256)
    weights["_orig_mod.module.head.bias"] = torch.ones(3)
    torch.save(weights, file)
    flags = ["--max-steps=10", f"--init-from={file}"]
    for shard in ("--no-shard", "--shard"):
        status, out, errors, _ = forked(script_on_ranks(script, 2, shard, *flags), alone)
        assert status == 0, errors
        assert "3 of the model's 4 tensors match" in out
        assert "1 not in the model: head.bias" in out
        assert "1 of another shape: 3.weight" in out

    torch.save({"other": torch.ones(3)}, file)
    status, _, errors, _ = forked(script_on_ranks(script, 2, *flags), alone)
    assert status != 0
    assert "no tensor of the model is in the file" in errors


def test_training_goes_on_longer_and_at_another_rate_if_told(script, folder):
    args = settings_to_go_on(script, folder, "--resume", "--lr=0.05", "--allow-change=max_steps,lr")
    assert launch(errors_of, str(script), [args], nproc=1) == [["none"]]
    assert (folder / "step_00000012.pt").exists()


# --- what looks equal, and is not -------------------------------------------------------------------------------------


class InitializesItself(nn.Module):
    """A model that initializes its own weights, and has a table that is in no checkpoint."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.last = nn.Linear(64, 10)
        self.register_buffer("table", torch.empty(64), persistent=False)
        init_weights(self)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.table)


def init_weights(model):
    for number, block in enumerate(model.blocks, start=1):
        nn.init.normal_(block.weight, std=0.02 * number)
        nn.init.zeros_(block.bias)
    nn.init.normal_(model.last.weight, std=0.3)
    nn.init.constant_(model.last.bias, 0.5)
    model.table.copy_(torch.arange(64.0))


def first_weights_of(path, args, init_weights=None, model_class=InitializesItself):
    """{name: (mean, standard deviation)} of the weights and buffers before the first step, or the error.

    With init_weights, it is in place of the script's own.
    """
    trainer = loaded(path)

    def build_model(args):
        return model_class()

    trainer.build_model = build_model
    if init_weights is not None:
        trainer.init_weights = init_weights
    try:
        model = trainer.build_training(args, CPU).model
    except trainer.UsageError as error:
        return str(error)
    tensors = trainer.whole(model.state_dict() | dict(model.named_buffers()))
    if dist.get_rank() == 0:
        return {name: (tensor.mean().item(), tensor.std().item()) for name, tensor in tensors.items()}


class WithARealTable(InitializesItself):
    """Its table is from NumPy, so it is a real tensor on the meta device, too."""

    def __init__(self):
        super().__init__()
        self.table = torch.from_numpy(np.arange(64, dtype=np.float32))


def test_weights_on_the_meta_device_are_those_that_the_model_draws(script):
    plain, _ = launch(first_weights_of, str(script), settings(script), nproc=2)
    meta = settings(script, "--shard", "--meta")
    on_meta, _ = launch(first_weights_of, str(script), meta, init_weights, nproc=2)
    assert on_meta.keys() == plain.keys()
    for name, (mean, deviation) in plain.items():
        # The generators differ, so the numbers are alike only as samples of one distribution are.
        tolerance = 0.15 * deviation + 1e-9
        assert on_meta[name] == pytest.approx((mean, deviation), rel=0.15, abs=tolerance), name


def test_the_meta_device_is_refused_where_a_weight_would_be_garbage(script):
    meta = settings(script, "--shard", "--meta")
    errors = launch(first_weights_of, str(script), meta, nproc=2)
    assert errors == ["--meta needs an init_weights(model) for your build_model."] * 2

    def init_all_but_the_table(model):
        table = model.table.clone()
        init_weights(model)
        model.table.copy_(table)

    errors = launch(first_weights_of, str(script), meta, init_all_but_the_table, nproc=2)
    assert errors == ["rank 0: --meta: init_weights has not set table."] * 2
    [error, _] = launch(first_weights_of, str(script), meta, init_weights, WithARealTable, nproc=2)
    assert error == "--meta: build_model has filled table, which init_weights has to do."


def modes_after_training(path, args):
    """Train a model whose first layer is frozen by eval(), with validations.

    Returns (each layer's ``training``, the largest running mean of the first layer).
    """
    trainer = loaded(path)

    def build_model(args):
        return nn.Sequential(nn.BatchNorm1d(64).eval(), nn.Linear(64, 10))

    trainer.build_model = build_model
    model, _ = trainer.train(args, CPU)
    modes = [layer.training for layer in model]
    return modes, model[0].running_mean.abs().max().item()


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_layer_that_is_frozen_by_eval_stays_frozen_after_a_validation(script, shard):
    args = settings(script, "--max-steps=10", "--val-every=3", shard)
    for modes, mean in launch(modes_after_training, str(script), args, nproc=2):
        assert modes == [False, True]
        assert mean == 0


def dtypes_in_evaluate(path, args):
    """The dtypes of the logits that an ``evaluate`` gets when it calls the model."""
    trainer = loaded(path)
    dtypes = set()

    def evaluate(model, batches, args):
        for images, _ in batches:
            dtypes.add(model(images).dtype)
        return {}

    trainer.evaluate = evaluate
    trainer.train(args, CPU)
    return dtypes


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_metrics_of_ones_own_are_computed_as_the_loss_is(script, shard):
    args = settings(script, "--max-steps=10", "--dtype=bfloat16", shard)
    assert launch(dtypes_in_evaluate, str(script), args, nproc=2) == [{torch.bfloat16}] * 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


def models_and_numbers_of_blocks():
    """{what the model is: (the model, how many blocks it has)}."""
    a_list_in_a_dict = nn.ModuleDict({"embed": nn.Embedding(4, 4), "blocks": nn.ModuleList([Block(), Block()])})
    stages = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    return {
        "a list": (nn.ModuleList([Block(), Block(), Block()]), 3),
        "a list in a dict": (a_list_in_a_dict, 2),
        "a dict": (nn.ModuleDict({"0": Block(), "1": Block()}), 2),
        "layers in a row": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2),
        "stages": (stages, 3),
        "heads, of which a rank may call one": (nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), 0),
        "one layer": (nn.Linear(4, 4), 0),
    }


def test_blocks_are_found_in_lists_dicts_and_sequences(script):
    trainer = loaded(script)
    for name, (model, number_of_blocks) in models_and_numbers_of_blocks().items():
        assert len(trainer.find_blocks(model)) == number_of_blocks, name


def test_recompute_without_blocks_or_with_batch_norm_is_refused(script):
    def without_blocks(args):
        return nn.Linear(64, 10)

    def with_batch_norm(args):
        return nn.ModuleList([nn.BatchNorm1d(64)])

    args = settings(script, "--recompute", "--max-steps=10")
    [[error]] = launch(errors_of, str(script), [args], {"build_model": without_blocks}, nproc=1)
    assert error.startswith("UsageError: --recompute finds no blocks in the model")
    [[error]] = launch(errors_of, str(script), [args], {"build_model": with_batch_norm}, nproc=1)
    assert error.startswith("UsageError: --recompute would update BatchNorm twice")


def errors_of_unlike_flags(path, args, flags_of_rank_1):
    if dist.get_rank() == 1:
        vars(args).update(flags_of_rank_1)
    return errors_of(path, [args])


def errors_of_unlike_data(path, args, size_of_each_rank):
    """The error of a run in which each rank has a training set of its own size."""
    size = size_of_each_rank[dist.get_rank()]

    def load_data(args):
        return blank_samples(size), blank_samples(9)

    return errors_of(path, [args], {"load_data": load_data})


def test_ranks_with_other_flags_or_data_are_refused_on_all(script):
    args = settings(script, "--max-steps=10")
    errors = launch(errors_of_unlike_flags, str(script), args, {"lr": 0.01, "num_workers": 1}, nproc=2)
    expected = "--lr: rank 0 has 0.1, and rank 1 has 0.01. Start all ranks with the same."
    assert errors == [[f"UsageError: {expected}"]] * 2

    errors = launch(errors_of_unlike_data, str(script), args, [200, 199], nproc=2)
    expected = "training samples: rank 0 has 200, and rank 1 has 199. Start all ranks with the same."
    assert errors == [[f"UsageError: {expected}"]] * 2


# --- a rank that fails says so ----------------------------------------------------------------------------------------


def broken_on_rank_1(script, folder, statement):
    """A copy of the script in which rank 1 runs this statement in its third call of ``loss_sums``."""
    end_of_docstring = '    divides. Names other than "loss" are metrics, for the log.\n    """\n'
    added = "    calls.append(1)\n    if len(calls) == 3 and dist.get_rank() == 1:\n"
    added += f"        {statement}\n"
    path = changed(script, folder, end_of_docstring, end_of_docstring + added)
    text = path.read_text()
    path.write_text(text.replace("\n\ndef add_flags(", "\ncalls = []\n\n\ndef add_flags(", 1))
    return path


def test_an_error_that_one_rank_finds_is_printed_by_it_and_ends_all(script, alone, tmp_path):
    statement = 'return {"loss": (model(batch[0]).sum(), 1)}'
    path = broken_on_rank_1(script, tmp_path / "one", statement)
    status, _, errors, _ = forked(script_on_ranks(path, 2), alone)
    assert status not in (0, None)
    [line] = re.findall(r"^\[rank 1 on .+\] (UsageError: .+)$", errors, re.M)
    assert line.startswith("UsageError: loss_sums returned 1 loss(es) and [], and before 1 and ['accuracy']")


def test_torchrun_shows_the_traceback_of_an_error(script, alone, tmp_path):
    # torchrun itself, because ranks that are forked from it record their errors by other means.
    path = broken_on_rank_1(script, tmp_path / "one", 'raise ValueError("broken here")')
    status, _, errors, left = torchrun(path, 2, alone)
    assert status == 1 and not left
    summary = errors[errors.index("train.py FAILED") :]
    assert "ValueError: broken here" in summary


ENDS_OF_WORKERS = {  # what goes wrong: (where, in place of what, the message)
    "the loss": ("    images, labels = batch\n", '    raise RuntimeError("out of memory")\n', "out of memory"),
    "a worker hangs": (
        "    return torch.utils.data.default_collate(samples)\n",
        "    time.sleep(10**6)\n",
        "DataLoader timed out after 4.0 seconds",
    ),
}


@pytest.mark.parametrize("kind", ENDS_OF_WORKERS)
def test_a_rank_with_workers_ends_when_it_fails(script, alone, tmp_path, kind):
    """The workers do not get SIGTERM, with which Python would end them before it ends itself."""
    old, new, message = ENDS_OF_WORKERS[kind]
    path = changed(script, tmp_path / "failing", old, new)
    status, _, errors, left = torchrun(path, 2, alone, "--num-workers=1", "--patience=5", "--backend=gloo")
    assert status == 1 and not left
    assert message in errors


def build_unlike_model(args):
    """A model whose weights are different on each rank, because the seed is the rank."""
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    for param in model.parameters():
        nn.init.normal_(param, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model


def compare_replicas(path, args):
    """Start with a model that is different on each rank. Compare the replicas, and again after a change on rank 3.

    Returns (the sum of each weight of this rank before the change, the error of the comparison after it).
    """
    trainer = loaded(path)
    trainer.build_model = build_unlike_model
    training = trainer.build_training(args, CPU)
    trainer.check_replicas(training, args)  # no error
    params = list(training.model.parameters())
    sums = [trainer.local(param).sum().item() for param in params]

    if dist.get_rank() == 3:
        with torch.no_grad():
            trainer.local(params[0])[0] += 1e-3
    try:
        trainer.check_replicas(training, args)
    except RuntimeError as error:
        return sums, str(error)
    return sums, "none"


DDP = []
TWO_REPLICAS = ["--shard", "--replicas=2"]  # ranks 0 and 1 are one, and ranks 2 and 3 the other


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (DDP, "the weights of ranks [3] are not the majority's"),
        (TWO_REPLICAS, "ranks [1, 3], of which no majority agrees"),
    ],
)
def test_all_replicas_begin_with_the_weights_of_rank_0_and_are_compared(script, flags, problem):
    """Whether the model is sharded or not, ranks 0 and 2 have the same weights, and so do ranks 1 and 3."""
    results = launch(compare_replicas, str(script), settings(script, *flags), nproc=4)
    sums = [sums_of_rank for sums_of_rank, _ in results]
    assert sums[0] == sums[2]
    assert sums[1] == sums[3]
    errors = [error for _, error in results]
    assert errors == [f"at step 0 replicas of the model differ: {problem}"] * 4


def test_the_sum_of_bits_depends_on_no_order(script):
    """A sum of floats does, so ranks with equal weights on two models of GPUs would be told that they differ."""
    trainer = loaded(script)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        weights = torch.randn(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        total = trainer.sum_of_bits(weights)
        assert total == trainer.sum_of_bits(weights.flip(0))
        weights[4711] = -weights[4711]
        assert total != trainer.sum_of_bits(weights)


def error_of_a_changed_weight(path, args):
    """The error of a run in which rank 1 changes one of its weights before the second step."""
    trainer = loaded(path)
    own_take_step = trainer.take_step

    def take_step(training, micro_batches, step, args):
        if step == 2 and dist.get_rank() == 1:
            first_weight = next(training.model.parameters())
            first_weight.data[0, 0] += 1e-3
        return own_take_step(training, micro_batches, step, args)

    trainer.take_step = take_step
    return error_of_run(trainer, args)


def error_of_run(trainer, args):
    try:
        trainer.train(args, CPU)
    except RuntimeError as error:
        return str(error)
    return "none"


def test_replicas_are_compared_before_a_save_too(script, tmp_path):
    flags = ["--max-steps=12", "--save-every=3", "--val-every=12", f"--checkpoint-dir={tmp_path}"]
    errors = launch(error_of_a_changed_weight, str(script), settings(script, *flags), nproc=3)
    message = "at step 3 replicas of the model differ: the weights of ranks [1] are not the majority's"
    assert errors == [message] * 3
    assert names_in(tmp_path) == []


def weights_after_unlike_norms(path, args):
    """Take a step in which the second replica, ranks 2 and 3, gets a norm that is off by the last bit.

    Adding up the norm in another order would do this. Returns (the norm, this rank's weights after the step).
    """
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    batch = (torch.ones(12, 64), torch.zeros(12, dtype=torch.int64))
    own_full_tensor = trainer.DTensor.full_tensor

    def full_tensor(tensor):
        norm = own_full_tensor(tensor)
        if dist.get_rank() >= 2:
            norm = torch.nextafter(norm, 2 * norm)
        return norm

    with mock.patch.object(trainer.DTensor, "full_tensor", full_tensor):
        _, norm = trainer.take_step(training, [batch], 1, args)
    weights = [trainer.local(param).tolist() for param in training.model.parameters()]
    return norm.item(), weights


def test_replicas_clip_with_one_norm(script):
    args = settings(script, "--shard", "--replicas=2", "--max-norm=0.01", "--batch-size=48", "--width=8")
    results = launch(weights_after_unlike_norms, str(script), args, nproc=4)
    assert results[0] == results[2] and results[1] == results[3]


def errors_with_files_of_their_own(path, args, folder):
    """The error of a run in which --init-from, a relative path, is another file on each rank."""
    os.chdir(Path(folder) / str(dist.get_rank()))
    return errors_of(path, [args])


def test_ranks_that_would_begin_with_other_files_are_refused(script, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        torch.save({"0.weight": torch.full((256, 64), float(rank))}, tmp_path / str(rank) / "first.pt")
    args = settings(script, "--max-steps=10", f"--init-from={tmp_path}/0/first.pt")
    args.init_from = "first.pt"
    for [error] in launch(errors_with_files_of_their_own, str(script), args, str(tmp_path), nproc=2):
        assert error.startswith("UsageError: the file of --init-from: rank 0 has ")


def error_of_another_order(path, args):
    """The error of a resume whose optimizer has two layers of one shape in another order."""
    trainer = loaded(path)

    def build_model(args):
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def build_optimizer(model, args):
        return torch.optim.AdamW(list(model.parameters()))

    def build_reversed_optimizer(model, args):
        return torch.optim.AdamW(list(reversed(list(model.parameters()))))

    trainer.build_model = build_model
    trainer.build_optimizer = build_optimizer
    training = trainer.build_training(args, CPU)
    trainer.Checkpoints(args).save(training)

    trainer.build_optimizer = build_reversed_optimizer
    training = trainer.build_training(args, CPU)
    try:
        trainer.Checkpoints(args).load(training)
    except trainer.UsageError as error:
        return str(error)


def test_an_optimizer_with_its_parameters_in_another_order_is_refused(script, tmp_path):
    args = settings(script, "--resume", f"--checkpoint-dir={tmp_path}")
    [error] = launch(error_of_another_order, str(script), args, nproc=1)
    assert error.startswith("The optimizer of the checkpoint has other parameters, or the same in another order")


def checkpoints_around_a_skipped_step(path, args):
    """The names of the checkpoints of a run that skips step 4, after which a save was due."""
    trainer = loaded(path)
    spoil_losses(trainer, calls=(4,))
    trainer.train(args, CPU)
    return [name for name in names_in(Path(args.checkpoint_dir)) if name.startswith("step_")]


def test_the_step_after_a_bad_one_is_saved_in_its_place(script, tmp_path):
    flags = ["--max-steps=7", "--warmup=1", "--save-every=4", f"--checkpoint-dir={tmp_path}"]
    names = launch(checkpoints_around_a_skipped_step, str(script), settings(script, *flags), nproc=1)
    assert names == [["step_00000005.pt", "step_00000007.pt"]]


def test_a_save_that_came_late_stays_as_the_first_of_its_interval(script, tmp_path):
    flags = ["--max-steps=14", "--warmup=1", "--save-every=2", "--keep=1", "--keep-every=4"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [names] = launch(checkpoints_around_a_skipped_step, str(script), args, nproc=1)
    assert names == [f"step_{step:08}.pt" for step in (5, 8, 12, 14)]


# --- what a resume, a schedule and a scaler must not lose -------------------------------------------------------------


def test_the_rate_rises_to_its_highest_and_falls_to_its_lowest(script):
    """In a warmup of ten steps it rises by a tenth each; in the 40 steps after it, it falls to 0.2."""
    lr_factor = loaded(script).lr_factor
    args = settings(script, "--warmup=10", "--min-lr=0.2")
    factors = {step: lr_factor(step, 50, args) for step in (1, 5, 10, 11, 31, 50)}
    last = factors.pop(50)
    assert factors == pytest.approx({1: 0.1, 5: 0.5, 10: 1, 11: 1, 31: 0.6})
    assert 0.2 < last < 0.202


def states_before_and_after_a_resume(path, args):
    """Save a training, and resume it. Return the state of the one that was saved and of the one that was resumed.

    A state is ({name: number}, the averaged weights).
    """
    trainer = loaded(path)

    def state_of(training):
        numbers = {
            "scale": training.scaler.get_scale(),
            "num_updates": training.ema.num_updates,
            "step": training.step,
            "best_loss": training.best_loss,
        }
        averages = [trainer.local(average).flatten().tolist() for average in training.ema.average.values()]
        return numbers, averages

    saved = trainer.build_training(args, CPU)
    saved.scaler.scale(torch.ones(()))  # without it, the scaler has no scale yet
    saved.scaler.update(1024.0)
    for average in saved.ema.average.values():
        trainer.local(average).fill_(0.125)
    saved.ema.num_updates = 7
    saved.step = 3
    saved.best_loss = 0.5
    trainer.Checkpoints(args).save(saved)

    resumed = trainer.build_training(args, CPU)
    trainer.Checkpoints(args).load(resumed)
    return state_of(saved), state_of(resumed)


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_resume_has_the_scale_the_average_and_the_best_loss(script, tmp_path, shard):
    flags = ["--dtype=float16", "--ema=0.9", "--width=8", "--resume", shard, f"--checkpoint-dir={tmp_path}"]
    states_of_ranks = launch(states_before_and_after_a_resume, str(script), settings(script, *flags), nproc=2)
    for saved, resumed in states_of_ranks:
        numbers, _ = saved
        assert numbers == {"scale": 1024.0, "num_updates": 7, "step": 3, "best_loss": 0.5}
        assert resumed == saved


def counts_of_skipped_steps(path, steps_are_finite):
    """(all skipped steps, those in the present row, the longest row) after each of some steps."""
    trainer = loaded(path)
    skipped = trainer.SkippedSteps(CPU)
    counts = []
    for is_finite in steps_are_finite:
        skipped.add(torch.tensor(is_finite))
        counts.append((int(skipped.total), int(skipped.in_a_row), int(skipped.longest_row)))
    return counts


def test_a_good_step_ends_a_row_of_skipped_ones(script):
    counts = counts_of_skipped_steps(script, [True, False, False, True, False])
    assert counts == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 0, 2), (3, 1, 2)]


def norms_and_changes(path, all_args):
    """(the norm of the gradient, the change of all weights as one vector) of a first step with each setting."""
    trainer = loaded(path)
    generator = torch.Generator().manual_seed(1)
    batch = (torch.rand(96, 64, generator=generator), torch.arange(96) % 10)
    results = []
    for args in all_args:
        training = trainer.build_training(args, CPU)
        before = nn.utils.parameters_to_vector(training.model.parameters()).detach().clone()
        _, norm = trainer.take_step(training, [batch], 1, args)
        after = nn.utils.parameters_to_vector(training.model.parameters()).detach()
        results.append((norm.item(), after - before))
    return results


@pytest.mark.parametrize("max_norm", [0, 0.1])
def test_float16_clips_the_norm_of_the_gradient_and_not_of_the_scaled_one(script, max_norm):
    in_float32 = settings(script, "--dtype=float32", f"--max-norm={max_norm}")
    in_float16 = settings(script, "--dtype=float16", f"--max-norm={max_norm}")
    [results] = launch(norms_and_changes, str(script), [in_float32, in_float16], nproc=1)
    (norm_in_float32, change_in_float32), (norm_in_float16, change_in_float16) = results
    assert norm_in_float32 > 0.1  # so a limit of 0.1 clips
    assert norm_in_float16 == pytest.approx(norm_in_float32, rel=0.01)
    difference = (change_in_float16 - change_in_float32).norm()
    assert difference < 0.02 * change_in_float32.norm()


def test_each_micro_batch_of_each_rank_has_a_dropout_of_its_own(script):
    """Two ranks with two micro-batches each seed their dropout by four different places."""
    trainer = loaded(script)
    args = settings(script)
    places = []

    def seed_all(*place):
        places.append(place)

    trainer.seed_all = seed_all
    for rank in range(2):
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_world_size", return_value=2),
        ):
            for number in range(2):
                trainer.seed_micro_batch(7, number, args)
    assert places == [("step", 0, 7, number) for number in (0, 2, 1, 3)]


def norms_and_lengths(path, all_args):
    """(the norm of the gradient, the length of the change of all weights) of a first step with each setting."""
    trainer = loaded(path)
    batch = (torch.ones(48, 64), torch.zeros(48, dtype=torch.int64))
    results = []
    for args in all_args:
        training = trainer.build_training(args, CPU)
        before = copy_of(trainer.local(param) for param in training.model.parameters())
        _, norm = trainer.take_step(training, [batch], 1, args)
        after = copy_of(trainer.local(param) for param in training.model.parameters())
        squares = torch.zeros(())
        for new, old in zip(after, before, strict=True):
            squares += (new - old).square().sum()
        if args.shard:
            dist.all_reduce(squares)  # each rank has a part of the weights
        results.append((norm.item(), squares.sqrt().item()))
    return results


def test_a_sharded_gradient_is_clipped_by_the_norm_of_the_whole(script):
    limit = 0.1
    learning_rate = 0.1
    with_ddp = settings(script, f"--max-norm={limit}", "--no-shard")
    with_fsdp = settings(script, f"--max-norm={limit}", "--shard")
    for of_ddp, of_fsdp in launch(norms_and_lengths, str(script), [with_ddp, with_fsdp], nproc=2):
        assert of_fsdp == pytest.approx(of_ddp, rel=1e-4)
        norm, length = of_ddp
        assert norm > limit  # so it is clipped
        assert length == pytest.approx(learning_rate * limit, rel=1e-4)


class TellsItsEpoch(torch.utils.data.Dataset):
    """Each of its samples is the epoch that ``set_epoch`` was last told."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.epoch


def epochs_of_four_steps(path, args, start_step):
    """The epochs that the samples of four steps have."""
    trainer = loaded(path)
    batches = trainer.MicroBatches(TellsItsEpoch(), args)
    epochs = []
    for micro_batch in trainer.islice(batches.of_map_style(start_step), 4):
        epochs.append(set(batches.read_samples(micro_batch)))
    return epochs


def test_a_data_set_that_shuffles_by_epoch_hears_of_each_one(script):
    """An epoch has two steps, of 8 of the 16 samples."""
    args = settings(script, "--batch-size=8")
    assert launch(epochs_of_four_steps, str(script), args, 0, nproc=1) == [[{0}, {0}, {1}, {1}]]
    assert launch(epochs_of_four_steps, str(script), args, 5, nproc=1) == [[{2}, {3}, {3}, {4}]]


def error_from_rank_0(path, args):
    """The name and message of the error that this rank raises when a function fails on rank 0."""
    trainer = loaded(path)

    def fail():
        raise trainer.NotFiniteError("step 7 is not finite")

    try:
        trainer.from_rank0(fail)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_rank_0_is_the_same_error_on_all(script):
    errors = launch(error_from_rank_0, str(script), settings(script), nproc=2)
    assert errors == ["NotFiniteError: step 7 is not finite"] * 2


def test_a_signal_prints_where_a_rank_is(script, alone):
    run = Forked(script_alone(script, "--epochs=5000", "--log-every=5"), alone)
    out = Path(run.output.name, "out")
    errors = Path(run.output.name, "errors")
    wait_until(lambda: out.exists() and "step 5:" in out.read_text(), seconds=120)
    os.kill(run.pid, signal.SIGUSR2)
    wait_until(lambda: "most recent call first" in errors.read_text(), seconds=60)
    os.kill(run.pid, signal.SIGTERM)
    status, text, _, _ = run.end()
    assert "nothing is saved" in text
    assert status == 1


class SlowOnRank1(torch.utils.data.Dataset):
    """A data set that takes rank 1 this long for each sample."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.rank = dist.get_rank()

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if self.rank == 1:
            time.sleep(self.seconds)
        return torch.zeros(64), 0


def lines_of_a_slow_rank(path, args, seconds):
    """What is logged of a run whose samples come late on rank 1: [{name: value}]."""
    trainer = loaded(path)

    def load_data(args):
        return SlowOnRank1(seconds), None

    trainer.load_data = load_data
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines]


def test_a_line_names_the_rank_that_waits_for_its_data(script):
    args = settings(script, "--max-steps=6", "--warmup=1", "--batch-size=4", "--log-every=3")
    [lines, _] = launch(lines_of_a_slow_rank, str(script), args, 0.3, nproc=2)
    assert [values["data_wait_rank"] for values in lines] == [1, 1]
    assert all(values["data_wait"] > 0.3 for values in lines)


def test_a_rank_whose_worker_hangs_is_the_one_that_fails(script):
    flags = ["--max-steps=6", "--warmup=1", "--batch-size=4", "--num-workers=1", "--patience=20"]
    with pytest.raises(RankError) as caught:
        launch(train_with_a_worker_that_hangs, str(script), settings(script, *flags), nproc=2)
    assert "rank 1" in str(caught.value)
    assert "DataLoader timed out after 16.0 seconds" in str(caught.value)


def train_with_a_worker_that_hangs(path, args):
    """Train, with a worker of rank 1 that takes 40 seconds for a sample. Only the loader's own error is raised."""
    try:
        lines_of_a_slow_rank(path, args, seconds=40)
    except RuntimeError as error:
        if "DataLoader timed out" in str(error):
            raise RuntimeError(str(error)) from None


# --- what is sent, and when -------------------------------------------------------------------------------------------


def all_reduces_of_gradients(path, args):
    """The numbers of the buckets of gradients that DDP sends in one step, in order."""
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    buckets = []

    def first_tensor(future):
        return future.value()[0]

    def send_and_record(state, bucket):
        """DDP calls this in place of its own all-reduce; it wants a future of the bucket's new content."""
        buckets.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(first_tensor)

    training.module.register_comm_hook(None, send_and_record)
    batch = (torch.ones(12, 64), torch.zeros(12, dtype=torch.int64))
    trainer.take_step(training, [batch] * args.accumulate, 1, args)
    return buckets


def test_ddp_sends_the_gradients_once_in_a_step(script):
    args = settings(script, "--accumulate=3")
    assert launch(all_reduces_of_gradients, str(script), args, nproc=2) == [[0]] * 2


# --- two losses, metrics of one's own, no validation ------------------------------------------------------------------


class Boxes(torch.utils.data.Dataset):
    """Images with 0 to 3 boxes."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 4, generator=generator)
        self.counts = torch.randint(4, (size,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.counts[index]


def losses_of_boxes(path, args):
    """Train with two losses that count different things: images and boxes.

    Returns ({step: loss}, the metrics of the last validation).
    """
    trainer = loaded(path)

    def load_data(args):
        return Boxes(60), Boxes(23)

    def build_model(args):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def loss_sums(model, batch, args):
        images, counts = batch
        outputs = model(images)
        classes = (outputs[:, 0] - 1).square().sum()
        boxes = ((outputs[:, 1] - 2).square() * counts).sum()
        return {"loss": [(classes, len(images)), (boxes, counts.sum())], "box_loss": (boxes, counts.sum())}

    def evaluate(model, batches, args):
        return {"batches": float(len(list(batches)))}

    trainer.load_data = load_data
    trainer.build_model = build_model
    trainer.loss_sums = loss_sums
    trainer.evaluate = evaluate
    lines, metrics = train_and_log(trainer, args)
    losses = {step: values["loss"] for step, values in lines if is_of_training(values)}
    return losses, metrics


def test_two_losses_with_different_counts_are_exact_over_micro_batches_and_ranks(script):
    """All ways to cut a batch of 12 into four micro-batches have the same losses."""
    flags = ["--max-steps=10", "--warmup=1", "--batch-size=12", "--log-every=1"]
    ways = [  # (ranks, flags)
        (1, ["--accumulate=4"]),
        (2, ["--accumulate=2"]),
        (4, []),
        (2, ["--accumulate=2", "--shard"]),
    ]
    runs = []
    for ranks, more_flags in ways:
        args = settings(script, *flags, *more_flags)
        run_of_rank_0, *_ = launch(losses_of_boxes, str(script), args, nproc=ranks)
        runs.append(run_of_rank_0)

    losses_of_one_rank, metrics_of_one_rank = runs[0]
    for losses, metrics in runs:
        assert losses == pytest.approx(losses_of_one_rank, rel=1e-5)
        assert metrics["val_loss"] == pytest.approx(metrics_of_one_rank["val_loss"], rel=1e-5)
        assert metrics["val_batches"] >= 1


def test_there_may_be_no_validation_set(script):
    def load_data(args):
        return blank_samples(200), None

    replacements = {"load_data": load_data}
    args = settings(script, "--max-steps=12", "--batch-size=20")
    assert launch(errors_of, str(script), [args], replacements, nproc=2) == [["none"]] * 2
    args = settings(script, "--max-steps=12", "--keep-best")
    [[error]] = launch(errors_of, str(script), [args], replacements, nproc=1)
    assert error == "UsageError: --keep-best needs a validation set."


# --- workers, the average, the best -----------------------------------------------------------------------------------


def forks_and_collectives(path, args):
    """Train, and return what happened in order: "fork" for each fork, "collective" for each call that communicates."""
    trainer = loaded(path)
    events = []

    def record_fork():
        events.append("fork")

    def recording(call):
        """The same call, which is recorded first."""

        def recorded(*arguments, **options):
            events.append("collective")
            return call(*arguments, **options)

        return recorded

    class RecordedDDP(trainer.DDP):
        def __init__(self, *arguments, **options):
            events.append("collective")
            super().__init__(*arguments, **options)

    os.register_at_fork(before=record_fork)
    names = ("all_reduce", "broadcast", "broadcast_object_list", "new_group")
    calls = {name: recording(getattr(dist, name)) for name in names}
    with mock.patch.multiple(dist, **calls), mock.patch.object(trainer, "DDP", RecordedDDP):
        trainer.train(args, CPU)
    return events


def test_no_worker_is_forked_beside_a_collective(script, tmp_path):
    """Each rank forks its four workers, two for training and two for validations, before it communicates."""
    flags = ["--max-steps=4", "--warmup=2", "--val-every=2", "--num-workers=2", f"--checkpoint-dir={tmp_path}"]
    for events in launch(forks_and_collectives, str(script), settings(script, *flags), nproc=2):
        assert events[:4] == ["fork"] * 4
        assert set(events[4:]) == {"collective"}
        assert len(events) > 20


def train_with_an_average(path, args):
    """({step: validation loss} of a run, the validation loss of the averaged weights that it has left in a file)."""
    trainer = loaded(path)
    lines, _ = train_and_log(trainer, args)
    val_losses = {step: values["val_loss"] for step, values in lines if "val_loss" in values}
    model = trainer.build_model(args)
    model.load_state_dict(torch.load(Path(args.checkpoint_dir, "weights.pt"), weights_only=True))
    return val_losses, validation_loss(trainer, model, args)


def validation_loss(trainer, model, args):
    """The mean loss of a model over the validation set, in one batch."""
    _, val_set = trainer.load_data(args)
    images, labels = val_set.tensors
    logits = model.eval()(images)
    return nn.functional.cross_entropy(logits, labels).item()


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_the_average_is_validated_and_the_best_is_kept(script, tmp_path, shard):
    flags = ["--max-steps=12", "--warmup=2", "--val-every=3", "--ema=0.9", "--keep-best", "--lr=0.5", shard]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [(val_losses, loss_of_average), _] = launch(train_with_an_average, str(script), args, nproc=2)
    assert list(val_losses) == [3, 6, 9, 12]
    assert val_losses[12] == pytest.approx(loss_of_average, rel=1e-4)

    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert sorted(best) == ["best_loss", "model", "step"]
    assert best["best_loss"] == min(val_losses.values())
    assert best["best_loss"] == val_losses[best["step"]]
    [loss_of_best] = launch(loss_of_weights, str(script), args, str(tmp_path / "best.pt"), nproc=1)
    assert loss_of_best == pytest.approx(best["best_loss"], rel=1e-4)

    newest = tmp_path / "step_00000012.pt"
    weights = loaded(script).read_weights(str(newest))  # as --init-from does
    for name, average in torch.load(newest, weights_only=True)["ema"].items():
        assert torch.equal(weights[name], average), name


def loss_of_weights(path, args, file):
    """The validation loss of the weights with which ``--init-from`` begins."""
    trainer = loaded(path)
    model = trainer.build_model(args)
    trainer.load_first_weights(model, file)
    return validation_loss(trainer, model, args)


# --- the speed, the log, a compiler -----------------------------------------------------------------------------------


def speeds_on_a_pretended_device(path, args):
    """Train on a pretended device, and return [(step, the samples per second that are logged)].

    - A step puts one second of work into the device's queue, and the host does not wait for it.
    - A validation or a save takes the host an hour.
    - When the host asks the other ranks whether to stop, it waits, and the device works off its queue meanwhile.
    """
    trainer = loaded(path)
    device = Device()

    def take_step(training, micro_batches, step, args):
        device.step()
        sums_and_counts = torch.ones(2, 2, dtype=torch.float64)
        norm = device  # a number on the device: norm.item() waits for the queue
        return sums_and_counts, norm

    def save(checkpoints, training):
        device.hour()

    def validate(*arguments):
        device.hour()
        return {"val_loss": 1.0}

    def ask_whether_to_stop(stop_request):
        device.wait()

    def do_nothing(*arguments):
        pass

    def mean_losses(loss_module, totals):
        return {"loss": 1.0}

    trainer.time = device  # its perf_counter and monotonic are the host's clock
    trainer.take_step = take_step
    trainer.Checkpoints.save = save
    trainer.validate = validate
    trainer.StopRequest.agreed = ask_whether_to_stop
    trainer.stop_if_diverged = do_nothing
    trainer.SkippedSteps.add = do_nothing
    trainer.LossModule.means = mean_losses
    lines, _ = train_and_log(trainer, args)
    return [(step, values["samples/s"]) for step, values in lines if "samples/s" in values]


def test_the_speed_is_that_of_steps_alone(script, tmp_path):
    """A step of ten samples takes a second, so the speed is 10 samples/s, whatever else takes time.

    A clock that is read before the device is done counts the steps in its queue as a save's, or as a wait's.
    """
    flags = ["--batch-size=10", "--max-steps=20", "--log-every=4", "--save-every=3", "--val-every=7"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [speeds] = launch(speeds_on_a_pretended_device, str(script), args, nproc=1)
    assert speeds == [(4, 10), (8, 10), (12, 10), (16, 10), (20, 10)]


def test_a_line_has_tokens_and_the_part_of_the_gpus_peak(script):
    """Each of the 12 samples of a step counts two tokens, and an epoch of 60 samples has five steps."""
    args = settings(script, "--max-steps=12", "--log-every=12", "--peak-tflops=1e-3", "--batch-size=12")
    [[line]] = launch(lines_of_boxes, str(script), args, nproc=1)
    num_parameters = 58
    flops_per_second = 6 * num_parameters * line["tokens/s"]
    assert line["mfu"] == pytest.approx(flops_per_second / 1e9)
    assert line["tokens/s"] == pytest.approx(2 * line["samples/s"])
    assert line["eta_min"] == 0
    assert line["epoch"] == pytest.approx(12 / 5)
    assert 0 < line["data_wait"] < 1


def lines_of_boxes(path, args):
    """What is logged of the steps of a run with two tokens a sample."""
    trainer = loaded(path)

    def load_data(args):
        return Boxes(60), Boxes(23)

    def build_model(args):
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def loss_sums(model, batch, args):
        images, _ = batch
        num_tokens = 2 * len(images)
        return {"loss": (model(images).square().sum(), num_tokens)}

    trainer.load_data = load_data
    trainer.build_model = build_model
    trainer.loss_sums = loss_sums
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines if is_of_training(values)]


OPEN_LOG_OF_PROCESS = """def open_log(args):
    file = open(f"log{os.getpid()}", "w")

    def log(step, values):
        print(step, *values, file=file, flush=True)

    return log


"""


def test_a_logger_has_one_run(script, alone, tmp_path):
    """Of two ranks one opens a log, and the trainer's own log is a table of (step, name, value)."""
    text = script.read_text()
    own_open_log = text[text.index("def open_log(args") : text.index("def evaluate(")]
    copy = tmp_path / "train.py"
    copy.write_text(text.replace(own_open_log, OPEN_LOG_OF_PROCESS))
    flags = ["--max-steps=4", "--warmup=2", "--log-every=2", "--log-to=csv", "--log-folder=logs"]
    status, _, errors, _ = forked(script_on_ranks(copy, 2, *flags), alone)
    assert status == 0, errors

    [log] = tmp_path.glob("log[0-9]*")
    steps_and_first_names = [line.split()[:2] for line in log.read_text().splitlines()]
    assert steps_and_first_names == [["2", "loss"], ["4", "loss"], ["4", "val_loss"]]

    with open(tmp_path / "logs" / "log.csv") as file:
        rows = list(csv.reader(file))
    steps_with_a_loss = [step for step, name, _ in rows if name in ("loss", "val_loss")]
    assert steps_with_a_loss == ["2", "4", "4"]
    assert all(float(value) >= 0 for _, _, value in rows)


def ids_of_wandb(path, all_args):
    """The id that each run gives to ``wandb.init``. Two runs with one id are one at Weights & Biases."""
    trainer = loaded(path)
    ids = []

    def log(values, step):
        pass

    def init(id, **options):
        ids.append(id)
        return SimpleNamespace(log=log)

    sys.modules["wandb"] = SimpleNamespace(init=init)
    for args in all_args:
        trainer.open_loggers(args)
    return ids


def test_each_run_has_an_id_of_its_own_at_wandb_and_a_resumed_one_keeps_it(script, tmp_path):
    def with_wandb(*flags):
        return settings(script, "--log-to=wandb", *flags)

    first_folder = f"--checkpoint-dir={tmp_path / 'a'}"
    first = with_wandb(first_folder)
    resumed = with_wandb(first_folder, "--resume")
    in_the_same_folder = with_wandb(first_folder)
    in_another_folder = with_wandb(f"--checkpoint-dir={tmp_path / 'b'}")
    without_checkpoints = with_wandb(f"--log-folder={tmp_path / 'runs'}")
    all_args = [first, resumed, in_the_same_folder, in_another_folder, without_checkpoints]
    [[first_id, resumed_id, *other_ids]] = launch(ids_of_wandb, str(script), all_args, nproc=1)
    assert resumed_id == first_id
    assert len({first_id, *other_ids}) == 4


def steps_with_a_log_that_fails(path, args):
    """(the steps that the log is called with, the last step of the run), with a log whose disk is full."""
    trainer = loaded(path)
    logged_steps = []

    def log(step, values):
        logged_steps.append(step)
        raise OSError(28, "No space left on device")

    def open_log(args):
        return log

    _, metrics = trainer.train(args, CPU, open_log)
    return logged_steps, metrics["step"]


def test_a_log_that_fails_does_not_end_the_run(script):
    """The log is not called again after it has failed at step 4."""
    args = settings(script, "--max-steps=12", "--log-every=4")
    [(logged_steps, last_step)] = launch(steps_with_a_log_that_fails, str(script), args, nproc=1)
    assert logged_steps == [4]
    assert last_step == 12


def test_the_docstring_says_how_to_leave_time_for_a_save(script):
    text = script.read_text().split('"""')[1]
    assert "--shutdown-timeout=300 --signals-to-handle=SIGTERM,SIGINT,SIGUSR1" in text


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_model_that_inductor_compiled_has_the_same_losses(script, alone, tmp_path):
    environment = {**alone, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = ["--max-steps=5", "--warmup=2", "--width=16", "--dtype=bfloat16"]
    status, plain, errors, _ = forked(script_on_ranks(script, 2, *flags), environment)
    assert status == 0, errors
    flags += ["--compile-with=inductor", f"--checkpoint-dir={tmp_path / 'runs'}"]
    status, compiled, errors, _ = forked(script_on_ranks(script, 2, *flags), environment, timeout=600)
    assert status == 0, errors
    assert result(compiled) == pytest.approx(result(plain), abs=0.02)
    state = torch.load(tmp_path / "runs" / "step_00000005.pt", weights_only=True)
    assert "0.weight" in state["model"]  # without a prefix of the compiler or of DDP
