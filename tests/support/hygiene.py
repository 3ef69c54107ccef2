"""Rules for notebooks beyond what nbval compares. Each rule is a generator of what is wrong with a notebook."""

import itertools
import json
import re
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from store_outputs import normalised, text_of

MAGICS = {"load_ext", "ranks"}  # nbval may pass an unknown magic, so the known ones are listed here
MOST_BYTES = 1_500_000
GLOSSARY = Path(__file__).parents[2] / "book/glossary.md"

# nbval's markers: it reads them in tags, and in comments as well.
RAISES = {"raises-exception", "nbval-raises-exception", "NBVAL_RAISES_EXCEPTION"}
IGNORES = {"nbval-ignore-output", "NBVAL_IGNORE_OUTPUT", "PYTEST_VALIDATE_IGNORE_OUTPUT"}
SKIPS = {"nbval-skip", "NBVAL_SKIP", "skip-execution"}

# Fences, headings, rows of tables, links, roles other than {term}, code, formulas.
BESIDE_SENTENCES = re.compile(
    r"^(?:`{3,}|~{3,}).*?^(?:`{3,}|~{3,})$|^#+ .*?$|^\|.*?$|!?\[[^\]]*\]\([^)]*\)"
    r"|(?:\{\w+\})?`[^`]*`|\$[^$]*\$",
    flags=re.M | re.S,
)

# Paths, processes and addresses of the machine that ran the notebook.
MACHINE = re.compile(
    r"(?<![\w.:/])/(?:work|home|root|tmp|Users|private|var/folders|mnt|opt)/|site-packages/|ipykernel_\d"
    r"|\bpid[ =:]+\d|\b0x[0-9a-f]{6,}\b"
)


# --- looking into a notebook ------------------------------------------------------------------------------------------


def named_cells(nb):
    """Yields (name, cell) for each cell; the name for messages is the cell's number and id."""
    return [(f"cell {number} ({cell.get('id')})", cell) for number, cell in enumerate(nb.cells, 1)]


def code_cells(nb):
    """Yields (name, cell) for each code cell."""
    return [(name, cell) for name, cell in named_cells(nb) if cell.cell_type == "code"]


def marks(cell):
    """The cell's tags and comments: nbval looks for its markers in both."""
    comments = {line.strip().lstrip("#").strip() for line in cell.source.splitlines() if line.strip().startswith("#")}
    return set(cell.metadata.get("tags", [])) | comments


def last_code_line(cell):
    """The cell's last line of code, without a comment at its end; "" if there is none."""
    lines = [line.split("#")[0].rstrip() for line in cell.source.splitlines()]
    return next(filter(None, reversed(lines)), "")


def texts(output):
    """Yields every text in an output: streams, representations, errors, tracebacks."""
    yield from [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
    for mime, value in output.get("data", {}).items():
        if not mime.startswith("image/") or mime == "image/svg+xml":
            yield value if isinstance(value, str) else json.dumps(value)


def prose(nb):
    """The markdown of all cells as one text, changed so that no line of a fence looks like a heading."""
    text = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    return re.sub(r"^(`{3,}|~{3,}).*?^\1", lambda fence: fence[0].replace("\n#", "\n "), text, flags=re.M | re.S)


def headings(nb):
    """(level, text) of each heading."""
    return [(len(level), text.strip()) for level, text in re.findall(r"^(#{1,6}) (.+)$", prose(nb), flags=re.M)]


def section(nb, title):
    """The prose under the first heading that contains ``title``, up to the next heading of that level; else ""."""
    found = re.search(rf"^(#{{2,6}}) [^\n]*{title}.*?(?=^\1 |\Z)", prose(nb), flags=re.M | re.S | re.I)
    return found[0] if found else ""


# --- every notebook ---------------------------------------------------------------------------------------------------


def is_valid(nb):
    """The notebook is valid by nbformat's schema, and its format is 4.5, which asks for cells' ids."""
    if (nb.nbformat, nb.nbformat_minor) != (4, 5):
        yield f"format {nb.nbformat}.{nb.nbformat_minor} instead of 4.5"
    for error in nbformat.validator.iter_validate(nb):
        yield error.message
    ids = [cell.get("id") for cell in nb.cells]
    for name in {name for name in ids if ids.count(name) > 1}:
        yield f"two cells have the id {name}"


def is_executed_in_order(nb):
    """All cells were run, in order. nbval passes a cell without an execution count and does not compare it."""
    for count, (name, cell) in enumerate(code_cells(nb), 1):
        if cell.execution_count != count:
            yield f"{name} has the execution count {cell.execution_count} instead of {count}"
        if not cell.source.strip():
            yield f"{name} is empty"


def is_normalised(nb):
    """It is stored as `make outputs` does: no widget state, timings, versions, collapsed cells or machine's paths."""
    clean = normalised(nb)
    if nb.metadata != clean.metadata:
        yield "the notebook's metadata differ from what `make outputs` stores"
    for (name, cell), stored in zip(named_cells(nb), clean.cells, strict=True):
        if cell != stored:
            yield f"{name} differs from what `make outputs` stores: metadata, a widget view or a traceback"


def has_no_attachments(nb):
    for name, cell in named_cells(nb):
        if cell.get("attachments"):
            yield f"{name} has attachments"


def has_known_magics(nb):
    """It uses known magics alone, and no shell lines: nbval may pass an unknown magic's error, or a shell's."""
    for name, cell in code_cells(nb):
        python = TransformerManager().transform_cell(cell.source)
        for magic in re.findall(r"get_ipython\(\)\.run_(?:line|cell)_magic\('([^']*)'", python):
            if magic not in MAGICS:
                yield f"{name} uses %{magic}, which is not among {sorted(MAGICS)}"
        if re.search(r"get_ipython\(\)\.(system|getoutput)\(", python):
            yield f"{name} runs a shell line, whose failure would pass: use subprocess.run(…, check=True)"
        if any("UsageError" in text for output in cell.outputs for text in texts(output)):
            yield f"{name} stores a UsageError"


def raises_what_it_announces(nb):
    """A cell has the tag raises-exception if and only if it stores an error: nbval checks the tag by that error."""
    for name, cell in code_cells(nb):
        stored = any(output.output_type == "error" for output in cell.outputs)
        if stored and not marks(cell) & RAISES:
            yield f"{name} stores an error and has no tag raises-exception"
        if not stored and marks(cell) & RAISES:
            yield f"{name} is tagged as raising and stores no error"


def compares_every_output(nb):
    """A cell whose output is not compared says why, and it or the next code cell asserts something in its place."""
    cells = code_cells(nb)
    for place, (name, cell) in enumerate(cells):
        if marks(cell) & SKIPS:
            yield f"{name} is skipped"
        if marks(cell) & IGNORES:
            if not re.search(r"^# not compared: \w+ \w+", cell.source, flags=re.M):
                yield f"{name} is not compared and does not say why in a line `# not compared: why`"
            if not any("assert" in near.source for _, near in cells[place : place + 2]):
                yield f"{name} is not compared, and neither it nor the next code cell asserts anything"


def has_no_warnings(nb):
    """It stores no warning: a warning that is not stored fails under nbval, and that is how it is noticed."""
    for name, cell in code_cells(nb):
        for output in cell.outputs:
            if output.get("name") == "stderr":
                yield f"{name} stores what it printed to stderr: {output.text[:80]!r}"
            for text in texts(output):
                for warning in re.findall(r"\w+Warning: .*", text):
                    yield f"{name} stores a {warning}"


def names_no_machine(nb):
    for name, cell in named_cells(nb):
        for text in [cell.source, *(text for output in cell.get("outputs", []) for text in texts(output))]:
            for found in MACHINE.finditer(text):
                yield f"{name} names this machine: {text[max(0, found.start() - 20) : found.end() + 30]!r}"


def describes_its_images(nb):
    """Images have an alt text in the cell's metadata; without it the page would use the image's path."""
    for name, cell in code_cells(nb):
        if any(mime.startswith("image/") for output in cell.outputs for mime in output.get("data", {})):
            if not cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip():
                yield f"{name} shows an image without metadata mystnb.image.alt"


def ends_no_cell_with_a_semicolon(nb):
    """No cell ends with a semicolon: it hides an output in a notebook, but not under nbval."""
    for name, cell in code_cells(nb):
        if last_code_line(cell).endswith(";"):
            yield f"{name} ends with a semicolon"


def has_sensible_headings(nb):
    found = headings(nb)
    if nb.cells[0].cell_type != "markdown" or [level for level, _ in found[:1]] != [1]:
        yield "the first cell is not the title"
    for (above, before), (level, text) in zip(found, found[1:], strict=False):
        if level == 1:
            yield f"heading {text!r} is a second title"
        if level > above + 1:
            yield f"heading {text!r} (level {level}) follows {before!r} (level {above})"


def is_small(nb):
    size = len(text_of(nb).encode())
    if size > MOST_BYTES:
        yield f"{size:,} bytes; one page of a book has at most {MOST_BYTES:,}"


# --- a chapter, and the template of one -------------------------------------------------------------------------------


def starts_with_helpers(nb):
    """The first cell loads the extension, which begins to import torch for the ranks in the background."""
    if not code_cells(nb)[0][1].source.startswith("%load_ext helpers"):
        yield "the first code cell does not start with `%load_ext helpers`"


def promises_what_it_proves(nb):
    """The list 'What you will prove' has three to six invariants, each with a link to the cell that asserts it."""
    promise = re.search(r"^(?:#+ |\*\*)What you will prove.*?(?=^#|\Z)", prose(nb), flags=re.M | re.S)
    promises = re.split(r"^(?:[-*]|\d+\.) ", promise[0] if promise else "", flags=re.M)[1:]
    if not 3 <= len(promises) <= 6:
        yield f"'What you will prove' lists {len(promises)} invariants, not three to six"
    for promise in promises:
        if "](#" not in promise.split("\n\n")[0]:
            yield f"a promise links to no cell: {promise[:60]!r}"


def has_one_parameters_cell(nb):
    """One cell has the tag parameters, with a line ``name: type = value  # what it does`` for each flag."""
    cells = [cell for _, cell in code_cells(nb) if "parameters" in marks(cell)]
    if len(cells) != 1:
        yield f"{len(cells)} cells are tagged parameters, not one"
    for line in [line for cell in cells for line in cell.source.splitlines()]:
        if line.strip() and not re.match(r"#|\w+: .+ = .+  # \w", line):
            yield f"a parameter is not `name: type = value  # what it does`: {line}"


def exports_a_script(nb):
    if not any("export" in marks(cell) for _, cell in code_cells(nb)):
        yield "no cell is tagged export"


def asks_for_a_prediction(nb):
    if not re.search(r"^[:`]{3,}\{admonition\}.*predict", prose(nb), flags=re.M | re.I):
        yield "no admonition asks to predict"


def hides_its_answers(nb):
    """After a prediction, the cell with the answer and the prose that explains it are folded."""
    for place, (name, cell) in enumerate(named_cells(nb)):
        if cell.cell_type == "markdown" and re.search(r"^[:`]{3,}\{admonition\} *Predict", cell.source, flags=re.M):
            below = nb.cells[place + 1 :]
            after = below[:1] + list(itertools.takewhile(lambda cell: not re.match("## ", cell.source), below[1:]))
            code = [cell for cell in after if cell.cell_type == "code"][:1]
            if not code or not marks(code[0]) & {"hide-output", "hide-cell"}:
                yield f"{name} predicts, and the next cell shows the answer: tag it hide-output or hide-cell"
            elif not any("<details>" in cell.source for cell in after if cell.cell_type == "markdown"):
                yield f"{name} predicts, and no <details> below it hides the explanation"


MOST_CELLS, MOST_WORDS = 62, 2_550


def is_short(nb):
    words = len(re.findall(r"\w[\w'’-]*", re.sub(r"^(`{3,}|~{3,}).*?^\1", "", prose(nb), flags=re.M | re.S)))
    if len(nb.cells) > MOST_CELLS or words > MOST_WORDS:
        yield f"{len(nb.cells)} cells and {words} words; a page has at most {MOST_CELLS} and {MOST_WORDS}"


def hands_over_its_script(nb):
    """'Take it to your GPUs' has downloads of the notebook and the script, the script's listing and commands."""
    text = section(nb, "Take it to your GPUs")
    least = {"{download}": 2, ".ipynb>": 1, "../scripts/": 2, "{literalinclude}": 1, "torchrun": 1}
    for wanted, times in least.items():
        if text.count(wanted) < times:
            yield f"'Take it to your GPUs' has {wanted} {text.count(wanted)} times, fewer than {times}"


def has_solved_exercises(nb):
    """It has exercises, with solutions that assert something and are folded on the page."""
    if not section(nb, "Exercises"):
        yield "there is no section 'Exercises'"
    solutions = [(name, cell) for name, cell in code_cells(nb) if "solution" in marks(cell)]
    if not solutions:
        yield "no cell is tagged solution"
    for name, cell in solutions:
        if not marks(cell) & {"hide-cell", "hide-input"}:
            yield f"{name} is a solution that is not folded"
        if "assert" not in cell.source:
            yield f"{name} is a solution that asserts nothing"


def has_several_exercises(nb):
    """It has two to four exercises, each with a heading, or with a number in bold: ``**1. Name.**``."""
    exercises = re.findall(r"^(?:###+ |\*\*\d)", section(nb, "Exercises"), flags=re.M)
    if not 2 <= len(exercises) <= 4:
        yield f"there are {len(exercises)} exercises, not two to four"


def recapitulates(nb):
    if not re.search(r"^\|.*\|$", section(nb, "Recap"), flags=re.M):
        yield "there is no section 'Recap' with a table"


def glossary():
    """The terms that book/glossary.md explains."""
    entries = GLOSSARY.read_text().partition("```{glossary}\n")[2].partition("```")[0]
    return re.findall(r"^(?=\S)(.+)$", entries, flags=re.M)


def running_text(source):
    """A markdown cell's source with blanks in place of all that is not a sentence, so that positions stay the same."""
    return BESIDE_SENTENCES.sub(lambda found: found[0] if "{term}" in found[0][:6] else " " * len(found[0]), source)


def first_uses(nb):
    """Yields (term, the cell's name, match) for the first use of each glossary term in the prose, linked or not."""
    texts = [(name, running_text(cell.source)) for name, cell in named_cells(nb) if cell.cell_type == "markdown"]
    for term in glossary():
        word = re.escape(term) + ("s?" if term.islower() else "")
        use = re.compile(
            rf"\{{term\}}`(?:{word}|[^`]*<{re.escape(term)}>)`|(?<![\w-]){word}(?![\w-])", re.I * term.islower()
        )
        yield from itertools.islice(((term, name, found) for name, text in texts for found in use.finditer(text)), 1)


def links_terms_at_first_use(nb):
    for term, name, found in first_uses(nb):
        if not found[0].startswith("{term}"):
            yield f"{name} uses {term!r} first and does not link it: write {{term}}`{found[0]}`"


# For every notebook; for the chapters and the template; for the chapters alone, since the template has no page.
RULES = [
    is_valid, is_executed_in_order, is_normalised, has_no_attachments, has_known_magics, raises_what_it_announces,
    compares_every_output, has_no_warnings, names_no_machine, describes_its_images, ends_no_cell_with_a_semicolon,
    has_sensible_headings, is_small, starts_with_helpers,
]  # fmt: skip
PATTERN = [
    promises_what_it_proves, has_one_parameters_cell, exports_a_script, asks_for_a_prediction, hides_its_answers,
    is_short, recapitulates,
]  # fmt: skip
EXERCISES = [has_solved_exercises, has_several_exercises]
CHAPTERS_RULES = [hands_over_its_script, links_terms_at_first_use]
