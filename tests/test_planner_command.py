"""``python -m helpers plan``: files, names and searches, and what it says of wrong ones."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.planner.conventions import Conventions

ROOT = Path(__file__).parents[1]
JOB = """
model = "gpt-175b"

[cluster]
preset = "a100"
nodes = 8
price_per_gpu_hour = 2.0

[layout]
tp = 8
pp = 8
batch = 64
interleave = 3
recompute = "selective"
attention = "scores"
sequence_parallel = true
dtype = "float16"

[job]
tokens = 3e11
step_seconds = 13.75

[conventions]
flops = "gemm"
states = "zero"
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_a_file_becomes_a_plan(helpers, job):
    command = [sys.executable, "-m", "helpers", "plan", job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for name in vars(Conventions()):
        assert re.search(rf"\b{name} \S", text), name
    for words in ("of stage 0", "of stage 7", "tp all_gather", "bubble", "measured MFU 51.39 %", "measured HFU 52.77 %",
                  "goodput", "cost", "what binds", "try next"):  # fmt: skip
        assert words in text
    assert max(len(line) for line in done.stdout.splitlines()) < 300

    status, out, _ = helpers("plan", job, "--json")
    plan = json.loads(out)
    assert status == 0 and plan["conventions"] == vars(Conventions(flops="gemm", states="zero"))
    assert plan["measured"]["mfu"] == pytest.approx(0.514, abs=5e-4)
    assert plan["measured"]["hfu"] == pytest.approx(0.528, abs=5e-4)
    assert plan["step"]["low"] < 13.75 < plan["step"]["high"]
    assert plan["step"]["bubble"] == 7 / (3 * 64)
    assert len(plan["memory"]["stages"]) == 8 and plan["memory"]["fits"]
    run = plan["run"]
    assert run["cost"] == pytest.approx(64 * 24 * run["days_with_failures"] * 2)
    assert run["days_with_failures"] == pytest.approx(run["days"] / run["goodput"])


def test_help_names_each_field_and_its_values(helpers):
    status, out, _ = helpers("plan", "--help")
    words = "".join(out.split())  # argparse breaks lines where it likes
    assert status == 0
    for part in ("recompute=none|selective|sac|full", "outer_layers", "power_limit", "logits=eager|freed|stored"):
        assert part in words


def test_a_limit_of_power_is_reported(helpers, tmp_path):
    cluster = tmp_path / "limited.toml"
    cluster.write_text('[cluster]\npreset = "h100"\npower_limit = 500\n')
    _, out, _ = helpers("plan", "gpt2", cluster, "--layout", "dp=8,recompute=sac")
    text = " ".join(out.split())
    assert "989 TFLOP/s 884.1 at 500 W" in text
    assert "recompute sac" in text and "a limit of power" in text


def test_a_layout_without_sizes_is_searched_for(helpers):
    status, out, _ = helpers("plan", "llama3-8b", "h100", "--gpus", 64, "--layout", "batch=512", "--json")
    search = json.loads(out)
    others = sum(search["refused"].values()) + sum(search["too_large"].values())
    assert status == 0 and search["fits"] == search["tried"] - others
    seconds = [fit["seconds"] for fit in search["ranked"]]
    assert seconds == sorted(seconds) and len(seconds) == 10
    for fit in search["ranked"]:
        assert fit["layout"]["batch"] == 512 and fit["bytes"] <= 80e9


def test_a_presets_name_is_never_taken_for_a_file(helpers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("plan", "gpt2", "h100", "--layout", "dp=8")
    before = helpers(*command)
    (tmp_path / "gpt2").write_text("a stray file")
    (tmp_path / "h100").write_text("a stray file")
    assert helpers(*command) == before and before[0] == 0


def test_the_command_line_wins_over_the_file(helpers, job, tmp_path):
    cluster = tmp_path / "cluster without a suffix"
    cluster.write_text('[cluster]\npreset = "h100"\nnodes = 8\n')
    status, out, _ = helpers("plan", job, cluster, "--layout", "dtype=bfloat16", "--sizes", "layers=48")
    text = " ".join(out.split())
    assert status == 0 and "gpt-175b on 64 x h100" in text and "nodes 8" in text
    assert "parameters 87,635,091,456" in text and "dtype" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nosuch", "'nosuch' is not a model that the planner knows, nor a file.\nGive a TOML file, or gpt2"),
        (
            "gpt2 missing.toml --layout dp=8",
            "is not a cluster that the planner knows, nor a file.\nGive a TOML file, or a1",
        ),
        ("gpt2", "no cluster is given"),
        ("gpt2 h100", "a search needs batch, the samples"),
        ("gpt2 h100 --layout foo=1", "the layout has no field 'foo'.\nIts fields: dp, tp"),
        ("gpt2 h100 --layout dp=8 --sizes depth=3", "the model has no field 'depth'"),
        ("gpt2 h100 --layout =8", "'=8' has no name"),
        ("gpt2 h100 --layout dp8", "'dp8' has no value"),
        ("gpt2 h100 --layout dp=8,dp=4", "dp is given twice"),
        ("gpt2 h100 --gpus 16 --layout dp=8", "= 8 is not the cluster's 16 GPUs"),
        ("gpt2 h100 --layout batch=8 --job tokens=1e9", "a search does not plan the --job"),
        ("text.toml", "layout is 'dp=8'"),
        ("unknown.toml --layout dp=8", "has a table 'clusters'.\nGive these tables: model, cluster"),
        ("broken.toml", "is not TOML"),
        ("latin.toml", "is not TOML"),
        ("empty.toml", "no model is given"),
    ],
)
def test_what_is_wrong_is_named_in_two_lines(helpers, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    files = {
        "text": 'layout = "dp=8"\nmodel = "gpt2"',
        "unknown": 'model = "gpt2"\n[clusters]\nnodes = 2',
        "broken": 'model = "gpt2"\n[layout',
        "latin": 'model = "caf\xe9"',
        "empty": "",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text, encoding="latin-1")
    status, out, errors = helpers("plan", *arguments.split())
    assert (status, out) == (1, "")
    assert words in errors and errors.startswith("error: ") and len(errors.splitlines()) == 2


@pytest.mark.parametrize(
    ("model", "layout", "parts"),
    [
        ("gpt2", "batch=8,interleave=3,pp=8", ["no layout of gpt2 can be.", "None can be: tp x pp x cp"]),
        ("llama3-405b", "batch=8", ["llama3-405b fits.", "most of it optimizer", "or offload = true."]),
        ("llama3-405b", "batch=8,recompute=none,pp=1", ["or recompute = full", "leave out what is given: pp."]),
    ],
)
def test_a_search_that_finds_no_layout_says_why(helpers, model, layout, parts):
    status, _, errors = helpers("plan", model, "h100", "--layout", layout, "--gpus", "8", "--search")
    assert status == 1 and len(errors.splitlines()) == 2
    for words in parts:
        assert words in errors
