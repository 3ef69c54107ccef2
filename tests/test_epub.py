"""The book as an EPUB: well-formed pages, links that lead somewhere, chapters with code and outputs, metadata."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import PurePosixPath
from types import SimpleNamespace
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


@pytest.fixture(scope="module")
def epub(book, tmp_path_factory):
    """The EPUB of the built book: ``.file``, ``.names`` and ``.contents`` of its files, its ``.pages`` as elements.

    ``.html`` is the folder of the book, which then links the EPUB.
    """
    folder = tmp_path_factory.mktemp("epub")
    html = folder / "html"
    file = folder / "book.epub"
    # Fonts and the planner's Python are many megabytes, and the EPUB has neither.
    shutil.copytree(book.html, html, ignore=shutil.ignore_patterns("fonts", "planner", "pyodide*", "_sources"))
    command = [sys.executable, "-W", "error", ROOT / "tools" / "make_epub.py", html, file]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        contents = {name.removeprefix("EPUB/"): archive.read(name) for name in names}
    pages = {name: ElementTree.fromstring(content) for name, content in contents.items() if name.endswith(".xhtml")}
    return SimpleNamespace(html=html, file=file, names=names, contents=contents, pages=pages)


def text_of(page, tag=None):
    """The text of all elements of one kind on a page, without spaces."""
    return re.sub(r"\s", "", "\n".join("".join(element.itertext()) for element in page.iter(tag)))


def test_its_pages_are_those_of_the_toc_and_need_nothing_that_an_ereader_lacks(epub):
    """Each page is well-formed, or the fixture would have failed. A page that moved has no page at its old address."""
    assert set(epub.pages) == {"cover.xhtml", "contents.xhtml", *(f"{page}.xhtml" for page in toc_files())}
    for name, page in epub.pages.items():
        tags = {element.tag.rpartition("}")[2] for element in page.iter()}
        assert not tags & {"script", "style", "button", "form", "input", "select", "details", "iframe"}, name
        assert not any("hidden" in element.attrib for element in page.iter()), name
    assert epub.file.stat().st_size < 10e6


def test_it_says_what_it_is(epub):
    with zipfile.ZipFile(epub.file) as archive:
        first = archive.infolist()[0]
        assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
    assert epub.contents["mimetype"] == b"application/epub+zip"
    assert b'full-path="EPUB/book.opf"' in epub.contents["META-INF/container.xml"]

    package = ElementTree.fromstring(epub.contents["book.opf"])
    settings = book_settings()
    assert package.findtext(f".//{DC}title") == settings["title"]
    assert package.findtext(f".//{DC}creator") == settings["author"]
    assert package.findtext(f".//{DC}language") == "en"
    items = {item.get("id"): item for item in package.iter(f"{OPF}item")}
    files = {item.get("href") for item in items.values()}
    assert files == set(epub.contents) - {"mimetype", "META-INF/container.xml", "book.opf"}
    properties = {item.get("properties"): item.get("href") for item in items.values()}
    assert (properties["cover-image"], properties["nav"]) == (COVER, "contents.xhtml")
    order = [items[entry.get("idref")].get("href") for entry in package.iter(f"{OPF}itemref")]
    assert order == ["cover.xhtml", "contents.xhtml", *(f"{page}.xhtml" for page in toc_files())]


def test_each_link_and_picture_leads_to_a_place_in_the_book_or_to_the_web(epub):
    ids = {}
    for name, page in epub.pages.items():
        ids_of_page = [element.get("id") for element in page.iter() if element.get("id")]
        assert len(ids_of_page) == len(set(ids_of_page)), name
        ids[name] = set(ids_of_page)
    inside = 0
    for name, page in epub.pages.items():
        for element in page.iter():
            address = element.get("href") or element.get("src")
            if address is None or address.startswith(("https://", "http://")):
                continue
            target, _, anchor = urljoin(name, address).partition("#")
            assert unquote(target) in epub.contents, (name, address)
            assert not anchor or unquote(anchor) in ids[unquote(target)], (name, address)
            inside += 1
    assert inside > 50 * len(CHAPTERS)


def test_each_chapter_is_there_with_its_code_and_outputs(epub):
    for chapter in CHAPTERS:
        page = epub.pages[f"{chapter}.xhtml"]
        listings = text_of(page, f"{XHTML}pre")
        figures = 0
        for cell in json.loads((ROOT / f"{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]:
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] != "code" or "remove-cell" in tags:
                continue
            if "remove-input" not in tags:
                for line in cell["source"]:
                    assert re.sub(r"\s", "", line) in listings, (chapter, line)
            for output in cell["outputs"]:
                if "remove-output" in tags:
                    continue
                if output["output_type"] == "stream":
                    assert re.sub(r"\s", "", "".join(output["text"])) in listings, (chapter, output["text"])
                figures += '<figure class="wso' in "".join(output.get("data", {}).get("text/html", []))
        drawings = [figure for figure in page.iter(f"{XHTML}figure") if figure.find(f".//{SVG}svg") is not None]
        assert len(drawings) == figures, chapter


def test_no_sentence_speaks_of_a_cell_that_is_folded(epub):
    """In the browser a reader opens it, and here it is open."""
    for name, page in epub.pages.items():
        for paragraph in page.iter(f"{XHTML}p"):
            sentence = "".join(paragraph.itertext())
            assert not re.search(r"\b(folded|closed)\s+cell\b", sentence), (name, sentence)


def test_drawings_have_the_names_of_xml(epub):
    """BeautifulSoup writes names such as viewBox in small letters, and in XML they would have no meaning."""
    drawn = [element for page in epub.pages.values() for element in page.iter() if element.tag.startswith(SVG)]
    names = {element.tag for element in drawn} | {name for element in drawn for name in element.attrib}
    assert {"viewBox", f"{SVG}clipPath"} <= names
    built = " ".join((epub.html / f"{page}.html").read_text(encoding="utf-8") for page in toc_files())
    drawings = " ".join(re.findall(r"<svg\b.*?</svg>", built, flags=re.S))
    with_capitals = set(re.findall(r"(?:<|\s)([a-z]+[A-Z]\w*)(?==|[\s>])", drawings))
    local_names = {name.rpartition("}")[2] for name in names}
    assert {name for name in with_capitals if name.lower() in local_names} == set()


def test_what_needs_a_browser_is_there_as_code_and_text(epub):
    """The first page's animation with the indents of its code, and the planner's answer."""
    intro = epub.contents[f"{INTRO}.xhtml"].decode()
    assert (
        "for step in range(2):\n    loss, gradient = compute(step)\n    if rank == 0:\n        dist.all_reduce" in intro
    )
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
