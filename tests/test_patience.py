"""How long the scripts of chapters 10, 13 and 16 wait for a slow step or save; and the clock of chapter 16 is true."""

import re
import sys
from pathlib import Path
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

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

# The third call of a function sends SIGTERM to torchrun and takes longer than StopRequest once waited.
SLOW = """
fast, calls = {name}, []


def slow(*arguments, **keywords):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(12)
    return fast(*arguments, **keywords)


{name} = slow
"""
LEAVE = "    os._exit(0)\n"  # an agent that forks its ranks, and was signalled, waits for their end
SAVES = {path: facts_at(path).script.saves_with for path in CHAPTERS if facts_at(path).script.saves_with}


def start(text, slow_function, folder, environment):
    """Two ranks of a script, in which this function is slow."""
    folder.mkdir()
    path = folder / "train.py"
    last_lines = 'if __name__ == "__main__":'
    slow = SLOW.format(name=slow_function)
    path.write_text(text.replace(last_lines, f"{slow}\n\n{last_lines}") + LEAVE)
    return Forked(script_on_ranks(path, 2, "--save-every=2", "--checkpoint-dir=kept"), environment)


@pytest.mark.daily
@pytest.mark.parametrize("notebook", SAVES, ids=lambda path: path.stem)
def test_a_step_or_save_of_12_seconds_is_finished_after_sigterm(notebook, tmp_path):
    (tmp_path / "path").mkdir()
    environment = stand_alone(tmp_path / "path")
    text = export(notebook, tmp_path).read_text()
    runs = {name: start(text, name, tmp_path / name, environment) for name in ("take_step", SAVES[notebook])}
    for name, run in runs.items():
        _, out, errors, left = run.end(240)
        stop = re.search(r"^stopped by SIGTERM at step (\d+): ", out, re.MULTILINE)
        assert stop, f"{name}: {out}{errors}"
        assert not left
        files = sorted(path.name for path in Path(tmp_path, name, "kept").iterdir())
        *_, checkpoint, mark = files
        assert checkpoint.startswith(f"step_{int(stop[1]):08}") and mark == "stopped"
        assert [file for file in files if file.startswith(".") or "part" in file] == []


SLOW_SAVE = """
import time

fast_save = save_run


def save_run(*arguments):
    if dist.get_rank() == 1:
        time.sleep(100)
    fast_save(*arguments)
"""


def test_chapter_10_waits_for_a_slow_save_for_its_patience(tmp_path):
    """Rank 0 waits in the save's first collective. Without the flag it would wait for ten minutes."""
    (tmp_path / "path").mkdir()
    (tmp_path / "kept").mkdir()
    script = export(find_notebook("10"), tmp_path)
    last_lines = 'if __name__ == "__main__":'
    script.write_text(script.read_text().replace(last_lines, f"{SLOW_SAVE}\n\n{last_lines}"))
    work = script_on_ranks(script, 2, "--patience=5", "--checkpoint-dir=kept")
    status, _, errors, left = forked(work, stand_alone(tmp_path / "path"), timeout=60)
    assert status == 1 and not left
    assert "Timed out waiting 5000ms" in errors


def times_by_a_slow_clock(path, flags):
    """What a run tells of its steps' seconds if a step takes a second, on a queue, and a save an hour."""
    capstone = loaded(path)
    device = Device()
    seconds = []

    def step(*arguments):
        device.step()
        return torch.ones(()), device

    def save(*arguments):
        device.wait()
        device.hour()

    def log(folder, begun):
        return lambda step, values: seconds.append((values["seconds"], values["mfu"]))

    capstone.time = device
    capstone.take_step = step
    capstone.save_run = save
    capstone.mean_loss = device.wait
    with (
        mock.patch("sys.argv", ["capstone", *flags]),
        mock.patch.object(torch, "get_device_module", lambda name: device),
    ):
        args = capstone.parse_args()
        cpu = torch.device("cpu")
        capstone.train(args, capstone.load_data(cpu), cpu, log)
    return seconds, capstone.mfu(1, args)


def test_a_step_lasts_until_the_device_has_done_it(tmp_path):
    """A clock that is read before makes a step as short as its launch, or a save as long as the steps in its queue."""
    script = export("16", tmp_path)
    flags = ["--steps=12", "--log-every=4", "--save-every=3", f"--checkpoint-dir={tmp_path / 'kept'}"]
    [(seconds, mfu)] = launch(times_by_a_slow_clock, str(script), flags, nproc=1)
    assert seconds == [(1, mfu)] * 3
