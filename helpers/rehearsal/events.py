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
    optimizer.register_optimizer_step_post_hook(optimizer_step)


def collective(what: str, sent: Sequence[torch.Tensor] = ()) -> None:
    """This rank calls a collective at the script's current line. ``sent`` are the tensors that it gives."""
    COUNTS.count(COLLECTIVE, what, bytes_of(*sent))


def optimizer_step(stepped: Any, args: Any, kwargs: Any) -> None:
    """An optimizer has made a step; torch calls this hook of every optimizer."""
    COUNTS.count_step(stepped, args, kwargs)
