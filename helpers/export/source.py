"""Python source as top-level statements: each with its comments, the names that it binds and those that it reads.

The code is read with ast and symtable and is never executed; a statement keeps its own formatting.
"""

import ast
import copy
import functools
import re
import symtable
import sys
import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

from helpers.ranks.comprehensions import AsGenerators

ANONYMOUS = ("lambda", "genexpr", "listcomp", "setcomp", "dictcomp")  # symtable's names of scopes without one
IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
SIMPLE = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Assert | ast.Delete


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written, and where. Without a node: comments at the end of a cell."""

    node: ast.stmt | None
    code: str
    above: str = ""  # the comment and blank lines before it
    comment: str = ""  # the comment behind it
    where: str = ""
    heading: str = ""
    written: str = ""  # what the notebook has, where a magic was translated

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
        """The globals that it reads, {name: the function that reads it, or ""}."""
        return names(self.code).read

    @property
    def needs(self):
        """The globals that it reads when it is executed, not only when a function of it is called."""
        return names(self.code).needed


# ---- From source to statements


def check_syntax(source):
    """Raise SyntaxError unless the source compiles as a module. Nothing is executed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "cell", "exec", dont_inherit=True)
        except ValueError as error:  # a null byte
            raise SyntaxError(str(error)) from None


def split(source, where="", heading=""):
    """The top-level statements of a source text, in order, each with its comments."""
    lines = source.split("\n")
    found, done = [], 0  # `done`: the lines that are taken
    for node in ast.parse(source).body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        code = lines[first - 1 : node.end_lineno]
        rest = code[-1].encode()[node.end_col_offset :].decode()  # ast counts bytes
        code[-1] = code[-1].encode()[: node.end_col_offset].decode()
        if first == node.lineno:  # without a decorator, it may stand behind a semicolon
            code[0] = code[0].encode()[node.col_offset :].decode()
        comment = re.fullmatch(r"\s*;?\s*(#.*)", rest)
        above = lower_part(found, lines[done : first - 1])
        found.append(Statement(node, "\n".join(code), above, comment[1] if comment else "", where, heading))
        done = node.end_lineno
    above = lower_part(found, lines[done:])
    return [*found, Statement(None, "", above, "", where, heading)] if above.strip() else found


def lower_part(found, lines):
    """The comment lines above a statement, less the indented ones: these end the block before, and go to it."""
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
    """The names of a statement, as its properties binds, reads and needs describe them."""

    bound: set
    read: dict
    needed: set


@functools.cache
def names(code):
    """What module-level code binds, what it reads ({name: the function that reads it, or ""}), and what it needs."""
    if sys.version_info >= (3, 12):  # there symtable gives a comprehension's variables to the module (PEP 709)
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
    """The names that module-level code deletes or adds to, which for symtable it only binds."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.AugAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        if not isinstance(node, DEFINITION):
            yield from changed(node)


def each_import(statement):
    """An import statement as one statement for every name that it binds."""
    for alias in statement.node.names:
        node = copy.copy(statement.node)
        node.names = [alias]
        yield replace(statement, node=node, code=ast.unparse(node), above="", comment="")


def imported_name(node):
    """The name that an import of one name binds."""
    return node.names[0].asname or node.names[0].name.split(".")[0]


def import_key(node):
    """What an import of one name binds its name to: equal for two imports of the same thing."""
    alias = node.names[0]
    if isinstance(node, ast.ImportFrom):
        return node.module, alias.name
    return (alias.name if alias.asname else alias.name.split(".")[0]), None
