"""A notebook as the export needs it: the statements of its tagged cells, its title, the name of its script."""

import re
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from helpers.export.error import ExportError
from helpers.source import Statement, split

# Libraries that the chapters use. They may be imported in any order, and no script may have the name of one.
LIBRARIES = {"torch", "torchvision", "numpy", "safetensors", "sklearn", "matplotlib"}


@dataclass(frozen=True)
class Cells:
    """A notebook's code cells, as the export sees them. Where no cell has the tag ``export``, the script has all."""

    parameters: list[Statement] = field(default_factory=list)  # of the cells tagged ``parameters``
    exported: list[Statement] = field(default_factory=list)  # of the cells of the script
    words_elsewhere: set[str] = field(default_factory=set)  # all words in the code of the other cells


def read_notebook(path: str | Path) -> NotebookNode:
    """The notebook at a path. Raises ExportError for a file that is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells without ids, which older notebooks have
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)  # raises for a mistake of which `read` only writes to a log
        return notebook
    except Exception as error:  # on a damaged file nbformat raises errors of any type
        reason = first_line(str(error)) or type(error).__name__
        what = f"{path} is not a notebook that can be read: {reason}"
        raise ExportError(f"{what}\nGive an .ipynb that JupyterLab opens.") from None


def first_line(text: str) -> str:
    """The first line of a text, cut to 60 characters."""
    longest = 60
    line, _, _ = text.strip().partition("\n")
    if len(line) > longest:
        return f"{line[: longest - 1]}…"
    return line


def label(statement: Statement) -> str:
    """The beginning of a message about a statement: its cell, and its first line."""
    return f"{statement.where}: `{first_line(statement.code)}`"


def sort_cells(notebook: NotebookNode, name: str) -> Cells:
    """Sort a notebook's code cells by their tags: those with parameters, those of the script, and others.

    If no cell has the tag ``export``, all cells are of the script. ``name`` is the notebook's, for messages. Raises
    ExportError for a cell of the script that is not Python, such as a magic.
    """
    has_tags = any("export" in tags_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    cells = Cells()
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        where = f"{name}, cell {number}"
        is_of_script = "export" in tags_of(cell) or not has_tags
        if "parameters" in tags_of(cell):
            cells.parameters.extend(statements_of(cell, where, has_tags))
        elif is_of_script:
            cells.exported.extend(statements_of(cell, where, has_tags))
        else:
            cells.words_elsewhere.update(re.findall(r"\w+", cell.source))
    return cells


def tags_of(cell: NotebookNode) -> list[str]:
    """The tags of a cell, which may have none."""
    return cell.metadata.get("tags", [])


def statements_of(cell: NotebookNode, where: str, has_tags: bool) -> list[Statement]:
    """The statements of a cell. Raises ExportError for a cell that is not Python.

    ``where`` names the cell in the message, such as "train, cell 3". ``has_tags`` says whether the notebook tags the
    cells of its script, so that the message can advise to leave the tag off.
    """
    source = re.sub("\r\n?", "\n", cell.source).strip("\n")
    try:
        return split(source, where)
    except SyntaxError as error:
        line_number = error.lineno or 1
        # The slice has one line, or none: an error at the end of the cell may be behind the last line.
        erroneous_lines = source.split("\n")[line_number - 1 : line_number]
        line = first_line("".join(erroneous_lines))
        advice = "Delete it, or tag the cells of the script: export."
        if has_tags:
            advice = "Correct it, or move it to a cell that is not tagged export."
        raise ExportError(f"{where} is not Python in line {line_number}, `{line}`: {error.msg}. {advice}") from None


def script_name(notebook: NotebookNode, name: str) -> str:
    """The script's name: the notebook's, with _script behind it if Python would import the script for a module.

    Python looks for a module first in the folder of the script: a script torch.py that imports torch imports itself.
    """
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    # "from NAME import x", "import NAME" or "import os, NAME"
    is_imported = re.search(rf"^\s*(from|import|import .*,) +{re.escape(name)}\b", source, re.MULTILINE)
    is_of_a_library = name in LIBRARIES or name in sys.stdlib_module_names
    if is_imported or is_of_a_library:
        return f"{name}_script"
    return name


def title_and_purpose(notebook: NotebookNode, name: str) -> tuple[str, str]:
    """(title, purpose): a notebook's title without its number, and a sentence on what its script does.

    The sentence is "This script …", made of a chapter's "The script of this chapter …". It is empty if the notebook has
    no such sentence. A notebook without a title has ``name`` for one.
    """
    markdown = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    # Leave only the text of roles such as {term}`rank <Rank>`, of links such as [text](address), and of emphasis.
    markdown = re.sub(r"\{[\w:-]+\}`([^`<]*?)(?: *<[^`>]*>)?`", r"\1", markdown)
    markdown = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", markdown)
    title = name
    heading = re.search(r"^# (?:\d+\. )?(.+)", markdown, re.MULTILINE)  # "# 4. Data parallelism"
    if heading is not None:
        title = heading[1]
    sentence = re.search(r"The script of this chapter (.+?[.?!])(?=\s|$)", markdown, re.DOTALL)
    if sentence is None:
        return title, ""
    on_one_line = " ".join(sentence[1].split())
    return title, f"This script {on_one_line}"
