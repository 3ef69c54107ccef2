"""The questions of book/questions.md, with the sections that answer them, and what proves the answers."""

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "book" / "questions.md"
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
