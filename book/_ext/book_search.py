"""The book's search: each section, and each term of the glossary, is an entry for book/_static/search_engine.js.

It replaces Sphinx's search, which finds pages instead of sections and wants every word that was typed. So no
searchindex.js is written, and search.html is book/_templates/search.html. The entries are packed into a script: a page
that was opened from a folder may load scripts, and may not read other files.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from helpers.export.facts import facts_at

ERRORS = "book/error_messages.txt"
FIRST_PAGE = "book/intro"  # of the book; a test builds smaller ones
NO_WORDS = (nodes.title, nodes.term, nodes.raw, nodes.math_block, nodes.Invisible)
ONE_LINE = (nodes.paragraph, nodes.row, nodes.rubric, nodes.caption)
# Of Python, only what is called or looked up, and variables of the environment: much of a cell is plumbing.
NAMES = re.compile(r"[A-Za-z_]\w{3,}(?=\()|(?<=\.)[A-Za-z_]\w{3,}|\b[A-Z][A-Z_]{4,}\b")


class Entry(NamedTuple):
    """A section, a term, or a row of the table of lies; in JSON it is a list of these six."""

    page: str
    anchor: str
    headings: list[str]  # from the page's title on
    text: str
    code: str
    errors: list[str]  # messages that the section cures, which it need not quote


def is_entry(node: nodes.Node) -> bool:
    is_term = isinstance(node, nodes.definition_list_item) and node[0]["ids"]
    is_lie = isinstance(node, nodes.row) and node["ids"]
    return isinstance(node, (nodes.section, nodes.citation)) or bool(is_term or is_lie)


def name_rows(app: Sphinx, document: nodes.document) -> None:
    """Give each row of the table of lies an anchor: the table is a page long, and each lie is about something else."""
    for table in document.findall(lambda node: isinstance(node, nodes.table) and "sabotage" in node["classes"]):
        for number, row in enumerate(list(table.findall(nodes.tbody))[0].children, 1):
            row["ids"] = [f"lie-{number}"]


def read_errors(file: Path) -> dict[str, list[str]]:
    """{"page#anchor": messages} of a list in which each section's messages are indented below its name."""
    errors: dict[str, list[str]] = {}
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        if line.startswith("    "):
            errors[section].append(line.strip())
        elif line and not line.startswith("#"):
            errors[section := line.strip()] = []
    return errors


def line(node: nodes.Node) -> str:
    """A node's words on one line, without its formulas."""
    if isinstance(node, nodes.Text):
        return re.sub(r"\s+", " ", node)
    if isinstance(node, nodes.math):
        return "…"
    if isinstance(node, NO_WORDS):
        return ""
    return (" | " if isinstance(node, nodes.row) else "").join(map(line, node.children))


def listing(node: nodes.literal_block, scripts: Path) -> Iterator[tuple[str, str]]:
    """("text" or "code", lines) of a listing. The script of a chapter is left out: its cells have the same lines."""
    text = node.astext()
    if "traceback" in node["classes"]:  # the message, without the frames
        yield "text", "\n".join(re.findall(r"^(?!Traceback)\S.*", text, flags=re.M))
    elif node.get("language") == "python" and not node.get("source"):
        if "@style()" not in text:  # which draws a figure
            yield "code", " ".join(sorted(set(NAMES.findall(text))))
    elif Path(node.get("source") or "").parent != scripts:
        yield "code", text


def passages(node: nodes.Element, scripts: Path) -> Iterator[tuple[str, str]]:
    """("text" or "code", lines) of everything in an entry but its heading and the entries inside it."""
    # A row's heading is its first cell, and its last one quotes what stands on another page.
    for child in node.children[1:-1] if isinstance(node, nodes.row) else node.children:
        if isinstance(child, nodes.literal_block):
            yield from listing(child, scripts)
        elif isinstance(child, (nodes.Text, *ONE_LINE)) and not is_entry(child):
            yield "text", line(child)
        elif isinstance(child, nodes.Element) and not isinstance(child, NO_WORDS) and not is_entry(child):
            yield from passages(child, scripts)


def entries(
    node: nodes.Element, page: str, scripts: Path, errors: dict[str, list[str]], above: Sequence[str] = ()
) -> Iterator[Entry]:
    """The entries of each section and each term below ``node``. It takes their messages out of ``errors``."""
    for child in node.children:
        if not isinstance(child, nodes.Element):
            continue
        headings = [*above]
        if is_entry(child):
            headings += ["".join(map(line, child[0].children)).strip()]
            lines: dict[str, list[str]] = {"text": [], "code": []}
            for kind, words in passages(child, scripts):
                lines[kind] += [words.strip()] if words.strip() else []
            anchor = (child["ids"] or child[0]["ids"])[0]
            cured = errors.pop(f"{page}#{anchor}", [])
            yield Entry(page, anchor, headings, "\n".join(lines["text"]), "\n".join(lines["code"]), cured)
        yield from entries(child, page, scripts, errors, headings)


def replace_search(app: Sphinx) -> None:
    if app.builder.format == "html":
        app.builder.search = False  # type: ignore[attr-defined]  # an HTML builder has it


def weight_of(app: Sphinx, page: str) -> float:
    """What a notebook says that its scores are multiplied by (``book.search_weight`` in its metadata)."""
    path = Path(app.env.doc2path(page))
    return facts_at(path).search_weight if path.suffix == ".ipynb" else 1


def write(app: Sphinx) -> list[tuple[str, dict[str, str], str]]:
    """Write the entries of all pages, also of those that did not change; name the search's own page."""
    scripts = Path(app.srcdir, "scripts")
    book: list[Entry] = []
    errors = read_errors(Path(app.srcdir, ERRORS))
    for page in sorted(app.env.found_docs):
        book += entries(app.env.get_and_resolve_doctree(page, app.builder), page, scripts, errors)
    if errors and app.config.root_doc == FIRST_PAGE:
        raise ExtensionError(f"{ERRORS} names sections that are not there: {', '.join(errors)}")
    columns = [*zip(*book, strict=True)]  # which gzip makes smaller than rows
    data = json.dumps(columns, ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode()
    all_weights = {page: weight_of(app, page) for page in sorted(app.env.found_docs)}
    weights = json.dumps({page: weight for page, weight in all_weights.items() if weight != 1})
    script = f'var searchEntries = "{packed}";\nvar searchWeights = {weights};\n'
    Path(app.outdir, "_static", "search_entries.js").write_text(script, encoding="utf-8")
    return [("search", {"title": "Search"}, "search.html")]


def remove_search(app: Sphinx, exception: Exception | None) -> None:
    """Remove the scripts of Sphinx's search, which no page loads."""
    for name in ["searchtools.js", "language_data.js"]:
        Path(app.outdir, "_static", name).unlink(missing_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_css_file("search.css")
    app.add_js_file("search.js")
    app.connect("builder-inited", replace_search)
    app.connect("doctree-read", name_rows)
    app.connect("html-collect-pages", write)
    app.connect("build-finished", remove_search)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
