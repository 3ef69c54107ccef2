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
    binds: set[str] = field(init=False, default_factory=set)  # the global names that it binds
    reads: set[str] = field(init=False, default_factory=set)  # those that it reads, also in its functions
    needs: set[str] = field(init=False, default_factory=set)  # those of them that it reads when it is executed
    local_names: set[str] = field(init=False, default_factory=set)  # of its functions, classes and comprehensions

    def __post_init__(self) -> None:
        """Take the names from the bytecode."""
        for scope, is_executed in scopes(compiled(self.code)):
            self.local_names.update(scope.co_varnames, scope.co_cellvars)
            class_names = set(IMPLICIT)  # what the body of a class binds, it does not read from outside
            for step in dis.get_instructions(scope):
                if step.argval in OF_ANNOTATIONS:
                    continue
                if step.opname in STORES + DELETES:
                    is_global = step.opname.endswith("_GLOBAL") or scope.co_name == "<module>"
                    if is_global:
                        self.binds.add(step.argval)
                    else:
                        class_names.add(step.argval)
                if step.opname in LOADS + DELETES and step.argval not in class_names:
                    self.reads.add(step.argval)
                    if is_executed:
                        self.needs.add(step.argval)
            self.local_names.update(class_names)

    @property
    def text(self) -> str:
        return f"{self.above}\n{self.code}".strip("\n")


def compiled(code: str) -> CodeType:
    """The code of a module. Raises SyntaxError, for a null byte too, and for half of a character."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" is for the reader to correct
        try:
            return compile(code, "cell", "exec", dont_inherit=True)
        except ValueError as error:
            raise SyntaxError(str(error)) from None


def scopes(code: CodeType, is_executed: bool = True) -> Iterator[tuple[CodeType, bool]]:
    """The code and the functions and classes in it, each with whether it is executed when the whole code is.

    A class's body is. So are comprehensions, which have code of their own up to Python 3.11, and a lambda may be.
    """
    yield code, is_executed
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            is_function = inner.co_flags & inspect.CO_OPTIMIZED and not inner.co_name.startswith("<")
            yield from scopes(inner, is_executed and not is_function)


def split(source: str, where: str = "") -> list[Statement]:
    """The top-level statements of a source text, in order; an import of several names is one for each name.

    Raises SyntaxError.
    """
    compiled(source)  # ast.parse takes a `return` outside a function, and more
    body = ast.parse(source).body
    lines = source.split("\n")
    first_lines = [first_line_of(node) for node in body]
    statements: list[Statement] = []
    done = 0  # so many lines belong to the statements before
    next_lines = [*first_lines[1:], len(lines) + 1]
    for node, first, next_first in zip(body, first_lines, next_lines, strict=False):
        last = node.end_lineno or first
        code = "\n".join(lines[first - 1 : last])
        if next_first <= last:  # a semicolon and the next statement follow on the last line
            code = ast.get_source_segment(source, node) or code
        elif first <= done:  # this statement stands behind a semicolon; ast's columns count bytes
            code = code.encode()[node.col_offset :].decode()
        above = "\n".join(lines[done : first - 1])
        if isinstance(node, IMPORT) and len(node.names) > 1:
            for alias in node.names:
                single = type(node)(**{**dict(ast.iter_fields(node)), "names": [alias]})
                statements.append(Statement(single, ast.unparse(single), above, where))
                above = ""
        else:
            statements.append(Statement(node, code, above, where))
        done = last
    comments = "\n".join(lines[done:])
    if comments.strip():
        statements.append(Statement(ast.Pass(), "", comments, where))
    return statements


def first_line_of(node: ast.stmt) -> int:
    """The number of a statement's first line, which may be a decorator's."""
    decorators = getattr(node, "decorator_list", [])
    return min(part.lineno for part in [node, *decorators])


def in_strings(code: str) -> set[int]:
    """The numbers, from 1, of lines that begin inside a string."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            last = node.end_lineno or node.lineno
            numbers.update(range(node.lineno + 1, last + 1))
    return numbers


def packages_of(node: ast.AST) -> set[str]:
    """The packages that an import takes something of; none for another node."""
    if isinstance(node, ast.ImportFrom):
        if node.level:  # a relative import names no package
            return {""}
        return {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return set()
