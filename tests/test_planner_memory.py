"""The planner's bytes against PyTorch's: what selective checkpointing keeps, and FSDP that gathers once a step."""

import sys
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from helpers.planner.conventions import Conventions
from helpers.planner.corrections import ALLOCATOR_GAPS
from helpers.planner.layout import Layout
from helpers.planner.memory import activations_per_layer, memory, stage_parameters
from helpers.planner.model import model_of
from helpers.ranks.launch import launch
from helpers.runtime.models import PixelTransformer

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank would import this module, in a second

WIDTH, HEADS, KEYS, INNER, SAMPLES, SEQ = 64, 4, 2, 160, 3, 32
LEVELS = 17  # of grey


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH // HEADS * KEYS, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH // HEADS * KEYS, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        normed = self.attention_norm(x)
        heads = []
        for linear in (self.query, self.key, self.value):
            heads.append(linear(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def test_sac_keeps_what_pytorchs_selective_checkpoint_stores():
    """torchtitan's policy: every second matrix product is recomputed; attention is kept."""
    modes = []
    products = {"forward": 0, "recompute": 0}

    def policy(context, operation, *args, **kwargs):
        kept = "flash_attention" in str(operation)
        if operation is torch.ops.aten.mm.default:
            phase = "recompute" if context.is_recompute else "forward"
            products[phase] += 1
            kept = products[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        modes.append(create_selective_checkpoint_contexts(policy))
        return modes[-1]

    x = torch.randn(SAMPLES, SEQ, WIDTH, requires_grad=True)
    out = checkpoint(Block(), x, use_reentrant=False, context_fn=contexts)
    forward_mode, _ = modes[0]
    stored = x.nbytes
    for leaf in tree_leaves([list(results.values()) for results in forward_mode.storage.values()]):
        if isinstance(getattr(leaf, "val", None), torch.Tensor):
            stored += leaf.val.nbytes
    out.sum().backward()

    shape = {"layers": 1, "width": WIDTH, "heads": HEADS, "kv_heads": KEYS, "ffn": INNER, "vocab": 9, "seq": SEQ}
    model = model_of({**shape, "gated": True})
    planned = activations_per_layer(model, Layout(micro_batch=SAMPLES, recompute="sac", dtype="float32"))
    logarithms = SAMPLES * SEQ * HEADS * 4  # Attention stores one for each head, which the planner leaves out.
    assert stored == planned + logarithms


def test_copies_of_the_logits():
    def output(logits, tp=1):
        return memory(model_of("gpt2"), Layout(tp=tp), Conventions(logits=logits))[0]["output"]

    copy = 4 * 1024 * 50257
    assert output("eager") - output("freed") == copy
    assert output("eager") - output("stored") == 3 * copy
    assert output("freed", tp=2) == output("eager", tp=2)  # A divided loss makes another copy.


def test_in_a_pipeline_fsdp_keeps_what_it_has_gathered():
    """16-bit parameters and float32 gradients of the whole stage, as torchtitan's default does.

    The fullest moment is the first reduction, in which one layer's gradient is in the float32 memory of a
    reduce-scatter, too. FSDPMemTracker sees that in test_gathered_once_parameters_and_gradients_stay.
    """
    model = model_of("llama3-70b")
    layout = Layout(dp=8, tp=8, pp=8, zero=3, batch=64, recompute="full", sequence_parallel=True)
    middle = memory(model, layout, Conventions())[3]
    parameters = stage_parameters(model, layout, 3)
    of_a_layer = parameters / len(layout.layers_of(model, 3))
    assert middle["gathered"] == pytest.approx((2 + 4) * parameters + 4 * of_a_layer, rel=1e-6)
    resharded = memory(model, layout, Conventions(gather="each"))[3]
    assert resharded["gathered"] < middle["gathered"] / 5
    assert memory(model, layout, Conventions(gather="once")) == memory(model, layout, Conventions())


def test_experts_that_no_other_rank_has_are_not_gathered():
    model = model_of("qwen3-30b-a3b")
    settings = {"dp": 8, "zero": 3, "batch": 64, "recompute": "full"}
    conventions = Conventions(states="bfloat16", gather="once")

    def gathered(**sizes):
        (kinds,) = memory(model, Layout(**settings, **sizes), conventions)
        return kinds["gathered"]

    layer_experts = 3 * model.width * model.ffn * model.experts
    other_parameters = model.parameters() - model.layers * layer_experts
    assert gathered(ep=8) == pytest.approx((2 + 2) * other_parameters, rel=1e-3)
    assert gathered() == pytest.approx((2 + 2) * model.parameters(), rel=1e-3)


def test_the_allocators_gaps_are_a_share_of_the_tensors():
    (reserved,) = memory(model_of("gpt2"), Layout(), Conventions())
    (tensors,) = memory(model_of("gpt2"), Layout(), Conventions(allocator="tensors"))
    assert reserved["total"] == pytest.approx((1 + ALLOCATOR_GAPS) * tensors["total"])


@dataclass(frozen=True)
class Case:
    ranks: int
    width: int
    layers: int
    samples: int
    micro_batches: int
    heads: int = 8
    levels: int = LEVELS


GATHERED_ONCE = [
    Case(ranks=16, width=2048, layers=4, samples=1, micro_batches=1),
    Case(ranks=16, width=2048, layers=4, samples=1, micro_batches=3),
]
GATHERED_EACH_TIME = [
    Case(ranks=4, width=256, layers=4, samples=64, micro_batches=1, heads=4),  # Activations are most of it,
    Case(ranks=8, width=256, layers=4, samples=32, micro_batches=1, levels=5000),  # and the output,
    Case(ranks=16, width=2048, layers=4, samples=1, micro_batches=1),  # and gathered layers.
]


def tracked_peaks(cases, gathers_once):
    """Bytes of a step of FSDP on rank 0, at its fullest moment."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    totals = []
    for case in cases:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=case.ranks)
        mesh = init_device_mesh("cpu", (case.ranks,))
        with FakeTensorMode():
            model = PixelTransformer(case.width, case.layers, case.heads, case.levels)
            for module in [*model.blocks, model]:
                fully_shard(module, mesh=mesh, reshard_after_forward=not gathers_once)
            optimizer = torch.optim.AdamW(model.parameters())
            grey = torch.zeros(case.samples, 64, dtype=torch.long)
            labels = torch.zeros(case.samples, dtype=torch.long)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((grey, labels))
            with tracker:
                for _ in range(2):  # The first step creates the optimizer's state.
                    for number in range(case.micro_batches):
                        # As the stages of torch.distributed.pipelining do.
                        is_last = number == case.micro_batches - 1
                        model.set_is_last_backward(is_last)
                        model.set_requires_gradient_sync(is_last)
                        model.set_reshard_after_backward(is_last)
                        logits = model(grey, labels)
                        F.cross_entropy(logits.flatten(0, 1), grey.flatten()).backward()
                        tracker.reset_mod_stats()
                    optimizer.step()
                    optimizer.zero_grad()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        totals.append(peak["Total"])
    return totals


@pytest.mark.ranks
def test_the_fullest_moment_is_the_trackers():
    tracked = launch(tracked_peaks, GATHERED_EACH_TIME, False, nproc=1, timeout=200)[0]
    fullest = []
    for case, peak in zip(GATHERED_EACH_TIME, tracked, strict=True):
        shape = {"width": case.width, "layers": case.layers, "heads": case.heads, "vocab": case.levels}
        layout = Layout(dp=case.ranks, zero=3, micro_batch=case.samples, dtype="float32")
        (kinds,) = memory(model_of({"preset": "pixels", **shape}), layout, Conventions(allocator="tensors"))
        assert kinds.pop("total") == pytest.approx(peak, rel=0.06)
        fullest.append(max(kinds, key=kinds.get))
    assert fullest == ["activations", "output", "gathered"]


@pytest.mark.ranks
def test_gathered_once_parameters_and_gradients_stay():
    tracked = launch(tracked_peaks, GATHERED_ONCE, True, nproc=1, timeout=200)[0]
    for case, peak in zip(GATHERED_ONCE, tracked, strict=True):
        shape = {"width": case.width, "layers": case.layers, "heads": 8, "vocab": LEVELS}
        model = model_of({"preset": "pixels", **shape})
        batch = case.ranks * case.samples * case.micro_batches
        layout = Layout(dp=case.ranks, zero=3, micro_batch=case.samples, batch=batch, dtype="float32")
        (once,) = memory(model, layout, Conventions(gather="once", allocator="tensors"))
        (each,) = memory(model, layout, Conventions(gather="each", allocator="tensors"))
        planned = once["total"]
        if torch.__version__ < "2.15" and case.micro_batches == 1:
            planned += 4 * 12 * case.width**2  # bytes of one more layer in an all-gather's buffer
        assert planned == pytest.approx(peak, rel=0.07)
        assert once["total"] > each["total"]
