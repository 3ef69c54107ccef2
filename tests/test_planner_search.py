"""The search over layouts: all are counted, the fastest that fits is first, and its choice is explained."""

import itertools

import pytest

from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import memory
from helpers.planner.model import model_of
from helpers.planner.records import PlanError
from helpers.planner.search import choices, reason, search
from helpers.planner.step_time import step_time

GPT = model_of("gpt-3.6b")
A100 = cluster_of("a100", 64)
FEW = {"micro_batch": [2, 4], "interleave": 1, "zero": [0, 3], "recompute": ["none", "full"], "shard": 0}


@pytest.fixture(scope="module")
def result():
    return search(GPT, A100, 512, **FEW)


def test_every_layout_is_ranked_refused_or_too_large(result):
    """Counted again, by trying each."""
    table = choices(GPT, A100)
    fits, refusals = {}, 0
    for tp, pp, micro_batch, zero, recompute in itertools.product(
        table["tp"], table["pp"], FEW["micro_batch"], FEW["zero"], FEW["recompute"]
    ):
        try:
            how = {"micro_batch": micro_batch, "zero": zero, "recompute": recompute, "sequence_parallel": tp > 1}
            layout = Layout(dp=64 // (tp * pp), tp=tp, pp=pp, batch=512, **how).check(GPT, A100)
        except (PlanError, ZeroDivisionError):
            refusals += 1
            continue
        if max(stage["total"] for stage in memory(GPT, layout, Conventions())) <= A100.memory:
            fits[layout] = step_time(GPT, layout, A100).seconds
    assert {fit.layout: fit.seconds for fit in result.fits} == fits
    assert sum(result.refusals.values()) == refusals
    assert result.tried == len(fits) + refusals + len(result.too_large)
    assert result.best.seconds == min(fits.values())
    assert [fit.seconds for fit in result.fits] == sorted(fits.values())
    assert "layers do not divide into stages (pp x interleave)" in result.refusals
    assert "tp x pp x cp does not divide the GPUs" in result.refusals
    assert sum(result.by_memory().values()) == len(result.too_large) > 0
    assert set(result.by_memory()) <= {"activations", "optimizer", "parameters", "output"}


def test_equal_reasons_have_equal_words():
    def refusal(**sizes):
        with pytest.raises(PlanError) as caught:
            Layout(**sizes).check(GPT)
        return reason(caught.value)

    assert refusal(tp=3) == refusal(tp=5) == "heads do not divide by tp"
    assert refusal(dp=2, batch=3) == refusal(dp=4, micro_batch=2, batch=12)
    assert refusal(tp=3) != refusal(pp=4)


def test_the_choice_is_explained(result):
    best = result.best
    other = next(fit for fit in result.fits if fit.layout.tp == 2 * best.layout.tp)
    (line,) = [line for line in result.explain() if line.startswith(f"Why not tp = {other.layout.tp}?")]
    assert f"{other.seconds / best.seconds - 1:+.1%}" in line and "tensor parallel +" in line


def test_tensor_parallelism_stays_in_a_node():
    """Across nodes it is slow: chapter 7's rule, here from the links."""
    result = search("llama3-70b", cluster_of("h100", 1024), 1024)
    assert result.best.layout.tp <= 8
    wide = next(fit for fit in result.fits if fit.layout.tp == 16)
    assert wide.seconds > 1.25 * result.best.seconds
    assert wide.step.parts["tensor parallel"] > result.best.step.parts["tensor parallel"]


def test_what_is_given_is_kept_and_what_cannot_be_is_refused():
    result = search(GPT, A100, 512, tp=4, zero=[1], micro_batch=4, recompute="full")
    assert {(fit.layout.tp, fit.layout.zero, fit.layout.micro_batch) for fit in result.fits} == {(4, 1, 4)}
    nothing = search("llama3-70b", cluster_of("h100", 8), 64)
    with pytest.raises(PlanError, match="no layout of llama3-70b fits.\nNone fits in 74.5 GiB. The smallest, tp 8"):
        _ = nothing.best
    with pytest.raises(PlanError, match="float64"):
        search(GPT, A100, 512, dtype="float64")
