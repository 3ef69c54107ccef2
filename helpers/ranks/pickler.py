"""How objects travel to ranks and back: cloudpickle, and what it cannot do by itself."""

import importlib
import io
import operator
import sys
from types import ModuleType
from typing import Any

import cloudpickle

OPERATORS = ("_OpNamespace", "OpOverloadPacket", "OpOverload")  # torch.ops.aten, torch.ops.aten.add and its .Tensor


class Pickler(cloudpickle.Pickler):
    """cloudpickle, which also sends modules and operators of torch by their names, and classes with their slots.

    A function that is sent brings along the submodules of torch whose names occur in its code. cloudpickle sends a
    module by its name only if its type is that of modules, and torch.ops, torch.backends and others have own types.
    """

    def reducer_override(self, obj: Any) -> Any:
        """How an object is rebuilt, as (function, arguments); NotImplemented leaves it to pickle."""
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if type(obj).__module__ == "torch._ops" and type(obj).__name__ in OPERATORS:
            return operator.attrgetter(path_in_torch_ops(obj)), (sys.modules["torch.ops"],)
        reduced = super().reducer_override(obj)
        has_slots = isinstance(obj, type) and "__slots__" in vars(obj)
        is_sent_by_value = isinstance(reduced, tuple) and len(reduced[1]) > 3  # a class of a notebook, not an import
        if has_slots and is_sent_by_value:
            attributes_of_copy = reduced[1][3]  # cloudpickle leaves __slots__ out of them
            attributes_of_copy["__slots__"] = vars(obj)["__slots__"]
        return reduced


def path_in_torch_ops(operator: Any) -> str:
    """``aten`` for the namespace torch.ops.aten, ``aten.add.Tensor`` for an overload of an operator."""
    if isinstance(operator, ModuleType):
        return operator.__name__.removeprefix("torch.ops.")
    return str(operator)


def dumps(obj: Any) -> bytes:
    """An object as bytes, for ``pickle.loads``. Raises what cloudpickle raises for objects that cannot be sent."""
    with io.BytesIO() as file:
        Pickler(file).dump(obj)
        return file.getvalue()
