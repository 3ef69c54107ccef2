"""NCCL for pretended GPUs: gloo does the work, and calls that NCCL or torch would refuse raise the same errors.

The class stands where torch expects ProcessGroupNCCL. So everything above it, groups, meshes and DDP, is torch's own.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.distributed_c10d as c10d

from helpers.rehearsal.counts import COLLECTIVE, COUNTS, WAIT
from helpers.rehearsal.devices import Node, bytes_of, replace
from helpers.rehearsal.tensor import CudaTensor, strip, tensors_in

COLLECTIVES = (
    "allreduce allreduce_coalesced broadcast reduce scatter gather allgather allgather_coalesced _allgather_base "
    "all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced alltoall alltoall_base "
    "all_to_all_single"
).split()
POINT_TO_POINT = "send recv recv_anysource".split()
MISSING = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]

GROUP: Any = dist.ProcessGroup
ORIGINAL_BARRIER = GROUP.barrier
ORIGINAL_DEVICE_TYPES = GROUP._device_types
ORIGINAL_HELPER: Any = c10d._new_process_group_helper
ORIGINAL_NEW_GROUP = c10d.new_group
ORIGINAL_SPLIT_GROUP: Any = c10d.split_group
ORIGINAL_MONITORED_BARRIER = c10d.monitored_barrier


@dataclass(eq=False)
class Options:
    """The part of ProcessGroupNCCL.Options that torch's Python code reads and sets."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)
    split_from: "PretendedNCCL | None" = None
    config: Any = field(default_factory=SimpleNamespace)


class PretendedNCCL(c10d.ProcessGroupGloo):
    """A ProcessGroupNCCL on gloo. It is as strict as NCCL about duplicate GPUs, splits and devices."""

    Options: Any = Options
    instances: list["PretendedNCCL"] = []  # kept here, because torch keeps only the C++ half of a group alive

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.store, self.place, self.world, self.pretended_options = store, rank, size, options
        self.gpu: int | None = None  # of the communicator, once it is made
        self.splits = 0
        self.instances.append(self)

    supports_splitting: Any = property(lambda self: True)
    supports_coalescing: Any = property(lambda self: False)

    def eager_connect_single_device(self, device: Any) -> None:
        """Make the communicator at once, as NCCL does for a group that is bound to a GPU."""
        if self.pretended_options.split_from:
            self.pretended_options.split_from.split()
        self.connect(device.index)

    def perform_nocolor_split(self, device: Any) -> None:
        """Take part in a split as a rank that is not in the new group."""
        self.split()

    def split(self) -> None:
        """As ncclCommSplit: return when every rank of this group, the parent, has come to the same split."""
        self.splits += 1
        self.store.set(f"split/{self.splits}/{self.place}", "")
        self.await_all(f"split/{self.splits}", "call new_group, which splits the group that all ranks are in")

    def await_all(self, key: str, duty: str) -> None:
        """Wait until every rank has set its key. Raises RuntimeError after the group's timeout."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        try:
            self.store.wait(keys, self.pretended_options._timeout)
        except dist.DistStoreError:
            late = [rank for rank in range(self.world) if not self.store.check([keys[rank]])]
            message = f"NCCL would hang here: ranks {late} of the group did not {duty}"
            raise COUNTS.refuse(RuntimeError(message)) from None

    def connect(self, gpu: int) -> None:
        """Make the communicator on this rank's GPU. Raises NCCL's error where two ranks of a node have one GPU."""
        if self.gpu == gpu:
            return
        self.check_bound(gpu)
        node = os.environ.get("GROUP_RANK", "0")
        self.store.set(f"gpu/{self.place}", f"{node}/{gpu}")
        self.await_all("gpu", "come to this communicator's first use")
        gpus = [self.store.get(f"gpu/{rank}").decode() for rank in range(self.world)]
        twins = [rank for rank in range(self.world) if gpus[rank] == f"{node}/{gpu}"]
        if len(twins) > 1:
            message = f"NCCL error: Duplicate GPU detected: ranks {twins} of this group are all on cuda:{gpu}"
            raise COUNTS.refuse(RuntimeError(message))
        self.gpu = gpu

    def check_bound(self, gpu: int) -> None:
        """Raise NCCL's error for a tensor on another GPU than the communicator's."""
        if self.gpu not in (None, gpu):
            message = f"Tensor found on device cuda:{gpu} but backend constrained to cuda:{self.gpu}"
            raise COUNTS.refuse(RuntimeError(message))


def backends_of(group: Any) -> Any:
    """{device type: backend} of the group, such as {"cuda": "nccl"} or {"cpu": "gloo", "cuda": "nccl"}."""
    return c10d.BackendConfig(c10d.Backend(c10d._world.pg_map[group][0])).get_device_backend_map()


def nccl_of(group: Any) -> Any:
    """The group's pretended NCCL, or None where it has none."""
    if group not in c10d._world.pg_map or backends_of(group).get("cuda") != "nccl":
        return None
    return group._get_backend(torch.device("cuda"))


def splits(group: Any) -> bool:
    """Whether groups beside this one are split off its communicator, as NCCL does where it is bound to a GPU."""
    return bool(group.bound_device_id and nccl_of(group))


HOOKS_OF_DDP = [0]  # how many comm hooks run now: their buckets are CPU tensors, which NCCL then has to accept


def check_tensors(group: Any, name: str, tensors: list[torch.Tensor]) -> Any:
    """Raise what NCCL would raise for these tensors; make the communicator at the first call. Returns NCCL or None."""
    nccl = nccl_of(group)
    for tensor in tensors if nccl else ():
        if not isinstance(tensor, CudaTensor):
            if "cpu" not in backends_of(group) and not HOOKS_OF_DDP[0]:
                message = f"No backend type associated with device type cpu ({name} of a CPU tensor on NCCL)"
                raise COUNTS.refuse(RuntimeError(message))
            continue
        if tensor.is_sparse:
            raise COUNTS.refuse(ValueError("Tensors must be CUDA and dense"))
        channels_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        if not tensor.is_contiguous() and not channels_last:
            message = "Tensors must be contiguous"
            if name in POINT_TO_POINT:
                # torch only warns. NCCL sends the memory in its order, which is right if both tensors have one layout.
                message = f"{name} of a non-contiguous tensor: NCCL sends its memory as it lies; use .contiguous()"
            raise COUNTS.refuse(ValueError(message))
        if name in POINT_TO_POINT:
            nccl.check_bound(tensor.index)
        else:
            nccl.connect(tensor.index)
    return nccl


def checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ProcessGroup, wrapped: it checks and counts, then calls gloo with the CPU tensors inside."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        tensors = list(tensors_in(values))
        nccl = check_tensors(self, name, tensors)
        for operation in MISSING if nccl else ():
            if any(getattr(value, "reduceOp", None) == operation for value in values):
                raise COUNTS.refuse(ValueError(f"Cannot use ReduceOp.{operation.name} with NCCL"))
        # Where an output comes first, the second argument is the input, whose bytes count.
        inputs = next((value for value in (*args[1:], *args) if list(tensors_in([value]))), ())
        on_gpu = nccl and any(isinstance(tensor, CudaTensor) for tensor in tensors)
        COUNTS.add(COLLECTIVE, f"{name} ({'NCCL' if on_gpu else 'gloo'})", sum(map(bytes_of, tensors_in([inputs]))))
        return original(self, *strip(args), **{key: strip(value) for key, value in kwargs.items()})

    return call


def barrier(self: Any, opts: Any = None, **kwargs: Any) -> Any:
    """ProcessGroup.barrier: NCCL's makes a communicator and blocks the host until it has ended."""
    opts = opts or dist.BarrierOptions()
    nccl = nccl_of(self)
    if nccl:
        named = opts.device.index if opts.device is not None and opts.device.type == "cuda" else None
        guess = self.rank() % Node.gpus  # as ProcessGroupNCCL guesses
        nccl.connect(next(gpu for gpu in (named, nccl.gpu, guess) if gpu is not None))
        COUNTS.add(WAIT, "barrier")
    COUNTS.add(COLLECTIVE, f"barrier ({'NCCL' if nccl else 'gloo'})")
    opts.device = torch.device("cpu")
    return ORIGINAL_BARRIER(self, opts, **kwargs)


def patch() -> None:
    replace(c10d, ProcessGroupNCCL=PretendedNCCL, _NCCL_AVAILABLE=True, default_pg_nccl_timeout=timedelta(minutes=10))
    replace(dist, ProcessGroupNCCL=PretendedNCCL)
    # Without this, "nccl" builds ProcessGroupNCCL2 from torch 2.15 on, which torch calls in another way.
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    replace(GROUP, **{name: checked(name, getattr(GROUP, name)) for name in (*COLLECTIVES, *POINT_TO_POINT)})
    replace(GROUP, barrier=barrier, _device_types=property(device_types))
    replace(c10d, _new_process_group_helper=new_process_group)
    for function in (new_group, split_group, monitored_barrier):
        for module in (c10d, dist, device_mesh):
            if hasattr(module, function.__name__):
                replace(module, **{function.__name__: function})


def device_types(group: Any) -> list[torch.device]:
    """ProcessGroup's device types, without the CPU that only ``new_process_group`` has added."""
    hidden = {"cpu"} if group in c10d._world.pg_map and "cpu" not in backends_of(group) else set()
    return [device for device in ORIGINAL_DEVICE_TYPES.fget(group) if device.type not in hidden]


def new_process_group(*args: Any, **kwargs: Any) -> Any:
    """torch's maker of groups. NCCL also takes CPU tensors, which pretended ones are for torch's C++."""
    group, *rest = ORIGINAL_HELPER(*args, **kwargs)
    if isinstance(group, dist.ProcessGroup) and nccl_of(group) and "cpu" not in backends_of(group):
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.NCCL, nccl_of(group))
    return group, *rest


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch's new_group. It refuses what would leave ranks waiting in a split of the parent."""
    parent = c10d._get_default_group()
    if ranks is not None and len(ranks) < parent.size() and splits(parent):
        if kwargs.get("use_local_synchronization", False):
            message = (
                "new_group(use_local_synchronization=True) beside an NCCL group that is bound to a GPU: the new "
                "group is split off the parent, so every rank of the parent must call new_group (pytorch#129965)"
            )
            raise COUNTS.refuse(RuntimeError(message))
        if backend and "nccl" not in backend:
            # With any backend, torch makes the ranks outside split the parent; members split it with NCCL alone.
            message = (
                f"new_group({list(ranks)}, backend={backend!r}) beside an NCCL group that is bound to a GPU: the "
                "ranks outside wait in ncclCommSplit for members that never come; make the group of all ranks"
            )
            raise COUNTS.refuse(RuntimeError(message))
    return ORIGINAL_NEW_GROUP(ranks, timeout, backend, *args, **kwargs)


def split_group(parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch's split_group. Pretended NCCL makes each of the new groups by new_group, which splits as well."""
    parent = parent_pg or c10d._get_default_group()
    if not splits(parent):
        return ORIGINAL_SPLIT_GROUP(parent_pg, split_ranks, timeout, *args, **kwargs)
    ranks = c10d.get_process_group_ranks(parent)
    names = {name: kwargs[name] for name in ("backend", "group_desc") if name in kwargs}
    groups = {tuple(split): c10d.new_group([ranks[rank] for rank in split], timeout, **names) for split in split_ranks}
    return next((group for split, group in groups.items() if parent.rank() in split), None)


def monitored_barrier(*args: Any, **kwargs: Any) -> Any:
    """torch's monitored_barrier. Its error for another backend than gloo is noted."""
    try:
        return ORIGINAL_MONITORED_BARRIER(*args, **kwargs)
    except ValueError as error:
        raise COUNTS.refuse(error) from None
