"""A notebook as the export needs it: the statements of its tagged cells, its title, the name of its script."""

import ast
import re
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from helpers.export.error import ExportError
from helpers.source import Statement, in_strings, split

LIBRARIES = {"torch", "torchvision", "numpy", "safetensors", "sklearn", "matplotlib"}  # in any order


@dataclass(frozen=True)
class Cells:
    """A notebook's code cells: as statements, those tagged ``export``, or all where none has the tag."""

    parameters: list[Statement]
    exported: list[Statement]
    elsewhere: set[str]  # the words of the other cells


def read_notebook(path: str | Path) -> NotebookNode:
    """The notebook at a path. Raises ExportError for a file that is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells without ids, which older notebooks have
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)  # which read only logs
        return notebook
    except Exception as error:  # on a damaged file nbformat raises errors of any type
        reason = first_line(str(error)) or type(error).__name__
        what = f"{path} is not a notebook that can be read: {reason}"
        raise ExportError(f"{what}\nGive an .ipynb that JupyterLab opens.") from None


def first_line(text: str) -> str:
    """The first line of a text, cut to 60 characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 60 else f"{line[:59]}…"


def label(statement: Statement) -> str:
    """The beginning of a message about a statement: its cell, and its first line."""
    return f"{statement.where}: `{first_line(statement.code)}`"


def sort_cells(notebook: NotebookNode, name: str) -> Cells:
    """The Cells of a notebook. Raises ExportError for a cell of the script that is not Python, such as a magic."""
    numbered = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    tagged = any("export" in cell.metadata.get("tags", []) for _, cell in numbered)
    cells = Cells([], [], set())
    for number, cell in numbered:
        tags = cell.metadata.get("tags", [])
        if tagged and not {"parameters", "export"} & {*tags}:
            cells.elsewhere.update(re.findall(r"\w+", cell.source))
            continue
        source = re.sub("\r\n?", "\n", cell.source).strip("\n")
        where = f"{name}, cell {number}"
        try:
            statements = [inner for statement in split(source, where) for inner in without_guard(statement)]
            (cells.parameters if "parameters" in tags else cells.exported).extend(statements)
        except SyntaxError as error:
            number = error.lineno or 1
            line = first_line("".join(source.split("\n")[number - 1 : number]))
            mend = "Correct it, or move it to a cell that is not tagged export."
            mend = mend if tagged else "Delete it, or tag the cells of the script: export."
            raise ExportError(f"{where} is not Python in line {number}, `{line}`: {error.msg}. {mend}") from None
    return cells


def without_guard(statement: Statement) -> list[Statement]:
    """The statements under ``if __name__ == "__main__":``, which is always so in a notebook; or the statement alone."""
    node, lines = statement.node, statement.code.split("\n")
    if not isinstance(node, ast.If) or node.orelse or ast.unparse(node.test) != "__name__ == '__main__'":
        return [statement]
    inside, indent = in_strings(statement.code), node.body[0].col_offset
    if node.body[0].lineno == node.lineno:
        lines[0] = lines[0][indent:]
    else:
        kept = (number in inside or line[:indent].strip() for number, line in enumerate(lines, 1))
        lines = [line if keep else line[indent:] for keep, line in zip(kept, lines, strict=True)][1:]
    first, *others = split("\n".join(lines), statement.where)
    return [replace(first, above=statement.above + first.above), *others]


def script_name(notebook: NotebookNode, name: str) -> str:
    """The script's name: the notebook's, with _script behind it if Python would import the script for a module."""
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    imported = re.search(rf"^\s*(from|import|import .*,) +{re.escape(name)}\b", source, re.MULTILINE)
    return f"{name}_script" if imported or name in LIBRARIES | sys.stdlib_module_names else name


def title_and_purpose(notebook: NotebookNode, name: str) -> tuple[str, str]:
    """(the title without its number, the sentence "The script of this chapter …" as "This script …", or "")."""
    markdown = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    markdown = re.sub(r"\{[\w:-]+\}`([^`<]*?)(?: *<[^`>]*>)?`", r"\1", markdown)  # {term}`rank <Rank>`
    markdown = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", markdown)  # [text](address), emphasis
    title = re.search(r"^# (?:\d+\. )?(.+)", markdown, re.MULTILINE)
    purpose = re.search(r"The script of this chapter (.+?[.?!])(?=\s|$)", markdown, re.DOTALL)
    return title[1] if title else name, f"This script {' '.join(purpose[1].split())}" if purpose else ""
