"""Where each statement of a notebook goes in its script, so that the script does the same in the same order.

Above main stand imports, constants that are literals, and functions and classes whose definition has no effect.
Everything else becomes main's body, in the notebook's order.
"""

import ast
import builtins
import re
import sys
from dataclasses import dataclass, field

from helpers.export.inline import TOUCHING, belongs, by_name, reached, runtime_module, runtime_module_of
from helpers.export.names import FUNCTION, fixed_names
from helpers.export.notebook import first_line
from helpers.export.source import DEFINITION, IMPORT, SIMPLE, Statement, each_import, imported_name

PLAIN = {"torch", "torchvision", "numpy", "sklearn", "matplotlib"}  # libraries that can be imported in any order
SETTINGS = re.compile(  # calls that can change what a later import does
    r"sys\.path\.\w+|(os\.)?environ\.(update|setdefault|pop)|os\.(putenv|unsetenv|chdir)|site\.addsitedir|"
    r"warnings\.\w+|(matplotlib|mpl)\.use"
)
PURE = {*dir(builtins), "field", "auto", "namedtuple", "NamedTuple", "TypedDict", "TypeVar", "partial", "device"}
PURE |= {"timedelta", "Path"}
PURE -= {"print", "input", "open", "exec", "eval", "setattr", "delattr", "next", "__import__"}


@dataclass
class Parts:
    """The script's parts, as statements."""

    flags: dict
    top: list = field(default_factory=list)  # imports, and settings that they depend on
    constants: list = field(default_factory=list)
    definitions: list = field(default_factory=list)
    body: list = field(default_factory=list)
    dropped: dict = field(default_factory=dict)  # {name: where}, for names that left-out statements bind
    wanted: dict = field(default_factory=dict)  # {(run-time module, name): where it is imported}
    read_elsewhere: set = field(default_factory=set)  # names that left-out statements read
    notes: list = field(default_factory=list)
    problems: list = field(default_factory=list)

    def above(self):
        """The notebook's statements above main."""
        return [*self.top, *self.constants, *self.definitions]

    def statements(self):
        """All of the notebook's statements that the script has."""
        return [*self.above(), *self.body]


def sort_statements(cells, flags):
    """The Parts into which the notebook's statements are sorted, with their notes and problems."""
    parts, pyplot, shown = Parts(flags), {"plt", "matplotlib.pyplot"}, []
    statements = [*(found for found in cells.parameters if isinstance(found.node, IMPORT)), *cells.exported]
    for statement in cells.parameters:
        parts.read_elsewhere.update(statement.reads)
    fixed = fixed_names(statements, flags)
    early = settings(statements, fixed, flags, parts.problems)
    readers, in_main, changed = by_name(statements), set(flags), set()
    defined, constants = set(), set()
    last = parts.body  # the list to which the previous statement was added
    for place, statement in enumerate(statements):
        node = statement.node
        if node is None:  # comments at the end of a cell
            at_end = last is parts.definitions and last and last[-1].where == statement.where
            (parts.definitions if at_end else parts.body).append(statement)
            continue
        last, done = parts.body, len(parts.body)
        if isinstance(node, IMPORT):
            sort_import(statement, parts, fixed)
            in_main.update(name for one in parts.body[done:] for name in one.binds)
            pyplot |= {alias.asname for alias in node.names if alias.name in ("matplotlib.pyplot", "pyplot")}
            continue
        only_notebook = notebook_use(statement, cells.kernel_only, pyplot)
        if place in early:
            parts.top.append(statement)
        elif only_notebook and isinstance(node, SIMPLE):
            leave_out(statement, parts)
            parts.dropped.update(dict.fromkeys(statement.binds, statement.where))
            if only_notebook != "a magic":  # magics have notes already
                parts.notes.append(f"{statement.where}: `{first_line(statement.code)}` is left out.")
        elif only_notebook and not only_notebook.endswith(".show()"):
            parts.problems.append(
                f"{statement.where}: `{first_line(statement.written or statement.code)}` uses {only_notebook}, "
                "which only a notebook has.\nMove that to a cell that is not exported."
            )
        elif isinstance(node, ast.Global):
            leave_out(statement, parts)  # at a notebook's top level `global` does nothing
        elif isinstance(node, DEFINITION) and node.name in fixed and is_still(statement, readers, in_main, changed):
            last = parts.definitions
            if node.name not in defined:  # a repeated definition is equal word by word, so once is enough
                last.append(statement)
            defined.add(node.name)
        elif is_constant(node, constants) and node.targets[0].id in fixed:
            parts.constants.append(statement)
            constants |= statement.binds
        elif is_shown(node):
            leave_out(statement, parts)
            shown.append(f"{cell_of(statement)} `{first_line(statement.code)}`")
        else:
            parts.body.append(statement)
            in_main |= statement.binds
            changed |= {ast.unparse(part) for part in ast.walk(node) if is_stored(part)}
        if only_notebook and only_notebook.endswith(".show()") and not isinstance(node, SIMPLE):
            parts.notes.append(
                f"{statement.where}: {only_notebook} stays; it needs a display, and waits until you close its window."
            )
    if shown:
        parts.notes.append(f"What only shows a value in a notebook is left out: {', '.join(shown)}.")
    return parts


def cell_of(statement):
    """The cell's number in a statement's place: "cell 3"."""
    return statement.where.partition(", ")[2].partition(" (")[0] or statement.where


# ---- Imports


def sort_import(statement, parts, fixed):
    """Put an import where it belongs: at the top, in main, among the names to copy, or nowhere."""
    node, kept = statement.node, []
    if getattr(node, "level", 0) or node.names[0].name == "*":
        parts.problems.append(f"{statement.where}: `{statement.code}` does not say what it imports.\nList the names.")
        return
    for one in each_import(statement):
        place, name = belongs(one.node), one.node.names[0]
        if place == "script":
            kept.append(one)
        elif place == "notebook":
            leave_out(one, parts)
        elif place == "refused":
            parts.problems.append(
                f"{statement.where}: `{statement.code}` takes a whole module.\n"
                "Name what you use, so that it can be copied: from helpers.runtime.data import digits"
            )
        else:
            module = runtime_module_of(one.node)
            if name.name not in runtime_module(module) or name.asname not in (None, name.name):
                wrong = "renames what it imports" if name.asname else "imports a name that is not there"
                parts.problems.append(
                    f"{statement.where}: `{one.code}` {wrong}.\nImport a name of helpers/runtime/{module}.py unchanged."
                )
            elif name.name not in fixed:
                parts.problems.append(
                    f"{statement.where} imports {name.name}, and another line binds it.\nGive one of them another name."
                )
            else:
                parts.wanted[module, name.name] = statement.where
    above = [one for one in kept if imported_name(one.node) in fixed]
    parts.body += [one for one in kept if one not in above]
    parts.top += [statement] if len(above) == len(node.names) else above
    before = next((other for other in parts.body if other.node is not None), None)
    if before and any(is_library(one.node) and root_of(one.node) not in PLAIN for one in above):
        parts.notes.append(
            f"{statement.where}: `{first_line(statement.code)}` stands at the top, above "
            f"`{first_line(before.code)}` in {cell_of(before)}."
        )


def root_of(node):
    """The top-level package of an import of one name."""
    return (getattr(node, "module", None) or node.names[0].name).partition(".")[0]


def is_library(node):
    return root_of(node) not in sys.stdlib_module_names


def settings(statements, fixed, flags, problems):
    """The numbers of the statements on which a later import may depend, such as ``sys.path.insert``.

    Statements that define what those read are among them. Where that is impossible, a problem is added.
    """
    modules = {name for statement in statements if isinstance(statement.node, IMPORT) for name in statement.binds}
    binders = {name: place for place, statement in enumerate(statements) for name in statement.binds}
    last = [-1, -1]  # the numbers of the last import of a library, and of a library that is not in PLAIN
    for place, statement in enumerate(statements):
        for one in each_import(statement) if isinstance(statement.node, IMPORT) else []:
            if is_library(one.node) and belongs(one.node) == "script":
                last = [place, last[1] if root_of(one.node) in PLAIN else place]
    early, todo = set(), []
    for place, statement in enumerate(statements):
        kind = setting(statement.node, modules)
        if kind is not None and place < last[kind]:
            todo.append((place, statement))
    while todo:
        place, cause = todo.pop()
        statement = statements[place]
        if place in early or isinstance(statement.node, IMPORT):
            continue
        early.add(place)
        for name in statement.needs:
            before = binders.get(name)
            if (
                name in fixed
                and before is not None
                and before < place
                and isinstance(statements[before].node, SIMPLE | IMPORT)
            ):
                todo.append((before, cause))
            elif before is not None or name in flags:
                problems.append(
                    f"{cause.where}: imports may depend on `{first_line(cause.code)}`, which reads {name}.\n"
                    "Write the value itself there, or move the imports above it."
                )
    return early


def setting(node, modules):
    """0 if any library's import may depend on the statement, 1 if any but one in PLAIN may, None if none does."""
    found = None
    for part in ast.walk(node) if node and not isinstance(node, DEFINITION) else []:
        if isinstance(part, ast.Call) and SETTINGS.fullmatch(ast.unparse(part.func)):
            return 0
        if is_stored(part):
            if ast.unparse(part).startswith(("os.environ[", "environ[", "sys.path")):
                return 0
            root = part.value
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                found = 1
    return found


# ---- All else


def notebook_use(statement, kernel_only, pyplot):
    """What a statement uses that only a notebook has, in words for a message, or None."""
    show = None
    for node in ast.walk(statement.node):
        if isinstance(node, IMPORT) and any(belongs(one.node) != "script" for one in each_import(Statement(node, ""))):
            return f"`{ast.unparse(node)}` in a block"
        if isinstance(node, ast.Attribute) and node.attr == "show" and ast.unparse(node.value) in pyplot:
            show = f"{ast.unparse(node)}()"
    used = sorted(kernel_only & set(statement.reads))
    if used:
        return "a magic" if used == ["get_ipython"] and statement.written else f"{used[0]}()"
    return show


def leave_out(statement, parts):
    """Leave a statement out, with the comment that touches it; a comment before a blank line stays."""
    parts.read_elsewhere.update(statement.reads)
    if (above := TOUCHING.sub("", statement.above)).strip():
        parts.body.append(Statement(None, "", above, "", statement.where))


def is_constant(node, constants):
    """Whether a statement is ``NAME = value`` with a value of literals and of other constants."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return False
    allowed = ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp
    allowed |= ast.operator | ast.unaryop | ast.expr_context
    return node.targets[0].id.isupper() and all(
        isinstance(part, allowed) or (isinstance(part, ast.Name) and part.id in constants)
        for part in ast.walk(node.value)
    )


def has_effect(node):
    """Whether a statement does more than give a literal a name."""
    return node is not None and not (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and all(isinstance(target, ast.Name) for target in node.targets)
    )


def is_shown(node):
    """Whether a statement only makes a notebook show a value: a name, a literal, or a tuple of these."""
    parts = ast.walk(node.value) if isinstance(node, ast.Expr) else [node]
    return all(isinstance(part, ast.Constant | ast.Name | ast.Tuple | ast.expr_context) for part in parts)


def is_stored(node):
    """Whether a node is an attribute or an item that a statement assigns or deletes."""
    return isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)


def is_still(statement, readers, in_main, changed):
    """Whether a definition may stand above main: defining it has no effect, and needs nothing from main."""
    for node in executed(statement.node):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in PURE:
            return False
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node) in changed:
            return False
    return not (in_main & reached(statement.needs, readers, set()))


def executed(node):
    """Yields the nodes that run when a function or a class is defined: defaults, bases, a class's body."""
    if isinstance(node, FUNCTION):
        heads = [*node.args.defaults, *(value for value in node.args.kw_defaults if value)]
    elif isinstance(node, ast.ClassDef):
        heads = [*node.bases, *(word.value for word in node.keywords), *node.body]
    else:
        yield node
        heads = ast.iter_child_nodes(node)
    for head in heads:
        yield from executed(head)
