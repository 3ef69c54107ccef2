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
    line = [sys.executable, "-m", "helpers", "plan", job]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    for name in vars(Conventions()):  # each is named in the output
        assert re.search(rf"\b{name} \S", done.stdout), name
    words = ("stage 0", "stage 7", "tp all_gather", "bubble", "MFU 51.39%, HFU 52.77%", "goodput", "cost", "try next")
    assert [word for word in words if word not in done.stdout] == []
    assert max(map(len, done.stdout.splitlines())) < 260

    status, out, _ = helpers("plan", job, "--json")
    plan = json.loads(out)
    assert status == 0 and plan["conventions"] == vars(Conventions(flops="gemm", states="zero"))
    assert round(100 * plan["measured"]["mfu"], 1) == 51.4 and round(100 * plan["measured"]["hfu"], 1) == 52.8
    assert plan["step"]["low"] < 13.75 < plan["step"]["high"]
    assert plan["step"]["bubble"] == 7 / (3 * 64)
    stages = plan["memory"]["stages"]
    assert len(stages) == 8 and all(stage["total"] < 80e9 for stage in stages) and plan["memory"]["fits"]
    assert plan["run"]["cost"] == pytest.approx(64 * 24 * plan["run"]["days_with_failures"] * 2)
    assert plan["run"]["days_with_failures"] == pytest.approx(plan["run"]["days"] / plan["run"]["goodput"])
    low, high = plan["run"]["failures_between"]
    assert low < plan["run"]["failures"] < high


def test_help_names_each_field_and_its_values(helpers):
    status, out, _ = helpers("plan", "--help")
    words = "".join(out.split())  # argparse breaks lines where it likes
    assert status == 0
    for part in ("recompute=none|selective|sac|full", "outer_layers", "power_limit", "logits=eager|freed|stored"):
        assert part in words


def test_a_limit_of_power_is_reported(helpers, tmp_path):
    cluster = tmp_path / "limited.toml"
    cluster.write_text('[cluster]\npreset = "h100"\npower_limit = 500\n')
    line = ("plan", "gpt2", cluster, "--layout", "dp=8,recompute=sac")
    _, out, _ = helpers(*line)
    assert "989 TFLOP/s each, 884.1 at 500 W" in out and "recompute sac" in out and "a limit of power" in out
    assert json.loads(helpers(*line, "--json")[1])["cluster"]["power_limit"] == 500


def test_names_and_a_search(helpers):
    status, out, _ = helpers("plan", "llama3-8b", "h100", "--gpus", 64, "--layout", "batch=512", "--json")
    search = json.loads(out)
    counts = sum(search["refused"].values()) + sum(search["too_large"].values())
    assert status == 0 and search["fits"] == search["tried"] - counts
    seconds = [fit["seconds"] for fit in search["ranked"]]
    assert seconds == sorted(seconds) and len(seconds) == 10
    assert all(fit["layout"]["batch"] == 512 and fit["bytes"] <= 80e9 for fit in search["ranked"])


def test_a_name_is_never_a_file_and_a_file_has_any_name(helpers, job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ("gpt2", "h100", "--layout", "dp=8")
    alone = helpers("plan", *line)
    for name in line[:2]:
        (tmp_path / name).write_text("a stray file")
    assert helpers("plan", *line) == alone and alone[0] == 0
    cluster = tmp_path / "measured"
    cluster.write_text('[cluster]\npreset = "h100"\nnodes = 8\n')
    status, out, _ = helpers("plan", job.rename("job"), cluster, "--layout", "dtype=bfloat16")
    assert status == 0 and "64 x h100 in 8 nodes" in out and "dtype" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("gpt2 h100", "a search needs batch, the samples"),
        ("gpt2", "no cluster is given"),
        ("gpt2 h100 --layout =8", "'=8' has no name"),
        ("gpt2 h100 --layout dp8", "'dp8' has no value"),
        ("gpt2 h100 --layout dp=8,dp=4", "dp is given twice"),
        ("gpt2 h100 --gpus 16 --layout dp=8", "= 8 is not the cluster's 16 GPUs"),
        ("gpt2 h100 --layout dp=8 --job tokens=1e400", "at most 1e+24"),
        ("gpt2 h100 --layout dp=8 --conventions peak=x", "peak is 'x'"),
        ("gpt2 h100 --gpus 8 --layout batch=x", "batch is 'x'"),
        ("gpt2 h100 --layout batch=8 --job tokens=1e9", "a search does not plan the --job"),
        ("gpt2 missing.toml --layout dp=8", "or a cluster: a100"),
        ("missing.toml", "missing.toml: No such file"),
        ("notebooks h100 --layout dp=8", "'notebooks' is not a model"),
        ("text.toml", "layout is 'dp=8'"),
        ("unknown.toml --layout dp=8", "has a table 'clusters'.\nGive these tables: model, cluster"),
        ("broken.toml", "is not TOML"),
        ("latin.toml", "is not TOML"),
        ("empty.toml", "no model is given"),
    ],
)
def test_errors_in_two_lines(helpers, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
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
    assert (status, out) == (1, "") and words in errors and errors.startswith("error: ")
    assert len(errors.splitlines()) == 2


@pytest.mark.parametrize(
    ("model", "layout", "parts"),
    [
        ("gpt2", "batch=8,interleave=3,pp=8", ["no layout of gpt2 can be.", "None can be: tp x pp x cp"]),
        ("llama3-405b", "batch=8", ["llama3-405b fits.", "most of it optimizer", "or offload = true."]),
        ("llama3-405b", "batch=8,recompute=none,pp=1", ["or recompute = full", "leave out what is given: pp."]),
    ],
)
def test_a_search_that_finds_none_fails_and_says_why(helpers, model, layout, parts):
    line = [model, "h100", "--layout", layout, "--gpus", "8", "--search"]
    status, _, errors = helpers("plan", *line)
    assert status == 1 and all(words in errors for words in parts) and len(errors.splitlines()) == 2
    status, out, same = helpers("plan", *line, "--json")
    search = json.loads(out)
    assert (status, same) == (1, errors)
    assert (search["fits"], search["ranked"]) == (0, []) and search["tried"] > 0


def test_sizes_win_over_a_preset_and_over_a_file(helpers, job):
    status, out, _ = helpers("plan", "llama3-8b", "h100", "--gpus=8", "--sizes=layers=16,seq=4096", "--layout=dp=8")
    assert status == 0 and out.startswith("llama3-8b: 4,540,469,248 parameters")
    assert helpers("plan", job, "--sizes=layers=48")[1].startswith("gpt-175b: 87,635,091,456 parameters")
    status, _, errors = helpers("plan", "llama3-8b", "h100", "--sizes=depth=3", "--layout=dp=8")
    assert status == 1 and "the model has no field 'depth'" in errors
