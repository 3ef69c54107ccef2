"""The search over layouts: all are counted, the fastest that fits is first, and its choice is explained."""

import itertools

import pytest

from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import memory
from helpers.planner.model import model_of
from helpers.planner.records import PlanError
from helpers.planner.search import choices, search
from helpers.planner.step_time import step_time

GPT = model_of("gpt-3.6b")
A100S = cluster_of("a100", 64)
VALUES = {"micro_batch": [2, 4], "interleave": 1, "zero": [0, 3], "recompute": ["none", "full"], "shard": 0}


@pytest.fixture(scope="module")
def result():
    return search(GPT, A100S, 512, **VALUES)


def test_every_layout_is_ranked_refused_or_too_large(result):
    """Counted again, by trying each."""
    table = choices(GPT, A100S)
    seconds = {}
    too_large = 0
    refused = 0
    for tp, pp, micro_batch, zero, recompute in itertools.product(
        table["tp"], table["pp"], VALUES["micro_batch"], VALUES["zero"], VALUES["recompute"]
    ):
        settings = {"micro_batch": micro_batch, "zero": zero, "recompute": recompute, "sequence_parallel": tp > 1}
        try:
            layout = Layout(dp=64 // (tp * pp), tp=tp, pp=pp, batch=512, **settings).check(GPT, A100S)
        except PlanError:
            refused += 1
            continue
        if max(stage["total"] for stage in memory(GPT, layout, Conventions())) > 0.75 * A100S.memory:
            too_large += 1
        else:
            seconds[layout] = step_time(GPT, layout, A100S).seconds
    assert {fit.layout: fit.seconds for fit in result.fits} == seconds
    assert [fit.seconds for fit in result.fits] == pytest.approx(sorted(seconds.values()))
    assert (len(result.too_large), result.refusals.total()) == (too_large, refused)
    assert result.tried == len(seconds) + too_large + refused


def test_tensor_parallelism_stays_in_a_node():
    """Across nodes it is slow: chapter 7's rule, found from the links."""
    result = search("llama3-70b", cluster_of("h100", 1024), 1024)
    assert result.best.layout.tp <= 8
    wide = next(fit for fit in result.fits if fit.layout.tp == 16)
    assert wide.seconds > 1.25 * result.best.seconds
    assert wide.step.parts["tensor parallel"] > result.best.step.parts["tensor parallel"]


def test_fields_that_are_given_stay():
    result = search(GPT, A100S, 512, tp=4, zero=[1], micro_batch=4, recompute="full")
    assert {(fit.layout.tp, fit.layout.zero, fit.layout.micro_batch) for fit in result.fits} == {(4, 1, 4)}


def test_what_does_not_fit_is_refused_with_the_smallest_layout():
    result = search("llama3-70b", cluster_of("h100", 8), 64)
    with pytest.raises(
        PlanError, match="no layout of llama3-70b fits.\nNone fits in 75% of 74.5 GiB. The smallest, tp 8"
    ):
        _ = result.best


def test_a_search_leaves_a_quarter_of_the_memory_unless_told_otherwise():
    """Without the limit the fastest layout of Llama-3-8B on 16 GPUs is planned to 91 % of the GPU."""
    cluster = cluster_of("h100", 16)
    values = {"pp": 1, "cp": 1, "shard": 0, "interleave": 1}
    safe = search("llama3-8b", cluster, 128, **values)
    assert max(fit.bytes for fit in safe.fits) <= 0.75 * cluster.memory < min(fit.bytes for fit in safe.too_large)
    full = search("llama3-8b", cluster, 128, memory_share=1, **values)
    assert full.best.seconds < safe.best.seconds and full.best.bytes > 0.9 * cluster.memory
    assert full.tried == safe.tried
    with pytest.raises(PlanError, match="memory_share = 2 is not a share of a GPU's memory"):
        search("llama3-8b", cluster, 128, memory_share=2)
