"""A notebook as the export needs it: the statements of its tagged cells, its title, the name of its script."""

import ast
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from helpers.source import Statement, modules_of, split

IMPORTED_BY_TORCH = "torch functorch torchgen numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec".split()
IMPORTED_BY_TORCH += "triton typing_extensions sklearn scipy joblib threadpoolctl".split()  # the last 4: by the digits
ESCAPED = re.compile(r"\s*(?:[\w.,* ]+=\s*)?[%!]")  # the beginning of a magic or of a shell's command
RAISES = {"raises-exception", "nbval-raises-exception"}


class ExportError(Exception):
    """A notebook that cannot become a script, or a file that cannot be written: where, why, and what to change."""


@dataclass(frozen=True)
class Cells:
    """A notebook's code cells, as statements."""

    parameters: list[Statement]
    exported: list[Statement]
    read_elsewhere: set[str]  # the names that the other cells read


def read_notebook(path: str | Path) -> NotebookNode:
    """The notebook at a path. Raises ExportError for a file that is not one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nbformat warns of cells without ids, and a script needs no ids
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
        return notebook
    except Exception as error:  # on a damaged file nbformat raises errors of any type
        reason = first_line(str(error)) or type(error).__name__
        raise ExportError(f"{path} is not a notebook that can be read: {reason}") from None


def first_line(text: str) -> str:
    """The first line of a text, cut to 60 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 60 else f"{line[:59]}…"


def label(statement: Statement) -> str:
    """The beginning of a message about a statement: its cell, and its first line."""
    return f"{statement.where}: `{first_line(statement.code)}`"


def sort_cells(notebook: NotebookNode, name: str) -> Cells:
    """The Cells of a notebook: those tagged ``export`` make the script, or all where none has the tag.

    Raises ExportError for a cell of the script that is not Python.
    """
    code = [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]
    tagged = any("export" in tags_of(cell) for _, cell in code)
    cells = Cells([], [], set())
    for number, cell in code:
        tags = tags_of(cell)
        if "parameters" in tags:
            cells.parameters.extend(statements(cell.source, f"{name}, cell {number}"))
        elif "export" not in tags and tagged:
            cells.read_elsewhere.update(names_read(cell.source))
        elif RAISES & tags:
            raise ExportError(
                f"{name}, cell {number} raises, says its tag, and the script would end there. Do not export the cell."
            )
        else:
            cells.exported.extend(statements(cell.source, f"{name}, cell {number}"))
    return cells


def tags_of(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def statements(source: str, where: str) -> list[Statement]:
    """The statements of a cell of the script. Raises ExportError for what is not Python."""
    source = source.replace("\r\n", "\n").replace("\r", "\n").strip("\n")
    try:
        return split(source, where)
    except SyntaxError as error:
        lines = source.split("\n")
        line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
        if ESCAPED.match(line):
            raise ExportError(
                f"{where}: `{first_line(line)}` is for notebooks. Move it to a cell that is not tagged export."
            ) from None
        at = f" in line {error.lineno}, `{first_line(line)}`" if line else ""
        raise ExportError(f"{where} is not Python{at}: {error.msg}. Correct it, or do not export the cell.") from None


def names_read(source: str) -> set[str]:
    """The names that a cell reads which is not exported, and need not be Python."""
    try:
        return {name for statement in split(re.sub("^[%!].*", "", source, flags=re.M)) for name in statement.reads}
    except SyntaxError:
        return set()


def script_name(notebook: NotebookNode, name: str) -> str:
    """The script's name: the notebook's, with _script behind it if Python would import the script for a module."""
    cells = sort_cells(notebook, name)
    modules = {*sys.stdlib_module_names, *IMPORTED_BY_TORCH}
    for statement in [*cells.parameters, *cells.exported]:
        for node in ast.walk(statement.node) if statement.node else []:
            modules.update(module.partition(".")[0] for module in modules_of(node))
    return f"{name}_script" if name in modules else name


def title_and_purpose(notebook: NotebookNode, name: str) -> tuple[str, str]:
    """(the title without its number, the sentence "The script of this chapter …" as "This script …", or "")."""
    markdown = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    markdown = re.sub(r"\{[\w:-]+\}`([^`<]*?)(?: *<[^`>]*>)?`", r"\1", markdown)  # {term}`rank <Rank>`
    markdown = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", markdown)  # [text](address), emphasis
    title = re.search(r"^# (?:\d+\. )?(.+)", markdown, re.MULTILINE)
    purpose = re.search(r"The script of this chapter (.+?[.?!])(?=\s|$)", markdown, re.DOTALL)
    return title[1] if title else name, f"This script {' '.join(purpose[1].split())}" if purpose else ""
