"""For how long training stands still while a checkpoint is saved."""

import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from helpers.verify.probes.results import start_group, synchronize
from helpers.verify.record import Figure

TENSORS = 8


def checkpoint(device: torch.device) -> Iterator[Figure]:
    """Yields the seconds of dcp.save and of dcp.async_save for 2 GB on the GPU, written to the temporary folder.

    The first save of each kind allocates memory that the second one uses again, so both are measured.
    """
    numbers = 1 << 26  # of float32 in each tensor: 256 MiB
    if device.type == "cpu":
        numbers = 1 << 12
    start_group(device)
    state = {f"weight{index}": torch.randn(numbers, device=device) for index in range(TENSORS)}
    synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        for which in ("first", "second"):
            start = time.perf_counter()
            dcp.save(state, checkpoint_id=f"{folder}/save-{which}")
            yield Figure(f"dcp.save, the {which}", time.perf_counter() - start, "s")

        on_cpu = dist.new_group(backend="gloo")  # async_save asks for a group that works on CPU tensors.
        for which in ("first", "second"):
            start = time.perf_counter()
            saving = dcp.async_save(state, checkpoint_id=f"{folder}/async-{which}", process_group=on_cpu)
            yield Figure(f"dcp.async_save returns, the {which}", time.perf_counter() - start, "s")
            saving.result()
            yield Figure(f"dcp.async_save has written, the {which}", time.perf_counter() - start, "s")
