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
BATCH = 512
# Fields of a layout: those that the search may choose have several values.
VALUES = {"micro_batch": [2, 4], "interleave": 1, "zero": [0, 3], "recompute": ["none", "full"], "shard": 0}
SAFE_SHARE = 0.75  # of a GPU's memory


def all_layouts():
    """Yields the fields of each layout that a search with VALUES has to try."""
    defaults = choices(GPT, A100S)
    for tp, pp, micro_batch, zero, recompute in itertools.product(
        defaults["tp"], defaults["pp"], VALUES["micro_batch"], VALUES["zero"], VALUES["recompute"]
    ):
        yield {
            "dp": A100S.gpus // (tp * pp),
            "tp": tp,
            "pp": pp,
            "batch": BATCH,
            "micro_batch": micro_batch,
            "zero": zero,
            "recompute": recompute,
            "sequence_parallel": tp > 1,
        }


def test_every_layout_is_ranked_refused_or_too_large():
    result = search(GPT, A100S, BATCH, **VALUES)

    # Try each layout again, without the search.
    seconds = {}  # {layout that fits: its seconds}
    too_large = 0
    refused = 0
    for fields in all_layouts():
        try:
            layout = Layout(**fields).check(GPT, A100S)
        except PlanError:
            refused += 1
            continue
        bytes_of_fullest = max(stage["total"] for stage in memory(GPT, layout, Conventions()))
        if bytes_of_fullest > SAFE_SHARE * A100S.memory:
            too_large += 1
        else:
            seconds[layout] = step_time(GPT, layout, A100S).seconds

    assert {fit.layout: fit.seconds for fit in result.fits} == seconds
    assert [fit.seconds for fit in result.fits] == pytest.approx(sorted(seconds.values()))
    assert len(result.too_large) == too_large
    assert result.refusals.total() == refused
    assert result.tried == len(seconds) + too_large + refused


def test_tensor_parallelism_stays_in_a_node():
    """Across nodes it is slow, because of their links. This is the rule of chapter 7."""
    result = search("llama3-70b", cluster_of("h100", 1024), 1024)
    best = result.best
    assert best.layout.tp <= 8  # GPUs of a node

    on_two_nodes = [fit for fit in result.fits if fit.layout.tp == 16]
    fastest_on_two_nodes = on_two_nodes[0]
    assert fastest_on_two_nodes.seconds > 1.25 * best.seconds
    assert fastest_on_two_nodes.step.parts["tensor parallel"] > best.step.parts["tensor parallel"]


def test_fields_that_are_given_stay():
    result = search(GPT, A100S, BATCH, tp=4, zero=[1], micro_batch=4, recompute="full")
    assert result.fits
    for fit in result.fits:
        assert fit.layout.tp == 4
        assert fit.layout.zero == 1
        assert fit.layout.micro_batch == 4
        assert fit.layout.recompute == "full"


def test_what_does_not_fit_is_refused_with_the_smallest_layout():
    result = search("llama3-70b", cluster_of("h100", 8), 64)
    refusal = "no layout of llama3-70b fits.\nNone fits in 75% of 74.5 GiB. The smallest, tp 8"
    with pytest.raises(PlanError, match=refusal):
        _ = result.best


def test_a_search_leaves_a_quarter_of_the_memory_unless_told_otherwise():
    """Without the limit the fastest layout of Llama-3-8B on 16 GPUs is planned to 91 % of the GPU."""
    cluster = cluster_of("h100", 16)
    values = {"pp": 1, "cp": 1, "shard": 0, "interleave": 1}
    safe = search("llama3-8b", cluster, 128, **values)
    limit = SAFE_SHARE * cluster.memory
    assert max(fit.bytes for fit in safe.fits) <= limit
    assert min(candidate.bytes for candidate in safe.too_large) > limit

    full = search("llama3-8b", cluster, 128, memory_share=1, **values)
    assert full.tried == safe.tried
    assert full.best.seconds < safe.best.seconds
    assert full.best.bytes > 0.9 * cluster.memory


def test_a_share_of_memory_above_1_is_refused():
    with pytest.raises(PlanError, match="memory_share = 2 is not a share of a GPU's memory"):
        search("llama3-8b", cluster_of("h100", 16), 128, memory_share=2)
