"""Chapter 5's measurement: samples a second and peak memory in float32, TF32, bfloat16 and float16."""

import gc
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from helpers.verify.probes.results import FORMATS, peak_gigabytes, seconds_of, start_group
from helpers.verify.record import Figure

LAYERS = 4


def precision(device: torch.device) -> Iterator[Figure]:
    """Yields the speed and memory of a training step in each number format. The step is that of chapter 5's script."""
    width = 4096
    batch_size = 4096
    if device.type == "cpu":
        width = 64
        batch_size = 64
    start_group(device)
    for number_format in FORMATS:
        torch.set_float32_matmul_precision(number_format.matmul_precision)
        gc.collect()  # This frees the model of the previous number format.
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = step_seconds(number_format.dtype, width=width, batch_size=batch_size, device=device)
        yield Figure(f"{number_format.name}, width {width}", batch_size / seconds, "samples/s")
        if device.type == "cuda":
            yield Figure(f"{number_format.name}, peak memory", peak_gigabytes(), "GB")


def step_seconds(dtype: torch.dtype, width: int, batch_size: int, device: torch.device) -> float:
    """Measure the median seconds of a training step of four linear layers, computed in ``dtype`` by autocast.

    As in the chapter's script there are DDP, a gradient scaler (for float16 only), gradient clipping, and SGD.
    """
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = DDP(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    images = torch.randn(batch_size, width, device=device)
    labels = torch.randint(width, (batch_size,), device=device)

    def step() -> None:
        """One training step, always on the same batch, because only its time counts."""
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return seconds_of(step, device)
