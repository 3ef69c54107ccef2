"""The planner's bytes beside PyTorch's: what selective checkpointing keeps, and how much FSDP needs at most."""

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

BFLOAT16_BYTES = 2
FLOAT32_BYTES = 4

# --- Selective activation checkpointing -------------------------------------------------------------------------------

WIDTH = 64
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = WIDTH // HEADS
MLP_WIDTH = 160
SAMPLES = 3
TOKENS = 32  # of a sample


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self):
        super().__init__()
        kv_width = HEAD_WIDTH * KV_HEADS
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, kv_width, bias=False)
        self.value = nn.Linear(WIDTH, kv_width, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, MLP_WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def split_heads(self, x):
        """[samples, tokens, width] to [samples, heads, tokens, head width]."""
        return x.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)

    def forward(self, x):
        normed = self.attention_norm(x)
        query = self.split_heads(self.query(normed))
        key = self.split_heads(self.key(normed))
        value = self.split_heads(self.value(normed))
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(attention.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class TorchtitansPolicy:
    """torchtitan's choice of what is kept: attention's output, and that of the first, third … matrix product.

    It is called for each operation of a forward, and again for each of its recomputation.
    """

    def __init__(self):
        self.products = {"forward": 0, "recomputation": 0}  # how many matrix products there have been

    def __call__(self, context, operation, *args, **kwargs):
        if self.is_kept(context, operation):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def is_kept(self, context, operation):
        if operation is not torch.ops.aten.mm.default:
            return "flash_attention" in str(operation)
        phase = "forward"
        if context.is_recompute:
            phase = "recomputation"
        self.products[phase] += 1
        return self.products[phase] % 2 == 1


def bytes_of_outputs(forward_mode):
    """Bytes of the outputs that a forward under selective checkpointing has stored.

    PyTorch has no function for it, so this reads the mode's private storage: {operation: {number: outputs}}.
    """
    total = 0
    all_outputs = [list(outputs.values()) for outputs in forward_mode.storage.values()]
    for output in tree_leaves(all_outputs):
        tensor = getattr(output, "val", None)
        if isinstance(tensor, torch.Tensor):
            total += tensor.nbytes
    return total


def test_sac_keeps_what_pytorchs_selective_checkpoint_stores():
    contexts = create_selective_checkpoint_contexts(TorchtitansPolicy())
    forward_mode, _ = contexts

    def contexts_of_checkpoint():
        return contexts

    x = torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)
    out = checkpoint(Block(), x, use_reentrant=False, context_fn=contexts_of_checkpoint)
    stored = x.nbytes + bytes_of_outputs(forward_mode)
    out.sum().backward()

    model = model_of(
        {
            "layers": 1,
            "width": WIDTH,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "ffn": MLP_WIDTH,
            "vocab": 9,
            "seq": TOKENS,
            "gated": True,
        }
    )
    planned = activations_per_layer(model, Layout(micro_batch=SAMPLES, recompute="sac", dtype="float32"))
    # Attention also stores a logarithm for each head and token, which the planner leaves out.
    logarithms = SAMPLES * TOKENS * HEADS * FLOAT32_BYTES
    assert stored == planned + logarithms


# --- The planner's counts ---------------------------------------------------------------------------------------------


def test_copies_of_the_logits():
    model = model_of("gpt2")

    def output(logits, tp=1):
        """Bytes of the output, with a setting of the convention about logits."""
        (stage,) = memory(model, Layout(tp=tp), Conventions(logits=logits))
        return stage["output"]

    copy = FLOAT32_BYTES * model.seq * model.vocab
    assert output("eager") - output("freed") == copy
    assert output("eager") - output("stored") == 3 * copy
    assert output("freed", tp=2) == output("eager", tp=2)  # With tensor parallelism the loss makes another copy.


def test_in_a_pipeline_fsdp_keeps_what_it_has_gathered():
    """By default, which is torchtitan's gather="once", FSDP gathers a stage's parameters once a step.

    Parameters and gradients then stay unsharded until the last micro-batch. So the peak memory holds the stage's
    bfloat16 parameters, its float32 gradients, and one layer's float32 reduce-scatter buffer. FSDPMemTracker measures
    such a peak in test_gathered_once_parameters_and_gradients_stay.
    """
    model = model_of("llama3-70b")
    layout = Layout(dp=8, tp=8, pp=8, zero=3, batch=64, recompute="full", sequence_parallel=True)
    stage = 3  # one in the middle
    stage_size = stage_parameters(model, layout, stage)
    layer_size = stage_size / len(layout.layers_of(model, stage))

    parameters = BFLOAT16_BYTES * stage_size
    gradients = FLOAT32_BYTES * stage_size
    reduce_scatter_buffer = FLOAT32_BYTES * layer_size
    by_default = memory(model, layout, Conventions())
    gathered = by_default[stage]["gathered"]
    assert gathered == pytest.approx(parameters + gradients + reduce_scatter_buffer, rel=1e-6)
    assert by_default == memory(model, layout, Conventions(gather="once"))  # all stages, and all kinds of memory

    # With gather="each", only one or two of the stage's ten layers are unsharded at a time.
    for_each_micro_batch = memory(model, layout, Conventions(gather="each"))
    assert for_each_micro_batch[stage]["gathered"] < gathered / 5


def test_experts_that_no_other_rank_has_are_not_gathered():
    model = model_of("qwen3-30b-a3b")
    settings = {"dp": 8, "zero": 3, "batch": 64, "recompute": "full"}
    conventions = Conventions(states="bfloat16", gather="once")

    def gathered(**sizes):
        (kinds,) = memory(model, Layout(**settings, **sizes), conventions)
        return kinds["gathered"]

    matrices_of_expert = 3
    expert_parameters = model.layers * model.experts * matrices_of_expert * model.width * model.ffn
    other_parameters = model.parameters() - expert_parameters
    bytes_of_parameter_and_gradient = 2 * BFLOAT16_BYTES
    assert gathered(ep=8) == pytest.approx(bytes_of_parameter_and_gradient * other_parameters, rel=1e-3)
    assert gathered() == pytest.approx(bytes_of_parameter_and_gradient * model.parameters(), rel=1e-3)


def test_the_allocators_gaps_are_a_share_of_the_tensors():
    (reserved,) = memory(model_of("gpt2"), Layout(), Conventions())
    (tensors,) = memory(model_of("gpt2"), Layout(), Conventions(allocator="tensors"))
    assert reserved["total"] == pytest.approx((1 + ALLOCATOR_GAPS) * tensors["total"])


# --- FSDP's peak, as PyTorch tracks it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A transformer of pixels, how many ranks share it by FSDP, and the samples of a step on each."""

    ranks: int
    width: int
    layers: int
    samples: int  # of a micro-batch
    micro_batches: int
    heads: int = 8
    levels: int = 17  # of grey: the model's vocabulary

    @property
    def model(self):
        """The model as the planner's record."""
        shape = {"width": self.width, "layers": self.layers, "heads": self.heads, "vocab": self.levels}
        return model_of({"preset": "pixels", **shape})

    @property
    def layout(self):
        """The planner's layout."""
        batch = self.ranks * self.samples * self.micro_batches
        return Layout(dp=self.ranks, zero=3, micro_batch=self.samples, batch=batch, dtype="float32")


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
    """For each case, the bytes of FSDP at the fullest moment of a step, on rank 0 of a simulated world."""
    return [tracked_peak(case, gathers_once) for case in cases]


def tracked_peak(case, gathers_once):
    """The bytes that PyTorch's tracker counts. Its tensors are fake: they have no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

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
                    is_last = number == case.micro_batches - 1
                    set_up_backward(model, is_last)
                    logits = model(grey, labels)
                    F.cross_entropy(logits.flatten(0, 1), grey.flatten()).backward()
                    tracker.reset_mod_stats()
                optimizer.step()
                optimizer.zero_grad()
    (peak_of_device,) = tracker.get_tracker_snapshot("peak").values()
    return peak_of_device["Total"]


def set_up_backward(model, is_last):
    """Let FSDP reduce gradients and free what it has gathered only in the backward of the last micro-batch.

    The stages of torch.distributed.pipelining do so, too.
    """
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)


@pytest.mark.ranks
def test_the_fullest_moment_is_the_trackers():
    [peaks] = launch(tracked_peaks, GATHERED_EACH_TIME, False, nproc=1, timeout=200)
    largest_kinds = []
    for case, peak in zip(GATHERED_EACH_TIME, peaks, strict=True):
        (kinds,) = memory(case.model, case.layout, Conventions(allocator="tensors"))
        total = kinds.pop("total")
        assert total == pytest.approx(peak, rel=0.06)
        largest_kinds.append(max(kinds, key=kinds.get))
    assert largest_kinds == ["activations", "output", "gathered"]


@pytest.mark.ranks
def test_gathered_once_parameters_and_gradients_stay():
    [peaks] = launch(tracked_peaks, GATHERED_ONCE, True, nproc=1, timeout=200)
    for case, peak in zip(GATHERED_ONCE, peaks, strict=True):
        (once,) = memory(case.model, case.layout, Conventions(gather="once", allocator="tensors"))
        (each,) = memory(case.model, case.layout, Conventions(gather="each", allocator="tensors"))
        assert once["total"] > each["total"]

        planned = once["total"]
        if torch.__version__ < "2.15" and case.micro_batches == 1:
            # The buffer of an all-gather was for one more layer.
            parameters_of_layer = 12 * case.width**2
            planned += FLOAT32_BYTES * parameters_of_layer
        assert planned == pytest.approx(peak, rel=0.07)
