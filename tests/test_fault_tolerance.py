"""The jobs of chapters 13 and 16 when tools kill their ranks, and chapter 13's when a scheduler sends a signal."""

import contextlib
import random
import re

import leftovers
import pytest
import soak

from helpers.export import chapters

pytestmark = pytest.mark.slow

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
def torchrun(tmp_path):
    """torchrun's own agent, which starts ranks that import torch. What it has started ends with the test."""
    (tmp_path / "path").mkdir()
    with contextlib.closing(soak.Agent(tmp_path / "path", forking=False)) as agent:
        yield agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    with contextlib.closing(soak.Agent(tmp_path_factory.mktemp("agent"))) as agent:
        yield agent


@pytest.mark.timeout(900)
def test_25_kills_change_no_bit(capsys):
    assert soak.main(["--chapter", "13", "--kills", "25", "--seed", "9", "--forked"]) == 0
    assert re.search(r"^25 kills .* 0 jobs differ or failed", capsys.readouterr().out, re.MULTILINE)


def test_the_harness_sees_weights_that_differ(torchrun, tmp_path, capsys):
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "forgetful.py"
    script.write_text(FORGETFUL)
    assert soak.kill_many(soak.Restarts, 1, random.randrange(100), torchrun, script, tmp_path, 1) >= 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.timeout(900)
def test_25_kills_on_changing_meshes_lose_no_step(capsys):
    assert soak.main(["--chapter", "16", "--kills", "25", "--seed", "53"]) == 0  # draws all meshes
    assert re.search(r"^25 kills .* 0 jobs differ or failed", capsys.readouterr().out, re.MULTILINE)


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
    [script] = chapters.export("16", tmp_path / "script")
    true, false, says = LIES[lie]
    text = script.read_text()
    assert text.count(true) == 1
    script.write_text(text.replace(true, false))
    meshes = {(1, 1, 1): 1, (2, 1, 1): 1}
    assert soak.kill_many(soak.Meshes, 2, 16, agent, script, tmp_path, meshes) >= 1
    assert re.search(says, capsys.readouterr().out)


def test_a_start_on_a_mesh_removes_what_a_kill_left(agent, tmp_path):
    [script] = chapters.export("16", tmp_path / "script")
    folder = tmp_path / "run"
    flags = [*soak.Meshes.FLAGS, "--checkpoint-dir", str(folder), "--resume"]
    agent.start(script, 1, *flags)
    agent.end()
    names = sorted(path.name for path in folder.iterdir())
    for left in (".step_00000010", ".step_00000018.part"):  # half removed, half written
        (folder / left).mkdir()
    agent.start(script, 1, *flags)  # there is nothing left to train, or to save
    assert agent.end() == 0 and agent.printed(f"going on from step_{soak.Meshes.STEPS:08}")
    assert agent.printed("result ") and not agent.printed("step ")
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_signal_to_the_agent_stops_all_ranks_with_a_snapshot(torchrun, tmp_path):
    [script] = chapters.export("13", tmp_path / "script")
    folder = tmp_path / "snapshots"
    torchrun.start(script, 2, "--epochs", "2000", "--save-every", "20", "--checkpoint-dir", str(folder))
    assert leftovers.soon(lambda: list(folder.glob("step_*")), 120)
    torchrun.process.terminate()
    assert torchrun.end(60) == 1
    step = re.fullmatch(r"stopped by SIGTERM at step (\d+): the same command goes on", torchrun.lines[-1])[1]
    names = sorted(path.name for path in folder.iterdir())
    assert names[-2:] == [f"step_{int(step):08}.pt", "stopped"] and all(name.startswith("st") for name in names)
