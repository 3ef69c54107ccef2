"""A tensor that says it is on ``cuda:k`` and holds a CPU tensor. It raises errors where a tensor on a GPU would.

It is a wrapper subclass. torch's C++ takes it for a CPU tensor, so a CPU build runs it; Python code sees a CUDA tensor.
"""

import sys

import torch

from helpers.rehearsal.counts import COLLECTIVE, COPY, COUNTS, UPLOAD, WAIT

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
PLAIN_TENSOR = (torch.Tensor, torch.nn.Parameter)
# The shapes of their results depend on values, so the host has to wait for the GPU.
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class State:
    """How many GPUs this node pretends to have, and which one is the current GPU."""

    gpus = 1
    current = 0


class CudaTensor(torch.Tensor):
    """A tensor on a pretended GPU: ``inner`` is the CPU tensor with its values, ``index`` the GPU's number."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, index):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="cpu",
        )
        tensor.inner = inner.detach() if inner.requires_grad else inner
        tensor.index = index
        return tensor

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @property
    def data(self):
        return CudaTensor(self.inner, self.index)

    @data.setter
    def data(self, value):
        if not isinstance(value, CudaTensor):
            raise COUNTS.refuse(TypeError("incompatible tensor type: .data of a CUDA tensor was given a CPU tensor"))
        torch.Tensor.data.__set__(self, value)
        self.inner, self.index = value.inner, value.index

    @property
    def grad(self):
        # Where a parameter has no gradient, DDP's C++ makes one, on the CPU. It is wrapped when it is read.
        grad = torch.Tensor.grad.__get__(self)
        if type(grad) is torch.Tensor:
            grad = CudaTensor(grad, self.index)
            torch.Tensor.grad.__set__(self, grad)
        return grad

    @grad.setter
    def grad(self, value):
        if value is not None and not value.is_cuda:
            message = f"assigned grad has data located on a different device: {self.device} and {value.device}"
            raise COUNTS.refuse(RuntimeError(message))
        torch.Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self):
        torch.Tensor.grad.__delete__(self)

    def get_device(self):
        return self.index

    def data_ptr(self):
        return self.inner.data_ptr()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def type(self, dtype=None, non_blocking=False):
        if dtype is None:
            return "torch.cuda." + self.inner.type().removeprefix("torch.")
        return super().type(dtype, non_blocking)

    def record_stream(self, stream):
        pass

    def is_pinned(self, device=None):
        return False

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise COUNTS.refuse(
            TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        )

    def __array__(self, dtype=None):
        return self.numpy()

    def tolist(self):
        COUNTS.add(WAIT, "tolist")
        return self.inner.tolist()

    def __format__(self, spec):
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents=None):
        COUNTS.add(WAIT, "print")
        return f"{repr(self.inner)[:-1]}, device='{self.device}')"

    def __deepcopy__(self, memo):
        copy = CudaTensor(self.inner.clone(), self.index)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        elif self.requires_grad:
            copy.requires_grad_()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        COUNTS.add(WAIT, "pickle")
        parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (self.inner.detach().clone(), self.index, self.requires_grad, parameter)

    def __tensor_flatten__(self):
        return ["inner"], self.index

    @staticmethod
    def __tensor_unflatten__(inner, index, size, stride):
        return CudaTensor(inner["inner"], index)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = list(tensors_in((*args, *kwargs.values())))
        cudas = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        index = check_devices(func, args, kwargs, tensors, cudas)
        count_waits(func, args, kwargs, tensors)
        out = func(*strip(args), **{name: strip(value) for name, value in kwargs.items()})
        if torch.Tag.inplace_view in func.tags:
            with torch.utils._mode_utils.no_dispatch():  # only .data can change a wrapper's shape
                torch.Tensor.data.__set__(args[0], CudaTensor(args[0].inner, args[0].index))
            return args[0]
        # In-place and out= variants return one of their arguments, so its wrapper has to come back.
        known = {id(tensor.inner): tensor for tensor in cudas} | {
            id(tensor): tensor for tensor in tensors if not isinstance(tensor, CudaTensor)
        }
        return dress(out, index, known)


torch.serialization.add_safe_globals([CudaTensor])


def rebuild(inner, index, requires_grad=False, parameter=False):
    """Unpickle a CUDA tensor, on the GPU that it came from, or where the ``map_location`` of torch.load says."""
    place = LOADING[-1] if LOADING else None
    if place is None:
        tensor = CudaTensor(inner, check_gpu(index))
    else:
        tensor = CudaTensor(inner, gpu_of(place)) if is_gpu(place) else inner
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


GPU_GENERATORS = {}  # {address: generator on a GPU}: torch's C++ hands out a new Python object each time
LOADING = []  # the map_location of each torch.load that is running
torch.serialization.add_safe_globals([rebuild])


def tensors_in(values):
    """Yields the tensors among an operator's arguments, also those in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def strip(value):
    """An operator's argument with CPU tensors in place of pretended ones."""
    if isinstance(value, CudaTensor):
        return value.inner
    if isinstance(value, (list, tuple)):
        return type(value)(map(strip, value)) if not hasattr(value, "_fields") else type(value)(*map(strip, value))
    return value


def dress(value, index, known):
    """An operator's results on the pretended GPU. ``known`` is {id of an argument's tensor: that argument}."""
    if isinstance(value, torch.Tensor):
        return known.get(id(value)) if id(value) in known else CudaTensor(value, index)
    if isinstance(value, (list, tuple)):
        values = [dress(item, index, known) for item in value]
        return type(value)(values) if not hasattr(value, "_fields") else type(value)(*values)
    return value


def from_torch_itself():
    """Whether C++ calls the operator: autograd's engine or DDP's reducer. The tensors that they make are the CPU's."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame and (
        frame.f_code.co_name == "_engine_run_backward"
        or frame.f_code.co_filename.endswith(("nn/parallel/distributed.py", "torch/distributed/utils.py"))
    )


def check_devices(func, args, kwargs, tensors, cudas):
    """The number of the GPU that gets the result. Raises torch's RuntimeError for arguments on different devices."""
    index = cudas[0].index
    device = kwargs.pop("device", None)
    if device is not None and torch.device(device).type == "cuda":
        index = gpu_of(device)
    generator = kwargs.get("generator")
    if generator is not None and generator._cdata not in GPU_GENERATORS:
        raise COUNTS.refuse(RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'"))
    if func in COPIES or func.namespace in ("c10d", "_c10d_functional"):
        return index
    others = {tensor.index for tensor in cudas} - {cudas[0].index}
    if func in INDEXING and isinstance(args[0], CudaTensor):  # torch uploads indices from the CPU
        plain = [tensor for tensor in tensors_in(args[2:]) if not isinstance(tensor, CudaTensor)]
        if any(not isinstance(tensor, CudaTensor) for tensor in tensors_in(args[1])):
            COUNTS.add(UPLOAD, "index")
    else:
        plain = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
    plain = [tensor for tensor in plain if tensor.dim() > 0 and tensor.numel() > 0]
    if not others and not plain or from_torch_itself():
        return index
    places = sorted({str(tensor.device) for tensor in [*cudas, *plain]})
    raise COUNTS.refuse(
        RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(places)}! (when checking arguments of {func})"
        )
    )


def count_waits(func, args, kwargs, tensors):
    """Count an operator at which the host waits for the GPU, a copy between the two, or a collective."""
    if func.namespace in ("c10d", "_c10d_functional"):
        name = func.__name__.partition(".")[0]
        if name not in ("wait_tensor", "_wrap_tensor_autograd"):
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors_in(args[:1])]
            COUNTS.add(COLLECTIVE, f"{name.rstrip('_')} (C++)", sum(sizes))
    elif func is aten.copy_.default:
        target, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(target, CudaTensor) != isinstance(source, CudaTensor) and not from_torch_itself():
            count_copy(source, isinstance(target, CudaTensor), blocking)
    elif not WAITING.isdisjoint(func.tags) and func.namespace == "aten":
        if func is aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1])):
            return
        if func in (aten.repeat_interleave.Tensor,) and kwargs.get("output_size") is not None:
            return
        names = {"_local_scalar_dense": "item", "index": "mask"}
        name = func.__name__.partition(".")[0]
        COUNTS.add(WAIT, names.get(name, name))


def count_copy(source, upload, blocking):
    """Count a copy between host and GPU. Without pinned memory the host waits for a copy to the GPU."""
    size = source.numel() * source.element_size()
    if upload:
        blocking = blocking or not is_pinned(source)
        COUNTS.add(UPLOAD if blocking else COPY, "to the GPU", size)
    else:
        COUNTS.add(WAIT if blocking else COPY, "to the CPU", size)


def is_pinned(tensor):
    """Whether the rehearsal has marked a CPU tensor, or the tensor of which it is a view, as pinned."""
    return any(getattr(part, "pinned_here", False) for part in (tensor, tensor._base))


def is_gpu(device):
    """Whether a device argument means a GPU."""
    if isinstance(device, bool) or device is None or isinstance(device, torch.Tensor):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def gpu_of(device):
    """The number of the GPU that a device argument means. Raises RuntimeError where the node has no such GPU."""
    index = device if isinstance(device, int) else torch.device(device).index
    return State.current if index is None else check_gpu(index)


def check_gpu(index):
    if not 0 <= index < State.gpus:
        raise COUNTS.refuse(
            RuntimeError(f"CUDA error: invalid device ordinal (cuda:{index}; this node has {State.gpus} GPUs)")
        )
    return index


class ToGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, index):
        ctx.source = tensor.index if isinstance(tensor, CudaTensor) else None
        return CudaTensor(strip(tensor).detach().clone(), index)

    @staticmethod
    def backward(ctx, grad):
        if ctx.source is not None:
            return CudaTensor(strip(grad), ctx.source), None
        return strip(grad), None


class ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        ctx.source = tensor.index
        return tensor.inner.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        return CudaTensor(strip(grad), ctx.source)


def move(tensor, device, non_blocking=False):
    """The tensor on a device. A copy is counted; a tensor that is there already is returned itself."""
    if is_gpu(device):
        index = gpu_of(device)
        if isinstance(tensor, CudaTensor):
            if tensor.index == index:
                return tensor
            COUNTS.add(COPY, "between GPUs", tensor.numel() * tensor.element_size())
        else:
            count_copy(tensor, True, not non_blocking)
        return ToGpu.apply(tensor, index)
    if isinstance(tensor, CudaTensor):
        count_copy(tensor, False, not non_blocking)
        return ToCpu.apply(tensor)
    return tensor
