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
from helpers.rehearsal.devices import Generator, Node, bytes_of, gpu_error, gpu_of, is_gpu, is_pinned

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Tags of operators whose result's shape depends on values, so that the host has to wait for the GPU.
VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators
REPORTED_NAMES = {"_local_scalar_dense": "item", "index": "mask"}  # what the report calls an operator

MAP_LOCATIONS: list[Device] = []  # the device to load to, of each torch.load that is running; the innermost is last
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
Base: Any = torch.Tensor  # without its types: they leave no room for another device, and say nothing of descriptors


class CudaTensor(Base):
    """A tensor on a simulated GPU: ``inner`` is the CPU tensor with its values, ``index`` the GPU's number.

    To a script it says that it is on cuda:index, and torch's C++ takes it for a tensor of the CPU. ``index`` is None
    for a parameter that has moved to the host.
    """

    # Functions of torch run as they are. The operators that they call are caught below, in __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl

    inner: torch.Tensor
    index: int | None
    check_collective: Callable[[Any, Any], None]  # of an operator and its arguments; ``nccl`` sets it

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, index: int | None) -> "CudaTensor":
        """Put a wrapper for GPU ``index`` around a CPU tensor, with the same shape, strides and type."""
        if isinstance(inner, AsyncCollectiveTensor):
            inner = inner.wait()  # torch's own waits look for this class, and would not see it in a wrapper
        # This makes a tensor that has a shape and a type, but no memory with values. The values are those of ``inner``.
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
            inner = inner.detach()  # autograd follows the wrappers, and must not follow the tensors inside as well
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
        """Tensor.grad. Where a parameter has no gradient, DDP's C++ makes one on the CPU, which is wrapped here."""
        grad = Base.grad.__get__(self)
        if type(grad) is torch.Tensor and self.index is not None:  # not isinstance: a CudaTensor needs no wrapper
            grad = CudaTensor(grad, self.index)
            Base.grad.__set__(self, grad)
        return grad

    def set_grad(self, grad: torch.Tensor | None) -> None:
        """``tensor.grad = grad``. Raises torch's error for a gradient that is on another device."""
        if grad is not None and grad.is_cuda != self.is_cuda:
            message = f"assigned grad has data located on a different device: {self.device} and {grad.device}"
            raise gpu_error(message)
        Base.grad.__set__(self, grad)

    grad = property(get_grad, set_grad, Base.grad.__delete__)

    def get_device(self) -> int:
        """Tensor.get_device: the GPU's number, or -1 on the host."""
        if self.index is None:
            return -1
        return self.index

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Tensor.record_stream, which tells CUDA's allocator who still reads the memory. Here is no such allocator."""

    def new(self, *args: Any, device: Device = None, **kwargs: Any) -> torch.Tensor:
        """Tensor.new, which old programs call: a tensor of this type, of these sizes or values, on this device."""
        if device is not None and is_gpu(device) != self.is_cuda:
            raise gpu_error(f"legacy constructor expects device type: {self.device.type} but {device} was passed")
        values = self.inner.new(*unwrap(args), **kwargs)
        return on_gpu_or_host(values, self.index)

    def numpy(self, *, force: bool = False) -> Any:
        """Tensor.numpy. Raises torch's TypeError for a tensor on a GPU, unless ``force`` asks to copy it first."""
        if self.index is None:
            return self.inner.numpy(force=force)
        if force:
            return self.detach().cpu().numpy()
        message = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise gpu_error(f"can't convert {self.device} device type tensor to numpy. {message}", TypeError)

    def tolist(self) -> Any:
        """Tensor.tolist: the values as numbers in lists, for which the host waits for the GPU."""
        if self.index is not None:
            COUNTS.count(WAIT, "tolist")
        return self.inner.tolist()

    def __format__(self, spec: str) -> str:
        """What f"{loss:.3f}" calls. As with torch, only a tensor of one number and no dimension is formatted as one."""
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The CPU tensor's text with the device in it, such as "tensor([1.], device='cuda:0')"."""
        if self.index is None:
            return repr(self.inner)
        COUNTS.count(WAIT, "print")
        text_without_parenthesis = repr(self.inner)[:-1]
        return f"{text_without_parenthesis}, device='{self.device}')"

    def state(self) -> tuple[Any, ...]:
        """The arguments with which ``rebuild`` makes a copy of this tensor."""
        return self.inner.detach().clone(), self.index, self.requires_grad, isinstance(self, torch.nn.Parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """What copy.deepcopy calls. ``memo`` has the copies that it has made so far, by the originals' ids."""
        return memo.setdefault(id(self), rebuild(*self.state()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """What pickle and torch.save call: a function and its arguments, which make the tensor when it is loaded."""
        if self.index is not None:
            COUNTS.count(WAIT, "pickle")
        return rebuild, self.state()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator on the CPU tensors inside, and return its results as tensors on the GPU.

        torch calls this for each operator ``func`` that gets a simulated tensor, such as aten.add.Tensor. Before it
        runs, errors are raised that CUDA would raise, and waits and copies are counted.
        """
        kwargs = dict(kwargs or {})
        tensors = tensors_in((*args, *kwargs.values()))
        simulated = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        device_of_result = kwargs.pop("device", None)  # an argument of operators such as empty_like
        index = gpu_of_results(device_of_result, simulated)
        if index is not None:
            check_process()
            check_generator(kwargs.get("generator"))
            check_devices(func, args, tensors)
            count_waits(func, args, kwargs)
        if func.namespace in COLLECTIVES:
            cls.check_collective(func, args)
        results = func(*unwrap(args), **unwrap(kwargs))

        may_change_its_arguments = func._schema.is_mutable
        if may_change_its_arguments:
            for tensor in simulated:
                follow_shape(tensor)
        # In-place operators and those with out= return one of their arguments. The script then gets the tensor that it
        # has given, and no new wrapper. These tensors are found by the ids of the CPU tensors in them.
        given_tensors = {id(cpu_tensor(tensor)): tensor for tensor in tensors}

        def wrap(result: torch.Tensor) -> torch.Tensor:
            """A result of the operator, which is a CPU tensor, as the script is to get it."""
            if id(result) in given_tensors:
                return given_tensors[id(result)]
            return on_gpu_or_host(result, index)

        return map_tensors(results, wrap)


def follow_shape(tensor: CudaTensor) -> None:
    """Give a wrapper the shape of the tensor inside, which an operator such as resize_ may have changed in place."""
    if (tensor.size(), tensor.stride()) != (tensor.inner.size(), tensor.inner.stride()):
        with torch.utils._mode_utils.no_dispatch():  # only .data can change a wrapper's shape
            tensor.data = CudaTensor(tensor.inner, tensor.index)


def gpu_of_results(device: Device, simulated: list[CudaTensor]) -> int | None:
    """The number of the GPU on which an operator's results are, or None for the host.

    ``device`` is the operator's argument of this name, or None. Without it, it is the GPU of the first of the
    ``simulated`` tensors that is on one. They may all be parameters that have moved to the host.
    """
    if is_gpu(device):
        return gpu_of(device)
    for tensor in simulated:
        if tensor.index is not None:
            return tensor.index
    return None


def rebuild(
    inner: torch.Tensor, index: int | None, requires_grad: bool = False, parameter: bool = False
) -> torch.Tensor:
    """Make a simulated tensor of what ``CudaTensor.state`` has taken of one: copy.deepcopy and pickles call this.

    ``inner`` has the values. The tensor comes to GPU ``index``, or to the host for None. But if a torch.load runs which
    names a device (map_location), it comes to that one. ``parameter``: it is to be an nn.Parameter.
    """
    device: Device = "cpu"
    if index is not None:
        device = index
    # One torch.load may run within another. The innermost one reads this tensor, and may have named no device.
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
    """``tensor.data = values`` where one of the two is on a simulated GPU and the other is on the CPU.

    Module.to moves a parameter like this. Whoever refers to the parameter, such as an optimizer, has to find it moved,
    so the tensor stays the same object. But a tensor on a simulated GPU has another class. ``turn_into`` changes the
    class, unless torch's C++ refers to the tensor, as DDP's does. Then a simulated tensor stays one, without a GPU.
    """
    grad = tensor.grad
    tensor.grad = None  # A gradient must be where its tensor is, so it comes back below, on the new device.
    if isinstance(tensor, CudaTensor) and has_references_in_cpp(tensor):
        set_inner(tensor, values)
    else:
        turn_into(tensor, values)
    if grad is not None:
        tensor.grad = on_gpu_or_host(cpu_tensor(grad), index_of(values))


def turn_into(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor the values of another one and its class, so that whoever refers to the tensor finds it changed.

    torch's own setter of ``data`` cannot change a class. swap_tensors can: it exchanges all that two tensors are and
    have. So the replacement must have the new values, but be a parameter and require a gradient as the tensor does.
    """
    replacement = values.detach()
    if isinstance(tensor, torch.nn.Parameter):
        replacement = torch.nn.Parameter(replacement, requires_grad=False)
    replacement.requires_grad_(tensor.requires_grad)
    torch.utils.swap_tensors(tensor, replacement)


def has_references_in_cpp(tensor: torch.Tensor) -> bool:
    """Whether C++ code holds further references to a tensor, so that torch.utils.swap_tensors would refuse it.

    swap_tensors allows two references: that of the Python object, and that of the tensor's AccumulateGrad node, the
    node of autograd's graph that accumulates its gradient.
    """
    allowed = 1  # the Python object
    edge = None
    if tensor.is_leaf and tensor.requires_grad:
        # This makes the node if there is none yet, and ``edge`` keeps it alive, so that it is always counted.
        edge = torch.autograd.graph.get_gradient_edge(tensor)
        allowed = 2  # the Python object and the AccumulateGrad node
    references = tensor._use_count()  # type: ignore[attr-defined, unused-ignore]
    del edge
    return references > allowed


def set_inner(tensor: CudaTensor, values: torch.Tensor) -> None:
    """Give a wrapper other values, with their shape and type, on the GPU that they are on, or on the host."""
    wrapper = CudaTensor(cpu_tensor(values), index_of(values))
    SET_DATA(tensor, wrapper)  # this takes over shape and type for C++, but no attributes of Python
    tensor.inner = wrapper.inner
    tensor.index = wrapper.index


def index_of(tensor: torch.Tensor) -> int | None:
    """The number of a tensor's GPU, or None for a tensor on the host."""
    if isinstance(tensor, CudaTensor):
        return tensor.index
    return None


def on_gpu_or_host(inner: torch.Tensor, index: int | None) -> torch.Tensor:
    """A CPU tensor as one on the simulated GPU ``index``, or as it is for None, which stands for the host."""
    if index is None:
        return inner
    return CudaTensor(inner, index)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, also those in lists, tuples and dicts."""
    tensors: list[Any] = []
    map_tensors([*values], tensors.append)  # for its walk alone: what it returns is not used
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
    """The CPU tensor inside a simulated one, or the tensor itself."""
    if isinstance(tensor, CudaTensor):
        return tensor.inner
    return tensor


def unwrap(value: Any) -> Any:
    """An operator's argument with CPU tensors in place of simulated ones."""
    return map_tensors(value, cpu_tensor)


def on_host(values: Iterable[Any]) -> list[torch.Tensor]:
    """The CPU's tensors among an operator's arguments."""
    return [tensor for tensor in tensors_in(values) if index_of(tensor) is None]


def called_by_torch_itself() -> bool:
    """Whether torch's C++ calls the running operator, and not a line of the script: autograd's engine or DDP's reducer.

    They make tensors on the CPU for simulated ones, where a GPU would have them on the GPU, so nothing is checked or
    counted there. C++ has no frames in Python. So it is the caller if the innermost Python function outside of this
    file is the one that starts the engine, or one of DDP. An operator in a hook has the hook's function.
    """
    caller = frame_outside(__file__)
    if caller is None:
        return False
    starts_engine = caller.f_code.co_name == "_engine_run_backward"
    is_of_ddp = caller.f_code.co_filename.endswith(("nn/parallel/distributed.py", "torch/distributed/utils.py"))
    return starts_engine or is_of_ddp


def check_process() -> None:
    """Raise CUDA's error in a process that was forked from one that had used a GPU, such as a DataLoader's worker."""
    if Node.in_bad_fork:
        raise gpu_error("CUDA error: initialization error (a forked process uses the GPU of its parent)")


def check_generator(generator: Any) -> None:
    """Raise torch's RuntimeError where a tensor on a GPU would get its random numbers from a CPU generator.

    ``generator`` is the operator's argument of this name, or None. Its address in C++ says which one it is.
    """
    if generator is not None and generator._cdata not in Generator.on_gpus:
        raise gpu_error("Expected a 'cuda' device type for generator but found 'cpu'")


def check_devices(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise torch's RuntimeError if an operator gets ``tensors`` that are on different devices.

    ``tensors`` are all tensors among the arguments of the operator ``func``; ``args`` are its arguments without
    keywords. Indices on the CPU are allowed, as in x[rows]. torch uploads them, and the upload is counted.
    """
    if func in COPIES:
        return  # A copy may go from one device to another.
    if func.namespace in COLLECTIVES:
        return  # ``nccl`` checks the tensors of collectives.
    devices_of_simulated = {str(tensor.device) for tensor in tensors if index_of(tensor) is not None}
    devices = devices_of_simulated | devices_on_host(func, args, tensors)
    if len(devices) > 1 and not called_by_torch_itself():
        message = "Expected all tensors to be on the same device, but found at least two devices"
        raise gpu_error(f"{message}, {' and '.join(sorted(devices))}! (when checking arguments of {func})")


def devices_on_host(func: Any, args: Any, tensors: list[torch.Tensor]) -> set[str]:
    """{"cpu"} if an operator gets a CPU tensor that must not be beside tensors on a GPU, or else the empty set.

    The arguments are those of ``check_devices``. The indices of x[indices] may be on the CPU: their upload is counted.
    """
    cpu_tensors = on_host(tensors)
    indexes_gpu_tensor = func in INDEXING and index_of(args[0]) is not None  # args[0] is x
    if indexes_gpu_tensor:
        _, indices, *values = args  # x[indices], or x[indices] = values
        if on_host([indices]):
            COUNTS.count(UPLOAD, "index")
        cpu_tensors = on_host(values)

    devices = set()
    for tensor in cpu_tensors:
        # torch takes a tensor without dimensions for a number, which is allowed beside tensors of any device. An empty
        # one has no values that would have to be read.
        is_number_or_empty = tensor.dim() == 0 or tensor.numel() == 0
        if not is_number_or_empty:
            devices.add(str(tensor.device))
    return devices


def count_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Count an operator at which the host waits for the GPU, or which copies between the two.

    ``func`` is the operator, such as aten.nonzero.default; ``args`` and ``kwargs`` are its arguments.
    """
    if func is aten.copy_.default:  # target.copy_(source, non_blocking)
        target, source, *flags = args
        target_is_on_gpu = index_of(target) is not None
        source_is_on_gpu = index_of(source) is not None
        is_between_host_and_gpu = target_is_on_gpu != source_is_on_gpu
        if is_between_host_and_gpu and not called_by_torch_itself():
            non_blocking = kwargs.get("non_blocking", False)
            if flags:
                non_blocking = flags[0]
            count_copy(source, upload=target_is_on_gpu, non_blocking=non_blocking)
    elif needs_values(func, args, kwargs):
        name = func.__name__.partition(".")[0]  # "nonzero" for nonzero.default
        COUNTS.count(WAIT, REPORTED_NAMES.get(name, name))


def needs_values(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host needs values of the GPU to know the shape of an operator's result, or the result itself.

    ``func`` is the operator, such as aten.nonzero.default. Its tags say whether values decide about its result.
    """
    if VALUES_DECIDE.isdisjoint(func.tags) or func.namespace != "aten":
        return False
    if func is aten.index.Tensor:
        # A mask selects as many elements as it has True. Indices that are numbers select as many as there are numbers.
        _, indices = args
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None  # the caller can say the size
    return True


def count_copy(source: torch.Tensor, upload: bool, non_blocking: bool) -> None:
    """Count a copy between host and GPU, by whether the host waits until it is done.

    To the GPU (``upload``) the host waits, counted as UPLOAD, unless the copy is ``non_blocking`` and the memory of
    ``source`` is pinned. To the CPU it waits, counted as WAIT, unless the copy is ``non_blocking``. A copy for which
    it does not wait is a COPY.
    """
    size = bytes_of(source)
    if upload:
        if not non_blocking:
            COUNTS.count(UPLOAD, "to the GPU", size)
        elif not is_pinned(source):
            COUNTS.count(UPLOAD, NOT_PINNED, size)
        else:
            COUNTS.count(COPY, "to the GPU", size)
    elif non_blocking:
        COUNTS.count(COPY, "to the CPU", size)
    else:
        COUNTS.count(WAIT, "to the CPU", size)
