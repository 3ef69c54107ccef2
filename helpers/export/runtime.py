"""What a script uses of helpers/runtime is copied into it: which statements, in the order of their sources."""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

from helpers.source import Statement, packages_of, split

SOURCES = Path(__file__).parents[1] / "runtime"
MODULES = ("process_group", "data", "models", "checkpoint", "stop_request")  # each imports only from those before it


def is_copied(node: ast.AST) -> bool:
    """Whether a node is ``from helpers.runtime.x import …``."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers.runtime.")


def is_notebook_only(node: ast.AST) -> bool:
    """Whether a node imports what a script cannot have; it has a copy of what it uses of helpers/runtime."""
    return bool(packages_of(node) & {"helpers", "IPython", "ipywidgets"})


@functools.cache
def runtime() -> list[Statement]:
    """The modules' statements, in which a name has one meaning; of comments above, those that touch the statement."""
    touching = re.compile(r"(?:^#.*\n?)*\Z", re.MULTILINE)
    return [
        replace(statement, above="".join(touching.findall(statement.above)))
        for module in MODULES
        for statement in split((SOURCES / f"{module}.py").read_text(encoding="utf-8"), module)
        if statement.binds and not is_copied(statement.node)
    ]


def copied(names: set[str]) -> list[Statement]:
    """The statements that define the names and all that these use, in the order of the sources."""
    todo, taken = [*names], set[str]()
    while todo:
        name = todo.pop()
        if name not in taken:
            taken.add(name)
            todo += [read for statement in runtime() if name in statement.binds for read in statement.reads]
    return [statement for statement in runtime() if statement.binds & taken]
