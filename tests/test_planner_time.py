"""The planner's collectives, equal to those of real ranks, and its step time on measured steps that no fit saw."""

import dataclasses
import functools
import math
import statistics
import sys
from pathlib import Path

import cloudpickle
import pytest

from helpers.planner.cluster import PRESETS, cluster_of
from helpers.planner.communication import collectives, link_seconds, places
from helpers.planner.conventions import Conventions
from helpers.planner.experiments.steps import published_steps
from helpers.planner.experiments.vtrain import MEGATRON, coverage, fit, interval_factor, left_out, measured
from helpers.planner.layout import Layout
from helpers.planner.model import model_of, size_of
from helpers.planner.step_time import FACTOR, FITTED, step_time
from helpers.ranks.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second

REFERENCES = (Path(__file__).parents[1] / "book" / "references.bib").read_text()
FLOAT8 = {"dtype": "float8"}

# --- counts ---------------------------------------------------------------------------------------------------------

SAMPLES, LAYERS = 4, 3


def kind_of(operation):
    """The planner's word for an operation of c10d: functional ones and those of fully_shard differ by underscores."""
    name, kinds = str(operation).replace("_", ""), ("all_reduce", "all_gather", "reduce_scatter")
    return next((kind for kind in kinds if kind.replace("_", "") in name and "c10d" in name), None)


def add(kinds, kind, count, size):
    """Add to {kind: (count, bytes)}."""
    before = kinds.get(kind, (0, 0))
    kinds[kind] = (before[0] + count, before[1] + size)


def seen_on_ranks(sizes, sequence_parallel, shared_input, recompute=""):
    """{phase: {kind: (count, bytes)}} of one step of the pixel transformer."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from helpers.runtime.models import PixelTransformer

    class Sent(TorchDispatchMode):
        """Counts collectives in ``kinds``, with the bytes of the larger of a collective's tensors: the whole one."""

        def __init__(self):
            super().__init__()
            self.kinds = {}

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # until only the rank's own tensors are left
            result = operation(*args, **(kwargs or {}))
            if kind := kind_of(operation):
                tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
                add(self.kinds, kind, 1, max(tensor.nbytes for tensor in tensors))
            return result

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = PixelTransformer(layers=LAYERS)
    column, row, norm = parallel.ColwiseParallel, parallel.RowwiseParallel, parallel.SequenceParallel
    for block in model.blocks if "tp" in sizes else ():
        plan = {name: column() for name in ("query", "key", "value", "mlp.0")}
        plan |= {"out": row(), "mlp.2": row()}
        if sequence_parallel:
            plan |= {"norm1": norm(), "norm2": norm(), "mlp.0": column(input_layouts=Shard(1))}
            plan |= {name: row(output_layouts=Shard(1)) for name in ("out", "mlp.2")}
            if not shared_input:
                plan |= {name: column(input_layouts=Shard(1)) for name in ("query", "key", "value")}
        parallel.parallelize_module(block, mesh["tp"], plan)
        if shared_input:
            before = Shard(1) if sequence_parallel else Replicate()
            layouts = {"output_layouts": before, "desired_output_layouts": Replicate()}
            gather = parallel.PrepareModuleOutput(**layouts, use_local_output=False)
            parallel.parallelize_module(block.norm1, mesh["tp"], gather)
    if sequence_parallel:
        layouts = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(1),)}
        plan = {"blocks.0": parallel.PrepareModuleInput(**layouts, use_local_output=True), "norm": norm()}
        plan["head"] = column(input_layouts=Shard(1), output_layouts=Replicate())
        parallel.parallelize_module(model, mesh["tp"], plan)
    data = tuple(name for name in sizes if name != "tp")
    for module in [*model.blocks, model] if data else ():
        fully_shard(module, mesh=mesh[data if len(data) > 1 else data[0]])
    how = {"use_reentrant": False}
    if recompute == "sac":
        kept = [torch.ops._c10d_functional.reduce_scatter_tensor.default]
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    for block in model.blocks if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, **how)
    grey, labels = torch.randint(0, 17, (SAMPLES, 64)), torch.randint(0, 10, (SAMPLES,))
    with Sent() as forward:
        loss = F.cross_entropy(model(grey, labels).flatten(0, 1), grey.flatten())
    with Sent() as backward:
        loss.backward()
    return {"forward": forward.kinds, "backward": backward.kinds}


def planned(sizes, sequence_parallel, shared_input, recompute="none"):
    """The same by the planner."""
    data = math.prod(size for name, size in sizes.items() if name != "tp")
    how = {"sequence_parallel": sequence_parallel, "recompute": recompute, "dtype": "float32"}
    how |= {"zero": 3 if data > 1 else 0, "shard": sizes.get("shard", 0)}
    layout = Layout(dp=data, tp=sizes.get("tp", 1), micro_batch=SAMPLES, **how)
    model = model_of({"preset": "pixels", "layers": LAYERS})
    options = {"sharded": ("head",) if sequence_parallel else (), "loss_parallel": False}  # as the plan above does
    phases = {"forward": {}, "backward": {}}
    for group in collectives(model, layout, shared_input=shared_input, **options):
        phase = "backward" if group.phase == "recompute" else group.phase
        add(phases[phase], group.kind, group.count, group.count * group.size)
    return phases


CASES = [  # sizes of the mesh, sequence_parallel, shared_input, and recompute
    ({"tp": 2}, False, True),
    ({"tp": 2}, False, False),
    ({"tp": 2}, True, True),
    ({"tp": 2}, True, False),
    ({"tp": 2}, False, True, "full"),
    ({"tp": 2}, True, True, "full"),
    ({"tp": 2}, True, True, "sac"),
    ({"shard": 2}, False, True),
    ({"tp": 4}, True, True),
    ({"replicate": 2, "shard": 2}, False, True),
    ({"shard": 2, "tp": 2}, False, True),
    ({"shard": 2, "tp": 2}, True, True),
]


@pytest.fixture(scope="module")
def seen():
    """{case: what its collectives were on rank 0}: all cases of a number of ranks in one launch."""
    results = {}
    for nproc in (2, 4):
        cases = [case for case in CASES if math.prod(case[0].values()) == nproc]
        ranks = launch(lambda cases: [seen_on_ranks(*case) for case in cases], cases, nproc=nproc, timeout=200)
        results |= {str(case): result for case, result in zip(cases, ranks[0], strict=True)}
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_and_bytes_are_those_of_real_ranks(case, seen):
    assert seen[str(case)] == planned(*case)


# --- seconds of collectives -----------------------------------------------------------------------------------------


H100S = cluster_of("h100", 64)
NEAR, FAR = H100S.latency_in_node, H100S.latency_between


@pytest.mark.parametrize(
    ("kind", "size", "group", "latency", "in_node", "between"),
    [
        ("all_gather", 8e9, (8, 1), 7 * NEAR, 7e9 / 450e9, 0),
        # Between nodes each GPU sends its eighth, and only an all-reduce has a tree there.
        ("all_reduce", 8e9, (8, 8), 2 * (7 * NEAR + 3 * FAR), 2 * 7e9 / 450e9, 2 * 7 / 8 * 1e9 / 50e9),
        ("all_gather", 8e9, (8, 8), 7 * NEAR + 7 * FAR, 7e9 / 450e9, 7 / 8 * 1e9 / 50e9),
        ("all_to_all", 64e9, (8, 8), 7 * NEAR + 56 * FAR, 7e9 / 450e9, 56e9 / 50e9),
    ],
)
def test_seconds_on_links(kind, size, group, latency, in_node, between):
    assert link_seconds(kind, size, *group, H100S) == pytest.approx((latency, in_node, between))


def test_who_is_in_one_node():
    assert [places(*group, H100S) for group in ((8, 8), (16, 2), (6, 1))] == [(1, 8), (4, 4), (6, 1)]


def test_zero_3_sends_half_as_much_again_as_ddp_and_repeats_with_accumulation():
    model, conventions = model_of("gpt2"), Conventions(states="zero", shards="even")

    def sent(zero, micro_batches):
        layout = Layout(dp=8, zero=zero, batch=8 * micro_batches)
        return sum(group.sent for group in collectives(model, layout, conventions=conventions))

    inner = model.layers * size_of(model, 0)
    outside = model.parameters() - inner
    share = 2 * 7 / 8  # of 2 bytes
    assert sent(0, 1) == sent(0, 4) == sent(1, 4) == pytest.approx(2 * share * model.parameters())
    assert sent(3, 1) == pytest.approx(share * (3 * inner + 2 * outside), rel=1e-4)  # the root gathers once
    assert sent(3, 4) == 4 * sent(3, 1)
    assert sent(2, 4) == pytest.approx((4 + 1) * share * model.parameters())


def test_overlap_hides_gradients_up_to_the_time_of_the_backward():
    """DDP's and ZeRO-1's, of the last micro-batch; ZeRO-2 reduces in each one's. FSDP's hide without the convention."""
    model, fast, slow = model_of("gpt-1.7b"), H100S, H100S.with_(link_between=1e9)

    def parts(zero, cluster, batch, overlap):
        layout = Layout(dp=64, zero=zero, batch=batch)
        return step_time(model, layout, cluster, Conventions(overlap=overlap)).parts

    def hidden(zero, cluster, batch=64):
        before, after = (parts(zero, cluster, batch, overlap) for overlap in ("none", "backward"))
        assert {name for name in before if before[name] != after[name]} <= {"data parallel"}
        return before["data parallel"] - after["data parallel"], before

    saved, before = hidden(0, fast)
    assert saved == pytest.approx(before["data parallel"] * (1 - 1 / model.layers))  # all but one layer's
    saved, before = hidden(0, slow)
    layers = ("matrix products", "element by element", "launching")
    assert saved == pytest.approx(2 / 3 * sum(before[name] for name in layers))  # the backward's share of passes
    assert hidden(0, slow, 256)[0] == pytest.approx(saved) == pytest.approx(hidden(1, slow, 256)[0])
    assert hidden(2, slow, 256)[0] == pytest.approx(4 * saved)
    assert hidden(3, slow)[0] == 0


# --- step time ------------------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_fit_and_the_interval_covers_steps_that_it_did_not_see():
    constants = fit(measured())
    assert dataclasses.asdict(FITTED) == pytest.approx(dataclasses.asdict(constants), rel=2e-3)
    assert all(share < 1 for share in dataclasses.astuple(constants)) and fit(measured()) == constants
    assert interval_factor(left_out()) == pytest.approx(FACTOR, rel=2e-3)
    assert round(coverage(), 2) == 0.89


# GPT on A100s with NVLink and eight 200 Gb/s adapters a node, none of them in the fit: model, tp, pp, GPUs, batch,
# micro-batch, interleave and seconds of a step with full recomputation, and with selective and sequence parallelism.
KORTHIKANTI = [  # 2022, table 5
    ("gpt-22b", 8, 1, 8, 4, 4, 1, 1.42, 1.10),
    ("gpt-175b", 8, 8, 64, 64, 1, 3, 18.13, 13.75),
    ("gpt-530b", 8, 35, 280, 280, 1, 3, 49.05, 37.83),
    ("gpt-1t", 8, 64, 512, 512, 1, 1, 94.42, 71.49),
]


@pytest.mark.parametrize(
    ("name", "tp", "pp", "gpus", "batch", "micro_batch", "interleave", "full", "selective"), KORTHIKANTI
)
def test_steps_of_another_paper(name, tp, pp, gpus, batch, micro_batch, interleave, full, selective):
    sizes = {"batch": batch, "micro_batch": micro_batch, "interleave": interleave}
    layout = Layout(tp=tp, pp=pp, **sizes, recompute="full", attention="scores", dtype="float16")
    less = layout.with_(recompute="selective", sequence_parallel=True)
    for how, seconds in ((layout, full), (less, selective)):
        step = step_time(model_of(name), how, cluster_of("a100", gpus), MEGATRON)
        assert step.seconds == pytest.approx(seconds, rel=0.08)


def test_parts_add_up_and_what_is_extrapolated_is_named():
    step = step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert step.extrapolated == "h100 (fitted on A100s), FSDP or ZeRO, FlashAttention, gated MLPs"
    assert step.low < step.seconds < step.high
    reached = step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S.with_(measured=True))
    share = FITTED.matmul * H100S.reaches  # nothing is taken off speeds that were measured
    assert reached.parts["matrix products"] == pytest.approx(step.parts["matrix products"] * share)
    fitted = measured()[0]
    assert step_time(fitted.model, fitted.layout, fitted.cluster, MEGATRON).extrapolated == ""


@pytest.mark.parametrize(
    ("model", "speed", "recompute", "slower"),
    [
        ("llama3-8b", 2973, "sac", 1.11),
        ("llama3-8b", 2904, "none", 1.25),  # every second layer was recomputed, which no layout can say
        ("llama3-70b", 331, "full", 1.03),
    ],
)
def test_published_steps_with_fsdp_are_in_the_wider_interval(model, speed, recompute, slower):
    """torchtitan's docs/performance.md: 64 A100s, one sample of 8,192 tokens on each, tokens/s and GPU."""
    layout = Layout(dp=64, zero=3, recompute=recompute)
    step, seconds = step_time(model_of(model), layout, cluster_of("a100", 64)), 8192 / speed
    assert step.low < seconds < step.high
    assert round(seconds / step.seconds, 2) == slower


def test_fifteen_published_steps():
    """None of them was fitted: FSDP, stages, long sequences and float8 by torchtitan and Megatron-LM."""
    steps = published_steps()
    assert len(steps) == 15 and all(step.source.split()[0] in REFERENCES for step in steps)
    assert 1 / 1.15 < statistics.median(step.speed for step in steps) < 1.15
    assert [step.what for step in steps if not step.held] == ["8B, 8, CP 8, 256k, full, float8"]
    memory = [step.memory for step in steps if step.gib]
    assert len(memory) == 10
    assert 0.75 < min(memory) and max(memory) < 1.25
    assert all(step.plan.fits for step in steps)  # as they did


def test_only_linear_layers_multiply_in_float8():
    def products(seq, **how):
        layout = Layout(dp=64, zero=3, **how)
        return step_time(model_of("llama3-8b").with_(seq=seq), layout, H100S).parts["matrix products"] / seq

    # Attention's seconds for each token grow with the sequence; those of the linear layers do not.
    (short, long), (short8, long8) = ([products(seq, **how) for seq in (4096, 8192)] for how in ({}, FLOAT8))
    assert long - short == pytest.approx(long8 - short8)
    peaks = H100S.peaks["bfloat16"] / H100S.peaks["float8"]
    assert short8 - (long8 - short8) == pytest.approx((short - (long - short)) * peaks)
    heads = [step_time(model_of("gpt2"), Layout(dp=64, **how), H100S).parts["output layer"] for how in ({}, FLOAT8)]
    assert heads[0] == heads[1]


def test_a_limit_of_power_slows_products_alone():
    def parts(**changes):
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S.with_(**changes)).parts

    free, limited = parts(), parts(power_limit=350)
    assert limited["matrix products"] == pytest.approx(free["matrix products"] * 2 ** (1 / 3))
    assert limited["element by element"] == free["element by element"]
    assert parts(power_limit=900) == free
    assert parts(attention_reaches=FITTED.matmul * H100S.reaches) == pytest.approx(free)  # as matrix products reach
    assert parts(attention_reaches=0.35)["matrix products"] > free["matrix products"]


def test_ends_that_count_as_layers_make_room_on_their_stages():
    """Megatron-LM: 126 layers, an embedding and a head are 64 pieces of two."""
    layout = Layout(tp=8, pp=8, interleave=8, batch=64, outer_layers=True)
    model = model_of("llama3-405b")
    assert layout.stage_layers(model) == [15, *[16] * 6, 15]
    plain, outer = (
        step_time(model.with_(layers=n), layout.with_(outer_layers=n != 128), H100S).parts for n in (128, 126)
    )
    assert outer["matrix products"] == plain["matrix products"] and outer["output layer"] < plain["output layer"]


def test_published_steps_on_h100s():
    """llm-foundry's table of H100s, 2,048 tokens, FSDP: (model, GPUs, micro-batch, batch, tokens/s, recomputation)."""
    rows = [
        ("mpt-1b", 8, 14, 112, 363645, "none"),
        ("mpt-7b", 8, 6, 48, 85144, "none"),
        ("mpt-13b", 8, 2, 16, 38336, "none"),
        ("mpt-13b", 16, 2, 32, 76280, "none"),
        ("mpt-13b", 64, 2, 128, 307209, "none"),
        ("mpt-30b", 8, 3, 504, 16022, "full"),
        ("mpt-30b", 16, 10, 480, 36209, "full"),
        ("mpt-30b", 32, 14, 1344, 73860, "full"),
    ]
    ratios = {1.0: [], PRESETS["h100"]["reaches"]: []}
    for name, gpus, micro_batch, batch, speed, recompute in rows:
        layout = Layout(dp=gpus, zero=3, micro_batch=micro_batch, batch=batch, recompute=recompute)
        for reaches, of_rows in ratios.items():
            cluster = cluster_of({"preset": "h100", "reaches": reaches}, gpus)
            of_rows.append(batch * 2048 / speed / step_time(model_of(name), layout, cluster).seconds)
    without, reached = ([round(edge(ratio), 2) for edge in (min, max)] for ratio in ratios.values())
    assert (without, reached) == ([1.18, 1.55], [0.96, 1.29])  # as cluster.py says
