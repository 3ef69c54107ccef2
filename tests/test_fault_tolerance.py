"""The jobs of chapters 13 and 16 when tools kill their ranks, and chapter 13's when a scheduler sends a signal."""

import contextlib
import re
import subprocess
import sys

import leftovers
import pytest
import soak
from forked import AT_ADDRESS, TORCHRUN
from scripting import stand_alone

from helpers.export import chapters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    with contextlib.closing(soak.Agent(tmp_path_factory.mktemp("agent"))) as agent:
        yield agent


@pytest.mark.daily
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flags", ["--chapter 13 --seed 9", "--chapter 16 --seed 53"])  # 53 draws all meshes
def test_25_kills_change_no_bit_and_lose_no_step(flags, capsys):
    assert soak.main([*flags.split(), "--kills", "25"]) == 0
    assert re.search(r"^25 kills .* nothing was lost", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.daily
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "true", "false", "says"),
    [
        (soak.Restarts, 'self.optimizer.load_state_dict(state["optimizer"])', "pass", "DIFFERENT"),
        (soak.Meshes, "load(state,", "load({'model_state_dict': state['model_state_dict']},", "printed"),
        (soak.Meshes, "return int(path.name[5:]) if", "return int(path.name[5:]) + 1 if", "the steps that it kept"),
        (soak.Meshes, "checkpoints(folder)[-1:]", "checkpoints(folder)[:1]", "it went on from step|without a result"),
        (soak.Meshes, 'f".step_{step:08}.part"', 'f"step_{step:08}"', "have their names before they are complete"),
    ],
    ids=["forgets momentum", "forgets moments", "skips a step", "goes on from an old one", "names half a save"],
)
def test_the_harness_sees_a_job_that(kind, true, false, says, agent, tmp_path, capsys):
    """A line of its script is changed, and the harness must say so."""
    [script] = chapters.export(kind.CHAPTER, tmp_path / "script")
    text = script.read_text()
    assert text.count(true) == 1
    script.write_text(text.replace(true, false))
    meshes = [{(1, 1, 1): 1, (2, 1, 1): 1}] if kind is soak.Meshes else []
    assert soak.kill_many(kind, 2, 16, agent, script, tmp_path, *meshes) == 1
    assert re.search(says, capsys.readouterr().out)


def test_a_start_on_a_mesh_removes_what_a_kill_left(agent, tmp_path):
    [script] = chapters.export("16", tmp_path / "script")
    folder = tmp_path / "run"
    flags = [*soak.Meshes.FLAGS, "--checkpoint-dir", str(folder), "--resume"]
    agent.start(script, 1, *flags)
    agent.end()
    names = sorted(path.name for path in folder.iterdir())
    for leftover in (".step_00000010", ".step_00000018.part"):  # half removed, half written
        (folder / leftover).mkdir()
    agent.start(script, 1, *flags)  # there is nothing left to train, or to save
    assert agent.end() == 0 and agent.printed(f"going on from step_{soak.Meshes.STEPS:08}")
    assert agent.printed("result ") and not agent.printed("step ")
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_signal_to_the_agent_stops_all_ranks_with_a_snapshot(tmp_path):
    [script] = chapters.export("13", tmp_path / "script")
    folder = tmp_path / "snapshots"
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", *AT_ADDRESS, script, "--epochs", "2000"]
    command += ["--save-every", "20", "--checkpoint-dir", folder]
    torchrun = subprocess.Popen(command, env=stand_alone(tmp_path), stdout=subprocess.PIPE, text=True)
    assert leftovers.wait_until(lambda: list(folder.glob("step_*")), 120)
    torchrun.terminate()
    out, _ = torchrun.communicate(timeout=120)  # torchrun gives a stuck rank 30 s
    assert torchrun.returncode == 1
    last_line = out.splitlines()[-1]
    step = re.fullmatch(r"stopped by SIGTERM at step (\d+): the same command goes on", last_line)[1]
    names = sorted(path.name for path in folder.iterdir())
    assert names[-2:] == [f"step_{int(step):08}.pt", "stopped"] and all(name.startswith("st") for name in names)
