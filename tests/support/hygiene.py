"""The rules for notebooks, and what nbval compares."""

import json
import re

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from store_outputs import normalised

MAGICS = {"load_ext", "ranks"}  # nbval may pass an unknown magic, so the known ones are listed here

# nbval's markers: it reads them in tags, and in comments as well.
RAISES = {"raises-exception", "nbval-raises-exception", "NBVAL_RAISES_EXCEPTION"}
IGNORES = {"nbval-ignore-output", "NBVAL_IGNORE_OUTPUT", "PYTEST_VALIDATE_IGNORE_OUTPUT"}
SKIPS = {"nbval-skip", "NBVAL_SKIP", "skip-execution"}

# What IPython makes of magics and of shell lines: get_ipython().run_line_magic('load_ext', …), get_ipython().system(…)
MAGIC_CALL = re.compile(r"get_ipython\(\)\.(?:run_\w+_magic\(')?(\w+)")
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1", flags=re.M | re.S)  # a block of code, from its ``` or ~~~ to the next
# Paths, processes and addresses of the machine that ran the notebook: /home/me/a.py, ipykernel_123, pid=123, 0x7f3a21bc
MACHINE = re.compile(
    r"(?<![\w.:/])/(?:work|home|root|tmp|Users|private|var/folders|mnt|opt)/\S*|\S*site-packages/\S*|ipykernel_\d+"
    r"|\bpid[ =:]+\d+|\b0x[0-9a-f]{6,}\b"
)
PREDICTION = re.compile(r"^[:`]{3,}\{admonition\}.*predict", flags=re.M | re.I)  # :::{admonition} Predict
# A line of the cell with a chapter's parameters is a comment, or such as: steps: int = 10  # how many steps to train
PARAMETER = re.compile(r"#|\w+: .+ = .+  # \w")


# --- looking into a notebook ------------------------------------------------------------------------------------------


def all_cells(nb):
    """[(name, cell)]; the name for messages is the cell's number and id."""
    return [(f"cell {number} ({cell.get('id')})", cell) for number, cell in enumerate(nb.cells, 1)]


def code_cells(nb):
    return [(name, cell) for name, cell in all_cells(nb) if cell.cell_type == "code"]


def marks(cell):
    """The cell's tags and comments: nbval looks for its markers in both."""
    lines = [line.strip() for line in cell.source.splitlines()]
    comments = {line.lstrip("#").strip() for line in lines if line.startswith("#")}
    return comments | set(cell.metadata.get("tags", []))


def output_texts(cell):
    """Yields every text in a cell's outputs: streams, representations, errors, tracebacks."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield output.get("evalue", "")
        yield from output.get("traceback", [])
        for mime, value in output.get("data", {}).items():
            if mime.startswith("image/") and mime != "image/svg+xml":
                continue
            if not isinstance(value, str):
                value = json.dumps(value)
            yield value


def prose(nb):
    """The markdown of all cells as one text, changed so that no line of a fence looks like a heading."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return FENCE.sub(lambda fence: fence[0].replace("\n#", "\n "), text)


# --- for every notebook -----------------------------------------------------------------------------------------------


def invalid(nb):
    for error in nbformat.validator.iter_validate(nb):
        yield f"{error.message}: the notebook"


def not_run_in_order(nb):
    for expected_count, (name, cell) in enumerate(code_cells(nb), 1):
        if cell.execution_count != expected_count:
            yield name


def not_normalised(nb):
    clean = normalised(nb)
    if nb.metadata != clean.metadata:
        yield "the notebook's metadata"
    for (name, cell), clean_cell in zip(all_cells(nb), clean.cells, strict=True):
        if cell != clean_cell:
            yield name


def unknown_magic(nb):
    for name, cell in code_cells(nb):
        calls = MAGIC_CALL.findall(TransformerManager().transform_cell(cell.source))
        if set(calls) - MAGICS:
            yield name


def wrong_error_tag(nb):
    for name, cell in code_cells(nb):
        is_tagged = bool(marks(cell) & RAISES)
        has_error = any(output.output_type == "error" for output in cell.outputs)
        if is_tagged != has_error:
            yield name


def skipped(nb):
    for name, cell in code_cells(nb):
        if marks(cell) & SKIPS:
            yield name


def not_compared_without_reason(nb):
    for name, cell in code_cells(nb):
        has_reason = re.search(r"^# not compared: \w+ \w+", cell.source, flags=re.M)
        if marks(cell) & IGNORES and not has_reason:
            yield name


def unchecked(nb):
    cells = code_cells(nb)
    for position, (name, cell) in enumerate(cells):
        this_and_next_cell = "".join(other.source for _, other in cells[position : position + 2])
        if marks(cell) & IGNORES and "assert" not in this_and_next_cell:
            yield name


def stores_a_warning(nb):
    """A warning that is not stored needs no rule: under nbval its cell fails. So does one with a magic's UsageError."""
    for name, cell in code_cells(nb):
        has_warning = re.search(r"\w+Warning: ", "\n".join(output_texts(cell)))
        if has_warning or any(output.get("name") == "stderr" for output in cell.outputs):
            yield name


def names_this_machine(nb):
    for name, cell in all_cells(nb):
        for words in MACHINE.findall("\n".join([cell.source, *output_texts(cell)])):
            yield f"{name}, by {words!r},"


def wrong_title(nb):
    titles = re.findall(r"^# ", prose(nb), flags=re.M)
    if len(titles) != 1 or not nb.cells[0].source.startswith("# "):
        yield "the notebook"


# --- for the chapters and the template --------------------------------------------------------------------------------


def bad_promises(nb):
    # The heading "What you will prove", or a line that begins with it in bold, and what follows until the next heading.
    section = re.search(r"^(?:#+ |\*\*)What you will prove.*?(?=^#|\Z)", prose(nb), flags=re.M | re.S)
    if section is None:
        yield "no list"
        return
    _, *promises = re.split(r"^(?:[-*]|\d+\.) ", section[0], flags=re.M)  # an item begins with "-", "*" or "1."
    if not 3 <= len(promises) <= 6:
        yield f"a list of {len(promises)}"
    for promise in promises:
        first_paragraph = promise.split("\n\n")[0]  # the last item is followed by the rest of the section
        if "](#" not in first_paragraph:
            yield f"no link: {promise[:60]!r}"


def bad_parameters(nb):
    cells = [cell for _, cell in code_cells(nb) if "parameters" in marks(cell)]
    if len(cells) != 1:
        yield f"{len(cells)} cells tagged parameters"
    for cell in cells:
        for line in cell.source.splitlines():
            if line.strip() and not PARAMETER.match(line):
                yield line


def shows_the_answer(cells_below):
    """Whether the answer to a prediction is in view: what the first code cell below it prints is not hidden."""
    for cell in cells_below:
        if cell.cell_type == "code":
            is_hidden = bool(marks(cell) & {"hide-output", "hide-cell"})
            return not is_hidden
    return True  # no cell gives the answer


def is_explained(cells_below):
    """Whether a prediction has an explanation in a box, ``<details>``, below it and before the next section's text.

    The cell behind the prediction counts in any case, because a section may begin with it.
    """
    for position, cell in enumerate(cells_below):
        begins_a_section = cell.source.startswith("## ")
        if begins_a_section and position > 0:
            return False
        if cell.cell_type == "markdown" and "<details>" in cell.source:
            return True
    return False


def open_answers(nb):
    cells = all_cells(nb)
    for position, (name, cell) in enumerate(cells):
        if cell.cell_type == "markdown" and PREDICTION.search(cell.source):
            cells_below = [other for _, other in cells[position + 1 :]]
            if shows_the_answer(cells_below) or not is_explained(cells_below):
                yield name


def bad_solutions(nb):
    for name, cell in code_cells(nb):
        if "solution" in marks(cell):
            if "assert" not in cell.source or not marks(cell) & {"hide-cell", "hide-input"}:
                yield name


# --- the rules --------------------------------------------------------------------------------------------------------

# {a function that yields the names of the places where a notebook has a problem: the problem}
RULES = {  # for every notebook
    invalid: "is not valid in format 4.5, which asks for cells' ids",
    not_run_in_order: "was not run in order, and nbval does not compare a cell without a count",
    not_normalised: "differs from what `make outputs` stores: metadata, widget views, tracebacks",
    unknown_magic: f"uses a shell line, or a magic other than {sorted(MAGICS)}, whose errors nbval may pass",
    wrong_error_tag: "stores an error without the tag raises-exception, or has the tag and stores none",
    skipped: "is skipped",
    not_compared_without_reason: "is not compared, and does not say why in a line `# not compared: why`",
    unchecked: "is not compared, and neither it nor the next code cell asserts anything",
    stores_a_warning: "stores a warning, or what was printed to stderr",
    names_this_machine: "names this machine",
    wrong_title: "has not one title, which begins its first cell",
}
PATTERN = {  # for the chapters and the template
    bad_promises: "is wrong: 'What you will prove' has three to six promises that link to their cells",
    bad_parameters: "breaks the rule: a single parameters cell has lines `name: type = value  # what it does`",
    open_answers: "asks for a prediction, but the next code cell is not hidden, or no <details> explains it",
    bad_solutions: "is a solution that is not folded, or asserts nothing",
}


def problems_of(nb, rules):
    """What breaks these rules in a notebook, a line for each place: ``cell 3 (a1b2) is skipped``."""
    problems = []
    for find_places, problem in rules.items():
        problems += [f"{place} {problem}" for place in find_places(nb)]
    return problems
