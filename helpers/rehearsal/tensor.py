"""A tensor that says it is on ``cuda:k`` and holds a CPU tensor. It raises errors where a tensor on a GPU would.

It is a wrapper subclass. torch's C++ takes it for a CPU tensor, so a CPU build runs it; Python code sees a CUDA tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.types import Device

from helpers.counts import COPY, COUNTS, NOT_PINNED, UPLOAD, WAIT, frame_outside
from helpers.rehearsal.devices import Generator, bytes_of, gpu_of, is_gpu, is_pinned

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# The shapes of their results depend on values, so the host has to wait for the GPU.
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators

LOADING: list[Device] = []  # the map_location of each torch.load that is running
Base: Any = torch.Tensor  # without its types: they leave no room for another device, and say nothing of descriptors


class CudaTensor(Base):
    """A tensor on a pretended GPU: ``inner`` is the CPU tensor with its values, ``index`` the GPU's number."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    inner: torch.Tensor
    index: int
    at_collective: Callable[[Any, Any], None]  # checks and counts an operator, and its arguments

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, index: int) -> "CudaTensor":
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
        tensor.inner = inner.detach() if inner.requires_grad else inner
        tensor.index = index
        return tensor

    device = property(lambda self: torch.device("cuda", self.index))
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_grad(self) -> torch.Tensor | None:
        # Where a parameter has no gradient, DDP's C++ makes one, on the CPU. It is wrapped when it is read.
        grad = Base.grad.__get__(self)
        if type(grad) is torch.Tensor:
            grad = CudaTensor(grad, self.index)
            Base.grad.__set__(self, grad)
        return grad

    def set_grad(self, grad: torch.Tensor | None) -> None:
        if grad is not None and not grad.is_cuda:
            message = f"assigned grad has data located on a different device: {self.device} and {grad.device}"
            raise COUNTS.refuse(message)
        Base.grad.__set__(self, grad)

    grad = property(get_grad, set_grad, Base.grad.__delete__)

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        pass

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        message = "Use Tensor.cpu() to copy the tensor to host memory first."
        raise COUNTS.refuse(f"can't convert {self.device} device type tensor to numpy. {message}", TypeError)

    def tolist(self) -> Any:
        COUNTS.add(WAIT, "tolist")
        return self.inner.tolist()

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        COUNTS.add(WAIT, "print")
        return f"{repr(self.inner)[:-1]}, device='{self.device}')"

    def parts(self) -> tuple[Any, ...]:
        """What ``rebuild`` makes a copy of."""
        return self.inner.detach().clone(), self.index, self.requires_grad, isinstance(self, torch.nn.Parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), rebuild(*self.parts()))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        COUNTS.add(WAIT, "pickle")
        return rebuild, self.parts()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_in((*args, *kwargs.values()))
        wrappers = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, CudaTensor)}
        gpus = {tensor.index for tensor in wrappers.values()}
        device = kwargs.pop("device", None)
        index = gpu_of(device) if is_gpu(device) else next(iter(wrappers.values())).index
        generator = kwargs.get("generator")
        if generator is not None and generator._cdata not in Generator.on_gpus:
            raise COUNTS.refuse("Expected a 'cuda' device type for generator but found 'cpu'")
        check_devices(func, args, tensors, gpus)
        count_waits(func, args, kwargs)
        if func.namespace in COLLECTIVES:
            cls.at_collective(func, args)
        out = func(*strip(args), **strip(kwargs))
        for tensor in wrappers.values() if func._schema.is_mutable else ():
            if (tensor.size(), tensor.stride()) != (tensor.inner.size(), tensor.inner.stride()):
                with torch.utils._mode_utils.no_dispatch():  # only .data can change a wrapper's shape
                    tensor.data = CudaTensor(tensor.inner, tensor.index)
        # In-place and out= variants return one of their arguments, so its wrapper has to come back.
        arguments = wrappers | {id(tensor): tensor for tensor in tensors if not isinstance(tensor, CudaTensor)}
        return with_tensors(out, lambda t: arguments[id(t)] if id(t) in arguments else CudaTensor(t, index))


def rebuild(inner: torch.Tensor, index: int, requires_grad: bool = False, parameter: bool = False) -> torch.Tensor:
    """Copy or unpickle a CUDA tensor, to the GPU that it came from, or to the ``map_location`` of torch.load."""
    place = LOADING[-1] if LOADING and LOADING[-1] is not None else index
    tensor = CudaTensor(inner, gpu_of(place)) if is_gpu(place) else inner
    return torch.nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([CudaTensor, rebuild])


def become(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """``tensor.data = values`` for a tensor on another kind of device: the tensor becomes one of the values' kind."""
    grad, tensor.grad = tensor.grad, None
    other = torch.nn.Parameter(values.detach(), False) if isinstance(tensor, torch.nn.Parameter) else values.detach()
    torch.utils.swap_tensors(tensor, other.requires_grad_(tensor.requires_grad))
    if grad is not None:
        tensor.grad = CudaTensor(bare(grad), values.index) if isinstance(values, CudaTensor) else bare(grad)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, also those in lists and tuples."""
    tensors: list[Any] = []
    with_tensors([*values], tensors.append)
    return tensors


def with_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An operator's arguments or result, with each tensor changed. torch's tree_map takes longer than the operator."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([with_tensors(item, change) for item in value])
    return {name: with_tensors(item, change) for name, item in value.items()} if isinstance(value, dict) else value


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor inside a pretended one, or the tensor itself."""
    return tensor.inner if isinstance(tensor, CudaTensor) else tensor


def strip(value: Any) -> Any:
    """An operator's argument with CPU tensors in place of pretended ones."""
    return with_tensors(value, bare)


def called_by_torch_itself() -> bool:
    """Whether C++ calls the operator: autograd's engine or DDP's reducer. The tensors that they make are the CPU's.

    C++ has no frames in Python. So it is the caller where the innermost line of Python, but for this file's, is the one
    that enters the engine, or one of DDP's own. A hook has a line of its own.
    """
    frame = frame_outside(__file__)
    return frame is not None and (
        frame.f_code.co_name == "_engine_run_backward"
        or frame.f_code.co_filename.endswith(("nn/parallel/distributed.py", "torch/distributed/utils.py"))
    )


def check_devices(func: Any, args: Any, tensors: list[torch.Tensor], gpus: set[int]) -> None:
    """Raise torch's RuntimeError for arguments on different devices."""
    if func in COPIES or func.namespace in COLLECTIVES:
        return
    hosts = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
    if func in INDEXING and isinstance(args[0], CudaTensor):  # torch uploads indices from the CPU
        hosts = [tensor for tensor in tensors_in(args[2:]) if not isinstance(tensor, CudaTensor)]
        if any(not isinstance(tensor, CudaTensor) for tensor in tensors_in(args[1])):
            COUNTS.add(UPLOAD, "index")
    # A CPU tensor may be a scalar, or empty.
    others = {str(tensor.device) for tensor in hosts if tensor.dim() > 0 and tensor.numel() > 0}
    places = sorted({f"cuda:{index}" for index in gpus} | others)
    if len(places) > 1 and not called_by_torch_itself():
        message = "Expected all tensors to be on the same device, but found at least two devices"
        raise COUNTS.refuse(f"{message}, {' and '.join(places)}! (when checking arguments of {func})")


def count_waits(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Count an operator at which the host waits for the GPU, or a copy between the two."""
    name = func.__name__.partition(".")[0]
    if func is aten.copy_.default:
        target, source = args[:2]
        upload = isinstance(target, CudaTensor)
        if upload != isinstance(source, CudaTensor) and not called_by_torch_itself():
            count_copy(source, upload, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    elif not WAITING.isdisjoint(func.tags) and func.namespace == "aten":
        if func is aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1])):
            return
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return
        COUNTS.add(WAIT, {"_local_scalar_dense": "item", "index": "mask"}.get(name, name))


def count_copy(source: torch.Tensor, upload: bool, non_blocking: bool) -> None:
    """Count a copy between host and GPU. Without pinned memory the host waits for a copy to the GPU."""
    if upload:
        pinned = is_pinned(source)
        what = NOT_PINNED if non_blocking and not pinned else "to the GPU"
        COUNTS.add(COPY if non_blocking and pinned else UPLOAD, what, bytes_of(source))
    else:
        COUNTS.add(COPY if non_blocking else WAIT, "to the CPU", bytes_of(source))
