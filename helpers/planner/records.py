"""What the planner's records share: their fields are checked, whether they come from Python, a file or a command."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast, get_args, get_origin

Value = TypeVar("Value")

TYPE_NAMES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", dict: "a table"}


class PlanError(ValueError):
    """What was asked for is not possible. The message has two lines, and the second one says what to do next."""

    @property
    def problem(self) -> str:
        """The first line, without its full stop."""
        return str(self).partition(".\n")[0]


def refuse(problem: str, hint: str) -> NoReturn:
    """Raise a PlanError of two lines: the problem, and "Give" with the hint. Both are without a full stop."""
    raise PlanError(f"{problem}.\nGive {hint}.")


def look_up(table: Mapping[str, Value], name: object, what: str) -> Value:
    """Return table[name], or raise a PlanError that lists the names that the table has.

    what: what the name should be, such as "model", for the error.
    """
    if not isinstance(name, str) or name not in table:
        refuse(f"{name!r} is not a {what} that the planner knows", f"one of {', '.join(table)}")
    return table[name]


def with_preset(table: Any, presets: Mapping[str, dict[str, Any]], what: str) -> Any:
    """Add to a table of fields those of the preset that it names under "preset". Its own fields win.

    A text instead of a table is the name of a preset. Anything else, without a preset, is returned as it is; Record.of
    checks it later. what: "model" or "cluster", for the PlanError about a name that is not in ``presets``.
    """
    if isinstance(table, str):
        table = {"preset": table}
    if not isinstance(table, dict) or "preset" not in table:
        return table
    fields = {**look_up(presets, table["preset"], what), **table}
    del fields["preset"]
    return fields


@dataclass(frozen=True)
class Record:
    """The base class of a model, a cluster, a layout and so on: a dataclass that checks its fields when it is made.

    Each value must have its field's type, and no number may be below 0. POSITIVE names the fields that may not be 0
    either.
    """

    POSITIVE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.check_fields(vars(self))

    @classmethod
    def of(cls, table: Any) -> Self:
        """Make a record from a dict of its fields, or return the given record. Raises PlanError for anything else."""
        if isinstance(table, cls):
            return table
        if not isinstance(table, dict):
            refuse(f"the {cls.__name__.lower()} is {table!r}", "a table of its fields")
        cls.check_fields(table)
        return cls(**table)

    @classmethod
    def check_fields(cls, values: Mapping[str, Any]) -> None:
        """Raise a PlanError for a field that the record does not have, or for a value that a field cannot have.

        values: {field: value}, of some of the fields or of all.
        """
        record = f"the {cls.__name__.lower()}"
        types = {field.name: field.type for field in fields(cls)}
        for name, value in values.items():
            if name not in types:
                raise PlanError(f"{record} has no field {name!r}.\nIts fields: {cls.described()}.")
            must_be_positive = name in cls.POSITIVE
            hint = correction(value, types[name], must_be_positive)
            if hint:
                refuse(f"{record}: {name} is {value!r}", hint)

    @classmethod
    def described(cls) -> str:
        """The names of the fields as text, for a command's help and for errors."""
        return ", ".join(field.name for field in fields(cls))

    def with_(self, **changes: Any) -> Self:
        """A copy of this record with some other values."""
        return replace(self, **changes)


def correction(value: object, field_type: Any, positive: bool) -> str:
    """What a field takes instead of a value that it cannot have: "a whole number above 0". It is "" for a right value.

    field_type: int, float, str, bool, dict[...] or Literal[...]. positive: whether a number must be above 0. Types are
    compared exactly, because True is also an int.
    """
    if get_origin(field_type) is Literal:
        choices = get_args(field_type)
        if type(value) is type(choices[0]) and value in choices:
            return ""
        return f"one of {', '.join(map(str, choices))}"

    plain_type = get_origin(field_type) or field_type  # dict for dict[str, float]
    if plain_type not in (int, float):
        if type(value) is plain_type:
            return ""
        return TYPE_NAMES[plain_type]

    hint = f"{TYPE_NAMES[plain_type]} above 0"
    is_number = type(value) in (int, plain_type)  # A field of floats takes whole numbers, too.
    if not is_number:
        return hint
    number = cast(float, value)
    if number > 0 or (number == 0 and not positive):
        return ""
    return hint  # The number is too small, or it is NaN, for which every comparison is false.
