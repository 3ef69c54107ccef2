"""Where each statement of a notebook goes in its script, what of helpers/runtime is copied, which names are refused.

Refused is a name that would not be the same one in the script: one line says where, and what to change.
"""

import ast
import builtins
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.export.notebook import Cells, ExportError, first_line, label
from helpers.source import DEFINITION, IMPORT, Statement, packages_of, split

SOURCES = Path(__file__).parents[1] / "runtime"
MODULES = ("process_group", "data", "models", "checkpoint", "stop_request")  # each imports only from those before it
PLUMBING = "process_group"  # the module of helpers/runtime that stands below main
# Names that each script has for itself, with what they mean there (see meaning_of).
OWN = {("main", ""), ("parse_args", ""), ("argparse", "import argparse")}
HARMLESS = {"field", "auto"}  # of dataclasses and enum: calls in a class whose result is the same wherever they run
STOPS = re.compile(r"\b(stop|destroy)_process_group\(")
# A statement that changes what a later import may find or do, such as os.environ["NCCL_DEBUG"] = "INFO", os.chdir("..")
# or sys.path.append("src").
SETTING = re.compile(
    r"environ\.(update|setdefault|pop)\(|environ\[[^]]*\] *=(?!=)|\b(putenv|chdir|addsitedir)\(|sys\.path\b"
)
BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}
BUILTINS -= {"globals", "locals", "exec", "eval"}  # they look names up where main's are not


@dataclass(frozen=True)
class Parts:
    """The script's statements, by their place in it. Each list has the order of the notebook."""

    imports: list[Statement]
    definitions: list[Statement]  # above main, with constants and what is copied from helpers/runtime
    body: list[Statement]  # of main
    plumbing: list[Statement]  # below main: the process group, which a reader wants to see last

    def above(self) -> list[Statement]:
        """What stands outside main, where its names are global."""
        return [*self.imports, *self.definitions, *self.plumbing]

    def of_cells(self) -> list[Statement]:
        """The statements without those that are copied."""
        return [statement for statement in [*self.above(), *self.body] if statement.where not in MODULES]


def names_bound_by(statements: Iterable[Statement]) -> set[str]:
    """The global names that any of these statements assigns, defines, imports or deletes."""
    return {name for statement in statements for name in statement.binds}


def names_read_by(statements: Iterable[Statement]) -> set[str]:
    """The global names that any of these statements reads, also later, in its functions."""
    return {name for statement in statements for name in statement.reads}


def sort_statements(cells: Cells) -> Parts:
    """Sort the statements of a notebook's cells into the parts of its script.

    Imports, functions, classes and constants go above main, if their names mean one thing in all of the script. A name
    that cells bind to two things is bound in main, in the notebook's order. What cells import from helpers/runtime is
    copied into the script. Raises ExportError for an import that cannot go to the top.
    """
    names_from_runtime = names_bound_by(statement for statement in cells.exported if is_copied(statement.node))
    copies = copied(names_from_runtime | {"stop_process_group"})
    own = sort_own_statements(cells, names_from_runtime, copies)

    stops_group = any(STOPS.search(statement.code) for statement in [*own.definitions, *own.body])
    if not stops_group:
        names_from_runtime.add("stop_process_group")
        own.body.extend(split("stop_process_group()"))
    used_names = names_read_by([*own.imports, *own.constants, *own.definitions, *own.body])
    # An import whose name only cells outside of the script use is left out. One that no cell uses may have an effect.
    names_used_elsewhere = cells.words_elsewhere - used_names
    imports = [statement for statement in own.imports if not statement.binds & names_used_elsewhere]

    plumbing: list[Statement] = []
    copied_definitions: list[Statement] = []
    for statement in copied(names_from_runtime & used_names):
        if isinstance(statement.node, IMPORT):
            imports.append(statement)
        elif statement.where == PLUMBING:
            plumbing.append(statement)
        else:
            copied_definitions.append(statement)
    definitions = [*own.constants, *in_order(own.definitions, copied_definitions)]
    return Parts(imports, definitions, own.body, plumbing)


@dataclass(frozen=True)
class OwnStatements:
    """The statements of a notebook's own cells, by their place in the script, each list in the notebook's order."""

    imports: list[Statement]
    constants: list[Statement] = field(default_factory=list)
    definitions: list[Statement] = field(default_factory=list)  # functions and classes above main
    body: list[Statement] = field(default_factory=list)  # of main


def sort_own_statements(cells: Cells, names_from_runtime: set[str], copies: list[Statement]) -> OwnStatements:
    """Sort the statements of a notebook's own cells. Raises ExportError for an import that cannot go to the top.

    ``names_from_runtime`` are the names that they import from helpers/runtime, and ``copies`` what is copied for them.
    """
    exported = [statement for statement in cells.exported if not is_notebook_only(statement.node)]
    # The process group's functions come below main, so nothing above main may need them at once.
    names_of_plumbing = names_bound_by(statement for statement in copies if statement.where == PLUMBING)
    names_below_main = names_from_runtime & names_of_plumbing
    ambiguous_names = names_with_two_meanings([*cells.parameters, *exported, *copies])

    own = OwnStatements(imports=[statement for statement in cells.parameters if isinstance(statement.node, IMPORT)])
    for statement in exported:
        node = statement.node
        needs_what_is_below_main = bool(statement.needs & names_below_main)
        is_comment = not statement.code
        follows_definition = bool(own.definitions) and own.definitions[-1].where == statement.where  # in the same cell
        if statement.binds & ambiguous_names:
            own.body.append(statement)
        elif isinstance(node, IMPORT):
            check_order(statement, own.body, own.imports)
            own.imports.append(statement)
        elif isinstance(node, DEFINITION) and can_stand_above_main(node) and not needs_what_is_below_main:
            own.definitions.append(statement)
        elif is_constant(statement):
            own.constants.append(statement)
        elif is_comment and follows_definition:
            own.definitions.append(statement)
        else:
            own.body.append(statement)
    return own


def in_order(definitions: list[Statement], copied_definitions: list[Statement]) -> list[Statement]:
    """The chapter's own definitions and those copied from helpers/runtime, in an order in which Python can read them.

    The chapter's come first, because the reader knows them. But a class can be read only after the class that it
    inherits from. So the copied ones come first if one of the chapter's needs one of them at once.
    """
    needed_at_once = {name for statement in definitions for name in statement.needs}
    if needed_at_once & names_bound_by(copied_definitions):
        return [*copied_definitions, *definitions]
    return [*definitions, *copied_definitions]


def names_with_two_meanings(statements: list[Statement]) -> set[str]:
    """The names that stand for two things, of what these statements bind and of the script's own names."""
    meanings = set(OWN)
    for statement in statements:
        for name in statement.binds:
            meanings.add((name, meaning_of(statement, name)))
    number_of_meanings = Counter(name for name, _meaning in meanings)
    return {name for name, number in number_of_meanings.items() if number > 1}


def is_constant(statement: Statement) -> bool:
    """Whether a statement is like ``WIDTH = 128``: its names are in upper case, and its value reads no other name."""
    if not isinstance(statement.node, ast.Assign) or statement.reads:
        return False
    return all(name.isupper() for name in statement.binds)


def meaning_of(statement: Statement, name: str) -> str:
    """What a statement binds a name to, as text that is equal for statements that bind it to the same thing.

    - ``import torch.nn as nn`` and ``from torch import nn`` bind nn to "import torch.nn".
    - ``import torch.nn`` and ``import torch.cuda`` bind torch to "import torch".
    - Any other statement, such as the definition of a function, is its own text.
    """
    node = statement.node
    if isinstance(node, ast.Import):
        [alias] = node.names
        if alias.asname:
            return f"import {alias.name}"
        return f"import {name}"
    if isinstance(node, ast.ImportFrom):
        [alias] = node.names
        dots_of_relative_import = "." * node.level
        return f"import {dots_of_relative_import}{node.module}.{alias.name}"
    return ast.unparse(node)


def check_order(late_import: Statement, before: list[Statement], imports: list[Statement]) -> None:
    """Raise ExportError for an import that comes after a setting such as os.environ["X"] = "1" in the notebook.

    In the script the import would go to the top, and so before the setting, on which it may depend.

    before: the statements that stay in main although the notebook has them before the import. imports: the imports that
    came earlier; one that is among these has had its effect already, so it may be repeated anywhere.
    """
    import_as_text = ast.unparse(late_import.node)
    if any(ast.unparse(early_import.node) == import_as_text for early_import in imports):
        return
    for statement in before:
        if SETTING.search(statement.code):
            what = f"{label(late_import)} goes to the script's top, above `{first_line(statement.code)}`"
            raise ExportError(f"{what}. Put imports first; what they depend on, into the shell.")


def can_stand_above_main(definition: ast.AST) -> bool:
    """Whether a function or a class of a notebook's cell can be defined above the script's main.

    There Python reads it before main has run any statement of the notebook. That makes a difference if reading it calls
    something, as in ``def train(rate=choose_rate())`` or in the body of a class. HARMLESS names calls that are allowed
    nevertheless. Decorators may be called, as in ``@torch.no_grad()``: they belong to the definition.
    """
    for part in parts_executed_at_once(definition):
        if isinstance(part, ast.Call):
            called_name = ast.unparse(part.func).rpartition(".")[2]  # "field" for dataclasses.field
            if called_name not in HARMLESS:
                return False
    return True


def parts_executed_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """A node of a syntax tree and the nodes in it that Python executes when it reads the node as code.

    The body of a function waits for a call, so only the function's arguments are among them, which have its defaults.
    Decorators are left out.
    """
    yield node
    parent: ast.AST = node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        parent = node.args
    decorators = getattr(node, "decorator_list", [])
    for child in ast.iter_child_nodes(parent):
        if child not in decorators:
            yield from parts_executed_at_once(child)


# ---- What is copied


def is_copied(node: ast.AST) -> bool:
    """Whether a node is ``from helpers.runtime.x import …``."""
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers.runtime.")


def is_notebook_only(node: ast.AST) -> bool:
    """Whether a node imports what a script cannot have; it has a copy of what it uses of helpers/runtime."""
    return bool(packages_of(node) & {"helpers", "IPython", "ipywidgets"})


@functools.cache
def runtime() -> list[Statement]:
    """The statements of all modules of helpers/runtime that bind names. No two of them give one name two meanings.

    Above a statement there may be comments. Those that touch it are kept; others are headings of the file.
    """
    comments_that_touch = re.compile(r"(?:^#.*\n?)*\Z", re.MULTILINE)  # the last lines of a text, if they begin with #
    statements = []
    for module in MODULES:
        source = (SOURCES / f"{module}.py").read_text(encoding="utf-8")
        for statement in split(source, module):
            if statement.binds and not is_copied(statement.node):
                comment = "".join(comments_that_touch.findall(statement.above))
                statements.append(replace(statement, above=comment))
    return statements


def copied(names: set[str]) -> list[Statement]:
    """The statements of helpers/runtime that define the names and all that these use, in the order of the sources."""
    wanted_names = set(names)
    while True:
        statements = [statement for statement in runtime() if statement.binds & wanted_names]
        names_still_missing = names_read_by(statements) - wanted_names
        if not names_still_missing:
            return statements
        wanted_names |= names_still_missing


# ---- Which names are refused


def check_names(parts: Parts, parameters: list[Statement]) -> None:
    """Raise ExportError if a name would mean something else in the script than it does in the notebook.

    In a notebook all names are global. In the script, what stands above main is still global, and all else becomes
    local to main: the notebook's parameters, and what the statements in main's body bind. So an error is raised for

    - a statement of main that gives a new value to a global name of the script,
    - a function above main that reads a name which is local to main now,
    - a statement that reads a name which nothing in the script binds.

    ``parameters`` are the statements of the notebook's cell with the parameters.
    """
    # main begins with the parameters. The imports in their cell have gone above main.
    parameters_of_main = [statement for statement in parameters if not isinstance(statement.node, IMPORT)]
    statements_of_main = [*parameters_of_main, *parts.body]
    global_names = names_bound_by(parts.above())
    for statement in statements_of_main:
        for name in sorted(statement.binds & global_names):
            raise ExportError(f"{label(statement)} binds {name}, a name that the script needs itself. Rename it.")
    for statement in parts.of_cells():
        is_in_main = statement in parts.body
        check_blocks(statement, is_in_main)
        check_names_read(statement, is_in_main, statements_of_main, global_names)


def check_names_read(
    statement: Statement, is_in_main: bool, statements_of_main: list[Statement], global_names: set[str]
) -> None:
    """Raise ExportError if a statement reads a variable of main from outside of main, or a name that nothing binds.

    ``global_names`` are the script's. ``is_in_main`` says whether the statement is one of ``statements_of_main``.
    """
    names_in_main = {"args"} | names_bound_by(statements_of_main)
    for name in sorted(statement.reads):
        problem = f"{label(statement)} reads {name}"
        if name in names_in_main and not is_in_main:
            cells_that_bind = [binding.where for binding in statements_of_main if name in binding.binds]
            if cells_that_bind:  # none binds ``args``
                each_cell_once = dict.fromkeys(cells_that_bind)
                problem += f", which {' and '.join(each_cell_once)} binds outside of functions"
            raise ExportError(f"{problem}. Pass it as an argument.")
        if name not in global_names | names_in_main | BUILTINS:
            raise ExportError(f"{problem}, which no exported cell binds. Bind it in one.")


def check_blocks(statement: Statement, is_in_main: bool) -> None:
    """Raise ExportError for what a statement may not have inside of it, as in the body of a function or of an ``if``.

    - An import of what the script does not have, such as helpers.
    - A star import, which Python allows only at the top of a file.
    - In main, a ``global`` name: main is a function, in which the notebook's names are local.
    """
    for node in ast.walk(statement.node):
        is_star_import = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        is_inside = node is not statement.node
        if is_notebook_only(node) or (is_star_import and is_inside):
            raise ExportError(f"{label(statement)} has `{ast.unparse(node)}` in a block. Import it at the top.")
        if isinstance(node, ast.Global) and is_in_main:
            what = f"{label(statement)} has `{ast.unparse(node)}`, and the script puts the cells into a function"
            raise ExportError(f"{what}. Return it.")
