"""Whether all ranks of a group call the same collectives: where they do not, NCCL hangs or mixes up their values."""

import json
import os
import re
from collections.abc import Iterable, Sequence
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
LOST = re.compile(r"Connection (closed|reset)|[Tt]imed out|Broken pipe")  # what gloo says of a peer that does not call
ORIGINAL_WAIT: Any = dist.Work.wait
ORIGINAL_FUTURE: Any = dist.Work.get_future


class CallOrder:
    """Compares this rank's collectives in a group with those of the other ranks, through the group's store.

    The first rank that makes its n-th call writes the call under the key ``call/n``, and the others compare theirs.
    """

    store: Any
    rank_in_group: int
    group_size: int
    calls: int  # how many collectives this rank has called

    def announce(self, call: str) -> None:
        """Tell the group this rank's next call. Raises RuntimeError where a rank that came earlier calls another."""
        self.calls += 1
        self.store.set(f"calls/{self.rank_in_group}", str(self.calls))
        caller = f"rank {os.environ['RANK']} at {script_line()}"
        first = self.store.compare_set(f"call/{self.calls}", "", json.dumps([call, caller])).decode()
        first_call, first_caller = json.loads(first)
        if first_call != call:
            message = f"NCCL would hang or mix up values here: {first_caller} calls {first_call}, but {caller} {call}"
            self.store.set("differ", message)
            raise COUNTS.refuse(message)

    def explain(self, error: Exception) -> Exception:
        """The error to raise in place of gloo's, which may say only that a peer's connection is lost.

        It says that the ranks' calls differ, or which ranks did not come, and which of those have ended. If neither is
        so, or if a rank has raised an exception of its own, which then is the cause, it is gloo's error.
        """
        if self.store.check(["differ"]):
            return RuntimeError(self.store.get("differ").decode())  # the rank that came last has it in its report
        missing = []
        for rank in range(self.group_size):
            if int(self.value_of(f"calls/{rank}") or 0) < self.calls:
                missing.append(rank)
        ranks_that_raised = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent.glob("raised-*")
        if not missing or any(ranks_that_raised) or not LOST.search(str(error)):
            return error
        message = f"NCCL would hang here: ranks {missing} of the group did not come"
        ended = [rank for rank in missing if self.value_of(f"ended/{rank}")]
        if ended:
            message += f", and ranks {ended} have ended"
        return COUNTS.refuse(message)

    def note_end(self) -> None:
        """Note for the other ranks that this rank's script has ended."""
        self.store.set(f"ended/{self.rank_in_group}", "yes")

    def value_of(self, key: str) -> str:
        """The store's value, or "" before a rank has set it."""
        if not self.store.check([key]):
            return ""
        return self.store.get(key).decode()

    def share_value(self, key: str, value: str, duty: str, timeout: timedelta) -> list[str]:
        """Set this rank's value in the store, wait for those of the other ranks, and return all values by rank.

        Raises RuntimeError after the timeout. It says which ranks did not set theirs; ``duty`` is what they would have
        had to do for that, for the message: "the ranks [1] did not DUTY".
        """
        keys = [f"{key}/{rank}" for rank in range(self.group_size)]
        self.store.set(keys[self.rank_in_group], value)
        try:
            self.store.wait(keys, timeout)
        except dist.DistStoreError:
            missing = [rank for rank in range(self.group_size) if not self.value_of(keys[rank])]
            raise COUNTS.refuse(f"NCCL would hang here: ranks {missing} of the group did not {duty}") from None
        return [self.value_of(key) for key in keys]

    def remember(self, work: Any, outputs: Iterable[torch.Tensor] = ()) -> Any:
        """Note a call's group and outputs, which ``wait`` and ``get_future`` below look up; return the call's Work."""
        GROUPS[work] = self
        OUTPUTS[work] = [*outputs]
        return work


# Of each call that torch still has: its group, and its outputs.
GROUPS: WeakKeyDictionary[Any, CallOrder] = WeakKeyDictionary()
OUTPUTS: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Work.wait. gloo's error for a lost peer becomes one that says what NCCL would do: see ``CallOrder.explain``."""
    try:
        return ORIGINAL_WAIT(self, *args, **kwargs)
    except RuntimeError as error:
        if self not in GROUPS:
            raise
        raise GROUPS[self].explain(error) from None


def get_future(self: Any) -> Any:
    """Work.get_future. gloo has none for a reduce_scatter, so this waits for the call and returns a finished Future."""
    if self not in OUTPUTS:
        return ORIGINAL_FUTURE(self)
    wait(self)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(OUTPUTS[self])
    return future


def kind_of(name: str) -> str:
    """The kind of a collective, such as all_gather for _allgather_base; "" for what is none."""
    plain = name.replace("_", "")
    for kind in KINDS:
        if plain.startswith(kind.replace("_", "")):
            return kind
    return ""


def describe(name: str, args: Sequence[Any], group_size: int) -> str:
    """A collective as text, equal on all ranks that may call it together: its kind, number of elements and type.

    ``name`` is a method of ProcessGroup or an operator of torch's C++, ``args`` are its arguments.
    """
    kind = kind_of(name)
    tensors_of_args = []
    for arg in args:
        tensors = tensors_in([arg])
        if tensors:
            tensors_of_args.append(tensors)
    if kind in UNSIZED or not tensors_of_args:
        return kind
    # An all_gather's output and a reduce_scatter's input have the elements of all ranks; that argument is the largest.
    size = max(sum(tensor.numel() for tensor in tensors) for tensors in tensors_of_args)
    if kind == "all_gather" and len(tensors_of_args) == 1:  # a functional operator, which returns its output
        size *= group_size
    dtype = str(tensors_of_args[0][0].dtype).removeprefix("torch.")
    return f"{kind} of {size} elements of {dtype}"
