"""What ranks hold: traced in worlds of pretended ranks, and equal to what real ranks hold in a world of four."""

import sys

import cloudpickle
import pytest
import torch.distributed as dist

from helpers.planner.layout import Layout
from helpers.planner.memory import shared_parameters
from helpers.planner.model import model_of
from helpers.planner.records import PlanError
from helpers.planner.trace import count_rank, trace
from helpers.ranks.launch import launch
from helpers.runtime.process_group import start_process_group, stop_process_group

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second
pytestmark = pytest.mark.ranks

# Few numbers of ranks divide its rows: a width of 42, an MLP of 46, 101 tokens.
ODD = model_of({"name": "odd", "layers": 3, "width": 42, "heads": 6, "ffn": 46, "vocab": 101, "seq": 8, "gated": True})


@pytest.mark.parametrize(
    "model", [ODD.with_(layers=6), ODD.with_(layers=6, dense_layers=3, experts=4, active_experts=2)]
)
def test_two_layers_of_each_kind_stand_for_all(model):
    layout = Layout(dp=32, tp=2, zero=3)
    assert trace(model, layout) == trace(model, layout, every_layer=True)


@pytest.mark.parametrize("layout", [Layout(dp=2, tp=2, zero=3), Layout(dp=4, zero=3), Layout(dp=4, zero=3, shard=2)])
def test_pretended_ranks_hold_the_bytes_of_real_ones(layout):
    def count(model, layout):
        return count_rank(model, layout, dist.get_rank(), stage=0, every_layer=True, device="cpu")

    ranks = launch(count, ODD, layout, nproc=4, timeout=200)
    pretended = trace(ODD, layout)
    assert pretended.first == ranks[0]
    assert pretended.smallest.numbers == ranks[3].numbers
    assert pretended.largest.numbers == max(rank.numbers for rank in ranks)


@pytest.mark.parametrize("sizes", [{"dp": 512}, {"dp": 12, "tp": 2, "pp": 3}, {"dp": 64, "tp": 2, "shard": 8}], ids=str)
def test_the_formula_of_a_plan_rounds_as_fully_shard_does(sizes):
    layout = Layout(zero=3, **sizes)
    ranks_per_stage = layout.gpus // layout.pp
    firsts = [rank.numbers for rank in trace(ODD, layout).ranks if rank.rank % ranks_per_stage == 0]
    assert firsts == [shared_parameters(ODD, layout, stage) for stage in range(layout.pp)]


def test_the_process_group_of_the_caller_survives():
    start_process_group()
    try:
        result = trace(ODD, Layout(dp=64, zero=3))
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        assert result.first.numbers < ODD.parameters() / 32
    finally:
        stop_process_group()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(dp=8), "only FSDP's sharding is traced, and zero is 0.\nGive zero = 3."),
        (Layout(dp=2, tp=16, zero=3), "8 kv_heads would be copied to tp = 16 ranks"),
    ],
)
def test_what_is_not_traced_is_refused(layout, words):
    with pytest.raises(PlanError, match=words):
        trace(model_of("llama3-70b"), layout)
