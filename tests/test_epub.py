"""The book as an EPUB: well-formed pages, links that lead somewhere, chapters with code and outputs, metadata."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin
from xml.etree import ElementTree

import pytest
from bs4 import BeautifulSoup
from built_pages import INTRO, book_settings
from conftest import CHAPTERS, ROOT, toc_files
from make_epub import COVER, NAME

pytestmark = [pytest.mark.daily, pytest.mark.timeout(1800)]  # the first test makes the EPUB of the whole book

OPF = "{http://www.idpf.org/2007/opf}"
DC = "{http://purl.org/dc/elements/1.1/}"
XHTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Epub:
    """The EPUB of the built book."""

    html: Path  # the folder of the book's HTML, which links the EPUB
    file: Path
    contents: dict[str, bytes]  # {name of a file in it: content}; names begin at its folder EPUB, such as "book.opf"
    pages: dict[str, ElementTree.Element]  # {name of a page in it: the page's root}


@pytest.fixture(scope="module")
def epub(book, tmp_path_factory):
    """The Epub, which tools/make_epub.py makes of a copy of the built book."""
    folder = tmp_path_factory.mktemp("epub")
    html = folder / "html"
    file = folder / "book.epub"
    # Fonts and the planner's Python are many megabytes, and the EPUB has neither.
    shutil.copytree(book.html, html, ignore=shutil.ignore_patterns("fonts", "planner", "pyodide*", "_sources"))
    command = [sys.executable, "-W", "error", ROOT / "tools" / "make_epub.py", html, file]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stderr == ""
    assert process.returncode == 0
    with zipfile.ZipFile(file) as archive:
        contents = {name.removeprefix("EPUB/"): archive.read(name) for name in archive.namelist()}
    pages = {}
    for name, content in contents.items():
        if name.endswith(".xhtml"):
            pages[name] = ElementTree.fromstring(content)  # fails if the page is not well-formed
    return Epub(html, file, contents, pages)


def without_spaces(text):
    return re.sub(r"\s", "", text)


def text_of(page, tag):
    """The text of all elements with this tag on a page, without spaces."""
    texts = []
    for element in page.iter(tag):
        texts += element.itertext()
    return without_spaces("".join(texts))


def files_of_pages():
    """The names that the pages of the book have in the EPUB, in reading order: ``book/intro.xhtml`` and so on."""
    return [f"{page}.xhtml" for page in toc_files()]


# What an e-reader lacks, or does not show.
TAGS_FOR_BROWSERS = {"script", "style", "button", "form", "input", "select", "details", "iframe"}


def test_its_pages_are_those_of_the_toc_and_need_nothing_that_an_ereader_lacks(epub):
    """Each page is well-formed, or the fixture would have failed. A page that moved has no page at its old address."""
    assert set(epub.pages) == {"cover.xhtml", "contents.xhtml", *files_of_pages()}
    for name, page in epub.pages.items():
        for element in page.iter():
            tag = element.tag.rpartition("}")[2]  # "{http://www.w3.org/1999/xhtml}p" without the namespace
            assert tag not in TAGS_FOR_BROWSERS, name
            assert "hidden" not in element.attrib, name
    assert epub.file.stat().st_size < 10e6


def test_the_archive_begins_with_its_type(epub):
    """Readers recognize an EPUB by its first file, which says so and is not compressed."""
    with zipfile.ZipFile(epub.file) as archive:
        first = archive.infolist()[0]
    assert first.filename == "mimetype"
    assert first.compress_type == zipfile.ZIP_STORED
    assert epub.contents["mimetype"] == b"application/epub+zip"
    assert b'full-path="EPUB/book.opf"' in epub.contents["META-INF/container.xml"]


def test_the_package_has_the_books_title_author_and_language(epub):
    package = ElementTree.fromstring(epub.contents["book.opf"])

    def text_in_package(element):
        return package.findtext(f".//{DC}{element}")

    settings = book_settings()
    assert text_in_package("title") == settings["title"]
    assert text_in_package("creator") == settings["author"]
    assert text_in_package("language") == "en"


def test_the_package_lists_all_files_and_the_pages_in_reading_order(epub):
    package = ElementTree.fromstring(epub.contents["book.opf"])
    file_of_id = {}
    file_with_property = {}
    for item in package.iter(f"{OPF}item"):
        file_of_id[item.get("id")] = item.get("href")
        file_with_property[item.get("properties")] = item.get("href")

    describe_the_archive = {"mimetype", "META-INF/container.xml", "book.opf"}
    assert set(file_of_id.values()) == set(epub.contents) - describe_the_archive
    assert file_with_property["cover-image"] == COVER
    assert file_with_property["nav"] == "contents.xhtml"

    pages_in_order = [file_of_id[entry.get("idref")] for entry in package.iter(f"{OPF}itemref")]
    assert pages_in_order == ["cover.xhtml", "contents.xhtml", *files_of_pages()]


def ids_on(page):
    """The ids of all elements of a page, to which links can lead."""
    return [element.get("id") for element in page.iter() if element.get("id")]


def test_no_id_is_on_a_page_twice(epub):
    for name, page in epub.pages.items():
        ids_of_page = ids_on(page)
        assert len(ids_of_page) == len(set(ids_of_page)), name


def test_each_link_and_picture_leads_to_a_place_in_the_book_or_to_the_web(epub):
    ids = {name: set(ids_on(page)) for name, page in epub.pages.items()}
    number_of_links_inside = 0
    for name, page in epub.pages.items():
        for element in page.iter():
            address = element.get("href") or element.get("src")
            if address is None or address.startswith(("https://", "http://")):
                continue
            number_of_links_inside += 1
            target, _, anchor = urljoin(name, address).partition("#")
            file = unquote(target)
            assert file in epub.contents, (name, address)
            if anchor:
                assert unquote(anchor) in ids[file], (name, address)
    assert number_of_links_inside > 50 * len(CHAPTERS), "the loop has found the book's links"


def code_cells_shown(chapter):
    """The code cells of a chapter, without those that no page shows, as pairs of a cell and its tags."""
    notebook = json.loads((ROOT / f"{chapter}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code" and "remove-cell" not in tags:
            yield cell, tags


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_chapter_is_there_with_its_code_and_outputs(epub, chapter):
    page = epub.pages[f"{chapter}.xhtml"]
    listings = text_of(page, f"{XHTML}pre")
    number_of_figures = 0
    for cell, tags in code_cells_shown(chapter):
        if "remove-input" not in tags:
            for line in cell["source"]:
                assert without_spaces(line) in listings
        if "remove-output" in tags:
            continue
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                assert without_spaces("".join(output["text"])) in listings
            html = "".join(output.get("data", {}).get("text/html", []))
            if '<figure class="wso' in html:
                number_of_figures += 1

    drawings = [figure for figure in page.iter(f"{XHTML}figure") if figure.find(f".//{SVG}svg") is not None]
    assert len(drawings) == number_of_figures


def test_no_sentence_speaks_of_a_cell_that_is_folded(epub):
    """In the browser a reader opens it, and here it is open."""
    for name, page in epub.pages.items():
        for paragraph in page.iter(f"{XHTML}p"):
            sentence = "".join(paragraph.itertext())
            assert not re.search(r"\b(folded|closed)\s+cell\b", sentence), (name, sentence)


def names_in_drawings_of_the_epub(epub):
    """The names of all elements and attributes of the EPUB's drawings, without namespaces: "path", "viewBox", …"""
    names = set()
    for page in epub.pages.values():
        for element in page.iter():
            if element.tag.startswith(SVG):
                names.add(element.tag)
                names.update(element.attrib)
    return {name.rpartition("}")[2] for name in names}


def names_with_capitals_in_html(page):
    """The names with a capital letter in the drawings of an HTML page, such as ``viewBox`` and ``clipPath``."""
    drawings = " ".join(re.findall(r"<svg\b.*?</svg>", page, flags=re.S))
    # An element, such as "<clipPath>", or an attribute, such as ' viewBox="0 0 1 1"'.
    return set(re.findall(r"(?:<|\s)([a-z]+[A-Z]\w*)(?==|[\s>])", drawings))


def test_drawings_have_the_names_of_xml(epub):
    """In XML, names such as viewBox have no meaning in small letters, and BeautifulSoup writes them so.

    So no name that has capitals in the HTML may be in the EPUB in small letters.
    """
    names = names_in_drawings_of_the_epub(epub)
    assert "viewBox" in names
    assert "clipPath" in names
    for page in toc_files():
        html = (epub.html / f"{page}.html").read_text(encoding="utf-8")
        for name in names_with_capitals_in_html(html):
            assert name.lower() not in names, (page, name)


LOOP_OF_THE_ANIMATION = """\
for step in range(2):
    loss, gradient = compute(step)
    if rank == 0:
        dist.all_reduce"""


def test_what_needs_a_browser_is_there_as_code_and_text(epub):
    """The first page's animation with the indents of its code, and the planner's answer."""
    intro = epub.contents[f"{INTRO}.xhtml"].decode()
    assert LOOP_OF_THE_ANIMATION in intro
    assert PurePosixPath(COVER).name in intro
    planner = "".join(epub.pages["book/planner.xhtml"].itertext())
    assert "The form computes in a browser" in planner
    assert "python -m helpers plan" in planner


def test_intro_links_it_once_it_is_there(book, epub):
    """After `make book` alone, the intro says how to make the EPUB. `make epub` adds the file and the link together."""
    before = (book.html / f"{INTRO}.html").read_text(encoding="utf-8")
    assert NAME not in before
    assert "make epub" in BeautifulSoup(before, "html.parser").select_one("p.epub").get_text()

    intro = epub.html / f"{INTRO}.html"
    link = BeautifulSoup(intro.read_text(encoding="utf-8"), "html.parser").select_one("p.epub a")
    assert (intro.parent / link["href"]).resolve().read_bytes() == epub.file.read_bytes()
