"""Four rules that keep code plain, and the list of exceptions, which later work empties.

``python tests/support/plain_code.py --write`` writes the list anew, and ``git diff`` then shows what was added to it.
A linter has no such rules: ruff's ask for shorter code where these ask for plainer code.
"""

import argparse
import ast
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS = ROOT / "tests" / "plain_code_exceptions.txt"
SOURCES = ("conftest.py", "helpers/**/*.py", "tools/**/*.py", "notebooks/*.ipynb")
STATEMENT_WIDTH = 100  # so much of a statement is listed
HEAD = """\
# What broke a rule of tests/support/plain_code.py when the rules came. Write new code plainly and add nothing here.
# After you rewrote a line, take its exception out: python tests/support/plain_code.py --write
# place: rule: the beginning of the statement
"""

# --- what each rule looks for in a syntax tree ------------------------------------------------------------------------

ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow)
RETURN_A_BOOL = {"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"}


def is_condition(node: ast.expr) -> bool:
    """Whether an expression looks like a condition: ``not done``, ``isinstance(x, int)``, ``a < b``, ``a or b``."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in RETURN_A_BOOL
    return isinstance(node, (ast.Compare, ast.BoolOp))


def calculates_with_a_condition(node: ast.AST) -> bool:
    """Whether a node is such as ``base + (rank == 0)``, ``"a" * (rank > 1)``, or ``count += rank == 0``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ARITHMETIC):
        return is_condition(node.left) or is_condition(node.right)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ARITHMETIC):
        return is_condition(node.value)
    return False


def contains(node: ast.AST, kind: type[ast.AST]) -> bool:
    """Whether a node of this kind is somewhere inside ``node``."""
    return any(isinstance(part, kind) for part in ast.walk(node) if part is not node)


def assigns_in_arguments(node: ast.AST) -> bool:
    """Whether a node is a call such as ``divmod(size, ranks := count())``."""
    if not isinstance(node, ast.Call):
        return False
    for argument in [*node.args, *node.keywords]:
        if isinstance(argument, ast.NamedExpr) or contains(argument, ast.NamedExpr):
            return True
    return False


def nests_conditional_expressions(node: ast.AST) -> bool:
    """Whether a node is such as ``a if b else c if d else e``."""
    return isinstance(node, ast.IfExp) and contains(node, ast.IfExp)


def parts_of(node: ast.expr) -> list[ast.expr]:
    """The values in a tuple or a list that is written out: x, y and z of ``(x, [y, z])``. Else the node itself."""
    if not isinstance(node, (ast.Tuple, ast.List)):
        return [node]
    parts = []
    for element in node.elts:
        parts += parts_of(element)
    return parts


def packs_more_than_two_values(node: ast.AST) -> bool:
    """Whether a node is an assignment such as ``x, y, z = 1, 2, 3``.

    The parts of a call's result are one value, and ``a, b, c = b, c, a`` exchanges values: both are fine.
    """
    if not isinstance(node, ast.Assign):
        return False
    values = [ast.unparse(part) for part in parts_of(node.value)]
    for target in node.targets:
        names = [ast.unparse(part) for part in parts_of(target)]
        exchange = sorted(names) == sorted(values)
        if len(names) > 2 and len(values) > 2 and not exchange:
            return True
    return False


@dataclass(frozen=True)
class Rule:
    """``breaks`` is true of a node of the syntax tree that breaks the rule, and ``plain`` shows what to write."""

    name: str
    breaks: Callable[[ast.AST], bool]
    plain: str


RULES = (
    Rule(
        "arithmetic with a condition",
        calculates_with_a_condition,
        """
        # not: lines = base + extra * (rank == 0)
        lines = base
        if rank == 0:
            lines += extra

        # A default, or a mask of a tensor, gets a name first; not: total / (count or 1)
        divisor = count or 1
        mean = total / divisor
        """,
    ),
    Rule(
        ":= in a call's arguments",
        assigns_in_arguments,
        """
        # not: share = divmod(batch_size, world_size := dist.get_world_size())
        world_size = dist.get_world_size()
        share = divmod(batch_size, world_size)
        """,
    ),
    Rule(
        "conditional expression inside another",
        nests_conditional_expressions,
        """
        # not: name = "first" if rank == 0 else "last" if rank == last else "inner"
        if rank == 0:
            name = "first"
        elif rank == last:
            name = "last"
        else:
            name = "inner"
        """,
    ),
    Rule(
        "more than two values in one assignment",
        packs_more_than_two_values,
        """
        # not: left, top, width = 70, 56, 560
        left = 70
        top = 56
        width = 560
        """,
    ),
)

# --- where the rules are broken ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A Python file or a code cell. ``place`` is its path, for a cell with its id: notebooks/04_ddp.ipynb#loader."""

    place: str
    text: str


@dataclass(frozen=True)
class Finding:
    """``statement`` is the beginning of the statement that breaks the rule, and ``code`` the part of it that does."""

    place: str
    line: int
    source_line: str
    rule: Rule
    statement: str
    code: str

    @property
    def exception(self) -> str:
        """The finding as a line of the list of exceptions. It has no line number, because lines move."""
        return f"{self.place}: {self.rule.name}: {self.statement}"

    @property
    def message(self) -> str:
        plain = textwrap.indent(textwrap.dedent(self.rule.plain).strip(), "    ")
        return f"{self.place}:{self.line}: {self.rule.name}\n    {self.source_line}\n  The plain form:\n{plain}"


def python_of(cell: str) -> str:
    """The text of a cell with ``pass`` in place of its magics, so that the other lines keep their numbers."""
    return re.sub(r"(?m)^[%!].*", "pass", cell)


def all_sources() -> Iterator[Source]:
    """Yields the code to which the rules apply: each Python file, and each code cell of a notebook.

    Exported scripts are not among it, because their code comes from the cells and from helpers/runtime.
    """
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".py":
                yield Source(place, text)
                continue
            for cell in json.loads(text)["cells"]:
                if cell["cell_type"] == "code":
                    yield Source(f"{place}#{cell['id']}", python_of("".join(cell["source"])))


def with_statements(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.AST, ast.stmt | None]]:
    """Yields each node below this one with the innermost statement that contains it.

    ``statement`` is the innermost one that contains ``node``; None for a whole file.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            statement_of_child = child
        else:
            statement_of_child = statement
        yield child, statement_of_child
        yield from with_statements(child, statement_of_child)


def findings(source: Source) -> Iterator[Finding]:
    """Yields a Finding for each place of a source that breaks a rule."""
    lines = source.text.splitlines()
    for node, statement in with_statements(ast.parse(source.text, source.place)):
        for rule in RULES:
            if rule.breaks(node):
                lines_of_statement = lines[statement.lineno - 1 : statement.end_lineno]
                on_one_line = " ".join(" ".join(lines_of_statement).split())
                yield Finding(
                    place=source.place,
                    line=node.lineno,
                    source_line=lines[node.lineno - 1].strip(),
                    rule=rule,
                    statement=on_one_line[:STATEMENT_WIDTH].strip(),
                    code=ast.unparse(node),
                )


def all_findings() -> list[Finding]:
    """What breaks a rule in all of the project's code."""
    found = []
    for source in all_sources():
        found += findings(source)
    return found


# --- the list of exceptions -------------------------------------------------------------------------------------------


def exceptions_of(found: list[Finding]) -> Counter[str]:
    """The findings as lines of the list. A statement that breaks a rule twice is counted twice."""
    return Counter(finding.exception for finding in found)


def listed() -> Counter[str]:
    """The exceptions that are listed."""
    lines = EXCEPTIONS.read_text(encoding="utf-8").splitlines()
    return Counter(line for line in lines if line and not line.startswith("#"))


def write_exceptions(found: list[Finding]) -> None:
    """Write the list anew."""
    lines = [*HEAD.splitlines(), *sorted(exceptions_of(found).elements())]
    EXCEPTIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", required=True, help="write the list of exceptions anew")
    parser.parse_args()
    write_exceptions(all_findings())
