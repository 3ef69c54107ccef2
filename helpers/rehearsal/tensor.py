"""A tensor that says it is on ``cuda:k`` and holds a CPU tensor. It raises errors where a tensor on a GPU would.

It is a wrapper subclass. torch's C++ takes it for a CPU tensor, so a CPU build runs it; Python code sees a CUDA tensor.

A parameter that moves to the host stays the same object, and seldom it has to stay a wrapper too (``set_values`` says
when). Then its ``index`` is None, and everything here takes it for the tensor on the CPU that it holds.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.types import Device

from helpers.counts import COPY, COUNTS, NOT_PINNED, UPLOAD, WAIT, frame_outside
from helpers.rehearsal.devices import Generator, Node, bytes_of, gpu_of, is_gpu, is_pinned

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Tags of operators whose result's shape depends on values, so that the host has to wait for the GPU.
VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators
REPORTED_NAMES = {"_local_scalar_dense": "item", "index": "mask"}  # what the report calls an operator

MAP_LOCATIONS: list[Device] = []  # of each torch.load that is running
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
Base: Any = torch.Tensor  # without its types: they leave no room for another device, and say nothing of descriptors


class CudaTensor(Base):
    """A tensor on a pretended GPU: ``inner`` is the CPU tensor with its values, ``index`` the GPU's number.

    ``index`` is None for a parameter that has moved to the host.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    inner: torch.Tensor
    index: int | None
    check_collective: Callable[[Any, Any], None]  # of an operator and its arguments; ``nccl`` sets it

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, index: int | None) -> "CudaTensor":
        if isinstance(inner, AsyncCollectiveTensor):
            inner = inner.wait()  # torch's own waits look for this class, and would not see it in a wrapper
        tensor = Base._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="cpu",
        )
        if inner.requires_grad:
            inner = inner.detach()
        tensor.inner = inner
        tensor.index = index
        return tensor

    is_cuda = property(lambda self: self.index is not None)
    is_cpu = property(lambda self: self.index is None)

    @property
    def device(self) -> torch.device:
        if self.index is None:
            return torch.device("cpu")
        return torch.device("cuda", self.index)

    def get_grad(self) -> torch.Tensor | None:
        # Where a parameter has no gradient, DDP's C++ makes one, on the CPU. It is wrapped when it is read.
        grad = Base.grad.__get__(self)
        if type(grad) is torch.Tensor and self.index is not None:
            grad = CudaTensor(grad, self.index)
            Base.grad.__set__(self, grad)
        return grad

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None and grad.is_cuda != self.is_cuda:
            message = f"assigned grad has data located on a different device: {self.device} and {grad.device}"
            raise COUNTS.refuse(message)
        Base.grad.__set__(self, grad)

    grad = property(get_grad, set_grad, Base.grad.__delete__)

    def get_device(self) -> int:
        if self.index is None:
            return -1
        return self.index

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        pass

    def new(self, *args: Any, device: Device = None, **kwargs: Any) -> torch.Tensor:
        """Tensor.new, which old programs call: a tensor of this type, of these sizes or values, on this device."""
        if device is not None and is_gpu(device) != self.is_cuda:
            raise COUNTS.refuse(f"legacy constructor expects device type: {self.device.type} but {device} was passed")
        return on_gpu_or_host(self.inner.new(*unwrap(args), **kwargs), self.index)

    def numpy(self, *, force: bool = False) -> Any:
        if self.index is None:
            return self.inner.numpy(force=force)
        if force:
            return self.detach().cpu().numpy()
        message = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise COUNTS.refuse(f"can't convert {self.device} device type tensor to numpy. {message}", TypeError)

    def tolist(self) -> Any:
        if self.index is not None:
            COUNTS.count(WAIT, "tolist")
        return self.inner.tolist()

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.index is None:
            return repr(self.inner)
        COUNTS.count(WAIT, "print")
        return f"{repr(self.inner)[:-1]}, device='{self.device}')"

    def state(self) -> tuple[Any, ...]:
        """The arguments with which ``rebuild`` makes a copy."""
        return self.inner.detach().clone(), self.index, self.requires_grad, isinstance(self, torch.nn.Parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), rebuild(*self.state()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.index is not None:
            COUNTS.count(WAIT, "pickle")
        return rebuild, self.state()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator on the CPU tensors inside, and return its results as tensors on the GPU.

        torch calls this for each operator that gets a pretended tensor. Before it runs, errors are raised that CUDA
        would raise, and waits and copies are counted.
        """
        kwargs = dict(kwargs or {})
        tensors = tensors_in((*args, *kwargs.values()))
        pretended = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        device = kwargs.pop("device", None)
        indices = [tensor.index for tensor in pretended if tensor.index is not None]
        index = None
        if is_gpu(device):
            index = gpu_of(device)
        elif indices:
            index = indices[0]
        if index is not None:
            check_process()
            check_generator(kwargs.get("generator"))
            check_devices(func, args, tensors)
            count_waits(func, args, kwargs)
        if func.namespace in COLLECTIVES:
            cls.check_collective(func, args)
        out = func(*unwrap(args), **unwrap(kwargs))
        if func._schema.is_mutable:
            for tensor in pretended:
                follow_shape(tensor)
        # In-place and out= variants return one of their arguments: not a new wrapper, but the one that was given.
        given = {id(cpu_tensor(tensor)): tensor for tensor in tensors}

        def wrap(result: torch.Tensor) -> torch.Tensor:
            if id(result) in given:
                return given[id(result)]
            return on_gpu_or_host(result, index)

        return map_tensors(out, wrap)


def follow_shape(tensor: CudaTensor) -> None:
    """Give a wrapper the shape of the tensor inside, which an operator may have changed in place."""
    if (tensor.size(), tensor.stride()) != (tensor.inner.size(), tensor.inner.stride()):
        with torch.utils._mode_utils.no_dispatch():  # only .data can change a wrapper's shape
            tensor.data = CudaTensor(tensor.inner, tensor.index)


def rebuild(
    inner: torch.Tensor, index: int | None, requires_grad: bool = False, parameter: bool = False
) -> torch.Tensor:
    """Copy or unpickle a CUDA tensor, to the GPU that it was on, or to the ``map_location`` of torch.load."""
    device: Device = "cpu"
    if index is not None:
        device = index
    if MAP_LOCATIONS and MAP_LOCATIONS[-1] is not None:
        device = MAP_LOCATIONS[-1]
    tensor = inner
    if is_gpu(device):
        tensor = CudaTensor(inner, gpu_of(device))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([CudaTensor, rebuild])


def set_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor.data = values`` where one of the two is on a pretended GPU and the other is on the CPU.

    torch's own setter cannot change a tensor's class, which is another one on a pretended GPU. swap_tensors can: it
    exchanges all that two tensors are and have, so whoever refers to ``tensor`` then has the replacement. But it fails
    while torch's C++ refers to the tensor too, as DDP's does. Then a pretended tensor stays one, without a GPU.
    """
    grad = tensor.grad
    tensor.grad = None  # the swap would give the gradient away; it comes back below, on the new device
    if isinstance(tensor, CudaTensor) and has_references_in_cpp(tensor):
        set_inner(tensor, values)
    else:
        replacement = values.detach()
        if isinstance(tensor, torch.nn.Parameter):
            # Without this the swap would leave no parameter.
            replacement = torch.nn.Parameter(replacement, requires_grad=False)
        replacement.requires_grad_(tensor.requires_grad)
        torch.utils.swap_tensors(tensor, replacement)
    if grad is not None:
        tensor.grad = on_gpu_or_host(cpu_tensor(grad), index_of(values))


def has_references_in_cpp(tensor: torch.Tensor) -> bool:
    """Whether torch's C++ refers to a tensor, apart from the node of its graph that takes the gradient."""
    references = tensor._use_count()  # type: ignore[attr-defined, unused-ignore]
    if references == 2 and tensor.is_leaf and tensor.requires_grad:
        # If that node is one of the two, it is returned here. Otherwise it is made now, and is a third one.
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        references = tensor._use_count() - 1  # type: ignore[attr-defined, unused-ignore]
        del edge
    return references > 1


def set_inner(tensor: CudaTensor, values: torch.Tensor) -> None:
    """Give a wrapper other values, with their shape and type, on the GPU that they are on, or on the host."""
    wrapper = CudaTensor(cpu_tensor(values), index_of(values))
    SET_DATA(tensor, wrapper)
    tensor.inner = wrapper.inner
    tensor.index = wrapper.index


def index_of(tensor: torch.Tensor) -> int | None:
    """The number of a tensor's GPU, or None for a tensor on the host."""
    if isinstance(tensor, CudaTensor):
        return tensor.index
    return None


def on_gpu_or_host(inner: torch.Tensor, index: int | None) -> torch.Tensor:
    """A CPU tensor as one of GPU ``index``; for None as it is."""
    if index is None:
        return inner
    return CudaTensor(inner, index)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, also those in lists and tuples."""
    tensors: list[Any] = []
    map_tensors([*values], tensors.append)
    return tensors


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of an operator's arguments or result, in which ``change`` has replaced each tensor.

    torch's tree_map does the same, and takes longer than an operator on a small tensor.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(item, change) for item in value])
    if isinstance(value, dict):
        return {name: map_tensors(item, change) for name, item in value.items()}
    return value


def cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor inside a pretended one, or the tensor itself."""
    if isinstance(tensor, CudaTensor):
        return tensor.inner
    return tensor


def unwrap(value: Any) -> Any:
    """An operator's argument with CPU tensors in place of pretended ones."""
    return map_tensors(value, cpu_tensor)


def on_host(values: Iterable[Any]) -> list[torch.Tensor]:
    """The CPU's tensors among an operator's arguments."""
    return [tensor for tensor in tensors_in(values) if index_of(tensor) is None]


def called_by_torch_itself() -> bool:
    """Whether torch's C++ calls the running operator, not a line of the script: autograd's engine or DDP's reducer.

    They make tensors on the CPU for pretended ones, which no GPU would see, so nothing is checked or counted there.
    C++ has no frames in Python. So it is the caller if the innermost Python function, apart from this file's, is the
    one that starts the engine or one of DDP. An operator in a hook has the hook's function.
    """
    frame = frame_outside(__file__)
    if frame is None:
        return False
    starts_engine = frame.f_code.co_name == "_engine_run_backward"
    is_of_ddp = frame.f_code.co_filename.endswith(("nn/parallel/distributed.py", "torch/distributed/utils.py"))
    return starts_engine or is_of_ddp


def check_process() -> None:
    """Raise CUDA's error in a process that was forked from one that had used a GPU, such as a DataLoader's worker."""
    if Node.in_bad_fork:
        raise COUNTS.refuse("CUDA error: initialization error (a forked process uses the GPU of its parent)")


def check_generator(generator: Any) -> None:
    """Raise torch's RuntimeError where a tensor on a GPU would get its random numbers from a CPU generator."""
    if generator is not None and generator._cdata not in Generator.on_gpus:
        raise COUNTS.refuse("Expected a 'cuda' device type for generator but found 'cpu'")


def check_devices(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise torch's RuntimeError where an operator gets ``tensors`` that are on different devices.

    Indices on the CPU are allowed. torch uploads them, and the upload is counted.
    """
    if func in COPIES or func.namespace in COLLECTIVES:
        return
    if func in INDEXING and index_of(args[0]) is not None:
        _, indices, *other_args = args
        if on_host([indices]):
            COUNTS.count(UPLOAD, "index")
        cpu_tensors = on_host(other_args)
    else:
        cpu_tensors = on_host(tensors)
    devices = {str(tensor.device) for tensor in tensors if index_of(tensor) is not None}
    for tensor in cpu_tensors:
        # torch takes a tensor without dimensions for a number, which is allowed beside tensors of any device. An empty
        # one has no values that would have to be read.
        is_number_or_empty = tensor.dim() == 0 or tensor.numel() == 0
        if not is_number_or_empty:
            devices.add(str(tensor.device))
    if len(devices) > 1 and not called_by_torch_itself():
        message = "Expected all tensors to be on the same device, but found at least two devices"
        raise COUNTS.refuse(f"{message}, {' and '.join(sorted(devices))}! (when checking arguments of {func})")


def count_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Count the operator if the host waits for the GPU at it, or if it copies between the two."""
    if func is aten.copy_.default:
        target, source = args[:2]
        to_gpu = index_of(target) is not None
        from_gpu = index_of(source) is not None
        if to_gpu != from_gpu and not called_by_torch_itself():
            non_blocking = kwargs.get("non_blocking", False)
            if len(args) > 2:
                non_blocking = args[2]
            count_copy(source, upload=to_gpu, non_blocking=non_blocking)
    elif needs_values(func, args, kwargs):
        name = func.__name__.partition(".")[0]
        COUNTS.count(WAIT, REPORTED_NAMES.get(name, name))


def needs_values(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host needs values of the GPU to know the shape of an operator's result, or the result itself."""
    if VALUES_DECIDE.isdisjoint(func.tags) or func.namespace != "aten":
        return False
    if func is aten.index.Tensor:
        # A mask selects as many elements as it has True. Indices that are numbers select as many as there are numbers.
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None  # the caller can say the size
    return True


def count_copy(source: torch.Tensor, upload: bool, non_blocking: bool) -> None:
    """Count a copy between host and GPU. Without pinned memory the host waits for a copy to the GPU."""
    size = bytes_of(source)
    if upload and not non_blocking:
        COUNTS.count(UPLOAD, "to the GPU", size)
    elif upload and not is_pinned(source):
        COUNTS.count(UPLOAD, NOT_PINNED, size)
    elif upload:
        COUNTS.count(COPY, "to the GPU", size)
    elif non_blocking:
        COUNTS.count(COPY, "to the CPU", size)
    else:
        COUNTS.count(WAIT, "to the CPU", size)
