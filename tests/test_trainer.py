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
FUNCTIONS_TO_REPLACE = ["add_flags", "load_data", "collate", "build_model", "build_optimizer", "loss_sums", "open_log"]
CPU = torch.device("cpu")


# The first lines with which the script loads data, and with which it looks for a checkpoint.
LOADS_DATA = '    path = "sklearn/datasets/data/digits.csv.gz"\n'
CHOOSES_CHECKPOINT = "    paths = list_checkpoints(folder)\n    if not paths and"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return export(NOTEBOOK, tmp_path_factory.mktemp("script"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The environment variables of a user's run, in which the script cannot import this project."""
    return stand_alone(tmp_path_factory.mktemp("path"))


def settings(script, *flags):
    """The script's ``args`` with these flags."""
    with mock.patch("sys.argv", [str(script), *flags]):
        return loaded(script).parse_args()


def changed(script, folder, old, new):
    """The path of a copy of the script, in this folder, in which a text that it has once is replaced."""
    text = script.read_text()
    assert text.count(old) == 1, old
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(text.replace(old, new))
    return path


def errors_of(path, all_args, replacements=None):
    """Train with each of these settings. Returns the name and message of the error that ends each run, or "none".

    ``replacements`` are functions to take in place of the script's own: {name: function}.
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


def errors_on_ranks(script, nproc, args, replacements=None):
    """Train on some ranks. Returns for each rank the name and message of the error that ends the run, or "none"."""
    errors_of_ranks = launch(errors_of, str(script), [args], replacements, nproc=nproc)
    return [error for [error] in errors_of_ranks]


def error_on_one_rank(script, args, replacements=None):
    """Train on one rank. Returns the name and message of the error that ends the run, or "none"."""
    [error] = errors_on_ranks(script, 1, args, replacements)
    return error


def train_and_log(trainer, args):
    """Train. Returns what was logged, as a list of (step, {name: value}), and the metrics of the last validation."""
    lines = []

    def log(step, values):
        lines.append((step, values))

    def open_log(args):
        return log

    _, metrics = trainer.train(args, CPU, open_log)
    return lines, metrics


def is_of_training(values):
    """Whether a logged line is about steps, and not about a validation, which has no norm of the gradient."""
    return "norm" in values


def losses_of_steps(lines):
    """{step: loss} of the logged lines that are about steps."""
    return {step: values["loss"] for step, values in lines if is_of_training(values)}


def blank_samples(number):
    """A data set of images that are all 0, with the label 0."""
    image = torch.zeros(64)
    label = 0
    return [(image, label)] * number


def copies_of(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def all_equal(tensors, others):
    """Whether each tensor is equal to the other one in its place."""
    return all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_seven_functions_stand_first(script):
    """The functions that a user replaces come before all others, and before the classes."""
    definition = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)  # such as "def load_data(args: Namespace)"
    names = definition.findall(script.read_text())
    assert names[:7] == FUNCTIONS_TO_REPLACE


# --- what a run refuses, before its first step ------------------------------------------------------------------------

ERRORS_OF_FLAGS = {  # {flags: how the error begins}
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


def test_wrong_flags_are_refused(script, tmp_path, monkeypatch):
    """They are tried in a folder with a checkpoint of step 7, ``step_00000007.pt``, and a file, ``file``."""
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

    all_args = [settings(script, *flags.split()) for flags in ERRORS_OF_FLAGS]
    [errors] = launch(errors_of, str(script), all_args, nproc=1)
    for flags, error in zip(ERRORS_OF_FLAGS, errors, strict=True):
        expected = ERRORS_OF_FLAGS[flags]
        assert error.startswith(f"UsageError: {expected}"), f"{flags}: {error}"


@pytest.mark.parametrize("size", [0, 1])
def test_a_validation_set_that_is_too_small_is_refused_before_the_first_step(script, size):
    def load_data(args):
        return blank_samples(200), blank_samples(size)

    error, _ = errors_on_ranks(script, 2, settings(script), {"load_data": load_data})
    assert error.startswith(f"UsageError: The validation set has {size} sample(s), fewer than the ranks.")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_of_another_shape_is_an_error_of_one_line(script, environment, tmp_path, workers):
    """One of the 96 samples has 63 pixels, the others 64. One UsageError is printed, with or without a worker."""
    with_an_odd_sample = (
        "    label = 0\n"
        "    train_set = [(torch.zeros(63), label)] + [(torch.zeros(64), label)] * 95\n"
        "    return train_set, None\n"
    )
    path = changed(script, tmp_path / "unequal", "    return train_set, val_set\n", with_an_odd_sample)
    # The real torchrun is used, because a loader's worker of a forked rank could not send the script's UsageError back.
    ended = torchrun(path, 2, environment, "--max-steps=11", f"--num-workers={workers}")
    assert ended.status not in (0, None)  # None would mean that it hung
    [message] = re.findall(r"^.*UsageError: (.*)$", ended.errors, re.M)
    assert message.startswith("samples of different shapes need a collate() of your own (")


def build_frozen_model(args):
    return nn.Linear(64, 10).requires_grad_(False)


def build_optimizer_of_another_model(model, args):
    other_model = nn.Linear(64, 10)
    return torch.optim.SGD(other_model.parameters(), args.lr)


def build_optimizer_of_nothing(model, args):
    return torch.optim.SGD([], args.lr)


def build_optimizer_of_frozen_model(model, args):
    frozen_model = build_frozen_model(args)
    return torch.optim.SGD(frozen_model.parameters(), args.lr)


@pytest.mark.parametrize(
    ("replaced", "function", "message"),
    [
        ("build_model", build_frozen_model, "build_model has frozen all parameters: nothing is trained."),
        (
            "build_optimizer",
            build_optimizer_of_another_model,
            "build_optimizer has parameters of another model.",
        ),
        (
            "build_optimizer",
            build_optimizer_of_nothing,
            "build_optimizer: the optimizer has no parameters.",
        ),
        (
            "build_optimizer",
            build_optimizer_of_frozen_model,
            "build_optimizer: the optimizer has no parameters to train.",
        ),
    ],
)
def test_a_model_without_a_trained_weight_and_an_optimizer_of_another_model_are_refused(
    script, replaced, function, message
):
    error = error_on_one_rank(script, settings(script), {replaced: function})
    assert error == f"UsageError: {message}"


# {what loss_sums returns: how the error begins}. ``logits`` are the model's, and ``loss`` is their sum.
WRONG_SUMS = {
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
        loss = logits.sum()
        names = {"logits": logits, "loss": loss, "labels": labels, "F": nn.functional, "torch": torch}
        return eval(expression, names)

    return loss_sums


def errors_of_sums(path, args, expressions):
    """Train with a ``loss_sums`` that returns the value of an expression. Returns {expression: the run's error}."""
    errors = {}
    for expression in expressions:
        replacements = {"loss_sums": loss_sums_returning(expression)}
        [error] = errors_of(path, [args], replacements)
        errors[expression] = error
    return errors


def test_sums_of_another_form_are_refused_and_no_others(script):
    args = settings(script, "--max-steps=12")
    expressions = [*WRONG_SUMS, *RIGHT_SUMS]
    [errors] = launch(errors_of_sums, str(script), args, expressions, nproc=1)
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
    errors = errors_on_ranks(script, 2, settings(script), {"loss_sums": loss_sums_with_a_score_on_rank_0})
    message = "loss_sums returns 1 loss(es), ['score'] on rank 0 and 1 loss(es), [] on rank 1."
    assert errors == [f"UsageError: {message}"] * 2


@pytest.mark.parametrize("default", [None, [1, 2]])
def test_flags_without_a_type_are_refused(script, capsys, default):
    def add_flags(add):
        add("--layers", default, "layers")

    trainer = loaded(script)
    trainer.add_flags = add_flags
    with mock.patch("sys.argv", [str(script)]), pytest.raises(SystemExit):
        trainer.parse_args()
    assert f"error: --layers: a flag cannot have the type of {default}\n" in capsys.readouterr().err


def test_a_warmup_that_is_longer_than_the_run_is_reported(script, environment):
    _, out, errors, _ = forked(script_on_ranks(script, 1, "--warmup=500", "--max-steps=2"), environment)
    assert "\n--warmup 500: the rate does not reach --lr in 2 steps\n" in out, errors


def test_a_usage_error_is_one_line_and_the_exit_status_is_not_0(script, environment, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()  # as Slurm's batch file does
    flags = ["--batch-size=1", f"--checkpoint-dir={folder}"]
    status, _, errors, _ = forked(script_on_ranks(script, 2, *flags), environment)
    assert status != 0
    error_lines = re.findall(r"^UsageError: --batch-size 1 is too small", errors, re.M)
    assert len(error_lines) == 1
    assert "train(args, device)" not in errors  # a traceback would have this line of the script

    # The batch file looks for ``gave_up``, to know that another start would fail as well. The next start removes it.
    reason = (folder / "gave_up").read_text()
    assert reason.startswith("--batch-size 1 is too small: give 2 or more")
    status, _, errors, _ = forked(script_alone(script, "--max-steps=1", f"--checkpoint-dir={folder}"), environment)
    assert status == 0, errors
    assert "gave_up" not in names_in(folder)


def test_an_error_that_only_one_rank_has_gives_up_too(script, environment, tmp_path):
    """Each new start would give this rank the same batch, until its node is excluded for an error of the script."""
    old = '    return {"loss": (loss, len(labels)),'
    new = '    if os.environ["RANK"] == "1":\n        return {"loss": loss}\n'
    path = changed(script, tmp_path / "wrong", old, new + old)
    status, _, errors, _ = forked(script_on_ranks(path, 2, f"--checkpoint-dir={tmp_path}"), environment)
    assert status != 0
    assert "UsageError: loss_sums must give (sum, count), not " in errors
    assert (tmp_path / "gave_up").read_text().startswith("rank 1: loss_sums must give (sum, count), not ")


def test_an_error_that_another_start_may_not_have_does_not_give_up(script, environment, tmp_path):
    flags = ["--resume", "--must-resume", f"--checkpoint-dir={tmp_path}"]
    status, _, errors, _ = forked(script_alone(script, *flags), environment)
    assert status == 1
    assert "has no checkpoint. Is it mounted?" in errors
    assert names_in(tmp_path) == ["lock"]


def test_a_config_file_comes_before_the_defaults_and_after_the_command_line(script, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("lr = 1\nbatch_size = 48\nshard = true\n")
    args = settings(script, f"--config={file}", "--batch-size=24")
    assert args.lr == 1.0
    assert args.batch_size == 24  # of the command line
    assert args.shard is True
    assert args.epochs == 6  # the default

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

    In place of a full disk, a limit of the system makes the file too large. Returns the names in the folder, and the
    step from which a resumed run would go on.
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


def test_a_full_disk_leaves_the_last_checkpoint(script, tmp_path):
    args = settings(script, f"--checkpoint-dir={tmp_path / 'runs'}", "--resume", "--no-save-in-background")
    [(names, step)] = launch(save_on_a_full_disk, str(script), args, nproc=1)
    assert names == ["step_00000001.pt"]
    assert step == 1


def save_in_background_on_a_full_disk(path, args):
    """Start a save in the background, on a full disk. Returns the error of the call that waits for its end."""
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


def test_an_error_of_a_save_in_the_background_is_raised_where_it_is_waited_for(script, tmp_path):
    args = settings(script, f"--checkpoint-dir={tmp_path / 'runs'}", "--resume", "--save-in-background")
    [error] = launch(save_in_background_on_a_full_disk, str(script), args, nproc=1)
    assert error == "No space left on device"


@pytest.fixture
def folder(script, tmp_path):
    """The folder of a run that was stopped after step 9: it has checkpoints of the steps 3, 6 and 9."""
    folder = tmp_path / "runs"
    args = settings(script, "--max-steps=9", "--save-every=3", f"--checkpoint-dir={folder}")
    assert error_on_one_rank(script, args) == "none"
    (folder / "weights.pt").unlink()  # it is written when a run ends, and not when it is stopped
    return folder


def settings_to_go_on(script, folder, *flags):
    """The settings of a run that goes on from the checkpoints of the fixture ``folder`` up to step 12."""
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


@pytest.mark.parametrize("damage", [cut, garble])
def test_a_damaged_checkpoint_is_set_aside_and_never_overwritten(script, folder, damage):
    """It is renamed to the next free name, step_00000009.damaged2, and the run goes on from the one before it."""
    newest = folder / "step_00000009.pt"
    damage(newest)
    damaged_content = newest.read_bytes()
    (folder / "step_00000009.damaged1").write_text("of an earlier time")

    args = settings_to_go_on(script, folder, "--resume")
    assert error_on_one_rank(script, args) == "none"
    assert (folder / "step_00000009.damaged1").read_text() == "of an earlier time"
    assert (folder / "step_00000009.damaged2").read_bytes() == damaged_content
    assert (folder / "step_00000012.pt").exists()


def test_what_a_killed_job_left_of_a_save_is_removed(script, folder):
    (folder / ".step_00000012.pt.host.7.part").write_text("half")
    (folder / ".probe_0123456789abcdef").touch()
    args = settings_to_go_on(script, folder, "--resume")
    assert error_on_one_rank(script, args) == "none"
    assert names_in(folder) == ["step_00000006.pt", "step_00000009.pt", "step_00000012.pt", "weights.pt"]


def test_nothing_is_touched_without_resume(script, folder):
    cut(folder / "step_00000009.pt")
    before = names_in(folder)
    error = error_on_one_rank(script, settings_to_go_on(script, folder))
    assert "is there: add --resume" in error
    assert names_in(folder) == before


def test_a_job_stops_if_no_checkpoint_is_whole(script, folder):
    for path in folder.glob("step_*.pt"):
        cut(path)
    before = names_in(folder)
    args = settings_to_go_on(script, folder, "--resume")
    for _ in range(2):  # a job that is requeued must not start anew either
        error = error_on_one_rank(script, args)
        assert "None of the 3 checkpoint(s)" in error
        assert names_in(folder) == before


def error_of_a_bad_disk(path, args):
    """Train on a disk from which no checkpoint can be read. Returns the error."""
    trainer = loaded(path)

    def fail_to_read(*arguments):
        raise OSError(5, "Input/output error")

    # The trainer opens a checkpoint with zipfile.ZipFile.
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
    """torch.load with weights_only=True refuses a checkpoint that has a Path."""
    newest = folder / "step_00000009.pt"
    checkpoint = torch.load(newest, weights_only=True)
    checkpoint["path"] = newest
    torch.save(checkpoint, newest)
    before = names_in(folder)

    error = error_on_one_rank(script, settings_to_go_on(script, folder, "--resume"))
    assert error.startswith("UsageError:")
    assert "is whole, but cannot be loaded: Weights only load failed" in error
    assert names_in(folder) == before


def test_a_file_of_another_program_is_named(script, folder):
    torch.save({"weights": {}}, folder / "step_00000099.pt")
    error = error_on_one_rank(script, settings_to_go_on(script, folder, "--resume"))
    assert "step_00000099.pt is no checkpoint of this script" in error


def test_a_flag_may_be_a_path_and_a_later_flag_locks_no_checkpoint(script, folder, tmp_path):
    """Two flags, --data and --s, are new in the script: its checkpoints were made without them, and can be resumed.

    From then on the checkpoints have the new flags, and these may not change.
    """
    width = '    add("--width", 256, "neurons in the hidden layer")\n'
    data = '    add("--data", Path("data"), "a folder")\n'
    size = '    add("--s", 0.5, "s")\n'
    later = changed(script, tmp_path / "later", width, width + data + size)
    for max_steps in (12, 15):
        args = settings_to_go_on(later, folder, "--resume", f"--max-steps={max_steps}")
        assert error_on_one_rank(later, args) == "none"
    assert (folder / "step_00000015.pt").exists()

    error = error_on_one_rank(later, settings_to_go_on(later, folder, "--resume", "--s=0.1"))
    assert "has s = 0.5, not 0.1: keep 0.5, or add --allow-change s." in error


OTHER_VALUES = {  # than the defaults, for each flag that a resume compares
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
    """A flag that decides what the weights become may not change in a resume, unless --allow-change names it."""
    trainer = loaded(script)
    assert OTHER_VALUES.keys() == trainer.DECIDING_FLAGS | {"width"}
    saved = {name: repr(value) for name, value in vars(settings(script)).items()}
    saved["train_samples"] = "1440"

    def resume_with(changes, allowed=""):
        """Compare the flags of a checkpoint, "step", with those of a run that resumes from it."""
        trainer.check_same_flags(saved, {**saved, **changes}, allowed, "step")

    resume_with({"num_workers": "1", "log_every": "1"})  # these do not decide

    for name, value in OTHER_VALUES.items():
        change = {name: repr(value)}
        with pytest.raises(trainer.UsageError, match=f"step has {name} = .*, not {value!r}: keep .*--allow-change"):
            resume_with(change)
        resume_with(change, allowed=name)


def test_a_flag_of_ones_own_may_have_choices(script, tmp_path):
    """It is parsed with the type of its default, so it is 3 and not "3". A resume compares it."""
    width = '    add("--width", 256, "neurons in the hidden layer")\n'
    size = '    add("--size", 3, "a size", choices=[1, 3])\n'
    with_choices = changed(script, tmp_path / "choices", width, width + size)
    flags = ["--max-steps=10", f"--checkpoint-dir={tmp_path / 'runs'}", "--resume"]
    with_size_3 = settings(with_choices, *flags, "--size=3")
    for _ in range(2):  # a first run and a resumed one
        assert error_on_one_rank(with_choices, with_size_3) == "none"

    error = error_on_one_rank(with_choices, settings(with_choices, *flags, "--size=1"))
    assert "has size = 3, not 1" in error


def test_a_resume_with_more_samples_is_refused_unless_allowed(script, folder):
    def load_data(args):
        return blank_samples(1441), blank_samples(9)

    replacements = {"load_data": load_data}
    args = settings_to_go_on(script, folder, "--resume")
    error = error_on_one_rank(script, args, replacements)
    assert "has train_samples = 1440, not 1441: keep 1440, or add --allow-change train_samples." in error

    args = settings_to_go_on(script, folder, "--resume", "--allow-change=max_steps,train_samples")
    assert error_on_one_rank(script, args, replacements) == "none"


@pytest.mark.parametrize("name", ["best.pt", "weights.pt"])
def test_a_new_run_does_not_overwrite_an_earlier_result(script, tmp_path, name):
    """The folder has a result, and no checkpoint."""
    (tmp_path / name).write_text("of an earlier run")
    args = settings(script, "--max-steps=10", "--keep-best", "--no-resume", f"--checkpoint-dir={tmp_path}")
    error = error_on_one_rank(script, args)
    assert name in error
    assert "take another folder" in error
    assert (tmp_path / name).read_text() == "of an earlier run"


def test_a_resumed_run_does_not_overwrite_the_weights_of_one_that_has_ended(script, tmp_path):
    """It may overwrite a best.pt, which a job may have saved that was killed before its first checkpoint."""
    weights = tmp_path / "weights.pt"
    weights.write_text("of an earlier run")
    args = settings(script, "--max-steps=10", "--keep-best", "--resume", f"--checkpoint-dir={tmp_path}")
    assert "weights.pt of a run that has ended" in error_on_one_rank(script, args)
    assert weights.read_text() == "of an earlier run"


def test_a_job_that_must_resume_does_not_start_anew(script, tmp_path):
    args = settings(script, "--resume", "--must-resume", f"--checkpoint-dir={tmp_path}")
    error = error_on_one_rank(script, args)
    assert error == f"UsageError: --must-resume: {tmp_path} has no checkpoint. Is it mounted?"


def error_on_a_disk_of_ones_own(path, args, folder):
    """Train, while rank 1 works in another folder than rank 0, so that ``runs`` is two folders. Returns the error."""
    if dist.get_rank() == 1:
        own_folder = Path(folder, "local")
        own_folder.mkdir()
        os.chdir(own_folder)
    else:
        os.chdir(folder)
    [error] = errors_of(path, [args])
    return error


def test_a_folder_that_only_rank_0_sees_is_refused(script, tmp_path):
    args = settings(script, "--max-steps=10", "--checkpoint-dir=runs")
    for error in launch(error_on_a_disk_of_ones_own, str(script), args, str(tmp_path), nproc=2):
        assert error.startswith("UsageError: rank 1: --checkpoint-dir runs: ")
        assert error.endswith(" does not see rank 0's files there.")
    assert names_in(tmp_path / "runs") == []


def error_after_a_change_of_shapes(path, args):
    """Save a model with a weight [64, 8], and resume it with one [8, 64]. Returns the error."""
    trainer = loaded(path)

    def build_model(args):
        return nn.ParameterDict({"weight": torch.ones(64, 8)})

    def build_other_model(args):
        return nn.ParameterDict({"weight": torch.ones(8, 64)})

    trainer.build_model = build_model
    training = trainer.build_training(args, CPU)
    trainer.Checkpoints(args).save(training)

    trainer.build_model = build_other_model
    training = trainer.build_training(args, CPU)
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
    error = error_on_one_rank(script, args, {"available_memory": available_memory})
    assert error.startswith("UsageError: A checkpoint takes 0 GiB of rank 0's host")
    assert names_in(tmp_path) == []


def test_the_memory_of_a_job_is_what_its_cgroups_allow(script, tmp_path):
    """Slurm sets a limit for the cgroup of the job, and none for that of a rank, some folders below.

    What is left is the limit less the memory that is in use, "anon". The files that are cached do not count.
    """
    trainer = loaded(script)
    job = tmp_path / "system.slice/slurmstepd.scope/job_4711"
    rank = job / "step_0/user/task_0"
    rank.mkdir(parents=True)
    (job / "memory.max").write_text("128000\n")
    (rank / "memory.max").write_text("max\n")
    for cgroup in (job, rank):
        (cgroup / "memory.stat").write_text("anon 28000\nfile 90000\nanon_thp 1\n")
    own_cgroup = f"1:cpu:/other\n0::/{rank.relative_to(tmp_path)}\n"
    assert trainer.memory_limits(own_cgroup, tmp_path) == [128_000 - 28_000]

    # A container sees its own cgroup as the root.
    (tmp_path / "memory.max").write_text("64000\n")
    (tmp_path / "memory.stat").write_text("anon 4000\n")
    assert trainer.memory_limits("0::/\n", tmp_path) == [64_000 - 4_000]

    own_cgroup_of_version_1 = "4:memory:/slurm/job_4711\n"
    assert trainer.memory_limits(own_cgroup_of_version_1, tmp_path) == []
    assert 0 < trainer.available_memory() < 2**50


def test_a_start_may_read_for_longer_than_the_patience(script, environment, tmp_path):
    """Rank 0 needs 8 seconds to see which checkpoint is whole, and the others wait for it, though --patience is 4."""
    slow = changed(script, tmp_path / "slow", CHOOSES_CHECKPOINT, f"    time.sleep(8)\n{CHOOSES_CHECKPOINT}")
    flags = ["--patience=4", "--max-steps=2", f"--checkpoint-dir={tmp_path / 'run'}"]
    status, _, errors, _ = forked(script_on_ranks(slow, 2, *flags), environment)
    assert status == 0, errors


def test_a_rank_that_reads_a_checkpoint_from_a_slow_disk_is_waited_for(script, environment, tmp_path):
    """Rank 1 needs 8 seconds to read the file, and rank 0 waits for it, though --patience is 4."""
    flags = ["--patience=4", "--max-steps=2", f"--checkpoint-dir={tmp_path / 'run'}", "--resume"]
    status, _, errors, _ = forked(script_on_ranks(script, 2, *flags), environment)
    assert status == 0, errors
    reads = "        checkpoint = read_checkpoint(path)\n"
    slow = changed(script, tmp_path / "slow", reads, f"        time.sleep(8 * dist.get_rank())\n{reads}")
    status, out, errors, _ = forked(script_on_ranks(slow, 2, *flags), environment)
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
        if pid == 0:  # in the forked process
            os.write(write_end, b"x")  # says that it is here
            signal.pause()
        os.read(read_end, 1)
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
    """A model with an infinite mask, a buffer of floats of eight bits, and the number of its calls as extra state."""

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
    """Train with each of these settings. Returns the number of calls that each run's model has counted at its end."""
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
    assert resumed > first  # it starts from the first run's number, takes no step, and validates once more


def spoil_and_save(path, args, spoil):
    """Build a training, let the function ``spoil`` change it, and save it."""
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    spoil(training)
    trainer.Checkpoints(args).save(training)


def set_a_weight_to_nan(training):
    training.model[0].weight.data[0, 0] = torch.nan


def add_a_path_to_the_optimizer(training):
    """Of a Path, torch.load with weights_only=True says "Weights only load failed"."""
    training.optimizer.param_groups[0]["owner"] = Path("home")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (set_a_weight_to_nan, "step_00000000 is not finite, so it was not saved"),
        (add_a_path_to_the_optimizer, "Weights only load failed"),
    ],
)
def test_a_spoilt_training_is_noticed_at_its_save_and_leaves_no_file(script, tmp_path, spoil, message):
    args = settings(script, f"--checkpoint-dir={tmp_path}")
    with pytest.raises(Exception, match=message):
        launch(spoil_and_save, str(script), args, spoil, nproc=1)
    assert names_in(tmp_path) == []


def lock_twice(path, folder):
    """Lock a folder that is locked, as a second job would. Returns the error, or "locked"."""
    trainer = loaded(path)
    with trainer.locked(folder):
        try:
            with trainer.locked(folder):
                return "locked"
        except trainer.UsageError as error:
            return str(error)


def test_two_jobs_in_one_folder_notice_each_other(script, tmp_path):
    [error] = launch(lock_twice, str(script), str(tmp_path), nproc=1)
    assert re.fullmatch(rf"Another job writes to {tmp_path}: process \d+ on .+\.", error)


def save_steps_1_to_9(path, args):
    """Save a training after each of nine steps, which it does not take."""
    trainer = loaded(path)
    checkpoints = trainer.Checkpoints(args)
    training = trainer.build_training(args, CPU)
    for step in range(1, 10):
        training.step = step
        checkpoints.save(training)
    checkpoints.wait()


def test_the_newest_and_every_nth_checkpoint_stay(script, tmp_path):
    flags = ["--keep=2", "--keep-every=4", "--save-in-background", f"--checkpoint-dir={tmp_path}"]
    launch(save_steps_1_to_9, str(script), settings(script, *flags), nproc=1)
    assert names_in(tmp_path) == ["step_00000004.pt", "step_00000008.pt", "step_00000009.pt"]


def train_until_sigterm(path, args):
    """Train, and send this process SIGTERM when step 44 is logged."""

    def send_sigterm_at_step_44(step, values):
        if step == 44:
            os.kill(os.getpid(), signal.SIGTERM)

    def open_log(args):
        return send_sigterm_at_step_44

    loaded(path).train(args, CPU, open_log)


def test_the_save_at_a_signal_removes_the_oldest_checkpoint(script, tmp_path):
    """So a good checkpoint to which one wants to return must be moved away before the job is ended: see chapter 13b."""
    flags = ["--epochs=50", "--log-every=1", "--save-every=10", f"--checkpoint-dir={tmp_path}"]
    launch(train_until_sigterm, str(script), settings(script, *flags), nproc=1)
    checkpoints = [name for name in names_in(tmp_path) if name.startswith("step_")]
    *regular, at_signal = checkpoints
    assert regular == ["step_00000030.pt", "step_00000040.pt"]
    assert at_signal in ("step_00000045.pt", "step_00000046.pt")


# --- it stops when it should ------------------------------------------------------------------------------------------


def nan_loss_sums(model, batch, args):
    images, _ = batch
    loss = model(images).sum() * torch.nan
    return {"loss": (loss, len(images))}


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_run_without_a_finite_gradient_stops_on_all_ranks_and_saves_nothing(script, tmp_path, shard):
    args = settings(script, "--max-bad-steps=4", "--save-every=2", f"--checkpoint-dir={tmp_path}", shard)
    errors = errors_on_ranks(script, 2, args, {"loss_sums": nan_loss_sums})
    message = "stopped at step 4: the gradient was not finite in 4 steps in a row; no step of this run was good"
    assert errors == [f"NotFiniteError: {message}"] * 2
    assert names_in(tmp_path) == []


def test_the_exit_status_of_a_run_without_a_finite_gradient_is_not_0(script, environment, tmp_path):
    nan = changed(script, tmp_path / "nan", 'reduction="sum")\n', 'reduction="sum") * math.nan\n')
    status, out, errors, _ = forked(script_on_ranks(nan, 2, "--max-bad-steps=3"), environment)
    assert status != 0
    assert "result" not in out
    error_lines = re.findall("^NotFiniteError: stopped at step 3", errors, re.M)
    assert len(error_lines) == 1


def make_losses_nan(trainer, calls):
    """Make the loss nan in these calls of ``loss_sums``, of which the first is 1, so that their steps are skipped."""
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
    """Train, so that the second and the third step are skipped. Returns what was logged of steps: [{name: value}]."""
    trainer = loaded(path)
    make_losses_nan(trainer, calls=[2, 3])
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines if is_of_training(values)]


def step_with_a_large_norm(path, args):
    """Take a step whose gradient has elements of about 1e22, so that the sum of their squares overflows.

    Returns the norm of the gradient, and whether the step left all weights as they were.
    """
    trainer = loaded(path)
    own_loss_sums = trainer.loss_sums
    batch = (torch.ones(96, 64), torch.zeros(96, dtype=torch.int64))

    def huge_loss_sums(model, batch, args):
        sums = own_loss_sums(model, batch, args)
        total, count = sums["loss"]
        sums["loss"] = (total * 1e24, count)
        return sums

    training = trainer.build_training(args, CPU)
    trainer.take_step(training, [batch], 1, args)  # so that there is a momentum, which could move the weights
    before = copies_of(training.model.parameters())

    trainer.loss_sums = huge_loss_sums
    _, norm = trainer.take_step(training, [batch], 2, args)
    is_skipped = all_equal(before, training.model.parameters())
    return norm.item(), is_skipped


@pytest.mark.parametrize("max_norm", [0, 1])
def test_a_norm_that_is_not_finite_skips_the_step_though_each_element_is(script, max_norm):
    args = settings(script, f"--max-norm={max_norm}")
    [(norm, is_skipped)] = launch(step_with_a_large_norm, str(script), args, nproc=1)
    assert norm == float("inf")
    assert is_skipped


def skip_the_first_step(path, args):
    """Take step 1 with an infinite batch and step 2 with a good one.

    Returns whether step 1 left all weights as they were, and whether all weights are finite after step 2.
    """
    torch.use_deterministic_algorithms(True)  # it fills new memory with nan, so that an unset buffer shows
    trainer = loaded(path)
    labels = torch.zeros(96, dtype=torch.int64)
    infinite_batch = (torch.full((96, 64), torch.inf), labels)
    good_batch = (torch.ones(96, 64), labels)

    training = trainer.build_training(args, CPU)
    before = copies_of(training.model.parameters())
    trainer.take_step(training, [infinite_batch], 1, args)
    is_skipped = all_equal(before, training.model.parameters())
    trainer.take_step(training, [good_batch], 2, args)
    are_finite = all(param.isfinite().all().item() for param in training.model.parameters())
    return is_skipped, are_finite


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_first_step_may_be_skipped(script, dtype):
    args = settings(script, f"--dtype={dtype}")
    [(is_skipped, are_finite)] = launch(skip_the_first_step, str(script), args, nproc=1)
    assert is_skipped
    assert are_finite


def test_skipped_steps_are_counted_and_leave_the_mean_loss_finite(script):
    args = settings(script, "--max-steps=15", "--log-every=5", "--peak-tflops=1e-3")
    [lines] = launch(lines_around_skipped_steps, str(script), args, nproc=1)
    assert [values["skipped"] for values in lines] == [2, 2, 2]
    first = lines[0]
    assert first["loss"] == pytest.approx(2.3, abs=0.2)
    # The speed counts the time and the samples of skipped steps too. There is one token, a label, for each sample.
    num_parameters = 19_210
    flops_per_second = 6 * num_parameters * first["samples/s"]
    assert "tokens/s" not in first
    assert first["mfu"] == pytest.approx(flops_per_second / 1e9)


def wait_for_text(run, file, text, seconds):
    """Wait until a run has written a text to "out" or to "errors", where its stdout and its stderr go."""
    path = Path(run.output.name, file)

    def has_written():
        return path.exists() and text in path.read_text()

    assert wait_until(has_written, seconds)


def test_ctrl_c_ends_with_a_checkpoint(script, environment, tmp_path):
    flags = ["--epochs=5000", "--log-every=5", "--save-every=100000", f"--checkpoint-dir={tmp_path / 'runs'}"]
    run = Forked(script_alone(script, *flags), environment)
    wait_for_text(run, "out", "step 5:", seconds=120)
    os.kill(run.pid, signal.SIGINT)
    status, out, errors, _ = run.end()
    assert status == 0, errors
    [step] = re.findall(r"^stopped by SIGTERM at step (\d+): go on with --resume$", out, re.M)
    assert names_in(tmp_path / "runs") == ["lock", f"step_{int(step):08}.pt", "stopped"]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(LOADS_DATA, "before a checkpoint was read", id="load_data"),
        pytest.param(CHOOSES_CHECKPOINT, "at step 0: go on with --resume", id="choose_checkpoint"),
    ],
)
def test_a_signal_that_comes_before_the_first_step_is_not_lost(script, environment, tmp_path, line, message, name):
    """The signal comes just before a line of the script.

    The script starts with the signal ignored, as a batch file does whose shell ignores it.
    """
    signalled = changed(script, tmp_path / "signalled", line, f"    signal.raise_signal(signal.{name})\n{line}")
    first_function = "\n\ndef add_flags("
    ignore_signal = f"\nsignal.signal(signal.{name}, signal.SIG_IGN)\n"
    early = changed(signalled, tmp_path / "early", first_function, ignore_signal + first_function)

    flags = ["--max-steps=50", f"--checkpoint-dir={tmp_path / 'run'}"]
    status, out, errors, _ = forked(script_alone(early, *flags), environment)
    assert status == 0, errors
    assert f"stopped by {name} {message}\n" in out
    assert names_in(tmp_path / "run") == ["lock", "stopped"]


def test_ranks_that_start_after_the_signal_stop_before_they_load(script, environment, tmp_path):
    """Ranks that torchrun starts after Slurm's signal do not get it. The batch file tells them its time, in STOP_AT."""
    flags = ["--max-steps=3", "--save-every=2", f"--checkpoint-dir={tmp_path}", "--resume"]
    late = {**environment, "STOP_AT": str(time.time() - 1)}
    status, out, errors, _ = forked(script_on_ranks(script, 2, *flags), late)
    assert status == 0, errors
    assert "stopped by SIGUSR1 before a checkpoint was read\n" in out
    assert names_in(tmp_path) == ["lock", "stopped"]

    early = {**environment, "STOP_AT": str(time.time() + 1000)}
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

    Returns the MiB that this takes, and the number of positions of the shuffled order that were computed.
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
    trainer.shuffled(np.arange(3), 3, "a")  # a first call, whose imports are not to be counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    next(iter(batches))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024, num_positions


def test_ten_million_samples_need_no_memory_and_a_late_resume_skips_what_is_done(script):
    """A list of ten million indices takes 459 MiB in each process."""
    [(memory, positions)] = launch(memory_and_positions, str(script), settings(script), nproc=1)
    assert memory < 20
    assert positions < 20_000


class SeldomRandom(torch.utils.data.Dataset):
    """Sample i is i, but every fiftieth is a random number below 1, drawn by torch, NumPy and random in turn."""

    def __len__(self):
        return 1440

    def __getitem__(self, index):
        if index % 50 != 7:
            return float(index)
        number_of_draw = index // 50
        if number_of_draw % 3 == 0:
            return torch.rand(()).item()
        if number_of_draw % 3 == 1:
            return np.random.rand()
        return random.random()


def read_seldom_random_samples(path, args, num_steps):
    """Read the samples of some steps, and count how often the trainer seeds the generators for a sample.

    Returns a dictionary:

    - "samples";
    - "expected": the same samples, read with a seed for each;
    - "seeds before first draw": how often the trainer had seeded before the data set drew its first number.
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
    batches = trainer.MicroBatches(SeldomRandom(), args)
    samples = []
    expected = []
    seeds_before_first_draw = None
    for micro_batch in trainer.islice(batches.of_map_style(0), num_steps):
        samples += batches.read_samples(micro_batch)
        if not batches.dataset_draws:
            seeds_before_first_draw = num_seeds
        for index in micro_batch.samples.tolist():
            own_seed_all("sample", args.seed, micro_batch.epoch, index)
            expected.append(batches.dataset[index])
    return {"samples": samples, "expected": expected, "seeds before first draw": seeds_before_first_draw}


def test_a_sample_is_seeded_by_its_place_if_the_data_set_draws_and_not_at_all_if_it_does_not(script):
    """180 steps of 8 samples are one pass over the data set."""
    args = settings(script, "--batch-size=8")
    [read] = launch(read_seldom_random_samples, str(script), args, 180, nproc=1)
    assert read["samples"] == read["expected"]
    below_1 = [sample for sample in read["samples"] if sample < 1]
    assert len(below_1) == 30  # 29 random ones, and sample 0, which is 0
    assert read["seeds before first draw"] == 0


class Shards:
    """A stream of eight shards of unequal lengths. ``read`` has the numbers of the shards that were asked for.

    A sample is a random number: the hundreds are its shard, and what is before the point is its place there.
    """

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
        for place in range(self.lengths[self.index]):
            yield 100 * self.index + place + torch.rand(()).item() / 2


def samples_of_shards(path, args, start_step, num_steps):
    """Read the samples of some steps on this rank.

    Returns {(step, number of the micro-batch): its samples}, and the numbers of the shards that were read.
    """
    trainer = loaded(path)
    stream = Shards()
    batches = trainer.MicroBatches(stream, args).of_shards(start_step)
    samples = {}
    for batch in trainer.islice(batches, num_steps * args.accumulate):
        samples[batch.step, batch.number] = batch.samples
    return samples, stream.read


def test_each_rank_reads_its_own_shards_and_all_ways_to_cut_give_the_same(script):
    """Four micro-batches on one rank have the samples of two on each of two ranks, and of a run that is resumed."""
    args = settings(script, "--batch-size=16", "--accumulate=4")
    [(samples, _)] = launch(samples_of_shards, str(script), args, 0, 6, nproc=1)

    args_of_two = settings(script, "--batch-size=16", "--accumulate=2")
    rank_0, rank_1 = launch(samples_of_shards, str(script), args_of_two, 0, 6, nproc=2)
    samples_of_rank_0, shards_of_rank_0 = rank_0
    samples_of_rank_1, shards_of_rank_1 = rank_1
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


class ShuffledShards:
    """A stream of eight shards of three samples (shard, epoch, number), in another order in each epoch.

    A shard has ``set_epoch``, and ``skip``, which returns the shard without its first samples.
    """

    num_shards = 8
    samples_of_shard = 3

    def __init__(self, index=None, num_skipped=0):
        self.index = index
        self.num_skipped = num_skipped
        self.epoch = 0

    def shard(self, num_shards, index):
        return ShuffledShards(index)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def skip(self, num_samples):
        return ShuffledShards(self.index, num_skipped=num_samples)

    def __len__(self):
        return self.samples_of_shard

    def __iter__(self):
        for place in range(self.num_skipped, self.samples_of_shard):
            number = (place + self.epoch) % self.samples_of_shard
            yield self.index, self.epoch, number


def samples_of_shard_0(path, args, start_step, num_steps):
    """Read the samples of some steps. Returns those of shard 0."""
    trainer = loaded(path)
    batches = trainer.MicroBatches(ShuffledShards(), args).of_shards(start_step)
    samples = []
    for batch in trainer.islice(batches, num_steps):
        for sample in batch.samples:
            shard, _, _ = sample
            if shard == 0:
                samples.append(sample)
    return samples


def test_each_pass_over_a_shard_has_an_epoch_of_its_own(script):
    """A step takes one sample of each of the eight shards, so a pass over a shard of three takes three steps."""
    args = settings(script, "--batch-size=8")
    [samples] = launch(samples_of_shard_0, str(script), args, 0, 7, nproc=1)
    epochs = [epoch for _, epoch, _ in samples]
    assert epochs == [0, 0, 0, 1, 1, 1, 2]

    [samples_from_step_4] = launch(samples_of_shard_0, str(script), args, 4, 3, nproc=1)
    assert samples_from_step_4 == samples[4:]


class SlowOnRank1AtFirst(torch.utils.data.IterableDataset):
    """A stream whose first sample comes late on rank 1, as when a resumed job reads up to where it stopped."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __iter__(self):
        if dist.get_rank() == 1:
            time.sleep(self.seconds)
        while True:
            yield torch.zeros(64), 0


def error_of_a_slow_stream(path, args, seconds):
    """Train with a stream whose first sample comes late. Returns the error, which is "none" if the run ends well.

    It is an error here if a rank waits for another one in a step, for more than 3 seconds.
    """
    trainer = loaded(path)
    own_take_step = trainer.take_step

    def load_data(args):
        return SlowOnRank1AtFirst(seconds), None

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
    """In a step, a rank waits for others as long as --patience says. Before the first step it waits for days."""
    flags = [f"--checkpoint-dir={tmp_path}", "--resume", "--allow-change=max_steps", "--warmup=1"]
    args = settings(script, *flags, "--max-steps=2")
    no_delay = 0
    errors = launch(error_of_a_slow_stream, str(script), args, no_delay, nproc=2)
    assert errors == ["none"] * 2

    args_of_resume = settings(script, *flags, "--max-steps=4")
    delay = 8
    errors = launch(error_of_a_slow_stream, str(script), args_of_resume, delay, nproc=2)
    assert errors == ["none"] * 2
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
    """Train ``Blocks`` with each of these settings. Returns a pair for each run: {step: loss}, and the last metrics.

    With ``last_step``, a run ends after this step, with a checkpoint. Its learning rates remain those of --max-steps.
    """
    trainer = loaded(path)

    def build_model(args):
        return Blocks()

    def build_optimizer(model, args):
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer_class = getattr(torch.optim, optimizer)
        return optimizer_class(trained, args.lr, fused=True)

    trainer.build_model = build_model
    trainer.build_optimizer = build_optimizer
    if last_step is not None:
        end_early(trainer, last_step)

    runs = []
    for args in all_args:
        lines, metrics = train_and_log(trainer, args)
        runs.append((losses_of_steps(lines), metrics))
    return runs


def end_early(trainer, last_step):
    """Let the trainer's loop end after a step, with the learning rates of a run of --max-steps."""
    own_plan_steps = trainer.plan_steps
    own_lr_factor = trainer.lr_factor

    def plan_steps(train_set, val_set, args):
        steps = own_plan_steps(train_set, val_set, args)
        return dataclasses.replace(steps, total=last_step)

    def lr_factor(step, total_steps, args):
        return own_lr_factor(step, args.max_steps, args)

    trainer.plan_steps = plan_steps
    trainer.lr_factor = lr_factor


FLAGS_OF_BLOCKS = ["--max-steps=12", "--warmup=2", "--log-every=1", "--lr=0.01", "--save-every=4", "--ema=0.9"]
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
        all_args.append(settings(script, *FLAGS_OF_BLOCKS, *flags, f"--checkpoint-dir={tmp_path / name}"))
    runs, _ = launch(losses_of_blocks, str(script), all_args, optimizer, nproc=2)
    run_with_ddp, *sharded_runs = runs

    losses_of_ddp, metrics_of_ddp = run_with_ddp
    for losses, metrics in sharded_runs:
        assert losses == pytest.approx(losses_of_ddp, rel=1e-4)
        assert metrics == pytest.approx(metrics_of_ddp, rel=1e-3)

    weights_of_ddp = torch.load(tmp_path / "ddp" / "weights.pt", weights_only=True)
    weights_of_fsdp = torch.load(tmp_path / "fsdp" / "weights.pt", weights_only=True)
    assert list(weights_of_ddp) == list(Blocks().state_dict())
    for name, weight in weights_of_ddp.items():
        sharded_weight = weights_of_fsdp[name].reshape(weight.shape)  # a scalar has a dimension of 1 there
        assert torch.allclose(weight, sharded_weight, atol=1e-4), name


def test_replicas_of_a_sharded_model_have_the_losses_of_ddp(script):
    with_ddp = settings(script, *FLAGS_OF_BLOCKS, "--accumulate=2")
    with_replicas = settings(script, *FLAGS_OF_BLOCKS, "--accumulate=2", "--shard", "--replicas=2")
    runs, *_ = launch(losses_of_blocks, str(script), [with_ddp, with_replicas], nproc=4)
    run_with_ddp, run_with_replicas = runs
    losses_of_ddp, metrics_of_ddp = run_with_ddp
    losses, metrics = run_with_replicas
    assert losses == pytest.approx(losses_of_ddp, rel=1e-4)
    assert metrics == pytest.approx(metrics_of_ddp, rel=1e-3)


def printed_on_nodes_of_three_ranks(path, args):
    """What the trainer prints about --replicas if a node has three ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        loaded(path).sharding_options(args, CPU)
    return out.getvalue()


def test_replicas_whose_ranks_are_cut_by_the_border_of_a_node_are_reported(script, capsys):
    """It may happen by chance: --replicas=8 is right for 8 nodes of 8 ranks, and still divides the 56 ranks of 7."""
    args = settings(script, "--shard", "--replicas=2")
    printed, *_ = launch(printed_on_nodes_of_three_ranks, str(script), args, nproc=4)
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
    args = settings(script, *FLAGS_OF_BLOCKS, "--accumulate=4")
    [[whole_run]] = launch(losses_of_blocks, str(script), [args], nproc=1)
    whole_losses, whole_metrics = whole_run

    def run_part(nproc, last_step, *flags):
        """Go on up to ``last_step``, compare the losses, and return the last metrics."""
        args = settings(script, *FLAGS_OF_BLOCKS, f"--checkpoint-dir={tmp_path}", *flags)
        runs_of_rank_0, *_ = launch(losses_of_blocks, str(script), [args], "AdamW", last_step, nproc=nproc)
        [(losses, metrics)] = runs_of_rank_0
        assert max(losses) == last_step
        expected = {step: whole_losses[step] for step in losses}
        assert losses == pytest.approx(expected, rel=1e-3)
        return metrics

    run_part(2, 4, "--accumulate=2")
    run_part(4, 8, "--shard", "--replicas=2", "--resume")
    metrics = run_part(2, 12, "--shard", "--accumulate=2", "--resume")
    assert metrics["val_accuracy"] == pytest.approx(whole_metrics["val_accuracy"], abs=0.02)


def test_a_model_on_the_meta_device_is_initialized_block_by_block(script):
    args = settings(script, "--shard", "--meta", "--max-steps=30", "--dtype=bfloat16")
    assert errors_on_ranks(script, 2, args) == ["none"] * 2


def weights_of_the_script(script):
    """The weights of a model that the script has built and not yet trained."""
    args = settings(script)
    torch.manual_seed(5)
    return loaded(script).build_model(args).state_dict()


def test_a_run_starts_from_weights_and_says_what_matched(script, environment, tmp_path):
    """The file is as torch.compile and DDP name the weights: with two prefixes.

    One of its weights has another shape than in the model, and one is not in the model.
    """
    file = tmp_path / "foreign.pt"
    weights = weights_of_the_script(script)
    weights["3.weight"] = torch.ones(11, 256)
    weights["head.bias"] = torch.ones(3)
    torch.save({f"_orig_mod.module.{name}": weight for name, weight in weights.items()}, file)
    for shard in ("--no-shard", "--shard"):
        command = script_on_ranks(script, 2, shard, "--max-steps=10", f"--init-from={file}")
        status, out, errors, _ = forked(command, environment)
        assert status == 0, errors
        assert "3 of the model's 4 tensors match" in out
        assert "1 not in the model: head.bias" in out
        assert "1 of another shape: 3.weight" in out


def test_a_run_does_not_start_from_weights_of_another_model(script, environment, tmp_path):
    file = tmp_path / "of_another_model.pt"
    torch.save({"other": torch.ones(3)}, file)
    command = script_on_ranks(script, 2, "--max-steps=10", f"--init-from={file}")
    status, _, errors, _ = forked(command, environment)
    assert status != 0
    assert "no tensor of the model is in the file" in errors


def test_training_goes_on_longer_and_at_another_rate_if_allowed(script, folder):
    args = settings_to_go_on(script, folder, "--resume", "--lr=0.05", "--allow-change=max_steps,lr")
    assert error_on_one_rank(script, args) == "none"
    assert (folder / "step_00000012.pt").exists()


# --- what looks equal, and is not -------------------------------------------------------------------------------------


class InitializesItself(nn.Module):
    """A model that initializes its own weights, and a buffer, ``table``, that is in no checkpoint."""

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
    """Initialize all weights and the table, for --meta as well as in the constructor."""
    first_block, second_block = model.blocks
    nn.init.normal_(first_block.weight, std=0.02)
    nn.init.zeros_(first_block.bias)
    nn.init.normal_(second_block.weight, std=0.04)
    nn.init.zeros_(second_block.bias)
    nn.init.normal_(model.last.weight, std=0.3)
    nn.init.constant_(model.last.bias, 0.5)
    model.table.copy_(torch.arange(64.0))


def first_weights_of(path, args, init_weights=None, model_class=InitializesItself):
    """Build a model for training. Returns {name: (mean, standard deviation)} of its weights and buffers, or the error.

    Only rank 0 returns the numbers. ``init_weights`` is taken in place of the script's own.
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
    """Its table is from NumPy, so it is a real tensor even if the model is built on the meta device."""

    def __init__(self):
        super().__init__()
        self.table = torch.from_numpy(np.arange(64, dtype=np.float32))


def test_weights_on_the_meta_device_are_those_that_the_model_draws(script):
    """They are drawn by other generators, so they are equal as samples of one distribution are, in about 15 %."""
    with_ddp = settings(script)
    on_meta = settings(script, "--shard", "--meta")
    expected, _ = launch(first_weights_of, str(script), with_ddp, nproc=2)
    weights, _ = launch(first_weights_of, str(script), on_meta, init_weights, nproc=2)
    assert weights.keys() == expected.keys()
    for name, (mean, deviation) in expected.items():
        tolerance = 0.15 * deviation + 1e-9
        assert weights[name] == pytest.approx((mean, deviation), rel=0.15, abs=tolerance), name


def test_the_meta_device_is_refused_where_a_weight_would_be_garbage(script):
    def init_all_but_the_table(model):
        table = model.table.clone()
        init_weights(model)
        model.table.copy_(table)

    args = settings(script, "--shard", "--meta")
    errors = launch(first_weights_of, str(script), args, nproc=2)
    assert errors == ["--meta needs an init_weights(model) for your build_model."] * 2

    errors = launch(first_weights_of, str(script), args, init_all_but_the_table, nproc=2)
    assert errors == ["rank 0: --meta: init_weights has not set table."] * 2

    [error, _] = launch(first_weights_of, str(script), args, init_weights, WithARealTable, nproc=2)
    assert error == "--meta: build_model has filled table, which init_weights has to do."


def modes_after_training(path, args):
    """Train a model whose first layer, a BatchNorm, is frozen by eval().

    Returns ``training`` of each layer at the end, and the largest running mean of the first one, which begins at 0.
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
    """Train with an ``evaluate`` that calls the model. Returns the dtypes of the logits that it gets."""
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
    dtypes_of_ranks = launch(dtypes_in_evaluate, str(script), args, nproc=2)
    assert dtypes_of_ranks == [{torch.bfloat16}] * 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


def test_blocks_are_found_in_lists_dicts_and_sequences(script):
    find_blocks = loaded(script).find_blocks

    a_list = nn.ModuleList([Block(), Block(), Block()])
    assert len(find_blocks(a_list)) == 3

    list_in_a_dict = nn.ModuleDict({"embed": nn.Embedding(4, 4), "blocks": nn.ModuleList([Block(), Block()])})
    assert len(find_blocks(list_in_a_dict)) == 2

    numbered_dict = nn.ModuleDict({"0": Block(), "1": Block()})
    assert len(find_blocks(numbered_dict)) == 2

    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert len(find_blocks(layers)) == 2

    stages = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(Block(), Block()), nn.Sequential(Block()))
    assert len(find_blocks(stages)) == 3


def test_heads_and_a_single_layer_are_no_blocks(script):
    """A rank may call only some of several heads, and all ranks have to call the same blocks."""
    find_blocks = loaded(script).find_blocks
    heads = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    assert find_blocks(heads) == []
    assert find_blocks(nn.Linear(4, 4)) == []


def test_recompute_without_blocks_or_with_batch_norm_is_refused(script):
    def without_blocks(args):
        return nn.Linear(64, 10)

    def with_batch_norm(args):
        return nn.ModuleList([nn.BatchNorm1d(64)])

    args = settings(script, "--recompute", "--max-steps=10")
    error = error_on_one_rank(script, args, {"build_model": without_blocks})
    assert error.startswith("UsageError: --recompute finds no blocks in the model")
    error = error_on_one_rank(script, args, {"build_model": with_batch_norm})
    assert error.startswith("UsageError: --recompute would update BatchNorm twice")


def error_of_unlike_flags(path, args):
    """Train with another --lr and other --num-workers on rank 1. Returns the error."""
    if dist.get_rank() == 1:
        args.lr = 0.01
        args.num_workers = 1
    [error] = errors_of(path, [args])
    return error


def test_ranks_with_different_flags_are_refused_on_all(script):
    """Another --num-workers is no error: it does not decide what a run trains."""
    args = settings(script, "--max-steps=10")
    errors = launch(error_of_unlike_flags, str(script), args, nproc=2)
    message = "--lr: rank 0 has 0.1, and rank 1 has 0.01. Start all ranks with the same."
    assert errors == [f"UsageError: {message}"] * 2


def load_unlike_data(args):
    """Data whose training set has a sample less on rank 1."""
    size = 200 - dist.get_rank()
    return blank_samples(size), blank_samples(9)


def test_ranks_with_different_data_are_refused_on_all(script):
    errors = errors_on_ranks(script, 2, settings(script, "--max-steps=10"), {"load_data": load_unlike_data})
    message = "training samples: rank 0 has 200, and rank 1 has 199. Start all ranks with the same."
    assert errors == [f"UsageError: {message}"] * 2


# --- a rank that fails says so ----------------------------------------------------------------------------------------


def broken_on_rank_1(script, folder, statement):
    """A copy of the script in which rank 1 runs this statement in its third call of ``loss_sums``."""
    end_of_docstring = '    divides. Names other than "loss" are metrics, for the log.\n    """\n'
    statement_in_third_call = (
        "    loss_sums.calls = getattr(loss_sums, 'calls', 0) + 1\n"
        "    if loss_sums.calls == 3 and dist.get_rank() == 1:\n"
        f"        {statement}\n"
    )
    return changed(script, folder, end_of_docstring, end_of_docstring + statement_in_third_call)


def test_an_error_that_one_rank_finds_is_printed_by_it_and_ends_all(script, environment, tmp_path):
    """In its third step, rank 1 returns no accuracy any more."""
    statement = 'return {"loss": (model(batch[0]).sum(), 1)}'
    path = broken_on_rank_1(script, tmp_path / "one", statement)
    status, _, errors, _ = forked(script_on_ranks(path, 2), environment)
    assert status not in (0, None)
    [error] = re.findall(r"^\[rank 1 on .+\] (UsageError: .+)$", errors, re.M)  # "[rank 1 on gpu07] UsageError: ..."
    assert error.startswith("UsageError: loss_sums returned 1 loss(es) and [], and before 1 and ['accuracy']")


def test_torchrun_shows_the_traceback_of_an_error(script, environment, tmp_path):
    path = broken_on_rank_1(script, tmp_path / "one", 'raise ValueError("broken here")')
    # It runs under torchrun itself, because forked ranks record their errors by other means.
    status, _, errors, left = torchrun(path, 2, environment)
    assert status == 1 and not left
    summary = errors[errors.index("train.py FAILED") :]
    assert "ValueError: broken here" in summary


def assert_ends_with_its_workers(path, environment, message):
    """Train on two ranks with a worker each. The job has to fail with this message, and no process may be left."""
    status, _, errors, left = torchrun(path, 2, environment, "--num-workers=1", "--patience=5", "--backend=gloo")
    assert status == 1 and not left
    assert message in errors


def test_a_rank_with_workers_ends_when_its_loss_fails(script, environment, tmp_path):
    old = "    images, labels = batch\n"
    path = changed(script, tmp_path / "failing", old, '    raise RuntimeError("out of memory")\n')
    assert_ends_with_its_workers(path, environment, "out of memory")


def test_a_rank_ends_when_its_worker_hangs(script, environment, tmp_path):
    """The loader waits for its worker a second less than --patience."""
    old = "    return torch.utils.data.default_collate(samples)\n"
    path = changed(script, tmp_path / "failing", old, "    time.sleep(10**6)\n")
    assert_ends_with_its_workers(path, environment, "DataLoader timed out after 4.0 seconds")


def build_unlike_model(args):
    """A model whose weights are different on each rank, because the seed is the rank."""
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
    for param in model.parameters():
        generator = torch.Generator().manual_seed(dist.get_rank())
        nn.init.normal_(param, generator=generator)
    return model


def compare_replicas(path, args):
    """Build a training whose first weights are different on each rank, and change a weight of rank 3 afterwards.

    The trainer compares the replicas before the change and after it. The first comparison finds nothing, because the
    trainer has made the replicas equal. Returns the sum of each of this rank's weights before the change, and the error
    of the second comparison.
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
    args = settings(script, *flags)
    sums = []
    errors = []
    for sums_of_rank, error in launch(compare_replicas, str(script), args, nproc=4):
        sums.append(sums_of_rank)
        errors.append(error)
    assert sums[0] == sums[2]
    assert sums[1] == sums[3]
    assert errors == [f"at step 0 replicas of the model differ: {problem}"] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_the_sum_of_bits_depends_on_no_order(script, dtype):
    """A sum of floats does: two ranks with the same weights, on GPUs of two models, would seem to differ."""
    sum_of_bits = loaded(script).sum_of_bits
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100_003, dtype=torch.float64, generator=generator).to(dtype)
    total = sum_of_bits(weights)
    assert sum_of_bits(weights.flip(0)) == total

    weights[4711] = -weights[4711]
    assert sum_of_bits(weights) != total


def error_of_a_changed_weight(path, args):
    """Train, and let rank 1 change one of its weights before the second step. Returns the error."""
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
    """Train. Returns the message of a RuntimeError, or "none"."""
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


def weights_after_norms_one_ulp_apart(path, args):
    """Take a step in which ranks 2 and 3, the second replica, see a gradient norm that is one ulp larger.

    This imitates replicas that sum in different orders. Returns the norm that the step returned, and this rank's
    weights after the step.
    """
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    full_tensor = trainer.DTensor.full_tensor

    def one_ulp_larger_on_the_second_replica(norm):
        value = full_tensor(norm)
        if dist.get_rank() >= 2:
            value = torch.nextafter(value, 2 * value)  # the next larger float
        return value

    batch = (torch.ones(12, 64), torch.zeros(12, dtype=torch.int64))
    # The trainer's step calls full_tensor only on the norm, so the patch changes nothing else.
    with mock.patch.object(trainer.DTensor, "full_tensor", one_ulp_larger_on_the_second_replica):
        _, norm = trainer.take_step(training, [batch], step=1, args=args)
    weights = [trainer.local(param).tolist() for param in training.model.parameters()]
    return norm.item(), weights


def test_replicas_clip_with_one_norm(script):
    """Ranks 0 and 2 have the same part of the model, and so do ranks 1 and 3. Their weights have to stay equal."""
    args = settings(script, "--shard", "--replicas=2", "--max-norm=0.01", "--batch-size=48", "--width=8")
    norms_and_weights = launch(weights_after_norms_one_ulp_apart, str(script), args, nproc=4)
    assert norms_and_weights[0] == norms_and_weights[2]
    assert norms_and_weights[1] == norms_and_weights[3]


def error_with_a_file_of_ones_own(path, args, folder):
    """Train with a relative path in --init-from, which is another file on each rank. Returns the error."""
    own_folder = Path(folder, str(dist.get_rank()))
    os.chdir(own_folder)
    [error] = errors_of(path, [args])
    return error


def test_ranks_that_would_begin_with_different_files_are_refused(script, tmp_path):
    for rank in range(2):
        own_folder = tmp_path / str(rank)
        own_folder.mkdir()
        weight = torch.full((256, 64), float(rank))
        torch.save({"0.weight": weight}, own_folder / "first.pt")
    args = settings(script, "--max-steps=10", f"--init-from={tmp_path}/0/first.pt")  # it has to exist
    args.init_from = "first.pt"
    for error in launch(error_with_a_file_of_ones_own, str(script), args, str(tmp_path), nproc=2):
        assert error.startswith("UsageError: the file of --init-from: rank 0 has ")


def error_of_another_order(path, args):
    """Save a training, and resume it with an optimizer that has the model's two parameters in the other order.

    Both have the same shape, so only their order can tell them apart. Returns the text of the error.
    """
    trainer = loaded(path)

    def build_model(args):
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def build_optimizer(model, args):
        first, second = model.parameters()
        return torch.optim.AdamW([first, second])

    def build_reversed_optimizer(model, args):
        first, second = model.parameters()
        return torch.optim.AdamW([second, first])

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
    """Train, and let step 4 be skipped, after which a save is due. Returns the names of the checkpoints at the end."""
    trainer = loaded(path)
    make_losses_nan(trainer, calls=[4])
    trainer.train(args, CPU)
    return [name for name in names_in(Path(args.checkpoint_dir)) if name.startswith("step_")]


def test_the_step_after_a_bad_one_is_saved_in_its_place(script, tmp_path):
    flags = ["--max-steps=7", "--warmup=1", "--save-every=4", f"--checkpoint-dir={tmp_path}"]
    [names] = launch(checkpoints_around_a_skipped_step, str(script), settings(script, *flags), nproc=1)
    assert names == ["step_00000005.pt", "step_00000007.pt"]


def test_a_save_that_came_late_stays_as_the_first_of_its_interval(script, tmp_path):
    """--keep-every=4 keeps the steps 4, 8 and 12, but step 4 was skipped, so step 5 is kept. Step 14 is the newest."""
    flags = ["--max-steps=14", "--warmup=1", "--save-every=2", "--keep=1", "--keep-every=4"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [names] = launch(checkpoints_around_a_skipped_step, str(script), args, nproc=1)
    assert names == ["step_00000005.pt", "step_00000008.pt", "step_00000012.pt", "step_00000014.pt"]


# --- what a resume, a schedule and a scaler must not lose -------------------------------------------------------------


def test_the_rate_rises_to_its_highest_and_falls_to_its_lowest(script):
    """In a warmup of ten steps it rises by a tenth each; in the 40 steps after it, it falls to 0.2."""
    trainer = loaded(script)
    args = settings(script, "--warmup=10", "--min-lr=0.2")

    def factor(step):
        return trainer.lr_factor(step, 50, args)

    assert factor(1) == pytest.approx(0.1)
    assert factor(5) == pytest.approx(0.5)
    assert factor(10) == pytest.approx(1)
    assert factor(11) == pytest.approx(1)
    assert factor(31) == pytest.approx(0.6)
    assert 0.2 < factor(50) < 0.202


def state_of_training(trainer, training):
    """What a checkpoint has beside the weights and the optimizer: four numbers, and the averaged weights."""
    averages = [trainer.local(average).flatten().tolist() for average in training.ema.average.values()]
    return {
        "scale": training.scaler.get_scale(),
        "num_updates": training.ema.num_updates,
        "step": training.step,
        "best_loss": training.best_loss,
        "averages": averages,
    }


def states_before_and_after_a_resume(path, args):
    """Save a training, and resume it. Returns the state of the saved training, and that of the resumed one."""
    trainer = loaded(path)
    saved = trainer.build_training(args, CPU)
    saved.scaler.scale(torch.ones(()))  # without this call, the scaler has no scale yet
    saved.scaler.update(1024.0)
    for average in saved.ema.average.values():
        trainer.local(average).fill_(0.125)
    saved.ema.num_updates = 7
    saved.step = 3
    saved.best_loss = 0.5
    trainer.Checkpoints(args).save(saved)

    resumed = trainer.build_training(args, CPU)
    trainer.Checkpoints(args).load(resumed)
    return state_of_training(trainer, saved), state_of_training(trainer, resumed)


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_a_resume_has_the_scale_the_average_and_the_best_loss(script, tmp_path, shard):
    flags = ["--dtype=float16", "--ema=0.9", "--width=8", "--resume", shard, f"--checkpoint-dir={tmp_path}"]
    states_of_ranks = launch(states_before_and_after_a_resume, str(script), settings(script, *flags), nproc=2)
    for saved, resumed in states_of_ranks:
        assert saved["scale"] == 1024.0
        assert saved["num_updates"] == 7
        assert saved["step"] == 3
        assert saved["best_loss"] == 0.5
        assert resumed == saved


def test_a_good_step_ends_a_row_of_skipped_ones(script):
    """After a good step, two bad ones, a good one and a bad one: how many were skipped, and how many in a row?"""
    skipped = loaded(script).SkippedSteps(CPU)
    totals = []
    rows = []
    longest_rows = []
    for is_finite in (True, False, False, True, False):
        skipped.add(torch.tensor(is_finite))
        totals.append(int(skipped.total))
        rows.append(int(skipped.in_a_row))
        longest_rows.append(int(skipped.longest_row))
    assert totals == [0, 1, 2, 2, 3]
    assert rows == [0, 1, 2, 0, 1]
    assert longest_rows == [0, 1, 2, 2, 2]


def norms_and_changes(path, all_args):
    """Take a first step with each of these settings.

    Returns a pair for each: the norm of the gradient, and the change of all weights as one vector.
    """
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
    [(step_in_float32, step_in_float16)] = launch(norms_and_changes, str(script), [in_float32, in_float16], nproc=1)
    expected_norm, expected_change = step_in_float32
    norm, change = step_in_float16
    assert expected_norm > 0.1  # so a limit of 0.1 clips
    assert norm == pytest.approx(expected_norm, rel=0.01)
    assert (change - expected_change).norm() < 0.02 * expected_change.norm()


def test_each_micro_batch_of_each_rank_has_a_dropout_of_its_own(script):
    """Two ranks with two micro-batches each seed the dropout of step 7 by four different places.

    A micro-batch is numbered among those of all ranks: its own number times the ranks, plus the rank.
    """
    trainer = loaded(script)
    args = settings(script)
    places = []

    def record_place(*place):
        places.append(place)

    trainer.seed_all = record_place
    for rank in range(2):
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_world_size", return_value=2),
        ):
            trainer.seed_micro_batch(7, 0, args)
            trainer.seed_micro_batch(7, 1, args)
    places_of_rank_0 = [("step", 0, 7, 0), ("step", 0, 7, 2)]
    places_of_rank_1 = [("step", 0, 7, 1), ("step", 0, 7, 3)]
    assert places == [*places_of_rank_0, *places_of_rank_1]


def norms_and_lengths(path, all_args):
    """Take a first step with each of these settings.

    Returns a pair for each: the norm of the gradient, and the length of the change of all weights.
    """
    trainer = loaded(path)
    batch = (torch.ones(48, 64), torch.zeros(48, dtype=torch.int64))
    results = []
    for args in all_args:
        training = trainer.build_training(args, CPU)
        before = copies_of(trainer.local(param) for param in training.model.parameters())
        _, norm = trainer.take_step(training, [batch], 1, args)
        after = copies_of(trainer.local(param) for param in training.model.parameters())
        squared_length = torch.zeros(())
        for new, old in zip(after, before, strict=True):
            squared_length += (new - old).square().sum()
        if args.shard:
            dist.all_reduce(squared_length)  # each rank has a part of the weights
        length = squared_length.sqrt()
        results.append((norm.item(), length.item()))
    return results


def test_a_sharded_gradient_is_clipped_by_the_norm_of_the_whole(script):
    """A step of SGD with a clipped gradient is as long as the learning rate times the limit."""
    limit = 0.1
    learning_rate = 0.1
    with_ddp = settings(script, f"--max-norm={limit}", "--no-shard")
    with_fsdp = settings(script, f"--max-norm={limit}", "--shard")
    for step_with_ddp, step_with_fsdp in launch(norms_and_lengths, str(script), [with_ddp, with_fsdp], nproc=2):
        assert step_with_fsdp == pytest.approx(step_with_ddp, rel=1e-4)
        norm, length = step_with_ddp
        assert norm > limit  # so it is clipped
        assert length == pytest.approx(learning_rate * limit, rel=1e-4)


class EpochAsSample(torch.utils.data.Dataset):
    """A data set each of whose samples is the epoch that ``set_epoch`` was last given."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.epoch


def epochs_of_four_steps(path, args, start_step):
    """Read the samples of four steps. Returns for each step the set of the epochs that its samples have."""
    trainer = loaded(path)
    batches = trainer.MicroBatches(EpochAsSample(), args)
    epochs = []
    for micro_batch in trainer.islice(batches.of_map_style(start_step), 4):
        epochs.append(set(batches.read_samples(micro_batch)))
    return epochs


def test_a_data_set_that_shuffles_by_epoch_hears_of_each_one(script):
    """An epoch has two steps, of 8 of the 16 samples."""
    args = settings(script, "--batch-size=8")
    [epochs] = launch(epochs_of_four_steps, str(script), args, 0, nproc=1)
    assert epochs == [{0}, {0}, {1}, {1}]
    [epochs_from_step_5] = launch(epochs_of_four_steps, str(script), args, 5, nproc=1)
    assert epochs_from_step_5 == [{2}, {3}, {3}, {4}]


def error_from_rank_0(path):
    """Let a function fail on rank 0. Returns the name and message of the error that this rank raises then."""
    trainer = loaded(path)

    def fail():
        raise trainer.NotFiniteError("step 7 is not finite")

    try:
        trainer.from_rank0(fail)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_rank_0_is_the_same_error_on_all(script):
    errors = launch(error_from_rank_0, str(script), nproc=2)
    assert errors == ["NotFiniteError: step 7 is not finite"] * 2


def test_a_signal_prints_where_a_rank_is(script, environment):
    """SIGUSR2 prints a traceback, and the run goes on."""
    run = Forked(script_alone(script, "--epochs=5000", "--log-every=5"), environment)
    wait_for_text(run, "out", "step 5:", seconds=120)
    os.kill(run.pid, signal.SIGUSR2)
    wait_for_text(run, "errors", "most recent call first", seconds=60)

    os.kill(run.pid, signal.SIGTERM)
    status, out, _, _ = run.end()
    assert "nothing is saved" in out
    assert status == 1


class SlowOnRank1(torch.utils.data.Dataset):
    """A data set from which rank 1 needs some seconds to read a sample."""

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
    """Train with samples that come late on rank 1. Returns what was logged: [{name: value}]."""
    trainer = loaded(path)

    def load_data(args):
        return SlowOnRank1(seconds), None

    trainer.load_data = load_data
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines]


def test_a_line_names_the_rank_that_waits_for_its_data(script):
    args = settings(script, "--max-steps=6", "--warmup=1", "--batch-size=4", "--log-every=3")
    seconds = 0.3
    [lines, _] = launch(lines_of_a_slow_rank, str(script), args, seconds, nproc=2)
    line_of_step_3, line_of_step_6 = lines
    for line in (line_of_step_3, line_of_step_6):
        assert line["data_wait_rank"] == 1
        assert line["data_wait"] > seconds


def test_a_rank_whose_worker_hangs_is_the_one_that_fails(script):
    """Its loader waits for four fifths of --patience, so it fails before rank 0, which waits for rank 1."""
    flags = ["--max-steps=6", "--warmup=1", "--batch-size=4", "--num-workers=1", "--patience=20"]
    with pytest.raises(RankError) as caught:
        launch(train_with_a_worker_that_hangs, str(script), settings(script, *flags), nproc=2)
    assert "rank 1" in str(caught.value)
    assert "DataLoader timed out after 16.0 seconds" in str(caught.value)


def train_with_a_worker_that_hangs(path, args):
    """Train with a worker of rank 1 that takes 40 seconds for a sample. Only the loader's own error is raised."""
    try:
        lines_of_a_slow_rank(path, args, seconds=40)
    except RuntimeError as error:
        if "DataLoader timed out" in str(error):
            raise RuntimeError(str(error)) from None


# --- what is sent, and when -------------------------------------------------------------------------------------------


def all_reduces_of_gradients(path, args):
    """Take one step. Returns the numbers of the buckets of gradients that DDP sent in it, in order."""
    trainer = loaded(path)
    training = trainer.build_training(args, CPU)
    buckets = []

    def first_tensor(future):
        [tensor] = future.value()
        return tensor

    def send_and_record(state, bucket):
        """DDP calls this in place of its own all-reduce, and takes the bucket's new content from the future."""
        buckets.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(first_tensor)

    training.module.register_comm_hook(None, send_and_record)
    batch = (torch.ones(12, 64), torch.zeros(12, dtype=torch.int64))
    micro_batches = [batch] * args.accumulate
    trainer.take_step(training, micro_batches, 1, args)
    return buckets


def test_ddp_sends_the_gradients_once_in_a_step(script):
    """The model is so small that all its gradients are in one bucket, number 0."""
    args = settings(script, "--accumulate=3")
    buckets_of_ranks = launch(all_reduces_of_gradients, str(script), args, nproc=2)
    assert buckets_of_ranks == [[0], [0]]


# --- two losses, metrics of one's own, no validation ------------------------------------------------------------------


class Boxes(torch.utils.data.Dataset):
    """Images [4], each with its number of boxes, 0 to 3."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 4, generator=generator)
        self.num_boxes = torch.randint(4, (size,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.num_boxes[index]


def losses_of_boxes(path, args):
    """Train with a loss of two terms that count different things: images and boxes.

    Returns {step: loss}, and the metrics of the last validation.
    """
    trainer = loaded(path)

    def load_data(args):
        return Boxes(60), Boxes(23)

    def build_model(args):
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def loss_sums(model, batch, args):
        images, num_boxes = batch
        outputs = model(images)  # [batch, 2]
        image_losses = (outputs[:, 0] - 1).square()
        box_losses = (outputs[:, 1] - 2).square()
        term_of_images = (image_losses.sum(), len(images))
        term_of_boxes = ((box_losses * num_boxes).sum(), num_boxes.sum())
        return {"loss": [term_of_images, term_of_boxes], "box_loss": term_of_boxes}

    def evaluate(model, batches, args):
        num_batches = len(list(batches))
        return {"batches": float(num_batches)}

    trainer.load_data = load_data
    trainer.build_model = build_model
    trainer.loss_sums = loss_sums
    trainer.evaluate = evaluate
    lines, metrics = train_and_log(trainer, args)
    return losses_of_steps(lines), metrics


def test_two_losses_with_different_counts_are_exact_over_micro_batches_and_ranks(script):
    """All ways to cut a batch of 12 into four micro-batches have the same losses."""

    def run_on_ranks(nproc, *flags):
        all_flags = ["--max-steps=10", "--warmup=1", "--batch-size=12", "--log-every=1", *flags]
        run_of_rank_0, *_ = launch(losses_of_boxes, str(script), settings(script, *all_flags), nproc=nproc)
        return run_of_rank_0

    losses_of_one_rank, metrics_of_one_rank = run_on_ranks(1, "--accumulate=4")
    assert metrics_of_one_rank["val_batches"] >= 1
    other_runs = [
        run_on_ranks(2, "--accumulate=2"),
        run_on_ranks(4),
        run_on_ranks(2, "--accumulate=2", "--shard"),
    ]
    for losses, metrics in other_runs:
        assert losses == pytest.approx(losses_of_one_rank, rel=1e-5)
        assert metrics["val_loss"] == pytest.approx(metrics_of_one_rank["val_loss"], rel=1e-5)
        assert metrics["val_batches"] >= 1


def test_there_may_be_no_validation_set(script):
    def load_data(args):
        return blank_samples(200), None

    replacements = {"load_data": load_data}
    args = settings(script, "--max-steps=12", "--batch-size=20")
    assert errors_on_ranks(script, 2, args, replacements) == ["none"] * 2

    with_keep_best = settings(script, "--max-steps=12", "--keep-best")
    error = error_on_one_rank(script, with_keep_best, replacements)
    assert error == "UsageError: --keep-best needs a validation set."


# --- workers, the average, the best -----------------------------------------------------------------------------------


def forks_and_collectives(path, args):
    """Train. Returns what happened, in order: "fork" for each fork, "collective" for each call that communicates."""
    trainer = loaded(path)
    events = []

    def record_fork():
        events.append("fork")

    def recorded(collective):
        """The same function, which records that it is called."""

        def record_and_call(*arguments, **options):
            events.append("collective")
            return collective(*arguments, **options)

        return record_and_call

    class RecordedDDP(trainer.DDP):
        def __init__(self, *arguments, **options):
            events.append("collective")
            super().__init__(*arguments, **options)

    os.register_at_fork(before=record_fork)
    with (
        mock.patch.object(dist, "all_reduce", recorded(dist.all_reduce)),
        mock.patch.object(dist, "broadcast", recorded(dist.broadcast)),
        mock.patch.object(dist, "broadcast_object_list", recorded(dist.broadcast_object_list)),
        mock.patch.object(dist, "new_group", recorded(dist.new_group)),
        mock.patch.object(trainer, "DDP", RecordedDDP),
    ):
        trainer.train(args, CPU)
    return events


def test_no_worker_is_forked_beside_a_collective(script, tmp_path):
    """Each rank forks its four workers, two for training and two for validations, before it communicates."""
    flags = ["--max-steps=4", "--warmup=2", "--val-every=2", "--num-workers=2", f"--checkpoint-dir={tmp_path}"]
    for events in launch(forks_and_collectives, str(script), settings(script, *flags), nproc=2):
        first_events = events[:4]
        later_events = events[4:]
        assert first_events == ["fork"] * 4
        assert set(later_events) == {"collective"}
        assert len(later_events) > 16


def train_with_an_average(path, args):
    """Train. Returns {step: validation loss} as logged, and the validation loss of the weights in the file at the end.

    With --ema these are the averaged weights.
    """
    trainer = loaded(path)
    lines, _ = train_and_log(trainer, args)
    val_losses = {step: values["val_loss"] for step, values in lines if "val_loss" in values}
    weights = torch.load(Path(args.checkpoint_dir, "weights.pt"), weights_only=True)
    model = trainer.build_model(args)
    model.load_state_dict(weights)
    return val_losses, validation_loss(trainer, model, args)


def validation_loss(trainer, model, args):
    """The mean loss of a model over the validation set, in one batch."""
    _, val_set = trainer.load_data(args)
    images, labels = val_set.tensors
    logits = model.eval()(images)
    return nn.functional.cross_entropy(logits, labels).item()


@pytest.mark.parametrize("shard", ["--shard", "--no-shard"])
def test_the_average_is_validated_and_the_best_is_kept(script, tmp_path, shard):
    """``best.pt`` has the weights of the validation with the lowest loss, which are averaged ones, too."""
    flags = ["--max-steps=12", "--warmup=2", "--val-every=3", "--ema=0.9", "--keep-best", "--lr=0.5", shard]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [(val_losses, loss_of_average), _] = launch(train_with_an_average, str(script), args, nproc=2)
    assert list(val_losses) == [3, 6, 9, 12]
    assert val_losses[12] == pytest.approx(loss_of_average, rel=1e-4)

    best_file = tmp_path / "best.pt"
    best = torch.load(best_file, weights_only=True)
    assert sorted(best) == ["best_loss", "model", "step"]
    assert best["best_loss"] == min(val_losses.values())
    assert best["best_loss"] == val_losses[best["step"]]
    [loss_of_best] = launch(loss_of_weights, str(script), args, str(best_file), nproc=1)
    assert loss_of_best == pytest.approx(best["best_loss"], rel=1e-4)

    # Of a checkpoint, too, --init-from takes the averaged weights.
    newest_file = tmp_path / "step_00000012.pt"
    averages = torch.load(newest_file, weights_only=True)["ema"]
    weights = loaded(script).read_weights(str(newest_file))
    for name, average in averages.items():
        assert torch.equal(weights[name], average), name


def loss_of_weights(path, args, file):
    """The validation loss of the weights with which ``--init-from`` begins."""
    trainer = loaded(path)
    model = trainer.build_model(args)
    trainer.load_first_weights(model, file)
    return validation_loss(trainer, model, args)


# --- the speed, the log, a compiler -----------------------------------------------------------------------------------


def speeds_on_a_simulated_device(path, args):
    """Train on a simulated device. Returns {step: samples per second} as logged.

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

    trainer.time = device  # a Device has perf_counter and monotonic, which are the host's clock
    trainer.take_step = take_step
    trainer.Checkpoints.save = save
    trainer.validate = validate
    trainer.StopRequest.agreed = ask_whether_to_stop
    trainer.stop_if_diverged = do_nothing
    trainer.SkippedSteps.add = do_nothing
    trainer.LossModule.means = mean_losses
    lines, _ = train_and_log(trainer, args)
    return {step: values["samples/s"] for step, values in lines if "samples/s" in values}


def test_the_speed_is_that_of_steps_alone(script, tmp_path):
    """A step of ten samples takes a second, so the speed is 10 samples/s, whatever else takes time.

    A clock that is read before the device is done counts the steps in its queue as a save's, or as a wait's.
    """
    flags = ["--batch-size=10", "--max-steps=20", "--log-every=4", "--save-every=3", "--val-every=7"]
    args = settings(script, *flags, f"--checkpoint-dir={tmp_path}")
    [speeds] = launch(speeds_on_a_simulated_device, str(script), args, nproc=1)
    assert speeds == {4: 10, 8: 10, 12: 10, 16: 10, 20: 10}


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
    """Train with two tokens a sample. Returns what was logged of the steps: [{name: value}]."""
    trainer = loaded(path)

    def load_data(args):
        return Boxes(60), Boxes(23)

    def build_model(args):
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def loss_sums(model, batch, args):
        images, _ = batch
        loss = model(images).square().sum()
        num_tokens = 2 * len(images)
        return {"loss": (loss, num_tokens)}

    trainer.load_data = load_data
    trainer.build_model = build_model
    trainer.loss_sums = loss_sums
    lines, _ = train_and_log(trainer, args)
    return [values for _, values in lines if is_of_training(values)]


# An open_log whose file is named by the process. Each line that is logged is a line of the step and the names.
OPEN_LOG_OF_PROCESS = """def open_log(args):
    file = open(f"log{os.getpid()}", "w")

    def log(step, values):
        print(step, *values, file=file, flush=True)

    return log


"""


def test_a_logger_has_one_run(script, environment, tmp_path):
    """Of two ranks one opens a log, and so there is one file."""
    text = script.read_text()
    own_open_log = text[text.index("def open_log(args") : text.index("def evaluate(")]
    path = changed(script, tmp_path / "logging", own_open_log, OPEN_LOG_OF_PROCESS)
    flags = ["--max-steps=4", "--warmup=2", "--log-every=2", "--log-to=csv", "--log-folder=logs"]
    status, _, errors, _ = forked(script_on_ranks(path, 2, *flags), environment)
    assert status == 0, errors

    [log] = path.parent.glob("log[0-9]*")
    lines = log.read_text().splitlines()
    steps_and_first_names = [line.split()[:2] for line in lines]
    assert steps_and_first_names == [["2", "loss"], ["4", "loss"], ["4", "val_loss"]]

    # The trainer's own log is a table of (step, name, value).
    with open(path.parent / "logs" / "log.csv") as file:
        rows = list(csv.reader(file))
    steps_with_a_loss = [step for step, name, _ in rows if name in ("loss", "val_loss")]
    assert steps_with_a_loss == ["2", "4", "4"]
    assert all(float(value) >= 0 for _, _, value in rows)


def ids_of_wandb(path, all_args):
    """Open the loggers of some runs, with a fake wandb. Returns the id that each run gives to ``wandb.init``.

    Two runs with the same id are one run at Weights & Biases.
    """
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
    """Train with a log whose disk is full. Returns the steps with which it was called, and the last step of the run."""
    trainer = loaded(path)
    logged_steps = []

    def log_on_a_full_disk(step, values):
        logged_steps.append(step)
        raise OSError(28, "No space left on device")

    def open_log(args):
        return log_on_a_full_disk

    _, metrics = trainer.train(args, CPU, open_log)
    return logged_steps, metrics["step"]


def test_a_log_that_fails_does_not_end_the_run(script):
    """The log is not called again after it has failed at step 4."""
    args = settings(script, "--max-steps=12", "--log-every=4")
    [(logged_steps, last_step)] = launch(steps_with_a_log_that_fails, str(script), args, nproc=1)
    assert logged_steps == [4]
    assert last_step == 12


def test_the_docstring_says_how_to_leave_time_for_a_save(script):
    _, docstring, _ = script.read_text().split('"""', maxsplit=2)
    assert "--shutdown-timeout=300 --signals-to-handle=SIGTERM,SIGINT,SIGUSR1" in docstring


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_model_that_inductor_compiled_has_the_same_losses(script, environment, tmp_path):
    """Its weights are saved under the names of the model, without a prefix of the compiler or of DDP."""
    with_cache = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def out_of_run(*flags):
        all_flags = ["--max-steps=5", "--warmup=2", "--width=16", "--dtype=bfloat16", *flags]
        status, out, errors, _ = forked(script_on_ranks(script, 2, *all_flags), with_cache, timeout=600)
        assert status == 0, errors
        return out

    expected = result(out_of_run())
    compiled = result(out_of_run("--compile-with=inductor", f"--checkpoint-dir={tmp_path / 'runs'}"))
    assert compiled == pytest.approx(expected, abs=0.02)

    checkpoint = torch.load(tmp_path / "runs" / "step_00000005.pt", weights_only=True)
    assert "0.weight" in checkpoint["model"]
