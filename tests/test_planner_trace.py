"""What ranks hold, traced in worlds of simulated ranks: it equals what four real ranks hold, and what a plan counts."""

import sys

import cloudpickle
import pytest
import torch.distributed as dist

from helpers.planner.layout import Layout
from helpers.planner.memory import shared_parameters
from helpers.planner.model import model_of
from helpers.planner.trace import count_rank, trace
from helpers.ranks.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second
pytestmark = pytest.mark.ranks

# A model whose rows few numbers of ranks divide: a width of 42, an MLP of 46, 101 tokens.
ODD = model_of({"name": "odd", "layers": 3, "width": 42, "heads": 6, "ffn": 46, "vocab": 101, "seq": 8, "gated": True})
ON_FOUR_RANKS = [Layout(dp=2, tp=2, zero=3), Layout(dp=4, zero=3), Layout(dp=4, zero=3, shard=2)]


@pytest.fixture(scope="module")
def real_ranks():
    """{layout: what each of four real ranks holds}. The ranks are launched once for all layouts."""

    def count(layouts):
        return [count_rank(ODD, layout, dist.get_rank(), stage=0, device="cpu") for layout in layouts]

    counts_of_rank = launch(count, ON_FOUR_RANKS, nproc=4, timeout=200)
    counts_of_layout = {}
    for number, layout in enumerate(ON_FOUR_RANKS):
        counts_of_layout[layout] = [counts[number] for counts in counts_of_rank]
    return counts_of_layout


@pytest.mark.parametrize("layout", ON_FOUR_RANKS, ids=lambda layout: layout.summary)
def test_simulated_ranks_hold_what_real_ones_hold(layout, real_ranks):
    """A trace has the first and the last rank."""
    first, *_, last = real_ranks[layout]
    assert trace(ODD, layout).ranks == (first, last)


@pytest.mark.parametrize("sizes", [{"dp": 512}, {"dp": 12, "tp": 2, "pp": 3}, {"dp": 64, "tp": 2, "shard": 8}], ids=str)
def test_the_formula_of_a_plan_rounds_as_fully_shard_does(sizes):
    """The first rank of each pipeline stage holds as many parameters as the formula says."""
    layout = Layout(zero=3, **sizes)
    ranks_per_stage = layout.gpus // layout.pp
    traced = []
    for rank in trace(ODD, layout).ranks:
        is_first_of_stage = rank.rank % ranks_per_stage == 0
        if is_first_of_stage:
            traced.append(rank.numbers)
    planned = [shared_parameters(ODD, layout, stage) for stage in range(layout.pp)]
    assert traced == planned
