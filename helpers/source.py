"""Python source as top-level statements, for ``%%ranks`` and the export: their comments, and the global names in them.

It imports the standard library alone. The code is compiled, and never executed.
"""

import ast
import copy
import dis
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType

IMPORT = ast.Import | ast.ImportFrom
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ANNOTATION_NAMES = {"__annotate__", "__conditional_annotations__"}  # from Python 3.14 on the compiler adds these names
IMPLICIT_NAMES = {"__name__", "__annotations__"}  # the compiler adds these names to a class and to annotations
# The names of the bytecode instructions that read a name, assign to it and delete it. The third of LOADS is in the body
# of a class, from Python 3.12 on.
LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
STORES = ("STORE_NAME", "STORE_GLOBAL")
DELETES = ("DELETE_NAME", "DELETE_GLOBAL")
# `del x` changes which names are bound, and it fails unless x exists. So it counts as a binding and as a reading.
BINDINGS = (*STORES, *DELETES)
READINGS = (*LOADS, *DELETES)


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written. Comments at the end of a cell are a ``pass`` without code.

    For example, the function ``def f(): return x`` binds f, and reads x, but does not need it before it is called.
    """

    node: ast.stmt
    code: str  # with the comment at the end of its last line
    above: str = ""  # the comment and blank lines before it
    where: str = ""  # the cell that it is from, as messages name it
    binds: set[str] = field(init=False, default_factory=set)  # global names that it assigns, defines or deletes
    reads: set[str] = field(init=False, default_factory=set)  # global names that it reads, also in its functions
    needs: set[str] = field(init=False, default_factory=set)  # those of `reads` that must exist when it is executed
    local_names: set[str] = field(init=False, default_factory=set)  # of its functions, classes and comprehensions

    def __post_init__(self) -> None:
        """Fill in the sets of names from the bytecode, in which the compiler has told global names from local ones."""
        for scope, runs_with_statement in scopes(compiled(self.code)):
            names_bound_in_class = self.add_names_of(scope, runs_with_statement)
            self.local_names.update(scope.co_varnames, scope.co_cellvars, names_bound_in_class)

    def add_names_of(self, scope: CodeType, runs_with_statement: bool) -> set[str]:
        """Add the global names that one code object binds, reads and needs; return those that are names of a class.

        Each bytecode instruction says by its name where it looks a name up. LOAD_GLOBAL looks among the global names.
        LOAD_NAME, which functions do not have, looks in the scope that is executed. In a module these are the global
        names. In the body of a class it is the class, once the body has bound the name there, and before that the
        global names.
        """
        is_module = scope.co_name == "<module>"
        bound_in_class = set(IMPLICIT_NAMES)
        for instruction in dis.get_instructions(scope):
            name = instruction.argval
            if name in ANNOTATION_NAMES:
                continue
            if instruction.opname in BINDINGS:
                binds_global_name = is_module or instruction.opname.endswith("_GLOBAL")
                if binds_global_name:
                    self.binds.add(name)
                else:
                    bound_in_class.add(name)
            if instruction.opname in READINGS and name not in bound_in_class:
                self.reads.add(name)
                if runs_with_statement:
                    self.needs.add(name)
        return bound_in_class

    @property
    def text(self) -> str:
        """The statement as it was written, with the comments above it."""
        return f"{self.above}\n{self.code}".strip("\n")


def compiled(code: str) -> CodeType:
    """Compile the text of a module. Raises SyntaxError where it is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compile() warns of "\d", which the author of the cell has to correct
        try:
            return compile(code, "cell", "exec", dont_inherit=True)
        except ValueError as error:  # for a surrogate, which UTF-8 cannot encode; on some versions for a null byte
            raise SyntaxError(str(error)) from None


def scopes(code: CodeType, is_executed: bool = True) -> Iterator[tuple[CodeType, bool]]:
    """Yield (code object, whether it runs as soon as the statement does), for the code object itself and all inside it.

    Those inside are the bodies of its functions, classes and comprehensions. The body of a class runs with the
    statement, and so does a comprehension, which has a code object of its own up to Python 3.11. The body of a function
    waits for a call. A lambda is taken to run at once, because the statement itself often calls it, as sorted() calls
    its key.
    """
    yield code, is_executed
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            # The compiler sets this flag for functions, lambdas and comprehensions, and not for classes.
            has_function_flag = bool(inner.co_flags & inspect.CO_OPTIMIZED)
            is_lambda_or_comprehension = inner.co_name.startswith("<")  # its name is <lambda>, <listcomp> and so on
            waits_for_call = has_function_flag and not is_lambda_or_comprehension
            yield from scopes(inner, is_executed and not waits_for_call)


def split(source: str, where: str = "") -> list[Statement]:
    """Split a source text into its top-level statements, in order. Raises SyntaxError where it is not Python.

    An import of several names becomes one statement for each name, so that a script can take only the names it uses.
    ``where`` names the cell in messages.
    """
    compiled(source)  # this finds errors that ast.parse lets pass, such as a `return` outside a function
    nodes = ast.parse(source).body
    lines = source.split("\n")
    first_lines = [first_line_of(node) for node in nodes]  # numbers of lines, from 1, as are the others below
    statements: list[Statement] = []
    last_before = 0  # the last line of the statement before
    for index, node in enumerate(nodes):
        first = first_lines[index]
        last = node.end_lineno or first
        code = "\n".join(lines[first - 1 : last])
        # Statements with semicolons between them share a line, as in "x = 1; y = 2  # both".
        shares_last_line = index + 1 < len(nodes) and first_lines[index + 1] <= last
        shares_first_line = first <= last_before
        if shares_last_line:
            code = ast.get_source_segment(source, node) or code  # without what follows the semicolon: "x = 1"
        elif shares_first_line:
            # Without what precedes the statement: "y = 2  # both". ast counts a column in bytes.
            code = code.encode()[node.col_offset :].decode()
        lines_above = lines[last_before : first - 1]
        comment_above = "\n".join(lines_above)
        if lines_above == [""]:  # a blank line alone, whose text is empty
            comment_above = "\n"
        if isinstance(node, IMPORT) and len(node.names) > 1:
            statements += statements_of_import(node, comment_above, where)
        else:
            statements.append(Statement(node, code, comment_above, where))
        last_before = last
    comments_at_end = "\n".join(lines[last_before:])
    if comments_at_end.strip():
        statements.append(Statement(ast.Pass(), "", comments_at_end, where))
    return statements


def statements_of_import(node: ast.Import | ast.ImportFrom, above: str, where: str) -> list[Statement]:
    """An import of several names as one statement for each name. The comment above it stays with the first one.

    For example ``import math, os`` becomes ``import math`` and ``import os``.
    """
    statements = []
    for alias in node.names:
        single = copy.copy(node)
        single.names = [alias]
        statements.append(Statement(single, ast.unparse(single), above, where))
        above = ""
    return statements


def first_line_of(node: ast.stmt) -> int:
    """The number of a statement's first line, which may be a decorator's."""
    decorators = getattr(node, "decorator_list", [])  # only definitions have any
    return min(part.lineno for part in [node, *decorators])


def in_strings(code: str) -> set[int]:
    """The numbers, from 1, of lines that begin inside a string that has more than one line."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            first_line = node.lineno
            last_line = node.end_lineno or first_line
            numbers.update(range(first_line + 1, last_line + 1))
    return numbers


def packages_of(node: ast.AST) -> set[str]:
    """The packages that an import takes something of: {"torch"} for ``import torch.nn``. Other nodes have none."""
    if isinstance(node, ast.ImportFrom):
        is_relative = node.level > 0  # as ``from . import x``, which names no package
        if is_relative:
            return {""}
        return {(node.module or "").partition(".")[0]}
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return set()
