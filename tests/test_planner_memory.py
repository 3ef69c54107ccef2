"""The planner's bytes against PyTorch's: what selective checkpointing keeps, and FSDP that gathers once a step."""

import sys

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
from helpers.planner.layout import Layout
from helpers.planner.memory import activations_per_layer, memory
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
        narrow = WIDTH // HEADS * KEYS
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, narrow), "v": (WIDTH, narrow), "o": (WIDTH, WIDTH)}
        sizes |= {"w1": (WIDTH, INNER), "w3": (WIDTH, INNER), "w2": (INNER, WIDTH)}
        self.linear = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        linear, normed = self.linear, self.norms[0](x)
        heads = [linear[name](normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for name in "qkv"]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + linear["o"](attended.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + linear["w2"](F.silu(linear["w1"](normed)) * linear["w3"](normed))


def test_sac_keeps_what_pytorchs_selective_checkpoint_stores():
    """torchtitan's policy: every second matrix product is recomputed; attention is kept."""
    modes, products = [], {False: 0, True: 0}

    def policy(context, operation, *args, **kwargs):
        is_product = operation is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        kept = products[context.is_recompute] % 2 if is_product else "flash_attention" in str(operation)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        modes.append(create_selective_checkpoint_contexts(policy))
        return modes[-1]

    x = torch.randn(SAMPLES, SEQ, WIDTH, requires_grad=True)
    out = checkpoint(Block(), x, use_reentrant=False, context_fn=contexts)
    leaves = tree_leaves([list(stored.values()) for stored in modes[0][0].storage.values()])
    stored = x.nbytes + sum(leaf.val.nbytes for leaf in leaves if isinstance(getattr(leaf, "val", None), torch.Tensor))
    out.sum().backward()
    shape = {"layers": 1, "width": WIDTH, "heads": HEADS, "kv_heads": KEYS, "ffn": INNER, "vocab": 9, "seq": SEQ}
    model = model_of({**shape, "gated": True})
    sums = SAMPLES * SEQ * HEADS * 4  # attention's logarithms, a number for each head, which the planner leaves out
    planned = activations_per_layer(model, Layout(micro_batch=SAMPLES, recompute="sac", dtype="float32"))
    assert stored == planned + sums


def test_sac_lies_between_all_and_full_and_keeps_what_is_reduced():
    model = model_of("llama3-8b")
    sizes = [activations_per_layer(model, Layout(recompute=how)) for how in ("full", "sac", "none")]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3
    share = (4096 * 1024 + 4096 * 4096 + 14336 * 4096) / model.gemm_weights() * model.layers  # key, output, gate
    assert model.recomputed_share("sac") == pytest.approx(share)
    again = model.flops_per_token("gemm", "sac") - model.flops_per_token("gemm")
    assert again == pytest.approx(2 * share * model.gemm_weights())
    divided = Layout(tp=8, recompute="sac")
    less = activations_per_layer(model, divided) - activations_per_layer(model, divided.with_(sequence_parallel=True))
    assert less == 2 * 8192 * (4096 * 7 / 8 - 2 * 4096 / 8)  # the layer's input, and what two reduce-scatters put out


def test_freed_logits_are_three_copies_but_four_in_a_divided_loss():
    def output(logits, tp):
        return memory(model_of("gpt2"), Layout(tp=tp), Conventions(logits=logits))[0]["output"]

    copies = (output("eager", 1) - output("freed", 1)) / (4 * 1024 * 50257)
    assert (copies, output("freed", 2)) == (1, output("eager", 2))
    assert output("eager", 1) - output("stored", 1) == pytest.approx(3 * 4 * 1024 * 50257)


def peaks(settings):
    """Bytes of a step of FSDP on rank 0 that gathers and reduces once, at its fullest moment."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    totals = []
    for world_size, width, layers, samples, micro_batches in settings:
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        with FakeTensorMode():
            model = PixelTransformer(width, layers, 8, LEVELS)
            for module in [*model.blocks, model]:
                fully_shard(module, mesh=mesh, reshard_after_forward=False)
            optimizer = torch.optim.AdamW(model.parameters())
            grey, labels = torch.zeros(samples, 64, dtype=torch.long), torch.zeros(samples, dtype=torch.long)
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((grey, labels))
            with tracker:
                for _ in range(2):  # the first one creates the optimizer's state
                    for left in reversed(range(micro_batches)):  # as torch.distributed.pipelining's stages do
                        model.set_is_last_backward(not left)
                        model.set_requires_gradient_sync(not left)
                        model.set_reshard_after_backward(not left)
                        logits = model(grey, labels)
                        F.cross_entropy(logits.flatten(0, 1), grey.flatten()).backward()
                        tracker.reset_mod_stats()
                    optimizer.step()
                    optimizer.zero_grad()
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        totals.append(peak["Total"])
    return totals


@pytest.mark.ranks
def test_gathered_once_parameters_and_gradients_stay():
    settings = [(16, 2048, 4, 1, 1), (16, 2048, 4, 1, 3), (8, 256, 4, 32, 3)]
    once, each = Conventions(gather="once"), Conventions()
    tracked = launch(peaks, settings, nproc=1, timeout=200)[0]
    for (ranks, width, layers, samples, micro_batches), seen in zip(settings, tracked, strict=True):
        model = model_of({"preset": "pixels", "width": width, "layers": layers, "heads": 8, "vocab": LEVELS})
        batch = micro_batches * ranks * samples
        layout = Layout(dp=ranks, zero=3, micro_batch=samples, batch=batch, dtype="float32")
        (kept,), (given_back,) = (memory(model, layout, convention) for convention in (once, each))
        planned = kept["total"]
        if torch.__version__ < "2.15" and micro_batches == 1:
            planned += 4 * 12 * width**2  # bytes of one more layer in an all-gather's buffer
        assert planned == pytest.approx(seen, rel=0.07)
        assert kept["total"] > given_back["total"]
