"""The planner's collectives, which equal those of real ranks, and its step times beside measured ones."""

import functools
import sys
from collections import Counter
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
    shared_input: bool = True  # whether query, key and value gather their input once
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


class Messages:
    """How many collectives there are, and how many bytes they have, of each phase and kind."""

    def __init__(self):
        self.counts = Counter()  # {(phase, kind): count}
        self.bytes = Counter()  # {(phase, kind): bytes of all}

    def add(self, phase, kind, count, size):
        """Count so many collectives of a kind, each with a whole tensor of ``size`` bytes."""
        self.counts[phase, kind] += count
        self.bytes[phase, kind] += count * size


def messages_of_cases(cases):
    """The Messages of one step of each case on this rank."""
    return [messages_of_a_step(case) for case in cases]


def messages_of_a_step(case):
    """Count the collectives of a forward and a backward on this rank. Ranks import torch here, and not the parent."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    messages = Messages()

    class Counting(TorchDispatchMode):
        """While this mode is entered, torch calls ``__torch_dispatch__`` for each operation."""

        def __init__(self, phase):
            super().__init__()
            self.phase = phase

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if any(issubclass(tensor_class, DTensor) for tensor_class in types):
                return NotImplemented  # It comes again with the rank's local tensors.
            result = operation(*args, **(kwargs or {}))
            kind = kind_of(operation)
            if kind is not None:
                # Of the tensors that go in and come out, the largest one is the whole one.
                leaves = tree_leaves((args, result))
                sizes = [leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)]
                messages.add(self.phase, kind, count=1, size=max(sizes))
            return result

    model = divided_model(case)
    grey = torch.randint(0, 17, (SAMPLES, 64))
    labels = torch.randint(0, 10, (SAMPLES,))
    with Counting("forward"):
        logits = model(grey, labels)
        loss = F.cross_entropy(logits.flatten(0, 1), grey.flatten())
    with Counting("backward"):
        loss.backward()
    return messages


def kind_of(operation):
    """The planner's word for an operation that is a collective, or None for any other operation.

    c10d's functional operations and those of fully_shard have other underscores in their names.
    """
    name = str(operation).replace("_", "")
    if "c10d" not in name:
        return None
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        if kind.replace("_", "") in name:
            return kind
    return None


def divided_model(case):
    """The pixel transformer on this rank, divided as the case says."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    from helpers.runtime.models import PixelTransformer

    all_sizes = {"replicate": case.replicate, "shard": case.shard, "tp": case.tp}
    sizes = {name: size for name, size in all_sizes.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = PixelTransformer(layers=LAYERS)
    if case.tp > 1:
        divide_by_tensor_parallelism(model, mesh["tp"], case)
    if case.shard > 1:
        data_mesh = mesh["shard"]
        if case.replicate > 1:
            data_mesh = mesh["replicate", "shard"]
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=data_mesh)
    if case.recompute != "none":
        options = {"use_reentrant": False}
        if case.recompute == "sac":
            kept_operations = [torch.ops._c10d_functional.reduce_scatter_tensor.default]
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept_operations)
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, **options)
    return model


def divide_by_tensor_parallelism(model, mesh, case):
    """Divide the matrices of each block, and with sequence parallelism also the tokens between them, and the head."""
    from tensor_parallel import divide_block
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        SequenceParallel,
        parallelize_module,
    )

    for block in model.blocks:
        divide_block(block, mesh, sequence_parallel=case.sequence_parallel, shared_input=case.shared_input)
    if case.sequence_parallel:
        divide_tokens = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"blocks.0": divide_tokens, "norm": SequenceParallel(), "head": head})


def planned_messages(case):
    """The Messages of one step by the planner."""
    is_sharded = case.shard > 1
    layout = Layout(
        dp=case.shard * case.replicate,
        tp=case.tp,
        zero=3 if is_sharded else 0,
        shard=case.shard if is_sharded else 0,
        micro_batch=SAMPLES,
        sequence_parallel=case.sequence_parallel,
        recompute=case.recompute,
        dtype="float32",
    )
    model = model_of({"preset": "pixels", "layers": LAYERS})
    # divided_model divides only the head along the vocabulary, and gathers the logits.
    divided_along_vocabulary = ("head",) if case.sequence_parallel else ()
    planned = collectives(
        model,
        layout,
        sharded=divided_along_vocabulary,
        shared_input=case.shared_input,
        loss_parallel=False,
    )
    messages = Messages()
    for collective in planned:
        phase = collective.phase
        if phase == "recompute":
            phase = "backward"  # It is a part of the backward, when real messages are counted.
        messages.add(phase, collective.kind, collective.count, collective.size)
    return messages


@pytest.fixture(scope="module")
def real_messages():
    """{case: its Messages on rank 0}. The ranks are launched once for all cases."""
    messages_of_ranks = launch(messages_of_cases, CASES, nproc=4, timeout=200)
    return dict(zip(CASES, messages_of_ranks[0], strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_counts_and_bytes_are_those_of_real_ranks(case, real_messages):
    real = real_messages[case]
    planned = planned_messages(case)
    assert real.counts == planned.counts
    assert real.bytes == planned.bytes


# --- Seconds of collectives -------------------------------------------------------------------------------------------


H100S = cluster_of("h100", 64)
LINK_IN_NODE = 450e9  # bytes a second
LINK_BETWEEN = 50e9
LATENCY_IN_NODE = H100S.latency_in_node
LATENCY_BETWEEN = H100S.latency_between


@pytest.mark.parametrize(
    ("kind", "size", "in_node", "nodes", "expected"),
    [
        (
            "all_gather",
            8e9,
            8,
            1,
            LinkTime(latency=7 * LATENCY_IN_NODE, in_node=7e9 / LINK_IN_NODE, between=0),
        ),
        # Between nodes each GPU sends its eighth.
        (
            "all_gather",
            8e9,
            8,
            8,
            LinkTime(
                latency=7 * LATENCY_IN_NODE + 7 * LATENCY_BETWEEN,
                in_node=7e9 / LINK_IN_NODE,
                between=7 / 8 * 1e9 / LINK_BETWEEN,
            ),
        ),
        # An all-reduce goes two ways, and between nodes it has a tree, which takes only three steps.
        (
            "all_reduce",
            8e9,
            8,
            8,
            LinkTime(
                latency=2 * (7 * LATENCY_IN_NODE + 3 * LATENCY_BETWEEN),
                in_node=2 * 7e9 / LINK_IN_NODE,
                between=2 * 7 / 8 * 1e9 / LINK_BETWEEN,
            ),
        ),
        (
            "all_to_all",
            64e9,
            8,
            8,
            LinkTime(
                latency=7 * LATENCY_IN_NODE + 56 * LATENCY_BETWEEN,
                in_node=7e9 / LINK_IN_NODE,
                between=56e9 / LINK_BETWEEN,
            ),
        ),
    ],
)
def test_seconds_on_links(kind, size, in_node, nodes, expected):
    """``size`` are bytes, among ``in_node`` ranks in each of ``nodes`` nodes."""
    time = link_time(kind, size, in_node, nodes, H100S)
    assert astuple(time) == pytest.approx(astuple(expected))


def test_a_token_is_sent_once_to_each_node_that_needs_it():
    """On two nodes a token with eight random experts needs the other node with a probability of 1 - (1/2)^8.

    If its experts are neighbours, the probability is 1/2.
    """
    bytes_of_tokens = 1e9
    random = dispatch_time(bytes_of_tokens, copies=8, draws=8, in_node=8, nodes=2, cluster=H100S)
    assert random.between == pytest.approx((1 - 0.5**8) * bytes_of_tokens / LINK_BETWEEN)
    assert random.in_node == pytest.approx(8 * 7 / 8 * bytes_of_tokens / LINK_IN_NODE)

    neighbours = dispatch_time(bytes_of_tokens, copies=1, draws=1, in_node=8, nodes=2, cluster=H100S)
    assert neighbours.between == pytest.approx(0.5 * bytes_of_tokens / LINK_BETWEEN)


def test_neighbouring_experts_are_on_few_ranks():
    """DeepSeek V3 has 256 experts. Each of 64 ranks has four of them, so a token's eight are on two ranks."""
    model = model_of("deepseek-v3")
    layout = Layout(dp=64, ep=64, zero=3)
    planned = collectives(model, layout, conventions=Conventions(dispatch="neighbours"))
    (forward,) = [collective for collective in planned if (collective.dimension, collective.phase) == ("ep", "forward")]
    bytes_of_tokens = layout.tokens(model) * model.width * layout.element_bytes
    assert forward.size == 2 * bytes_of_tokens


def test_a_group_has_as_many_ranks_in_a_node_as_its_stride_allows():
    assert ranks_in_node(8, stride=8, cluster=H100S) == 1
    assert ranks_in_node(16, stride=2, cluster=H100S) == 4
    assert ranks_in_node(6, stride=1, cluster=H100S) == 6


def test_zero_3_sends_half_as_much_again_as_ddp_and_repeats_with_accumulation():
    model = model_of("gpt2")
    conventions = Conventions(states="zero")

    def sent(zero, micro_batches):
        """Bytes that a rank sends in a step."""
        layout = Layout(dp=8, zero=zero, batch=8 * micro_batches)
        return sum(collective.sent for collective in collectives(model, layout, conventions=conventions))

    once = 2 * 7 / 8  # bytes of a number that is gathered or reduce-scattered once: 2, of which a ring sends 7/8
    ddp = 2 * once * model.parameters()
    assert sent(zero=0, micro_batches=1) == pytest.approx(ddp)
    assert sent(zero=0, micro_batches=4) == pytest.approx(ddp)
    assert sent(zero=1, micro_batches=4) == sent(zero=0, micro_batches=4)
    # ZeRO-2 reduce-scatters for each of four micro-batches, and gathers once.
    assert sent(zero=2, micro_batches=4) == pytest.approx((4 + 1) * once * model.parameters())
    # ZeRO-3 reduce-scatters once, and gathers for the forward and for the backward; what is outside the layers only for
    # the forward.
    numbers = 3 * model.layer_parameters() + 2 * model.outer_parameters()
    assert sent(zero=3, micro_batches=1) == pytest.approx(once * numbers, rel=1e-4)
    assert sent(zero=3, micro_batches=4) == 4 * sent(zero=3, micro_batches=1)


def test_overlap_hides_gradients_behind_the_backward():
    """On fast links all seconds are hidden but those of one layer; on slow links as many as the backward takes."""
    model = model_of("gpt-1.7b")

    def parts(overlap, cluster):
        return step_time(model, Layout(dp=64), cluster, Conventions(overlap=overlap)).parts

    exposed = parts("none", H100S)["data parallel"]
    hidden = exposed - parts("backward", H100S)["data parallel"]
    assert hidden == pytest.approx(exposed * (1 - 1 / model.layers))

    slow_links = H100S.with_(link_between=1e9)
    step = parts("none", slow_links)
    hidden = step["data parallel"] - parts("backward", slow_links)["data parallel"]
    all_passes = step["matrix products"] + step["element by element"] + step["launching"]
    backward = 2 / 3 * all_passes
    assert hidden == pytest.approx(backward)


# --- Seconds of a step ------------------------------------------------------------------------------------------------


def test_constants_are_those_of_the_fit_and_the_interval_covers_steps_that_it_did_not_see():
    assert astuple(FITTED) == pytest.approx(astuple(fit(measured())), rel=2e-3)
    assert interval_factor(left_out()) == pytest.approx(INTERVAL_FACTOR, rel=2e-3)
    assert round(coverage(), 2) == 0.89


def test_what_is_extrapolated_is_named():
    extrapolated = step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), H100S)
    assert extrapolated.extrapolated == "h100 (fitted on A100s), FSDP or ZeRO, FlashAttention, gated MLPs"

    measured_step = measured()[0]
    fitted = step_time(measured_step.model, measured_step.layout, measured_step.cluster, MEGATRON)
    assert fitted.extrapolated == ""


# Steps of GPT on A100s with NVLink and eight 200 Gb/s adapters a node (Korthikanti et al. 2022, table 5). None of them
# is in the fit. Each is a model, its layout, and the seconds of a step with full recomputation, and with selective
# recomputation and sequence parallelism.
KORTHIKANTI = [
    ("gpt-22b", {"tp": 8, "pp": 1, "batch": 4, "micro_batch": 4}, 1.42, 1.10),
    ("gpt-175b", {"tp": 8, "pp": 8, "batch": 64, "interleave": 3}, 18.13, 13.75),
    ("gpt-530b", {"tp": 8, "pp": 35, "batch": 280, "interleave": 3}, 49.05, 37.83),
    ("gpt-1t", {"tp": 8, "pp": 64, "batch": 512}, 94.42, 71.49),
]


@pytest.mark.parametrize(("name", "sizes", "full", "selective"), KORTHIKANTI, ids=[row[0] for row in KORTHIKANTI])
def test_steps_of_another_paper(name, sizes, full, selective):
    model = model_of(name)
    layout = Layout(**sizes, attention="scores", dtype="float16")
    cluster = cluster_of("a100", layout.gpus)

    recomputing_all = layout.with_(recompute="full")
    step = step_time(model, recomputing_all, cluster, MEGATRON)
    assert step.seconds == pytest.approx(full, rel=0.08)

    recomputing_attention = layout.with_(recompute="selective", sequence_parallel=True)
    step = step_time(model, recomputing_attention, cluster, MEGATRON)
    assert step.seconds == pytest.approx(selective, rel=0.08)


def test_nothing_is_taken_off_speeds_that_were_measured():
    """Products reach all of a measured speed, and only a share of a data sheet's."""

    def seconds_of_products(cluster):
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), cluster).parts["matrix products"]

    from_data_sheet = seconds_of_products(H100S)
    from_measurement = seconds_of_products(H100S.with_(measured=True))
    share_reached = FITTED.matmul * H100S.reaches
    assert from_measurement == pytest.approx(from_data_sheet * share_reached)


def test_only_linear_layers_multiply_in_float8():
    """Attention and the output layer stay in bfloat16, so the speedup is smaller than that of the peak."""

    def parts_of_step(dtype):
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3, dtype=dtype), H100S).parts

    bfloat16 = parts_of_step("bfloat16")
    float8 = parts_of_step("float8")
    speedup = bfloat16["matrix products"] / float8["matrix products"]
    speedup_of_peak = H100S.peaks["float8"] / H100S.peaks["bfloat16"]
    assert 1 < speedup < 0.95 * speedup_of_peak
    assert bfloat16["output layer"] == float8["output layer"]


def test_a_limit_of_power_slows_matrix_products_alone():
    """At half of the power the clock falls by the cube root of two. A limit above the GPU's power changes nothing."""

    def parts(power_limit):
        cluster = H100S.with_(power_limit=power_limit)
        return step_time(model_of("llama3-8b"), Layout(dp=64, zero=3), cluster).parts

    unlimited = parts(power_limit=0)
    half = parts(power_limit=H100S.power / 2)
    assert half["matrix products"] == pytest.approx(unlimited["matrix products"] * 2 ** (1 / 3))
    assert half["element by element"] == unlimited["element by element"]
    assert parts(power_limit=900) == unlimited


def test_ends_that_count_as_layers_make_room_on_their_stages():
    """In Megatron-LM 126 layers, the embedding and the head are 64 parts of two."""
    layout = Layout(tp=8, pp=8, interleave=8, batch=64, outer_layers=True)
    model = model_of("llama3-405b")
    assert layout.stage_layers(model) == [15, 16, 16, 16, 16, 16, 16, 15]

    step = step_time(model, layout, H100S).parts
    step_of_128_layers = step_time(model.with_(layers=128), layout.with_(outer_layers=False), H100S).parts
    assert step["matrix products"] == step_of_128_layers["matrix products"]
    assert step["output layer"] < step_of_128_layers["output layer"]


def test_layers_that_do_not_divide_are_spread_over_the_parts():
    """DeepSeek V3 has 61 layers. Here 4 stages have 8 parts each: 3 parts of one layer, and 29 of two."""
    model = model_of("deepseek-v3")
    layout = Layout(pp=4, interleave=8, batch=8, uneven_stages=True).check(model)
    assert layout.part_layers(model) == [1] + 29 * [2] + 2 * [1]
    assert layout.stage_layers(model) == [15, 16, 15, 15]
    assert layout.layers_of(model, stage=0) == [0, 7, 8, 15, 16, 23, 24, 31, 32, 39, 40, 47, 48, 55, 56]

    layers_of_all_stages = []
    for stage in range(4):
        layers_of_all_stages += layout.layers_of(model, stage)
    assert sorted(layers_of_all_stages) == list(range(61))


# --- Published steps of other programs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    return steps.published_steps()


def test_every_second_row_by_name_is_fitted(published):
    names = [step.what for step in published]
    assert names == sorted(set(names))
    for number, step in enumerate(published):
        is_even = number % 2 == 0
        assert step.is_fitted == is_even, step.what


def test_corrections_are_those_of_a_fit_on_half_of_the_rows(published):
    fitted = [step for step in published if step.is_fitted]
    assert astuple(CORRECTIONS) == pytest.approx(astuple(steps.fit(fitted)), rel=4e-3)
    assert steps.interval_factor(fitted) == pytest.approx(EXTRAPOLATION_FACTOR, rel=5e-3)
    assert steps.allocator_gaps(fitted) == pytest.approx(ALLOCATOR_GAPS, rel=5e-3)


@pytest.mark.parametrize("is_fitted", [True, False], ids=["fitted", "kept for the test"])
def test_published_steps(published, is_fitted):
    """On each half as many plans are too fast as too slow, nine in ten are in the interval, memory is within 20 %."""
    half = [step for step in published if step.is_fitted == is_fitted]
    assert 1 / 1.08 <= median(step.speed for step in half) <= 1.08
    steps_in_interval = [step for step in half if step.held]
    assert len(steps_in_interval) >= 0.9 * len(half)

    with_published_memory = [step for step in half if step.gib]
    for step in with_published_memory:
        assert step.memory == pytest.approx(1, abs=0.2), step.what
        # A plan that is safe leaves a tenth of the GPU for what is not counted.
        largest_share_used = SAFE_SHARE / step.memory
        assert largest_share_used < 0.9, step.what


def test_plans_fit_the_gpus_that_ran_them(published):
    """Each step did fit its GPU. Plans of models with experts fit, too, and others need at most a tenth more."""
    with_experts = [step for step in published if step.plan.model.experts]
    assert len(with_experts) == 6
    for step in with_experts:
        assert step.plan.fits, step.what
    for step in published:
        assert step.plan.bytes < 1.1 * step.plan.cluster.memory, step.what


def test_each_correction_makes_steps_slower_or_faster():
    """A setting to which a correction applies changes the seconds of its part of the step."""
    model = model_of("llama3-8b")
    layout = Layout(dp=8, tp=4, cp=2, zero=3, sequence_parallel=True)
    cluster = cluster_of("h100", 64)

    def parts(**settings):
        return step_time(model, layout, cluster, Conventions(**settings)).parts

    usual = parts()
    eager = parts(kernels="eager")
    assert eager["element by element"] == pytest.approx(CORRECTIONS.eager * usual["element by element"])

    overlapped = parts(tensor="overlapped")
    assert overlapped["tensor parallel"] == pytest.approx(CORRECTIONS.exposed * usual["tensor parallel"])

    engine = parts(kernels="transformer engine")
    assert engine["matrix products"] < usual["matrix products"]

    gathered = parts(context="gathered")
    assert gathered["matrix products"] > usual["matrix products"]
    assert usual["context parallel"] == 0
    assert gathered["context parallel"] > 0
