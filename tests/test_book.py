"""The built book: a build without warnings, links, no requests to other hosts, downloads; and the prose's commands."""

import gc
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, build, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from torch.distributed.run import get_args_parser

# Attributes by which a page makes the browser fetch something at once; a link leads there only when it is clicked.
FETCHED = ["src", "srcset", "poster", "data", "href", "xlink:href"]


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


def pages(html):
    """[(name, parsed page)] of each page; the name is its path below the book's folder."""
    names = [path.relative_to(html).as_posix() for path in sorted(html.rglob("*.html"))]
    return [(name, soup(html / name)) for name in names if not name.startswith("_")]


def page_of(book, docname):
    return soup(book.html / f"{docname}.html")


# --- checks of a page, each also shown a page that breaks it ----------------------------------------------------------


def fetched_from_outside(page, path, html):
    """Addresses on other hosts that the browser would ask for when it shows this page."""
    tags = [tag for tag in page(True) if tag.name != "a" and "canonical" not in tag.get("rel", [])]
    addresses = [tag.get(name, "") for tag in tags for name in FETCHED]
    styles = [tag.get_text() for tag in page("style")] + [tag["style"] for tag in page(style=True)]
    return [address for address in addresses if is_outside(address)] + outside_in_css("\n".join(styles))


def is_outside(address):
    return bool(re.match(r"\s*(https?:)?//", address))


def outside_in_css(css):
    return [address for address in re.findall(r"(?:url\(|@import)\s*['\"]?([^'\")\s;]+)", css) if is_outside(address)]


def broken_links(page, path, html):
    """Links, sources and anchors of the page at ``path`` that lead to nothing inside the folder ``html``."""
    for tag in page(["a", "link", "script", "img"]):
        link = tag.get("href", tag.get("src"))
        if link is None or is_outside(link) or re.match(r"(mailto|data|javascript):", link):
            continue
        target, _, anchor = link.partition("#")
        place = unquote(urlsplit(target).path)  # 404.html is shown at any address, so its links begin at the root
        file = (html / place[1:] if place[:1] == "/" else path.parent / place).resolve() if target else path
        if file.is_dir() or not file.exists() or not file.is_relative_to(html.resolve()):
            yield f"{link}: no such file"
        elif anchor and file.suffix == ".html" and unquote(anchor) not in anchors(file):
            yield f"{link}: no such anchor"


def badly_formed_links(page, path, html):
    """Outside links that no reader could follow."""
    links = [tag["href"] for tag in page("a", href=True) if is_outside(tag["href"])]
    return [link for link in links if not re.fullmatch(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?(/[^\s<>\"]*)?", link)]


def images_without_text(page, path, html):
    """Images whose alt text is missing or a file's name. The theme's logo has the book's title beside it."""
    images = [tag for tag in page("img") if "logo__image" not in tag.get("class", [])]
    return [tag["src"] for tag in images if re.search(r"^\s*$|\.(png|svg|jpe?g|gif)$", tag.get("alt", ""))]


BROKEN = {  # {check: (a page that breaks it, the problems)}
    fetched_from_outside: (
        "<img src='https://a.example/x.png'><script src='//b.example/x.js'></script>"
        "<link rel='stylesheet' href='https://c.example/x.css'><style>@import 'https://d.example/y.css'</style>"
        "<p style='background: url(http://e.example/d)'><a href='https://f.example/page'>fine</a>",
        ["https://a.example/x.png", "//b.example/x.js", "https://c.example/x.css", "https://d.example/y.css",
         "http://e.example/d"],
    ),
    broken_links: (
        "<a href='gone.html'>gone</a><a href='../out.html'>outside</a><a href='#here'>no anchor</a>"
        "<a href='page.html#there' id='there'>fine</a>",
        ["gone.html: no such file", "../out.html: no such file", "#here: no such anchor"],
    ),
    badly_formed_links: ("<a href='https://bad'>bad</a><a href='https://fine.example/a'>fine</a>", ["https://bad"]),
    images_without_text: ("<img src='bare'><img src='named' alt='x.png'><img src='fine' alt='A d'>", ["bare", "named"]),
}  # fmt: skip


@pytest.mark.parametrize("check", BROKEN)
def test_no_page_has_what_the_check_sees_on_a_broken_one(book, tmp_path, check):
    path = tmp_path / "page.html"
    broken, problems = BROKEN[check]
    path.write_text(broken)
    assert list(check(soup(path), path, tmp_path)) == problems
    problems_of = {name: list(check(page, book.html / name, book.html)) for name, page in pages(book.html)}
    assert {name: problems for name, problems in problems_of.items() if problems} == {}


# --- the book ---------------------------------------------------------------------------------------------------------


def test_build_is_quiet_and_has_every_page_of_the_toc(book):
    assert (book.status, book.complaints) == (0, "")
    assert f"url={toc_files()[0]}.html" in (book.html / "index.html").read_text()
    assert (book.html / ".nojekyll").exists(), "GitHub Pages would leave out the folders that start with _"
    assert {f"{name}.html" for name in toc_files()} <= {name for name, _ in pages(book.html)}


def test_no_style_sheet_fetches_from_outside(book):
    sheets = {path.name: path.read_text(encoding="utf-8") for path in book.html.rglob("*.css")}
    assert [(name, address) for name, css in sheets.items() for address in outside_in_css(css)] == []


def test_pages_and_their_drawing_carry_the_fonts(book):
    """The five font files have at most 200 kB, and each family has its licence. An image has its own copy of a font."""
    sheet, drawing = (book.html / "_static" / "fonts.css", book.html / "_images" / "three_places.svg")
    for path, count in {sheet: 5, drawing: 3}.items():
        faces = re.findall(r"@font-face.*?}", path.read_text(encoding="utf-8"))
        assert len(faces) == count and all("url(data:font/woff2;base64," in face for face in faces)
        assert {re.search("font-family: '(.*?)'", face)[1] for face in faces} == {"Inter", "JetBrains Mono"}
    folder = ROOT / "book" / "fonts"
    assert sum(path.stat().st_size for path in folder.glob("*.woff2")) <= 200_000
    for family in ["Inter", "JetBrainsMono"]:
        licence = (folder / f"{family}-OFL.txt").read_text(encoding="utf-8")
        assert "SIL OPEN FONT LICENSE Version 1.1" in licence and licence in sheet.read_text(encoding="utf-8")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter_has_downloads_and_shows_its_script_and_outputs(book, chapter):
    page, folder, path = page_of(book, chapter), (book.html / chapter).parent, ROOT / f"{chapter}.ipynb"
    script = book.scripts / f"{path.stem}.py"
    downloads = [(folder / tag["href"]).resolve() for tag in page("a", class_="download")]
    contents = {file.name: file.read_bytes() for file in downloads}
    assert contents.get(path.name) == path.read_bytes()
    assert contents.get(script.name) == script.read_bytes()
    button = page.select_one(".btn-download-source-button")
    assert (folder / button["href"]).read_bytes() == path.read_bytes()

    assert script.read_text().strip() in [fold.pre.get_text().strip() for fold in page("details") if fold.pre]

    outputs = [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]
    texts = [output.text.strip() for output in outputs if "text" in output]
    text = page.get_text()
    assert texts and [output for output in texts if output not in text] == []


# --- with and without a repository ------------------------------------------------------------------------------------


def repository_links(page):
    return [tag["href"] for tag in page.select(".article-header-buttons a[href]") if is_outside(tag["href"])]


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
    assert [link for _, page in pages(book.html) for link in repository_links(page)] == []


@pytest.mark.slow
def test_repository_and_launch_links_with_the_variable(tmp_path):
    html, status, complaints = build_small_book(tmp_path, "https://github.com/an-owner/a.name/")
    assert (status, complaints) == (0, "")
    page = soup(html / "notebooks" / "page.html")
    links, card = repository_links(page), card_of(page)
    assert "https://github.com/an-owner/a.name" in links
    assert "https://mybinder.org/v2/gh/an-owner/a.name/main?urlpath=lab/tree/notebooks/page.ipynb" in links
    assert "https://colab.research.google.com/github/an-owner/a.name/blob/main/notebooks/page.ipynb" in links
    assert not any(fetched_from_outside(page, html / name, html) for name, page in pages(html))
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


def test_every_page_has_a_card_the_mark_and_the_version(book):
    torch = version("torch").partition("+")[0]
    assert (book.html / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")
    for name in toc_files():
        page = page_of(book, name)
        card = card_of(page)
        assert card["og:title"] and len(card["og:description"]) > 60 and card["og:image"].endswith("_static/card.png")
        assert f"Verified with PyTorch {torch}." in page.select_one(".extra_footer").text
        [brand] = page.select(".navbar-brand")
        assert brand.select("img[src$='favicon.svg']") and "World Size One" in brand.text


@pytest.mark.parametrize("page, kinds", [("README.md", "python text text"), ("book/intro.md", "python text python")])
def test_the_front_shows_what_a_notebook_holds(page, kinds):
    """Each block of text is an output of the first chapter; each block of Python is in one of its cells."""
    cells = [cell for cell in nbformat.read(ROOT / f"{CHAPTERS[0]}.ipynb", 4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    texts = [f"{output.get('text', '')}{output.get('ename', '')}: {output.get('evalue', '')}" for output in outputs]
    chapter = {"python": "\n".join(cell.source for cell in cells), "text": "".join(texts)}
    blocks = re.findall(r"```(python|text)\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert [kind for kind, _ in blocks] == kinds.split()
    assert [block for kind, block in blocks if block.rstrip() not in chapter[kind]] == []


def test_the_intro_lists_the_parts_as_the_toc_has_them():
    """Its headings are the parts. Below each are the part's pages, in order, with the titles that the pages have."""
    parts = re.split(r"(?m)^### ", (ROOT / "book" / "intro.md").read_text())[1:]
    tables = {part.splitlines()[0]: re.findall(r"(?m)^\|(?: \d+ \|)? \[([^]]+)\]\(([^)]+)\)", part) for part in parts}
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())["parts"]
    of_toc = {part["caption"]: [page["file"] for page in part["chapters"]] for part in toc if "caption" in part}
    files = {
        caption: [(ROOT / "book" / link).resolve().relative_to(ROOT).with_suffix("").as_posix() for _, link in pages]
        for caption, pages in tables.items()
    }
    assert list(files.items()) == list(of_toc.items())
    for title, link in [page for pages in tables.values() for page in pages if page[1].endswith(".ipynb")]:
        head = nbformat.read(ROOT / "book" / link, 4).cells[0].source.splitlines()[0]
        assert re.sub(r"^# (\d+\. )?", "", head) == title


# --- the commands that the prose tells a reader to type ---------------------------------------------------------------


def commands(text):
    """The commands in a text: the lines of shell listings, without comments, and code in sentences."""
    for listing in re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S):
        lines = [re.sub(r"(^|\s+)#.*", "", line) for line in listing.splitlines()]
        yield from filter(None, lines)
    yield from re.findall(r"(?<!`)`((?:make|python -m|pytest|jupyter|torchrun) [^`]+)`(?!`)", text)


def all_commands():
    texts = [path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *(ROOT / "book").glob("*.md")]]
    return sorted({command for text in texts for command in commands(text)})


def test_readme_starts_with_the_two_commands():
    in_readme = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [command for command in in_readme if command.startswith("make")][:2] == ["make book", "make test"]


@pytest.mark.parametrize("command", all_commands())
def test_command_in_the_prose_works(command, tmp_path, helpers):
    """A make target exists. A command of this project, or its help, is run. Torchrun has the flags."""
    program, *arguments = words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert {word for word in arguments if word.isalpha()} <= {*targets}  # make would take a folder's name, too
        run("make", "-n", *arguments)
    elif words[:3] == ["python", "-m", "helpers"]:
        name, *options = words[3:]
        assert name != "doctor" or not options  # test_doctor.py runs it so
        if name in ("run", "rehearse", "doctor", "verify"):
            options = ["--help"]
        elif name == "export":
            options += ["--out", tmp_path]  # the last one counts
        status, _, errors = helpers(name, *options)
        assert not status, errors
    elif words[:2] == ["jupyter", "nbconvert"]:
        run(sys.executable, "-m", "nbconvert", *words[2:], "--output-dir", tmp_path)
        assert list(tmp_path.iterdir())
    elif program == "pytest":
        run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    else:
        assert program == "torchrun"
        flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
        assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= flags
        assert {f"notebooks/{Path(word).stem}" for word in arguments if word.endswith(".py")} <= {*CHAPTERS}


def run(*command):
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
