"""The jobs of chapters 13 and 16 when tools kill their ranks, and chapter 13's when a scheduler sends a signal."""

import contextlib
import random
import re
import subprocess
import sys
from pathlib import Path

import kills
import kills_on_meshes
import leftovers
import pytest

from helpers.export import chapters

pytestmark = pytest.mark.harnesses

FORGETFUL = """\
import os, sys, time, uuid
from pathlib import Path

Path(sys.argv[sys.argv.index("--checkpoint-dir") + 1]).mkdir(exist_ok=True)
if os.environ["RANK"] == "0":
    print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    time.sleep(2)
    print("weights", uuid.uuid4().hex)
    print("result {}")
"""


@pytest.fixture
def job(tmp_path):
    """A function that starts chapter 13's job on two ranks. The job ends with the test."""
    jobs = []

    def start(*flags):
        (tmp_path / "path").mkdir()
        [script] = chapters.export(kills.CHAPTER, tmp_path / "script")
        jobs.append(kills.Job(script, 2, kills.alone(tmp_path / "path"), flags))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    with contextlib.closing(kills_on_meshes.Agent(kills.alone(folder), folder / "errors.txt")) as started:
        yield started


@pytest.mark.timeout(900)
def test_25_kills_change_no_bit():
    command = [sys.executable, Path(kills.__file__), "--kills", "25", "--seed", "9", "--forked"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^25 kills .* 0 jobs differ or failed", done.stdout, re.MULTILINE), done.stdout


def test_the_harness_sees_weights_that_differ(tmp_path, capsys):
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "forgetful.py"
    script.write_text(FORGETFUL)
    assert kills.kill_many(1, 1, random.randrange(100), tmp_path, script) >= 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.timeout(900)
def test_25_kills_on_changing_meshes_lose_no_step():
    command = [sys.executable, Path(kills_on_meshes.__file__), "--kills", "25", "--seed", "53"]  # draws all meshes
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^25 kills .* 0 jobs differ or failed", done.stdout, re.MULTILINE), done.stdout


LIES = {  # what a line of chapter 16's script becomes, and what the harness must say
    "forgets the optimizer": (
        "dcp.load(state, checkpoint_id=path)",
        "dcp.load({'model_state_dict': state['model_state_dict']}, checkpoint_id=path)",
        r"printed|DIFFERENT",
    ),
    "skips a step": (
        "return int(path.name[5:]) if path",
        "return int(path.name[5:]) + 1 if path",
        "the steps that it kept",
    ),
    "goes on from an old one": (
        "checkpoints(folder)[-1:]",
        "checkpoints(folder)[:1]",
        "it went on from step|without a result",
    ),
    "names half a checkpoint": (
        'Path(folder, f".step_{step:08}.part")',
        'Path(folder, f"step_{step:08}")',
        "have their names before they are complete",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lie", LIES)
def test_the_harness_on_meshes_sees_a_job_that(lie, agent, tmp_path, capsys):
    [script] = chapters.export(kills_on_meshes.CHAPTER, tmp_path / "script")
    true, false, says = LIES[lie]
    text = script.read_text()
    assert text.count(true) == 1
    script.write_text(text.replace(true, false))
    assert kills_on_meshes.kill_many(2, 16, tmp_path, script, agent, {(1, 1, 1): 1, (2, 1, 1): 1}) >= 1
    assert re.search(says, capsys.readouterr().out)


def test_a_start_on_a_mesh_removes_what_a_kill_left(agent, tmp_path):
    [script] = chapters.export(kills_on_meshes.CHAPTER, tmp_path / "script")
    folder = tmp_path / "run"
    agent.start(script, (1, 1, 1), folder)
    agent.end()
    names = sorted(path.name for path in folder.iterdir())
    for left in (".step_00000010", ".step_00000018.part"):  # half removed, half written
        (folder / left).mkdir()
    agent.start(script, (1, 1, 1), folder)  # there is nothing left to train, or to save
    begun, trained, result = agent.end()
    assert begun == kills_on_meshes.STEPS and not trained and result
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_signal_to_the_agent_stops_all_ranks_with_a_snapshot(job, tmp_path):
    folder = tmp_path / "snapshots"
    running = job("--epochs", "2000", "--save-every", "20", "--checkpoint-dir", str(folder))
    assert leftovers.soon(lambda: list(folder.glob("step_*")), 120)
    running.process.terminate()
    assert running.ended_within(60) and running.process.returncode == 1
    running.reader.join(60)
    step = re.fullmatch(r"stopped by SIGTERM at step (\d+): the same command goes on", running.lines[-1][1])[1]
    names = sorted(path.name for path in folder.iterdir())
    assert names[-2:] == [f"step_{int(step):08}.pt", "stopped"] and all(name.startswith("st") for name in names)
    assert leftovers.soon(lambda: not leftovers.processes(running.mark))
