"""Rules for notebooks beyond what nbval compares: a table, in which each rule stands beside what breaks it."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat.v4 import new_output
from store_outputs import WIDGET_VIEW, normalised, text_of

MAGICS = {"load_ext", "ranks"}  # nbval may pass an unknown magic, so the known ones are listed here
MOST_BYTES = 1_500_000  # the weight of a page, most of which is figures

# nbval's markers: it reads them in tags, and in comments as well.
RAISES = {"raises-exception", "nbval-raises-exception", "NBVAL_RAISES_EXCEPTION"}
IGNORES = {"nbval-ignore-output", "NBVAL_IGNORE_OUTPUT", "PYTEST_VALIDATE_IGNORE_OUTPUT"}
SKIPS = {"nbval-skip", "NBVAL_SKIP", "skip-execution"}

CALL = re.compile(r"get_ipython\(\)\.(?:run_\w+_magic\(')?(\w+)")  # what IPython makes of magics and shell lines
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", flags=re.M | re.S)
# Paths, processes and addresses of the machine that ran the notebook.
MACHINE = re.compile(
    r"(?<![\w.:/])/(?:work|home|root|tmp|Users|private|var/folders|mnt|opt)/\S*|\S*site-packages/\S*|ipykernel_\d+"
    r"|\bpid[ =:]+\d+|\b0x[0-9a-f]{6,}\b"
)


# --- looking into a notebook ------------------------------------------------------------------------------------------


def whole(nb):
    return [("the notebook", nb)]


def all_cells(nb):
    """[(name, cell)]; the name for messages is the cell's number and id."""
    return [(f"cell {number} ({cell.get('id')})", cell) for number, cell in enumerate(nb.cells, 1)]


def code_cells(nb):
    return [(name, cell) for name, cell in all_cells(nb) if cell.cell_type == "code"]


def solutions(nb):
    return [(name, cell) for name, cell in code_cells(nb) if "solution" in marks(cell)]


def marks(cell):
    """The cell's tags and comments: nbval looks for its markers in both."""
    comments = {line.strip().lstrip("#").strip() for line in cell.source.splitlines() if line.strip().startswith("#")}
    return set(cell.metadata.get("tags", [])) | comments


def texts(cell):
    """Yields every text in a cell's outputs: streams, representations, errors, tracebacks."""
    for output in cell.get("outputs", []):
        yield from [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        for mime, value in output.get("data", {}).items():
            if not mime.startswith("image/") or mime == "image/svg+xml":
                yield value if isinstance(value, str) else json.dumps(value)


def prose(nb):
    """The markdown of all cells as one text, changed so that no line of a fence looks like a heading."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return FENCE.sub(lambda fence: fence[0].replace("\n#", "\n "), text)


def section(nb, title):
    """The prose under the first heading that contains ``title``, up to the next heading of that level; else ""."""
    match = re.search(rf"^(#{{2,6}}) [^\n]*{title}.*?(?=^\1 |\Z)", prose(nb), flags=re.M | re.S | re.I)
    return match[0] if match else ""


# --- what is wrong with a notebook: the longer checks -----------------------------------------------------------------


def invalid(nb):
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        yield f"the format is {nb.nbformat}.{nb.nbformat_minor}"
    yield from (error.message for error in nbformat.validator.iter_validate(nb))
    ids = [cell.get("id") for cell in nb.cells]
    yield from {f"two cells have the id {name}" for name in ids if ids.count(name) > 1}


def not_run_in_order(nb):
    cells = enumerate(code_cells(nb), 1)
    return [f"{name} has {cell.execution_count}" for count, (name, cell) in cells if cell.execution_count != count]


def not_normalised(nb):
    clean = normalised(nb)
    cells = zip(all_cells(nb), clean.cells, strict=True)
    return ["its metadata"] * (nb.metadata != clean.metadata) + [name for (name, cell), other in cells if cell != other]


def unchecked(nb):
    cells = code_cells(nb)
    for (name, cell), (_, below) in itertools.pairwise([*cells, cells[-1]]):
        if marks(cell) & IGNORES and "assert" not in cell.source + below.source:
            yield name


def bad_promises(nb):
    promise = re.search(r"^(?:#+ |\*\*)What you will prove.*?(?=^#|\Z)", prose(nb), flags=re.M | re.S)
    promises = re.split(r"^(?:[-*]|\d+\.) ", promise[0] if promise else "", flags=re.M)[1:]
    if not 3 <= len(promises) <= 6:
        yield f"it lists {len(promises)}"
    yield from (f"no link: {promise[:60]!r}" for promise in promises if "](#" not in promise.split("\n\n")[0])


def bad_parameters(nb):
    cells = [cell for _, cell in code_cells(nb) if "parameters" in marks(cell)]
    if len(cells) != 1:
        yield f"{len(cells)} cells are tagged parameters"
    lines = [line for cell in cells for line in cell.source.splitlines() if line.strip()]
    yield from (line for line in lines if not re.match(r"#|\w+: .+ = .+  # \w", line))


def open_answers(nb):
    """The code cell after a prediction has the answer, and the prose before the next section explains it."""
    for place, (name, cell) in enumerate(all_cells(nb), 1):
        if cell.cell_type == "markdown" and re.search(r"^[:`]{3,}\{admonition\} *Predict", cell.source, flags=re.M):
            first, rest = nb.cells[place : place + 1], nb.cells[place + 1 :]
            after = first + list(itertools.takewhile(lambda cell: not cell.source.startswith("## "), rest))
            code = [cell for cell in after if cell.cell_type == "code"][:1]
            if not code or not marks(code[0]) & {"hide-output", "hide-cell"}:
                yield f"{name}: tag the next code cell hide-output or hide-cell"
            elif not any("<details>" in cell.source for cell in after if cell.cell_type == "markdown"):
                yield f"{name}: no <details> below it hides the explanation"


# --- the rules, each beside the changes of a good notebook that break it ----------------------------------------------


class Rule(NamedTuple):
    """``finding`` of a cell, or of what else ``things`` gives, is true or says more if that has the problem.

    Each of ``breaks`` changes the good notebook so that it has the problem.
    """

    problem: str
    finding: Callable
    breaks: list[Callable]
    things: Callable = code_cells

    def findings(self, nb):
        for name, thing in self.things(nb):
            finding = self.finding(thing)
            if isinstance(finding, Iterator):
                finding = list(finding)
            if finding:
                yield f"{name} {self.problem}" + ("" if finding is True else f": {finding}")


def change(cell, **new):
    """A change of the good notebook: new attributes for one of its cells."""
    return lambda nb: nb.cells[cell].update(nbformat.from_dict(new))


def prints(text, name="stdout"):
    """Another change: the output of a cell."""
    return change(4, outputs=[new_output("stream", name=name, text=text)])


def replace(cell, old, new):
    return lambda nb: nb.cells[cell].update(source=nb.cells[cell].source.replace(old, new))


def tag(cell, *tags):
    return change(cell, metadata={"tags": list(tags)} if tags else {})


SECRET_PATH = "/".join(["", "home", "reader", "book.py"])

RULES = [  # for every notebook
    Rule("is not valid in format 4.5, which asks for cells' ids", invalid, [
        lambda nb: nb.update(nbformat_minor=4), lambda nb: nb.cells[1].pop("id"), change(1, cell_type="kode"),
        lambda nb: nb.cells[1].update(id=nb.cells[2].id)], whole),
    Rule("was not run in order, and nbval does not compare a cell without a count", not_run_in_order, [
        change(4, execution_count=None, outputs=[]), change(4, execution_count=9)], whole),
    Rule("differs from what `make outputs` stores: metadata, widget views, tracebacks", not_normalised, [
        lambda nb: nb.metadata.update(widgets={}), lambda nb: nb.metadata.kernelspec.update(name="my-env"),
        lambda nb: nb.metadata.language_info.update(version="3.11.7"), change(4, metadata={"collapsed": True}),
        change(4, metadata={"execution": {"iopub.execute_input": "12:00"}}), tag(8, "solution", "hide-cell"),
        change(4, outputs=[new_output("display_data", {WIDGET_VIEW: {}})])], whole),
    Rule(f"uses a shell line, or a magic other than {sorted(MAGICS)}, whose errors nbval may pass",
         lambda cell: {*CALL.findall(TransformerManager().transform_cell(cell.source))} - MAGICS,
         [replace(4, "f(steps)", code) for code in ("%tiem f(steps)", "%%bash\nls", "!ls", "files = !ls")]),
    Rule("stores an error without the tag raises-exception, or has the tag and stores none",
         lambda cell: bool(marks(cell) & RAISES) != any(output.output_type == "error" for output in cell.outputs),
         [change(5, outputs=[]), tag(5), replace(4, "f(steps)", "# NBVAL_RAISES_EXCEPTION\nf(steps)")]),
    Rule("is skipped", lambda cell: marks(cell) & SKIPS, [
        tag(4, "nbval-skip"), replace(4, "f(steps)", "# NBVAL_SKIP\nf(steps)")]),
    Rule("is not compared, and does not say why in a line `# not compared: why`",
         lambda cell: marks(cell) & IGNORES and not re.search(r"^# not compared: \w+ \w+", cell.source, flags=re.M),
         [replace(7, "not compared: seconds differ", "fast"), replace(8, "assert", "# NBVAL_IGNORE_OUTPUT\nassert")]),
    Rule("has cells that are not compared, and neither they nor the next code cells assert anything", unchecked, [
        change(4, source="# not compared: a time\nf(steps)", metadata={"tags": ["nbval-ignore-output"]})], whole),
    # A warning that is not stored fails under nbval, and that is how it is noticed. So does a magic's UsageError.
    Rule("stores stderr", lambda cell: any(output.get("name") == "stderr" for output in cell.outputs), [
        prints("hello", "stderr")]),
    Rule("stores a warning", lambda cell: re.findall(r"\w+Warning: .*", "\n".join(texts(cell))), [
        prints("[rank 1] FutureWarning: use all_gather_single\n")]),
    Rule("names this machine", lambda cell: MACHINE.findall("\n".join([cell.source, *texts(cell)])), [
        replace(4, "f(steps)", f"open({SECRET_PATH!r})"), change(0, source=f"# Title\n\nSee {SECRET_PATH}."),
        prints(f"wrote {SECRET_PATH}"), prints("<object at 0x7f6e1529c710>"), prints("rank 0 has pid 4711"),
        change(5, outputs=[new_output("error", traceback=[f"File {SECRET_PATH}, line 3"])])], all_cells),
    Rule("has not one title, which begins its first cell",
         lambda nb: not nb.cells[0].source.startswith("# ") or len(re.findall(r"^# ", prose(nb), flags=re.M)) != 1,
         [replace(0, "# Title", "Title"), replace(9, "## Recap", "# Recap")], whole),
    Rule(f"has more than {MOST_BYTES:,} bytes", lambda nb: len(text_of(nb).encode()) > MOST_BYTES, [
        prints("x" * MOST_BYTES)], whole),
]  # fmt: skip

PATTERN = [  # for the chapters and the template
    Rule("has no 'What you will prove' with three to six promises that link to their cells", bad_promises, [
        replace(0, "What you will prove", "Contents"), replace(0, "- [one](#one)\n", ""),
        replace(0, "[one](#one)", "one")], whole),
    Rule("has no single parameters cell of lines `name: type = value  # what it does`", bad_parameters, [
        tag(2), replace(2, "  # how many", ""), replace(2, ": int", "")], whole),
    Rule("exports no cell", lambda nb: not any("export" in marks(cell) for _, cell in code_cells(nb)), [tag(3)], whole),
    Rule("asks for no prediction",
         lambda nb: not re.search(r"^[:`]{3,}\{admonition\}.*predict", prose(nb), flags=re.M | re.I),
         [replace(9, "Predict", "Note")], whole),
    Rule("shows answers to its predictions", open_answers, [tag(10), replace(11, "details", "p")], whole),
    Rule("has no section 'Recap' with a table", lambda nb: not re.search(r"^\|.*\|$", section(nb, "Recap"), re.M), [
        replace(9, "|", "")], whole),
    Rule("has no torchrun command in 'Take it to your GPUs'",
         lambda nb: "torchrun" not in section(nb, "Take it to your GPUs"), [replace(6, "torchrun", "python")], whole),
]  # fmt: skip

EXERCISES = [  # for the chapters but the first, which is ten minutes long
    Rule("has not two to four exercises, each with a heading, or with a number in bold: **1. Name.**",
         lambda nb: not 2 <= len(re.findall(r"^(?:###+ |\*\*\d)", section(nb, "Exercises"), flags=re.M)) <= 4,
         [replace(6, "### Two", "Two")], whole),
    Rule("has no cell tagged solution", lambda nb: not solutions(nb), [lambda nb: (tag(7)(nb), tag(8)(nb))], whole),
    Rule("is a solution that is not folded", lambda cell: not marks(cell) & {"hide-cell", "hide-input"}, [
        tag(7, "solution")], solutions),
    Rule("is a solution that asserts nothing", lambda cell: "assert" not in cell.source, [
        change(7, source="f(1)")], solutions),
]  # fmt: skip
