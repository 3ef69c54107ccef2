"""Name each cell's column in tables of three columns and more, so that a phone can show their rows as cards.

The style sheet shows ``data-label`` in front of a cell's text.
"""

import html
import re
from typing import Any

from sphinx.application import Sphinx

# A table of a page, with its parts: <table class="table">…</thead> … </table>
TABLE = re.compile(r'<table class="(?P<classes>[^"]*)"(?P<head>.*?</thead>)(?P<rows>.*?)</table>', flags=re.S)
HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", flags=re.S)
ROW = re.compile(r"<tr.*?</tr>", flags=re.S)
MIN_COLUMNS = 3


def labelled(table: re.Match[str]) -> str:
    """A table's HTML, in which each cell names its column, so that a phone can show each row as a card.

    A cell gets its column's heading as the attribute ``data-label``, and the table the class "cards", for the style
    sheet. ``table`` is a match of TABLE. A table with fewer than MIN_COLUMNS columns is returned as it is.
    """
    columns = [text_of(heading) for heading in HEADING.findall(table["head"])]
    if len(columns) < MIN_COLUMNS:
        return table[0]
    rows = ROW.sub(lambda row: with_labels(row[0], columns), table["rows"])
    return f'<table class="{table["classes"]} cards"{table["head"]}{rows}</table>'


def with_labels(row: str, columns: list[str]) -> str:
    """A row of a table as HTML, each of whose cells gets the heading of its column as the attribute data-label."""
    before_the_cells, *cells = row.split("<td")  # each of `cells` begins after its "<td"
    labelled_row = before_the_cells
    for column, cell in zip(columns, cells, strict=True):
        labelled_row += f'<td data-label="{html.escape(column)}"{cell}'
    return labelled_row


def text_of(element: str) -> str:
    """An element's text, without tags and on one line."""
    text = re.sub(r"<[^>]+>", "", element)
    return html.unescape(" ".join(text.split()))


def label_tables(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Label all tables of a page. Sphinx calls it when it has made the page's HTML, ``context["body"]``."""
    if "</thead>" in context.get("body", ""):
        context["body"] = TABLE.sub(labelled, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", label_tables)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
