"""The planner: published rows, refusals, memory by stage, failures, and the command. Nothing here starts a rank."""

import math
from pathlib import Path

import pytest

from helpers.planner import failures, memory, rates
from helpers.planner import model as models
from helpers.planner.cluster import PRESETS as CLUSTERS
from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.model import PlanError, model_of
from helpers.planner.published import TARGETS, reproduce, rows_of
from helpers.runtime.models import PixelTransformer

ROOT = Path(__file__).parents[1]
ROWS = rows_of(ROOT / "book" / "recorded" / "published.csv")


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_published_row(row):
    computed, error = reproduce(row)
    assert error <= TARGETS[row["target"]], f"{computed} for {row['published']} {row['unit']}"


@pytest.mark.parametrize("row", ROWS, ids=[row["what"] for row in ROWS])
def test_a_row_that_is_a_tenth_off_is_noticed(row):
    digits = row["published"].partition(".")[2]
    wrong = f"{float(row['published']) * 1.13:.{len(digits) + 2}f}"
    assert reproduce({**row, "published": wrong})[1] > TARGETS[row["target"]]


def test_rows_name_their_sources():
    keys = (ROOT / "book" / "references.bib").read_text()
    for row in ROWS:
        source = row["source"].split()[0]
        assert f"{{{source}," in keys or "#" in source, source


LLAMA_V1 = (  # The Llama 3 paper's first version, table 4, last row
    "gpus = 16384, tp = 8, cp = 16, pp = 16, dp = 4, seq = 131072, batch_per_dp = 16, tokens_per_batch = 16e6, "
    "tflops = 380e12, peak = 989e12"
)
MEGASCALE = "gpus = 12288, mfu = 0.552, peak = 312e12, aggregate = 2166.3e15, tflops = 0.0"


@pytest.mark.parametrize(
    "inputs, names",
    [
        (LLAMA_V1, ["tp x pp x cp x dp and gpus are 8192 and 16384", "tokens_per_batch are 8.38861e+06 and 1.6e+07"]),
        (MEGASCALE, ["gpus x mfu x peak and aggregate are 2.116"]),
        ("model = 'gpt-175b', parameters = 145.6e9", ["the model's shape and parameters are 1.74616e+11"]),
        ("batch = 64, seq = 2048, seconds = 2.00, tokens_per_second = 32768.0", ["batch x seq / seconds"]),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(inputs, names):
    row = {"quantity": "share of peak", "inputs": inputs, "published": "38", "unit": "%", "target": "formula"}
    with pytest.raises(PlanError) as refused:
        reproduce(row)
    for name in names:
        assert name in str(refused.value)
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("name", models.PRESETS)
def test_tensors_are_the_parameters(name):
    model = model_of(name)
    tensors = [tensor for layer in range(model.layers) for tensor in model.tensors(layer)] + model.tensors()
    assert sum(tensor.rows * tensor.columns for tensor in tensors) == model.parameters()


def test_the_books_model_is_counted():
    real = PixelTransformer(width=48, layers=3, heads=4, levels=5)
    model = model_of({"preset": "pixels", "width": 48, "layers": 3, "vocab": 5})
    assert model.parameters() == sum(parameter.numel() for parameter in real.parameters())


KNOWN = {  # read off the models' published weights
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_of_published_weights(name):
    assert model_of(name).parameters() == KNOWN[name]


def test_megatrons_count_of_flops():
    model = model_of("gpt-175b")
    l, h, s, v = model.layers, model.width, model.seq, model.vocab  # noqa: E741
    assert model.flops_per_token("gemm") == pytest.approx(72 * l * h**2 * (1 + s / (6 * h) + v / (12 * h * l)))
    again = 96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert model.flops_per_token("gemm", "full") == pytest.approx(again)
    selective = 72 * l * h**2 * (1 + s / (3 * h) + v / (12 * h * l))
    assert model.flops_per_token("gemm", "selective") == pytest.approx(selective)


REFUSED = {
    "heads over tp": (lambda: Layout(tp=16, dp=1).check(model_of("gpt2")), "12 heads do not divide by tp = 16"),
    "layers over stages": (lambda: Layout(pp=16).check(model_of("gpt2")), "12 layers cannot fill 16 stages"),
    "layers that do not divide": (lambda: Layout(pp=5).check(model_of("gpt2")), "12 layers do not divide into 5"),
    "a batch that does not divide": (lambda: Layout(dp=4, micro_batch=2, batch=20), "a batch of 20 does not divide"),
    "experts without experts": (lambda: Layout(dp=8, ep=8).check(model_of("gpt2")), "0 experts do not divide"),
    "ep over experts": (lambda: Layout(dp=16, ep=16).check(model_of("mixtral-8x7b")), "8 experts do not divide by ep"),
    "ep over ranks": (lambda: Layout(dp=4, ep=8), "ep = 8 does not divide dp x cp = 4"),
    "shard": (lambda: Layout(dp=8, zero=3, shard=3), "shard = 3 does not divide"),
    "interleaved without stages": (lambda: Layout(interleave=2), "interleave = 2 needs stages"),
    "another number of GPUs": (
        lambda: Layout(dp=4).check(model_of("gpt2"), cluster_of("a100", 8)),
        "= 4 is not the cluster's 8 GPUs",
    ),
    "kv_heads": (
        lambda: Layout(tp=3).check(model_of({"preset": "llama3-8b", "heads": 24, "head_width": 128})),
        "8 kv_heads neither divide by tp = 3",
    ),
    "tokens over cp": (lambda: Layout(cp=3).check(model_of("gpt2")), "1024 tokens do not divide into 3 pieces"),
    "a type without a peak": (
        lambda: Layout(dp=8, dtype="float8").check(model_of("gpt2"), cluster_of("a100", 8)),
        "'float8' is not a type",
    ),
    "a name": (lambda: model_of("gpt5"), "'gpt5' is not a model"),
    "a field": (lambda: model_of({"depth": 3}), "no field 'depth'"),
    "a number": (lambda: model_of({"layers": 0, "width": 1, "heads": 1, "vocab": 1}), "layers is 0"),
    "nodes": (lambda: cluster_of("h100", 12), "12 GPUs are not full nodes of 8"),
    "a convention": (lambda: Conventions(flops="7N"), "the convention flops is '7N'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_two_lines(case):
    make, says = REFUSED[case]
    with pytest.raises(PlanError) as refused:
        make()
    said = str(refused.value)
    assert says in said
    assert len(said.splitlines()) == 2 and said.splitlines()[1].startswith(("Give", "Its fields", "Add"))


def test_stages_do_not_divide_the_first_stages_activations():
    model = model_of("gpt-22b")
    one = memory.stage_memory(model, Layout(batch=64), Conventions(), 0)["activations"]
    stages = memory.memory(model, Layout(pp=8, batch=64), Conventions())
    assert stages[0]["activations"] == one
    assert [stage["activations"] / one for stage in stages] == [(8 - stage) / 8 for stage in range(8)]


@pytest.mark.parametrize("pp, interleave", [(4, 2), (8, 3)])
def test_interleaving_adds_to_the_first_stage(pp, interleave):
    layout = Layout(pp=pp, batch=8 * pp, interleave=interleave)
    assert memory.in_flight(layout, 0) == pytest.approx(pp * (1 + (pp - 1) / (pp * interleave)))


def test_gpipe_holds_all_micro_batches():
    assert memory.in_flight(Layout(pp=4, batch=32, schedule="gpipe"), 0) == 32


def test_sharding_rounds_up():
    """What fully_shard really does on 2048 x 8 ranks, as tests/test_planner_trace.py sees: 43.8 % above N/W."""
    model = model_of("llama3-70b")
    held = memory.shared_parameters(model, Layout(dp=2048, tp=8, zero=3), 0)
    assert held == 6_193_796
    assert held / (model.parameters() / 16384) == pytest.approx(1.438, abs=1e-3)
    assert (
        memory.shared_parameters(model, Layout(dp=2048, tp=8, zero=3), 0, "even") < 1.001 * model.parameters() / 16384
    )


def test_states_of_all_stages_are_the_model():
    model, layout = model_of("llama3-70b"), Layout(pp=8, tp=8, dp=2, batch=16)
    here = sum(memory.stage_parameters(model, layout, stage) for stage in range(8))
    norms = (2 * model.layers + 1) * model.width  # every tensor-parallel rank holds all of these
    assert here == (model.parameters() - norms) / 8 + norms


def test_poisson():
    low, high = failures.poisson_interval(3)
    assert (round(low, 3), round(high, 3)) == (0.619, 8.767)  # Garwood's table
    assert failures.poisson_interval(0)[0] == 0
    low, high = failures.poisson_counts(100)
    assert low < 100 < high and high - low == pytest.approx(4 * math.sqrt(100), rel=0.1)


def test_the_checkpoint_interval_is_the_best_one():
    save, nodes, rate = 60, 2048, 6.5e-3
    best = failures.checkpoint_interval(save, nodes, rate)
    assert best == pytest.approx(failures.young_interval(save, 3600 * failures.mttf_hours(nodes, rate)))
    kept = [failures.goodput(nodes, rate, 300, every, save) for every in (best / 3, best, 3 * best)]
    assert max(kept) == kept[1]
    assert failures.goodput(100_000, rate, 7200, best, save) == 0


def test_bubble_by_both_conventions():
    assert rates.bubble(8, 8) == 0.875 and rates.bubble(8, 8, relative_to="total") == 7 / 15


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters(name):
    cluster = cluster_of(name, 64)
    assert cluster.gpus == 64 and cluster.peak() > 1e14
