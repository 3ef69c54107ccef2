"""Where each statement of a notebook goes in its script: above main, into main, or nowhere."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from helpers.export.notebook import Cells, ExportError, first_line, label
from helpers.export.runtime import copied, is_copied, is_notebook_only, runtime
from helpers.source import DEFINITION, IMPORT, Statement, split

LITERAL = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp
LITERAL |= ast.operator | ast.unaryop | ast.expr_context
PLUMBING = "process_group"  # the module of helpers/runtime that stands below main
HARMLESS = {"field", "auto"}  # calls in a class's body that do above main what they do in its cell
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
    helpers = {name for statement in cells.exported if is_copied(statement.node) for name in statement.binds}
    below_main = helpers & {name for statement in runtime() if statement.where == PLUMBING for name in statement.binds}
    times = Counter(name for statement in cells.exported for name in statement.binds)
    targets = {text for statement in cells.exported for text in changes(statement)}
    for statement in cells.exported:
        node = statement.node
        if isinstance(node, IMPORT):
            if not is_notebook_only(node):
                check_order(statement, body)
                imports.append(statement)
        elif isinstance(node, DEFINITION) and is_still(node, targets) and not statement.needs & below_main:
            definitions.append(statement)
        elif is_constant(node) and all(times[name] == 1 for name in statement.binds):
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


def check_order(late: Statement, before: list[Statement]) -> None:
    """Raise ExportError for an import that may depend on a statement of main: in the script it stands above main."""
    for statement in before:
        if SETTING.search(statement.code) or any(changes(statement)):
            raise ExportError(
                f"{label(late)} goes to the script's top, above `{first_line(statement.code)}`. "
                "Put imports first; what they depend on, into the shell."
            )


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement is ``NAME = value`` with a value of literals."""
    match node:
        case ast.Assign([ast.Name(name)], value):
            return name.isupper() and all(isinstance(part, LITERAL) for part in ast.walk(value))
    return False


def is_still(node: ast.AST, targets: set[str]) -> bool:
    """Whether defining a function or a class does above main what it does in its cell."""
    return not any(
        isinstance(part, ast.Call)
        and ast.unparse(part.func).rpartition(".")[2] not in HARMLESS
        or ast.unparse(part) in targets
        for part in executed(node)
    )


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs when a function or a class is defined: defaults, bases, a class's body; not decorators."""
    heads: list[ast.AST]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        heads = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    elif isinstance(node, ast.ClassDef):
        heads = [*node.bases, *node.keywords, *node.body]
    else:
        yield node
        heads = [*ast.iter_child_nodes(node)]
    for head in heads:
        yield from executed(head)


def changes(statement: Statement) -> Iterator[str]:
    """Yields the attributes and items that a statement assigns or deletes."""
    for node in ast.walk(statement.node):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield ast.unparse(node)
