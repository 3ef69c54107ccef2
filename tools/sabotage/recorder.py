"""A rewritten assert calls this module, in the kernel and in every rank. ``check`` decides as the assert did, and
writes down which wrong conditions would have held as well.

The condition arrives as a tree: ``compare``, ``truth``, ``many`` (all, any), ``either`` (and, or), ``no``. Its leaves
have been evaluated once, so trying wrong numbers runs no code of the notebook again.
"""

import functools
import itertools
import json
import operator
import os

OPERATORS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "is": operator.is_, "is not": operator.is_not,
    "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip
# Factors by which a number is made wrong, the smallest first. An int also changes by one.
STEPS = {"5 %": (1.05, 0.95), "10 %": (1.1, 0.9), "x2": (2, 0.5), "x10": (10, 0.1)}
EVALUATIONS = 20  # how many evaluations of one assert in one process are written down: a loop may have thousands


class Value:
    """One side of a comparison: a pure function of leaves, each of which can be made wrong."""

    def __init__(self, compute, *leaves):
        self.compute, self.leaves = compute, leaves
        self.value = compute(*leaves)

    def wrong(self, index, change):
        """(the side's value with one leaf changed,), or None where no number in that leaf changes the value."""
        leaf = change(self.leaves[index])
        if leaf is None:
            return None
        value = self.compute(*self.leaves[:index], leaf, *self.leaves[index + 1 :])
        unread = isinstance(leaf, list | tuple | dict) and repr(value) == repr(self.value)  # a part that is not used
        return None if unread else (value,)


class Node:
    """A condition or a part of one. ``holds`` is its truth in the notebook's run."""

    def __init__(self, number, kind, holds, parts=(), sides=(), operators=()):
        self.number, self.kind, self.parts, self.sides, self.operators = number, kind, parts, sides, operators
        self.holds = holds

    def decide(self, forced):
        """Whether the condition holds if nodes are forced. ``forced`` is {number: a function of the node}."""
        if self.number in forced:
            return forced[self.number](self)
        if not self.parts:
            return self.holds
        truths = [part.decide(forced) for part in self.parts]
        return {"all": all, "and": all, "any": any, "or": any, "not": lambda one: not one[0]}[self.kind](truths)

    def walk(self):
        yield self
        for part in self.parts:
            yield from part.walk()


def compare(number, operators, *sides):
    return Node(number, "compare", chain(operators, [side.value for side in sides]), (), sides, operators)


def chain(operators, values):
    pairs = zip(operators, values, values[1:], strict=False)
    return all(bool(OPERATORS[name](left, right)) for name, left, right in pairs)


def truth(number, side):
    return Node(number, "truth", bool(side.value), (), (side,))


def many(number, kind, parts):
    return Node(number, kind, {"all": all, "any": any}[kind](part.holds for part in parts), parts)


def either(number, kind, *lazy):
    """``and`` or ``or``. As in Python, a part that cannot matter is not evaluated."""
    parts = []
    for one in lazy:
        parts.append(one())
        if parts[-1].holds == (kind == "or"):
            break
    return Node(number, kind, parts[-1].holds, parts)


def no(number, part):
    return Node(number, "not", not part.holds, (part,))


def larger(value, factor, first):
    """The value with its numbers multiplied by the factor: all of them, or the first one. None without a number."""
    import torch

    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        if abs(value) == float("inf"):
            return 1.0
        if factor in (1, -1):
            return value + factor if isinstance(value, int) else None
        return (round(value * factor) if isinstance(value, int) else value * factor) if value else factor - 1
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.is_floating_point():
            return value.detach() * factor if value.any() else value.detach() + (factor - 1)
        return ~value if value.dtype == torch.bool else value + 1 if factor == 1 else None
    if isinstance(value, dict):
        changed = larger(list(value.values()), factor, first)
        return None if changed is None else dict(zip(value, changed, strict=True))
    if isinstance(value, list | tuple):
        changed, found = list(value), False
        for index, one in enumerate(value):
            if not (first and found) and (other := larger(one, factor, first)) is not None:
                changed[index], found = other, True
        return (type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)) if found else None
    return None


def notices(node, root, step):
    """Whether the condition fails if some number of this comparison is wrong by a step; None without a number."""

    def fails(side, leaf, change):
        if (changed := node.sides[side].wrong(leaf, change)) is None:
            return None
        sides = [one.value for one in node.sides]
        sides[side] = changed[0]
        holds = chain(node.operators, sides) if node.operators else bool(sides[0])
        return not root.decide({node.number: lambda one: holds if one is node else one.holds})

    factors, answer = (1, -1) if step == "1" else STEPS[step], None
    for (side, value), factor, first in itertools.product(enumerate(node.sides), factors, (False, True)):
        for leaf in range(len(value.leaves)):
            try:
                one = fails(side, leaf, functools.partial(larger, factor=factor, first=first))
                answer = answer if one is None else answer or one
            except Exception:  # an error with the wrong number would be noticed as well
                return True
    return answer


def report(root):
    """{number of a part: whether the condition holds with the part flipped, and the smallest step that is noticed}."""
    found, nodes = {}, {}
    for node in root.walk():
        nodes.setdefault(node.number, []).append(node)
    for number, same in nodes.items():
        flips = [lambda one: not one.holds, lambda one: False, lambda one: True]
        found[number] = {
            "parts": sum(len(node.parts) for node in same),
            "flip holds": all(root.decide({number: flip}) for flip in flips),
        }
        if same[0].sides:
            answers = {step: [notices(node, root, step) for node in same] for step in ("1", *STEPS)}
            if any(one is not None for some in answers.values() for one in some):
                found[number]["noticed"] = next((step for step in answers if any(answers[step])), "none")
            found[number]["values"] = [short(side.value) for side in same[0].sides]
    return found


def short(value):
    """A number as text with three digits; "" for anything else."""
    try:
        return f"{float(value):.3g}"
    except Exception:
        return ""


@functools.cache
def seen(site):
    return []


def check(site, root, message=lambda: ""):
    """Decide as the assert did. Write which wrong conditions would have held to the file that FLIPS_RECORD names."""
    if len(seen(site)) < EVALUATIONS:
        seen(site).append(site)
        line = json.dumps({"site": site, "nodes": report(root)}) + "\n"
        with open(os.environ["FLIPS_RECORD"], "a", encoding="utf-8") as file:
            file.write(line)
    if not root.holds:
        raise AssertionError(message())
