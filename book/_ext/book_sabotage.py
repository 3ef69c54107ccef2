"""``{lies}``: of the lies that were recorded, how many each chapter noticed, and by what."""

import csv
import re
from collections import Counter
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

KINDS = ("assert", "output", "error", "hang")
PLACE = re.compile(r"\[([\w ]+), [^]]*\]\((.*?)\.ipynb")


class Lies(SphinxDirective):
    """A sentence with the totals, and a table with a dot for each cell that noticed a lie."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        noticed = Counter((match[1], row["By"]) for row in rows if (match := PLACE.match(row["Noticed in"])))
        lies, places = len({row["The lie"] for row in rows}), sorted({place for place, _ in noticed}, key=in_order)
        cells = f"{sum(noticed.values())} cells of {len(places)} chapters and pages noticed one"
        dots = [[place, *("•" * noticed[place, kind] for kind in KINDS)] for place in places]
        return [
            nodes.paragraph("", f"{lies} lies were told, and {cells}. Each dot is a cell."),
            table(["chapter", *KINDS], dots),
        ]


def in_order(place: str) -> tuple[float, str]:
    """Chapters and practice pages by their numbers, such as 9 and 10b, then pages of the appendix by their names."""
    number = re.match(r"\d+", place)
    return float(number[0] if number else "inf"), place


def table(head: list[str], rows: list[list[str]]) -> nodes.table:
    def row(words: list[str]) -> nodes.row:
        return nodes.row("", *(nodes.entry("", nodes.paragraph("", word)) for word in words))

    columns = [nodes.colspec(colwidth=1) for _ in head]
    body = nodes.tbody("", *map(row, rows))
    group = nodes.tgroup("", *columns, nodes.thead("", row(head)), body, cols=len(head))
    return nodes.table("", group, classes=["lies"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("lies", Lies)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
