"""What travels between ``launch`` and its ranks: as cloudpickle packs it, and the modules of torch that it refuses."""

import importlib
import io
import operator
import sys
from types import ModuleType

import cloudpickle

OPERATORS = ("_OpNamespace", "OpOverloadPacket", "OpOverload")  # torch.ops.aten, torch.ops.aten.add and its .Tensor


class Pickler(cloudpickle.Pickler):
    """cloudpickle knows modules by their type; torch.ops, torch.backends and torch's settings have types of their own.

    A function names such a module more often than it shows: cloudpickle adds every loaded submodule of torch whose
    name the function's code could mean.
    """

    def reducer_override(self, obj):
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if type(obj).__module__ == "torch._ops" and type(obj).__name__ in OPERATORS:
            path = obj.__name__ if isinstance(obj, ModuleType) else str(obj)  # "torch.ops.aten", "aten.add.Tensor"
            return operator.attrgetter(path.removeprefix("torch.ops.")), (sys.modules["torch.ops"],)
        return super().reducer_override(obj)


def dumps(obj):
    """An object as bytes, for ``pickle.loads``."""
    with io.BytesIO() as file:
        Pickler(file).dump(obj)
        return file.getvalue()
