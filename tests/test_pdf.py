"""The book as one PDF: all pages in order, links that lead somewhere, and a link from the intro."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from built_pages import INTRO
from conftest import CHAPTERS, ROOT, toc_files
from print_pdf import NAME, link_pdf
from pypdf import PdfReader

pytestmark = [pytest.mark.daily, pytest.mark.timeout(1800)]  # the first test prints the book, for half a minute or more


@pytest.fixture(scope="module")
def pdf(book, browser, tmp_path_factory):
    """The PDF of the built book: ``.file``, its ``.reader``, the book's folder ``.html``, the tool's ``.output``."""
    folder = tmp_path_factory.mktemp("pdf")
    html = folder / "html"
    file = folder / "book.pdf"
    shutil.copytree(book.html, html)
    command = [sys.executable, "-W", "error", ROOT / "tools" / "print_pdf.py", html, file]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    return SimpleNamespace(html=html, file=file, reader=PdfReader(file), output=process.stdout)


def title_of(html, page):
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    [heading] = [heading for heading in re.findall(r"<h1\b.*?</h1>", text, re.S) if "headerlink" in heading]
    title = BeautifulSoup(heading, "html.parser")  # to read all elements of all pages would take seven seconds
    title.select_one("h1 .headerlink").decompose()
    return title.h1.get_text()


def pages_of(reader, title):
    """The position of the first page of the bookmark with this title, and that of the next bookmark."""
    starts = [reader.get_destination_page_number(mark) for mark in reader.outline]
    position = [mark.title for mark in reader.outline].index(title)
    return starts[position], starts[position + 1]


def test_every_page_of_the_toc_is_there_under_its_title_and_number(pdf):
    """The bookmarks, the page numbers in the table of contents and the pages agree."""
    reader = pdf.reader
    titles = [title_of(pdf.html, page) for page in toc_files()]
    assert f"{len(reader.pages)} pages" in pdf.output
    assert pdf.file.stat().st_size < 20e6
    assert [mark.title for mark in reader.outline] == titles
    numbers = [reader.get_destination_page_number(mark) + 1 for mark in reader.outline]
    assert numbers == sorted(set(numbers))
    contents = "\n".join(page.extract_text() for page in reader.pages[1 : numbers[0] - 1])
    for title, number in zip(titles, numbers, strict=True):
        lines = reader.pages[number - 1].extract_text().splitlines()
        letters = [re.escape(letter) for letter in title if not letter.isspace()]
        title_pattern = r"\s*".join(letters)  # kerning can be read as a space
        assert re.search(title_pattern, "\n".join(lines[:4]))
        assert str(number) in lines, "no page number"
        assert re.search(rf"{title_pattern}\s+{number}\b", contents)


def test_links_lead_to_a_place_in_the_book_or_to_the_web(pdf):
    inside = 0
    for page in pdf.reader.pages:
        for annotation in page.get("/Annots", []):
            link = annotation.get_object()
            action = link.get("/A", {})
            if action.get("/S") == "/URI":
                assert action["/URI"].startswith(("https://", "http://"))
            else:
                target = link.get("/Dest", action.get("/D"))
                assert target in pdf.reader.named_destinations
                inside += 1
    assert inside > 50 * len(CHAPTERS)


def test_what_the_screen_folds_is_printed(pdf):
    """A chapter's answers, solutions and script; one frame of a figure with sliders, and its values; set formulas."""
    first, end = pages_of(pdf.reader, title_of(pdf.html, CHAPTERS[2]))
    printed = " ".join(page.extract_text() for page in pdf.reader.pages[first:end])
    text = re.sub(r"\s", "", printed)
    for cell in json.loads((ROOT / f"{CHAPTERS[2]}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if "solution" in cell["metadata"].get("tags", []):
            for line in cell["source"]:
                assert re.sub(r"\s", "", line) in text
    for words in ("Why", "Solution", "Shown:", "main(parse_args())"):
        assert words in text
    for markup in (r"\(", r"\frac"):
        assert markup not in text


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
