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
    cells = nbformat.read(ROOT / f"{chapter}.ipynb", as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_every_closed_box_says_what_is_in_it(book):
    for name in toc_files():
        page = (book.html / f"{name}.html").read_text(encoding="utf-8")
        titles = re.findall(r'<details class="hide[^"]*"><summary>(.*?)</summary>', page)
        assert page.count('<details class="hide') == len(titles), name
        assert not [title for title in titles if not title or "Show code" in title], name
        if name in CHAPTERS:
            assert {"Parameters", "Imports"} <= set(titles), name
            solutions = [cell for cell in code_cells(name) if "solution" in cell.metadata.get("tags", [])]
            numbered = [title for title in titles if title.startswith("Solution")]
            assert numbered == [f"Solution {number}" for number in range(1, len(solutions) + 1)], name


def test_all_code_of_a_chapter_is_on_its_page(book):
    """What is closed of an open cell is in the box below it."""
    for name in CHAPTERS:
        page = (book.html / f"{name}.html").read_text(encoding="utf-8")
        article = page.partition("<article")[2].partition("</article>")[0]
        text = "".join(html.unescape(re.sub(r"<[^>]*>", "", article)).split())
        for cell in code_cells(name):
            for line in cell.source.splitlines():
                assert "".join(line.split()) in text, (name, line)


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
            mark = "error"
            if "still ran after" in error:
                mark = "hangs"
            assert tags & set(book_cells.MISTAKES) == {mark}, cell.id


def test_a_row_of_a_wide_table_can_be_a_card():
    head = "<thead><tr><th><p>A <em>name</em></p></th><th>B &amp; C</th><th>D</th></tr></thead>"
    rows = "<tbody><tr><td><p>1</p></td><td>2</td><td>3</td></tr></tbody>"
    table = f'<table class="table">{head}{rows}</table>'
    cards = book_tables.TABLE.sub(book_tables.labelled, table)
    assert re.findall(r'data-label="(.*?)"', cards) == ["A name", "B &amp; C", "D"]
    assert 'class="table cards"' in cards
    narrow = table.replace("<th>D</th>", "").replace("<td>3</td>", "")
    assert book_tables.TABLE.sub(book_tables.labelled, narrow) == narrow


def test_the_lies_are_counted_by_chapter_and_kind(book):
    page = (book.html / "book" / "sabotage.html").read_text(encoding="utf-8")
    with (ROOT / "book" / "recorded" / "sabotage.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lies = len({row["The lie"] for row in rows})
    assert f"<p>{lies} lies were told, and {len(rows)} cells of " in page
    table = page.partition('class="lies')[2].partition("</table>")[0]
    assert table.count("•") == len(rows)
