"""The planner: published rows, refusals, memory by stage, failures and plans. Nothing here starts a rank."""

import math
from pathlib import Path

import pytest

from helpers.planner import failures, memory, rates
from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.experiments.published import TARGETS, reproduce, rows_of
from helpers.planner.layout import Layout
from helpers.planner.model import model_of
from helpers.planner.plan import plan
from helpers.planner.records import PlanError
from helpers.planner.report import lines

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("row", rows_of(), ids=lambda row: row["what"])
def test_a_published_row_has_a_source_and_a_tenth_off_is_noticed(row):
    digits = row["published"].partition(".")[2]
    wrong = f"{float(row['published']) * 1.13:.{len(digits) + 2}f}"
    assert reproduce({**row, "published": wrong})[1] > TARGETS[row["target"]]
    source = row["source"].split()[0]
    assert "#" in source or f"{{{source}," in (ROOT / "book" / "references.bib").read_text()


@pytest.mark.parametrize(
    "inputs, words",
    [
        # The digits of other columns, such as c, give no slack.
        ("gpus = 12288, mfu = 0.552, peak = 312e12, aggregate = 2166.3e15, c = 0.1", "gpus x mfu x peak and aggregate"),
        ("model = 'gpt-175b', parameters = 145.6e9", "the model's shape and parameters are 1.74616e+11"),
        ("gpus = 1000, tp = 2, pp = 1, dp = 499", "tp x pp x cp x dp and gpus are 998 and 1000"),
        ("batch = 64, seq = 2048, seconds = 2.00, tokens_per_second = 32768.0", "batch x seq / seconds"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(inputs, words):
    row = {"quantity": "share of peak", "inputs": inputs, "published": "38", "unit": "%", "target": "formula"}
    with pytest.raises(PlanError) as refusal:
        reproduce(row)
    assert words in str(refusal.value) and len(str(refusal.value).splitlines()) == 2


KNOWN = {  # read off the models' published weights
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


def test_parameters_of_published_weights():
    assert {name: model_of(name).parameters() for name in KNOWN} == KNOWN


def test_megatrons_count_of_flops():
    model = model_of("gpt-175b")
    l, h, s, v = model.layers, model.width, model.seq, model.vocab  # noqa: E741
    assert model.flops_per_token("gemm") == pytest.approx(72 * l * h**2 * (1 + s / (6 * h) + v / (12 * h * l)))
    again = 96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert model.flops_per_token("gemm", "full") == pytest.approx(again)
    selective = 72 * l * h**2 * (1 + s / (3 * h) + v / (12 * h * l))
    assert model.flops_per_token("gemm", "selective") == pytest.approx(selective)


def job_file(**tables):
    """A plan of gpt2 on 8 H100s with these tables changed, as a file would have them."""
    return lambda: plan(
        *({"model": "gpt2", "cluster": "h100", "layout": {"dp": 8}, "conventions": {}, "job": {}} | tables).values()
    )


def checked(model="gpt2", cluster=None, **layout):
    return lambda: Layout(**layout).check(model_of(model), cluster and cluster_of(*cluster))


HEADS = {"preset": "llama3-8b", "heads": 24, "head_width": 128}
REFUSED = [  # what is asked for, and the words of the refusal
    (checked(pp=16), "12 layers cannot fill 16 stages"),
    (checked(dp=4, pp=2, interleave=4, batch=16, uneven_stages=True), "12 layers do not divide into 8 stages"),
    (checked("mixtral-8x7b", dp=16, ep=16), "8 experts do not divide by ep"),
    (checked(dp=4, ep=8), "ep = 8 does not divide dp x cp = 4"),
    (checked(dp=8, zero=3, shard=3), "shard = 3 does not divide"),
    (checked(dp=8, shard=8), "shares nothing with zero = 0"),
    (checked(interleave=2), "interleave = 2 needs stages"),
    (checked(cluster=("a100", 8), dp=4), "= 4 is not the cluster's 8 GPUs"),
    (checked(HEADS, tp=3), "8 kv_heads neither divide by tp = 3"),
    (checked(cp=3), "1024 tokens do not divide into 3 pieces"),
    (checked(cluster=("a100", 8), dp=8, dtype="float8"), "'float8' is not a type"),
    (
        checked("llama3-405b", pp=8, interleave=8, batch=8),
        "64 stages (pp x interleave).\nGive a divisor of 126, or o",
    ),
    (
        checked(pp=12, outer_layers=True, uneven_stages=True),
        "12 stages (pp x interleave).\nGive at most 10",
    ),
    (
        job_file(cluster={"preset": "h100", "power": 0, "power_limit": 500}),
        "power_limit is 500, and power",
    ),
    (job_file(layout={"dp": 8, "recompute": "op"}), "recompute is 'op'.\nGive one of none, selective, sac, full."),
    (checked(dp=True), "dp is True"),
    (checked(dp=8, batch=-8), "batch is -8"),
    (checked(zero=7), "zero is 7.\nGive one of 0, 1, 2, 3."),
    (checked(dp=8, offload="maybe"), "offload is 'maybe'.\nGive true or false."),
    (job_file(layout={"dp": 8, "depth": 2}), "the layout has no field 'depth'"),
    (job_file(layout=[]), "the layout is []"),
    (job_file(model="gpt5"), "'gpt5' is not a model"),
    (job_file(model=7), "the model is 7"),
    (job_file(model={"preset": ["gpt2"]}), "['gpt2'] is not a model"),
    (job_file(model={"layers": 0, "width": 1, "heads": 1, "vocab": 1}), "layers is 0"),
    (job_file(model={"layers": 2, "width": 64, "heads": 65, "vocab": 9}), "64 does not divide among 65 heads"),
    (job_file(model={"preset": "gpt2", "name": "a\nb"}), "name is 'a\\nb'"),
    (job_file(model={"preset": "gpt2", "layers": 10**9}), "layers is 1000000000.\nGive at most 10000."),
    (job_file(model={"preset": "gpt2", "shared_experts": 1}), "without experts"),
    (job_file(model={"preset": "mixtral-8x7b", "active_experts": 9}), "9 of 8 experts cannot be active"),
    (job_file(model={"preset": "mixtral-8x7b", "dense_layers": 32}), "leave none for experts"),
    (job_file(model={"preset": "llama3-8b", "kv_heads": 5}), "32 heads cannot share 5 kv_heads"),
    (job_file(cluster={"preset": "h100", "peaks": "fast"}), "peaks is 'fast'"),
    (job_file(cluster={"preset": "h100", "peaks": {"bfloat16": 0}}), "the peak of bfloat16 is 0"),
    (job_file(cluster={"preset": "h100", "peaks": {}}), "h100: no peaks"),
    (job_file(cluster={"preset": "h100", "link_in_node": 1e-300}), "link_in_node is 1e-300.\nGive at least 1e-24."),
    (job_file(cluster={"preset": "h100", "nodes": 2, "link_between": 0}), "2 nodes, and link_between is not known"),
    (job_file(cluster={"preset": "h100", "link_in_node": 0}), "8 GPUs in a node, and link_in_node is not known"),
    (lambda: cluster_of("h100", 12), "12 GPUs are not full nodes of 8"),
    (job_file(conventions={"flops": "7N"}), "the conventions: flops is '7N'"),
    (job_file(job={"tokens": math.nan}), "tokens is nan"),
    (job_file(job={"tokens": math.inf}), "Give at most 1e+24"),
    (job_file(job={"save_seconds": 0}), "save_seconds is 0"),
    (job_file(job={"step_seconds": 1, "tokens_per_second": 2}), "say the same"),
]


@pytest.mark.parametrize("ask, words", REFUSED, ids=[words for _, words in REFUSED])
def test_refused_in_two_lines(ask, words):
    with pytest.raises(PlanError) as refusal:
        ask()
    text = str(refusal.value)
    assert words in text
    assert len(text.splitlines()) == 2 and text.splitlines()[1].startswith(("Give", "Its fields"))


def test_a_model_with_other_numbers_fills_in_anew():
    assert model_of("gpt2").with_(width=1536) == model_of({"preset": "gpt2", "width": 1536})
    assert model_of("llama3-8b").with_(layers=2).ffn == 14336  # it was given
    assert model_of("gpt2").with_(width=1536, ffn=100).ffn == 100


def test_micro_batches_that_the_first_stage_holds():
    assert memory.in_flight(Layout(pp=8, batch=64, interleave=3), 0) == pytest.approx(8 * (1 + 7 / 24))
    assert memory.in_flight(Layout(pp=4, batch=32, schedule="gpipe"), 0) == 32


def test_offloading_leaves_the_parameters():
    kinds = memory.stage_memory(model_of("gpt2"), Layout(dp=8, zero=2, offload=True), Conventions(), 0)
    assert kinds["optimizer"] == kinds["gradients"] == 0 < kinds["parameters"]


def test_states_of_all_stages_are_the_model():
    model, layout = model_of("llama3-70b"), Layout(pp=8, tp=8, dp=2, batch=16)
    here = sum(memory.stage_parameters(model, layout, stage) for stage in range(8))
    norms = (2 * model.layers + 1) * model.width  # every tensor-parallel rank holds all of these
    assert here == (model.parameters() - norms) / 8 + norms


def test_poisson():
    assert failures.poisson_interval(3) == pytest.approx((0.619, 8.767), abs=1e-3)  # Garwood's table
    assert failures.poisson_interval(0)[0] == 0
    low, high = failures.poisson_counts(100)
    assert low < 100 < high and high - low == pytest.approx(4 * math.sqrt(100), rel=0.1)


def test_the_checkpoint_interval_is_the_best_one():
    save, nodes, rate = 60, 2048, 6.5e-3
    best = failures.checkpoint_interval(save, nodes, rate)
    kept = [failures.goodput(nodes, rate, 300, every, save) for every in (best / 3, best, 3 * best)]
    assert max(kept) == kept[1]
    assert failures.goodput(nodes, rate, 600, best, save) < kept[1]  # a restart takes twice as long
    assert failures.goodput(100_000, rate, 7200, best, save) == 0


def test_bubble_of_the_total_time():
    assert rates.bubble(8, 8, relative_to="total") == 7 / 15


SWITCHED = {  # a convention, and where its setting changes a plan
    "flops": ("6N", lambda plan: plan.utilization.mfu),
    "achieved": ("hardware", lambda plan: plan.utilization.achieved),
    "peak": (200e12, lambda plan: plan.utilization.mfu),
    "bubble": ("total", lambda plan: plan.bubble),
    "states": ("zero", lambda plan: plan.stages[0]["parameters"]),
    "gather": ("once", lambda plan: sum(group.sent for group in plan.collectives)),
    "in_flight": ("one", lambda plan: plan.stages[0]["activations"]),
    "days": ("8TP", lambda plan: plan.run.days),
    "causal": ("half", lambda plan: plan.step.seconds),
    "sequence_inputs": ("again", lambda plan: plan.stages[0]["activations"]),
    "logits": ("stored", lambda plan: plan.stages[-1]["output"]),
    "overlap": ("backward", lambda plan: plan.step.seconds),
    "shards": ("even", lambda plan: plan.stages[0]["optimizer"]),
    "memory": ("GB", lambda plan: next(line for line in lines(plan) if "fits in" in line)),
}


@pytest.mark.parametrize("name", vars(Conventions()))
def test_a_convention_changes_the_plan(name):
    setting, read = SWITCHED[name]
    how = {"recompute": "selective", "attention": "scores", "sequence_parallel": True}
    layout = Layout(dp=48, tp=8, pp=2, zero=0 if name == "overlap" else 3, batch=96, **how)
    cluster = cluster_of("h100", layout.gpus)
    before, after = (plan("llama2-7b", cluster, layout, switch, {"tokens": 1e12}) for switch in ({}, {name: setting}))
    assert read(before) != read(after)
    assert getattr(after.conventions, name) == setting


def test_what_binds_and_what_to_try():
    cluster = cluster_of("h100", 64)
    tight = plan("llama3-70b", cluster, {"dp": 64, "zero": 3, "batch": 64})
    assert tight.binds == ("memory", "activations")
    best = plan("llama3-70b", cluster, {"batch": 64, "zero": 3, "dp": 64, "recompute": "full"})
    assert best.fits and best.binds[0] == "time" and best.next.words.startswith("stay: none of")
    slow = plan("llama3-70b", cluster, {"batch": 64, "zero": 3, "dp": 32, "tp": 2, "recompute": "full"})
    seconds = {other.layout: other.step.seconds for _, other in slow.neighbours() if other.fits}
    assert slow.next.seconds == min(seconds.values()) == seconds[slow.next.layout] < slow.step.seconds
