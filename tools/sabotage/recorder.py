"""A rewritten assert calls this module, in the kernel and in every rank. ``check`` decides as the assert did, and
writes down which of the wrong conditions would have held as well.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

EVALUATIONS = 20  # how many evaluations of one assert in one process are written down: a loop may have thousands
counts: Counter[str] = Counter()
Condition = Callable[[Callable, Callable], Any]


class NoNumber(Exception):
    """What should become wrong is not a number, nor has it one."""


def larger(value: Any, factor: float) -> Any:
    """The value with its numbers multiplied by the factor; None without a number."""
    import torch

    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + (1 if factor > 1 else -1) * max(1, round(abs(value * (factor - 1))))
    if isinstance(value, float):
        return value * factor or factor - 1
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach() * factor + (0 if value.any() else factor - 1)
    if isinstance(value, torch.Tensor):
        return ~value if value.dtype == torch.bool else value + 1
    if isinstance(value, dict):
        values = larger(list(value.values()), factor)
        return None if values is None else dict(zip(value, values, strict=True))
    if isinstance(value, list | tuple):
        items = [larger(item, factor) for item in value]
        if any(item is not None for item in items):
            changes = (old if new is None else new for old, new in zip(value, items, strict=True))
            return list(changes) if isinstance(value, list) else tuple(changes)
    return None


def wrong(value: Any, factor: float) -> Any:
    result = larger(list(value) if type(value).__name__ == "generator" else value, factor)
    if result is None:
        raise NoNumber
    return result


def evaluate(condition: Condition, memory: dict) -> bool:
    """Evaluate a condition. The n-th result of a call with side effects is that of the first evaluation's."""
    calls: Counter[str] = Counter()

    def once(place: str, call: Callable) -> Any:
        calls[place] += 1
        key = place, calls[place]
        if key not in memory:
            memory[key] = call()
        return memory[key]

    return bool(condition(once, wrong))


def holds(condition: Condition, memory: dict) -> bool | None:
    """Whether a wrong condition holds; None where it has no number to be wrong. An error is noticed as well."""
    try:
        return evaluate(condition, memory)
    except NoNumber:
        return None
    except Exception:
        return False


def check(site: str, test: Condition, variants: dict[str, list[Condition]], message: Callable = str) -> None:
    """Decide as the assert did. Write which wrong conditions would have held to the file that FLIPS_RECORD names."""
    memory: dict = {}
    decided = evaluate(test, memory)
    counts[site] += 1
    if counts[site] <= EVALUATIONS:
        holding = []
        for label, conditions in variants.items():
            answers = {holds(condition, memory) for condition in conditions} - {None}
            holding += [label] if answers == {True} else []
        with open(os.environ["FLIPS_RECORD"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"site": site, "holding": holding}) + "\n")
    if not decided:
        raise AssertionError(message())
