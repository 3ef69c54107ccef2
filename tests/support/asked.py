"""What readers ask: the questions of book/questions.md, with what proves the answers, and what is typed as a search."""

import re
from dataclasses import dataclass
from pathlib import Path

from helpers.export.chapters import find_notebook
from helpers.export.facts import facts_at

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "book" / "questions.md"
SEARCHES = ROOT / "tests" / "search_questions.txt"
# A link to a section of a notebook: [DDP](../notebooks/04_topic.ipynb#a-section)
LINK = r"\[[^\]]+\]\(\.\./(?P<page>[\w/]+)\.ipynb#(?P<anchor>[^)]+)\)"
# A row of the page's tables: | A question? | An answer in words: [DDP](…) | `id-of-a-cell`, {cite}`a-work` |
ROW = re.compile(rf"\| (?P<text>.+?) \| (?P<answer>.+[.:]) {LINK} \| (?P<proof>.+) \|")
LINK_OR_CITATION = re.compile(r"\[.*?\]\(.*?\)|\{cite\}`.*?`")
CELL = re.compile(r"`([^`]+)`")  # the id of a cell


@dataclass(frozen=True)
class Question:
    """A question, and where its answer stands: ``page`` without its suffix, the heading's ``anchor``."""

    text: str
    answer: str  # in a sentence
    page: str
    anchor: str
    cells: list[str]  # ids of the cells below the heading that prove the answer
    sources: list[str]  # links and citations for what no cell can show


def read_question(row):
    """The Question in a row of the page's tables. A row looks as it is shown above ROW."""
    parts = ROW.fullmatch(row)
    proof = parts["proof"]
    sources = []
    for reference in LINK_OR_CITATION.findall(proof):
        is_link_to_the_web = "](http" in reference
        is_citation = reference.startswith("{cite}")
        if is_link_to_the_web or is_citation:
            sources.append(reference)
    without_references = LINK_OR_CITATION.sub("", proof)
    return Question(
        text=parts["text"],
        answer=parts["answer"],
        page=parts["page"],
        anchor=parts["anchor"],
        cells=CELL.findall(without_references),
        sources=sources,
    )


QUESTIONS = [read_question(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if ".ipynb#" in line]


def searches():
    """What readers type into the search, and the headings that answer it: {search: {page: pattern of a heading}}.

    Any of the headings is a right answer. For example, {"resume training": {"04_topic": "Resume"}}.

    A notebook says in its metadata (``book.searches``) what it alone answers. What several pages answer, or one without
    a notebook, is in search_questions.txt: the search, and below it, indented, the answers.
    """
    answers = {}
    query = ""
    for line in SEARCHES.read_text(encoding="utf-8").splitlines():
        if line.startswith("    "):
            page, pattern = re.fullmatch(r" {4}(.*?): *(.*)", line).groups()
            answers[query][name_of(page)] = pattern
        elif line and not line.startswith("#"):
            query = line
            answers[query] = {}
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        if path.stem != "template":
            for query, pattern in facts_at(path).searches.items():
                answers.setdefault(query, {})[path.stem] = pattern
    return answers


def name_of(page):
    """The name of a page's file, without its suffix. A chapter is given by its number alone, such as ``10b``."""
    if page[0].isdigit():
        return find_notebook(page).stem
    return page
