"""NCCL for pretended GPUs: gloo does the work, and calls that NCCL or torch would refuse raise the same errors.

The class stands where torch expects ProcessGroupNCCL. So everything above it, groups, meshes and DDP, is torch's own.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from helpers.rehearsal.counts import COLLECTIVE, COUNTS, WAIT
from helpers.rehearsal.tensor import CudaTensor, State, strip, tensors_in

COLLECTIVES = (
    "allreduce allreduce_coalesced broadcast reduce scatter gather allgather allgather_coalesced _allgather_base "
    "all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced alltoall alltoall_base "
    "all_to_all_single"
).split()
POINT_TO_POINT = "send recv recv_anysource".split()
MISSING = ("BAND", "BOR", "BXOR")  # of torch's ReduceOps


class PretendedNCCL(c10d.ProcessGroupGloo):
    """A ProcessGroupNCCL on gloo. It is as strict as NCCL about duplicate GPUs, splits and devices."""

    class Options:
        """The part of ProcessGroupNCCL.Options that torch's Python code uses."""

        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)
            self.split_from = None
            self.config = type("Config", (), {})()

    kept = []  # torch keeps only the C++ half of a group alive; this list keeps the Python half

    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, timeout=options._timeout)
        self.store, self.place, self.world, self.pretended_options = store, rank, size, options
        self.gpu, self.splits = None, 0
        self.kept.append(self)

    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)

    def eager_connect_single_device(self, device):
        """Make the communicator at once, as NCCL does for a group that is bound to a GPU."""
        if self.pretended_options.split_from:
            self.pretended_options.split_from.split()
        self.connect(device.index)

    def perform_nocolor_split(self, device):
        """Take part in a split as a rank that is not in the new group."""
        self.split()

    def split(self):
        """As ncclCommSplit: return when every rank of this group, the parent, has come to the same split."""
        self.splits += 1
        self.store.set(f"split/{self.splits}/{self.place}", "")
        self.await_all(f"split/{self.splits}", "call new_group, which splits the group that all ranks are in")

    def await_all(self, key, duty):
        """Wait until every rank has set its key. Raises RuntimeError after the group's timeout."""
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        try:
            self.store.wait(keys, self.pretended_options._timeout)
        except dist.DistStoreError:
            late = [rank for rank in range(self.world) if not self.store.check([keys[rank]])]
            message = f"NCCL would hang here: ranks {late} of the group did not {duty}"
            raise COUNTS.refuse(RuntimeError(message)) from None

    def connect(self, gpu):
        """Make the communicator on this rank's GPU. Raises NCCL's error where two ranks of a node have one GPU."""
        if self.gpu == gpu:
            return
        if self.gpu is not None:
            bound = f"Tensor found on device cuda:{gpu} but backend constrained to cuda:{self.gpu}"
            raise COUNTS.refuse(RuntimeError(bound))
        node = os.environ.get("GROUP_RANK", "0")
        self.store.set(f"gpu/{self.place}", f"{node}/{gpu}")
        self.await_all("gpu", "come to this communicator's first use")
        gpus = [self.store.get(f"gpu/{rank}").decode() for rank in range(self.world)]
        twins = [rank for rank in range(self.world) if gpus[rank] == f"{node}/{gpu}"]
        if len(twins) > 1:
            raise COUNTS.refuse(
                RuntimeError(f"NCCL error: Duplicate GPU detected: ranks {twins} of this group are all on cuda:{gpu}")
            )
        self.gpu = gpu


def backends_of(group):
    """{device type: backend} of the group, such as {"cuda": "nccl"} or {"cpu": "gloo", "cuda": "nccl"}."""
    return c10d.BackendConfig(c10d.Backend(c10d._world.pg_map[group][0])).get_device_backend_map()


def pretended(group):
    """The group's pretended NCCL, or None where it has none."""
    if group not in c10d._world.pg_map or backends_of(group).get("cuda") != "nccl":
        return None
    return group._get_backend(torch.device("cuda"))


HOOKS_OF_DDP = [0]  # how many comm hooks run now: their buckets are CPU tensors, which NCCL then has to accept


def check_tensors(group, name, tensors):
    """Raise what NCCL would raise for these tensors; make the communicator at the first call. Returns NCCL or None."""
    nccl = pretended(group)
    for tensor in tensors:
        if not isinstance(tensor, CudaTensor):
            if nccl and "cpu" not in backends_of(group) and not HOOKS_OF_DDP[0]:
                message = f"No backend type associated with device type cpu ({name} of a CPU tensor on NCCL)"
                raise COUNTS.refuse(RuntimeError(message))
            continue
        if not nccl:
            continue
        if tensor.is_sparse:
            raise COUNTS.refuse(ValueError("Tensors must be CUDA and dense"))
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=memory_format(tensor)):
            if name in POINT_TO_POINT:
                # torch only warns. NCCL sends the memory in its order, which is right if both tensors have one layout.
                message = f"{name} of a non-contiguous tensor: NCCL sends its memory as it lies; use .contiguous()"
            else:
                message = "Tensors must be contiguous"
            raise COUNTS.refuse(ValueError(message))
        if name not in POINT_TO_POINT:
            nccl.connect(tensor.index)
        elif nccl.gpu not in (None, tensor.index):
            bound = f"Tensor found on device cuda:{tensor.index} but backend constrained to cuda:{nccl.gpu}"
            raise COUNTS.refuse(RuntimeError(bound))
    return nccl


def memory_format(tensor):
    """The second memory format in which NCCL accepts a tensor: channels last for 4 dimensions."""
    return torch.channels_last if tensor.dim() == 4 else torch.contiguous_format


def check_operation(options):
    """Raise torch's ValueError for a ReduceOp that NCCL lacks."""
    operation = getattr(options, "reduceOp", None)
    for name in MISSING if operation is not None else ():
        if operation == getattr(dist.ReduceOp, name):
            raise COUNTS.refuse(ValueError(f"Cannot use ReduceOp.{name} with NCCL"))


def checked(name, original):
    """A method of ProcessGroup, wrapped: it checks and counts, then calls gloo with the CPU tensors inside."""

    def call(self, *args, **kwargs):
        tensors = list(tensors_in((*args, *kwargs.values())))
        nccl = check_tensors(self, name, tensors)
        if nccl:
            for value in (*args, *kwargs.values()):
                check_operation(value)
        inputs = next((value for value in (*args[1:], *args) if list(tensors_in([value]))), ())
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in([inputs]))
        on_gpu = nccl and any(isinstance(tensor, CudaTensor) for tensor in tensors)
        COUNTS.add(COLLECTIVE, f"{name} ({'NCCL' if on_gpu else 'gloo'})", size)
        return original(self, *strip(args), **{key: strip(value) for key, value in kwargs.items()})

    return call


def barrier(original):
    def call(self, opts=None, **kwargs):
        opts = opts or dist.BarrierOptions()
        nccl = pretended(self)
        if nccl:
            given = opts.device.index if opts.device is not None and opts.device.type == "cuda" else nccl.gpu
            nccl.connect(self.rank() % State.gpus if given is None else given)  # ProcessGroupNCCL guesses the same GPU
            COUNTS.add(WAIT, "barrier")  # torch's NCCL barrier blocks the host until it has ended
        COUNTS.add(COLLECTIVE, f"barrier ({'NCCL' if nccl else 'gloo'})")
        opts.device = torch.device("cpu")
        return original(self, opts, **kwargs)

    return call


def patch():
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = PretendedNCCL
    c10d._NCCL_AVAILABLE = True
    # Without this, "nccl" builds ProcessGroupNCCL2 from torch 2.15 on, which torch calls in another way.
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    group = dist.ProcessGroup
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        setattr(group, name, checked(name, getattr(group, name)))
    group.barrier = barrier(group.barrier)
    devices = group._device_types
    group._device_types = property(lambda self: visible_devices(self, devices))
    for name, function in (("new_group", new_group), ("split_group", split_group)):
        replace(name, function(getattr(c10d, name)))
    c10d._new_process_group_helper = with_cpu(c10d._new_process_group_helper)
    replace("monitored_barrier", refusing_monitored_barrier(c10d.monitored_barrier))


def replace(name, function):
    """Replace a function of torch.distributed in all modules that have it."""
    import torch.distributed.device_mesh as device_mesh

    for module in (c10d, dist, device_mesh):
        if hasattr(module, name):
            setattr(module, name, function)


def visible_devices(group, devices):
    """A group's device types, without the CPU that only ``with_cpu`` has added."""
    found = devices.fget(group)
    if group in c10d._world.pg_map and "cpu" not in backends_of(group):
        found = [device for device in found if device.type != "cpu"]
    return found


def with_cpu(original):
    """The maker of groups, wrapped: NCCL also takes CPU tensors, which pretended ones are for torch's C++."""

    def make(*args, **kwargs):
        made = original(*args, **kwargs)
        if isinstance(made[0], dist.ProcessGroup) and pretended(made[0]) and "cpu" not in backends_of(made[0]):
            kind = dist.ProcessGroup.BackendType.NCCL
            made[0]._register_backend(torch.device("cpu"), kind, pretended(made[0]))
        return made

    return make


def new_group(original):
    def make(ranks=None, timeout=None, backend=None, *args, **kwargs):
        parent = c10d._get_default_group()
        local = kwargs.get("use_local_synchronization", False)
        if local and ranks is not None and len(ranks) < parent.size() and parent.bound_device_id and pretended(parent):
            raise COUNTS.refuse(
                RuntimeError(
                    "new_group(use_local_synchronization=True) beside an NCCL group that is bound to a GPU: the new "
                    "group is split off the parent, so every rank of the parent must call new_group (pytorch#129965)"
                )
            )
        some = ranks is not None and len(ranks) < parent.size()
        if some and parent.bound_device_id and pretended(parent) and backend and "nccl" not in backend:
            # With any backend, torch makes the ranks outside split the parent; the members split it with NCCL alone.
            raise COUNTS.refuse(
                RuntimeError(
                    f"new_group({list(ranks)}, backend={backend!r}) beside an NCCL group that is bound to a GPU: the "
                    "ranks outside wait in ncclCommSplit for members that never come; make the group of all ranks"
                )
            )
        return original(ranks, timeout, backend, *args, **kwargs)

    return make


def split_group(original):
    def make(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None):
        parent = parent_pg or c10d._get_default_group()
        if not parent.bound_device_id or not pretended(parent):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
        ranks = c10d.get_process_group_ranks(parent)
        mine = None
        for split in split_ranks:
            members = [ranks[rank] for rank in split]
            made = c10d.new_group(members, timeout, backend, group_desc=group_desc)
            mine = made if dist.get_rank() in members else mine
        return mine

    return make


def refusing_monitored_barrier(original):
    def call(group=None, *args, **kwargs):
        try:
            return original(group, *args, **kwargs)
        except ValueError as error:
            raise COUNTS.refuse(error) from None

    return call
