"""The book as one PDF: all pages in order, links that lead somewhere, and a link from the intro."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from built_pages import INTRO
from conftest import CHAPTERS, ROOT, toc_files
from print_pdf import NAME, link_pdf
from pypdf import PdfReader

pytestmark = [pytest.mark.daily, pytest.mark.timeout(1800)]  # the first test prints the book, for half a minute or more


@dataclass(frozen=True)
class Pdf:
    """The PDF of the built book."""

    html: Path  # the folder of the book's HTML, which links the PDF
    file: Path
    reader: PdfReader
    output: str  # what tools/print_pdf.py printed


@pytest.fixture(scope="module")
def pdf(book, browser, tmp_path_factory):
    """The Pdf, which tools/print_pdf.py makes of a copy of the built book. Without a browser, the test is skipped."""
    folder = tmp_path_factory.mktemp("pdf")
    html = folder / "html"
    file = folder / "book.pdf"
    shutil.copytree(book.html, html)
    command = [sys.executable, "-W", "error", ROOT / "tools" / "print_pdf.py", html, file]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stderr == ""
    assert process.returncode == 0
    return Pdf(html, file, PdfReader(file), process.stdout)


def title_of(html, page):
    """The heading of a page of the built book, without the sign behind it, which is a link to the heading."""
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    [heading] = [heading for heading in re.findall(r"<h1\b.*?</h1>", text, re.S) if "headerlink" in heading]
    title = BeautifulSoup(heading, "html.parser")  # to read all elements of all pages would take seven seconds
    title.select_one("h1 .headerlink").decompose()
    return title.h1.get_text()


def text_of_bookmark(reader, title):
    """The text of the PDF from the bookmark with this title to the next bookmark."""
    titles = [bookmark.title for bookmark in reader.outline]
    bookmark = reader.outline[titles.index(title)]
    next_bookmark = reader.outline[titles.index(title) + 1]
    start = reader.get_destination_page_number(bookmark)
    end = reader.get_destination_page_number(next_bookmark)
    return " ".join(page.extract_text() for page in reader.pages[start:end])


def pattern_of(title):
    """A pattern that finds a title in the text of a PDF, where kerning can be read as a space between two letters."""
    letters = [re.escape(letter) for letter in title if not letter.isspace()]
    return r"\s*".join(letters)


def test_every_page_of_the_toc_is_there_under_its_title_and_number(pdf):
    """The bookmarks, the page numbers in the table of contents and the pages agree."""
    reader = pdf.reader
    assert f"{len(reader.pages)} pages" in pdf.output
    assert pdf.file.stat().st_size < 20e6

    titles = [title_of(pdf.html, page) for page in toc_files()]
    assert [bookmark.title for bookmark in reader.outline] == titles
    numbers = [reader.get_destination_page_number(bookmark) + 1 for bookmark in reader.outline]
    assert numbers == sorted(set(numbers))

    # The table of contents is behind the first page, the cover.
    contents = "\n".join(page.extract_text() for page in reader.pages[1 : numbers[0] - 1])
    for title, number in zip(titles, numbers, strict=True):
        lines = reader.pages[number - 1].extract_text().splitlines()
        assert re.search(pattern_of(title), "\n".join(lines[:4]))
        assert str(number) in lines, "no page number"
        assert re.search(rf"{pattern_of(title)}\s+{number}\b", contents)


def test_links_lead_to_a_place_in_the_book_or_to_the_web(pdf):
    number_of_links_inside = 0
    for page in pdf.reader.pages:
        for annotation in page.get("/Annots", []):
            link = annotation.get_object()
            action = link.get("/A", {})
            if action.get("/S") == "/URI":
                assert action["/URI"].startswith(("https://", "http://"))
            else:
                target = link.get("/Dest", action.get("/D"))
                assert target in pdf.reader.named_destinations
                number_of_links_inside += 1
    assert number_of_links_inside > 50 * len(CHAPTERS), "the loop has found the book's links"


def without_spaces(text):
    return re.sub(r"\s", "", text)


def test_what_the_screen_folds_is_printed(pdf):
    """A chapter's answers, solutions and script; one frame of a figure with sliders, and its values; set formulas."""
    chapter = CHAPTERS[2]
    text = without_spaces(text_of_bookmark(pdf.reader, title_of(pdf.html, chapter)))
    notebook = json.loads((ROOT / f"{chapter}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if "solution" in cell["metadata"].get("tags", []):
            for line in cell["source"]:
                assert without_spaces(line) in text
    assert "Why" in text, "the answer to a prediction"
    assert "Solution" in text
    assert "Shown:" in text, "the values of a figure with sliders"
    assert "main(parse_args())" in text, "the script"
    assert r"\(" not in text, "a formula that is not set"
    assert r"\frac" not in text


def test_intro_links_it_once_it_is_there(book, pdf):
    """After `make book` alone, the intro says how to make the PDF. `make pdf` adds the file and the link together."""
    before = (book.html / f"{INTRO}.html").read_text(encoding="utf-8")
    assert NAME not in before
    assert "make pdf" in BeautifulSoup(before, "html.parser").select_one("p.pdf").get_text()

    intro = pdf.html / f"{INTRO}.html"
    link = BeautifulSoup(intro.read_text(encoding="utf-8"), "html.parser").select_one("p.pdf a")
    assert (intro.parent / link["href"]).resolve().read_bytes() == pdf.file.read_bytes()
    assert not (pdf.html / "print.html").exists()
    link_pdf(pdf.html, pdf.file, 7)  # a second `make pdf` replaces the link
    assert "7 pages" in intro.read_text(encoding="utf-8")
