"""End each page with a line that says when its cells last passed and on what, and where to ask or report a mistake.

Dates and versions are those of notebooks/verified.json, which `make test ALL=1` writes. The link is there if
BOOK_REPOSITORY_URL is set (book_address.py).
"""

from datetime import date
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

from helpers.export.verified import FILE_NAME, PageRecord, fingerprint, read_record, version_key

# The names that Python has for months are those of the reader's language.
MONTHS = "January February March April May June July August September October November December".split()


def last_run(app: Sphinx, page: str) -> str:
    """What is recorded of a page, as a sentence. Raises ExtensionError for a damaged file."""
    source = Path(app.env.doc2path(page))
    try:
        record = read_record(Path(app.srcdir, "notebooks", FILE_NAME))
    except ValueError as error:
        raise ExtensionError(str(error)) from None
    return sentence(record.pages.get(page), fingerprint(source), is_notebook=source.suffix == ".ipynb")


def sentence(recorded: PageRecord | None, fingerprint_now: str, is_notebook: bool) -> str:
    """Markdown pages have no cells to run, but the tests check how they are built and what a browser shows of them."""
    if recorded is None or not recorded.runs:
        return "Not yet run in full." if is_notebook else "Not yet checked in full."
    newest = date.fromisoformat(max(run.date for run in recorded.runs))
    torches = sorted({run.torch for run in recorded.runs}, key=version_key)
    pythons = sorted({run.python for run in recorded.runs}, key=version_key)
    when = f"{newest.day} {MONTHS[newest.month - 1]} {newest.year}"
    where = f"on {when} with PyTorch {listed(torches)}, Python {listed(pythons)}."
    if recorded.fingerprint == fingerprint_now:
        return f"Last run {where}" if is_notebook else f"Last checked {where}"
    return f"Changed since its last run {where}" if is_notebook else f"Changed since it was last checked {where}"


def listed(versions: list[str]) -> str:
    """2.13.0, 2.14.1 and 2.15.0"""
    *first, last = versions
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def issue_link(repository: str, page: str) -> str:
    """A link to a new issue whose title begins with the page's name."""
    address = f"{repository}/issues/new?{urlencode({'title': f'{page}: '})}"
    return f'<a href="{escape(address)}">Ask a question or report a mistake</a>'


def add_last_line(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    if page not in app.env.found_docs:  # such as the search and 404
        return
    words = escape(last_run(app, page))
    repository = app.config.html_theme_options.get("repository_url")
    if repository:
        words = f"{words} {issue_link(repository, page)}."
    context["body"] += f'<p class="last-run">{words}</p>\n'


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", add_last_line)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
