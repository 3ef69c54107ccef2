"""NCCL for pretended GPUs: gloo does the work, and calls that NCCL or torch would refuse raise the same errors.

The class stands where torch expects ProcessGroupNCCL. So everything above it, groups, meshes and DDP, is torch's own.
NCCL counts elements where gloo compares shapes.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import device_mesh

from helpers.counts import COUNTS, WAIT
from helpers.rehearsal import events
from helpers.rehearsal.call_order import CallOrder, describe, get_future, wait
from helpers.rehearsal.devices import Node, replace
from helpers.rehearsal.tensor import CudaTensor, index_of, map_tensors, tensors_in, unwrap

COLLECTIVES = (
    "allreduce allreduce_coalesced broadcast reduce scatter gather allgather allgather_coalesced _allgather_base "
    "all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced alltoall alltoall_base "
    "all_to_all_single"
).split()
SAME_SHAPES = ("gather", "scatter")  # torch compares the shapes of their tensors, also for NCCL
POINT_TO_POINT = "send recv recv_anysource".split()
DTYPES_NOT_IN_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
REDUCTIONS_NOT_IN_NCCL = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]

GLOO: Any = c10d.ProcessGroupGloo
GROUP: Any = dist.ProcessGroup
ORIGINAL_BARRIER = GROUP.barrier
ORIGINAL_DEVICE_TYPES = GROUP._device_types
ORIGINAL_HELPER: Any = c10d._new_process_group_helper
ORIGINAL_NEW_GROUP = c10d.new_group
ORIGINAL_SPLIT_GROUP: Any = c10d.split_group


@dataclass(eq=False)
class Options:
    """The part of ProcessGroupNCCL.Options that torch's Python code reads and sets."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)
    split_from: "PretendedNCCL | None" = None
    config: Any = field(default_factory=SimpleNamespace)


class PretendedNCCL(GLOO, CallOrder):
    """A ProcessGroupNCCL on gloo. It is as strict as NCCL about duplicate GPUs, splits and devices."""

    Options: Any = Options
    instances: list["PretendedNCCL"] = []  # kept here, because torch keeps only the C++ half of a group alive
    starts = 0  # how many default groups this process has started

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.instances.append(self)
        if c10d._world.default_pg is None:
            PretendedNCCL.starts += 1
        self.store = dist.PrefixStore(f"start{self.starts}", store)
        self.rank_in_group = rank
        self.group_size = size
        self.pretended_options = options
        self.gpu: int | None = None  # of the communicator, once it is made
        self.calls = 0
        self.splits = 0

    supports_splitting: Any = property(lambda self: True)
    supports_coalescing: Any = property(lambda self: False)

    def eager_connect_single_device(self, device: Any) -> None:
        """Make the communicator at once, as NCCL does for a group that is bound to a GPU."""
        if self.pretended_options.split_from:
            self.pretended_options.split_from.perform_nocolor_split(device)
        self.connect(device.index)

    def perform_nocolor_split(self, device: Any) -> None:
        """Do as ncclCommSplit: return when every rank of this group, the parent, has come to the same split."""
        self.splits += 1
        self.share_value(
            key=f"split/{self.splits}",
            value="called",
            duty="call new_group, which splits the group that all ranks are in",
            timeout=self.pretended_options._timeout,
        )

    def connect(self, gpu: int) -> None:
        """Make the communicator on this rank's GPU. Raises NCCL's error where two ranks of a node have one GPU."""
        if self.gpu == gpu:
            return
        self.check_bound(gpu)
        node_and_gpu = f"{os.environ['GROUP_RANK']}/{gpu}"
        gpus_of_ranks = self.share_value(
            key="gpu",
            value=node_and_gpu,
            duty="come to this communicator's first use",
            timeout=self.pretended_options._timeout,
        )
        same_gpu = [rank for rank in range(self.group_size) if gpus_of_ranks[rank] == node_and_gpu]
        if len(same_gpu) > 1:
            raise COUNTS.refuse(
                f"NCCL error: Duplicate GPU detected: ranks {same_gpu} of a group are all on cuda:{gpu}"
            )
        self.gpu = gpu

    def check_bound(self, gpu: int) -> None:
        """Raise NCCL's error for a tensor on another GPU than the communicator's, once there is one."""
        if self.gpu not in (None, gpu):
            raise COUNTS.refuse(f"Tensor found on device cuda:{gpu} but backend constrained to cuda:{self.gpu}")


def backends_of(group: Any) -> Any:
    """{device type: backend} of the group, such as {"cuda": "nccl"} or {"cpu": "gloo", "cuda": "nccl"}."""
    return c10d.BackendConfig(c10d.Backend(c10d._world.pg_map[group][0])).get_device_backend_map()


def nccl_of(group: Any) -> Any:
    """The group's pretended NCCL, or None where it has none."""
    if group not in c10d._world.pg_map or backends_of(group).get("cuda") != "nccl":
        return None
    return group._get_backend(torch.device("cuda"))


def check_tensors(group: Any, nccl: PretendedNCCL, name: str, tensors: list[torch.Tensor]) -> None:
    """Raise what NCCL would raise for the tensors of a call; make the communicator at the first collective."""
    for tensor in tensors:
        gpu = index_of(tensor)
        if gpu is None:
            if "cpu" not in backends_of(group):
                raise COUNTS.refuse(f"No backend type associated with device type cpu ({name} of a CPU tensor on NCCL)")
            continue
        check_dtype(tensor)
        check_contiguous(name, tensor)
        if name in POINT_TO_POINT:
            nccl.check_bound(gpu)
        else:
            nccl.connect(gpu)


def check_dtype(tensor: torch.Tensor) -> None:
    """Raise torch's error for a tensor of a type that NCCL does not have."""
    if tensor.dtype in DTYPES_NOT_IN_NCCL:
        message = f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}"
        raise COUNTS.refuse(message, TypeError)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise torch's error for a tensor that is not contiguous. torch accepts images whose channels come last."""
    if tensor.is_contiguous():
        return
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return
    message = "Tensors must be contiguous"
    if name in POINT_TO_POINT:
        # torch only warns. NCCL sends the memory in its order, which is right if both tensors have one layout.
        message = f"{name} of a non-contiguous tensor: NCCL sends its memory as it lies; use .contiguous()"
    raise COUNTS.refuse(message, ValueError)


def check_operation(values: Sequence[Any]) -> None:
    """Raise torch's error where a call's options ask for a reduction that NCCL does not have."""
    for value in values:
        for operation in REDUCTIONS_NOT_IN_NCCL:
            if getattr(value, "reduceOp", None) == operation:
                raise COUNTS.refuse(f"Cannot use ReduceOp.{operation.name} with NCCL", ValueError)


def sent_tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that a call sends: those of its input, or of its only argument with tensors.

    Where a call has an output and an input, the output is the first argument. So the first one is looked at last.
    """
    for arg in (*args[1:], *args[:1]):
        tensors = tensors_in([arg])
        if tensors:
            return tensors
    return []


def checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of ProcessGroup: check and count its calls, and let gloo do their work.

    gloo gets the CPU tensors that are inside pretended ones. If a group has no NCCL, or if the tensors of a call are on
    the CPU, gloo does the work on a cluster as well. So such a call is counted as gloo's.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        tensors = tensors_in(values)
        nccl = nccl_of(self)
        backend = "gloo"
        if nccl is not None:
            check_tensors(self, nccl, name, tensors)
            check_operation(values)
            if any(index_of(tensor) is not None for tensor in tensors):
                backend = "NCCL"
        events.collective(f"{name} ({backend})", sent_tensors(args))
        if backend == "gloo" or name in POINT_TO_POINT:
            return original(self, *unwrap(args), **unwrap(kwargs))
        nccl.announce(describe(name, values, nccl.group_size))
        work = perform(original, name, self, nccl, args, kwargs)
        output = values[:1]
        return nccl.remember(work, tensors_in(output))

    return call


def perform(original: Callable[..., Any], name: str, group: Any, nccl: PretendedNCCL, args: Any, kwargs: Any) -> Any:
    """Call a method of ProcessGroup with the CPU tensors inside pretended ones, and return its Work.

    NCCL only counts elements, so it accepts an output whose shape is not the input's, and lists of tensors of different
    sizes. gloo refuses both. So tensors are made flat, and such lists go by ``all_to_all_of_lists``.
    """
    args = unwrap(args)
    if name not in SAME_SHAPES and not divides_rows(name, args):
        args = map_tensors(args, flattened)
    # The first argument of both is the output, and the second is the input. An all_gather's input is a list of one.
    outputs = tensors_in(args[:1])
    if name == "alltoall":
        inputs = args[1]
        return all_to_all_of_lists(nccl, outputs, inputs)
    if name == "allgather" and len({tensor.numel() for tensor in outputs}) > 1:
        # An all_gather is an all_to_all in which a rank sends the same tensor to all.
        input_for_each_rank = args[1] * nccl.group_size
        return all_to_all_of_lists(nccl, outputs, input_for_each_rank)
    return original(group, *args, **unwrap(kwargs))


def divides_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether an all_to_all says how many rows each rank gets. Then its tensors cannot be made flat.

    Its arguments are the output, the input, and for each of them an optional list with a number of rows for each rank.
    """
    if name not in ("alltoall_base", "all_to_all_single"):
        return False
    rows_of_output_and_input = args[2:4]
    return any(rows_of_output_and_input)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as one row, which shares it."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def all_to_all_of_lists(nccl: PretendedNCCL, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """Send the k-th input to rank k, and receive the k-th output from it. Their sizes may differ."""
    output_sizes = [tensor.numel() for tensor in outputs]
    input_sizes = [tensor.numel() for tensor in inputs]
    received = torch.empty(sum(output_sizes), dtype=outputs[0].dtype)
    work = nccl.alltoall_base(received, torch.cat(inputs), output_sizes, input_sizes, dist.AllToAllOptions())
    work.wait()
    for output, part in zip(outputs, received.split(output_sizes), strict=True):
        output.copy_(part)
    return work


def barrier(self: Any, opts: Any = None, **kwargs: Any) -> Any:
    """ProcessGroup.barrier. NCCL's makes a communicator if there is none yet, and blocks the host to its end."""
    if opts is None:
        opts = dist.BarrierOptions()
    nccl = nccl_of(self)
    if nccl is None:
        events.collective("barrier (gloo)")
        opts.device = torch.device("cpu")
        return ORIGINAL_BARRIER(self, opts, **kwargs)
    nccl.connect(gpu_of_barrier(self, nccl, opts.device))
    COUNTS.count(WAIT, "barrier")
    nccl.announce("barrier")
    events.collective("barrier (NCCL)")
    opts.device = torch.device("cpu")
    return nccl.remember(ORIGINAL_BARRIER(self, opts, **kwargs))


def gpu_of_barrier(group: Any, nccl: PretendedNCCL, device: Any) -> int:
    """The GPU of a barrier, which has no tensor that would say it.

    It is the one that the call names, or else the communicator's, or else the one that NCCL guesses from the rank.
    """
    if device is not None and device.type == "cuda" and device.index is not None:
        return int(device.index)
    if nccl.gpu is not None:
        return nccl.gpu
    return int(group.rank() % Node.gpus)


def check_operator(func: Any, args: Any) -> None:
    """Count and check a collective that is an operator, as ``checked`` does for those that are methods of a group.

    Functional collectives are operators, and torch's C++ calls a group by others.
    """
    name = func.__name__.partition(".")[0].rstrip("_")
    if name not in ("wait_tensor", "_wrap_tensor_autograd"):  # these two send nothing
        first_argument = args[:1]
        events.collective(f"{name} (C++)", tensors_in(first_argument))
    nccl = nccl_of(group_among(args))
    if nccl is None:
        return
    call = describe(name, args, nccl.group_size)
    if call:
        gpus = [index_of(tensor) for tensor in tensors_in(args) if index_of(tensor) is not None]
        nccl.connect(gpus[0])
        nccl.announce(call)


def group_among(args: Sequence[Any]) -> Any:
    """The process group among an operator's arguments, or None.

    A functional collective has the group's name as its last text, after that of a reduction. An operator of C++ has the
    group in a ScriptObject.
    """
    for arg in reversed(args):
        if isinstance(arg, str):
            return c10d._resolve_process_group(c10d.GroupName(arg))
        if isinstance(arg, torch.ScriptObject):
            return GROUP.unbox(arg)
        if isinstance(arg, GROUP):
            return arg
    return None


def patch() -> None:
    """Put the pretended NCCL in the place of torch's, and let all calls of process groups go through the checks."""
    replace(c10d, ProcessGroupNCCL=PretendedNCCL, _NCCL_AVAILABLE=True, default_pg_nccl_timeout=timedelta(minutes=10))
    replace(dist, ProcessGroupNCCL=PretendedNCCL)
    # Without this, "nccl" builds ProcessGroupNCCL2 from torch 2.15 on, which torch calls in another way.
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        if hasattr(GROUP, name):  # PyTorch 2.11 and 2.12 do not have all of them.
            replace(GROUP, **{name: checked(name, getattr(GROUP, name))})
    replace(GROUP, barrier=barrier, _device_types=property(device_types))
    replace(c10d, _new_process_group_helper=new_process_group)
    replace(dist.Work, wait=wait, get_future=get_future)
    replace(CudaTensor, check_collective=staticmethod(check_operator))
    for module in (c10d, dist, device_mesh):
        replace(module, new_group=new_group, split_group=split_group)


def device_types(group: Any) -> list[torch.device]:
    """The device types of a group's backends, without the CPU if only ``new_process_group`` has added it."""
    devices = ORIGINAL_DEVICE_TYPES.fget(group)
    if group in c10d._world.pg_map and "cpu" not in backends_of(group):
        devices = [device for device in devices if device.type != "cpu"]
    return devices


def new_process_group(*args: Any, **kwargs: Any) -> Any:
    """torch's function that makes a group. For the CPU, the group then has NCCL as its backend too.

    torch's C++ looks for the backend of a tensor's device, and takes a pretended tensor for one on the CPU.
    """
    group, *rest = ORIGINAL_HELPER(*args, **kwargs)
    if isinstance(group, dist.ProcessGroup) and nccl_of(group) and "cpu" not in backends_of(group):
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.NCCL, nccl_of(group))
    return group, *rest


def splits_off(parent: Any) -> bool:
    """Whether NCCL makes a new group by a split of this one: it does if the group is bound to a GPU."""
    return bool(parent.bound_device_id and nccl_of(parent))


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch's new_group. It raises an error for calls that would leave ranks waiting in a split of the parent.

    If the default group is bound to a GPU, NCCL makes a smaller group by a split, in which all ranks take part.
    """
    parent = c10d._get_default_group()
    if ranks is not None and len(ranks) < parent.size() and splits_off(parent):
        if kwargs.get("use_local_synchronization", False):
            raise COUNTS.refuse(
                "new_group(use_local_synchronization=True) beside an NCCL group that is bound to a GPU: the new group "
                "is split off the parent, so every rank of the parent must call new_group (pytorch#129965)"
            )
        if backend and "nccl" not in backend:
            # torch lets the ranks outside of the new group split the parent in any case, and its members only if the
            # new group's backend is NCCL.
            raise COUNTS.refuse(
                f"new_group({list(ranks)}, backend={backend!r}) beside an NCCL group that is bound to a GPU: the ranks "
                "outside wait in ncclCommSplit for members that never come; make the group of all ranks"
            )
    return ORIGINAL_NEW_GROUP(ranks, timeout, backend, *args, **kwargs)


def split_group(parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, *args: Any, **kwargs: Any) -> Any:
    """torch's split_group: a group for each list of the parent's ranks. Returns the first one that has this rank.

    torch asks the backend to split itself, which gloo cannot. So each group is made by ``new_group``.
    """
    parent = parent_pg or c10d._get_default_group()
    if not splits_off(parent):
        return ORIGINAL_SPLIT_GROUP(parent_pg, split_ranks, timeout, *args, **kwargs)
    global_ranks = c10d.get_process_group_ranks(parent)  # the lists have the ranks' numbers in the parent
    options = {name: kwargs[name] for name in ("backend", "group_desc") if name in kwargs}
    own_group = None
    for split in split_ranks:
        group = c10d.new_group([global_ranks[rank] for rank in split], timeout, **options)
        if parent.rank() in split and own_group is None:
            own_group = group
    return own_group
