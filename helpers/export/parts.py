"""Where each statement of a notebook goes in its script, what of helpers/runtime is copied, and what is refused.

Refused is what the script would not do as the cells do it: one line says where, and what to change.
"""

import ast
import builtins
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from helpers.export.notebook import Cells, ExportError, first_line, label
from helpers.source import DEFINITION, IMPORT, Statement, packages_of, split

SOURCES = Path(__file__).parents[1] / "runtime"
MODULES = ("process_group", "data", "models", "checkpoint", "stop_request")  # each imports only from those before it
PLUMBING = "process_group"  # the module of helpers/runtime that stands below main
OWN = {("main", ""), ("parse_args", ""), ("argparse", "import argparse")}  # the script's own names, and meanings
HARMLESS = {"field", "auto"}  # calls in a class's body that do above main what they do in its cell
STOPS = re.compile(r"\b(stop|destroy)_process_group\(")
SETTING = re.compile(r"environ\.(update|setdefault|pop)\(|\b(putenv|chdir|addsitedir)\(|sys\.path\b")
BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
BUILTINS -= {"globals", "locals", "exec", "eval"}  # they look names up where main's are not
STARTS = re.compile(r"(?<!def )\b(?:start|init)_process_group\(")
LAUNCHERS = re.compile(  # calls that start ranks
    r"(\b(?:mp|multiprocessing)\.spawn|(?<![\w.])spawn|\w*TorchDistributor|TrainerClient|TorchTrainer"
    r"|notebook_launcher|debug_launcher|elastic_launch)\("
)
FIXED = [  # of a statement as ast.unparse writes it, what torchrun says in each rank
    re.compile(r"environ.*?\b((?:LOCAL_)?RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'?\]? ?[=:] ?'", re.DOTALL),
    re.compile(r"init_process_group\(.*?\b((?:rank|world_size)=\d+)"),
    re.compile(r"init_process_group\(.*?(file://[^'\"]*)"),
]


@dataclass(frozen=True)
class Parts:
    """The script's statements."""

    imports: list[Statement]
    definitions: list[Statement]  # above main, with constants and what is copied from helpers/runtime
    body: list[Statement]  # of main
    plumbing: list[Statement]  # below main: the process group, which a reader wants to see last

    def above(self) -> list[Statement]:
        """What stands outside main."""
        return [*self.imports, *self.definitions, *self.plumbing]

    def of_cells(self) -> list[Statement]:
        """The statements without those that are copied."""
        return [statement for statement in [*self.above(), *self.body] if statement.where not in MODULES]


def sort_statements(cells: Cells) -> Parts:
    """The Parts of a notebook's script. Raises ExportError for an import that may not go up.

    Above main stands what a cell binds once and for all. What it binds twice, main does, in the notebook's order.
    """
    imports = [statement for statement in cells.parameters if isinstance(statement.node, IMPORT)]
    constants, definitions, body, plumbing = (list[Statement]() for _ in range(4))
    helpers = {name for statement in cells.exported if is_copied(statement.node) for name in statement.binds}
    exported = [statement for statement in cells.exported if not is_notebook_only(statement.node)]
    copies = copied(helpers | {"stop_process_group"})
    below_main = helpers & {name for statement in copies if statement.where == PLUMBING for name in statement.binds}
    everything = [*cells.parameters, *exported, *copies]
    meanings = OWN | {(name, meaning_of(statement, name)) for statement in everything for name in statement.binds}
    times = Counter(name for name, _ in meanings)
    targets = {text for statement in exported for text in changes(statement)}
    for statement in exported:
        node = statement.node
        if any(times[name] > 1 for name in statement.binds):
            body.append(statement)
        elif isinstance(node, IMPORT):
            check_order(statement, body, imports)
            imports.append(statement)
        elif isinstance(node, DEFINITION) and is_still(node, targets) and not statement.needs & below_main:
            definitions.append(statement)
        elif isinstance(node, ast.Assign) and not statement.reads and all(map(str.isupper, statement.binds)):
            constants.append(statement)
        elif not statement.code and definitions and definitions[-1].where == statement.where:
            definitions.append(statement)  # comments at the end of a cell
        else:
            body.append(statement)
    if not any(STOPS.search(statement.code) for statement in [*definitions, *body]):
        helpers.add("stop_process_group")
        body += split("stop_process_group()")
    used = {name for statement in [*imports, *constants, *definitions, *body] for name in statement.reads}
    unread = cells.elsewhere - used  # an import that no cell reads stays: it may have an effect
    imports = [statement for statement in imports if not statement.binds & unread]
    plumbing, others = list[Statement](), list[Statement]()
    for statement in copied(helpers & used):
        place = plumbing if statement.where == PLUMBING else others
        (imports if isinstance(statement.node, IMPORT) else place).append(statement)
    at_once = {name for statement in definitions for name in statement.needs}
    early = any(at_once & statement.binds for statement in [*others, *definitions])
    above = [*others, *definitions] if early else [*definitions, *others]  # the chapter's own first, if that can be
    return Parts(imports, [*constants, *above], body, plumbing)


def meaning_of(statement: Statement, name: str) -> str:
    """What a statement binds a name to, as text: ``import a.b`` and ``import a.c`` bind the same a."""
    node = statement.node
    if isinstance(node, ast.Import):
        return f"import {node.names[0].name if node.names[0].asname else name}"
    if isinstance(node, ast.ImportFrom):  # ``from torch import nn`` is ``import torch.nn as nn``
        return f"import {'.' * node.level}{node.module}.{node.names[0].name}"
    return ast.unparse(node)


def check_order(late: Statement, before: list[Statement], imports: list[Statement]) -> None:
    """Raise ExportError for an import that may depend on a statement of main: in the script it stands above main."""
    if any(ast.unparse(late.node) == ast.unparse(early.node) for early in imports):
        return
    modules = {name for early in imports for name in early.binds}
    for statement in before:
        if SETTING.search(statement.code) or any(re.split(r"\W", text)[0] in modules for text in changes(statement)):
            what = f"{label(late)} goes to the script's top, above `{first_line(statement.code)}`"
            raise ExportError(f"{what}. Put imports first; what they depend on, into the shell.")


def is_still(node: ast.AST, targets: set[str]) -> bool:
    """Whether a definition does above main what it does in its cell: its defaults, bases, a class's body."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in HARMLESS:
        return False
    runs = node.args if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else node
    parts = [part for part in ast.iter_child_nodes(runs) if part not in getattr(node, "decorator_list", ())]
    return ast.unparse(node) not in targets and all(is_still(part, targets) for part in parts)


def changes(statement: Statement) -> Iterator[str]:
    """Yields the attributes and items that a statement assigns or deletes."""
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node)


# ---- What is copied


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


# ---- What is refused


def check_launching(statements: list[Statement]) -> None:
    """Raise ExportError for what torchrun does: to start ranks, and to number them."""
    for statement in statements:
        code = ast.unparse(statement.node)
        if match := LAUNCHERS.search(code):
            why = f"starts ranks by {match[1]}, and torchrun starts a script's"
            raise ExportError(f"{label(statement)} {why}. Leave it out, and call the function.")
        for match in filter(None, (pattern.search(code) for pattern in FIXED)):
            raise ExportError(f"{label(statement)} fixes {match[1]}, which is torchrun's to say. Leave it out.")


def check_names(parts: Parts, parameters: list[Statement]) -> None:
    """Raise ExportError where a statement reads or binds a name that is not the same one in the script."""
    above = {name for statement in parts.above() for name in statement.binds}
    main = [statement for statement in parameters if not isinstance(statement.node, IMPORT)] + parts.body
    in_main = {"args"} | {name for statement in main for name in statement.binds}
    for statement in main:
        for name in sorted(statement.binds & above):
            raise ExportError(f"{label(statement)} binds {name}, which the script has above main. Rename it.")
    for statement in parts.of_cells():
        for node in ast.walk(statement.node):
            is_star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
            if is_notebook_only(node) or (is_star and node is not statement.node):
                raise ExportError(f"{label(statement)} has `{ast.unparse(node)}` in a block. Import it at the top.")
            if isinstance(node, ast.Global) and statement in parts.body:
                raise ExportError(f"{label(statement)} has `{ast.unparse(node)}`, but main's names are not. Return it.")
        for name in sorted(statement.reads):
            if name in in_main and statement not in parts.body:
                raise ExportError(f"{label(statement)} reads {name}, which main binds. Pass it as an argument.")
            if name not in above | in_main | BUILTINS:
                raise ExportError(f"{label(statement)} reads {name}, which no exported cell binds. Bind it in one.")


def check_start(parts: Parts, name: str) -> None:
    """Raise ExportError unless torchrun's ranks would meet in a process group."""
    if not any(STARTS.search(ast.unparse(statement.node)) for statement in parts.of_cells()):
        why = "starts no process group: N ranks would train N models"
        raise ExportError(f"{name} {why}. Call torch.distributed.init_process_group() in an exported cell.")
