"""The search over layouts: all are counted, the fastest that fits is first, and its choice is explained."""

import itertools

import pytest

from helpers.planner.cluster import cluster_of
from helpers.planner.conventions import Conventions
from helpers.planner.layout import Layout
from helpers.planner.memory import memory
from helpers.planner.model import PlanError, model_of
from helpers.planner.search import choices, reason, search
from helpers.planner.step_time import step_time

GPT = model_of("gpt-3.6b")
A100 = cluster_of("a100", 64)
FEW = {"micro_batch": [2, 4], "interleave": 1, "zero": [0, 3], "recompute": ["none", "full"], "shard": 0}


@pytest.fixture(scope="module")
def found():
    return search(GPT, A100, 512, **FEW)


def test_every_layout_is_ranked_refused_or_too_large(found):
    """Counted again, by trying each."""
    table = choices(GPT, A100)
    fits, refused = {}, 0
    for tp, pp, micro_batch, zero, recompute in itertools.product(
        table["tp"], table["pp"], FEW["micro_batch"], FEW["zero"], FEW["recompute"]
    ):
        try:
            layout = Layout(
                dp=64 // (tp * pp),
                tp=tp,
                pp=pp,
                batch=512,
                micro_batch=micro_batch,
                zero=zero,
                recompute=recompute,
                sequence_parallel=tp > 1,
            ).check(GPT, A100)
        except (PlanError, ZeroDivisionError):
            refused += 1
            continue
        if max(stage["total"] for stage in memory(GPT, layout, Conventions())) <= A100.memory:
            fits[layout] = step_time(GPT, layout, A100).seconds
    assert {one.layout: one.seconds for one in found.fits} == fits
    assert sum(found.refused.values()) == refused
    assert found.tried == len(fits) + refused + len(found.too_large)
    assert found.best.seconds == min(fits.values())
    assert [one.seconds for one in found.fits] == sorted(fits.values())


def test_refusals_count_by_reason_and_what_does_not_fit_by_memory(found):
    assert "layers do not divide into stages (pp x interleave)" in found.refused
    assert "tp x pp x cp does not divide the GPUs" in found.refused
    assert sum(found.by_memory().values()) == len(found.too_large) > 0
    assert set(found.by_memory()) <= {"activations", "optimizer", "parameters", "output"}


def test_equal_reasons_have_equal_words():
    def refusal(**sizes):
        with pytest.raises(PlanError) as caught:
            Layout(**sizes).check(GPT)
        return reason(caught.value)

    assert refusal(tp=3) == refusal(tp=5) == "heads do not divide by tp"
    assert refusal(dp=2, batch=3) == refusal(dp=4, micro_batch=2, batch=12)
    assert refusal(tp=3) != refusal(pp=4)


def test_the_choice_is_explained(found):
    lines, best = found.explain(), found.best
    assert lines[0] == (
        f"{found.tried} layouts of gpt-3.6b on 64 x a100: {sum(found.refused.values())} refused, "
        f"{len(found.too_large)} do not fit, {len(found.fits)} ranked."
    )
    assert f"{best.seconds:.2f} s a step" in lines[1] and f"dp {best.layout.dp}" in lines[1]
    for line in lines[2:-1]:
        assert line.startswith("Why not ")
    other = next(one for one in found.fits if one.layout.tp == 2 * best.layout.tp)
    (line,) = [line for line in lines if line.startswith(f"Why not tp = {other.layout.tp}?")]
    assert f"{other.seconds / best.seconds - 1:+.1%}" in line and "tensor parallel +" in line
    assert len(lines) < 16


def test_tensor_parallelism_stays_in_a_node():
    """Across nodes it is slow: chapter 7's rule, here from the links."""
    found = search("llama3-70b", cluster_of("h100", 1024), 1024)
    assert found.best.layout.tp <= 8
    wide = next(one for one in found.fits if one.layout.tp == 16)
    assert wide.seconds > 1.25 * found.best.seconds
    assert wide.step.parts["tensor parallel"] > found.best.step.parts["tensor parallel"]


def test_a_model_that_fits_nowhere():
    found = search("llama3-70b", cluster_of("h100", 8), 64)
    assert not found.fits and "None fits in 74.5 GiB. The smallest, tp 8" in found.explain()[-1]
    with pytest.raises(PlanError, match="no layout of llama3-70b fits"):
        _ = found.best


def test_what_is_given_is_kept():
    found = search(GPT, A100, 512, tp=4, zero=[1], micro_batch=4, recompute="full")
    assert {(one.layout.tp, one.layout.zero, one.layout.micro_batch) for one in found.fits} == {(4, 1, 4)}
    with pytest.raises(PlanError, match="float64"):
        search(GPT, A100, 512, dtype="float64")
