"""The built book: a build without warnings, links, downloads."""

import gc
import re
import shutil
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, build, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

OUTSIDE = re.compile(r"\s*(https?:)?//")
ADDRESS = re.compile(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?(/[^\s<>\"]*)?")


@cache
def soup(path):
    gc.disable()  # a page has up to 20,000 elements and no garbage: looking for some takes a third of the time
    try:
        return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
    finally:
        gc.enable()


@cache
def anchors(path):
    """The ids of a page's elements, which are collected once: each search for an id goes through the whole page."""
    return {tag["id"] for tag in soup(path)(id=True)}


# --- the pages --------------------------------------------------------------------------------------------------------


def flaw_of_link(tag, path, html):
    """What is wrong with a link or a source on the page at ``path``, if anything. ``html`` is the book's folder."""
    link = tag.get("href", tag.get("src", ""))
    if OUTSIDE.match(link):
        if tag.name != "a" and "canonical" not in tag.get("rel", []):
            return "asks another host"
        return None if ADDRESS.fullmatch(link) else "no address"
    if not link or re.match("(mailto|data|javascript):", link):
        return None
    target, _, anchor = link.partition("#")
    place = unquote(urlsplit(target).path)  # 404.html is shown at any address, so its links begin at the root
    file = (html / place[1:] if place[:1] == "/" else path.parent / place).resolve() if target else path
    if file.is_dir() or not file.exists() or not file.is_relative_to(html.resolve()):
        return "no such file"
    return "no such anchor" if anchor and file.suffix == ".html" and unquote(anchor) not in anchors(file) else None


def flaws(html):
    """Yields "page: address: what is wrong" for the links and images of all pages in a book's folder."""
    for path in sorted(html.rglob("*.html")):
        name = path.relative_to(html).as_posix()
        if not name.startswith("_"):
            for tag in soup(path)(["a", "link", "script", "img"]):
                if flaw := flaw_of_link(tag, path, html):
                    yield f"{name}: {tag.get('href', tag.get('src'))}: {flaw}"
            for image in soup(path)("img"):  # the theme's logo has the book's title beside it
                no_words = re.search(r"^\s*$|\.(png|svg|jpe?g|gif)$", image.get("alt", ""))
                if no_words and "logo__image" not in image.get("class", []):
                    yield f"{name}: {image['src']}: no text"


def test_no_page_has_a_broken_link_or_an_image_without_text(book):
    assert list(flaws(book.html)) == []


FLAWS = {  # {HTML: what is wrong with it}
    "<a href='gone.html'>gone</a>": "gone.html: no such file",
    "<a href='../out.html'>outside</a>": "../out.html: no such file",
    "<a href='#here'>no anchor</a>": "#here: no such anchor",
    "<a href='page.html#there' id='there'>fine</a>": None,
    "<a href='https://bad'>bad</a>": "https://bad: no address",
    "<a href='https://fine.example/a'>fine</a>": None,
    "<script src='//b.example/x.js'></script>": "//b.example/x.js: asks another host",
    "<link rel='stylesheet' href='https://c.example/x.css'>": "https://c.example/x.css: asks another host",
    "<img src='data:,1'>": "data:,1: no text",
    "<img src='data:,2' alt='x.png'>": "data:,2: no text",
    "<img src='data:,3' alt='A d'>": None,
}


def test_broken_links_and_images_without_text_are_seen(tmp_path):
    (tmp_path / "page.html").write_text("".join(FLAWS))
    assert list(flaws(tmp_path)) == [f"page.html: {flaw}" for flaw in FLAWS.values() if flaw]


def test_build_is_quiet_and_has_every_page_of_the_toc(book):
    assert (book.status, book.complaints) == (0, "")
    assert f"url={toc_files()[0]}.html" in (book.html / "index.html").read_text()
    assert (book.html / ".nojekyll").exists(), "GitHub Pages would leave out the folders that start with _"
    assert [name for name in toc_files() if not (book.html / f"{name}.html").exists()] == []


def test_fonts_are_small_an_image_has_its_own_and_each_family_its_licence(book):
    drawing = (book.html / "_images" / "three_places.svg").read_text(encoding="utf-8")
    assert re.findall(r"@font-face { font-family: '(.*?)';.*?url\(data:", drawing) == ["Inter"] * 2 + ["JetBrains Mono"]
    assert sum(path.stat().st_size for path in (ROOT / "book" / "fonts").glob("*.woff2")) <= 200_000
    sheet = (book.html / "_static" / "fonts.css").read_text(encoding="utf-8")
    for family in ["Inter", "JetBrainsMono"]:
        licence = (ROOT / "book" / "fonts" / f"{family}-OFL.txt").read_text(encoding="utf-8")
        assert "SIL OPEN FONT LICENSE Version 1.1" in licence and f"{family}-OFL.txt" in sheet.splitlines()[0]
        assert (book.html / "_static" / f"{family}-OFL.txt").read_text(encoding="utf-8") == licence


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_has_downloads_and_shows_its_script_and_outputs(book, chapter):
    page, folder, path = soup(book.html / f"{chapter}.html"), (book.html / chapter).parent, ROOT / f"{chapter}.ipynb"
    script = book.scripts / f"{path.stem}.py"
    downloads = [tag["href"] for tag in page("a", class_="download")]
    contents = {Path(link).name: (folder / link).read_bytes() for link in downloads}
    assert contents == {path.name: path.read_bytes(), script.name: script.read_bytes()}
    button = page.select_one(".btn-download-source-button")
    assert (folder / button["href"]).read_bytes() == path.read_bytes()

    assert script.read_text().strip() in [fold.pre.get_text().strip() for fold in page("details") if fold.pre]

    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    texts, text = [output.text.strip() for output in outputs if "text" in output], page.get_text()
    assert texts and [output for output in texts if output not in text] == []


# --- with and without a repository ------------------------------------------------------------------------------------


def repository_links(page):
    return [tag["href"] for tag in page.select(".article-header-buttons a[href]") if OUTSIDE.match(tag["href"])]


def build_small_book(folder, address):
    """Build a book of two notebooks with this book's settings, for tests to which the pages do not matter."""
    shutil.copy(ROOT / "_config.yml", folder)
    shutil.copytree(ROOT / "book", folder / "book", ignore=shutil.ignore_patterns("*.md", "__pycache__"))
    toc = "format: jb-book\nroot: notebooks/page\nparts: [{chapters: [{file: notebooks/other}]}]\n"
    (folder / "_toc.yml").write_text(toc)
    (folder / "notebooks").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    page = new_notebook(cells=[new_markdown_cell("# A page"), new_code_cell("1 + 1")], metadata=kernel)
    for name in ("page", "other"):
        nbformat.write(page, folder / "notebooks" / f"{name}.ipynb")
    return build(folder, BOOK_REPOSITORY_URL=address)


def test_no_repository_link_without_the_variable(book):
    assert [link for name in toc_files() for link in repository_links(soup(book.html / f"{name}.html"))] == []


@pytest.mark.slow
def test_repository_and_launch_links_with_the_variable(tmp_path):
    html, status, complaints = build_small_book(tmp_path, "https://github.com/an-owner/a.name/")
    assert (status, complaints) == (0, "")
    page = soup(html / "notebooks" / "page.html")
    links, card = repository_links(page), card_of(page)
    assert "https://github.com/an-owner/a.name" in links
    assert "https://mybinder.org/v2/gh/an-owner/a.name/main?urlpath=lab/tree/notebooks/page.ipynb" in links
    assert "https://colab.research.google.com/github/an-owner/a.name/blob/main/notebooks/page.ipynb" in links
    ask = page.select_one(".last-run a")["href"]
    assert ask == "https://github.com/an-owner/a.name/issues/new?title=notebooks%2Fpage%3A+"
    assert not [flaw for flaw in flaws(html) if "another host" in flaw]
    assert card["og:title"] == "A page" and card["og:url"] == "https://an-owner.github.io/a.name/notebooks/page.html"
    assert card["og:image"] == "https://an-owner.github.io/a.name/_static/card.png"
    sheets = [link["href"] for link in soup(html / "404.html").select("link[rel=stylesheet]")]
    assert sheets and all(sheet.startswith("/a.name/_static/") for sheet in sheets)


@pytest.mark.slow
def test_bad_repository_url_fails_the_build(tmp_path):
    _, status, complaints = build_small_book(tmp_path, "example.org/book")
    assert status != 0
    assert "BOOK_REPOSITORY_URL is 'example.org/book', which is not the address of a repository on GitHub" in complaints
    assert "Traceback" not in complaints


def card_of(page):
    """What a link to the page shows elsewhere: {property: content}."""
    return {tag["property"]: tag["content"] for tag in page("meta", property=True)}


def test_every_page_has_a_card_and_the_mark(book):
    assert (book.html / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    for name in toc_files():
        page = soup(book.html / f"{name}.html")
        card = card_of(page)
        assert card["og:title"] and len(card["og:description"]) > 60 and card["og:image"].endswith("_static/card.png")
        text, description = " ".join(page.article.text.split()), card["og:description"]
        end = " ".join(description.removesuffix(" …").split()[-2:])
        assert not description.endswith("...") and re.search(rf"{re.escape(end)}(?!\w)", text), description
        [brand] = page.select(".navbar-brand")
        assert brand.select("img[src$='favicon.svg']") and "World Size One" in brand.text


def test_the_readme_shows_what_a_notebook_holds():
    """Each block of text is an output of the first chapter; each block of Python is in one of its cells."""
    cells = [cell for cell in nbformat.read(ROOT / f"{CHAPTERS[0]}.ipynb", 4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    texts = [f"{output.get('text', '')}{output.get('ename', '')}: {output.get('evalue', '')}" for output in outputs]
    chapter = {"python": "\n".join(cell.source for cell in cells), "text": "".join(texts)}
    blocks = re.findall(r"```(python|text)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text", "text"]
    assert [block for kind, block in blocks if block.rstrip() not in chapter[kind]] == []
