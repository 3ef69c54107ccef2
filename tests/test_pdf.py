"""The book as one PDF: all pages in order, links that lead somewhere, and a link from the intro."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, toc_files
from print_pdf import INTRO, NAME, link_from_intro
from pypdf import PdfReader

pytestmark = [pytest.mark.daily, pytest.mark.timeout(1800)]  # the first test prints the book, for half a minute or more


@pytest.fixture(scope="module")
def pdf(book, browser, tmp_path_factory):
    """The PDF of the built book: ``.file``, its ``.reader``, the book's folder ``.html``, the tool's ``.output``."""
    folder = tmp_path_factory.mktemp("pdf")
    html, file = folder / "html", folder / "book.pdf"
    shutil.copytree(book.html, html)
    command = [sys.executable, "-W", "error", ROOT / "tools" / "print_pdf.py", html, file]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    return SimpleNamespace(html=html, file=file, reader=PdfReader(file), output=process.stdout)


def title_of(html, docname):
    headings = re.findall(r"<h1\b.*?</h1>", (html / f"{docname}.html").read_text(encoding="utf-8"), re.S)
    [heading] = [heading for heading in headings if "headerlink" in heading]
    title = BeautifulSoup(heading, "html.parser")  # to read all elements of all pages would take seven seconds
    title.select_one("h1 .headerlink").decompose()
    return title.h1.get_text()


def test_every_page_of_the_toc_is_there_under_its_title_and_number(pdf):
    """The bookmarks, the page numbers in the table of contents and the pages agree."""
    reader, titles = pdf.reader, [title_of(pdf.html, docname) for docname in toc_files()]
    assert f"{len(reader.pages)} pages" in pdf.output and pdf.file.stat().st_size < 20e6
    assert [mark.title for mark in reader.outline] == titles
    numbers = [reader.get_destination_page_number(mark) + 1 for mark in reader.outline]
    assert numbers == sorted(set(numbers))
    contents = "\n".join(page.extract_text() for page in reader.pages[1 : numbers[0] - 1])
    for title, number in zip(titles, numbers, strict=True):
        text = reader.pages[number - 1].extract_text()
        letters = r"\s*".join(map(re.escape, "".join(title.split())))  # kerning can be read as a space
        assert re.search(letters, "\n".join(text.split("\n", 4)[:4]))
        assert str(number) in text.splitlines(), "no page number"
        assert re.search(rf"{letters}\s+{number}\b", contents)


def test_links_lead_to_a_place_in_the_book_or_to_the_web(pdf):
    places, inside, outside = set(pdf.reader.named_destinations), 0, set()
    for page in pdf.reader.pages:
        for link in [annotation.get_object() for annotation in page.get("/Annots") or []]:
            if (action := link.get("/A")) is not None and action["/S"] == "/URI":
                outside.add(action["/URI"])
            else:
                target = link.get("/Dest", action and action.get("/D"))
                assert target in places, target
                inside += 1
    assert inside > 50 * len(CHAPTERS)
    assert [address for address in outside if not address.startswith(("https://", "http://"))] == []


# Fonts of book/fonts for text, code and formulas; the theme's for icons.
FONTS = r"/[A-Z]{6}\+(Inter-(Regular|Italic|SemiBold)|JetBrainsMono-(Regular|Bold)|FontAwesome6.*)"


def test_fonts_are_the_books_own(pdf):
    resources = [page["/Resources"].get("/Font", {}) for page in pdf.reader.pages]
    fonts = [font.get_object() for by_name in resources for font in by_name.values()]
    names = {font["/BaseFont"] for font in fonts if font["/Subtype"] != "/Type3"}
    assert len(names) > 4 and [name for name in names if not re.fullmatch(FONTS, name)] == []


def test_what_the_screen_folds_is_printed(pdf):
    """A chapter's answers, solutions and script; one frame of a figure with sliders, and its values; set formulas."""
    marks, docnames, chapter = {mark.title: mark for mark in pdf.reader.outline}, toc_files(), CHAPTERS[2]
    first, end = (
        pdf.reader.get_destination_page_number(marks[title_of(pdf.html, name)])
        for name in (chapter, docnames[docnames.index(chapter) + 1])
    )
    text = re.sub(r"\s", "", " ".join(page.extract_text() for page in pdf.reader.pages[first:end]))
    for cell in json.loads((ROOT / f"{chapter}.ipynb").read_text())["cells"]:
        if "solution" in cell["metadata"].get("tags", []):
            assert [line for line in cell["source"] if re.sub(r"\s", "", line) not in text] == []
    assert "Why" in text and "Solution" in text and "Shown:" in text and "main(parse_args())" in text
    assert "Showcodecell" not in text and "Clicktoshow" not in text
    assert r"\(" not in text and r"\frac" not in text


def test_intro_links_it_once_it_is_there(book, pdf):
    """After `make book` alone, the intro says how to make the PDF. `make pdf` adds the file and the link together."""
    before = (book.html / f"{INTRO}.html").read_text()
    assert NAME not in before and not (book.html / NAME).exists()
    assert "make pdf" in BeautifulSoup(before, "html.parser").select_one("p.pdf").get_text()

    link = BeautifulSoup((pdf.html / f"{INTRO}.html").read_text(), "html.parser").select_one("p.pdf a")
    assert ((pdf.html / INTRO).parent / link["href"]).resolve().read_bytes() == pdf.file.read_bytes()
    assert not (pdf.html / "print.html").exists()
    link_from_intro(pdf.html, pdf.file, 7)  # a second `make pdf` replaces the link
    assert "7 pages" in (pdf.html / f"{INTRO}.html").read_text()
