"""The jobs of chapters 13 and 16 when a tool kills their ranks, and what the tool says of jobs that lose something."""

import contextlib
import re

import pytest
import soak

from helpers.export import chapters

pytestmark = [pytest.mark.slow, pytest.mark.daily, pytest.mark.timeout(900)]


@pytest.mark.parametrize("flags", ["--chapter 13 --seed 9", "--chapter 16 --seed 53"])  # 53 draws all meshes
def test_25_kills_change_no_bit_and_lose_no_step(flags, capsys):
    assert soak.main([*flags.split(), "--kills", "25"]) == 0
    assert re.search(r"^25 kills .* nothing was lost", capsys.readouterr().out, re.MULTILINE)


def test_a_job_that_forgets_momentum_is_noticed(tmp_path, capsys):
    [script] = chapters.export(soak.Restarts.CHAPTER, tmp_path / "script")
    text = script.read_text()
    line = 'self.optimizer.load_state_dict(state["optimizer"])'
    assert line in text
    script.write_text(text.replace(line, "pass"))
    with contextlib.closing(soak.Agent(tmp_path)) as agent:
        assert soak.kill_many(soak.Restarts, 2, 16, agent, script, tmp_path) >= 1
    assert "DIFFERENT" in capsys.readouterr().out
