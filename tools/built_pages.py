"""The built book's pages, as print_pdf.py and make_epub.py read them: their order, their content, and what to open."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup, Tag

ROOT = Path(__file__).parents[1]
INTRO = "book/intro"
# A selector of the elements that have no use without a browser: the links beside headings, the note for JupyterLab, the
# frames of a figure that are not shown, the hints how to make the PDF and the EPUB, and the scripts that move figures.
ON_SCREEN_ONLY = "a.headerlink, .wso-note, .wso-view:not(.wso-on), p.pdf, p.epub, figure.wso script"
# The text calls a cell "folded" or "closed" if a reader has to open it in a browser. In a PDF and in an EPUB all cells
# are open, so "the closed cell below" becomes "the cell below". This matches the word and the space after it.
FOLDED_CELL = re.compile(r"\b(?:folded|closed)(?=\s+cell\b)\s+")


@dataclass(frozen=True)
class Part:
    """A part of the book: its caption or "", and its pages, files without suffix."""

    caption: str
    pages: list[str]


def table_of_contents() -> list[Part]:
    """The parts of the book in the order of _toc.yml. The first one has no caption, and only the first page."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    first_page = toc["root"]
    parts = [Part(caption="", pages=[first_page])]
    for entry in toc["parts"]:
        pages = [chapter["file"] for chapter in entry["chapters"]]
        parts.append(Part(caption=entry.get("caption", ""), pages=pages))
    return parts


def is_chapter(page: str) -> bool:
    """Whether a page is a chapter, such as ``notebooks/04_ddp`` or ``notebooks/04b_ddp_in_real_projects``."""
    return re.match(r"notebooks/\d\d_", page) is not None


def book_settings() -> dict[str, Any]:
    """What _config.yml says of the book: ``title``, ``author``, ``copyright`` and more."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    return config


def parsed(text: str) -> BeautifulSoup:
    """A page's HTML as a tree of elements. In ``<pre>`` and ``<code>`` all spaces stay, because they indent code."""
    return BeautifulSoup(text, "html.parser", preserve_whitespace_tags={"code", "pre"})


def element(tag: Tag, selector: str) -> Tag:
    """The first element inside ``tag`` that a selector finds. Raises ValueError if there is none."""
    match = tag.select_one(selector)
    if match is None:
        raise ValueError(f"A built page has no element {selector}: has the theme changed?")
    return match


def title_of(article: Tag) -> str:
    """The title of a page, which is its only heading of the first level."""
    return element(article, "h1").get_text()


def sections_of(article: Tag) -> list[tuple[str, str]]:
    """The sections of a page: (its id, its heading) for each heading of the second level."""
    sections = []
    for section in article.select("section > section:has(> h2)"):
        sections.append((str(section["id"]), element(section, "h2").get_text()))
    return sections


def make_static(content: Tag, document: BeautifulSoup) -> None:
    """Remove from a page what works only on a screen, and open its closed boxes. ``document`` makes new tags."""
    for tag in content.select(ON_SCREEN_ONLY):
        tag.decompose()
    for controls in content.select(".wso-controls"):
        replace_controls(controls)
    for box in content("details"):
        open_box(box, document)
    for text in content.find_all(string=FOLDED_CELL):
        if text.find_parent("pre") is None:
            text.replace_with(FOLDED_CELL.sub("", text))


def replace_controls(controls: Tag) -> None:
    """Replace the controls of a figure by a line with their values: ``Shown: world size 4, step 0.``"""
    settings = []
    for control in controls.select("[data-labels]"):
        label = element(control, "legend, label > span")  # of buttons, or of a slider
        value = element(control, ":checked + span, output")
        settings.append(f"{label.get_text()} {value.get_text()}")
    controls.name = "p"
    controls.attrs = {"class": "folded"}
    controls.string = f"Shown: {', '.join(settings)}."


def open_box(box: Tag, document: BeautifulSoup) -> None:
    """Make a closed box an open one, with its title as a line above it."""
    summary = element(box, "summary")
    title = summary.select_one(".sd-summary-text")  # in a box of sphinx-design, which has an icon beside the text
    if title is None:
        title = summary
    line = document.new_tag("p", attrs={"class": "folded"})
    line.string = title.get_text()
    summary.replace_with(line)
    classes = "fold"
    if box.find_parent(class_="tag_solution"):
        classes = "fold solution"
    box.name = "div"
    box.attrs = {"class": classes}


def address_in_book(html: Path, page: str, address: str) -> str:
    """Where a link on a page leads: ``../notebooks/a.html#b`` on ``book/intro`` leads to ``notebooks/a.html``.

    ``html`` is the folder of the built book, from which the returned address counts.
    """
    target = ((html / page).parent / unquote(urlsplit(address).path)).resolve()
    return target.relative_to(html.resolve()).as_posix()


def link_from_intro(html: Path, name: str, link: str) -> None:
    """Replace the paragraph of the intro that says how to make a file, the PDF or the EPUB, by a link to the file.

    ``html`` is the folder of the built book. ``name`` is the file's name, by whose suffix the paragraph is found: its
    class is pdf or epub. ``link`` is the paragraph's new content. Exits with a message if there is no such paragraph.
    """
    intro = html / f"{INTRO}.html"
    kind = Path(name).suffix.removeprefix(".")
    pattern = rf'<p class="{kind}">.*?</p>'
    text, count = re.subn(pattern, f'<p class="{kind}">{link}</p>', intro.read_text(encoding="utf-8"), flags=re.S)
    if count != 1:
        raise SystemExit(f"{intro} has {count} paragraphs of the class {kind}, and the link belongs into one.")
    intro.write_text(text, encoding="utf-8")
