"""How long the scripts of chapters 10, 13 and 16 wait for a slow step or save; and the clock of chapter 16 is true."""

import re
import sys
from unittest import mock

import cloudpickle
import pytest
import torch
from forked import Forked, forked, script_on_ranks
from loading import Device, loaded
from scripting import CHAPTERS, export, stand_alone

from helpers.export.chapters import find_notebook
from helpers.export.facts import facts_at
from helpers.ranks.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # importing it takes a rank a second

pytestmark = pytest.mark.ranks

# Code that makes a function of a script slow: on rank 0, its third call sends SIGTERM to torchrun and then takes 12
# seconds, which is longer than StopRequest once waited.
SLOW_THIRD_CALL = """
fast_function = {name}
number_of_calls = 0


def slow_function(*arguments, **keywords):
    global number_of_calls
    number_of_calls += 1
    if number_of_calls == 3 and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(12)
    return fast_function(*arguments, **keywords)


{name} = slow_function
"""
# The last line of a rank. An agent that forks its ranks, and was signalled, waits for their end.
LEAVE_AT_ONCE = "    os._exit(0)\n"

FACTS = {path: facts_at(path).script for path in CHAPTERS}
CHAPTERS_THAT_SAVE = [path for path in CHAPTERS if FACTS[path].saves_with]  # the name of the function that saves


def with_code_before_main(text, code):
    """The text of a script with code in front of its last lines, so that it can replace functions of the script."""
    last_lines = 'if __name__ == "__main__":'
    assert text.count(last_lines) == 1
    return text.replace(last_lines, f"{code}\n\n{last_lines}")


@pytest.fixture
def alone(tmp_path):
    """Environment variables for a script that must run without this project."""
    (tmp_path / "path").mkdir()
    return stand_alone(tmp_path / "path")


def start_with_slow_function(name, text, folder, environment):
    """Start two ranks of a script in a new folder. A call of the function with this name is slow. Returns a Forked."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(with_code_before_main(text, SLOW_THIRD_CALL.format(name=name)) + LEAVE_AT_ONCE)
    return Forked(script_on_ranks(script, 2, "--save-every=2", "--checkpoint-dir=kept"), environment)


def check_stop(ended, checkpoint_folder):
    """Check that a run has stopped at SIGTERM, and has saved a complete checkpoint of the step at which it stopped."""
    stop = re.search(r"^stopped by SIGTERM at step (\d+): ", ended.out, re.MULTILINE)
    assert stop, f"{ended.out}{ended.errors}"
    step = int(stop[1])
    assert not ended.left

    files = sorted(path.name for path in checkpoint_folder.iterdir())
    assert files[-1] == "stopped"
    assert files[-2].startswith(f"step_{step:08}")
    half_written_files = [file for file in files if file.startswith(".") or "part" in file]
    assert half_written_files == []


@pytest.mark.daily
@pytest.mark.parametrize("notebook", CHAPTERS_THAT_SAVE, ids=lambda path: path.stem)
def test_a_step_or_save_of_12_seconds_is_finished_after_sigterm(notebook, alone, tmp_path):
    text = export(notebook, tmp_path).read_text()
    save = FACTS[notebook].saves_with
    run_with_slow_step = start_with_slow_function("take_step", text, tmp_path / "slow_step", alone)
    run_with_slow_save = start_with_slow_function(save, text, tmp_path / "slow_save", alone)
    check_stop(run_with_slow_step.end(240), tmp_path / "slow_step" / "kept")
    check_stop(run_with_slow_save.end(240), tmp_path / "slow_save" / "kept")


# Code that makes the saves of rank 1 take 100 seconds.
SLOW_SAVE = """
import time

fast_save = save_run


def save_run(*arguments):
    if dist.get_rank() == 1:
        time.sleep(100)
    fast_save(*arguments)
"""


def test_chapter_10_waits_for_a_slow_save_for_its_patience(alone, tmp_path):
    """Rank 0 waits in the save's first collective. Without the flag it would wait for ten minutes."""
    (tmp_path / "kept").mkdir()
    script = export(find_notebook("10"), tmp_path)
    script.write_text(with_code_before_main(script.read_text(), SLOW_SAVE))
    ended = forked(script_on_ranks(script, 2, "--patience=5", "--checkpoint-dir=kept"), alone, timeout=60)
    assert ended.status == 1
    assert not ended.left
    assert "Timed out waiting 5000ms" in ended.errors


def logged_by_a_simulated_clock(path, flags):
    """Train with the script of chapter 16 on a simulated device, on which a step takes a second, and a save an hour.

    The device has a queue: the host goes on while it works. Returns what the script logs, as a list of dictionaries,
    and the MFU that belongs to a step of one second.
    """
    script = loaded(path)
    device = Device()
    logged = []

    def take_step(*arguments):
        device.step()
        return torch.ones(()), device

    def save_run(*arguments):
        device.wait()
        device.hour()

    def start_log(folder, begun):
        def log(step, values):
            logged.append({"seconds": values["seconds"], "mfu": values["mfu"]})

        return log

    script.time = device
    script.take_step = take_step
    script.save_run = save_run
    script.mean_loss = device.wait
    with (
        mock.patch("sys.argv", ["capstone", *flags]),
        mock.patch.object(torch, "get_device_module", lambda name: device),
    ):
        args = script.parse_args()
        cpu = torch.device("cpu")
        script.train(args, script.load_data(cpu), cpu, start_log)
    return logged, script.mfu(1, args)


def test_a_step_lasts_until_the_device_has_done_it(tmp_path):
    """A clock that is read before makes a step as short as its launch, or a save as long as the steps in its queue."""
    script = export("16", tmp_path)
    flags = ["--steps=12", "--log-every=4", "--save-every=3", f"--checkpoint-dir={tmp_path / 'kept'}"]
    [(logged, mfu_of_a_second)] = launch(logged_by_a_simulated_clock, str(script), flags, nproc=1)
    assert logged == [{"seconds": 1, "mfu": mfu_of_a_second}] * 3
