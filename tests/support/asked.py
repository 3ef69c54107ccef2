"""What readers ask: the questions of book/questions.md, with what proves the answers, and what is typed as a search."""

import re
from dataclasses import dataclass
from pathlib import Path

from helpers.export.chapters import find_notebook
from helpers.export.facts import facts_at

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "book" / "questions.md"
SEARCHES = ROOT / "tests" / "search_questions.txt"
LINK = r"\[[^\]]+\]\(\.\./(?P<page>[\w/]+)\.ipynb#(?P<anchor>[^)]+)\)"
ROW = re.compile(rf"\| (?P<text>.+?) \| (?P<answer>.+[.:]) {LINK} \| (?P<proof>.+) \|")
LINK_OR_CITATION = re.compile(r"\[.*?\]\(.*?\)|\{cite\}`.*?`")
CELL = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Question:
    """A question, and where its answer stands: ``page`` without its suffix, the heading's ``anchor``."""

    text: str
    answer: str  # in a sentence
    page: str
    anchor: str
    cells: list[str]  # ids of the cells below the heading that prove the answer
    sources: list[str]  # links and citations for what no cell can show


def read_question(line):
    row = ROW.fullmatch(line)
    references = LINK_OR_CITATION.findall(row["proof"])
    sources = [reference for reference in references if "](http" in reference or reference.startswith("{cite}")]
    cells = CELL.findall(LINK_OR_CITATION.sub("", row["proof"]))
    return Question(row["text"], row["answer"], row["page"], row["anchor"], cells, sources)


QUESTIONS = [read_question(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if ".ipynb#" in line]


def searches():
    """{what readers type: {name of a page: a pattern of a heading}}: any of these headings is a right answer.

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
    """The name of a page's file: of a chapter, search_questions.txt has the number."""
    if page[0].isdigit():
        return find_notebook(page).stem
    return page
