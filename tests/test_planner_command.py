"""``python -m helpers plan``: what it prints for files, names and searches, and for wrong ones."""

import json

import pytest

from helpers.planner.conventions import Conventions

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

[conventions]
flops = "gemm"
states = "zero"
"""


@pytest.fixture
def job(tmp_path):
    """The path of a file with JOB."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def without_line_breaks(text):
    return " ".join(text.split())


def test_a_file_becomes_a_plan(helpers, job):
    status, out, _ = helpers("plan", job)
    assert status == 0
    text = without_line_breaks(out)
    for convention in vars(Conventions()):
        assert f"{convention} " in text
    for words in ("of stage 0", "of stage 7", "tp all_gather", "bubble", "MFU", "goodput", "cost", "what binds"):
        assert words in text


def test_a_file_becomes_a_plan_in_json(helpers, job):
    status, out, _ = helpers("plan", job, "--json")
    assert status == 0
    plan = json.loads(out)
    assert plan["conventions"] == vars(Conventions(flops="gemm", states="zero"))

    memory = plan["memory"]
    stages = 8
    assert len(memory["stages"]) == stages
    assert memory["fits"]

    step = plan["step"]
    measured_seconds = 13.75  # Korthikanti et al. 2022, table 5
    assert step["low"] < measured_seconds < step["high"]
    interleave = 3
    micro_batches = 64
    assert step["bubble"] == (stages - 1) / (interleave * micro_batches)

    run = plan["run"]
    gpus = 64
    price_per_gpu_hour = 2
    assert run["days_with_failures"] == pytest.approx(run["days"] / run["goodput"])
    assert run["cost"] == pytest.approx(gpus * 24 * run["days_with_failures"] * price_per_gpu_hour)


def test_a_layout_without_sizes_is_searched_for(helpers):
    status, out, _ = helpers("plan", "llama3-8b", "h100", "--gpus", 64, "--layout", "batch=512", "--json")
    assert status == 0
    search = json.loads(out)
    assert search["fits"] == search["tried"] - search["refused"] - search["too_large"]

    ranked = search["ranked"]
    assert len(ranked) == 10
    seconds = [fit["step"]["seconds"] for fit in ranked]
    assert seconds == sorted(seconds)
    for fit in ranked:
        assert fit["layout"]["batch"] == 512
        assert fit["bytes"] <= 0.75 * 80e9


@pytest.mark.parametrize(
    ("layout", "answer"),
    [
        ("recompute=sac", "fits 47.6 GiB 64% of the 74.5 GiB of a GPU, most of it output a step"),
        ("recompute=none", "may not fit 67.9 GiB 91% of the 74.5 GiB of a GPU, most of it activations; a plan"),
        ("micro_batch=2", "does not fit 124.2 GiB 167% of the 74.5 GiB of a GPU"),
    ],
)
def test_a_plan_says_whether_its_memory_is_safe(helpers, layout, answer):
    """A plan that fills more than three quarters of the GPU's memory may need all of it, and says so."""
    status, out, _ = helpers("plan", "llama3-8b", "h100", "--layout", f"dp=16,zero=3,batch=128,{layout}")
    assert status == 0
    assert answer in without_line_breaks(out)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        ("0.75", "54% of the GPU"),
        ("1", "91% of the GPU, and 100% is the limit of a plan"),
    ],
)
def test_a_search_may_fill_the_share_of_memory_that_is_given(helpers, share, words):
    arguments = ("plan", "llama3-8b", "h100", "--gpus", 16, "--layout", "batch=128,zero=3")
    status, out, _ = helpers(*arguments, "--memory-share", share)
    assert status == 0
    assert words in out


def test_the_command_line_wins_over_the_file(helpers, job, tmp_path):
    cluster = tmp_path / "cluster without a suffix"
    cluster.write_text('[cluster]\npreset = "h100"\nnodes = 8\npower_limit = 500\n')
    status, out, _ = helpers("plan", job, cluster, "--layout", "dtype=bfloat16", "--sizes", "layers=48")
    assert status == 0
    text = without_line_breaks(out)
    assert "gpt-175b on 64 x h100" in text
    assert "989 TFLOP/s 884.1 at 500 W" in text
    assert "parameters 87,635,091,456" in text  # of 48 layers
    assert "dtype" not in text  # bfloat16 is the default, which is not shown.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nosuch", "'nosuch' is not a model that the planner knows, nor a file.\nGive a TOML file, or gpt2"),
        ("gpt2", "no cluster is given"),
        ("gpt2 h100", "a search needs batch, the samples"),
        ("gpt2 h100 --layout foo=1", "the layout has no field 'foo'.\nIts fields: dp, tp"),
        ("gpt2 h100 --layout dp8", "'dp8' has no value"),
        ("gpt2 h100 --gpus 16 --layout dp=8", "= 8 is not the cluster's 16 GPUs"),
        ("text.toml", "layout is 'dp=8'"),
        ("unknown.toml --layout dp=8", "has a table 'clusters'.\nGive these tables: model, cluster"),
        ("broken.toml", "is not TOML"),
        ("gpt2 h100 --gpus 8 --layout batch=8,ep=2", "no layout of gpt2 can be.\nNone can be: "),
        ("llama3-405b h100 --gpus 8 --layout batch=8,zero=3", "most of it optimizer. Give more GPUs, recompute = full"),
    ],
)
def test_what_is_wrong_is_named_in_two_lines(helpers, tmp_path, monkeypatch, arguments, words):
    # Files that some of the arguments name:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.toml").write_text('layout = "dp=8"\nmodel = "gpt2"')
    (tmp_path / "unknown.toml").write_text('model = "gpt2"\n[clusters]\nnodes = 2')
    (tmp_path / "broken.toml").write_text('model = "gpt2"\n[layout')

    status, out, errors = helpers("plan", *arguments.split())

    assert (status, out) == (1, "")
    assert errors.startswith("error: ")
    assert words in errors
    assert len(errors.splitlines()) == 2
