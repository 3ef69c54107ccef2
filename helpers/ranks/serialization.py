"""How objects travel between ``launch`` and its ranks: by cloudpickle, and with some modules that it cannot send."""

import importlib
import io
import operator
import sys
from types import ModuleType
from typing import Any

import cloudpickle

OPERATORS = ("_OpNamespace", "OpOverloadPacket", "OpOverload")  # torch.ops.aten, torch.ops.aten.add and its .Tensor


class Pickler(cloudpickle.Pickler):
    """cloudpickle recognises modules by their type, but torch.ops, torch.backends and others have types of their own.

    A function that does not use these modules may still carry them: cloudpickle adds every loaded submodule of torch
    whose name occurs in the function's code.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if type(obj).__module__ == "torch._ops" and type(obj).__name__ in OPERATORS:
            path = obj.__name__ if isinstance(obj, ModuleType) else str(obj)  # "torch.ops.aten", "aten.add.Tensor"
            return operator.attrgetter(path.removeprefix("torch.ops.")), (sys.modules["torch.ops"],)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """An object as bytes, for ``pickle.loads``. Raises what cloudpickle raises for objects that cannot be sent."""
    with io.BytesIO() as file:
        Pickler(file).dump(obj)
        return file.getvalue()
