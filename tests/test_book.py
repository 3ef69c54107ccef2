"""The built book: a build without warnings, links, downloads."""

import gc
import re
import shutil
import sys
from functools import cache
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, build, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_address

OTHER_HOST = re.compile(r"\s*(https?:)?//")
ADDRESS = re.compile(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?(/[^\s<>\"]*)?")
NOT_A_FILE = re.compile("(mailto|data|javascript):")
FILE_NAME = re.compile(r"\.(png|svg|jpe?g|gif)$")


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


def address_of(tag):
    return tag.get("href", tag.get("src", ""))


def flaw_of_link(tag, path, html):
    """What is wrong with a link or a source on the page at ``path``, or "". ``html`` is the book's folder."""
    address = address_of(tag)
    if OTHER_HOST.match(address):
        if tag.name != "a" and "canonical" not in tag.get("rel", []):
            return "asks another host"
        if not ADDRESS.fullmatch(address):
            return "no address"
        return ""
    if not address or NOT_A_FILE.match(address):
        return ""
    place, _, anchor = address.partition("#")
    file = path
    if place:
        relative = unquote(urlsplit(place).path)
        file = (path.parent / relative).resolve()
        if relative.startswith("/"):  # 404.html is shown at any address, so its links begin at the root
            file = (html / relative[1:]).resolve()
    if not file.is_file() or not file.is_relative_to(html.resolve()):
        return "no such file"
    if anchor and file.suffix == ".html" and unquote(anchor) not in anchors(file):
        return "no such anchor"
    return ""


def has_text(image):
    """Whether an image has words for those who cannot see it; the theme's logo has the book's title beside it."""
    text = image.get("alt", "").strip()
    is_logo = "logo__image" in image.get("class", [])
    return is_logo or (text != "" and not FILE_NAME.search(text))


def flaws(html):
    """Yields "page: address: what is wrong" for the links and images of all pages in a book's folder."""
    for path in sorted(html.rglob("*.html")):
        name = path.relative_to(html).as_posix()
        if name.startswith("_"):
            continue
        for tag in soup(path)(["a", "link", "script", "img"]):
            flaw = flaw_of_link(tag, path, html)
            if flaw:
                yield f"{name}: {address_of(tag)}: {flaw}"
            if tag.name == "img" and not has_text(tag):
                yield f"{name}: {address_of(tag)}: no text"


def test_no_page_has_a_broken_link_or_an_image_without_text(book):
    assert list(flaws(book.html)) == []


FLAWS = {  # {HTML: what is wrong with it}
    "<a href='gone.html'>gone</a>": "gone.html: no such file",
    "<a href='../out.html'>outside</a>": "../out.html: no such file",
    "<a href='#here'>no anchor</a>": "#here: no such anchor",
    "<a href='page.html#there' id='there'>fine</a>": "",
    "<a href='https://bad'>bad</a>": "https://bad: no address",
    "<a href='https://fine.example/a'>fine</a>": "",
    "<script src='//b.example/x.js'></script>": "//b.example/x.js: asks another host",
    "<img src='data:,1'>": "data:,1: no text",
    "<img src='data:,2' alt='x.png'>": "data:,2: no text",
    "<img src='data:,3' alt='A d'>": "",
}


def test_broken_links_and_images_without_text_are_seen(tmp_path):
    (tmp_path / "page.html").write_text("".join(FLAWS))
    assert list(flaws(tmp_path)) == [f"page.html: {flaw}" for flaw in FLAWS.values() if flaw]


def test_build_is_quiet_and_has_every_page_of_the_toc(book):
    assert (book.status, book.complaints) == (0, "")
    assert f"url={toc_files()[0]}.html" in (book.html / "index.html").read_text(encoding="utf-8")
    assert (book.html / ".nojekyll").exists(), "GitHub Pages would leave out the folders that start with _"
    assert [name for name in toc_files() if not (book.html / f"{name}.html").exists()] == []


def test_a_drawing_has_its_fonts_and_each_family_its_licence(book):
    drawing = (book.html / "_images" / "three_places.svg").read_text(encoding="utf-8")
    families = re.findall(r"@font-face { font-family: '(.*?)';.*?url\(data:", drawing)
    assert families == ["Inter", "Inter", "JetBrains Mono"]
    for family in ["Inter", "JetBrainsMono"]:
        licence = (book.html / "_static" / f"{family}-OFL.txt").read_text(encoding="utf-8")
        assert "SIL OPEN FONT LICENSE Version 1.1" in licence


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_has_downloads_and_shows_its_script_and_outputs(book, chapter):
    notebook = ROOT / f"{chapter}.ipynb"
    script = book.scripts / f"{notebook.stem}.py"
    page = soup(book.html / f"{chapter}.html")
    folder = (book.html / chapter).parent
    downloads = [folder / tag["href"] for tag in page("a", class_="download")]
    contents = {path.name: path.read_bytes() for path in downloads}
    assert contents == {notebook.name: notebook.read_bytes(), script.name: script.read_bytes()}
    button = page.select_one(".btn-download-source-button")
    assert (folder / button["href"]).read_bytes() == notebook.read_bytes()

    listings = [box.pre.get_text().strip() for box in page("details") if box.pre]
    assert script.read_text(encoding="utf-8").strip() in listings

    text = page.get_text()
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                assert output.text.strip() in text, cell.id


# --- with and without a repository ------------------------------------------------------------------------------------


def repository_links(page):
    links = [tag["href"] for tag in page.select(".article-header-buttons a[href]")]
    return [link for link in links if OTHER_HOST.match(link)]


def card_of(page):
    """What a link to the page shows elsewhere: {property: content}."""
    return {tag["property"]: tag["content"] for tag in page("meta", property=True)}


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
    links = repository_links(page)
    assert "https://github.com/an-owner/a.name" in links
    assert "https://mybinder.org/v2/gh/an-owner/a.name/main?urlpath=lab/tree/notebooks/page.ipynb" in links
    assert "https://colab.research.google.com/github/an-owner/a.name/blob/main/notebooks/page.ipynb" in links
    question = page.select_one(".last-run a")["href"]
    assert question == "https://github.com/an-owner/a.name/issues/new?title=notebooks%2Fpage%3A+"
    card = card_of(page)
    assert card["og:title"] == "A page"
    assert card["og:url"] == "https://an-owner.github.io/a.name/notebooks/page.html"
    assert card["og:image"] == "https://an-owner.github.io/a.name/_static/card.png"
    for sheet in soup(html / "404.html").select("link[rel=stylesheet]"):
        assert sheet["href"].startswith("/a.name/_static/")
    assert [flaw for flaw in flaws(html) if "asks another host" in flaw] == []


def test_an_address_that_is_no_repository_on_github_is_refused():
    with pytest.raises(ValueError, match="BOOK_REPOSITORY_URL is 'example.org/book', which is not the address of"):
        book_address.theme_options("example.org/book")


def test_every_page_has_a_card_and_the_logo(book):
    assert (book.html / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    for name in toc_files():
        page = soup(book.html / f"{name}.html")
        card = card_of(page)
        description = card["og:description"]
        assert card["og:title"], name
        assert card["og:image"].endswith("_static/card.png")
        assert len(description) > 60, name
        last_words = " ".join(description.removesuffix(" …").split()[-2:])
        text = " ".join(page.article.text.split())
        assert re.search(rf"{re.escape(last_words)}(?!\w)", text), f"it ends inside a word: {description}"
        [brand] = page.select(".navbar-brand")
        assert brand.select("img[src$='favicon.svg']")
        assert "World Size One" in brand.text


def test_the_readme_shows_what_a_notebook_holds():
    """Each block of text is an output of the first chapter; each block of Python is in one of its cells."""
    shown = {"python": "", "text": ""}
    for cell in nbformat.read(ROOT / f"{CHAPTERS[0]}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            shown["python"] += f"{cell.source}\n"
            for output in cell.outputs:
                shown["text"] += output.get("text", "")
                if output.output_type == "error":
                    shown["text"] += f"{output.ename}: {output.evalue}\n"
    blocks = re.findall(
        r"```(python|text)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert [kind for kind, _ in blocks] == ["python", "text", "text"]
    for kind, block in blocks:
        assert block.rstrip() in shown[kind]
