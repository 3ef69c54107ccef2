"""Python source as top-level statements, each with its comments and the global names that it binds and reads.

For ``%%ranks``, which sends the names that a cell reads, and for the export, which sorts a notebook's statements.
It imports the standard library alone. The code is compiled, and never executed.
"""

import ast
import dis
import functools
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
INSIDE = re.compile(r"(?:(?:[ \t]+#.*|[ \t]*)\n)*[ \t]+#.*")  # comments below a block that are indented belong to it
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
class Statement(Names):
    """One top-level statement as it was written. Comments at the end of a cell are a ``pass`` without code."""

    node: ast.stmt
    code: str  # with the comment at the end of its last line
    above: str = ""  # the comment and blank lines before it
    where: str = ""  # the cell, for messages

    @property
    def text(self) -> str:
        return f"{self.above}\n{self.code}".strip("\n")


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
    body = ast.parse(source).body
    firsts = [
        min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) for node in body
    ]
    statements: list[Statement] = []
    done = 0  # so many lines belong to statements already
    for node, first, following in zip(body, firsts, [*firsts[1:], len(lines) + 1], strict=False):
        last = node.end_lineno or first
        rest = lines[last - 1].encode()[node.end_col_offset :].decode()  # ast's columns count bytes
        if first <= done or following <= last:  # a semicolon: the line has other statements
            code = ast.unparse(node) + (rest if following > last else "")
        elif hasattr(node, "body") and (inside := INSIDE.match("\n".join(lines[last : following - 1]))):
            code = "\n".join([*lines[first - 1 : last], inside[0]])
            last += inside[0].count("\n") + 1
        else:
            code = "\n".join(lines[first - 1 : last])
        above = "\n".join(lines[done : first - 1])
        statements.append(Statement(**vars(names_of(code)), node=node, code=code, above=above, where=where))
        done = last
    above = "\n".join(lines[done:])
    end = Statement(**vars(names_of("")), node=ast.Pass(), code="", above=above, where=where)
    return [*statements, end] if above.strip() else statements


def singly(statement: Statement) -> list[Statement]:
    """The statement; in place of an import of several names, an import for each."""
    node = statement.node
    if not isinstance(node, IMPORT) or len(node.names) == 1:
        return [statement]
    lines = [statement.above]
    for alias in node.names:
        single = (
            ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], node.level)
        )
        lines.append(ast.unparse(single))
    return split("\n".join(lines), statement.where)


def modules_of(node: ast.AST) -> list[str]:
    """The modules that an import takes, or takes names from; none for another node."""
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
