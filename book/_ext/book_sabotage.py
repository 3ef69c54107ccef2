"""``{lies}``: of the lies that were recorded, how many each chapter noticed, and by what.

A lie is a planted bug in PyTorch or in the helpers: see book/sabotage.md, and tools/sabotage.
"""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

KINDS = ("assert", "output", "error", "hang")  # of failures, in the column "By" of the record
CHAPTER = re.compile(r"\[(?P<name>[\w ]+), ")  # of a link in the column "Noticed in": [10b, A section](address)


class Lies(SphinxDirective):
    """A sentence with the totals, and a table with a dot for each cell that noticed a lie."""

    required_arguments = 1  # the file with the record

    def run(self) -> list[nodes.Node]:
        """The sentence and the table as nodes. A change of the record makes Sphinx read the page again."""
        relative_path, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative_path)
        sentence, head, rows = totals(Path(path))
        return [nodes.paragraph("", sentence), table(head, rows)]


def totals(path: Path) -> tuple[str, list[str], list[list[str]]]:
    """How many lies were told and noticed: a sentence, and a table, as its head and a row for each chapter.

    ``path`` is the record, a CSV file with a row for each lie and each cell that noticed it.
    """
    with path.open(encoding="utf-8", newline="") as file:
        recorded = list(csv.DictReader(file))
    lies = {row["The lie"] for row in recorded}
    cells: Counter[tuple[str, str]] = Counter()  # {(chapter, kind of failure): number of cells}
    for row in recorded:
        link = CHAPTER.match(row["Noticed in"])
        if link is not None:  # a lie that no cell noticed has a row without a link
            cells[link["name"], row["By"]] += 1
    chapters = sorted({chapter for chapter, kind in cells}, key=reading_order)
    rows = []
    for chapter in chapters:
        dots_by_kind = ["•" * cells[chapter, kind] for kind in KINDS]
        rows.append([chapter, *dots_by_kind])
    sentence = (
        f"{len(lies)} lies were told, and {cells.total()} cells of {len(chapters)} chapters and pages noticed one. "
        "Each dot is a cell."
    )
    return sentence, ["chapter", *KINDS], rows


def reading_order(chapter: str) -> tuple[float, str]:
    """Chapters and practice pages by their numbers, such as 9 and 10b, then pages of the appendix by their names."""
    number = re.match(r"\d+", chapter)
    if number is None:
        return float("inf"), chapter
    return float(number[0]), chapter


def table(head: list[str], rows: list[list[str]]) -> nodes.table:
    """A table as docutils builds it, of texts."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    group += nodes.thead("", table_row(head))
    group += nodes.tbody("", *(table_row(row) for row in rows))
    return nodes.table("", group, classes=["lies"])


def table_row(texts: list[str]) -> nodes.row:
    """A row of cells with these texts."""
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", text)) for text in texts))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("lies", Lies)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
