"""Python source as top-level statements, for ``%%ranks`` and the export: their comments, and the global names in them.

It imports the standard library alone. The code is compiled, and never executed.
"""

import ast
import dis
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType

IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
OF_ANNOTATIONS = {"__annotate__", "__conditional_annotations__"}  # which Python binds by itself from 3.14 on
IMPLICIT = {"__name__", "__annotations__"}  # which the code of a class or of an annotation reads by itself
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")  # the last: in a class, from Python 3.12 on
STORES = ("STORE_NAME", "STORE_GLOBAL")
DELETES = ("DELETE_NAME", "DELETE_GLOBAL")  # they need the name, as a load does, and bind it anew, as a store does


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written. Comments at the end of a cell are a ``pass`` without code."""

    node: ast.stmt
    code: str  # with the comment at the end of its last line
    above: str = ""  # the comment and blank lines before it
    where: str = ""  # the cell, for messages
    binds: set[str] = field(init=False, default_factory=set)  # global names, here and in the next two
    reads: set[str] = field(init=False, default_factory=set)  # by itself or in its functions
    needs: set[str] = field(init=False, default_factory=set)  # reads at once: without what its functions read
    own: set[str] = field(init=False, default_factory=set)  # what its functions, classes and comprehensions bind

    def __post_init__(self) -> None:
        """Take the names from the bytecode."""
        for scope, at_once in scopes(compiled(self.code)):
            self.own.update(scope.co_varnames, scope.co_cellvars)
            of_class = set(IMPLICIT)  # what the body of a class binds, it does not read from outside
            for step in dis.get_instructions(scope):
                if step.argval in OF_ANNOTATIONS:
                    continue
                if step.opname in STORES + DELETES:
                    is_global = step.opname.endswith("_GLOBAL") or scope.co_name == "<module>"
                    (self.binds if is_global else of_class).add(step.argval)
                if step.opname in LOADS + DELETES and step.argval not in of_class:
                    self.reads.add(step.argval)
                    if at_once:
                        self.needs.add(step.argval)
            self.own.update(of_class)

    @property
    def text(self) -> str:
        return f"{self.above}\n{self.code}".strip("\n")


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


def split(source: str, where: str = "") -> list[Statement]:
    """The top-level statements of a source text, in order; an import of several names is one for each name.

    Raises SyntaxError.
    """
    compiled(source)  # ast.parse takes a `return` outside a function, and more
    lines, statements = source.split("\n"), list[Statement]()
    body = ast.parse(source).body
    firsts = [min(part.lineno for part in (node, *getattr(node, "decorator_list", ()))) for node in body]
    done = 0  # so many lines belong to statements already
    for node, first, following in zip(body, firsts, [*firsts[1:], len(lines) + 1], strict=False):
        last = node.end_lineno or first
        code = "\n".join(lines[first - 1 : last])
        if following <= last:  # the next statement stands behind a semicolon
            code = ast.get_source_segment(source, node) or code
        elif first <= done:  # this one does
            code = code.encode()[node.col_offset :].decode()  # ast's columns count bytes
        above = "\n".join(lines[done : first - 1])
        if isinstance(node, IMPORT) and len(node.names) > 1:
            for alias in node.names:
                single = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                statements.append(Statement(single, ast.unparse(single), above, where))
                above = ""
        else:
            statements.append(Statement(node, code, above, where))
        done = last
    above = "\n".join(lines[done:])
    return [*statements, Statement(ast.Pass(), "", above, where)] if above.strip() else statements


def in_strings(code: str) -> set[int]:
    """The numbers, from 1, of lines that begin inside a string."""
    strings = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant | ast.JoinedStr)]
    return {number for node in strings for number in range(node.lineno + 1, (node.end_lineno or 0) + 1)}


def packages_of(node: ast.AST) -> set[str]:
    """The packages that an import takes something of; none for another node."""
    if isinstance(node, ast.ImportFrom):
        return {"" if node.level else (node.module or "").partition(".")[0]}
    return {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
