"""The built book: a build without warnings, links, downloads."""

import html
import re
import shutil
import sys
from functools import cache
from html.parser import HTMLParser
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


class Links(HTMLParser):
    """The ids and links of a page. BeautifulSoup would take four times as long for its 20,000 elements."""

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.tags = []  # [(name, attributes)] of those that link or load something
        self.feed(text)

    def handle_starttag(self, name, attributes):
        attributes = {key: value or "" for key, value in attributes}
        if "id" in attributes:
            self.ids.add(attributes["id"])
        if name in ("a", "link", "script", "img"):
            self.tags.append((name, attributes))


@cache
def links_of(path):
    return Links(path.read_text(encoding="utf-8"))


@cache
def around_article(path):
    """A page without its article: the head, the sidebar and the buttons."""
    before, _, rest = path.read_text(encoding="utf-8").partition("<article")
    return BeautifulSoup(before + rest.partition("</article>")[2], "html.parser")


@cache
def text_of_article(path):
    article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
    return html.unescape(re.sub(r"<[^>]*>", "", article.partition(">")[2]))


# --- the pages --------------------------------------------------------------------------------------------------------


def address_of(attributes):
    return attributes.get("href", attributes.get("src", ""))


def flaw_of_link(name, attributes, path, folder):
    """What is wrong with a link or a source on the page at ``path``, or "". ``folder`` is the book's."""
    address = address_of(attributes)
    if OTHER_HOST.match(address):
        if name != "a" and attributes.get("rel") != "canonical":
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
            file = (folder / relative[1:]).resolve()
    if not file.is_file() or not file.is_relative_to(folder.resolve()):
        return "no such file"
    if anchor and file.suffix == ".html" and unquote(anchor) not in links_of(file).ids:
        return "no such anchor"
    return ""


def has_text(image):
    """Whether an image has words for those who cannot see it; the theme's logo has the book's title beside it."""
    text = image.get("alt", "").strip()
    is_logo = "logo__image" in image.get("class", "")
    return is_logo or (text != "" and not FILE_NAME.search(text))


def flaws(folder):
    """Yields "page: address: what is wrong" for the links and images of all pages in a book's folder."""
    for path in sorted(folder.rglob("*.html")):
        page = path.relative_to(folder).as_posix()
        if page.startswith("_"):
            continue
        for name, attributes in links_of(path).tags:
            flaw = flaw_of_link(name, attributes, path, folder)
            if flaw:
                yield f"{page}: {address_of(attributes)}: {flaw}"
            if name == "img" and not has_text(attributes):
                yield f"{page}: {address_of(attributes)}: no text"


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
    path = book.html / f"{chapter}.html"
    downloads = {}
    for _, attributes in links_of(path).tags:
        if {"download", "btn-download-source-button"} & set(attributes.get("class", "").split()):
            file = path.parent / attributes["href"]
            downloads[file.name] = file.read_bytes()
    assert downloads == {notebook.name: notebook.read_bytes(), script.name: script.read_bytes()}

    text = text_of_article(path)
    assert script.read_text(encoding="utf-8").strip() in text
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
    assert [link for name in toc_files() for link in repository_links(around_article(book.html / f"{name}.html"))] == []


@pytest.mark.slow
def test_repository_and_launch_links_with_the_variable(tmp_path):
    folder, status, complaints = build_small_book(tmp_path, "https://github.com/an-owner/a.name/")
    assert (status, complaints) == (0, "")
    page = BeautifulSoup((folder / "notebooks" / "page.html").read_text(encoding="utf-8"), "html.parser")
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
    for sheet in around_article(folder / "404.html").select("link[rel=stylesheet]"):
        assert sheet["href"].startswith("/a.name/_static/")
    assert [flaw for flaw in flaws(folder) if "asks another host" in flaw] == []


def test_an_address_that_is_no_repository_on_github_is_refused():
    with pytest.raises(ValueError, match="BOOK_REPOSITORY_URL is 'example.org/book', which is not the address of"):
        book_address.theme_options("example.org/book")


def test_every_page_has_a_card_and_the_logo(book):
    assert (book.html / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    for name in toc_files():
        page = around_article(book.html / f"{name}.html")
        card = card_of(page)
        description = card["og:description"]
        assert card["og:title"], name
        assert card["og:image"].endswith("_static/card.png")
        assert len(description) > 60, name
        last_words = " ".join(description.removesuffix(" …").split()[-2:])
        text = " ".join(text_of_article(book.html / f"{name}.html").split())
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
