"""NCCL for simulated GPUs: gloo does the work, and calls that NCCL or torch would refuse raise the same errors.

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
from helpers.rehearsal.devices import Node, gpu_error, replace
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
    """The part of ProcessGroupNCCL.Options that torch's Python code reads and sets, with its names and defaults."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)
    split_from: "SimulatedNCCL | None" = None
    config: Any = field(default_factory=SimpleNamespace)


class SimulatedNCCL(GLOO, CallOrder):
    """A ProcessGroupNCCL on gloo. It is as strict as NCCL about duplicate GPUs, splits and devices.

    NCCL makes a communicator for a group, on one GPU of each rank, at the group's first collective or when the group is
    bound to a GPU. Here nothing is made: ``connect`` only checks what NCCL would check then, and keeps the GPU.
    """

    Options: Any = Options
    instances: list["SimulatedNCCL"] = []  # kept here, because torch keeps only the C++ half of a group alive
    default_groups_started = 0  # by this process

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        """Make this rank's part of a process group. torch calls this where it would make a ProcessGroupNCCL.

        store: torch's table of keys and values that all ranks of the group can read. rank: this process's number in the
        group, which has ``size`` ranks. options: an ``Options``, as a script may pass it to init_process_group.
        """
        super().__init__(store, rank, size, timeout=options._timeout)
        self.instances.append(self)
        self.rank_in_group = rank
        self.group_size = size
        self.simulated_options = options
        self.gpu: int | None = None  # this rank's GPU in the communicator, once that is made
        self.calls = 0  # how many collectives this rank has called, for ``CallOrder``
        self.splits = 0  # how often this group was split

        # A script may destroy its groups and start new ones on the same store. So that the new groups do not find the
        # keys of the old ones, the keys begin with the number of default groups started so far. While torch makes the
        # default group, which is always the first, there is no default group yet.
        is_default_group = c10d._world.default_pg is None
        if is_default_group:
            SimulatedNCCL.default_groups_started += 1
        self.store = dist.PrefixStore(f"start{SimulatedNCCL.default_groups_started}", store)

    supports_splitting: Any = property(lambda self: True)
    supports_coalescing: Any = property(lambda self: False)

    def eager_connect_single_device(self, device: Any) -> None:
        """Make the communicator at once. torch calls this for a group that is bound to a GPU by ``device_id``.

        If the group is split off a parent, NCCL makes it by a split, which waits for all ranks of the parent.
        """
        parent = self.simulated_options.split_from
        if parent:
            parent.perform_nocolor_split(device)
        self.connect(device.index)

    def perform_nocolor_split(self, device: Any) -> None:
        """Wait, as ncclCommSplit does, until every rank of this group has come to the same split of it.

        A split makes a smaller group of some of the ranks. torch calls this on the ranks that will not be in it, to
        which NCCL gives no color. ``eager_connect_single_device`` calls it on those that will.
        """
        self.splits += 1
        self.share_value(
            key=f"split/{self.splits}",
            value="called",
            duty="call new_group, which splits the group that all ranks are in",  # what an error says of a missing rank
            timeout=self.simulated_options._timeout,
        )

    def connect(self, gpu: int) -> None:
        """Make the group's communicator on this rank's GPU, unless there is one, and wait for the other ranks to come.

        ``gpu`` is the GPU's number on this node. The ranks tell each other which GPU of which node they are on. Raises
        NCCL's error if two ranks are on the same one, or if this rank's communicator is on another GPU already.
        """
        if self.gpu == gpu:
            return
        self.check_bound(gpu)
        node = os.environ["GROUP_RANK"]  # as torchrun numbers the nodes
        own_gpu = f"{node}/{gpu}"
        gpu_of_each_rank = self.share_value(
            key="gpu",
            value=own_gpu,
            duty="come to this communicator's first use",  # what an error says that a missing rank did not do
            timeout=self.simulated_options._timeout,
        )
        ranks_on_this_gpu = [rank for rank, gpu_of_rank in enumerate(gpu_of_each_rank) if gpu_of_rank == own_gpu]
        if len(ranks_on_this_gpu) > 1:
            raise gpu_error(
                f"NCCL error: Duplicate GPU detected: ranks {ranks_on_this_gpu} of a group are all on cuda:{gpu}"
            )
        self.gpu = gpu

    def check_bound(self, gpu: int) -> None:
        """Raise NCCL's error for a tensor on another GPU than the communicator's, once there is one."""
        if self.gpu is not None and self.gpu != gpu:
            raise gpu_error(f"Tensor found on device cuda:{gpu} but backend constrained to cuda:{self.gpu}")


def backends_of(group: Any) -> Any:
    """{device type: backend} of the group, such as {"cuda": "nccl"} or {"cpu": "gloo", "cuda": "nccl"}."""
    backend, _ = c10d._world.pg_map[group]  # such as "nccl" or "cpu:gloo,cuda:nccl", and the group's store
    return c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()


def nccl_of(group: Any) -> Any:
    """The group's simulated NCCL, or None for a group without one, such as a group of gloo or one that has ended."""
    if group not in c10d._world.pg_map or backends_of(group).get("cuda") != "nccl":
        return None
    return group._get_backend(torch.device("cuda"))


def check_tensors(group: Any, nccl: SimulatedNCCL, name: str, tensors: list[torch.Tensor]) -> None:
    """Raise what NCCL would raise for the tensors of a call, and make the communicator at the first collective.

    ``name`` is the called method of ProcessGroup, such as "allreduce". ``nccl`` is the group's simulated NCCL.
    """
    for tensor in tensors:
        gpu = index_of(tensor)
        if gpu is None:  # The tensor is on the CPU. It goes by gloo if the group has that, too.
            if "cpu" not in backends_of(group):
                raise gpu_error(f"No backend type associated with device type cpu ({name} of a CPU tensor on NCCL)")
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
        raise gpu_error(message, TypeError)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raise an error for a tensor that is not contiguous, with which a script has called a method of ProcessGroup.

    ``name`` is the method, such as "allreduce" or "send". For a collective torch raises the same error. Images whose
    channels come last in memory are accepted.
    """
    if tensor.is_contiguous():
        return
    is_batch_of_images = tensor.dim() == 4
    if is_batch_of_images and tensor.is_contiguous(memory_format=torch.channels_last):
        return
    message = "Tensors must be contiguous"
    if name in POINT_TO_POINT:
        # torch only warns here. NCCL sends the bytes in the order of the memory, which is right only if the tensors of
        # both ranks have the same strides.
        message = f"{name} of a non-contiguous tensor: NCCL sends its memory as it lies; use .contiguous()"
    raise gpu_error(message, ValueError)


def check_operation(values: Sequence[Any]) -> None:
    """Raise torch's error where a call asks for a reduction that NCCL does not have, such as a bitwise OR.

    ``values`` are all arguments of the call. Among them may be one object of options, such as AllreduceOptions, which
    names the reduction.
    """
    for value in values:
        reduction = getattr(value, "reduceOp", None)  # tensors and the options of other calls have none
        for operation in REDUCTIONS_NOT_IN_NCCL:
            if reduction == operation:
                raise gpu_error(f"Cannot use ReduceOp.{operation.name} with NCCL", ValueError)


def sent_tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that a call of ProcessGroup sends, by its arguments without keywords.

    A call has an output first and then an input, or only one argument with tensors, which is both. So the first
    argument counts only if no other has tensors.
    """
    first_argument = args[:1]
    other_arguments = args[1:]
    for arg in (*other_arguments, *first_argument):
        tensors = tensors_in([arg])
        if tensors:
            return tensors
    return []


def checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of ``original``, torch's method ``name`` of ProcessGroup, such as ``allreduce``."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of ``original``, torch's method ``name`` of ProcessGroup. ``self`` is the process group."""
        return call_checked(original, name, self, args, kwargs)

    return call


def call_checked(original: Callable[..., Any], name: str, group: Any, args: Any, kwargs: Any) -> Any:
    """Carry out a script's call of a method of ProcessGroup: check it, count it, and let gloo do it. Returns its Work.

    ``original`` is torch's method ``name``, such as "allreduce"; ``args`` and ``kwargs`` are the call's arguments.
    Simulated tensors among them hold CPU tensors, and gloo gets these.

    Only a call on a group of NCCL with tensors on a GPU is NCCL's. gloo would do any other on a cluster as well, so
    that one is counted as gloo's.
    """
    values = (*args, *kwargs.values())
    nccl = nccl_of(group)
    backend = "gloo"
    if nccl is not None:
        tensors = tensors_in(values)
        check_tensors(group, nccl, name, tensors)
        check_operation(values)
        is_on_gpu = any(index_of(tensor) is not None for tensor in tensors)
        if is_on_gpu:
            backend = "NCCL"
    events.collective(f"{name} ({backend})", sent_tensors(args))
    if backend == "gloo" or name in POINT_TO_POINT:
        return original(group, *unwrap(args), **unwrap(kwargs))

    # All ranks of the group have to make this call. ``announce`` raises an error if another rank makes another one.
    nccl.announce(describe(name, values, nccl.group_size))
    work = perform(original, name, group, nccl, args, kwargs)
    first_argument = values[:1]  # what a collective fills
    return nccl.remember(work, tensors_in(first_argument))


def perform(original: Callable[..., Any], name: str, group: Any, nccl: SimulatedNCCL, args: Any, kwargs: Any) -> Any:
    """Let gloo do a collective that a script has called on NCCL, and return its Work.

    ``original`` is torch's method ``name`` of ProcessGroup, such as "allreduce"; ``args`` and ``kwargs`` are the call's
    arguments. Simulated tensors among them hold CPU tensors, and gloo gets these.

    NCCL only counts elements, where gloo compares shapes. So gloo gets flat tensors, unless torch itself compares the
    shapes, or divides the tensor by its rows.
    """
    args = unwrap(args)
    kwargs = unwrap(kwargs)
    keeps_shapes = name in SAME_SHAPES or divides_rows(name, args)
    if not keeps_shapes:
        args = map_tensors(args, flattened)

    # These two take lists of tensors. With NCCL the tensors of a list may have different sizes, and with gloo they may
    # not. So such lists are sent as parts of one tensor.
    if name in ("alltoall", "allgather"):
        outputs = tensors_in(args[:1])
        inputs = tensors_in(args[1:2])
        if name == "alltoall":
            return all_to_all_of_lists(nccl, outputs, inputs)
        if have_different_sizes(outputs):
            return all_gather_of_different_sizes(nccl, outputs, inputs)
    return original(group, *args, **kwargs)


def all_gather_of_different_sizes(nccl: SimulatedNCCL, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """An all_gather as an all_to_all in which each rank sends the same tensor, its only input, to all ranks."""
    [own_input] = inputs
    same_for_each_rank = [own_input] * nccl.group_size
    return all_to_all_of_lists(nccl, outputs, inputs=same_for_each_rank)


def divides_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether an all_to_all of one tensor says how many rows each rank gets. Then its tensors cannot be made flat.

    Its arguments are the output, the input, and for each of them a list with the number of rows for each rank. The
    lists are empty where all ranks get as many.
    """
    if name not in ("alltoall_base", "all_to_all_single"):
        return False
    rows_of_output_and_input = args[2:4]
    return any(rows_of_output_and_input)


def have_different_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of the tensors has more elements than another."""
    return any(tensor.numel() != tensors[0].numel() for tensor in tensors)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same memory and one dimension. Its elements are in the order in which they are in memory."""
    return tensor.detach().as_strided(size=(tensor.numel(),), stride=(1,))


def all_to_all_of_lists(nccl: SimulatedNCCL, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """Send the k-th input to rank k, receive the k-th output from it, and return the Work. Their sizes may differ.

    gloo has an all_to_all for one tensor alone, which takes the number of elements for each rank. So the inputs go in
    one tensor, and what comes is cut into the outputs. All tensors are flat, and on the CPU.
    """
    output_sizes = [tensor.numel() for tensor in outputs]
    input_sizes = [tensor.numel() for tensor in inputs]
    received = torch.empty(sum(output_sizes), dtype=outputs[0].dtype)
    work = nccl.alltoall_base(received, torch.cat(inputs), output_sizes, input_sizes, dist.AllToAllOptions())
    work.wait()  # also for async_op=True, because the outputs are filled here
    for output, part in zip(outputs, received.split(output_sizes), strict=True):
        output.copy_(part)
    return work


def barrier(self: Any, opts: Any = None, **kwargs: Any) -> Any:
    """In the place of ProcessGroup.barrier: check and count it, and let gloo do it. Returns its Work.

    ``self`` is the process group. Like NCCL's, this barrier makes a communicator if there is none yet, and counts as a
    wait of the host. ``opts`` are torch's BarrierOptions, which may name a GPU.
    """
    if opts is None:
        opts = dist.BarrierOptions()
    nccl = nccl_of(self)
    if nccl is None:
        events.collective("barrier (gloo)")
    else:
        nccl.connect(gpu_of_barrier(self, nccl, opts.device))
        COUNTS.count(WAIT, "barrier")
        nccl.announce("barrier")
        events.collective("barrier (NCCL)")
    opts.device = torch.device("cpu")  # because gloo makes the barrier in any case
    work = ORIGINAL_BARRIER(self, opts, **kwargs)
    if nccl is None:
        return work
    return nccl.remember(work)


def gpu_of_barrier(group: Any, nccl: SimulatedNCCL, device: Any) -> int:
    """The number of the GPU on which NCCL makes a barrier, which has no tensor that would say it.

    It is the one that the call's ``device`` names, or else the communicator's, or else the one that NCCL guesses from
    the rank.
    """
    if device is not None and device.type == "cuda" and device.index is not None:
        return int(device.index)
    if nccl.gpu is not None:
        return nccl.gpu
    return int(group.rank() % Node.gpus)


def check_operator(func: Any, args: Any) -> None:
    """Count and check a collective that torch runs as an operator, not as a method of a process group.

    Functional collectives are operators, such as _c10d_functional.all_reduce, and torch's C++ calls a group by others,
    such as c10d.allreduce_. ``CudaTensor`` calls this function before it runs an operator ``func`` of these two
    namespaces. ``args`` are the operator's arguments.
    """
    name = func.__name__.partition(".")[0].rstrip("_")  # "allreduce" for allreduce_.default
    sends_nothing = name in ("wait_tensor", "_wrap_tensor_autograd")
    if not sends_nothing:
        first_argument = args[:1]
        events.collective(f"{name} (C++)", tensors_in(first_argument))
    nccl = nccl_of(group_among(args))
    if nccl is None:
        return
    call = describe(name, args, nccl.group_size)
    is_collective = call != ""
    if is_collective:
        gpus = [index_of(tensor) for tensor in tensors_in(args) if index_of(tensor) is not None]
        nccl.connect(gpus[0])
        nccl.announce(call)


def group_among(args: Sequence[Any]) -> Any:
    """The process group among the arguments of an operator, or None.

    A functional collective gets the group's name. It is the last text among the arguments, because a reduction's name
    comes before it. An operator that torch's C++ calls gets the group itself, in a ScriptObject.
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
    """Put the simulated NCCL in the place of torch's, and let all calls of process groups go through the checks."""
    # torch now finds itself built with NCCL, whose class of groups is this one, and whose timeout is 10 minutes.
    replace(c10d, ProcessGroupNCCL=SimulatedNCCL, _NCCL_AVAILABLE=True, default_pg_nccl_timeout=timedelta(minutes=10))
    replace(dist, ProcessGroupNCCL=SimulatedNCCL)
    # Without this, "nccl" builds ProcessGroupNCCL2 from torch 2.15 on, which torch calls in another way.
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"

    # The methods of process groups, and of the Work that they return.
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        if hasattr(GROUP, name):  # PyTorch 2.11 and 2.12 do not have all of them.
            replace(GROUP, **{name: checked(name, getattr(GROUP, name))})
    replace(GROUP, barrier=barrier, _device_types=property(device_types))
    replace(dist.Work, wait=wait, get_future=get_future)
    replace(CudaTensor, check_collective=staticmethod(check_operator))

    # The functions that make groups. The modules dist and device_mesh have imported those of c10d.
    replace(c10d, _new_process_group_helper=new_process_group)
    for module in (c10d, dist, device_mesh):
        replace(module, new_group=new_group, split_group=split_group)


def device_types(group: Any) -> list[torch.device]:
    """ProcessGroup._device_types: the types of devices for which a group has a backend.

    The CPU is left out if only ``new_process_group`` below has added it: the group of the script has none for it.
    """
    devices = ORIGINAL_DEVICE_TYPES.fget(group)
    if group not in c10d._world.pg_map or "cpu" in backends_of(group):
        return devices
    return [device for device in devices if device.type != "cpu"]


def new_process_group(*args: Any, **kwargs: Any) -> Any:
    """In the place of torch's function that makes a process group: a group of NCCL alone gets NCCL for the CPU, too.

    torch's C++ looks for the backend of a tensor's device, and takes a simulated tensor for one on the CPU. The
    arguments are those of torch's function, and so is what this returns: the group first.
    """
    group, *other_results = ORIGINAL_HELPER(*args, **kwargs)
    is_member = isinstance(group, dist.ProcessGroup)  # A rank outside of the group gets a number as a placeholder.
    if is_member:
        simulated_nccl = nccl_of(group)
        if simulated_nccl and "cpu" not in backends_of(group):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.NCCL, simulated_nccl)
    return group, *other_results


def splits_off(parent: Any) -> bool:
    """Whether NCCL makes a smaller group by a split of the group ``parent``, instead of anew.

    It does if ``device_id`` of init_process_group has bound the parent to a GPU. All ranks of the parent have to take
    part in a split, also those that will not be in the smaller group.
    """
    is_bound_to_gpu = bool(parent.bound_device_id)
    return is_bound_to_gpu and bool(nccl_of(parent))


def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's new_group. It raises an error for a call that would leave ranks waiting for ever.

    If the default group is bound to a GPU, NCCL makes a smaller group by splitting the default group, the parent. All
    ranks of the parent must take part in the split, and wait for each other. ``args`` and ``kwargs`` are torch's
    further arguments.
    """
    parent = c10d._get_default_group()
    is_smaller = ranks is not None and len(ranks) < parent.size()
    if is_smaller and splits_off(parent):
        if kwargs.get("use_local_synchronization", False):
            raise gpu_error(
                "new_group(use_local_synchronization=True) beside an NCCL group that is bound to a GPU: the new group "
                "is split off the parent, so every rank of the parent must call new_group (pytorch#129965)"
            )
        if backend and "nccl" not in backend:
            # torch lets the ranks outside of the new group split the parent in any case, and its members only if the
            # new group's backend is NCCL.
            raise gpu_error(
                f"new_group({list(ranks)}, backend={backend!r}) beside an NCCL group that is bound to a GPU: the ranks "
                "outside wait in ncclCommSplit for members that never come; make the group of all ranks"
            )
    return ORIGINAL_NEW_GROUP(ranks, timeout, backend, *args, **kwargs)


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Any = None,
    timeout: timedelta | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """In the place of torch's split_group: divide a group into smaller ones, and return the one of this rank, or None.

    ``parent_pg`` is the group to divide, or None for the default group. ``split_ranks`` lists for each new group the
    numbers that its ranks have in the parent, such as [[0, 1], [2, 3]]. ``args`` and ``kwargs`` are torch's further
    arguments.

    torch asks the group's backend to split itself, which gloo, the backend here, cannot. So where NCCL would split the
    parent, each group is made by ``new_group``. A group without NCCL is left to torch's own function.
    """
    parent = parent_pg or c10d._get_default_group()
    if not splits_off(parent):
        return ORIGINAL_SPLIT_GROUP(parent_pg, split_ranks, timeout, *args, **kwargs)
    options = {name: kwargs[name] for name in ("backend", "group_desc") if name in kwargs}
    job_ranks = c10d.get_process_group_ranks(parent)  # the number in the whole job of each rank of the parent
    own_group = None
    for ranks_in_parent in split_ranks:
        ranks_in_job = [job_ranks[rank] for rank in ranks_in_parent]
        # Every rank of the parent makes every group, as torch demands of new_group.
        group = c10d.new_group(ranks_in_job, timeout, **options)
        if own_group is None and parent.rank() in ranks_in_parent:
            own_group = group
    return own_group
