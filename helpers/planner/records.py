"""What the planner's records share: their fields are checked, whether they come from Python, a file or a command."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_origin

Kind = TypeVar("Kind")
Value = TypeVar("Value")

LARGEST = 1e24  # beyond every number of a plan; with larger ones its arithmetic would overflow
SMALLEST = 1e-24  # but for 0, as LARGEST
WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    dict: "a table",
}


class PlanError(ValueError):
    """What was asked for cannot be: one or two lines that end with the next step."""


def look_up(table: Mapping[str, Value], name: object, what: str) -> Value:
    """table[name], or a PlanError that lists the names."""
    if not isinstance(name, str) or name not in table:
        raise PlanError(f"{name!r} is not a {what} that the planner knows.\nGive one of {', '.join(table)}.")
    return table[name]


@functools.cache
def types_of(kind: type) -> dict[str, Any]:
    """{field: int, float, str, bool or dict} of a dataclass."""
    return {field.name: get_origin(field.type) or field.type for field in fields(kind)}


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Raise a PlanError for a field that the dataclass does not have, or for a value that it cannot have.

    kind.LIMITS is {field: (smallest, largest)} where these are not 0 and LARGEST; kind.CHOICES is {field: values}.
    """
    types, what = types_of(kind), f"the {kind.__name__.lower()}"
    limits, choices = getattr(kind, "LIMITS", {}), getattr(kind, "CHOICES", {})
    for name, value in values.items():
        if name not in types:
            raise PlanError(f"{what} has no field {name!r}.\nIts fields: {', '.join(types)}.")
        smallest, largest = limits.get(name, (0, LARGEST))
        if name in choices and value not in choices[name]:
            hint = f"one of {', '.join(map(str, choices[name]))}"
        elif not (hint := correction(value, types[name], smallest, largest)):
            continue
        text = repr(value)
        raise PlanError(f"{what}: {name} is {text if len(text) <= 60 else text[:60] + '…'}.\nGive {hint}.")


def correction(value: object, kind: type, smallest: float, largest: float) -> str:
    """What to give instead of a value that is not of this type or not within the limits; empty for a right one."""
    if kind in (int, float):
        if type(value) is int or (kind is float and type(value) is float):
            if smallest <= value <= largest and not 0 < value < SMALLEST:
                return ""
            if value > largest:
                return f"at most {largest:g}"
            if value > 0:
                return f"at least {max(smallest, SMALLEST):g}"
        return f"{WORDS[kind]} above 0" + ("" if smallest else ", or leave it out")
    right = type(value) is kind and (not isinstance(value, str) or bool(value.strip() and value.isprintable()))
    return "" if right else WORDS[kind]


def from_table(kind: type[Kind], table: object) -> Kind:
    """A dataclass from a dict of its fields; a PlanError names what does not fit."""
    if not isinstance(table, dict):
        raise PlanError(f"the {kind.__name__.lower()} is {table!r}.\nGive a table of its fields.")
    check_fields(kind, table)
    return kind(**table)
