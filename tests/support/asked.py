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
ROW = re.compile(rf"\| (?P<asked>.+?) \| {LINK} \| (?P<proof>.+) \|")


@dataclass(frozen=True)
class Question:
    """A question as it is asked, and where its answer stands: ``page`` without its suffix, the heading's ``anchor``."""

    asked: str
    page: str
    anchor: str
    cells: tuple[str, ...]  # ids of the cells below the heading that prove the answer
    sources: tuple[str, ...]  # addresses and citations of what no cell can show


def read(line):
    row = ROW.fullmatch(line)
    cells = tuple(re.findall(r"`([^`]+)`", re.sub(r"\[.*?\]\(.*?\)|\{cite\}`.*?`", "", row["proof"])))
    sources = tuple(re.findall(r"\]\((https?://[^)]+)\)|\{cite\}`(.*?)`", row["proof"]))
    return Question(row["asked"], row["page"], row["anchor"], cells, tuple(filter(None, sum(sources, ()))))


QUESTIONS = [read(line) for line in PAGE.read_text(encoding="utf-8").splitlines() if ".ipynb#" in line]


def searches():
    """{what readers type: {name of a page: a pattern of a heading}}: any of these headings is a right answer.

    A notebook says in its metadata (``book.searches``) what it alone answers. What several pages answer, or one without
    a notebook, is in search_questions.txt.
    """
    text = re.sub(r"(?m)^#.*\n", "", SEARCHES.read_text(encoding="utf-8"))
    blocks = re.findall(r"(?m)^(\S.*)\n((?: {4}.*\n)+)", text)
    found = {}
    for question, lines in blocks:
        answers = re.findall(r" {4}(.*?): *(.*)", lines)
        found[question] = {name_of(page): pattern for page, pattern in answers}
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        if path.stem != "template":
            for question, pattern in facts_at(path).searches.items():
                found.setdefault(question, {})[path.stem] = pattern
    return found


def name_of(page):
    """The name of a page's file: of a chapter, search_questions.txt has the number."""
    return find_notebook(page).stem if page[0].isdigit() else page
