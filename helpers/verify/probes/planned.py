"""A step of GPT-2 medium under FSDP, to be compared with the planner's time and bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from helpers.runtime.models import PixelBlock
from helpers.verify.probes.catalog import PEAK, STATES, STEP_TIME
from helpers.verify.probes.results import (
    bytes_outside_the_allocator,
    gigabytes_allocated,
    peak_gigabytes,
    seconds_of,
    start_group,
)
from helpers.verify.record import Figure


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model and of its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int  # of a sample
    samples: int


MEDIUM = Sizes(layers=24, width=1024, heads=16, vocabulary=50257, tokens=1024, samples=8)
SMALL = Sizes(layers=2, width=64, heads=4, vocabulary=97, tokens=32, samples=2)


class GPT(nn.Module):
    """GPT-2 with tied embeddings and no dropout: int64 [samples, tokens] to logits [samples, tokens, vocabulary].

    Its layers are those of the chapters' transformer of pixels, which are GPT-2's.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(PixelBlock(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def planned(device: torch.device) -> Iterator[Figure]:
    """Yields time and memory of a training step in bfloat16 on one rank, under FSDP and without torch.compile."""
    sizes = MEDIUM
    if device.type == "cpu":
        sizes = SMALL
    start_group(device)
    model = GPT(sizes).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(sizes.vocabulary, (sizes.samples, sizes.tokens), device=device)

    def step() -> None:
        """One training step, always on the same batch ``ids``, because only its time and memory count."""
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # The first step makes the optimizer's moments, which are part of what is measured.
    if device.type == "cuda":
        yield Figure(STATES, gigabytes_allocated(), "GB")
        torch.cuda.reset_peak_memory_stats()
    yield Figure(STEP_TIME, 1e3 * seconds_of(step, device), "ms")
    if device.type == "cuda":
        yield Figure(PEAK, peak_gigabytes(), "GB")
        yield Figure("reserved by the allocator", torch.cuda.max_memory_reserved() / 1e9, "GB")
        yield Figure("outside the allocator (CUDA, NCCL)", bytes_outside_the_allocator(device) / 1e9, "GB")
