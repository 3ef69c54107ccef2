"""The book's search: each section, and each term of the glossary, is an entry for book/_static/search_engine.js.

It replaces Sphinx's search, which finds pages instead of sections and wants every word that was typed. So no
searchindex.js is written, and search.html is book/_templates/search.html. The entries are packed into a script: a page
that was opened from a folder may load scripts, and may not read other files.
"""

import base64
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from helpers.export.facts import facts_at

ERRORS = "book/error_messages.txt"
PHRASES = "book/search_phrases.txt"
FIRST_PAGE = "book/intro"
QUESTIONS = "book/questions"
# Types of nodes that add no words to an entry's text: its heading, of which the entry has a field, and what is no text.
NODES_WITHOUT_WORDS = (nodes.title, nodes.term, nodes.raw, nodes.math_block, nodes.Invisible)
# Types of nodes whose words make one line of the text.
NODES_OF_ONE_LINE = (nodes.Text, nodes.paragraph, nodes.row, nodes.rubric, nodes.caption)
# Of Python, the names by which a reader would search: much of a cell is plumbing.
NAMES = re.compile(
    r"[A-Za-z_]\w{3,}(?=\()"  # what is called, such as all_reduce(
    r"|(?<=\.)[A-Za-z_]\w{3,}"  # what is looked up, such as .bfloat16
    r"|\b[A-Z][A-Z_]{4,}\b"  # a variable of the environment, such as MASTER_ADDR
)
# Of a long listing, the search keeps each of these words once: a reader types words of it, and never all of it.
WORDS_OF_LISTING = re.compile(r"[A-Za-z_][\w-]{2,}")
LONG_LISTING = 200  # characters
# A name such as print, that more sections of the book have in their cells than these, leads to none of them.
MAX_SECTIONS_WITH_NAME = 80


class Entry(NamedTuple):
    """What the search can find: a section or a term. search_engine.js knows these eight fields by their positions."""

    page: str
    anchor: str
    headings: list[str]  # from the page's title on
    text: str
    code: str  # short listings, such as a shell command
    names: str  # those in cells and in long listings that text and code lack, with spaces between them
    errors: list[str]  # messages that the section cures, which it need not quote
    questions: list[str]  # what readers ask or type when they look for this section, in their own words


@dataclass
class Passages:
    """What an entry says, without its heading and without the entries inside it."""

    text: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answers:
    """What sections answer. The keys are addresses of sections, such as ``notebooks/04_ddp#break-it``."""

    errors: Mapping[str, list[str]]  # the messages that a section explains
    questions: Mapping[str, list[str]]  # what readers ask, in their own words


# --- what a page says -------------------------------------------------------------------------------------------------


def has_own_entry(node: nodes.Node) -> bool:
    """Whether a node of a page is one of those that the search finds by themselves, each with an Entry of its own.

    They are the sections, the terms of the glossary, and the works in the list of references (citations).
    """
    if isinstance(node, nodes.definition_list_item):
        term = node[0]
        is_in_glossary = bool(term["ids"])  # no link can lead to other definitions
        return is_in_glossary
    return isinstance(node, (nodes.section, nodes.citation))


def is_table_of_lies(node: nodes.Node) -> bool:
    """Whether a table is that of the page on lies, which are bugs planted to see whether the chapters notice them.

    The search leaves it out: it is a page long, and the chapters say better what its words are about.
    """
    return isinstance(node, nodes.table) and "sabotage" in node["classes"]


def words_of(node: nodes.Node) -> str:
    """The words of a node and of those inside it, on one line. A formula is shown as ``…``."""
    if isinstance(node, nodes.Text):
        return re.sub(r"\s+", " ", node)
    if isinstance(node, nodes.math):
        return "…"
    if isinstance(node, NODES_WITHOUT_WORDS):
        return ""
    separator = ""
    if isinstance(node, nodes.row):
        separator = " | "
    return separator.join(words_of(child) for child in node.children)


def collect_listing(listing: nodes.literal_block, scripts: Path, passages: Passages) -> None:
    """Add to ``passages`` the words by which a reader can find a listing: a block of code, or what a cell printed.

    Of a traceback, these are the lines of its message. Of a notebook's code cell, they are the names in it that a
    reader may look for, such as ``all_reduce``. Of a chapter's script in the folder ``scripts`` there are none, because
    the chapter's cells have the same lines. Of everything else, such as a shell command, all of its text is added if
    it is short, and each word of it once if it is long.
    """
    text = listing.astext()
    if "traceback" in listing["classes"]:
        passages.text.append(message_of_traceback(text))
        return

    included_file = listing.get("source", "")  # set where a page includes a file; empty for a cell and for an output
    is_cell = listing.get("language") == "python" and not included_file
    if is_cell:
        # Code that draws a figure has this decorator. The names in it are those of a drawing library.
        draws_figure = "@style()" in text
        if not draws_figure:
            passages.names += NAMES.findall(text)
        return

    is_script = Path(included_file).parent == scripts
    if is_script:
        return
    if len(text) > LONG_LISTING:
        passages.names += WORDS_OF_LISTING.findall(text)
    else:
        passages.code.append(text)


def message_of_traceback(traceback: str) -> str:
    """The lines with the error, such as ``ValueError: no data``, of the text of a traceback.

    They are those that are not indented, but for the first one, which is ``Traceback (most recent call last)``.
    """
    message_lines = []
    for line in traceback.split("\n"):
        is_indented = line[:1].isspace()
        if line and not is_indented and not line.startswith("Traceback"):
            message_lines.append(line)
    return "\n".join(message_lines)


def collect(node: nodes.Element, scripts: Path, passages: Passages) -> None:
    """Add to ``passages`` the text and the code of ``node``, a section of a page or a part of one.

    Sections and terms of the glossary inside it are left out, because the search finds each of them by itself.
    ``scripts`` is the folder of the chapters' scripts.
    """
    for child in node.children:
        if has_own_entry(child):
            continue
        if is_table_of_lies(child):  # a page long, and the chapters say better what its words are about
            continue
        if isinstance(child, nodes.literal_block):
            collect_listing(child, scripts, passages)
        elif isinstance(child, NODES_OF_ONE_LINE):  # such as a paragraph, or a row of a table
            passages.text.append(words_of(child))
        elif isinstance(child, nodes.Element) and not isinstance(child, NODES_WITHOUT_WORDS):
            collect(child, scripts, passages)  # such as a list, whose items have the paragraphs


def entries(
    node: nodes.Element, page: str, scripts: Path, answers: Answers, headings_above: Sequence[str] = ()
) -> Iterator[Entry]:
    """Yield an Entry of the search for each section, term of the glossary and cited work that is inside ``node``.

    ``node`` is a page, or a part of it. ``headings_above`` are the headings of the sections around it, from the page's
    title on. The other arguments are those of ``entry_of``.
    """
    for child in node.children:
        if not isinstance(child, nodes.Element):
            continue
        headings = headings_above
        if has_own_entry(child):
            entry = entry_of(child, page, scripts, answers, headings_above)
            yield entry
            headings = entry.headings
        # A section or any other node may contain further sections.
        yield from entries(child, page, scripts, answers, headings)


def entry_of(node: nodes.Element, page: str, scripts: Path, answers: Answers, headings_above: Sequence[str]) -> Entry:
    """The Entry of a section, a term of the glossary or a cited work, without the sections and terms inside it.

    ``page`` is the name of its page, such as ``notebooks/04_ddp``, and ``headings_above`` are the headings around it.
    ``scripts`` is the folder of the chapters' scripts, whose code is not searched. ``answers`` says what a section
    answers that it need not quote.
    """
    heading = node[0]  # the title of a section, or a term
    heading_text = "".join(words_of(part) for part in heading.children).strip()
    if node["ids"]:
        anchor = node["ids"][0]
    else:  # in the glossary, links lead to the term
        anchor = heading["ids"][0]
    passages = Passages()
    collect(node, scripts, passages)
    text = joined(passages.text)
    code = joined(passages.code)
    words_before = set(WORDS_OF_LISTING.findall(f"{heading_text} {text} {code}"))
    return Entry(
        page=page,
        anchor=anchor,
        headings=[*headings_above, heading_text],
        text=text,
        code=code,
        names=" ".join(sorted(set(passages.names) - words_before)),
        errors=answers.errors.get(f"{page}#{anchor}", []),
        questions=answers.questions.get(f"{page}#{anchor}", []),
    )


def joined(passages: list[str]) -> str:
    """The passages on lines of their own, without those that are empty."""
    stripped = [passage.strip() for passage in passages]
    return "\n".join(passage for passage in stripped if passage)


def read_lines_of_sections(file: Path) -> dict[str, list[str]]:
    """Read lines that belong to sections of the book: ``{"page#anchor": ["line", …], …}``.

    The file has the address of a section and, indented below it, its lines, such as the error messages that it
    explains. A line that begins with # is a comment::

        notebooks/01_process_groups#fewer-gpus-than-ranks
            CUDA error: invalid device ordinal

    Without the file, there are none.
    """
    lines_of: dict[str, list[str]] = {}
    if not file.exists():
        return lines_of
    section = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            lines_of[section].append(line.strip())
        elif line and not line.startswith("#"):
            section = line.strip()
            lines_of[section] = []
    return lines_of


def questions_of(page_of_questions: nodes.document) -> defaultdict[str, list[str]]:
    """The questions to which each section of the book is the answer: ``{"page#anchor": ["question", …], …}``.

    On the page of questions, each row of a table has a question, and an answer with a link to its section. The page
    is in the folder ``book``, so its links begin with ``../``.
    """
    questions: defaultdict[str, list[str]] = defaultdict(list)
    for row in page_of_questions.findall(nodes.row):
        question, answer, *_ = row.children
        for link in answer.findall(nodes.reference):
            page, _, anchor = link.get("refuri", "").removeprefix("../").partition(".html#")
            questions[f"{page}#{anchor}"].append(question.astext())
    return questions


# --- Sphinx -----------------------------------------------------------------------------------------------------------


def turn_off_sphinx_search(app: Sphinx) -> None:
    """Keep Sphinx from writing its own index, searchindex.js."""
    if app.builder.format == "html":
        app.builder.search = False  # type: ignore[attr-defined]  # an HTML builder has it


def search_weight(app: Sphinx, page: str) -> float:
    """By which factor the search multiplies the scores of a page. A notebook's metadata may say ``search_weight``."""
    path = Path(app.env.doc2path(page))
    if path.suffix != ".ipynb":
        return 1
    return facts_at(path).search_weight


def write_search(app: Sphinx) -> list[tuple[str, dict[str, str], str]]:
    """Write all sections and terms that the search can find into search_entries.js, at the end of each build.

    Sphinx calls this to ask which further pages it shall write. It returns the page of the search, as (name, context,
    template). Raises ExtensionError if the list of error messages or of phrases names a section that does not exist.
    """
    scripts = Path(app.srcdir, "scripts")
    errors = read_lines_of_sections(Path(app.srcdir, ERRORS))
    phrases = read_lines_of_sections(Path(app.srcdir, PHRASES))
    questions: defaultdict[str, list[str]] = defaultdict(list)
    if QUESTIONS in app.env.found_docs:
        questions = questions_of(app.env.get_and_resolve_doctree(QUESTIONS, app.builder))
    for section, lines in phrases.items():
        questions[section] += lines
    answers = Answers(errors=errors, questions=questions)
    entries_of_book: list[Entry] = []
    weights = {}  # {page: the factor of its scores}, of pages that have one
    for page in sorted(app.env.found_docs):
        tree = app.env.get_and_resolve_doctree(page, app.builder)  # the page as nodes, whether it has changed or not
        entries_of_book += entries(tree, page, scripts, answers)
        weight = search_weight(app, page)
        if weight != 1:
            weights[page] = weight

    entries_of_book = without_common_names(entries_of_book)

    # Tests build smaller books, which lack most of the sections that the list of error messages names.
    is_whole_book = app.config.root_doc == FIRST_PAGE
    if is_whole_book:
        check_sections(ERRORS, errors, entries_of_book)
        check_sections(PHRASES, phrases, entries_of_book)
    file = Path(app.outdir, "_static", "search_entries.js")
    file.write_text(script_with(entries_of_book, weights), encoding="utf-8")
    return [("search", {"title": "Search"}, "search.html")]


def without_common_names(entries_of_book: Sequence[Entry]) -> list[Entry]:
    """The entries without the names that too many sections have in their code, such as ``print``."""
    sections_with = Counter(name for entry in entries_of_book for name in entry.names.split())
    result = []
    for entry in entries_of_book:
        kept = [name for name in entry.names.split() if sections_with[name] <= MAX_SECTIONS_WITH_NAME]
        result.append(entry._replace(names=" ".join(kept)))
    return result


def check_sections(file: str, named: Iterable[str], entries_of_book: Sequence[Entry]) -> None:
    """Raise ExtensionError if the sections that ``file`` names, each a ``page#anchor``, are not all in the book."""
    sections = {f"{entry.page}#{entry.anchor}" for entry in entries_of_book}
    missing = [section for section in named if section not in sections]
    if missing:
        raise ExtensionError(f"{file} names sections that are not there: {', '.join(missing)}")


def script_with(entries_of_book: Sequence[Entry], weights: Mapping[str, float]) -> str:
    """JavaScript with the entries, compressed, and the weights of pages: what search_engine.js reads.

    It has a list for each field of an entry (all pages, all anchors and so on), which gzip makes smaller than a list
    for each entry.
    """
    columns = list(zip(*entries_of_book, strict=True))
    data = json.dumps(columns, ensure_ascii=False, separators=(",", ":"))
    compressed = gzip.compress(data.encode(), mtime=0)  # without the time, so that equal entries make an equal file
    packed = base64.b64encode(compressed).decode()
    return f'var searchEntries = "{packed}";\nvar searchWeights = {json.dumps(weights)};\n'


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_css_file("search.css")
    app.add_js_file("search.js")
    app.connect("builder-inited", turn_off_sphinx_search)
    app.connect("html-collect-pages", write_search)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
