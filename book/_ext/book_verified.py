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

# strftime would name the months in the language of whoever builds the book.
MONTHS = "January February March April May June July August September October November December".split()


def last_run(app: Sphinx, page: str) -> str:
    """When a page last passed its tests, as a sentence: ``Last run on 3 May 2026 with PyTorch 2.15.0, Python 3.11.``

    It is read from notebooks/verified.json, which the tests write. Raises ExtensionError if that file is damaged.
    """
    source = Path(app.env.doc2path(page))
    try:
        record = read_record(Path(app.srcdir, "notebooks", FILE_NAME))
    except ValueError as error:
        raise ExtensionError(str(error)) from None
    return sentence(record.pages.get(page), fingerprint(source), is_notebook=source.suffix == ".ipynb")


def sentence(recorded: PageRecord | None, fingerprint_now: str, is_notebook: bool) -> str:
    """When a page last passed its tests and on which versions, as a sentence: ``Last run on 3 May 2026 with …``

    ``recorded`` has the runs of the tests that the page passed, and the page's fingerprint at that time.
    ``fingerprint_now`` is a different one if the page has changed since.
    """
    if is_notebook:
        verb = "run"
    else:  # a page without cells is not run; the tests check its HTML
        verb = "checked"
    if recorded is None or not recorded.runs:
        return f"Not yet {verb} in full."
    newest = date.fromisoformat(max(run.date for run in recorded.runs))
    newest_date = f"{newest.day} {MONTHS[newest.month - 1]} {newest.year}"
    torch_versions = sorted({run.torch for run in recorded.runs}, key=version_key)
    python_versions = sorted({run.python for run in recorded.runs}, key=version_key)
    last_run = f"Last {verb} on {newest_date} with PyTorch {listed(torch_versions)}, Python {listed(python_versions)}."
    if recorded.fingerprint == fingerprint_now:
        return last_run
    return f"{last_run} The page has changed since, and was not {verb} again yet."


def listed(versions: list[str]) -> str:
    """Versions in words: 2.13.0, 2.14.1 and 2.15.0."""
    if len(versions) == 1:
        return versions[0]
    return f"{', '.join(versions[:-1])} and {versions[-1]}"


def issue_link(repository: str, page: str) -> str:
    """A link to a new issue whose title begins with the page's name."""
    address = f"{repository}/issues/new?{urlencode({'title': f'{page}: '})}"
    return f'<a href="{escape(address)}">Ask a question or report a mistake</a>'


def add_last_line(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Add the last line to a page. Sphinx calls it when it has made the page's HTML, ``context["body"]``."""
    if page not in app.env.found_docs:  # the search and 404 have no source, so nothing is recorded of them
        return
    line = escape(last_run(app, page))
    repository = app.config.html_theme_options.get("repository_url")
    if repository:
        line = f"{line} {issue_link(repository, page)}."
    context["body"] += f'<p class="last-run">{line}</p>\n'


def setup(app: Sphinx) -> dict[str, Any]:
    # book_accessibility.py and book_tables.py change other parts of the body in the same event, in any order.
    app.connect("html-page-context", add_last_line)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
