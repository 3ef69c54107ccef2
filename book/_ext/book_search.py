"""The book's search: each section, and each term of the glossary, is an entry for book/_static/search_engine.js.

It replaces Sphinx's search, which finds pages instead of sections and wants every word that was typed. So no
searchindex.js is written, and search.html is book/_templates/search.html. The entries are packed into a script: a page
that was opened from a folder may load scripts, and may not read other files.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from helpers.export.facts import facts_at

ERRORS = "book/error_messages.txt"
FIRST_PAGE = "book/intro"  # of the book; a test builds smaller ones
# Types of nodes that add no words to an entry's text: its heading, of which the entry has a field, and what is no text.
WITHOUT_WORDS = (nodes.title, nodes.term, nodes.raw, nodes.math_block, nodes.Invisible)
# Types of nodes whose words make one line of the text.
ONE_LINE = (nodes.Text, nodes.paragraph, nodes.row, nodes.rubric, nodes.caption)
# Of Python, only what is called or looked up, and variables of the environment: much of a cell is plumbing.
NAMES = re.compile(r"[A-Za-z_]\w{3,}(?=\()|(?<=\.)[A-Za-z_]\w{3,}|\b[A-Z][A-Z_]{4,}\b")


class Entry(NamedTuple):
    """What the search can find: a section or a term. search_engine.js knows these six fields by their positions."""

    page: str
    anchor: str
    headings: list[str]  # from the page's title on
    text: str
    code: str
    errors: list[str]  # messages that the section cures, which it need not quote


@dataclass
class Passages:
    """What an entry says, without its heading and without the entries inside it."""

    text: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


# --- what a page says -------------------------------------------------------------------------------------------------


def is_entry(node: nodes.Node) -> bool:
    """Whether a node is a section or a term, which the search finds by itself."""
    if isinstance(node, nodes.definition_list_item):  # a term of the glossary; other definitions have no ids
        return bool(node[0]["ids"])
    return isinstance(node, (nodes.section, nodes.citation))


def is_table_of_lies(node: nodes.Node) -> bool:
    """Whether a table is that of book/sabotage.md: a page long, and of words that the chapters say better."""
    return isinstance(node, nodes.table) and "sabotage" in node["classes"]


def words_of(node: nodes.Node) -> str:
    """A node's words on one line, without its formulas."""
    if isinstance(node, nodes.Text):
        return re.sub(r"\s+", " ", node)
    if isinstance(node, nodes.math):
        return "…"
    if isinstance(node, WITHOUT_WORDS):
        return ""
    separator = ""
    if isinstance(node, nodes.row):
        separator = " | "
    return separator.join(words_of(child) for child in node.children)


def collect_listing(node: nodes.literal_block, scripts: Path, passages: Passages) -> None:
    """Add to ``passages`` what a listing says: a traceback's message, the names in a cell, or else all of its text.

    ``scripts`` is the folder of the chapters' scripts.
    """
    text = node.astext()
    file = node.get("source", "")  # empty for a cell and for an output
    if "traceback" in node["classes"]:
        message_lines = re.findall(r"^(?!Traceback)\S.*", text, flags=re.M)  # the lines of its frames are indented
        passages.text.append("\n".join(message_lines))
    elif node.get("language") == "python" and not file:
        draws_figure = "@style()" in text
        if not draws_figure:
            names = sorted(set(NAMES.findall(text)))
            passages.code.append(" ".join(names))
    elif Path(file).parent != scripts:  # the script of a chapter has the same lines as its cells
        passages.code.append(text)


def collect(node: nodes.Element, scripts: Path, passages: Passages) -> None:
    """Add to ``passages`` what a node says, but for the sections and terms in it, which are entries of their own.

    ``scripts`` is the folder of the chapters' scripts.
    """
    for child in node.children:
        if is_entry(child) or is_table_of_lies(child):
            continue
        if isinstance(child, nodes.literal_block):
            collect_listing(child, scripts, passages)
        elif isinstance(child, ONE_LINE):
            passages.text.append(words_of(child))
        elif isinstance(child, nodes.Element) and not isinstance(child, WITHOUT_WORDS):
            collect(child, scripts, passages)


def entries(
    node: nodes.Element, page: str, scripts: Path, errors: Mapping[str, list[str]], above: Sequence[str] = ()
) -> Iterator[Entry]:
    """Yield an entry for each section and each term below ``node``, which is a part of the page ``page``.

    ``scripts`` is the folder of the chapters' scripts, and ``errors`` has the messages that a section cures. A section
    may be inside another one: ``above`` are the headings of the sections around ``node``.
    """
    for child in node.children:
        if not isinstance(child, nodes.Element):
            continue
        headings = [*above]
        if is_entry(child):
            heading = child[0]  # the title of a section, or a term
            headings.append("".join(words_of(part) for part in heading.children).strip())
            anchors = (
                child["ids"] or heading["ids"]
            )  # a section has ids itself, and a definition's are those of its term
            passages = Passages()
            collect(child, scripts, passages)
            yield Entry(
                page=page,
                anchor=anchors[0],
                headings=headings,
                text=joined(passages.text),
                code=joined(passages.code),
                errors=errors.get(f"{page}#{anchors[0]}", []),
            )
        yield from entries(child, page, scripts, errors, headings)


def joined(passages: list[str]) -> str:
    """The passages on lines of their own, without those that are empty."""
    stripped = [passage.strip() for passage in passages]
    return "\n".join(passage for passage in stripped if passage)


def read_errors(file: Path) -> dict[str, list[str]]:
    """{"page#anchor": messages} of a list in which each section's messages are indented below its name."""
    errors: dict[str, list[str]] = {}
    if not file.exists():
        return errors
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            errors[section].append(line.strip())
        elif line and not line.startswith("#"):
            section = line.strip()
            errors[section] = []
    return errors


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def turn_off_sphinx_search(app: Sphinx) -> None:
    """Keep Sphinx from writing its own index, searchindex.js."""
    if app.builder.format == "html":
        app.builder.search = False  # type: ignore[attr-defined]  # an HTML builder has it


def search_weight(app: Sphinx, page: str) -> float:
    """What a notebook says that its scores are multiplied by (``book.search_weight`` in its metadata)."""
    path = Path(app.env.doc2path(page))
    if path.suffix != ".ipynb":
        return 1
    return facts_at(path).search_weight


def write_entries(app: Sphinx) -> list[tuple[str, dict[str, str], str]]:
    """Write the entries of all pages, also of those that did not change, into search_entries.js.

    Returns the search's own page for Sphinx to write: its name, its context and its template. Raises ExtensionError if
    the list of error messages names a section that does not exist.
    """
    scripts = Path(app.srcdir, "scripts")
    errors = read_errors(Path(app.srcdir, ERRORS))
    entries_of_book: list[Entry] = []
    weights = {}
    for page in sorted(app.env.found_docs):
        entries_of_book += entries(app.env.get_and_resolve_doctree(page, app.builder), page, scripts, errors)
        weight = search_weight(app, page)
        if weight != 1:
            weights[page] = weight
    if app.config.root_doc == FIRST_PAGE:  # the list is about this book's sections
        check_sections(errors, entries_of_book)
    file = Path(app.outdir, "_static", "search_entries.js")
    file.write_text(script_with(entries_of_book, weights), encoding="utf-8")
    return [("search", {"title": "Search"}, "search.html")]


def check_sections(errors: Mapping[str, list[str]], entries_of_book: Sequence[Entry]) -> None:
    """Raise ExtensionError for a section, ``page#anchor``, that has messages and is not in the book."""
    sections = {f"{entry.page}#{entry.anchor}" for entry in entries_of_book}
    missing = [section for section in errors if section not in sections]
    if missing:
        raise ExtensionError(f"{ERRORS} names sections that are not there: {', '.join(missing)}")


def script_with(entries_of_book: Sequence[Entry], weights: Mapping[str, float]) -> str:
    """JavaScript with the entries, compressed, and the weights of pages: what search_engine.js reads."""
    columns = list(zip(*entries_of_book, strict=True))  # gzip makes columns smaller than rows
    data = json.dumps(columns, ensure_ascii=False, separators=(",", ":"))
    compressed = gzip.compress(data.encode(), mtime=0)  # without the time, so that equal entries make an equal file
    packed = base64.b64encode(compressed).decode()
    return f'var searchEntries = "{packed}";\nvar searchWeights = {json.dumps(weights)};\n'


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_css_file("search.css")
    app.add_js_file("search.js")
    app.connect("builder-inited", turn_off_sphinx_search)
    app.connect("html-collect-pages", write_entries)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
