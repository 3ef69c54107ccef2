"""Where each statement of a notebook goes in its script: above main, into main, or nowhere."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from helpers.export.notebook import Cells, ExportError, first_line, label
from helpers.export.runtime import copied, is_notebook_only, runtime_module_of
from helpers.source import DEFINITION, IMPORT, Statement, each_import, split

LITERAL = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp
LITERAL |= ast.operator | ast.unaryop | ast.expr_context
# What a definition may call in its head and stand above main all the same: the call does there what it does in a cell.
HARMLESS = {*dir(builtins), *"field auto namedtuple NamedTuple TypedDict TypeVar partial device timedelta Path".split()}
HARMLESS -= {"print", "input", "open", "exec", "eval", "next", "setattr"}
STOPS = re.compile(r"\b(stop|destroy)_process_group\(")
SETTING = re.compile(r"environ\.(update|setdefault|pop)\(|\b(putenv|chdir|addsitedir)\(|sys\.path\b")


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


def sort_statements(cells: Cells) -> Parts:
    """The Parts of a notebook's script. Raises ExportError for an import that may not go up."""
    imports = [statement for statement in cells.parameters if isinstance(statement.node, IMPORT)]
    constants, definitions, body = list[Statement](), list[Statement](), list[Statement]()
    runtime_names: set[tuple[str, str]] = set()  # {(run-time module, name)}
    times = Counter(name for statement in cells.exported for name in statement.binds)
    targets = {text for statement in cells.exported for text in changes(statement)}
    for statement in cells.exported:
        node = statement.node
        if node is None:  # comments at the end of a cell
            behind = definitions and definitions[-1].where == statement.where
            (definitions if behind else body).append(statement)
        elif module := runtime_module_of(node):
            runtime_names |= {(module, name) for name in statement.binds}
        elif isinstance(node, IMPORT):
            check_order(statement, body)
            imports += [] if is_notebook_only(node) else [statement]
        elif isinstance(node, DEFINITION) and is_still(node, targets):
            definitions.append(statement)
        elif is_constant(node, constants) and all(times[name] == 1 for name in statement.binds):
            constants.append(statement)
        else:
            body.append(statement)
    if not any(STOPS.search(statement.code) for statement in [*definitions, *body]):
        runtime_names.add(("process_group", "stop_process_group"))
        body += split("stop_process_group()")
    used = {name for statement in [*imports, *constants, *definitions, *body] for name in statement.reads}
    runtime = copied({(module, name) for module, name in runtime_names if name in used})
    imports = [*without_unread(imports, cells.read_elsewhere - used), *filter(is_import, runtime)]
    plumbing = [statement for statement in runtime if statement.where == "process_group" and not is_import(statement)]
    own = [statement for statement in runtime if statement not in plumbing and not is_import(statement)]
    above = [*constants, *definitions, *own]  # the chapter's own first
    ordered: list[Statement] = []
    for statement in above:
        needed = used_by(statement, [*plumbing, *above])
        ordered += [early for early in [*own, *plumbing] if early.binds & needed and early not in ordered]
        ordered += [] if statement in ordered else [statement]
    return Parts(imports, ordered, body, [statement for statement in plumbing if statement not in ordered])


def used_by(statement: Statement, statements: list[Statement]) -> set[str]:
    """The names that a definition needs when it runs, all that those read when they are called, and so on."""
    names, todo = set[str](), [*statement.needs]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += [read for other in statements if name in other.binds for read in other.reads]
    return names


def is_import(statement: Statement) -> bool:
    return isinstance(statement.node, IMPORT)


def check_order(late: Statement, before: list[Statement]) -> None:
    """Raise ExportError for an import that may depend on a statement of main: in the script it stands above main."""
    for statement in before:
        if SETTING.search(statement.code) or any(changes(statement)):
            raise ExportError(
                f"{label(late)} goes to the script's top, above `{first_line(statement.code)}`. "
                "Put imports first; what they depend on, into the shell."
            )


def without_unread(imports: list[Statement], unread: set[str]) -> Iterator[Statement]:
    """Yields imports without names that only other cells read. One that nothing reads stays: it may have an effect."""
    for statement in imports:
        if statement.binds & unread:
            yield from (single for single in each_import(statement) if not single.binds & unread)
        else:
            yield statement


def is_constant(node: ast.stmt, constants: list[Statement]) -> bool:
    """Whether a statement is ``NAME = value`` with a value of literals and of other constants."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return False
    names = {name for constant in constants for name in constant.binds}
    return node.targets[0].id.isupper() and all(
        isinstance(part, LITERAL) or (isinstance(part, ast.Name) and part.id in names) for part in ast.walk(node.value)
    )


def is_still(node: ast.AST, targets: set[str]) -> bool:
    """Whether defining a function or a class does above main what it does in its cell."""
    for part in executed(node):
        if isinstance(part, ast.Call) and ast.unparse(part.func).rpartition(".")[2] not in HARMLESS:
            return False
        if isinstance(part, ast.Attribute | ast.Subscript) and ast.unparse(part) in targets:
            return False
    return True


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs when a function or a class is defined: defaults, bases, a class's body; not decorators."""
    heads: list[ast.AST] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        heads += [*node.args.defaults, *(value for value in node.args.kw_defaults if value)]
    elif isinstance(node, ast.ClassDef):
        heads += [*node.bases, *(keyword.value for keyword in node.keywords), *node.body]
    else:
        yield node
        heads += ast.iter_child_nodes(node)
    for head in heads:
        yield from executed(head)


def changes(statement: Statement) -> Iterator[str]:
    """Yields the attributes and items that a statement assigns or deletes."""
    for node in ast.walk(statement.node) if statement.node else []:
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node)
