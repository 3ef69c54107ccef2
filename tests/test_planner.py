"""The planner: published rows, refusals, memory by stage, failures and plans. Nothing here starts a rank."""

import ast
import math
from pathlib import Path

import nbformat
import pytest

from helpers.export.chapters import find_notebook
from helpers.planner import failures, memory
from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.experiments import published, steps
from helpers.planner.layout import Layout
from helpers.planner.model import model_of
from helpers.planner.plan import Bottleneck, plan
from helpers.planner.records import PlanError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", [published.ROWS, steps.ROWS], ids=lambda path: path.name)
def test_each_published_row_names_its_source(path):
    references = (ROOT / "book" / "references.bib").read_text()
    for row in published.rows_of(path):
        source = row["source"].split()[0]
        assert "#" in source or f"{{{source}," in references, row["what"]


KNOWN = {  # read off the models' published weights
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360, "gpt2-xl": 1_557_611_200,
    # Not counted: the biases by which DeepSeek balances its experts, and a sink of each of GPT-OSS's heads.
    "deepseek-v3": 671_026_419_200 - 58 * 256, "gpt-oss-20b": 20_914_757_184 - 24 * 64,
    "gpt-oss-120b": 116_829_156_672 - 36 * 64,
}  # fmt: skip


def test_parameters_of_published_weights():
    assert {name: model_of(name).parameters() for name in KNOWN} == KNOWN


def test_parameters_that_one_token_uses():
    """GPT-OSS's card counts them without the embedding (arXiv:2508.10925, table 1), DeepSeek's with it."""
    active = {name: model_of(name).parameters(active=True) for name in ("gpt-oss-20b", "deepseek-v3")}
    embedding = 201088 * 2880
    assert round((active["gpt-oss-20b"] - embedding) / 1e9, 2) == 3.61
    assert active["deepseek-v3"] / 1e9 == pytest.approx(37, rel=0.02)


def test_flops_are_those_of_megatrons_formulas():
    model = model_of("gpt-175b")
    blocks = model.layers * model.width**2
    attention = model.seq / model.width  # beside the linear layers of a block
    logits = model.vocab / (model.layers * model.width)  # beside all blocks

    nothing_again = 72 * blocks * (1 + attention / 6 + logits / 12)
    assert model.flops_per_token("gemm") == pytest.approx(nothing_again)
    blocks_again = 96 * blocks * (1 + attention / 6 + logits / 16)
    assert model.flops_per_token("gemm", "full") == pytest.approx(blocks_again)
    attention_again = 72 * blocks * (1 + attention / 3 + logits / 12)
    assert model.flops_per_token("gemm", "selective") == pytest.approx(attention_again)


def plan_of(model="gpt2", cluster="h100", layout=None, job=None):
    return lambda: plan(model, cluster, layout or {"dp": 8}, job=job)


def layout_of(model="gpt2", cluster=None, **fields):
    return lambda: Layout(**fields).check(model_of(model), cluster)


EIGHT_A100S = cluster_of("a100", 8)
REFUSED = [  # what is asked for, and a part of the refusal
    # A layout and a model
    (layout_of(tp=5), "12 heads do not divide by tp = 5.\nGive one of 1, 2, 3, 4, 6, 12 as tp."),
    (layout_of({"preset": "llama3-8b", "heads": 24, "head_width": 128}, tp=3), "8 kv_heads neither divide by tp = 3"),
    (layout_of(cp=3), "1024 tokens do not divide into 3 parts"),
    (layout_of(pp=16), "12 layers cannot fill 16 stages"),
    (layout_of(pp=8), "Give a divisor of 12, or uneven_stages = true."),
    (layout_of("llama3-405b", pp=8, interleave=8, batch=8), "Give a divisor of 126, or outer_layers = true."),
    (layout_of("mixtral-8x7b", dp=16, ep=16), "8 experts do not divide by ep"),
    # A layout by itself
    (layout_of(dp=2, batch=3), "a batch of 3 does not divide into 2 x 1 (dp x micro_batch)"),
    (layout_of(dp=4, ep=8), "ep = 8 does not divide dp x cp = 4"),
    (layout_of(dp=8, zero=3, shard=3), "shard = 3 does not divide"),
    (layout_of(interleave=2), "interleave = 2 needs stages"),
    # A layout and a cluster
    (layout_of(cluster=EIGHT_A100S, dp=4), "= 4 is not the cluster's 8 GPUs"),
    (layout_of(cluster=EIGHT_A100S, dp=8, dtype="float8"), "'float8' is not a type with a peak on a100"),
    # Fields of any record
    (plan_of(layout={"dp": 8, "depth": 2}), "the layout has no field 'depth'.\nIts fields: dp, tp"),
    (layout_of(dp=True), "dp is True"),
    (layout_of(zero=7), "zero is 7.\nGive one of 0, 1, 2, 3."),
    (plan_of(job={"tokens": math.nan}), "tokens is nan"),
    # A model and a cluster
    (plan_of(model="gpt5"), "'gpt5' is not a model that the planner knows.\nGive one of gpt2, "),
    (plan_of(model={"layers": 2, "width": 64, "heads": 65, "vocab": 9}), "64 does not divide among 65 heads"),
    (plan_of(cluster={"preset": "h100", "nodes": 2, "link_between": 0}), "2 nodes, and link_between is not known"),
    (lambda: cluster_of("h100", 12), "12 GPUs are not full nodes of 8"),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED, ids=[words.partition("\n")[0] for _, words in REFUSED])
def test_what_is_not_possible_is_refused_in_two_lines(ask, words):
    with pytest.raises(PlanError) as refusal:
        ask()
    message = str(refusal.value)
    assert words in message
    assert message.splitlines()[1].startswith(("Give", "Its fields")) and len(message.splitlines()) == 2


def test_micro_batches_that_the_first_stage_holds():
    assert memory.in_flight(Layout(pp=8, batch=64, interleave=3), 0) == pytest.approx(8 * (1 + 7 / 24))
    assert memory.in_flight(Layout(pp=4, batch=32, schedule="gpipe"), 0) == 32


def test_offloading_leaves_the_parameters():
    kinds = memory.stage_memory(model_of("gpt2"), Layout(dp=8, zero=2, offload=True), Conventions(), 0)
    assert kinds["optimizer"] == kinds["gradients"] == 0 < kinds["parameters"]


def test_a_published_row_that_contradicts_itself_is_refused():
    """The last row of table 4 of the Llama 3 paper, in its first version: the sizes make half of the GPUs."""
    row = {"quantity": "share of peak", "published": "38", "unit": "%", "target": "formula"}
    row["inputs"] = (
        "gpus = 16384, tp = 8, cp = 16, pp = 16, dp = 4, seq = 131072, batch_per_dp = 16, "
        "tokens_per_batch = 16e6, tflops = 380e12, peak = 989e12"
    )
    with pytest.raises(PlanError, match="the row contradicts itself"):
        published.reproduce(row)


def test_moments_in_bfloat16_take_a_third_less_than_float32_states():
    sizes = {}
    for states in ("float32", "bfloat16-moments"):
        kinds = memory.stage_memory(model_of("llama3-70b"), Layout(dp=64, zero=3), Conventions(states=states), 0)
        sizes[states] = kinds["parameters"] + kinds["optimizer"]
    assert sizes["bfloat16-moments"] / sizes["float32"] == pytest.approx(8 / 12)


def test_the_checkpoint_interval_is_the_best_one():
    save, nodes, rate = 60, 2048, 6.5e-3
    best = failures.checkpoint_interval(save, nodes, rate)
    goodput = failures.goodput(nodes, rate, 300, best, save)
    for other in (best / 3, best * 3):
        assert failures.goodput(nodes, rate, 300, other, save) < goodput
    assert failures.goodput(100_000, rate, 7200, best, save) == 0  # Restarts take all of the time.


def test_the_goodput_is_that_of_chapter_13():
    """One question, one formula: the chapter's own, which it compares with a simulation."""
    notebook = nbformat.read(find_notebook("13"), as_version=4)
    [cell] = [cell.source for cell in notebook.cells if "def slowdown(" in cell.source]
    functions = {"math": math}
    [definition] = [node for node in ast.parse(cell).body if getattr(node, "name", "") == "slowdown"]
    exec(ast.unparse(definition), functions)
    for nodes in (1, 2048, 12_288):
        for restart in (0, 300):
            between = 3600 * failures.mttf_hours(nodes, 6.5e-3)
            seconds = functions["slowdown"](360, 60, between, restart)
            assert failures.goodput(nodes, 6.5e-3, restart, 360, 60) == pytest.approx(1 / seconds, rel=1e-9)


SWITCHED = {  # a convention: another setting, and a number of the plan that this changes
    "flops": ("6N", lambda plan: plan.utilization.mfu),
    "peak": (200e12, lambda plan: plan.utilization.mfu),
    "states": ("zero", lambda plan: plan.stages[0]["parameters"]),
    "gather": ("each", lambda plan: sum(group.sent for group in plan.collectives)),
    "causal": ("half", lambda plan: plan.step.seconds),
    "sequence_inputs": ("again", lambda plan: plan.stages[0]["activations"]),
    "logits": ("stored", lambda plan: plan.stages[-1]["output"]),
    "loss": ("bfloat16", lambda plan: plan.stages[-1]["output"]),
    "overlap": ("backward", lambda plan: plan.step.seconds),
    "dispatch": ("node", lambda plan: plan.step.seconds),
    "tensor": ("overlapped", lambda plan: plan.step.seconds),
    "context": ("gathered", lambda plan: plan.step.seconds),
    "kernels": ("eager", lambda plan: plan.step.seconds),
    "allocator": ("tensors", lambda plan: plan.bytes),
}


@pytest.mark.parametrize("dispatch", ["rank", "node", "neighbours"])
@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b"])
def test_without_expert_parallelism_no_token_travels_to_an_expert(model, dispatch):
    result = plan(model, "h100", {"dp": 8, "zero": 3}, Conventions(dispatch=dispatch))
    assert "ep" not in [group.dimension for group in result.collectives]


@pytest.mark.parametrize("name", vars(Conventions()))
def test_each_convention_changes_a_number(name):
    setting, number = SWITCHED[name]
    model = "mixtral-8x7b" if name == "dispatch" else "llama2-7b"
    settings = {"recompute": "selective", "attention": "scores", "sequence_parallel": True}
    layout = Layout(dp=48, tp=8, pp=2, zero=3, batch=96, **settings)
    if name == "overlap":
        layout = layout.with_(zero=0)
    elif name == "context":
        layout = layout.with_(dp=24, cp=2)
    elif name == "dispatch":
        layout = layout.with_(ep=8)
    cluster = cluster_of("h100", layout.gpus)
    before = plan(model, cluster, layout)
    after = plan(model, cluster, layout, {name: setting})
    assert number(before) != number(after)


def test_a_job_that_does_not_fit_is_limited_by_memory():
    tight = plan("llama3-70b", "h100", {"dp": 64, "zero": 3, "batch": 64})
    assert tight.bottleneck == Bottleneck("memory", "activations")
