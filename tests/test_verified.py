"""The last line of a page: what a test run records, what the line says of it, where it is, and the link beside it."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from verified_run import TEST_OF_A_PAGE, TEST_OF_A_SCRIPT, TESTS_OF_THE_BOOK, VerifiedRun

from helpers.export.verified import (
    FILE_NAME,
    PageRecord,
    Record,
    Run,
    add_page,
    add_script,
    drop_what_is_gone,
    fingerprint,
    read_record,
    write_record,
)

sys.path.append(str(ROOT / "book" / "_ext"))
import book_verified

OLDEST = Run("2.9.1", "3.11", "2026-11-02")
OLD = Run("2.13.0", "3.11", "2026-11-28")
NEW = Run("2.15.0", "3.14", "2026-11-30")


# --- the record -------------------------------------------------------------------------------------------------------


def test_runs_on_other_versions_add_up_and_runs_of_other_code_are_dropped():
    record = Record()
    for run in [NEW, OLD, OLDEST]:
        add_page(record, "notebooks/a", "code", run)
    assert record.pages["notebooks/a"] == PageRecord("code", [OLDEST, OLD, NEW])
    again = Run("2.13.0", "3.11", "2026-12-24")
    add_page(record, "notebooks/a", "code", again)
    assert record.pages["notebooks/a"].runs == [OLDEST, again, NEW]
    add_page(record, "notebooks/a", "other code", OLD)
    assert record.pages["notebooks/a"] == PageRecord("other code", [OLD])


def test_versions_of_a_script_add_up_until_its_chapter_changes():
    record = Record()
    for torch in ["2.13.0", "2.9.1", "2.13.0"]:
        add_script(record, "04_one", "code", torch)
    assert record.scripts == {"04_one": ["2.9.1", "2.13.0"]}
    add_script(record, "04_one", "other code", "2.15.0")
    add_script(record, "05_two", "code", "2.15.0")
    add_page(record, "notebooks/gone", "code", OLD)
    add_page(record, "notebooks/05_two", "code", OLD)
    assert record.scripts == {"04_one": ["2.15.0"], "05_two": ["2.15.0"]}
    drop_what_is_gone(record, {"notebooks/04_one": "other code", "notebooks/05_two": "changed"})
    assert record.scripts == {"04_one": ["2.15.0"]}
    assert list(record.pages) == ["notebooks/05_two"], "a page that changed says so in its last line"


def test_a_record_is_read_as_it_was_written_and_a_damaged_file_is_refused(tmp_path):
    file = tmp_path / FILE_NAME
    assert read_record(file) == Record()
    record = Record()
    add_page(record, "notebooks/04_one", "code", OLD)
    add_script(record, "04_one", "code", "2.13.0")
    write_record(record, file)
    assert read_record(file) == record
    file.write_text("<<<<<<< HEAD")
    with pytest.raises(ValueError, match=f"{FILE_NAME} does not hold what a test run recorded"):
        read_record(file)


def notebook_of(*sources):
    """A notebook with a title, and a code cell for each of these sources."""
    cells = [new_markdown_cell("# A page")]
    for source in sources:
        cells.append(new_code_cell(source))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=cells, metadata=kernel)


def test_a_fingerprint_is_that_of_the_code_cells(tmp_path):
    path = tmp_path / "a.ipynb"

    def fingerprint_of(notebook):
        nbformat.write(notebook, path)
        return fingerprint(path)

    notebook = notebook_of("x = 1", "y = 2")
    before = fingerprint_of(notebook)
    notebook.cells[0].source = "# Other words"
    notebook.cells[1].execution_count = 7
    assert fingerprint_of(notebook) == before
    assert fingerprint_of(notebook_of("x = 1", "y = 3")) != before


# --- what a test run records ------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A folder with two notebooks and a Markdown page; its second notebook is a chapter with a script."""
    for folder in ["notebooks", "book"]:
        (tmp_path / folder).mkdir()
    nbformat.write(notebook_of("x = 1", "x + 1"), tmp_path / "notebooks" / "a.ipynb")
    nbformat.write(notebook_of("x = 1", "x + 1"), tmp_path / "notebooks" / "b.ipynb")
    (tmp_path / "book" / "intro.md").write_text("# Intro")
    return tmp_path


CELLS_OF_A = ["notebooks/a.ipynb::Cell 0", "notebooks/a.ipynb::Cell 1"]
TESTS_OF_INTRO = [*TESTS_OF_THE_BOOK, TEST_OF_A_PAGE.format(page="book/intro")]


def recorded(project, passed, failed=()):
    """The names of the pages and scripts that are recorded after a run in which these tests passed and failed.

    A failed test fails in its teardown, after its call has passed.
    """
    verified = VerifiedRun(project)
    for name in [*passed, *failed]:
        verified.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when="call", passed=True, failed=False))
    for name in failed:
        verified.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when="teardown", passed=False, failed=True))
    verified.write(OLD)
    record = read_record(project / "notebooks" / FILE_NAME)
    return [*record.pages, *record.scripts]


def test_a_page_is_recorded_if_all_of_its_cells_passed(project):
    first_cell, second_cell = CELLS_OF_A
    assert recorded(project, passed=[first_cell]) == [], "a cell was left out"
    assert recorded(project, passed=[first_cell], failed=[second_cell]) == []
    assert not (project / "notebooks" / FILE_NAME).exists(), "nothing passed, so nothing is written"
    only_a_is_complete = [first_cell, second_cell, "notebooks/b.ipynb::Cell 0"]
    assert recorded(project, passed=only_a_is_complete) == ["notebooks/a"]


def test_a_markdown_page_is_recorded_by_the_tests_of_the_built_book(project):
    for missing in TESTS_OF_INTRO:
        others = [name for name in TESTS_OF_INTRO if name != missing]
        assert recorded(project, passed=others) == []
    assert recorded(project, passed=TESTS_OF_INTRO) == ["book/intro"]


def test_a_script_is_recorded_by_its_own_test(project):
    """The script is that of the notebook b. Its cells were not run, so the page itself is not recorded."""
    assert recorded(project, passed=[TEST_OF_A_SCRIPT.format(script="b")]) == ["b"]


def test_the_tests_that_stand_for_markdown_pages_and_scripts_exist():
    for name in [*TESTS_OF_THE_BOOK, TEST_OF_A_PAGE, TEST_OF_A_SCRIPT]:
        file, _, function = name.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_pytest_writes_the_file_where_it_is_asked(project):
    """With the root conftest.py, whose option it is, and with nbval's own names of cells."""
    (project / "pytest.ini").write_text("[pytest]\n")
    passing_notebook = project / "notebooks" / "a.ipynb"
    failing_notebook = project / "notebooks" / "b.ipynb"
    failing_notebook.write_text(passing_notebook.read_text().replace("x + 1", "x + None"))
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider"]
    command += ["-p", "conftest", "-n", "1", "--record-verified", "notebooks"]
    paths = f"{ROOT}:{ROOT / 'tests/support'}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": ""}

    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)

    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "1 pages and 0 scripts passed: recorded" in done.stdout
    pages = read_record(project / "notebooks" / FILE_NAME).pages
    assert list(pages) == ["notebooks/a"]
    assert pages["notebooks/a"].fingerprint == fingerprint(passing_notebook)
    [run] = pages["notebooks/a"].runs
    assert re.fullmatch(r"\d+\.\d+\.\d+", run.torch)
    assert run.python == f"{sys.version_info.major}.{sys.version_info.minor}"


# --- the line ---------------------------------------------------------------------------------------------------------


def test_the_line_says_when_and_on_what():
    def line(runs, is_changed=False, is_notebook=True):
        """The line of a page that passed these runs, and has changed since or not."""
        recorded = PageRecord("code", runs)
        if is_changed:
            return book_verified.sentence(recorded, "changed", is_notebook)
        return book_verified.sentence(recorded, "code", is_notebook)

    date_and_versions = "on 30 November 2026 with PyTorch 2.9.1, 2.13.0 and 2.15.0, Python 3.11 and 3.14."
    assert line([NEW, OLD, OLDEST]) == f"Last run {date_and_versions}"
    changed = line([OLD], is_changed=True)
    assert changed.startswith("Last run on 28 November 2026 with PyTorch 2.13.0")
    assert changed.endswith("The page has changed since, and was not run again yet.")

    assert line([OLD], is_notebook=False).startswith("Last checked on 28 November 2026")
    assert line([OLD], is_changed=True, is_notebook=False).endswith("and was not checked again yet.")

    assert line([]) == "Not yet run in full."
    line_of_page_without_record = book_verified.sentence(None, "code", is_notebook=True)
    assert line_of_page_without_record == "Not yet run in full."


def source_of(page):
    """The file of a page, which is a notebook or a Markdown file."""
    notebook = ROOT / f"{page}.ipynb"
    if notebook.exists():
        return notebook
    return ROOT / f"{page}.md"


def test_each_page_and_its_markdown_end_with_the_line(book):
    """It is the last thing of the article, once, and no link is beside it where no repository is named."""
    record = read_record(ROOT / "notebooks" / FILE_NAME)
    for name in toc_files():
        source = source_of(name)
        is_notebook = source.suffix == ".ipynb"
        expected = book_verified.sentence(record.pages.get(name), fingerprint(source), is_notebook)

        html = (book.html / f"{name}.html").read_text(encoding="utf-8")
        assert html.count('class="last-run"') == 1, name
        article, _, _ = html.partition("</article>")
        end_of_article = BeautifulSoup(article[-1000:], "html.parser")
        line = end_of_article.select_one(".last-run")
        assert line.text == expected, name
        assert line.find_next_sibling() is None, name
        assert line.a is None, name

        markdown = (book.html / f"{name}.md").read_text(encoding="utf-8")
        assert markdown.splitlines()[-1] == expected, name


def test_the_link_names_the_page():
    html = book_verified.issue_link("https://github.com/an-owner/a.name", "page")
    link = BeautifulSoup(html, "html.parser").a
    assert link["href"] == "https://github.com/an-owner/a.name/issues/new?title=page%3A+"
    assert link.text == "Ask a question or report a mistake"
