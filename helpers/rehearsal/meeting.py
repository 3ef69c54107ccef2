"""Whether all ranks of a group come to the same collective: where they do not, NCCL hangs or mixes up their values."""

import os
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from helpers.counts import COUNTS, script_line
from helpers.rehearsal.tensor import tensors_in

KINDS = "all_reduce all_gather reduce_scatter all_to_all broadcast reduce scatter gather barrier".split()
UNSIZED = {"all_to_all", "scatter", "gather"}  # their ranks may rightly have different numbers of elements
LOST = re.compile(r"Connection (closed|reset)|[Tt]imed out|Broken pipe")  # what gloo says of peers that do not come
ORIGINAL_WAIT: Any = dist.Work.wait
ORIGINAL_FUTURE: Any = dist.Work.get_future


class Meetings:
    """One rank in a group: what the group's store knows of the collectives to which its ranks have come."""

    store: Any
    place: int  # this rank's number in the group
    world: int
    calls: int  # of this rank

    def come(self, call: str) -> None:
        """Announce this rank's next call. Raises RuntimeError where the first rank that came here calls another one."""
        self.calls += 1
        self.store.set(f"calls/{self.place}", str(self.calls))
        mine = f"{call}|rank {os.environ['RANK']} at {script_line()}"
        first = self.store.compare_set(f"call/{self.calls}", "", mine).decode()
        (theirs, them), (ours, we) = first.split("|"), mine.split("|")
        if theirs != ours:
            message = f"NCCL would hang or mix up values here: {them} calls {theirs}, but {we} {ours}"
            self.store.set("differ", message)
            raise COUNTS.refuse(message)

    def explain(self, error: Exception) -> Exception:
        """What to raise where gloo has lost a peer: a rank that has refused, ended or gone elsewhere."""
        if self.store.check(["differ"]):
            return RuntimeError(self.store.get("differ").decode())  # refused by the rank that came last
        calls = [f"calls/{rank}" for rank in range(self.world)]
        late = [rank for rank, key in enumerate(calls) if int(self.known(key) or 0) < self.calls]
        raised = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.glob("raised-*")
        if not late or any(raised) or not LOST.search(str(error)):
            return error
        return COUNTS.refuse(f"NCCL would hang here: ranks {late} of the group did not come")

    def known(self, key: str) -> str:
        """The store's value, or "" before a rank has set it."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def await_all(self, key: str, value: str, duty: str, timeout: timedelta) -> list[str]:
        """Set this rank's value; return all ranks' when they have set theirs. Raises RuntimeError after the timeout."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.place], value)
        try:
            self.store.wait(keys, timeout)
        except dist.DistStoreError:
            late = [rank for rank in range(self.world) if not self.known(keys[rank])]
            raise COUNTS.refuse(f"NCCL would hang here: ranks {late} of the group did not {duty}") from None
        return [self.known(key) for key in keys]

    def keep(self, work: Any, outputs: Iterable[torch.Tensor] = ()) -> Any:
        """The Work of a call, noted for its ``wait`` and ``get_future``."""
        WORKS[work] = self, [*outputs]
        return work


# Of each call that torch still has: what its group knows, and the call's outputs.
WORKS: WeakKeyDictionary[Any, tuple[Meetings, list[torch.Tensor]]] = WeakKeyDictionary()


def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Work.wait. What gloo says of lost peers becomes what NCCL does without them."""
    try:
        return ORIGINAL_WAIT(self, *args, **kwargs)
    except RuntimeError as error:
        raise (WORKS[self][0].explain(error) if self in WORKS else error) from None


def get_future(self: Any) -> Any:
    """Work.get_future. gloo has no Future of reduce_scatter, so the call is waited for."""
    if self not in WORKS:
        return ORIGINAL_FUTURE(self)
    wait(self)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(WORKS[self][1])
    return future


def described(name: str, args: Iterable[Any], world: int) -> str:
    """A collective as text, equal on all ranks that may meet in it: its kind, number of elements and type; else "".

    ``name`` is a method of ProcessGroup or an operator of torch's C++, ``args`` are its arguments.
    """
    plain = name.replace("_", "")
    kind = next((kind for kind in KINDS if plain.startswith(kind.replace("_", ""))), "")
    parts = [tensors for arg in args if (tensors := tensors_in([arg]))]
    if kind in UNSIZED or not parts:
        return kind
    # The larger part is the sum of what the ranks give or get. A functional operator has its input alone.
    size = max(sum(tensor.numel() for tensor in tensors) for tensors in parts)
    if kind == "all_gather" and len(parts) == 1:
        size *= world
    return f"{kind} of {size} elements of {str(parts[0][0].dtype).removeprefix('torch.')}"
