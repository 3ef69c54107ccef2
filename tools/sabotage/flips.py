"""Find asserts that cannot fail: ``PYTHONPATH=tools python -m sabotage.flips [notebooks/04_ddp.ipynb …]``.

Every assert of a notebook is rewritten to call ``recorder.check``: in the kernel, in ``%%ranks``, and in functions that
ranks run. Then the notebook runs once. The table names each assert that was never reached, that would hold with a
comparison reversed, or that would hold with a wrong number: 10 % off where two numbers have to be equal, twice or half
as large where one has to be above a bound. ``--again`` prints the table of the last runs.
"""

import ast
import copy
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import torch
from ipc_kernels import SocketKernelManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
NOTEBOOKS = HERE.parents[1] / "notebooks"
RECORDS = Path(tempfile.gettempdir(), "flips")
RECORDER = "__import__('recorder')"
OPERATORS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
ORDERS = {"<", "<=", ">", ">="}
# Functions without side effects, which run nothing on ranks: they are called again with a wrong number.
PURE = set(
    "abs all allclose any cosine_similarity count differ double enumerate equal float index int isclose item items "
    "keys largest_difference list max mean min norm numel range round set sorted sqrt sub sum tolist total tuple "
    "unique values zip".split()
)
MODULES = {"torch", "F", "math"}
COMPREHENSIONS = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
CLOSE = ("allclose", "isclose", "differ", "largest_difference", "abs(")
NOTICED = ["1", "5 %", "10 %", "x2", "x10", "none"]
ROUNDING = 1e-3  # a smaller bound allows for float32's rounding, and the measured error may be far below it


class Leaves(ast.NodeTransformer):
    """Replaces the leaves of one side of a comparison by the names ``_0, _1, …``, and lists them in ``found``."""

    def __init__(self):
        self.found, self.bound = [], set()

    def leaf(self, node):
        if self.bound & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}:
            return self.generic_visit(node)
        if isinstance(node, ast.GeneratorExp):  # a generator could be read once only
            node = ast.ListComp(node.elt, node.generators)
        self.found.append(ast.unparse(node))
        return ast.Name(f"_{len(self.found) - 1}", ast.Load())

    def visit(self, node):
        if isinstance(node, ast.Call) and is_pure(node):
            if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) not in MODULES:
                node.func.value = self.visit(node.func.value)
            node.args = [self.visit(one) for one in node.args]
            node.keywords = [ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords]
            return node
        if isinstance(node, COMPREHENSIONS) and all(map(is_pure, ast.walk(node))):
            outer = self.bound
            targets = [name for part in node.generators for name in ast.walk(part.target)]
            self.bound = outer | {name.id for name in targets if is_name(name)}
            node = self.generic_visit(node)
            self.bound = outer
            return node
        if isinstance(node, ast.Name) and node.id in self.bound:
            return node
        if isinstance(node, ast.Constant):
            return self.leaf(node) if type(node.value) in (int, float) else node
        kept = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.Slice)
        if isinstance(node, ast.expr) and not isinstance(node, kept):
            return self.leaf(node)
        return self.generic_visit(node)


def is_name(node):
    return isinstance(node, ast.Name)


def is_pure(node):
    """Whether a node may be evaluated again: it is not a call, or it calls a function without side effects."""
    if not isinstance(node, ast.Call):
        return True
    return (node.func.id if is_name(node.func) else getattr(node.func, "attr", "")) in PURE


class Tree:
    """Writes the source of the recorder's tree for one condition. ``parts`` is {number of a part: (text, kind)}."""

    def __init__(self):
        self.parts = {}

    def side(self, node):
        leaves = Leaves()
        expression = ast.unparse(leaves.visit(copy.deepcopy(node)))
        names = ", ".join(f"_{index}" for index in range(len(leaves.found)))
        return f"{RECORDER}.Value({', '.join([f'lambda {names}: {expression}', *leaves.found])})"

    def of(self, node, within="all"):
        number = len(self.parts)
        make, text = f"{RECORDER}.", ast.unparse(node)
        if isinstance(node, ast.BoolOp):
            kind = "and" if isinstance(node.op, ast.And) else "or"
            self.parts[number] = (text, kind, within)
            lazy = ", ".join(f"lambda: {self.of(value, within)}" for value in node.values)
            return f"{make}either({number}, '{kind}', {lazy})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.parts[number] = (text, "not", within)
            return f"{make}no({number}, {self.of(node.operand, 'not')})"
        if isinstance(node, ast.IfExp):
            return f"({self.of(node.body, within)} if {ast.unparse(node.test)} else {self.of(node.orelse, within)})"
        if isinstance(node, ast.Compare):
            operators = [OPERATORS[type(one)] for one in node.ops]
            self.parts[number] = (text, "order" if ORDERS & set(operators) else operators[0], within)
            sides = ", ".join(map(self.side, [node.left, *node.comparators]))
            return f"{make}compare({number}, {operators}, {sides})"
        name = getattr(getattr(node, "func", None), "id", "")
        if name in ("all", "any") and isinstance(node.args[0], ast.GeneratorExp | ast.ListComp):
            self.parts[number] = (text, name, within)
            inner = self.of(node.args[0].elt, within if name == "all" else name)
            loops = ast.unparse(ast.ListComp(ast.Constant(0), node.args[0].generators)).removeprefix("[0")
            return f"{make}many({number}, '{name}', [{inner}{loops})"
        self.parts[number] = (text, "truth", within)
        return f"{make}truth({number}, {self.side(node)})"


def rewrite(cell, sites):
    """The cell's source with each assert as a call of the recorder, on the same lines. Adds asserts to ``sites``."""
    magic, source = re.match(r"(%%.*\n)?(.*)", cell.source, re.DOTALL).groups(default="")
    plain = re.sub(r"^([ \t]*)(\w+ = )?[!%].*", r"\1pass", source, flags=re.MULTILINE)
    try:
        body = ast.parse(plain)
    except SyntaxError:  # a cell in another language
        return cell.source
    elsewhere = set(of_other_versions(body))
    asserts = [node for node in ast.walk(body) if isinstance(node, ast.Assert) and node not in elsewhere]
    lines = source.encode().split(b"\n")
    for number, node in sorted(enumerate(asserts), key=lambda pair: pair[1].lineno, reverse=True):
        site, tree = f"{cell.id} {number}", Tree()
        message = f", lambda: {ast.unparse(node.msg)}" if node.msg else ""
        call = f"{RECORDER}.check({site!r}, {tree.of(node.test)}{message}"
        call += "\n" * (node.end_lineno - node.lineno) + ")"  # tracebacks and dumps keep their lines
        first, last = node.lineno - 1, node.end_lineno - 1
        new = lines[first][: node.col_offset] + call.encode() + lines[last][node.end_col_offset :]
        lines[first : last + 1] = new.split(b"\n")
        sites[site] = {"text": ast.unparse(node.test), "parts": tree.parts, "guarded": node in unguarded(body)}
    return magic + b"\n".join(lines).decode()


def of_other_versions(body):
    """Yields all nodes of the branches that ``if torch.__version__ …`` does not take under this version."""
    for node in ast.walk(body):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if re.fullmatch(r"torch\.__version__ [<>]=? '[\d.]+'", test):
            for statement in node.orelse if eval(test, {"torch": torch}) else node.body:
                yield from ast.walk(statement)


def unguarded(body):
    """Yields asserts in except clauses that are skipped unnoticed where nothing is raised: the try has no else."""
    tries = [node for node in ast.walk(body) if isinstance(node, ast.Try) and not node.orelse]
    clauses = [clause for node in tries for clause in node.handlers]
    return [node for clause in clauses for node in ast.walk(clause) if isinstance(node, ast.Assert)]


def rewritten(path):
    """(the notebook with rewritten asserts, {site: what the assert's text tells})."""
    nb, sites = nbformat.read(path, as_version=4), {}
    for cell in nb.cells:
        if cell.cell_type == "code" and "assert" in cell.source:
            cell.source = rewrite(cell, sites)
    return nb, sites


def run(path):
    """Run the rewritten notebook. Its records go to a file in RECORDS; the last one lists the cells that failed."""
    nb, _ = rewritten(path)
    record = RECORDS / f"{path.stem}.jsonl"
    RECORDS.mkdir(exist_ok=True)
    record.write_text("")
    searched = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    os.environ.update(FLIPS_RECORD=str(record), PYTHONPATH=searched)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        nb, timeout=1200, kernel_name="python3", kernel_manager_class=SocketKernelManager, allow_errors=True,
        resources=resources,
    )  # fmt: skip
    client.execute()
    with record.open("a") as file:
        for cell in nb.cells:
            errors = [one for one in cell.get("outputs", []) if one.output_type == "error"]
            if errors and "raises-exception" not in cell.metadata.get("tags", []):
                file.write(json.dumps({"failed": cell.id, "error": f"{errors[0].ename}: {errors[0].evalue}"}) + "\n")


def verdicts(known, reports):
    """Yields a line for each thing that is wrong with an assert."""
    if known["guarded"]:
        yield "passes where nothing is raised"
    if not any(is_name(node) for node in ast.walk(ast.parse(known["text"]))):
        yield "compares constants alone"
    if not reports:
        yield "never reached"
        return
    for number, (text, kind, within) in known["parts"].items():
        seen = [report[str(number)] for report in reports if str(number) in report]
        if kind in ("all", "any") and seen and not any(one["parts"] for one in seen):
            yield f"over nothing: {text}"
            return
        elif not seen:
            if kind != "in":  # an `or` of texts allows for a message's wording on another platform
                yield f"never evaluated: {text}"
        elif kind not in ("all", "any", "and", "or", "not") and all(one["flip holds"] for one in seen):
            yield f"flipped still holds: {text}"
        elif within == "all" and kind not in ("!=", "in", "not in", "is", "is not"):
            seen = [one for one in seen if "noticed" in one]  # evaluations in which the comparison held a number
            least = min((one["noticed"] for one in seen), key=NOTICED.index, default="1")
            close = any(name in text for name in CLOSE) and ">" not in text
            if NOTICED.index(least) > NOTICED.index("10 %" if close else "x2") and (close or not is_free(text, kind)):
                values = " and ".join(filter(None, seen[0]["values"]))
                wrong = {"none": "a number ten times too large or small", "x10": "a number twice too large or small"}
                yield f"{wrong.get(least, '10 % off')} still holds: {text}" + (f" ({values})" if values else "")


def bounds(node):
    """The numbers in a condition that are bounds and not a part of a measured expression."""
    if isinstance(node, ast.Constant):
        return [node.value] if type(node.value) in (int, float) else []
    if isinstance(node, ast.Call):
        return [math.inf] if is_name(node.func) and node.func.id == "len" else []
    factor = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)  # "at least twice" has a factor
    if factor or not isinstance(node, ast.Module | ast.Expr | ast.Compare | ast.BinOp | ast.UnaryOp):
        return []
    return [value for part in ast.iter_child_nodes(node) for value in bounds(part)]


def is_free(text, kind):
    """Whether < or > may hold by far: it compares with 0, 1 or a bound for rounding, or two measured numbers."""
    return kind == "order" and all(value in (0, 1) or value <= ROUNDING for value in bounds(ast.parse(text)))


def survey(paths, again=False):
    """[(notebook, cell, assert, verdict)] of all notebooks. A cell that failed has one row, with an empty assert."""
    rows = []
    for path in paths:
        if not again:
            run(path)
        records = [json.loads(line) for line in (RECORDS / f"{path.stem}.jsonl").read_text().splitlines()]
        failed = {one["failed"]: one["error"] for one in records if "failed" in one}
        rows += [(path.stem, cell, "", f"failed: {error}") for cell, error in failed.items()]
        for site, known in rewritten(path)[1].items():
            reports = [one["nodes"] for one in records if one.get("site") == site]
            cell = site.split()[0]
            for verdict in verdicts(known, reports):
                if not (cell in failed and verdict == "never reached"):
                    rows.append((path.stem, cell, known["text"], verdict))
    return rows


def main(arguments):
    names = [name for name in arguments if name != "--again"]
    paths = [Path(name) for name in names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    rows = survey(paths, again="--again" in arguments)
    for notebook, cell, text, verdict in rows:
        print(f"{notebook:22} {cell:22} {'assert ' * bool(text)}{text}\n{'':45} {verdict}")
    print(f"{len(rows)} findings in {len(paths)} notebooks")
    return bool(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
