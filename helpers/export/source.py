"""Python source as top-level statements, each with its comments, the names that it binds and the names that it reads.

The code is parsed with ast and symtable, and never executed. A statement keeps its formatting.
"""

import ast
import copy
import functools
import symtable
import sys
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

from helpers.ranks.comprehensions import AsGenerators

ANONYMOUS = ("lambda", "genexpr", "listcomp", "setcomp", "dictcomp")  # symtable's names for nameless scopes
IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Assert | ast.Delete
DEEPEST = 150  # levels of nesting: functions that walk a tree by recursion stay far from Python's limit


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written, and its place. ``node`` is None for comments at a cell's end."""

    node: ast.stmt | None
    code: str
    above: str = ""  # the comment and blank lines before it
    comment: str = ""  # the comment at the end of its last line
    where: str = ""
    written: str = ""  # the notebook's own text, if the code is a translated magic

    @property
    def text(self):
        behind = self.comment and f"  {self.comment}"
        return f"{self.above}\n{self.code}{behind}".strip("\n")

    @property
    def binds(self):
        """The names that it binds."""
        return names(self.code).bound

    @property
    def reads(self):
        """{global name that it reads: the function in it that reads the name, or ""}."""
        return names(self.code).read

    @property
    def needs(self):
        """The global names that it reads when it runs, without those that its functions read when they are called."""
        return names(self.code).needed


# ---- From source to statements


def check_syntax(source):
    """Raise SyntaxError unless the source compiles as a module and is not nested too deeply. Nothing is executed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "cell", "exec", dont_inherit=True)
            levels = depth(ast.parse(source))
        except ValueError as error:  # from a null byte or a lone surrogate
            raise SyntaxError(str(error)) from None
        except (RecursionError, MemoryError):  # the parser's own limits
            levels = float("inf")
    if levels > DEEPEST:
        raise SyntaxError(f"it is nested more than {DEEPEST} levels deep")


def depth(tree):
    """How many levels of nodes a tree has. It does not recurse: its caller asks because recursion has a limit."""
    levels, nodes = 0, [tree]
    while nodes:
        levels += 1
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node)]
    return levels


def split(source, where=""):
    """The top-level statements of a source text, in order, each with its comments."""
    lines = source.split("\n")
    in_bytes = [line.encode() for line in lines]  # ast's columns count bytes
    found, done = [], 0  # `done` lines belong to statements already
    body = ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        last, end = node.end_lineno - 1, node.end_col_offset
        start = node.col_offset if first == node.lineno else 0  # a statement may follow a semicolon
        if first - 1 == last:
            code = in_bytes[last][start:end].decode()
        else:
            between = lines[first:last]
            code = "\n".join([in_bytes[first - 1][start:].decode(), *between, in_bytes[last][:end].decode()])
        alone = following is None or following.lineno > node.end_lineno  # or the rest is the next statement
        behind = in_bytes[last][end:].decode().strip().removeprefix(";").lstrip() if alone else ""
        above = lower_part(found, lines[done : first - 1])
        found.append(Statement(node, code, above, behind if behind.startswith("#") else "", where))
        done = node.end_lineno
    above = lower_part(found, lines[done:])
    return [*found, Statement(None, "", above, "", where)] if above.strip() else found


def lower_part(found, lines):
    """The comment lines above a statement. Indented comments belong to the block before, and are added to it."""
    taken = 0
    if found and hasattr(found[-1].node, "body"):
        for number, line in enumerate(lines, 1):
            if line.strip() and not line[0].isspace():
                break
            taken = number if line.strip() else taken
    if taken:
        behind = found[-1].comment and f"  {found[-1].comment}"
        found[-1] = replace(found[-1], code="\n".join([found[-1].code + behind, *lines[:taken]]), comment="")
    return "\n".join(lines[taken:])


# ---- Which names a piece of code binds and reads


class Names(NamedTuple):
    """The names of a statement: what Statement.binds, reads and needs return."""

    bound: set
    read: dict
    needed: set


@functools.cache
def names(code):
    """The Names of module-level code."""
    if sys.version_info >= (3, 12):  # there symtable counts a comprehension's variables as the module's (PEP 709)
        code = ast.unparse(AsGenerators().visit(ast.parse(code)))
    table = symtable.symtable(code, "cell", "exec")
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    needed = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    needed.update(changed(ast.parse(code)))
    read = dict.fromkeys(needed, "")

    def visit(table, path, at_once):
        for child in table.get_children():
            unnamed = child.get_name() in ANONYMOUS or [child.get_name()] == path[-1:]  # the latter: type parameters
            inner = path if unnamed else [*path, child.get_name()]
            now = at_once and (unnamed or child.get_type() != "function")  # a class's body runs when it is defined
            for symbol in child.get_symbols():
                if symbol.is_global() and symbol.is_referenced():
                    read.setdefault(symbol.get_name(), ".".join(inner))
                    if now:
                        needed.add(symbol.get_name())
                if symbol.is_declared_global() and symbol.is_assigned():
                    bound.add(symbol.get_name())
            visit(child, inner, now)

    visit(table, [], True)
    return Names(bound, read, needed)


def changed(tree):
    """Yields names that module-level code deletes or augments. It reads them, but symtable says that it binds them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AugAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if not isinstance(node, DEFINITION):
            yield from changed(node)


def each_import(statement):
    """Yields, for each name that an import statement binds, a statement that imports that name alone."""
    for alias in statement.node.names:
        node = copy.copy(statement.node)
        node.names = [alias]
        yield replace(statement, node=node, code=ast.unparse(node), above="", comment="")


def imported_name(node):
    """The name that an import of one name binds."""
    return node.names[0].asname or node.names[0].name.split(".")[0]


def import_key(node):
    """(module, name) of what an import of one name takes: equal for two imports of the same thing."""
    alias = node.names[0]
    if isinstance(node, ast.ImportFrom):
        return node.module, alias.name
    return (alias.name if alias.asname else alias.name.split(".")[0]), None
