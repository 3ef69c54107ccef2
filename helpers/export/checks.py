"""What a script would not do as the notebook's cells do it is refused: one line says where, and what to change."""

import ast
import builtins
import re

from helpers.export.notebook import ExportError, label
from helpers.export.parts import Parts
from helpers.export.runtime import MODULES, is_notebook_only
from helpers.source import IMPORT, Statement

BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
OWN = ("main", "parse_args", "args", "argparse")  # the script's own names
BY_TEXT = {"globals", "locals", "exec", "eval"}  # they look names up where main's are not
STARTS = re.compile(r"(?<!def )\b(?:start|init)_process_group\(")
FIXED = [  # of a statement as ast.unparse writes it, what torchrun says in each rank
    re.compile(r"environ.*?\b((?:LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'?\]? ?[=:] ?'", re.DOTALL),
    re.compile(r"init_process_group\(.*?\b((?:rank|world_size)=\d+)"),
    re.compile(r"init_process_group\([^=(]*, (\d+)"),  # by its position
]
FILE = re.compile(r"['\"](file://.*?)['\"]")


def check(parts: Parts, parameters: set[str], name: str) -> None:
    """Raise ExportError for the first statement that the script cannot have."""
    statements = [statement for statement in [*parts.above(), *parts.body] if statement.where not in MODULES]
    check_meanings(parts, parameters)
    check_names(parts, statements, parameters)
    check_ranks(statements, name)


def check_meanings(parts: Parts, parameters: set[str]) -> None:
    """Raise ExportError for a name of the script's top level that means something else in another place."""
    in_order = sorted(parts.above(), key=lambda statement: statement.where not in MODULES)
    builtin = {name for statement in in_order if statement.where in MODULES for name in statement.reads & BUILTINS}
    places = dict.fromkeys(builtin, "Python") | dict.fromkeys(parameters, "the parameters cell")
    places |= dict.fromkeys(OWN, "the script itself")
    meanings = {"argparse": "import argparse"}
    for statement in in_order:
        for name in sorted(statement.binds):
            meaning = meaning_of(statement, name)
            if name in places and meaning != meanings.get(name):
                clash(statement, name, places[name])
            places[name], meanings[name] = statement.where, meaning
    for statement in parts.body:
        for name in sorted(statement.binds & {*OWN, *meanings} | {"args"} & statement.own):
            clash(statement, name, places[name])


def meaning_of(statement: Statement, name: str) -> str:
    """What a statement binds a name to, as text: ``import a.b`` and ``import a.c`` bind the same a."""
    node = statement.node
    if isinstance(node, ast.Import) and not node.names[0].asname:
        return f"import {name}"
    return ast.unparse(node) if isinstance(node, IMPORT) else statement.code


def clash(statement: Statement, name: str, where: str) -> None:
    where = f"helpers/runtime/{where}.py" if where in MODULES else where
    raise ExportError(f"{label(statement)} binds {name}, as {where} does, and a script has one of them. Rename one.")


def check_names(parts: Parts, statements: list[Statement], parameters: set[str]) -> None:
    """Raise ExportError where a statement reads a name that the script would not have there."""
    above = BUILTINS | {name for statement in parts.above() for name in statement.binds}
    in_main = parameters | {"args"} | {name for statement in parts.body for name in statement.binds}
    for statement in statements:
        for node in ast.walk(statement.node):
            if is_notebook_only(node):
                raise ExportError(f"{label(statement)} has `{ast.unparse(node)}` in a block. Import it at the top.")
            if isinstance(node, ast.Global) and statement in parts.body:
                raise ExportError(f"{label(statement)} has `{ast.unparse(node)}`, but main's names are not. Return it.")
        for name in sorted(statement.reads):
            if name in BY_TEXT - in_main:
                raise ExportError(f"{label(statement)} looks names up by {name}(). Write the names themselves.")
            if name in above:
                continue
            if name not in in_main:
                raise ExportError(f"{label(statement)} reads {name}, which no exported cell binds. Export that too.")
            if statement not in parts.body:
                raise ExportError(f"{label(statement)} reads {name}, which main binds. Pass it as an argument.")


def check_ranks(statements: list[Statement], name: str) -> None:
    """Raise ExportError unless torchrun's ranks would meet: they start one process group, as torchrun numbers them."""
    codes = [ast.unparse(statement.node) for statement in statements]
    if not any(STARTS.search(code) for code in codes):
        raise ExportError(
            f"{name} starts no process group: N ranks would train N models. "
            "Export a cell with device = start_process_group()."
        )
    meets_by_itself = any("init_process_group(" in code for code in codes)
    for statement, code in zip(statements, codes, strict=True):
        for pattern in [*FIXED, FILE] if meets_by_itself else FIXED:
            if match := pattern.search(code):
                raise ExportError(f"{label(statement)} fixes {match[1]}, which is torchrun's to say. Leave it out.")
