"""DDP, DTensor and modules on simulated GPUs: patches for their C++ parts, which see only CPU tensors."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._random import OffsetBasedRNGTracker
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from helpers.counts import script_line
from helpers.rehearsal import events, nccl
from helpers.rehearsal.devices import Node, is_gpu, refusing, replace
from helpers.rehearsal.tensor import CudaTensor, map_tensors

# What a script reads when it calls torch.multiprocessing.spawn, which would start ranks inside a rank.
NUMBERS = 'int(os.environ["LOCAL_RANK"]) as its rank and int(os.environ["WORLD_SIZE"]) as the number of ranks'
SPAWN = f"mp.spawn starts ranks, and they run already, as with torchrun: call the function itself, with {NUMBERS}"


@dataclass(frozen=True)
class Buckets:
    """The bytes of each of a DDP model's buckets, and the script's line at which the model first ran."""

    line: str
    bytes: list[int]


ORIGINAL_APPLY: Any = nn.Module._apply
ORIGINAL_BACKWARD: Any = torch.autograd._engine_run_backward
ORIGINAL_DDP_FORWARD: Any = DistributedDataParallel.forward
ORIGINAL_DDP_INIT: Any = DistributedDataParallel.__init__
ORIGINAL_GROUPING: Any = torch._C._group_tensors_by_device_and_dtype
DDP_GROUPS: list[Any] = []  # the simulated NCCL of each DDP model
BUCKETS: dict[nn.Module, Buckets] = {}  # of each DDP model, for the report


def patch() -> None:
    """Replace those functions around DDP, DTensor and modules that lead into torch's C++."""
    patch_ddp()
    patch_dtensor()
    replace(nn.Module, _apply=apply)
    replace(torch._C, _group_tensors_by_device_and_dtype=group_tensors)
    # The module torch.multiprocessing.spawn is hidden by the function of this name, so it is taken from sys.modules.
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        replace(owner, spawn=refusing(SPAWN), start_processes=refusing(SPAWN))


def patch_ddp() -> None:
    """Let DDP work with simulated tensors, count its all-reduces, and say who did not come to them.

    DDP averages gradients in C++, during the backward pass. So its constructor, its forward pass and the function that
    starts every backward pass are replaced.
    """
    replace(DistributedDataParallel, __init__=init_ddp, forward=forward_of_ddp)
    replace(torch.autograd, _engine_run_backward=run_backward)
    for name in ("buffer", "gradients"):  # methods by which a comm hook gets a bucket's tensors
        replace(dist.GradBucket, **{name: of_this_gpu(getattr(dist.GradBucket, name))})


def init_ddp(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of DDP's constructor. It also keeps the model's group for ``run_backward``.

    DDP's C++ makes its buckets on the CPU. If the gradients were views of the buckets, they would be CPU tensors, so
    they are not, whatever the script asks for.
    """
    kwargs["gradient_as_bucket_view"] = False
    ORIGINAL_DDP_INIT(self, module, *args, **kwargs)
    simulated_nccl = nccl.nccl_of(self.process_group)
    if simulated_nccl is not None and simulated_nccl not in DDP_GROUPS:
        DDP_GROUPS.append(simulated_nccl)


def forward_of_ddp(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of DDP's forward pass, at which the ranks compare what DDP will do in C++."""
    simulated_nccl = nccl.nccl_of(self.process_group)
    if simulated_nccl is None:  # DDP over gloo alone: nothing is simulated
        return ORIGINAL_DDP_FORWARD(self, *args, **kwargs)
    # In DDP's join a rank without inputs takes part as well, in C++, where it cannot announce its calls.
    is_in_join = self._join_config.enable
    if self.will_sync_module_buffers() and not is_in_join:
        simulated_nccl.announce("DDP's broadcast of buffers")
    with explained([simulated_nccl]):
        output = ORIGINAL_DDP_FORWARD(self, *args, **kwargs)
    averages_gradients = torch.is_grad_enabled() and self.require_backward_grad_sync
    if averages_gradients:
        count_reduction(self, simulated_nccl, output)
    return output


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """In the place of the function with which torch starts a backward pass.

    A backward pass does not say through which models it goes. So if it loses a peer, all groups of DDP models are asked
    which ranks did not come.
    """
    with explained(DDP_GROUPS):
        return ORIGINAL_BACKWARD(*args, **kwargs)


@contextlib.contextmanager
def explained(groups: list[Any]) -> Iterator[None]:
    """A context for calls of DDP. If its C++ loses a peer there, the error says which ranks of a group did not come.

    ``groups`` are the simulated NCCLs that may have lost the peer. Any other error is raised as it is.
    """
    try:
        yield
    except RuntimeError as error:
        for group in groups:
            explanation = group.explain(error)  # the error itself, if the group has none
            if explanation is not error:
                raise explanation from None
        raise


def patch_dtensor() -> None:
    """Replace those parts of DTensor that would not work with simulated tensors as its local parts.

    A simulated tensor is a CPU tensor that says it is on a GPU. Each comment below says what torch does, and why that
    does not work here.
    """
    # torch makes a DTensor by this C++ function, on the device of the local part. It says "cuda", and a build of
    # PyTorch for CPUs cannot make a tensor there. So C++ gets a DTensor on the CPU.
    original_make_wrapper: Any = torch.Tensor._make_wrapper_subclass

    def make_wrapper_on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if is_gpu(device):
            device = "cpu"
        return original_make_wrapper(*args, device=device, **kwargs)

    replace(torch.Tensor, _make_wrapper_subclass=staticmethod(make_wrapper_on_cpu))

    # The script would now read "cpu" as the DTensor's device. It should read the simulated GPU, as it does of the local
    # part.
    replace(DTensor, device=property(lambda self: self._local_tensor.device))
    replace(DTensor, is_cuda=property(lambda self: self._local_tensor.is_cuda))

    # torch reads and sets the state of the GPU's random number generator, of which there is none. So the CPU's is used.
    replace(OffsetBasedRNGTracker, _distribute_region=own_random_numbers)

    # To find the shape of an operator's result, torch runs the operator on fake tensors on the mesh's device, which
    # would be a GPU. Here the fake tensors are on the CPU.
    op_schema = sys.modules["torch.distributed.tensor._op_schema"]
    replace(op_schema, _rebuild_tensor_from_dtensor_meta=fake_tensor)

    # On a CPU, attention calls other fused operators than on a GPU, and DTensor does not know how to divide them. The
    # forward takes 3 tensors (query, key, value) and returns 2. The backward takes 6 and returns the 3 gradients.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    allow_sharding(getattr(torch.ops.aten, attention), results=2, tensors=3)
    allow_sharding(getattr(torch.ops.aten, f"{attention}_backward"), results=3, tensors=6)


def fake_tensor(spec: Any) -> torch.Tensor:
    """Make a tensor with the shape and type of a DTensor, for torch to find out the shape of an operator's result.

    ``spec`` is the DTensor's. torch's own function makes such a tensor on the mesh's device, a GPU. An operator such as
    ``normal_`` would then ask for CUDA, which a build for CPUs does not have. So it is made on the CPU here.
    """
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")


def allow_sharding(operator: Any, results: int, tensors: int) -> None:
    """Tell DTensor that an operator of the CPU's fused attention can be split by sequences or by heads.

    DTensor knows this of the GPU's operators only. ``results`` is how many tensors the operator returns, and
    ``tensors`` how many it takes. All of them are split in the same way. In each, dimension 0 is that of the sequences,
    and dimension 1 that of the heads.
    """
    other_arguments = [None, None]  # dropout's probability, and whether the attention is causal
    shardings = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        placements_of_results = [placement] * results
        placements_of_tensors = [placement] * tensors
        shardings.append((placements_of_results, placements_of_tensors + other_arguments))
    register_sharding(operator.default)(lambda *args, **kwargs: shardings)


def of_this_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that returns CPU tensors of DDP's C++. The wrapper returns simulated tensors with their memory."""

    def on_current_gpu(tensor: torch.Tensor) -> torch.Tensor:
        return CudaTensor(tensor, Node.current)

    def call(self: Any) -> Any:
        return map_tensors(original(self), on_current_gpu)

    return call


def count_reduction(model: Any, group: Any, output: Any) -> None:
    """Count the all-reduces of a DDP model's gradients, and let the ranks compare whether all of them start these.

    DDP's C++ starts the all-reduces in backward, where Python does not see them. So they are counted here, at the line
    of the script that runs the model, which has just returned ``output``. During backward a hook announces them to the
    other ranks of the ``group``, the model's simulated NCCL.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    events.collective("allreduce by DDP, in backward", parameters)
    note_buckets(model)
    outputs_with_graph = []
    for leaf in tree_leaves(output):  # the tensors and other values in the output, which may be a list or a dict
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            outputs_with_graph.append(leaf)
    # In DDP's join a rank without inputs takes part as well, in C++, where it cannot announce its call.
    is_in_join = model._join_config.enable
    if outputs_with_graph and not is_in_join:
        gradients = sum(parameter.numel() for parameter in parameters)
        # One output is enough to notice that backward has come to the model. Autograd comes to the newest one first.
        newest_output = outputs_with_graph[-1]
        newest_output.register_hook(lambda grad: group.announce(f"DDP's all_reduce of {gradients} gradients"))


def note_buckets(model: Any) -> None:
    """Note the sizes of a DDP model's buckets for the report, with the line at which the model ran first.

    A bucket has the gradients that one all-reduce averages. The sizes are noted at each run, because DDP forms its
    buckets anew after the first backward pass.
    """
    data = model._get_ddp_logging_data()
    # Text such as "1024, 2048", in bytes. It is empty, or not there, if DDP has no such buckets.
    sizes_as_text = data.get("rebuilt_bucket_sizes")
    if not sizes_as_text:
        sizes_as_text = data.get("bucket_sizes", "")
    sizes = [int(size) for size in str(sizes_as_text).split(",") if size.strip()]
    line = script_line()
    if model in BUCKETS:
        line = BUCKETS[model].line
    BUCKETS[model] = Buckets(line, sizes)


def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of Module._apply, with which a module moves to a device. First it detaches computed attributes.

    torch's older weight_norm computes the weight in each forward pass, and keeps it as an attribute of the module. The
    weight's graph refers to the parameters from which it was computed. A parameter moves by ``set_values``, which fails
    while anything else refers to the parameter.
    """
    # The list holds names, because a variable that held a tensor would refer to it as well.
    computed = [name for name, value in vars(self).items() if isinstance(value, torch.Tensor) and value.grad_fn]
    for name in computed:
        vars(self)[name] = vars(self)[name].detach()
    return ORIGINAL_APPLY(self, *args, **kwargs)


def group_tensors(tensors: Any, with_indices: bool) -> dict[Any, Any]:
    """In the place of torch's C++ function that groups tensors by device and dtype, for optimizers and for clipping.

    ``tensors`` are lists of the same length: parameters, their gradients and so on. The result is {(device, dtype):
    (for each list the tensors of the group, the places of these in the list)}. C++ takes every simulated tensor for one
    on the CPU, so this puts the tensors' own device into the key.
    """
    groups = {}
    for (device_in_cpp, dtype), (lists, indices) in ORIGINAL_GROUPING(tensors, with_indices).items():
        device = device_in_cpp
        # torch groups by the tensors of the first list, in which a gradient may be None.
        first_list = lists[0]
        present_tensors = [tensor for tensor in first_list if tensor is not None]
        if present_tensors:
            device = present_tensors[0].device
        groups[device, dtype] = (lists, indices)
    return groups


@contextlib.contextmanager
def own_random_numbers(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """In the place of a context of torch, in which random numbers for this rank's part of a DTensor are drawn.

    Different shards get different numbers, and replicas of a shard get equal ones, as on GPUs. A GPU's generator can
    begin at any offset of its sequence, and torch computes the offset of each shard. The CPU's generator cannot, so it
    gets a seed that is made of the offset. ``self`` is torch's tracker of offsets, and ``spec`` says how the DTensor is
    divided.
    """
    if generator is not None or not self.distribute_region_enabled:
        yield
        return
    # torch 2.11 has no functions that return these offsets, only methods that add them to a generator's state.
    state = SimpleNamespace(offset=0)
    self._set_pre_op_offset(state, spec)
    offset_of_shard = state.offset  # where this rank's numbers begin
    self._set_post_op_offset(state, spec, 0)
    numbers_drawn = state.offset  # how many the ranks draw together
    seed_of_shard = hash((Node.random_seed, Node.random_offset + offset_of_shard)) % 2**63
    with torch.random.fork_rng(devices=[]):  # Afterwards the CPU's generator is as before.
        torch.default_generator.manual_seed(seed_of_shard)
        yield
    Node.random_offset += numbers_drawn
