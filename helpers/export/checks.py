"""What a script would not do as the notebook's cells do it is refused: one line says where, and what to change."""

import ast
import builtins
import re
from collections.abc import Iterator

from helpers.export.flags import Flag
from helpers.export.notebook import ExportError, label
from helpers.export.parts import Parts
from helpers.export.runtime import MODULES, is_notebook_only
from helpers.source import IMPORT, Statement, each_import

BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
OWN = {"main", "parse_args", "args", "argparse"}  # the script's own names
BY_TEXT = {"globals", "locals", "exec", "eval"}  # they look names up where main's are not
STARTS = {"start_process_group", "init_process_group"}
SET_BY_TORCHRUN = re.compile(  # an environment variable in an assignment or in environ.update, with its value
    r"environ.*?\b((?:LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)['\"]?\]? *[=:] *['\"]", re.DOTALL
)
POSITIONS = ("backend", "init_method", "timeout", "world_size", "rank")  # of init_process_group's arguments


def check(parts: Parts, flags: list[Flag], name: str) -> None:
    """Raise ExportError for the first statement that the script cannot have."""
    statements = [
        statement for statement in [*parts.above(), *parts.body] if statement.node and statement.where not in MODULES
    ]
    parameters = {flag.name for flag in flags}
    check_meanings(parts, parameters, name)
    check_names(parts, statements, parameters)
    check_order(parts, parameters)
    check_ranks(statements, name)


def check_meanings(parts: Parts, parameters: set[str], name: str) -> None:
    """Raise ExportError for a name of the script's top level that means something else in another place."""
    top = dict.fromkeys(OWN, ("", "the script itself")) | {"argparse": ("import argparse", "the script itself")}
    in_order = sorted(parts.above(), key=lambda statement: statement.where not in MODULES)
    builtin = {name for statement in in_order if statement.where in MODULES for name in statement.reads & BUILTINS}
    for statement in in_order:
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
    raise ExportError(f"{label(statement)} binds {name}, as {where} does, and a script has one of them. Rename one.")


def check_names(parts: Parts, statements: list[Statement], parameters: set[str]) -> None:
    """Raise ExportError where a statement reads a name that the script would not have there."""
    above = BUILTINS | {name for statement in parts.above() for name in statement.binds}
    in_main = parameters | {"args"} | {name for statement in parts.body for name in statement.binds}
    for statement in statements:
        for node in ast.walk(statement.node or ast.Pass()):
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


def check_order(parts: Parts, parameters: set[str]) -> None:
    """Raise ExportError where main reads a name, a built-in one perhaps, that main binds only later."""
    later = {name for statement in parts.body for name in statement.binds} - parameters
    for statement in parts.body:
        later -= statement.binds
        for name in sorted(statement.needs & later):
            raise ExportError(f"{label(statement)} reads {name}, which main binds later. Bind it before, or rename it.")


def check_ranks(statements: list[Statement], name: str) -> None:
    """Raise ExportError unless torchrun's ranks would meet: they start one process group, as torchrun numbers them."""
    calls = {callee(node) for statement in statements for node in ast.walk(statement.node or ast.Pass())}
    if not calls & STARTS:
        raise ExportError(
            f"{name} starts no process group: N ranks would train N models. "
            "Export a cell with device = start_process_group()."
        )
    for statement in statements:
        for fixed in fixed_by(statement, "init_process_group" in calls):
            raise ExportError(f"{label(statement)} fixes {fixed}, which is torchrun's to say. Leave it out.")


def callee(node: ast.AST) -> str:
    """The name of the function that a node calls, without its module's; or ""."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def fixed_by(statement: Statement, meets: bool) -> Iterator[str]:
    """Yields, as text, what a statement fixes: a rank, a world size, and a file if the script meets by its own call."""
    yield from SET_BY_TORCHRUN.findall(statement.code)
    for node in ast.walk(statement.node or ast.Pass()):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("file://")
            and meets
        ):
            yield f"`{node.value}`"
        if isinstance(node, ast.Call) and callee(node) == "init_process_group":
            arguments = [*zip(POSITIONS, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
            for name, value in arguments:
                if name in ("rank", "world_size") and isinstance(value, ast.Constant) and isinstance(value.value, int):
                    yield f"{name}={value.value}"
