"""Writes down at the end of a test run which pages and scripts passed, for each page's last line.

conftest.py registers it as a plugin of pytest where --record-verified is given, as `make test ALL=1` does. A notebook
passed if each of its code cells did, so a run of some cells records nothing. A Markdown page has no cells: it passed if
the book was built without a warning, no link is broken, and a browser found no problem on the page.
"""

import datetime
import platform
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.export.verified import (
    FILE_NAME,
    Run,
    add_page,
    add_script,
    code_cells,
    drop_what_is_gone,
    fingerprint,
    read_record,
    write_record,
)

TESTS_OF_THE_BOOK = [
    "tests/test_book.py::test_build_is_quiet_and_has_every_page_of_the_toc",
    "tests/test_book.py::test_no_page_has_a_broken_link",
]
TEST_OF_A_PAGE = "tests/test_browser.py::test_page_has_no_problem[{page}]"
TEST_OF_A_SCRIPT = "tests/test_scripts.py::test_chapter[{script}]"
ENDED_BY_ITSELF = [pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED]


def fingerprints(root):
    """The fingerprints of all notebooks and Markdown pages: ``{"notebooks/04_ddp": "3f2a…"}``."""
    paths = [*(root / "notebooks").glob("*.ipynb"), *(root / "book").glob("*.md")]
    found = {}
    for path in sorted(paths):
        page = path.relative_to(root).with_suffix("").as_posix()
        found[page] = fingerprint(path)
    return found


def tests_of(root, page):
    """The names of the tests that have to pass for a page. Of a notebook, each code cell is a test of nbval."""
    notebook = root / f"{page}.ipynb"
    if not notebook.exists():
        return {*TESTS_OF_THE_BOOK, TEST_OF_A_PAGE.format(page=page)}
    number_of_cells = len(code_cells(notebook))
    return {f"{page}.ipynb::Cell {number}" for number in range(number_of_cells)}


class VerifiedRun:
    """The plugin. Under pytest-xdist it belongs to the process that hears all workers' reports."""

    def __init__(self, root):
        self.root = root
        self.fingerprints_at_start = fingerprints(root)
        self.passed = set()
        self.failed = set()
        self.summary = ""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        elif report.failed:  # a test that passed may still fail while it cleans up
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus in ENDED_BY_ITSELF:
            torch = version("torch").partition("+")[0]
            python = ".".join(platform.python_version_tuple()[:2])
            self.write(Run(torch, python, date=datetime.date.today().isoformat()))

    def pytest_terminal_summary(self, terminalreporter):
        if self.summary:
            terminalreporter.line(self.summary)

    def write(self, run):
        """Add what passed to the file. A page that was edited while the tests ran is left out."""
        fingerprints_now = fingerprints(self.root)
        passed_tests = self.passed - self.failed
        passed_pages = []
        chapters_with_passed_script = []
        for page, fingerprint_now in fingerprints_now.items():
            if fingerprint_now != self.fingerprints_at_start.get(page):
                continue
            if tests_of(self.root, page) <= passed_tests:
                passed_pages.append(page)
            if TEST_OF_A_SCRIPT.format(script=Path(page).name) in passed_tests:
                chapters_with_passed_script.append(page)
        if not passed_pages and not chapters_with_passed_script:
            return

        file = self.root / "notebooks" / FILE_NAME
        record = read_record(file)
        for page in passed_pages:
            add_page(record, page, fingerprints_now[page], run)
        for page in chapters_with_passed_script:
            add_script(record, Path(page).name, fingerprints_now[page], run.torch)
        drop_what_is_gone(record, fingerprints_now)
        write_record(record, file)
        counted = f"{len(passed_pages)} pages and {len(chapters_with_passed_script)} scripts passed"
        self.summary = f"{counted}: recorded in notebooks/{FILE_NAME}"
