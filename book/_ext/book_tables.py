"""Name each cell's column in tables of three columns and more, so that a phone can show their rows as cards."""

import html
import re
from typing import Any

from sphinx.application import Sphinx

TABLE = re.compile(r'<table class="([^"]*)"(.*?</thead>)(.*?)</table>', flags=re.S)


def labelled(table: re.Match) -> str:
    """The table with the class "cards" and with its heads in its cells' data-label; as it was, with fewer columns."""
    classes, head, rows = table.groups()
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", head, re.S)
    names = [" ".join(re.sub(r"<[^>]+>", "", name).split()) for name in heads]
    if len(names) < 3:
        return table[0]

    def with_labels(row: re.Match) -> str:
        cells = iter(names)
        return re.sub(r"<td\b", lambda _: f'<td data-label="{html.escape(html.unescape(next(cells, "")))}"', row[0])

    return f'<table class="{classes} cards"{head}{re.sub(r"<tr.*?</tr>", with_labels, rows, flags=re.S)}</table>'


def label_tables(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    if "</thead>" in context.get("body", ""):
        context["body"] = TABLE.sub(labelled, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", label_tables)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
