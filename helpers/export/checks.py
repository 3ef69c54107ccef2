"""What a script would not do as the notebook's cells do it is refused: one line says where, and what to change."""

import ast
import builtins
from collections.abc import Iterator

from helpers.export.flags import Flag
from helpers.export.notebook import ExportError, shown
from helpers.export.parts import Parts
from helpers.export.runtime import MODULES, is_notebook_only
from helpers.source import IMPORT, Statement, each_import

BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
OWN = {"main", "parse_args", "args", "argparse"}  # the script's own names
BY_TEXT = {"globals", "locals", "exec", "eval"}  # they look names up where main's are not
STARTS = {"start_process_group", "init_process_group"}
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}  # variables that torchrun sets
POSITIONS = ("backend", "init_method", "timeout", "world_size", "rank")  # of init_process_group's arguments


def check(parts: Parts, flags: list[Flag], name: str) -> None:
    """Raise ExportError for the first statement that the script cannot have."""
    statements = [one for one in [*parts.above(), *parts.body] if one.node and one.where not in MODULES]
    parameters = {flag.name for flag in flags}
    check_meanings(parts, parameters, name)
    check_names(parts, statements, parameters)
    check_ranks(statements, name)


def check_meanings(parts: Parts, parameters: set[str], name: str) -> None:
    """Raise ExportError for a name of the script's top level that means something else in another place."""
    top = dict.fromkeys(OWN, ("", "the script itself")) | {"argparse": ("import argparse", "the script itself")}
    copied_first = sorted(parts.above(), key=lambda statement: statement.where not in MODULES)
    builtin = {name for one in copied_first if one.where in MODULES for name in one.reads & BUILTINS}
    for statement in copied_first:
        for single in [*each_import(statement)] or [statement]:
            for bound in sorted(single.binds):
                meaning, where = top.setdefault(bound, (meaning_of(single, bound), statement.where))
                if meaning != meaning_of(single, bound) or bound in builtin:
                    clash(statement, bound, "Python" if bound in builtin else where)
    for statement in parts.body:
        for bound in sorted(top.keys() & statement.binds | {"args"} & statement.names.own):
            clash(statement, bound, top[bound][1])
    for parameter in sorted(parameters & top.keys()):
        raise ExportError(f"{name}: {top[parameter][1]} binds the parameter's name, {parameter}. Rename one.")


def meaning_of(statement: Statement, name: str) -> str:
    """What a statement binds a name to, as text: ``import a.b`` and ``import a.c`` bind the same a."""
    node = statement.node
    if isinstance(node, ast.Import) and not node.names[0].asname:
        return f"import {name}"
    return ast.unparse(node) if isinstance(node, IMPORT) else statement.code


def clash(statement: Statement, name: str, where: str) -> None:
    where = f"helpers/runtime/{where}.py" if where in MODULES else where
    raise ExportError(f"{shown(statement)} binds {name}, as {where} does, and a script has one of them. Rename one.")


def check_names(parts: Parts, statements: list[Statement], parameters: set[str]) -> None:
    """Raise ExportError where a statement reads a name that the script would not have there."""
    above = BUILTINS | {name for statement in parts.above() for name in statement.binds}
    in_main = parameters | {"args"} | {name for statement in parts.body for name in statement.binds}
    for statement in statements:
        for node in ast.walk(statement.node or ast.Pass()):
            if is_notebook_only(node):
                raise ExportError(f"{shown(statement)} has `{ast.unparse(node)}` in a block. Import it at the top.")
        for name in sorted(statement.reads):
            if name in BY_TEXT - in_main:
                raise ExportError(f"{shown(statement)} looks names up by {name}(). Write the names themselves.")
            if name in above:
                continue
            if name not in in_main:
                raise ExportError(f"{shown(statement)} reads {name}, which no exported cell binds. Export that too.")
            if statement not in parts.body:
                raise ExportError(f"{shown(statement)} reads {name}, which main binds. Pass it as an argument.")


def check_ranks(statements: list[Statement], name: str) -> None:
    """Raise ExportError unless torchrun's ranks would meet: they start one process group, as torchrun numbers them."""
    nodes = [(statement, node) for statement in statements for node in ast.walk(statement.node or ast.Pass())]
    if not any(called(node) in STARTS for _, node in nodes):
        raise ExportError(
            f"{name} starts no process group: N ranks would train N models. "
            "Export a cell with device = start_process_group()."
        )
    for statement, node in nodes:
        for fixed in fixed_by(node):
            raise ExportError(f"{shown(statement)} fixes {fixed}, which is torchrun's to say. Leave it out.")


def called(node: ast.AST) -> str:
    """The name of the function that a node calls, without its module's; or ""."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def fixed_by(node: ast.AST) -> Iterator[str]:
    """Yields, as text, what a node fixes: a rank, a world size, a file to meet at."""
    if isinstance(node, ast.Call) and called(node) == "init_process_group":
        arguments = [*zip(POSITIONS, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
        for name, value in arguments:
            if name in ("rank", "world_size") and isinstance(value, ast.Constant) and isinstance(value.value, int):
                yield f"{name}={value.value}"
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.startswith("file://"):
                yield f"`{part.value}`"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("environ"):
                if isinstance(target.slice, ast.Constant) and target.slice.value in LAUNCHER:
                    yield f"{target.slice.value}"
