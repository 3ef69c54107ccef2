"""The planner: published numbers, refusals, memory of stages, failures and plans. Nothing here starts a rank."""

import ast
import math
from functools import partial
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
    """A source begins with a key of references.bib, or with an issue on GitHub, such as NVIDIA/nccl#1473."""
    references = (ROOT / "book" / "references.bib").read_text()
    for row in published.rows_of(path):
        first_word = row["source"].split()[0]
        is_issue = "#" in first_word
        is_reference = f"{{{first_word}," in references
        assert is_issue or is_reference, row["what"]


PARAMETERS = {  # {model: how many parameters its published weights have}
    "llama2-7b": 6_738_415_616, "llama2-70b": 68_976_648_192, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360, "gpt2-xl": 1_557_611_200,
    # Not counted: the biases by which DeepSeek balances its experts, and a sink of each of GPT-OSS's heads.
    "deepseek-v3": 671_026_419_200 - 58 * 256, "gpt-oss-20b": 20_914_757_184 - 24 * 64,
    "gpt-oss-120b": 116_829_156_672 - 36 * 64,
}  # fmt: skip


def test_parameters_of_published_weights():
    for name, parameters in PARAMETERS.items():
        assert model_of(name).parameters() == parameters, name


def test_parameters_that_one_token_uses():
    """GPT-OSS's card counts them without the embedding (arXiv:2508.10925, table 1), DeepSeek's with it."""
    gpt_oss = model_of("gpt-oss-20b")
    embedding = gpt_oss.vocab * gpt_oss.width
    assert round((gpt_oss.parameters(active=True) - embedding) / 1e9, 2) == 3.61

    deepseek = model_of("deepseek-v3")
    assert deepseek.parameters(active=True) / 1e9 == pytest.approx(37, rel=0.02)


def test_flops_are_those_of_megatrons_formulas():
    """For one token: 72Lh²(1 + s/6h + V/12hL), and others with recomputation (Narayanan 2021, Korthikanti 2022)."""
    model = model_of("gpt-175b")
    layers_and_widths = model.layers * model.width**2  # Lh²
    attention = model.seq / model.width  # s/h
    logits = model.vocab / (model.layers * model.width)  # V/hL

    without_recomputation = 72 * layers_and_widths * (1 + attention / 6 + logits / 12)
    assert model.flops_per_token("gemm") == pytest.approx(without_recomputation)

    recomputing_layers = 96 * layers_and_widths * (1 + attention / 6 + logits / 16)
    assert model.flops_per_token("gemm", "full") == pytest.approx(recomputing_layers)

    recomputing_attention = 72 * layers_and_widths * (1 + attention / 3 + logits / 12)
    assert model.flops_per_token("gemm", "selective") == pytest.approx(recomputing_attention)


def plan_of(model="gpt2", cluster="h100", layout=None, job=None):
    """A function that makes a plan of these."""
    return partial(plan, model, cluster, layout or {"dp": 8}, job=job)


def layout_of(model="gpt2", cluster=None, **fields):
    """A function that makes a layout of these fields, and checks it for a model and a cluster."""

    def make_and_check():
        Layout(**fields).check(model_of(model), cluster)

    return make_and_check


EIGHT_A100S = cluster_of("a100", 8)
REFUSED = [  # a function that must be refused, and a part of the refusal
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
    (partial(cluster_of, "h100", gpus=12), "12 GPUs are not full nodes of 8"),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED, ids=[words.partition("\n")[0] for _, words in REFUSED])
def test_what_is_not_possible_is_refused_in_two_lines(ask, words):
    """The second line says what to do next."""
    with pytest.raises(PlanError) as refusal:
        ask()
    message = str(refusal.value)
    assert words in message
    lines = message.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith(("Give", "Its fields"))


def test_micro_batches_that_the_first_stage_holds():
    """With p stages and v parts on each they are p(1 + (p-1)/(pv)) (Korthikanti et al. 2022, section 4.2.3)."""
    interleaved = Layout(pp=8, batch=64, interleave=3)
    assert memory.in_flight(interleaved, stage=0) == pytest.approx(8 * (1 + 7 / 24))

    gpipe = Layout(pp=4, batch=32, schedule="gpipe")
    assert memory.in_flight(gpipe, stage=0) == 32


def test_offloading_leaves_the_parameters():
    kinds = memory.stage_memory(model_of("gpt2"), Layout(dp=8, zero=2, offload=True), Conventions(), stage=0)
    assert kinds["optimizer"] == 0
    assert kinds["gradients"] == 0
    assert kinds["parameters"] > 0


def test_a_published_row_that_contradicts_itself_is_refused():
    """The last row of table 4 of the Llama 3 paper, in its first version: tp x pp x cp x dp is half of the GPUs."""
    inputs = (
        "gpus = 16384, tp = 8, cp = 16, pp = 16, dp = 4, seq = 131072, batch_per_dp = 16, "
        "tokens_per_batch = 16e6, tflops = 380e12, peak = 989e12"
    )
    row = {"quantity": "share of peak", "inputs": inputs, "published": "38", "unit": "%", "target": "formula"}
    with pytest.raises(PlanError, match="the row contradicts itself"):
        published.reproduce(row)


def test_moments_in_bfloat16_take_a_third_less_than_float32_states():
    def bytes_of_parameters_and_moments(states):
        conventions = Conventions(states=states)
        kinds = memory.stage_memory(model_of("llama3-70b"), Layout(dp=64, zero=3), conventions, stage=0)
        return kinds["parameters"] + kinds["optimizer"]

    float32 = bytes_of_parameters_and_moments("float32")
    bfloat16_moments = bytes_of_parameters_and_moments("bfloat16-moments")
    assert bfloat16_moments / float32 == pytest.approx(8 / 12)


FAILURES_PER_NODE_DAY = 6.5e-3


def test_the_checkpoint_interval_is_the_best_one():
    nodes = 2048
    save_seconds = 60

    def goodput(interval):
        return failures.goodput(nodes, FAILURES_PER_NODE_DAY, 300, interval, save_seconds)

    best = failures.checkpoint_interval(save_seconds, nodes, FAILURES_PER_NODE_DAY)
    assert goodput(best / 3) < goodput(best)
    assert goodput(best * 3) < goodput(best)


def test_restarts_that_take_all_of_the_time_leave_no_goodput():
    goodput = failures.goodput(
        nodes=100_000,
        failures_per_node_day=FAILURES_PER_NODE_DAY,
        restart_seconds=7200,
        interval_seconds=600,
        save_seconds=60,
    )
    assert goodput == 0


def function_of_chapter_13(name):
    """A function of the chapter, taken out of its notebook."""
    notebook = nbformat.read(find_notebook("13"), as_version=4)
    [source] = [cell.source for cell in notebook.cells if f"def {name}(" in cell.source]
    [definition] = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    namespace = {"math": math}
    exec(ast.unparse(definition), namespace)
    return namespace[name]


@pytest.mark.parametrize("restart_seconds", [0, 300])
@pytest.mark.parametrize("nodes", [1, 2048, 12_288])
def test_the_goodput_is_that_of_chapter_13(nodes, restart_seconds):
    """The planner has the same formula as the chapter, which compares it with a simulation."""
    interval = 360
    save = 60
    goodput = failures.goodput(nodes, FAILURES_PER_NODE_DAY, restart_seconds, interval, save)

    slowdown = function_of_chapter_13("slowdown")
    seconds_between_failures = 3600 * failures.mttf_hours(nodes, FAILURES_PER_NODE_DAY)
    assert goodput == pytest.approx(1 / slowdown(interval, save, seconds_between_failures, restart_seconds), rel=1e-9)


def numbers_of(plan):
    """Those numbers of a plan that a convention may change."""
    return {
        "MFU": plan.utilization.mfu,
        "seconds of a step": plan.step.seconds,
        "bytes": plan.bytes,
        "bytes of parameters": plan.stages[0]["parameters"],
        "bytes of activations": plan.stages[0]["activations"],
        "bytes of the output": plan.stages[-1]["output"],
        "bytes sent": sum(collective.sent for collective in plan.collectives),
    }


SWITCHED = {  # {convention: another setting than the default, and the number of a plan that it changes}
    "flops": ("6N", "MFU"),
    "peak": (200e12, "MFU"),
    "states": ("zero", "bytes of parameters"),
    "gather": ("each", "bytes sent"),
    "causal": ("half", "seconds of a step"),
    "sequence_inputs": ("again", "bytes of activations"),
    "logits": ("stored", "bytes of the output"),
    "loss": ("bfloat16", "bytes of the output"),
    "overlap": ("backward", "seconds of a step"),
    "dispatch": ("node", "seconds of a step"),
    "tensor": ("overlapped", "seconds of a step"),
    "context": ("gathered", "seconds of a step"),
    "kernels": ("eager", "seconds of a step"),
    "allocator": ("tensors", "bytes"),
}


@pytest.mark.parametrize("dispatch", ["rank", "node", "neighbours"])
@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b"])
def test_without_expert_parallelism_no_token_travels_to_an_expert(model, dispatch):
    result = plan(model, "h100", {"dp": 8, "zero": 3}, Conventions(dispatch=dispatch))
    dimensions = [collective.dimension for collective in result.collectives]
    assert "ep" not in dimensions


@pytest.mark.parametrize("name", vars(Conventions()))
def test_each_convention_changes_a_number(name):
    setting, number = SWITCHED[name]
    model = "llama2-7b"
    layout = Layout(
        dp=48,
        tp=8,
        pp=2,
        zero=3,
        batch=96,
        recompute="selective",
        attention="scores",
        sequence_parallel=True,
    )
    # Some conventions matter only for another layout or model.
    if name == "overlap":
        layout = layout.with_(zero=0)
    elif name == "context":
        layout = layout.with_(dp=24, cp=2)
    elif name == "dispatch":
        layout = layout.with_(ep=8)
        model = "mixtral-8x7b"

    cluster = cluster_of("h100", layout.gpus)
    by_default = plan(model, cluster, layout)
    switched = plan(model, cluster, layout, {name: setting})
    assert numbers_of(by_default)[number] != numbers_of(switched)[number]


def test_a_job_that_does_not_fit_is_limited_by_memory():
    too_large = plan("llama3-70b", "h100", {"dp": 64, "zero": 3, "batch": 64})
    assert too_large.bottleneck == Bottleneck("memory", "activations")
