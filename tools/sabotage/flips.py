"""Find asserts that cannot fail: ``make sabotage ARGS=--asserts=04,05``.

Every assert of a notebook is rewritten to call ``recorder.check``: in the kernel, in ``%%ranks``, and in functions that
ranks run. Then the notebook runs once. With each assert go variants of its condition, which should not hold: with a
comparison reversed, or with a wrong number, which is 10 % off where two numbers have to be equal, and twice or half as
large where one has to be above a bound. The table names the asserts whose variants hold or that were never reached.
"""

import ast
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import torch
from ipc_kernels import SocketKernelManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
# Functions without side effects, which run nothing on ranks: only they are called again with a wrong number.
PURE = set(
    "abs all allclose any cosine_similarity count differ double enumerate equal float index int isclose item items "
    "keys largest_difference len list max mean min norm numel range round set sorted sqrt sub sum tolist total tuple "
    "unique values zip".split()
)
MODULES = {"torch", "F", "math"}
CLOSE = ("allclose", "isclose", "differ", "largest_difference", "abs(")
ROUNDING = 1e-3  # a smaller bound allows for float32's rounding, and the measured error may be far below it
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


@dataclass(frozen=True)
class Site:
    """One assert: its cell, its condition, and what is wrong with it before it runs."""

    cell: str
    text: str
    flaws: tuple[str, ...]


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


class Once(ast.NodeTransformer):
    """Turns calls that are not pure into ``_once("call", lambda: call)``: all variants share what they return."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if name_of(node.func) in PURE or name_of(node.func) == "_wrong":
            return self.generic_visit(node)
        call = ast.unparse(node)
        return ast.parse(f"_once({call!r}, lambda: {call})", mode="eval").body


def in_lambda(condition: str) -> str:
    return f"lambda _once, _wrong: {ast.unparse(Once().visit(ast.parse(condition, mode='eval')))}"


def substitutes(condition: str, node: ast.expr, *texts: str) -> list[str]:
    """The condition, which is one line, with the node replaced by each text, as lambdas. PART stands for the node."""
    line = condition.encode()
    before, part, after = (
        line[start:end].decode()
        for start, end in [(0, node.col_offset), (node.col_offset, node.end_col_offset), (node.end_col_offset, None)]
    )
    return [in_lambda(f"{before}({text.replace('PART', f'({part})')}){after}") for text in texts]


def inside(node: ast.AST) -> ast.GeneratorExp | ast.ListComp | None:
    """The comprehension in all(…) or any(…)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("all", "any"):
        return node.args[0] if isinstance(node.args[0], ast.GeneratorExp | ast.ListComp) else None
    return None


def parts(node: ast.expr, within: str = "all") -> Iterator[tuple[ast.expr, str]]:
    """(part, all, any, or, or not) of a condition: what is true or false by itself, and in which kind it stands."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from parts(value, "or" if isinstance(node.op, ast.Or) else within)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from parts(node.operand, "not")
    elif isinstance(node, ast.IfExp):
        yield from (*parts(node.body, within), *parts(node.orelse, within))
    elif comprehension := inside(node):
        yield from parts(comprehension.elt, within if ast.unparse(node).startswith("all") else "any")
    else:
        yield node, within


def numbers(node: ast.expr) -> Iterator[ast.expr]:
    """The parts of a comparison in which a number may stand: names, constants, calls that are not pure."""
    if isinstance(node, ast.Call) and name_of(node.func) in PURE and name_of(node.func) != "len":
        inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute) and name_of(node.func.value) not in MODULES:
            inner.append(node.func.value)
    elif isinstance(node, ast.Compare | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List | ast.Dict | ast.Starred):
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    else:
        yield node
        return
    for part in inner:
        yield from numbers(part)


def variants(condition: str) -> Iterator[tuple[str, list[str]]]:
    """(what is wrong with the assert if each of these conditions holds, the conditions)."""
    test = ast.parse(condition, mode="eval").body
    for node in ast.walk(test):
        if (comprehension := inside(node)) and ast.unparse(node).startswith("all"):
            yield f"over nothing: {ast.unparse(node)}", substitutes(condition, comprehension.elt, "False")
    for part, within in parts(test):
        text, operators = ast.unparse(part), getattr(part, "ops", [])
        if within != "or" or not any(isinstance(operator, ast.In) for operator in operators):  # one of several wordings
            yield f"flipped still holds: {text}", substitutes(condition, part, "not PART", "False", "True")
        close = any(word in text for word in CLOSE) and ">" not in text
        if within == "all" and (close or has_bound(part)):
            wrong = [f"_wrong(PART, {factor})" for factor in ((1.1, 0.9) if close else (2, 0.5))]
            label = f"{'10 % off' if close else 'a number twice too large or small'} still holds: {text}"
            yield label, [flip for node in numbers(part) for flip in substitutes(condition, node, *wrong)]


def has_bound(part: ast.expr) -> bool:
    """Whether the part is < or > with a bound that it should not hold by far: not 0, 1, nor one for rounding."""
    if not isinstance(part, ast.Compare) or not any(isinstance(operator, ORDERS) for operator in part.ops):
        return False
    sides = [side.value for side in (part.left, *part.comparators) if isinstance(side, ast.Constant)]
    return any(isinstance(side, int | float) and side > ROUNDING and side != 1 for side in sides)


def rewrite(cell: nbformat.NotebookNode, sites: dict[str, Site]) -> str:
    """The cell's source with each assert as a call of the recorder, on the same lines. Adds asserts to ``sites``."""
    magic, source = re.match(r"(%%.*\n)?(.*)", cell.source, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    plain = re.sub(r"^([ \t]*)(\w+ = )?[!%].*", r"\1pass", source, flags=re.MULTILINE)
    try:
        body = ast.parse(plain)
    except SyntaxError:  # a cell in another language
        return cell.source
    skipped, elsewhere = set(skipped_unnoticed(body)), set(of_other_versions(body))
    asserts = [node for node in ast.walk(body) if isinstance(node, ast.Assert) and node not in elsewhere]
    lines = source.encode().split(b"\n")
    for number, node in sorted(enumerate(asserts), key=lambda pair: pair[1].lineno, reverse=True):
        condition, site = ast.unparse(node.test), f"{cell.id} {number}"
        flaws = ["passes where nothing is raised"] if node in skipped else []
        if not any(isinstance(part, ast.Name) for part in ast.walk(node.test)):
            flaws.append("compares constants alone")
        sites[site] = Site(cell.id, condition, tuple(flaws))
        groups = [f"{label!r}: [{', '.join(conditions)}]" for label, conditions in variants(condition)]
        message = f", lambda: {ast.unparse(node.msg)}" if node.msg else ""
        call = f"__import__('recorder').check({site!r}, {in_lambda(condition)}, {{{', '.join(groups)}}}{message}"
        first, last = node.lineno - 1, (node.end_lineno or 0) - 1
        call += "\n" * (last - first) + ")"  # tracebacks and dumps keep their lines
        new = lines[first][: node.col_offset] + call.encode() + lines[last][node.end_col_offset :]
        lines[first : last + 1] = new.split(b"\n")
    return magic + b"\n".join(lines).decode()


def of_other_versions(body: ast.Module) -> Iterator[ast.AST]:
    """All nodes of the branches that ``if torch.__version__ …`` does not take under this version."""
    for node in ast.walk(body):
        if isinstance(node, ast.If) and re.fullmatch(r"torch\.__version__ [<>]=? '[\d.]+'", ast.unparse(node.test)):
            for statement in node.orelse if eval(ast.unparse(node.test), {"torch": torch}) else node.body:
                yield from ast.walk(statement)


def skipped_unnoticed(body: ast.Module) -> Iterator[ast.AST]:
    """All nodes of except clauses that are skipped unnoticed where nothing is raised: the try has no else."""
    for node in ast.walk(body):
        if isinstance(node, ast.Try) and not node.orelse:
            for clause in node.handlers:
                yield from ast.walk(clause)


def survey(path: Path) -> list[tuple[str, str, str]]:
    """Run a notebook: [(cell, assert, what is wrong)]. A cell that failed has one row, with an empty assert."""
    nb = nbformat.read(path, as_version=4)
    sites: dict[str, Site] = {}
    for cell in nb.cells:
        if cell.cell_type == "code" and "assert" in cell.source:
            cell.source = rewrite(cell, sites)
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as record:
        searched = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        os.environ.update(FLIPS_RECORD=record.name, PYTHONPATH=searched)
        NotebookClient(
            nb, timeout=1200, kernel_name="python3", kernel_manager_class=SocketKernelManager, allow_errors=True,
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()  # fmt: skip
        reports = [json.loads(line) for line in record]
    rows, failed = [], set()
    for cell in nb.cells:
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if errors and "raises-exception" not in cell.metadata.get("tags", []):
            failed.add(cell.id)
            rows.append((cell.id, "", f"failed: {errors[0].ename}: {errors[0].evalue}"))
    for site, entry in sites.items():
        holding = [set(report["holding"]) for report in reports if report["site"] == site]
        wrong = set.intersection(*holding) if holding else set() if entry.cell in failed else {"never reached"}
        if nothing := {flaw for flaw in wrong if flaw.startswith("over nothing")}:
            wrong = nothing  # then nothing in it can fail
        rows += [(entry.cell, entry.text, flaw) for flaw in (*entry.flaws, *sorted(wrong))]
    return rows


def main(paths: list[Path]) -> bool:
    """Print the table of these notebooks; whether it has a row."""
    count = 0
    for path in paths:
        for cell, text, flaw in survey(path):
            count += 1
            print(f"{path.stem:22} {cell:22} {'assert ' * bool(text)}{text}\n{'':45} {flaw}", flush=True)
    print(f"{count} findings in {len(paths)} notebooks")
    return count > 0
