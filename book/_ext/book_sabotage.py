"""``{lies}``: of the lies that were recorded, how many each chapter noticed, and by what.

A lie is a planted bug in PyTorch or in the helpers: see book/sabotage.md, and tools/sabotage.
"""

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

KINDS = ("assert", "output", "error", "hang")  # how a cell can fail, in the column "By" of the record
CHAPTER = re.compile(r"\[(?P<name>[\w ]+), ")  # of a link in the column "Noticed in": [10b, A section](address)


@dataclass(frozen=True)
class Summary:
    """How many lies each chapter noticed: a sentence with the totals, and a table with a row for each chapter."""

    sentence: str
    head: list[str]
    rows: list[list[str]]


class Lies(SphinxDirective):
    """A sentence with the totals, and a table with a dot for each cell that noticed a lie."""

    required_arguments = 1  # the file with the record

    def run(self) -> list[nodes.Node]:
        """The sentence and the table as nodes. A change of the record makes Sphinx read the page again."""
        relative_path, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative_path)
        summary = summary_of(Path(path))
        return [nodes.paragraph("", summary.sentence), table(summary.head, summary.rows)]


def summary_of(path: Path) -> Summary:
    """Count how many planted bugs, called lies, the cells of each chapter noticed: a sentence and a table.

    A lie is planted in PyTorch or in the book's helpers, to see whether the cells of a chapter fail. ``path`` is the
    record, a CSV file. Each row is a lie that a cell noticed, with these columns among others::

        The lie:     `barrier` returns at once.
        Noticed in:  [10b, A section](address)
        By:          assert

    "Noticed in" is a link to the cell's section in a chapter. "By" is how the cell failed, one of KINDS. The table has
    a row for each chapter and a column for each of KINDS, with a dot for each cell that failed in this way.
    """
    with path.open(encoding="utf-8", newline="") as file:
        record = list(csv.DictReader(file))
    lies = {row["The lie"] for row in record}
    failed_cells = count_failed_cells(record)

    rows_of_table = []
    for chapter in sorted(failed_cells, key=reading_order):
        dots = ["•" * failed_cells[chapter][kind] for kind in KINDS]
        rows_of_table.append([chapter, *dots])
    number_of_cells = sum(cells_by_kind.total() for cells_by_kind in failed_cells.values())
    sentence = (
        f"{len(lies)} lies were told, and {number_of_cells} cells of {len(failed_cells)} chapters and pages noticed "
        "one. Each dot is a cell."
    )
    return Summary(sentence, head=["chapter", *KINDS], rows=rows_of_table)


def count_failed_cells(record: list[dict[str, str]]) -> dict[str, Counter[str]]:
    """How many cells of each chapter failed in which way: ``{"10b": {"assert": 12, "hang": 1}, …}``.

    ``record`` are the rows of the record, {column: text}.
    """
    failed_cells: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in record:
        link = CHAPTER.match(row["Noticed in"])
        if link is not None:  # the row of a lie that no cell noticed has no link
            failed_cells[link["name"]][row["By"]] += 1
    return failed_cells


def reading_order(chapter: str) -> tuple[float, str]:
    """What chapters are sorted by: their numbers, so that 9 comes before 10b, then pages without one by their names."""
    number = re.match(r"\d+", chapter)
    if number is None:
        return float("inf"), chapter
    return float(number[0]), chapter


def table(head: list[str], rows: list[list[str]]) -> nodes.table:
    """A table of texts, built of nodes as docutils wants it."""
    body = nodes.tbody()
    for row in rows:
        body += table_row(row)
    group = nodes.tgroup(cols=len(head))
    for _ in head:
        group += nodes.colspec(colwidth=1)
    group += nodes.thead("", table_row(head))
    group += body
    return nodes.table("", group, classes=["lies"])


def table_row(texts: list[str]) -> nodes.row:
    """A row of cells with these texts."""
    row = nodes.row()
    for text in texts:
        row += nodes.entry("", nodes.paragraph("", text))
    return row


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("lies", Lies)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
