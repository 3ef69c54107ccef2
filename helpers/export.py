"""A chapter as one script for torchrun: ``script_from_notebook``, and ``jupyter nbconvert --to torchrun``.

Text in, text out. The notebook's code is read with ast and symtable and is never executed; statements keep
their own formatting and comments. What a cell uses of the run-time modules is copied into the script.
"""

import ast
import builtins
import functools
import json
import os
import re
import subprocess
import symtable
import sys
import textwrap
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from markdown_it import MarkdownIt
from nbconvert.exporters import Exporter
from nbconvert.utils.exceptions import ConversionException

RUNTIME = ("process_group", "data", "models")  # what a script may use of helpers; each imports only from those before
NOTEBOOK_PACKAGES = ("helpers", "IPython", "ipywidgets")  # nothing else of these can be used outside a notebook
TRANSPARENT_MAGICS = ("time", "capture", "prun")  # they run their cell's body in the kernel, so it stays
RESERVED = ("main", "parse_args", "args", "run_and_exit", "record", "argparse", "help")
BUILTINS = {*dir(builtins), "__name__", "__file__", "__doc__"}


class ExportError(ConversionException):
    """A notebook that cannot become a script. The message says where, why and what to change."""


@dataclass(frozen=True)
class Statement:
    """One top-level statement as it was written, and where."""

    node: ast.stmt | None  # None: comments at the end of a cell
    code: str
    above: str = ""  # the comment and blank lines before it
    comment: str = ""  # the comment behind it
    where: str = ""
    heading: str = ""

    @property
    def text(self):
        return f"{self.above}\n{self.code}{self.comment and '  ' + self.comment}".strip("\n")


# ---- Reading the notebook


def read_notebook(path):
    """The notebook at ``path`` as a NotebookNode. Raises ExportError unless it is a Python notebook of format 4."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ExportError(f"{path} cannot be read: {reason}.\nGive the path of a notebook, or a chapter.") from None
    try:
        version = json.loads(text)["nbformat"]
    except (ValueError, TypeError, KeyError):
        raise ExportError(f"{path} is not a notebook.\nGive an .ipynb file that Jupyter can open.") from None
    if version != 4:
        raise ExportError(
            f"{path} has notebook format {version}; this reads format 4.\n"
            f"Convert it: jupyter nbconvert --to notebook --inplace {path}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cells without ids are no concern of a script
            notebook = nbformat.reads(text, as_version=4)
            nbformat.validate(notebook)
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(f"{path} is not a valid notebook: {reason}\nOpen and save it in Jupyter.") from None
    return notebook


def check_language(notebook, name):
    """Raise ExportError unless the notebook's language is Python, or not given."""
    metadata = notebook.metadata
    language = metadata.get("kernelspec", {}).get("language") or metadata.get("language_info", {}).get("name")
    if (language or "python").lower() not in ("python", "ipython"):
        raise ExportError(f"{name} is written in {language}.\nOnly a Python notebook can become a torchrun script.")


def headings_and_text(markdown):
    """The headings [(level, text)] and the paragraphs of a markdown cell, both as plain text."""
    tokens = MarkdownIt().parse(markdown)
    headings, paragraphs = [], []
    for opening, inline in zip(tokens, tokens[1:], strict=False):
        if opening.type == "heading_open":
            headings.append((int(opening.tag[1]), plain(inline)))
        elif opening.type == "paragraph_open" and opening.level == 0:
            paragraphs.append(plain(inline))
    return headings, paragraphs


def plain(inline):
    """The text of a markdown line without its markup, links and MyST roles."""
    words = []
    for token in inline.children:
        if token.type == "code_inline" and words and re.search(r"\{[\w:-]+\}$", words[-1]):
            words[-1] = re.sub(r"\{[\w:-]+\}$", "", words[-1])  # {term}`rank <ranks>` reads: rank
            words.append(re.sub(r"\s*<[^>]*>$", "", token.content))
        elif token.type in ("text", "code_inline"):
            words.append(token.content)
        elif token.type in ("softbreak", "hardbreak"):
            words.append(" ")
    return " ".join("".join(words).split())


def title_and_promise(notebook, name):
    """The chapter's title, and the first sentence below it ("" when there is none)."""
    title = None
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        headings, paragraphs = headings_and_text(cell.source)
        title = title or next((text for level, text in headings if level == 1), None)
        sentences = [text for text in paragraphs if re.match(r"[\w\"']", text)]  # neither a label nor a directive
        if title and sentences:
            return title, re.match(r".+?[.?!](?=\s|$)|.+", sentences[0])[0]
        if title and len(headings) > 1:
            break
    return title or name, ""


# ---- From cells to statements


def statements(source, where="", heading=""):
    """The top-level statements of a source text, with their comments."""
    lines = source.split("\n")
    nodes = ast.parse(source).body
    found, done = [], 0  # `done`: lines that are taken
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        above, code = lines[done : first - 1], lines[first - 1 : node.end_lineno]
        if found and found[-1].node is not None and hasattr(found[-1].node, "body"):
            taken = leading_indented(above)  # comments that end the body above
            if taken:
                found[-1] = replace(found[-1], code="\n".join([found[-1].code, *above[:taken]]))
                above = above[taken:]
        rest = code[-1].encode()[node.end_col_offset :].decode()
        code[-1] = code[-1].encode()[: node.end_col_offset].decode()
        if first == node.lineno:  # not decorated, so it may stand behind a semicolon
            code[0] = code[0].encode()[node.col_offset :].decode()
        comment = re.fullmatch(r"\s*;?\s*(#.*)?", rest)
        found.append(
            Statement(node, "\n".join(code), "\n".join(above), comment[1] or "" if comment else "", where, heading)
        )
        done = node.end_lineno if following is None or following.lineno > node.end_lineno else node.end_lineno - 1
        if following is not None and following.lineno == node.end_lineno:
            done = node.end_lineno  # it shares the line: nothing stands above it
    above = lines[done:]
    if found and hasattr(found[-1].node, "body") and (taken := leading_indented(above)):
        found[-1] = replace(found[-1], code="\n".join([found[-1].code, *above[:taken]]))
        above = above[taken:]
    if any(line.strip() for line in above):
        found.append(Statement(None, "", "\n".join(above), "", where, heading))
    return found


def leading_indented(lines):
    """How many of the lines belong to an indented block above them."""
    count = 0
    for number, line in enumerate(lines, 1):
        if line.startswith((" ", "\t")) and line.strip():
            count = number
        elif line.strip():
            break
    return count
