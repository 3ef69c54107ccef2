"""A notebook as statements: its title, its cells by what their tags say, its magics. Nothing is executed."""

import json
import re
import shlex
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt
from nbconvert.utils.exceptions import ConversionException

from helpers.export.inline import belongs
from helpers.export.source import IMPORT, Statement, check_syntax, each_import, imported_name, split

BODY_MAGICS = ("time", "capture", "prun")  # cell magics that run the cell's body as it stands


class ExportError(ConversionException):
    """A notebook that cannot become a script. The message says where, why and what to change."""


@dataclass
class Cells:
    """The notebook's code cells, as statements and names."""

    parameters: list = field(default_factory=list)
    exported: list = field(default_factory=list)
    kernel_only: set = field(default_factory=lambda: {"get_ipython", "display"})  # names that a script cannot have
    elsewhere: dict = field(default_factory=dict)  # what the other cells bind: {name: where}


# ---- Reading a notebook


def read_notebook(path):
    """The notebook at ``path`` as a NotebookNode. Raises ExportError unless it is a valid notebook of format 4."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ExportError(f"{path} cannot be read: {reason}.\nGive a chapter or the path of a notebook.") from None
    try:
        version = json.loads(text)["nbformat"]
    except (ValueError, TypeError, KeyError):
        raise ExportError(f"{path} is not a notebook.\nGive an .ipynb file that Jupyter can open.") from None
    if version != 4:
        raise ExportError(
            f"{path} has notebook format {version}, and format 4 is needed.\n"
            f"Convert it: jupyter nbconvert --to notebook --inplace {shlex.quote(str(path))}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about cells without ids, which a script does not need
            notebook = nbformat.reads(text, as_version=4)
            nbformat.validate(notebook)
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"{path} is not a valid notebook: {reason}\nOpen it in Jupyter and save it.") from None
    return notebook


def check_language(notebook, name):
    """Raise ExportError unless the notebook's language is Python, or not given."""
    metadata = notebook.metadata
    language = metadata.get("kernelspec", {}).get("language") or metadata.get("language_info", {}).get("name")
    if (language or "python").lower() not in ("python", "ipython"):
        raise ExportError(f"{name} is a notebook in {language}.\nOnly one in Python can become a torchrun script.")


def headings_and_paragraphs(markdown):
    """A markdown cell's headings [(level, text)] and paragraphs [text], without their markup."""
    tokens = MarkdownIt().parse(markdown)
    headings, paragraphs = [], []
    for opening, inline in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open":
            headings.append((int(opening.tag[1]), plain(inline)))
        elif opening.type == "paragraph_open" and opening.level == 0:
            paragraphs.append(plain(inline))
    return headings, paragraphs


def plain(inline):
    """The words of a line of markdown: no emphasis, no link targets, and of {term}`rank <Rank>` only: rank."""
    words = ""
    for token in inline.children:
        if token.type == "code_inline" and (role := re.search(r"\{[\w:-]+\}$", words)):
            words = words[: role.start()] + re.sub(r"\s*<[^>]*>$", "", token.content)
        elif token.type in ("text", "code_inline"):
            words += token.content
        elif token.type in ("softbreak", "hardbreak"):
            words += " "
    return " ".join(words.split())


def title_and_promise(notebook, name):
    """The notebook's title, and the first sentence below it ("" where there is none)."""
    title = None
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        headings, paragraphs = headings_and_paragraphs(cell.source)
        title = title or next((text for level, text in headings if level == 1), None)
        prose = [text for text in paragraphs if re.match(r"[\w\"']", text)]  # no label, no directive
        if title and prose:
            return title, re.match(r".+?[.?!](?=\s|$)|.+", prose[0])[0]
    return title or name, ""


# ---- From cells to statements


def sort_cells(notebook, name):
    """The code cells: the parameters, the exported ones (tagged ``export``; without such a tag, all), the rest.

    Raises ExportError when the notebook is not in Python, or a cell of the script is not.
    """
    check_language(notebook, name)
    cells, title, heading = Cells(), None, ""
    tagged = any("export" in tags_of(cell) for cell in notebook.cells if cell.cell_type == "code")
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            for level, text in headings_and_paragraphs(cell.source)[0]:
                if level == 1 and title is None:
                    title = text  # stands in the docstring
                else:
                    heading = text
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        where, tags = f"{name}, cell {number} (`{first_line(cell.source)}`)", tags_of(cell)
        if "parameters" in tags:
            if cells.parameters:
                raise ExportError(f"{where} is the second that is tagged parameters.\nKeep one such cell.")
            found = cells.parameters = cell_statements(cell.source, where, heading, tagged=True)
        elif "export" in tags or not tagged:
            found = cell_statements(cell.source, where, heading, "export" in tags)
            if {"raises-exception", "nbval-raises-exception"} & set(tags):
                found = [left_out(f"{first_line(cell.source)} (a cell that raises)", where, heading)]
            cells.exported += found
        else:
            try:
                found = cell_statements(cell.source, where, heading, tagged=False)
            except ExportError:
                continue  # what is not exported may be anything
            for bound in (bound for statement in found for bound in statement.binds):
                cells.elsewhere.setdefault(bound, where)
        for statement in found:
            for one in each_import(statement) if isinstance(statement.node, IMPORT) else []:
                if belongs(one.node) == "notebook":
                    cells.kernel_only.add(imported_name(one.node))
    return cells


def tags_of(cell):
    return cell.metadata.get("tags", [])


def first_line(source):
    """The first line of a source text that is not blank, shortened to 60 characters."""
    line = next((line.strip() for line in source.split("\n") if line.strip()), "")
    return line if len(line) <= 60 else f"{line[:59]}…"


def left_out(text, where, heading, above=""):
    """The line of the script that stands for what is left out of it."""
    return Statement(None, "", f"{above}# Notebook only: {text}", "", where, heading)


def cell_statements(source, where, heading, tagged):
    """The statements of a code cell; a magic is what IPython makes of it, a call of get_ipython()."""
    source = source.replace("\r\n", "\n").strip("\n")
    notes = []
    if magic := re.match(r"\s*%%(\w+).*", source):
        if magic[1] not in BODY_MAGICS:
            if tagged:
                raise ExportError(f"{where} is exported, but %%{magic[1]} is for notebooks.\nTake one of them away.")
            return [left_out(f"a %%{magic[1]} cell", where, heading)]
        notes = [left_out(magic[0].strip(), where, heading)]
        source = source[magic.end() :].strip("\n")
    python = as_python(source, where)
    found = split(python, where, heading)
    written = source.split("\n")
    if python != source and len(python.split("\n")) == len(written):
        for number, statement in enumerate(found):
            if statement.node is not None:
                lines = written[statement.node.lineno - 1 : statement.node.end_lineno]
                found[number] = replace(statement, written="\n".join(lines))
    return notes + found


def as_python(source, where):
    """The source, its magics translated if it has any. Raises ExportError for what a module may not contain."""
    try:
        check_syntax(source)
        return source
    except SyntaxError as error:
        try:
            python = TransformerManager().transform_cell(source).rstrip("\n")
            check_syntax(python)
            return python
        except SyntaxError:
            line = f" in line {error.lineno}" if error.lineno else ""
            raise ExportError(
                f"{where} has a syntax error{line}: {error.msg}.\n"
                "A script's cells are plain Python; `await` and `return` belong into a function."
            ) from None
