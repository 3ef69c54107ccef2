"""Whether all ranks of a group call the same collectives: where they do not, NCCL hangs or mixes up their values.

The ranks compare their calls through the group's store, torch's table of keys and values that all its ranks can read.
"""

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

from helpers.counts import script_line
from helpers.rehearsal.devices import gpu_error
from helpers.rehearsal.tensor import tensors_in

KINDS = "all_reduce all_gather reduce_scatter all_to_all broadcast reduce scatter gather barrier".split()
UNSIZED = {"all_to_all", "scatter", "gather"}  # their ranks may rightly have different numbers of elements
# What gloo says of a peer that does not call or has ended, such as "Connection closed by peer [127.0.0.1]:41873".
LOST = re.compile(r"Connection (closed|reset)|[Tt]imed out|Broken pipe")
ORIGINAL_WAIT: Any = dist.Work.wait
ORIGINAL_FUTURE: Any = dist.Work.get_future


class CallOrder:
    """Compares this rank's collectives in a group with those of the other ranks, through the group's store.

    The store's keys: ``call/N`` has the N-th call of the rank that made its N-th call first, ``calls/RANK`` how many
    calls a rank has made, ``ended/RANK`` that its script has ended, and ``differ`` the message on calls that differ.
    """

    store: Any
    rank_in_group: int
    group_size: int
    calls: int  # how many collectives this rank has called

    def announce(self, call: str) -> None:
        """Tell the group this rank's next call. Raises RuntimeError if a rank that came earlier made another call.

        ``call`` is the text of ``describe``, such as "all_reduce of 4 elements of float32", which is equal for calls
        that belong together. The rank that comes first to its N-th call writes it into the store, and each later one
        compares its own N-th call with it.
        """
        self.calls += 1
        self.store.set(f"calls/{self.rank_in_group}", str(self.calls))
        caller = f"rank {os.environ['RANK']} at {script_line()}"
        own_value = json.dumps([call, caller])
        # compare_set writes only if the key has no value yet, and returns the value that the key then has.
        first_value = self.store.compare_set(f"call/{self.calls}", "", own_value).decode()
        first_call, first_caller = json.loads(first_value)
        if first_call != call:
            message = f"NCCL would hang or mix up values here: {first_caller} calls {first_call}, but {caller} {call}"
            self.store.set("differ", message)  # for the other ranks, which find it in ``explain``
            raise gpu_error(message)

    def explain(self, error: Exception) -> Exception:
        """The error to raise in place of ``error``, by which gloo says that a peer is lost.

        - If ranks have made different calls, it says which.
        - If ranks did not come to this call, it says which ones, and which of them have ended.
        - If a rank has raised an exception, or in any other case, it is gloo's own error. The exception is then the
          cause, and the rehearsal shows that.
        """
        if self.store.check(["differ"]):
            return RuntimeError(self.store.get("differ").decode())  # the rank that came last has it in its report
        missing_ranks = [rank for rank in range(self.group_size) if self.calls_of(rank) < self.calls]
        if not missing_ranks:
            return error
        # A rank that raises an exception leaves a file there, beside the file in which torchrun looks for errors.
        folder_of_the_ranks = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        a_rank_raised = any(folder_of_the_ranks.glob("raised-*"))
        if a_rank_raised:
            return error
        a_peer_is_lost = LOST.search(str(error)) is not None
        if not a_peer_is_lost:
            return error
        message = f"NCCL would hang here: ranks {missing_ranks} of the group did not come"
        ended_ranks = [rank for rank in missing_ranks if self.value_of(f"ended/{rank}")]
        if ended_ranks:
            message += f", and ranks {ended_ranks} have ended"
        return gpu_error(message)

    def calls_of(self, rank: int) -> int:
        """How many collectives a rank of the group has called so far."""
        return int(self.value_of(f"calls/{rank}") or 0)

    def note_end(self) -> None:
        """Note for the other ranks that this rank's script has ended."""
        self.store.set(f"ended/{self.rank_in_group}", "yes")

    def value_of(self, key: str) -> str:
        """The store's value, or "" before a rank has set it."""
        if not self.store.check([key]):
            return ""
        return self.store.get(key).decode()

    def share_value(self, key: str, value: str, duty: str, timeout: timedelta) -> list[str]:
        """Set this rank's value under a key in the store, wait for the other ranks, and return the values of all.

        Raises RuntimeError after the timeout if ranks have not set theirs: "ranks [1] of the group did not DUTY". So
        ``duty`` says what those ranks would have had to do, such as "call new_group".
        """
        keys = [f"{key}/{rank}" for rank in range(self.group_size)]
        own_key = keys[self.rank_in_group]
        self.store.set(own_key, value)
        try:
            self.store.wait(keys, timeout)
        except dist.DistStoreError:
            missing_ranks = [rank for rank in range(self.group_size) if not self.value_of(keys[rank])]
            raise gpu_error(f"NCCL would hang here: ranks {missing_ranks} of the group did not {duty}") from None
        return [self.value_of(key_of_rank) for key_of_rank in keys]

    def remember(self, work: Any, outputs: Iterable[torch.Tensor] = ()) -> Any:
        """Keep this group and the outputs of a call under its Work, the handle that the script waits on. Returns it.

        ``wait`` and ``get_future`` below, which replace methods of Work, look the two up.
        """
        GROUPS[work] = self
        OUTPUTS[work] = [*outputs]
        return work


# The group and the outputs of each call whose Work somebody still has.
GROUPS: WeakKeyDictionary[Any, CallOrder] = WeakKeyDictionary()
OUTPUTS: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of ``work.wait()``: ``self`` is the Work, the handle of a call that may not have ended yet.

    gloo's error for a lost peer becomes one that says what NCCL would do: see ``CallOrder.explain``.
    """
    try:
        return ORIGINAL_WAIT(self, *args, **kwargs)
    except RuntimeError as error:
        if self not in GROUPS:  # a call that was not made on a simulated GPU
            raise
        raise GROUPS[self].explain(error) from None


def get_future(self: Any) -> Any:
    """In the place of ``work.get_future()``: a Future of the call's outputs. ``self`` is the Work, the call's handle.

    gloo has none for a reduce_scatter. So for each call on a simulated GPU this waits until the call has ended, and
    returns a Future that has its result already.
    """
    if self not in OUTPUTS:  # a call that was not made on a simulated GPU
        return ORIGINAL_FUTURE(self)
    wait(self)
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(OUTPUTS[self])
    return future


def kind_of(name: str) -> str:
    """The kind of a collective by its name, such as all_gather for _allgather_base; "" for what is no collective.

    torch writes the names with underscores or without, so these are left out when names are compared.
    """
    plain = name.replace("_", "")
    for kind in KINDS:  # reduce_scatter comes before reduce, with which it begins
        if plain.startswith(kind.replace("_", "")):
            return kind
    return ""


def describe(name: str, args: Sequence[Any], group_size: int) -> str:
    """A collective as text, such as "all_reduce of 4 elements of float32": equal on ranks that may call it together.

    ``name`` is a method of ProcessGroup or an operator of torch's C++, ``args`` are its arguments. Returns "" for an
    operator that is no collective.
    """
    kind = kind_of(name)
    elements_of_arguments = []  # how many elements the tensors of an argument have, for each argument with tensors
    dtypes = []
    for arg in args:
        tensors = tensors_in([arg])
        if tensors:
            elements_of_arguments.append(sum(tensor.numel() for tensor in tensors))
            dtypes += [tensor.dtype for tensor in tensors]
    if kind in UNSIZED or not elements_of_arguments:
        return kind
    # An all_gather's output and a reduce_scatter's input have the elements of all ranks; that argument is the largest.
    elements = max(elements_of_arguments)
    if kind == "all_gather" and len(elements_of_arguments) == 1:
        # A functional operator returns its output. So only the input, of one rank, is among its arguments.
        elements *= group_size
    dtype = str(dtypes[0]).removeprefix("torch.")
    return f"{kind} of {elements} elements of {dtype}"
