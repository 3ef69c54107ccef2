"""The built book: a build without warnings, links, downloads."""

import html
import re
import shutil
import sys
from functools import cache
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, build, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sphinx.errors import ConfigError
from subset_fonts import CHARACTERS

sys.path.append(str(ROOT / "book" / "_ext"))
import book_address

OTHER_HOST = re.compile(r"\s*(https?:)?//")
NOT_A_FILE = re.compile("(mailto|data|javascript):")


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
    """The text of a page without its tags, and without what is around the article."""
    _, _, from_article_on = path.read_text(encoding="utf-8").partition("<article")
    article, _, _ = from_article_on.partition("</article>")
    _, _, content = article.partition(">")
    return html.unescape(re.sub(r"<[^>]*>", "", content))


# --- the pages --------------------------------------------------------------------------------------------------------


def address_of(attributes):
    """The address that a tag with these attributes links or loads; "" if it does not."""
    return attributes.get("href", attributes.get("src", ""))


def file_of(address, path, folder):
    """The file that an address on the page at ``path`` means. ``folder`` is the book's."""
    relative = unquote(urlsplit(address).path)
    if not relative:
        return path
    if relative.startswith("/"):  # 404.html is shown at any address, so its links begin at the root
        return (folder / relative[1:]).resolve()
    return (path.parent / relative).resolve()


def broken_links(folder):
    """Yields "page: address" for each link to a file or an anchor that is not there, of all pages of a built book."""
    for path in sorted(folder.rglob("*.html")):
        page = path.relative_to(folder).as_posix()
        if page.startswith("_"):
            continue
        for _, attributes in links_of(path).tags:
            address = address_of(attributes)
            if not address or OTHER_HOST.match(address) or NOT_A_FILE.match(address):
                continue
            file = file_of(address, path, folder)
            is_in_the_book = file.is_file() and file.is_relative_to(folder.resolve())
            anchor = unquote(urlsplit(address).fragment)
            if not is_in_the_book:
                yield f"{page}: {address}"
            elif anchor and file.suffix == ".html" and anchor not in links_of(file).ids:
                yield f"{page}: {address}"


def test_no_page_has_a_broken_link(book):
    assert list(broken_links(book.html)) == []


def characters_in_fonts():
    """The characters for which the book's fonts have a drawing. CHARACTERS gives their ranges, such as "20-7E,A0"."""
    characters = set()
    for part in ",".join(CHARACTERS).split(","):
        first, _, last = part.partition("-")
        if last == "":  # a single character
            last = first
        characters.update(chr(code) for code in range(int(first, 16), int(last, 16) + 1))
    return characters


def characters_of_page(path):
    """The characters of a page's text, without spaces."""
    _, _, body = path.read_text(encoding="utf-8").partition("<body")
    text = html.unescape(re.sub(r"(?s)<(script|style)\b.*?</\1>|<[^>]*>", "", body))
    return {character for character in text if not character.isspace()}


def test_the_fonts_have_every_character_of_the_pages(book):
    """A character that they lack would be drawn in another font, or as an empty box. tools/subset_fonts.py adds it."""
    in_fonts = characters_in_fonts()
    missing = {}
    for name in toc_files():
        not_in_fonts = characters_of_page(book.html / f"{name}.html") - in_fonts
        if not_in_fonts:
            missing[name] = not_in_fonts
    assert missing == {}


def test_build_is_quiet_and_has_every_page_of_the_toc(book):
    assert book.status == 0, book.complaints
    assert book.complaints == ""
    missing = [name for name in toc_files() if not (book.html / f"{name}.html").exists()]
    assert missing == []
    index = (book.html / "index.html").read_text(encoding="utf-8")
    assert f"url={toc_files()[0]}.html" in index, "it leads to the first page"
    assert (book.html / ".nojekyll").exists(), "GitHub Pages would leave out the folders that start with _"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_has_downloads_and_shows_its_script_and_outputs(book, chapter):
    notebook = ROOT / f"{chapter}.ipynb"
    script = book.scripts / f"{notebook.stem}.py"
    page = book.html / f"{chapter}.html"

    classes_of_downloads = {"download", "btn-download-source-button"}  # of links in the text, and of the theme's button
    downloads = {}
    for _, attributes in links_of(page).tags:
        classes = set(attributes.get("class", "").split())
        if classes & classes_of_downloads:
            file = page.parent / attributes["href"]
            downloads[file.name] = file.read_bytes()
    assert downloads == {notebook.name: notebook.read_bytes(), script.name: script.read_bytes()}

    text = text_of_article(page)
    assert script.read_text(encoding="utf-8").strip() in text
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                assert output.text.strip() in text, cell.id


# --- with and without a repository ------------------------------------------------------------------------------------


def repository_links(page):
    """The addresses to which the buttons of a page lead, if they are on another host."""
    links = [tag["href"] for tag in page.select(".article-header-buttons a[href]")]
    return [link for link in links if OTHER_HOST.match(link)]


def card_of(page):
    """What a link to the page shows elsewhere: {property: content}."""
    return {tag["property"]: tag["content"] for tag in page("meta", property=True)}


def build_small_book(folder, address):
    """Build a book of two notebooks with this book's settings, for tests to which the pages do not matter.

    ``address`` is that of its repository. Returns how the Build ended.
    """
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
    for name in toc_files():
        page = around_article(book.html / f"{name}.html")
        assert repository_links(page) == [], name


@pytest.mark.slow
def test_repository_and_launch_links_with_the_variable(tmp_path):
    done = build_small_book(tmp_path, "https://github.com/an-owner/a.name/")
    assert done.status == 0
    assert done.complaints == ""
    path = done.html / "notebooks" / "page.html"
    page = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")

    links = repository_links(page)
    assert "https://github.com/an-owner/a.name" in links
    assert "https://mybinder.org/v2/gh/an-owner/a.name/published?urlpath=lab/tree/notebooks/page.ipynb" in links
    file = "blob/published/notebooks/page.ipynb"
    assert f"https://colab.research.google.com/github/an-owner/a.name/{file}" in links
    source = quote(f"https://github.com/an-owner/a.name/{file}", safe="")
    assert f"https://www.kaggle.com/kernels/welcome?src={source}" in links
    link_for_questions = page.select_one(".last-run a")["href"]
    assert link_for_questions == "https://github.com/an-owner/a.name/issues/new?title=notebooks%2Fpage%3A+"

    card = card_of(page)
    assert card["og:title"] == "A page"
    assert card["og:url"] == "https://an-owner.github.io/a.name/notebooks/page.html"
    assert card["og:image"] == "https://an-owner.github.io/a.name/_static/card.png"

    for sheet in around_article(done.html / "404.html").select("link[rel=stylesheet]"):
        assert sheet["href"].startswith("/a.name/_static/")

    canonical_address = card["og:url"]  # the only <link> of a page that may lead to another host
    linked = [attributes["href"] for name, attributes in links_of(path).tags if name == "link"]
    assert [address for address in linked if OTHER_HOST.match(address)] == [canonical_address]


def test_an_address_that_is_no_repository_on_github_is_refused(monkeypatch):
    monkeypatch.setenv("BOOK_REPOSITORY_URL", "example.org/book")
    with pytest.raises(ConfigError, match="BOOK_REPOSITORY_URL: 'example.org/book' is not the address of"):
        book_address.add_repository(None, None)


def test_every_page_has_a_card_and_the_logo(book):
    assert (book.html / "_static" / "card.png").exists()
    for name in toc_files():
        page = around_article(book.html / f"{name}.html")
        card = card_of(page)
        assert card["og:title"], name
        assert card["og:image"].endswith("_static/card.png")
        assert len(card["og:description"]) > 60, name
        assert page.select_one(".navbar-brand img[src$='favicon.svg']")


def test_the_readme_shows_what_a_notebook_holds():
    """Each block of text is an output of the first chapter; each block of Python is in one of its cells."""
    in_notebook = {"python": "", "text": ""}  # all code of the chapter, and all that it printed
    for cell in nbformat.read(ROOT / f"{CHAPTERS[0]}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            in_notebook["python"] += f"{cell.source}\n"
            for output in cell.outputs:
                in_notebook["text"] += output.get("text", "")
                if output.output_type == "error":
                    in_notebook["text"] += f"{output.ename}: {output.evalue}\n"

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", readme, flags=re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "text", "text"]
    for language, block in blocks:
        assert block.rstrip() in in_notebook[language]
