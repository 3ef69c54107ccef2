"""What a reader sees of the built book: how much code, how its boxes are called, and how its mistakes are marked."""

import csv
import html
import re
import sys

import nbformat
import pytest
from conftest import CHAPTERS, ROOT, toc_files

sys.path.append(str(ROOT / "book" / "_ext"))
import book_cells
import book_tables


def code_cells(chapter):
    """The code cells of a chapter's notebook."""
    cells = nbformat.read(ROOT / f"{chapter}.ipynb", as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def titles_of_boxes(page):
    """The titles of the closed boxes on a page, from its HTML. Each box has to have one."""
    titles = re.findall(r'<details class="hide[^"]*"><summary>(.*?)</summary>', page)
    assert len(titles) == page.count('<details class="hide')
    return titles


@pytest.mark.parametrize("name", toc_files())
def test_every_closed_box_says_what_is_in_it(book, name):
    page = (book.html / f"{name}.html").read_text(encoding="utf-8")
    for title in titles_of_boxes(page):
        assert title != ""
        assert "Show code" not in title, "what myst-nb writes where the book has no title"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_has_boxes_for_its_parameters_imports_and_solutions(book, chapter):
    """The solutions of its exercises are numbered from 1 on."""
    titles = titles_of_boxes((book.html / f"{chapter}.html").read_text(encoding="utf-8"))
    assert "Parameters" in titles
    assert "Imports" in titles

    solutions = [cell for cell in code_cells(chapter) if "solution" in cell.metadata.get("tags", [])]
    expected_titles = [f"Solution {number}" for number in range(1, len(solutions) + 1)]
    assert [title for title in titles if title.startswith("Solution")] == expected_titles


def without_spaces(text):
    return "".join(text.split())


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_all_code_of_a_chapter_is_on_its_page(book, chapter):
    """What is closed of an open cell is in the box below it."""
    page = (book.html / f"{chapter}.html").read_text(encoding="utf-8")
    _, _, from_article_on = page.partition("<article")
    article, _, _ = from_article_on.partition("</article>")
    text = without_spaces(html.unescape(re.sub(r"<[^>]*>", "", article)))
    for cell in code_cells(chapter):
        for line in cell.source.splitlines():
            assert without_spaces(line) in text


DEFINITION = "def f(x):\n    return x\n\n\n"
ASSERTS = "assert f(1) == 1\nassert f(2) == 2\nassert f(3) == 3"
CLASS = "class A:\n    def f(self):\n" + "        a = 1\n" * 20 + "    def g(self):\n" + "        a = 1\n" * 20


@pytest.mark.parametrize(
    "source, lines",
    [
        (f"{DEFINITION}print(f(1))\n{ASSERTS}", 5),  # what prints stays in view, its asserts do not
        (f"{DEFINITION}{ASSERTS}", 2),
        (f"{DEFINITION}{ASSERTS}\nprint(f(1))", 8),  # a print below them
        (f"{DEFINITION}{ASSERTS}\nf(1)", 8),  # the cell's value below them
        (f"{DEFINITION}assert f(1) == 1", 5),  # too little to close
        ("%%ranks 2\nprint(1)\nprint(2)\nprint(3)", 4),  # no Python
        ("a = 1\n" * 40, 34),
        ("def f():\n" + "    a = 1\n" * 40, 41),  # a function is not cut
        (CLASS, 22),  # a class is cut between its methods
    ],
)
def test_an_open_cell_shows_what_a_reader_would_write(source, lines):
    assert book_cells.shown_lines(source) == lines


@pytest.mark.parametrize(
    "end, title",
    [
        (ASSERTS, "How this is checked"),
        (f"for a in range(3):\n    {ASSERTS}", "How this is checked"),
        (f"train(4)\n{ASSERTS}", "The rest of this cell"),  # A reader should not take a training for a check.
        ("train(4)", "The rest of this cell"),
        (DEFINITION, "Code: f"),
    ],
)
def test_the_closed_end_of_a_cell_says_what_it_is(end, title):
    assert book_cells.title_of_end(end) == title


def test_a_mistake_has_a_mark(book):
    page = (book.html / f"{CHAPTERS[0]}.html").read_text(encoding="utf-8")
    marks = re.findall(r'<p class="mistake-badge">(.*?)</p>', page)
    assert marks == ["hangs", "wrong numbers, no error", "wrong numbers, no error", "hangs"]


def test_every_error_on_purpose_is_marked():
    """Each cell that raises an error says whether it hangs; a hang is what `launch` ended by its timeout."""
    for name in CHAPTERS:
        for cell in code_cells(name):
            tags = set(cell.metadata.get("tags", []))
            if "raises-exception" not in tags:
                continue
            [error] = [output.evalue for output in cell.outputs if output.output_type == "error"]
            if "still ran after" in error:
                expected_mark = "hangs"
            else:
                expected_mark = "error"
            assert tags & set(book_cells.MISTAKES) == {expected_mark}, cell.id


HEAD_OF_THREE_COLUMNS = "<thead><tr><th><p>A <em>name</em></p></th><th>B &amp; C</th><th>D</th></tr></thead>"
ROW_OF_THREE_COLUMNS = "<tbody><tr><td><p>1</p></td><td>2</td><td>3</td></tr></tbody>"


def test_a_row_of_a_wide_table_can_be_a_card():
    """Each cell of a table of three columns has the heading of its column as its label. Two columns need no cards."""
    wide_table = f'<table class="table">{HEAD_OF_THREE_COLUMNS}{ROW_OF_THREE_COLUMNS}</table>'
    cards = book_tables.TABLE.sub(book_tables.labelled, wide_table)
    assert re.findall(r'data-label="(.*?)"', cards) == ["A name", "B &amp; C", "D"]
    assert 'class="table cards"' in cards

    narrow_table = wide_table.replace("<th>D</th>", "").replace("<td>3</td>", "")
    assert book_tables.TABLE.sub(book_tables.labelled, narrow_table) == narrow_table


def test_the_lies_are_counted_by_chapter_and_kind(book):
    """The page on planted bugs, which the book calls lies, counts them in a sentence, and has a dot for each cell."""
    with (ROOT / "book" / "recorded" / "sabotage.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))  # a row for each cell that noticed a lie
    number_of_lies = len({row["The lie"] for row in rows})
    page = (book.html / "book" / "sabotage.html").read_text(encoding="utf-8")
    assert f"<p>{number_of_lies} lies were told, and {len(rows)} cells of " in page
    _, _, from_table_on = page.partition('class="lies')
    table, _, _ = from_table_on.partition("</table>")
    assert table.count("•") == len(rows)
