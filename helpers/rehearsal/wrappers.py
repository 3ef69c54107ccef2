"""DDP and FSDP over pretended GPUs: what of them is in C++, or takes a tensor apart, is told what it needs."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from helpers.rehearsal import nccl
from helpers.rehearsal.counts import COUNTS
from helpers.rehearsal.tensor import CudaTensor, gpu_of, is_gpu

MODELS = []  # every DDP model, for the report


def patch():
    patch_ddp()
    patch_fsdp()
    patch_dtensor()
    register_optimizer_step_post_hook(COUNTS.count_step)


def patch_ddp():
    start, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def init(self, module, *args, **kwargs):
        # Gradients that are views of DDP's buckets would be the CPU tensors that its C++ makes.
        kwargs["gradient_as_bucket_view"] = False
        start(self, module, *args, **kwargs)
        MODELS.append(self)

    def register_comm_hook(self, state, hook):
        def trusted(state, bucket):
            nccl.HOOKS_OF_DDP[0] += 1
            try:
                return hook(state, bucket)
            finally:
                nccl.HOOKS_OF_DDP[0] -= 1

        trusted.__name__ = getattr(hook, "__name__", "hook")
        trusted.__qualname__ = getattr(hook, "__qualname__", trusted.__name__)
        trusted.__annotations__ = {}
        register(self, state, trusted)

    DistributedDataParallel.__init__ = init
    DistributedDataParallel.register_comm_hook = register_comm_hook


def patch_fsdp():
    def allocate(self, size, *, dtype, device):
        if is_gpu(device):
            return CudaTensor(torch.empty(*size, dtype=dtype), gpu_of(device))
        return torch.empty(*size, dtype=dtype, device=device)

    _fsdp_collectives.DefaultAllocMixin.allocate = allocate


def patch_dtensor():
    """A DTensor is a CPU tensor to torch's C++, as its local part is, and says what its local part says."""
    from torch.distributed.tensor import DTensor

    wrap = torch.Tensor._make_wrapper_subclass

    def on_cpu(*args, device=None, **kwargs):
        device = "cpu" if device is not None and torch.device(device).type == "cuda" else device
        return wrap(*args, device=device, **kwargs)

    torch.Tensor._make_wrapper_subclass = staticmethod(on_cpu)
    DTensor.device = property(lambda self: self._local_tensor.device)
    DTensor.is_cuda = property(lambda self: self._local_tensor.is_cuda)


def buckets():
    """Per DDP model on NCCL: (bytes of each bucket, how many backward passes reduced them), for the report."""
    found = []
    for model in MODELS:
        if dist.is_initialized() and nccl.pretended(model.process_group):
            data = model._get_ddp_logging_data()
            sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
            found.append([int(size) for size in str(sizes).split(",") if size.strip()])
    return found
