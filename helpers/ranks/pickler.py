"""How objects travel to ranks and back: cloudpickle, and what it cannot do by itself."""

import importlib
import io
import operator
import sys
from types import ModuleType
from typing import Any

import cloudpickle

OPERATORS = ("_OpNamespace", "OpOverloadPacket", "OpOverload")  # torch.ops.aten, torch.ops.aten.add and its .Tensor
# cloudpickle rebuilds a class by _make_skeleton_class(type, name, bases, attributes, …): here are the attributes.
ATTRIBUTES_OF_CLASS = 3


class Pickler(cloudpickle.Pickler):
    """cloudpickle, which also sends modules and operators of torch by their names, and classes with their slots.

    A function that is sent brings along the submodules of torch whose names occur in its code. cloudpickle sends a
    module by its name only if its type is that of modules, and torch.ops, torch.backends and others have own types.
    """

    def reducer_override(self, obj: Any) -> Any:
        """How to send an object: (a function, the arguments with which it rebuilds the object in the other process).

        pickle calls this for each object that it comes to. NotImplemented leaves the object to pickle itself.
        """
        if is_module_of_own_type(obj):
            return importlib.import_module, (obj.__name__,)
        if is_operator(obj):
            get_operator = operator.attrgetter(path_in_torch_ops(obj))
            return get_operator, (sys.modules["torch.ops"],)
        reduced = super().reducer_override(obj)
        has_slots = isinstance(obj, type) and "__slots__" in vars(obj)
        if has_slots and isinstance(reduced, tuple):
            _, arguments, *_ = reduced
            is_sent_by_value = len(arguments) > ATTRIBUTES_OF_CLASS  # as a notebook's class; others by their names
            if is_sent_by_value:
                # cloudpickle leaves __slots__ out of the class's attributes.
                arguments[ATTRIBUTES_OF_CLASS]["__slots__"] = vars(obj)["__slots__"]
        return reduced


def is_module_of_own_type(obj: Any) -> bool:
    """Whether an object is an imported module whose type is a subclass of that of modules, such as torch.backends."""
    if not isinstance(obj, ModuleType) or type(obj) is ModuleType:
        return False
    return sys.modules.get(obj.__name__) is obj


def is_operator(obj: Any) -> bool:
    """Whether an object is part of torch.ops: a namespace of operators, an operator, or an overload of one."""
    return type(obj).__module__ == "torch._ops" and type(obj).__name__ in OPERATORS


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
