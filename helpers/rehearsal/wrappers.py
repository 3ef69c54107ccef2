"""DDP, FSDP and optimizers on pretended GPUs: patches for their C++ parts, which see only CPU tensors."""

import functools
import sys

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from helpers.rehearsal import nccl
from helpers.rehearsal.counts import COLLECTIVE, COUNTS, script_line
from helpers.rehearsal.tensor import CudaTensor, gpu_of, is_gpu

BUCKETS = {}  # {id of a DDP model: its line and its buckets' bytes}, for the report


def patch():
    patch_ddp()
    patch_fsdp()
    patch_dtensor()
    patch_grouping()
    register_optimizer_step_post_hook(COUNTS.count_step)


def patch_ddp():
    start, register, forward = (
        DistributedDataParallel.__init__,
        DistributedDataParallel.register_comm_hook,
        DistributedDataParallel.forward,
    )

    def init(self, module, *args, **kwargs):
        # DDP's C++ makes buckets on the CPU. Gradients that are views of the buckets would be CPU tensors.
        kwargs["gradient_as_bucket_view"] = False
        start(self, module, *args, **kwargs)

    def register_comm_hook(self, state, hook):
        # DDP checks a hook's annotations, so the wrapper has to carry them.
        register(self, state, functools.wraps(hook)(trusting(hook)))

    def count_forward(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            count_reduction(self)
        return out

    DistributedDataParallel.__init__ = init
    DistributedDataParallel.register_comm_hook = register_comm_hook
    DistributedDataParallel.forward = count_forward
    then = torch._C.Future.then
    torch._C.Future.then = lambda self, callback: then(self, trusting(callback) if nccl.HOOKS_OF_DDP[0] else callback)


def trusting(function):
    """A comm hook of DDP, or its callback, wrapped: while it runs, NCCL accepts its buckets, which are CPU tensors."""

    def call(*args, **kwargs):
        nccl.HOOKS_OF_DDP[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            nccl.HOOKS_OF_DDP[0] -= 1

    return call


def count_reduction(model):
    """Count, at the line of the forward pass, the all-reduce that DDP's C++ will start in backward."""
    if not nccl.pretended(model.process_group):
        return
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    size = sum(parameter.numel() * parameter.element_size() for parameter in wanted)
    COUNTS.add(COLLECTIVE, "allreduce by DDP, in backward", size)
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    found = BUCKETS.setdefault(id(model), {"line": script_line()})
    found["bytes"] = [int(number) for number in str(sizes).split(",") if number.strip()]


def patch_fsdp():
    def allocate(self, size, *, dtype, device):
        if is_gpu(device):
            return CudaTensor(torch.empty(*size, dtype=dtype), gpu_of(device))
        return torch.empty(*size, dtype=dtype, device=device)

    _fsdp_collectives.DefaultAllocMixin.allocate = allocate


def patch_dtensor():
    """Make a DTensor a CPU tensor for torch's C++, as its local part is, while Python sees the local part's device."""
    from torch.distributed.tensor import DTensor

    wrap = torch.Tensor._make_wrapper_subclass

    def on_cpu(*args, device=None, **kwargs):
        device = "cpu" if device is not None and torch.device(device).type == "cuda" else device
        return wrap(*args, device=device, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(on_cpu)
    DTensor.device = property(lambda self: self._local_tensor.device)
    DTensor.is_cuda = property(lambda self: self._local_tensor.is_cuda)


def patch_grouping():
    """Correct how clipping and optimizers group tensors: their C++ takes all devices for the CPU."""
    original = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def group(tensors, with_indices=False):
        found = {}
        for (device, dtype), (lists, indices) in original(tensors, with_indices).items():
            first = next((tensor for tensor in lists[0] if tensor is not None), None)
            found[device if first is None else first.device, dtype] = (lists, indices)
        return found

    for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad, sys.modules["torch.optim.optimizer"]):
        module._group_tensors_by_device_and_dtype = group
