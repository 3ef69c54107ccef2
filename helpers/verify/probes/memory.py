"""Where a GPU's memory goes: activations that are kept or not, and process groups."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.verify.probes.results import bytes_outside_the_allocator, peak_gigabytes, seconds_of, start_group
from helpers.verify.record import Figure


def recompute(device: torch.device) -> Iterator[Figure]:
    """Yields the peak memory and time of a step of 12 layers in bfloat16, with three ways to treat activations.

    They are kept on the GPU, recomputed in the backward pass, or saved on the CPU.
    """
    width = 2048
    layers = 12
    shape = (16, 512, width)  # samples, tokens
    if device.type == "cpu":
        width = 32
        layers = 2
        shape = (2, 16, width)
    blocks = nn.ModuleList()
    for _ in range(layers):
        block = nn.TransformerEncoderLayer(
            d_model=width,
            nhead=16,
            dim_feedforward=4 * width,
            dropout=0.0,
            batch_first=True,
            device=device,
            dtype=torch.bfloat16,
        )
        blocks.append(block)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step(way: str) -> None:
        """A forward and a backward pass, between which activations are "kept", "recomputed" or "saved on the CPU"."""
        saving: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if way == "saved on the CPU":
            saving = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
        out = x
        with saving:
            for block in blocks:
                if way == "recomputed":
                    out = checkpoint(block, out, use_reentrant=False)
                else:
                    out = block(out)
            loss = out.float().square().mean()
        loss.backward()
        blocks.zero_grad()

    for way in ("kept", "recomputed", "saved on the CPU"):
        step(way)  # The first step in each way is not measured, because it allocates memory.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(partial(step, way), device, repeats=5, warm_up=1)
        yield Figure(f"{way}, a step", 1e3 * seconds, "ms")
        if device.type == "cuda":
            yield Figure(f"{way}, peak memory", peak_gigabytes(), "GB")


def nccl_memory(device: torch.device) -> Iterator[Figure]:
    """Yields how many MB of the GPU, beside PyTorch's allocator, CUDA's context takes, and a first and second group."""
    x = torch.randn(1 << 20, device=device)
    before_groups = bytes_outside_the_allocator(device) / 1e6
    yield Figure("CUDA's context", before_groups, "MB")
    start_group(device)
    dist.all_reduce(x)  # A group takes its memory when it first communicates.
    with_one_group = bytes_outside_the_allocator(device) / 1e6
    yield Figure("the first group", with_one_group - before_groups, "MB")
    second_group = dist.new_group([0])
    dist.all_reduce(x, group=second_group)
    with_two_groups = bytes_outside_the_allocator(device) / 1e6
    yield Figure("a second group", with_two_groups - with_one_group, "MB")
