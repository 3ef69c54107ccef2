"""The planner's collectives, equal to those of real ranks, and its step time on measured steps that no fit saw."""

import functools
import sys
from dataclasses import astuple, dataclass
from statistics import median

import cloudpickle
import pytest

from helpers.planner.cluster import cluster_of
from helpers.planner.communication import LinkTime, collectives, dispatch_time, link_time, ranks_in_node
from helpers.planner.conventions import Conventions
from helpers.planner.corrections import ALLOCATOR_GAPS, CORRECTIONS, EXTRAPOLATION_FACTOR
from helpers.planner.experiments import steps
from helpers.planner.experiments.vtrain import MEGATRON, coverage, fit, interval_factor, left_out, measured
from helpers.planner.layout import Layout
from helpers.planner.memory import SAFE_SHARE
from helpers.planner.model import model_of
from helpers.planner.step_time import FITTED, INTERVAL_FACTOR, step_time
from helpers.ranks.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second

# --- Counts and bytes -------------------------------------------------------------------------------------------------

SAMPLES = 4
LAYERS = 3


@dataclass(frozen=True)
class Case:
    """A mesh of four real ranks, and how the pixel transformer is divided on it."""

    tp: int = 1
    shard: int = 1
    replicate: int = 1
    sequence_parallel: bool = False
    shared_input: bool = True
    recompute: str = "none"


CASES = [
    Case(tp=4),
    Case(tp=4, shared_input=False),
    Case(tp=4, sequence_parallel=True, recompute="full"),
    Case(tp=4, sequence_parallel=True, recompute="sac"),
    Case(shard=4),
    Case(shard=2, replicate=2),
    Case(shard=2, tp=2, sequence_parallel=True),
]


def count_messages(cases):
    """[{phase: {kind: (count, bytes)}}] of one step of each case on this rank."""
    return [messages_of_a_step(case) for case in cases]


def messages_of_a_step(case):
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Messages(TorchDispatchMode):
        """Counts collectives, with the bytes of the larger of a collective's tensors: the whole one."""

        def __init__(self):
            super().__init__()
            self.kinds = {}

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # until only the rank's local tensors are left
            result = operation(*args, **(kwargs or {}))
            kind = kind_of(operation)
            if kind:
                tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
                add(self.kinds, kind, 1, max(tensor.nbytes for tensor in tensors))
            return result

    model = divided_model(case)
    grey = torch.randint(0, 17, (SAMPLES, 64))
    labels = torch.randint(0, 10, (SAMPLES,))
    with Messages() as forward:
        loss = F.cross_entropy(model(grey, labels).flatten(0, 1), grey.flatten())
    with Messages() as backward:
        loss.backward()
    return {"forward": forward.kinds, "backward": backward.kinds}


def divided_model(case):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from helpers.runtime.models import PixelTransformer

    sizes = {"replicate": case.replicate, "shard": case.shard, "tp": case.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = PixelTransformer(layers=LAYERS)
    if case.tp > 1:
        divide_by_tensor_parallelism(model, mesh["tp"], case)
    if case.shard > 1:
        data = mesh["replicate", "shard"] if case.replicate > 1 else mesh["shard"]
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=data)
    if case.recompute != "none":
        options = {"use_reentrant": False}
        if case.recompute == "sac":
            kept = [torch.ops._c10d_functional.reduce_scatter_tensor.default]
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, **options)
    return model


def divide_by_tensor_parallelism(model, mesh, case):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    into = ColwiseParallel()
    into_from_parts = ColwiseParallel(input_layouts=Shard(1))
    back = RowwiseParallel()
    before = Replicate()
    plan = {"query": into, "key": into, "value": into, "out": back, "mlp.0": into, "mlp.2": back}
    if case.sequence_parallel:
        back_to_parts = RowwiseParallel(output_layouts=Shard(1))
        before = Shard(1)
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"out": back_to_parts, "mlp.0": into_from_parts, "mlp.2": back_to_parts}
    # Query, key and value share their input where it is gathered after the norm.
    gathered = PrepareModuleOutput(output_layouts=before, desired_output_layouts=Replicate(), use_local_output=False)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        if case.shared_input:
            parallelize_module(block.norm1, mesh, gathered)
    if case.sequence_parallel:
        split = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"blocks.0": split, "norm": SequenceParallel(), "head": head})


def planned_messages(case):
    """The same by the planner."""
    layout = Layout(
        dp=case.shard * case.replicate,
        tp=case.tp,
        zero=3 if case.shard > 1 else 0,
        shard=case.shard if case.shard > 1 else 0,
        micro_batch=SAMPLES,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        dtype="float32",
    )
    model = model_of({"preset": "pixels", "layers": LAYERS})
    # divided_model divides the head alone, and gathers the logits.
    sharded = ("head",) if case.sequence_parallel else ()
    phases = {"forward": {}, "backward": {}}
    for group in collectives(model, layout, sharded=sharded, shared_input=case.shared_input, loss_parallel=False):
        phase = "backward" if group.phase == "recompute" else group.phase
        add(phases[phase], group.kind, group.count, group.count * group.size)
    return phases


def kind_of(operation):
    """The planner's word for an operation of c10d: functional ones and those of fully_shard differ by underscores."""
    name = str(operation).replace("_", "")
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        if "c10d" in name and kind.replace("_", "") in name:
            return kind
    return None


def add(kinds, kind, count, size):
    """Add to {kind: (count, bytes)}."""
    counted, summed = kinds.get(kind, (0, 0))
    kinds[kind] = (counted + count, summed + size)


@pytest.fixture(scope="module")
def real_messages():
    """{case: its messages on rank 0}, of one launch of four ranks."""
    ranks = launch(count_messages, CASES, nproc=4, timeout=200)
    return dict(zip(CASES, ranks[0], strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_and_bytes_are_those_of_real_ranks(case, real_messages):
    assert real_messages[case] == planned_messages(case)


# --- Seconds of collectives -------------------------------------------------------------------------------------------


H100S = cluster_of("h100", 64)
NEAR = H100S.latency_in_node
FAR = H100S.latency_between


@pytest.mark.parametrize(
    ("kind", "size", "in_node", "nodes", "expected"),
    [
        ("all_gather", 8e9, 8, 1, LinkTime(7 * NEAR, 7e9 / 450e9, 0)),
        # Between nodes each GPU sends its eighth, and only an all-reduce has a tree there.
        ("all_reduce", 8e9, 8, 8, LinkTime(2 * (7 * NEAR + 3 * FAR), 2 * 7e9 / 450e9, 2 * 7 / 8 * 1e9 / 50e9)),
        ("all_gather", 8e9, 8, 8, LinkTime(7 * NEAR + 7 * FAR, 7e9 / 450e9, 7 / 8 * 1e9 / 50e9)),
        ("all_to_all", 64e9, 8, 8, LinkTime(7 * NEAR + 56 * FAR, 7e9 / 450e9, 56e9 / 50e9)),
    ],
)
def test_seconds_on_links(kind, size, in_node, nodes, expected):
    time = link_time(kind, size, in_node, nodes, H100S)
    assert astuple(time) == pytest.approx(astuple(expected))


def test_a_token_is_sent_once_to_each_node_that_needs_it():
    """On two nodes a token with eight random experts needs the other node with a probability of 1 - (1/2)^8."""
    bytes_of_tokens = 1e9
    random = dispatch_time(bytes_of_tokens, copies=8, draws=8, in_node=8, nodes=2, cluster=H100S)
    assert random.between == pytest.approx((1 - 0.5**8) * 1e9 / 50e9)
    assert random.in_node == pytest.approx(8 * 7 / 8 * 1e9 / 450e9)
    neighbours = dispatch_time(bytes_of_tokens, copies=1, draws=1, in_node=8, nodes=2, cluster=H100S)
    assert neighbours.between == pytest.approx(0.5 * 1e9 / 50e9)


def test_neighbouring_experts_are_on_few_ranks():
    """DeepSeek V3 has 256 experts: of 64 ranks each has four, so that eight neighbours are on two of them."""
    model = model_of("deepseek-v3")
    layout = Layout(dp=64, ep=64, zero=3)
    groups = collectives(model, layout, conventions=Conventions(dispatch="neighbours"))
    (forward,) = [group for group in groups if group.dimension == "ep" and group.phase == "forward"]
    assert forward.size == 2 * layout.tokens(model) * model.width * layout.element_bytes


def test_a_group_has_as_many_ranks_in_a_node_as_its_stride_allows():
    assert ranks_in_node(8, stride=8, cluster=H100S) == 1
    assert ranks_in_node(16, stride=2, cluster=H100S) == 4
    assert ranks_in_node(6, stride=1, cluster=H100S) == 6


def test_zero_3_sends_half_as_much_again_as_ddp_and_repeats_with_accumulation():
    model = model_of("gpt2")
    conventions = Conventions(states="zero")

    def sent(zero, micro_batches):
        layout = Layout(dp=8, zero=zero, batch=8 * micro_batches)
        return sum(group.sent for group in collectives(model, layout, conventions=conventions))

    per_number = 2 * 7 / 8  # 2 bytes, of which a ring sends 7/8
    ddp = 2 * per_number * model.parameters()
    assert sent(zero=0, micro_batches=1) == pytest.approx(ddp)
    assert sent(zero=0, micro_batches=4) == sent(zero=1, micro_batches=4) == pytest.approx(ddp)
    assert sent(zero=2, micro_batches=4) == pytest.approx((4 + 1) * per_number * model.parameters())
    # The root module's parameters are gathered once, and not again for the backward.
    numbers = 3 * model.layer_parameters() + 2 * model.outer_parameters()
    assert sent(zero=3, micro_batches=1) == pytest.approx(per_number * numbers, rel=1e-4)
    assert sent(zero=3, micro_batches=4) == 4 * sent(zero=3, micro_batches=1)


def test_overlap_hides_gradients_behind_the_backward():
    model = model_of("gpt-1.7b")

    def parts(overlap, cluster):
        return step_time(model, Layout(dp=64), cluster, Conventions(overlap=overlap)).parts

    def hidden(cluster):
        return parts("none", cluster)["data parallel"] - parts("backward", cluster)["data parallel"]

    # On fast links all is hidden but one layer's part, on slow ones as much as the backward takes.
    assert hidden(H100S) == pytest.approx(parts("none", H100S)["data parallel"] * (1 - 1 / model.layers))
    slow = H100S.with_(link_between=1e9)
    step = parts("none", slow)
    backward = 2 / 3 * (step["matrix products"] + step["element by element"] + step["launching"])
    assert hidden(slow) == pytest.approx(backward)


# --- Seconds of a step ------------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_fit_and_the_interval_covers_steps_that_it_did_not_see():
    assert astuple(FITTED) == pytest.approx(astuple(fit(measured())), rel=2e-3)
    assert interval_factor(left_out()) == pytest.approx(INTERVAL_FACTOR, rel=2e-3)
    assert round(coverage(), 2) == 0.89


def test_what_is_extrapolated_is_named():
    step = step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S)
    assert step.extrapolated == "h100 (fitted on A100s), FSDP or ZeRO, FlashAttention, gated MLPs"
    fitted = measured()[0]
    assert step_time(fitted.model, fitted.layout, fitted.cluster, MEGATRON).extrapolated == ""


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
    def seconds_of(layout):
        return step_time(model_of(name), layout, cluster_of("a100", gpus), MEGATRON).seconds

    layout = Layout(
        tp=tp,
        pp=pp,
        batch=batch,
        micro_batch=micro_batch,
        interleave=interleave,
        attention="scores",
        dtype="float16",
    )
    recomputing_all = layout.with_(recompute="full")
    assert seconds_of(recomputing_all) == pytest.approx(full, rel=0.08)
    recomputing_attention = layout.with_(recompute="selective", sequence_parallel=True)
    assert seconds_of(recomputing_attention) == pytest.approx(selective, rel=0.08)


def test_nothing_is_taken_off_speeds_that_were_measured():
    model = model_of("llama3-8b")
    layout = Layout(dp=64, zero=3)
    from_data_sheet = step_time(model, layout, H100S).parts["matrix products"]
    from_measured = step_time(model, layout, H100S.with_(measured=True)).parts["matrix products"]
    assert from_measured == pytest.approx(from_data_sheet * FITTED.matmul * H100S.reaches)


def test_only_linear_layers_multiply_in_float8():
    def parts_of_step(dtype):
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3, dtype=dtype), H100S).parts

    bfloat16 = parts_of_step("bfloat16")
    float8 = parts_of_step("float8")
    faster = H100S.peaks["float8"] / H100S.peaks["bfloat16"]
    assert 1 < bfloat16["matrix products"] / float8["matrix products"] < 0.95 * faster  # Attention stays in bfloat16.
    assert bfloat16["output layer"] == float8["output layer"]


def test_a_limit_of_power_slows_matrix_products_alone():
    def parts(**changes):
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S.with_(**changes)).parts

    free = parts()
    limited = parts(power_limit=350)
    assert limited["matrix products"] == pytest.approx(free["matrix products"] * 2 ** (1 / 3))
    assert limited["element by element"] == free["element by element"]
    assert parts(power_limit=900) == free


def test_ends_that_count_as_layers_make_room_on_their_stages():
    """Megatron-LM: 126 layers, an embedding and a head are 64 parts of two."""
    layout = Layout(tp=8, pp=8, interleave=8, batch=64, outer_layers=True)
    model = model_of("llama3-405b")
    assert layout.stage_layers(model) == [15, 16, 16, 16, 16, 16, 16, 15]
    with_ends = step_time(model, layout, H100S).parts
    layers_alone = step_time(model.with_(layers=128), layout.with_(outer_layers=False), H100S).parts
    assert with_ends["matrix products"] == layers_alone["matrix products"]
    assert with_ends["output layer"] < layers_alone["output layer"]


def test_layers_that_do_not_divide_are_spread_over_the_parts():
    """DeepSeek V3 has 61 layers, which are written on 4 stages of 8 parts."""
    model = model_of("deepseek-v3")
    layout = Layout(pp=4, interleave=8, batch=8, uneven_stages=True).check(model)
    assert layout.part_layers(model) == [1] + 29 * [2] + 2 * [1]
    assert layout.stage_layers(model) == [15, 16, 15, 15]
    assert layout.layers_of(model, 0) == [0, 7, 8, 15, 16, 23, 24, 31, 32, 39, 40, 47, 48, 55, 56]
    of_all_stages = []
    for stage in range(4):
        of_all_stages += layout.layers_of(model, stage)
    assert sorted(of_all_stages) == list(range(61))


# --- Published steps of other programs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    return steps.published_steps()


def test_every_second_row_by_name_is_fitted(published):
    names = [step.what for step in published]
    assert names == sorted(set(names))
    assert [step.is_fitted for step in published] == [number % 2 == 0 for number in range(len(names))]


def test_corrections_are_those_of_a_fit_on_half_of_the_rows(published):
    fitted = [step for step in published if step.is_fitted]
    assert astuple(CORRECTIONS) == pytest.approx(astuple(steps.fit(fitted)), rel=4e-3)
    assert steps.interval_factor(fitted) == pytest.approx(EXTRAPOLATION_FACTOR, rel=5e-3)
    assert steps.allocator_gaps(fitted) == pytest.approx(ALLOCATOR_GAPS, rel=5e-3)


@pytest.mark.parametrize("is_fitted", [True, False], ids=["fitted", "kept for the test"])
def test_published_steps(published, is_fitted):
    """On each half no side is preferred, nine of ten are in the interval, and memory is within 20 %."""
    half = [step for step in published if step.is_fitted == is_fitted]
    assert 1 / 1.08 <= median(step.speed for step in half) <= 1.08
    assert sum(step.held for step in half) >= 0.9 * len(half)
    for step in half:
        if step.gib:
            assert step.memory == pytest.approx(1, abs=0.2), step.what
            assert SAFE_SHARE / step.memory < 0.9, step.what  # so a safe plan leaves a tenth for what is not counted


def test_plans_fit_the_gpus_that_ran_them(published):
    """Where no memory was published, it was at most the GPU's: those with experts fit, the others within a tenth."""
    with_experts = [step for step in published if step.plan.model.experts]
    assert len(with_experts) == 6
    for step in with_experts:
        assert step.plan.fits, step.what
    for step in published:
        assert step.plan.bytes < 1.1 * step.plan.cluster.memory, step.what


def test_each_correction_makes_steps_slower_or_faster():
    """A plan without corrections takes another time where they apply, and the same where they do not."""
    model = model_of("llama3-8b")
    layout = Layout(dp=8, tp=4, cp=2, zero=3, sequence_parallel=True)
    cluster = cluster_of("h100", 64)

    def parts(**settings):
        return step_time(model, layout, cluster, Conventions(**settings)).parts

    usual = parts()
    assert parts(kernels="eager")["element by element"] == pytest.approx(
        CORRECTIONS.eager * usual["element by element"]
    )
    assert parts(tensor="overlapped")["tensor parallel"] == pytest.approx(
        CORRECTIONS.exposed * usual["tensor parallel"]
    )
    assert parts(kernels="transformer engine")["matrix products"] < usual["matrix products"]
    assert parts(context="gathered")["matrix products"] > usual["matrix products"]
    assert parts(context="gathered")["context parallel"] > 0 == usual["context parallel"]
