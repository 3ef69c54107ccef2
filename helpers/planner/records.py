"""What the planner's records share: their fields are checked, whether they come from Python, a file or a command."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args, get_origin

Value = TypeVar("Value")

LARGEST = 1e24  # beyond every number of a plan; with larger ones its arithmetic would overflow
SMALLEST = 1e-24  # but for 0, as LARGEST
WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", dict: "a table"}


class PlanError(ValueError):
    """What was asked for cannot be: one or two lines that end with the next step."""


def refuse(what: str, hint: str) -> NoReturn:
    """Raise a PlanError of two lines."""
    raise PlanError(f"{what}.\nGive {hint}.")


def look_up(table: Mapping[str, Value], name: object, what: str) -> Value:
    """table[name], or a PlanError that lists the names."""
    if not isinstance(name, str) or name not in table:
        refuse(f"{name!r} is not a {what} that the planner knows", f"one of {', '.join(table)}")
    return table[name]


def with_preset(table: Any, presets: Mapping[str, dict[str, Any]], what: str) -> Any:
    """A table of fields over those of the preset that it names under "preset"; a name alone is a preset, too."""
    if isinstance(table, str):
        table = {"preset": table}
    if not isinstance(table, dict) or "preset" not in table:
        return table
    fields = {**look_up(presets, table["preset"], what), **table}
    del fields["preset"]
    return fields


def correction(value: object, kind: Any, smallest: float, largest: float) -> str:
    """What to give instead of a value that is not of this type or not within the limits; empty for a right one."""
    if kind not in (int, float):
        right = type(value) is kind and (not isinstance(value, str) or bool(value.strip() and value.isprintable()))
        return "" if right else WORDS[kind]
    if type(value) is int or (kind is float and type(value) is float):
        if smallest <= value <= largest and not 0 < value < SMALLEST:
            return ""
        if value > largest:
            return f"at most {largest:g}"
        if value > 0:
            return f"at least {max(smallest, SMALLEST):g}"
    return f"{WORDS[kind]} above 0" + ("" if smallest else ", or leave it out")


@dataclass(frozen=True)
class Record:
    """Fields that are checked. LIMITS is {field: (smallest, largest)} where these are not 0 and LARGEST."""

    LIMITS: ClassVar[dict[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        self.check_fields(vars(self))

    @classmethod
    def of(cls, table: Any) -> Self:
        """A record from a dict of its fields; one that is a record already stays. PlanError for any other."""
        if isinstance(table, cls):
            return table
        if not isinstance(table, dict):
            refuse(f"the {cls.__name__.lower()} is {table!r}", "a table of its fields")
        cls.check_fields(table)
        return cls(**table)

    @classmethod
    def check_fields(cls, values: Mapping[str, Any]) -> None:
        """Raise a PlanError for a field that the record does not have, or for a value that it cannot have."""
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        what = f"the {cls.__name__.lower()}"
        for name, value in values.items():
            if name not in types:
                raise PlanError(f"{what} has no field {name!r}.\nIts fields: {', '.join(types)}.")
            origin, choices = get_origin(types[name]), get_args(types[name])
            kind = type(choices[0]) if origin is Literal else origin or types[name]
            hint = correction(value, kind, *cls.LIMITS.get(name, (0, LARGEST)))
            if origin is Literal and value not in choices:
                hint = f"one of {', '.join(map(str, choices))}"
            if hint:
                text = repr(value)
                refuse(f"{what}: {name} is {text if len(text) <= 60 else text[:60] + '…'}", hint)

    @classmethod
    def described(cls) -> str:
        """Its fields; where only some values are possible, with these."""
        types = {field.name: field.type for field in fields(cls)}
        choices = {name: get_args(kind) if get_origin(kind) is Literal else () for name, kind in types.items()}
        return ", ".join(name + "=" * bool(values) + "|".join(map(str, values)) for name, values in choices.items())

    def with_(self, **changes: Any) -> Self:
        """This record with other values."""
        return replace(self, **changes)
