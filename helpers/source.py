"""Python source as top-level statements, each with its comments and the global names that it binds and reads.

For ``%%ranks``, which sends the names that a cell reads, and for the export, which sorts a notebook's statements.
It imports the standard library alone. The code is compiled, and never executed.
"""

import ast
import copy
import dis
import functools
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import CodeType

IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
IMPLICIT = {"__name__", "__annotations__"}  # which the code of a class or of an annotation reads by itself
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")  # the last: in a class, from Python 3.12 on
STORES = ("STORE_NAME", "STORE_GLOBAL")
DELETES = ("DELETE_NAME", "DELETE_GLOBAL")  # they need the name, as a load does, and bind it anew, as a store does


@dataclass(frozen=True)
class Names:
    """The global names of a piece of module-level code."""

    binds: frozenset[str]
    reads: frozenset[str]  # by itself or in its functions
    needs: frozenset[str]  # reads at once, when it runs: without what its functions read when they are called
    own: frozenset[str]  # names that are not global: those that its functions, classes and comprehensions bind


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written. ``node`` is None for comments at the end of a cell."""

    node: ast.stmt | None
    code: str
    above: str = ""  # the comment and blank lines before it
    comment: str = ""  # the comment at the end of its last line
    where: str = ""  # the cell, for messages

    @property
    def text(self) -> str:
        behind = self.comment and f"  {self.comment}"
        return f"{self.above}\n{self.code}{behind}".strip("\n")

    @property
    def names(self) -> Names:
        return names_of(self.code)

    @property
    def binds(self) -> frozenset[str]:
        return self.names.binds

    @property
    def reads(self) -> frozenset[str]:
        return self.names.reads

    @property
    def needs(self) -> frozenset[str]:
        return self.names.needs


# ---- Names


@functools.cache
def names_of(code: str) -> Names:
    """The Names of module-level code, as its bytecode has them."""
    binds, reads, needs, own = set[str](), set[str](), set[str](), set[str]()
    for scope, at_once in scopes(compiled(code)):
        own.update(scope.co_varnames, scope.co_cellvars)
        of_class = set(IMPLICIT)  # what the body of a class binds, it does not read from outside
        for step in dis.get_instructions(scope):
            if step.opname in STORES + DELETES:
                is_global = step.opname.endswith("_GLOBAL") or scope.co_name == "<module>"
                (binds if is_global else of_class).add(step.argval)
            if step.opname in LOADS + DELETES and step.argval not in of_class:
                reads.add(step.argval)
                if at_once:
                    needs.add(step.argval)
        own |= of_class
    return Names(frozenset(binds), frozenset(reads), frozenset(needs), frozenset(own))


def compiled(code: str) -> CodeType:
    """The code of a module. Raises SyntaxError, for a null byte too, and for half of a character."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" is the reader's to mend, not this function's
        try:
            return compile(code, "cell", "exec", dont_inherit=True)
        except ValueError as error:
            raise SyntaxError(str(error)) from None


def scopes(code: CodeType, at_once: bool = True) -> Iterator[tuple[CodeType, bool]]:
    """The code and the functions and classes in it, each with whether it runs when the whole code runs.

    A class's body does. So do comprehensions, which have code of their own up to Python 3.11, and a lambda may.
    """
    yield code, at_once
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            called = inner.co_flags & inspect.CO_OPTIMIZED and not inner.co_name.startswith("<")
            yield from scopes(inner, at_once and not called)


# ---- Statements


def split(source: str, where: str = "") -> list[Statement]:
    """The top-level statements of a source text, in order, each with its comments. Raises SyntaxError."""
    compiled(source)  # ast.parse takes a `return` outside a function, and more
    lines = source.split("\n")
    in_bytes = [line.encode() for line in lines]  # ast's columns count bytes
    statements: list[Statement] = []
    done = 0  # so many lines belong to statements already
    body = ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=False):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        last, end = (node.end_lineno or first) - 1, node.end_col_offset
        start = node.col_offset if first == node.lineno else 0  # a statement may follow a semicolon
        if first - 1 == last:
            code = in_bytes[last][start:end].decode()
        else:
            between = lines[first:last]
            code = "\n".join([in_bytes[first - 1][start:].decode(), *between, in_bytes[last][:end].decode()])
        alone = following is None or following.lineno > last + 1  # or the rest is the next statement
        behind = in_bytes[last][end:].decode().strip().removeprefix(";").lstrip() if alone else ""
        above = lower_part(statements, lines[done : first - 1])
        statements.append(Statement(node, code, above, behind if behind.startswith("#") else "", where))
        done = last + 1
    above = lower_part(statements, lines[done:])
    return [*statements, Statement(None, "", above, "", where)] if above.strip() else statements


def lower_part(statements: list[Statement], lines: list[str]) -> str:
    """The comment lines above a statement. Indented comments belong to the block before, and are added to it."""
    taken = 0
    if statements and hasattr(statements[-1].node, "body"):
        for number, line in enumerate(lines, 1):
            if line.strip() and not line[0].isspace():
                break
            taken = number if line.strip() else taken
    if taken:
        block = statements[-1]
        code = "\n".join([block.code + (block.comment and f"  {block.comment}"), *lines[:taken]])
        statements[-1] = replace(block, code=code, comment="")
    return "\n".join(lines[taken:])


def each_import(statement: Statement) -> Iterator[Statement]:
    """An import, of any number of names, as imports of one name each; nothing for another statement."""
    for alias in statement.node.names if isinstance(statement.node, IMPORT) else []:
        node = copy.copy(statement.node)
        assert isinstance(node, IMPORT)
        node.names = [alias]
        yield replace(statement, node=node, code=ast.unparse(node), above="", comment="")


def modules_of(node: ast.AST | None) -> list[str]:
    """The modules that an import takes, or takes names from; none for another node."""
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
