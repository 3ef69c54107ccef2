"""What a script uses of helpers/runtime is copied into it: which statements, in the order of their sources."""

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

from helpers.source import IMPORT, Statement, modules_of, singly, split

SOURCES = Path(__file__).parents[1] / "runtime"
MODULES = ("process_group", "data", "models", "checkpoint", "stop_request")  # each imports only from those before it
NOTEBOOK_ONLY = ("helpers", "IPython", "ipywidgets")  # but for the modules above


def runtime_module_of(node: ast.AST) -> str | None:
    """The module of helpers/runtime that ``from helpers.runtime.x import …`` names, or None."""
    package, _, module = ((node.module or "") if isinstance(node, ast.ImportFrom) else "").rpartition(".")
    return module if package == "helpers.runtime" and module in MODULES else None


def is_notebook_only(node: ast.AST) -> bool:
    """Whether a node imports what a script cannot have. It may import one of the modules above: that is copied."""
    return any(module.partition(".")[0] in NOTEBOOK_ONLY for module in modules_of(node))


@functools.cache
def statements_of(module: str) -> list[Statement]:
    """A module's statements: its imports one name at a time; of comments above, those that touch the statement."""
    source = (SOURCES / f"{module}.py").read_text(encoding="utf-8")
    statements = [single for statement in split(source, module) for single in singly(statement) if single.binds]
    touching = re.compile(r"(?:^#.*\n?)*\Z", re.MULTILINE)
    return [replace(statement, above="".join(touching.findall(statement.above))) for statement in statements]


def copied(names: set[tuple[str, str]]) -> list[Statement]:
    """The statements that define the names {(module, name)} and all that these use, in the order of the sources."""
    todo, taken = [*names], set()
    while todo:
        module, name = todo.pop()
        for place, statement in enumerate(statements_of(module)):
            if name in statement.binds and (module, place) not in taken:
                taken.add((module, place))
                if other := runtime_module_of(statement.node):
                    todo.append((other, name))
                elif not isinstance(statement.node, IMPORT):
                    todo += [(module, read) for read in statement.reads]
    return [
        statement
        for module in MODULES
        for place, statement in enumerate(statements_of(module))
        if (module, place) in taken and not runtime_module_of(statement.node)
    ]
