"""What a rehearsed script does that somebody watches: its collectives and its optimizer steps.

Each event comes here, whoever notices it, and ``counts`` counts it. For mistakes a script is observed elsewhere, in
``mistakes``, by what also observes a training on real GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import optimizer

from helpers.counts import COLLECTIVE, COUNTS
from helpers.rehearsal.devices import bytes_of


def patch() -> None:
    """Let torch call ``optimizer_step`` after each step of any optimizer."""
    optimizer.register_optimizer_step_post_hook(optimizer_step)


def collective(what: str, sent: Sequence[torch.Tensor] = ()) -> None:
    """Note that this rank calls a collective at the script's current line.

    ``what`` is its name in the report, such as "allreduce (NCCL)"; ``sent`` are the tensors that this rank gives.
    """
    COUNTS.count(COLLECTIVE, what, bytes_of(*sent))


def optimizer_step(stepped: Any, args: Any, kwargs: Any) -> None:
    """Note that an optimizer has made a step. torch calls this hook, with the arguments of its ``step``."""
    COUNTS.count_step(stepped, args, kwargs)
