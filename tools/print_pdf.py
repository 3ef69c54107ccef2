"""Print the built book as one PDF, and link it from the intro (``make pdf``).

The pages of _build/html become one long page with a title, a table of contents and its own links. A headless browser
prints it twice: after the first print it is known on which page each heading stands.
"""

import argparse
import gc
import io
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag
from built_pages import (
    INTRO,
    Part,
    address_in_book,
    book_settings,
    element,
    is_chapter,
    link_from_intro,
    make_static,
    parsed,
    sections_of,
    table_of_contents,
    title_of,
)
from chromium import Missing, chromium
from playwright.sync_api import Browser
from pypdf import PdfReader, PdfWriter

NAME = "world-size-one.pdf"
PAPER_WIDTH = 665  # pixels between the margins of A4: 210 mm - 2 * 17 mm, at 96 to the inch
PAPER_STYLE = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")

PageNumbers = Mapping[str, int]  # {id of an element: number of its page on paper}


# --- a page of the book -----------------------------------------------------------------------------------------------


def id_in_book(page: str, anchor: str = "") -> str:
    """The id that a page or the element ``anchor`` on it has in the one long document."""
    page_id = re.sub(r"\W", "-", page)
    if anchor:
        return f"{page_id}--{anchor}"
    return page_id


def article_of(page: str, html: Path, pages: list[str]) -> Tag:
    """Read the content of one built page, and fit it into the one long document that holds all ``pages``.

    ``html`` is the folder of the built book. A page such as ``book/glossary`` is the path of its file in that folder,
    without the suffix .html.
    """
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    document = parsed(text)
    content = element(document, "article.bd-article")
    make_static(content, document)
    make_ids_unique(content, page)
    for link in content("a", href=True):
        lead_inside(link, html, page, pages)
    for image in content("img", src=True):
        image["src"] = address_in_book(html, page, str(image["src"]))
    content.name = "article"
    content.attrs = {"class": "bd-article page", "id": id_in_book(page)}
    return content


def make_ids_unique(content: Tag, page: str) -> None:
    """Put the name of the page before each id in its content, because two pages may have a heading with the same id."""
    for tag in content(id=True):
        is_in_drawing = tag.name == "svg" or tag.find_parent("svg") is not None
        if not is_in_drawing:  # the ids of drawings are unique in the book already
            tag["id"] = id_in_book(page, str(tag["id"]))


def lead_inside(link: Tag, html: Path, page: str, pages: list[str]) -> None:
    """Make a link from one page of the book to another lead to the same place in the one long document.

    ``page`` is the page that has the link, and ``pages`` are all pages of the document. A page such as
    ``book/glossary`` is the path of its file in the folder ``html``, without the suffix .html. A link to the web stays
    as it is. A link to any other file, such as a download, becomes plain text, because the PDF does not contain it.
    """
    address = str(link["href"])  # such as "../book/cluster.html#a-section"
    is_on_the_web = urlsplit(address).scheme != ""
    if is_on_the_web:
        return

    file, _, anchor = address.partition("#")
    if file:
        linked_page = address_in_book(html, page, file).removesuffix(".html")
    else:  # the address is only "#a-section", of this page
        linked_page = page

    if linked_page not in pages:
        link.unwrap()
        return
    link["href"] = "#" + id_in_book(linked_page, unquote(anchor))
    del link["title"]  # the text that a browser shows beside the mouse


# --- the one document -------------------------------------------------------------------------------------------------


def front(parts: list[Part], articles: Mapping[str, Tag], numbers: PageNumbers) -> str:
    """The title page and the table of contents, as HTML. Before the first print ``numbers`` is empty."""
    config = book_settings()
    picture = element(articles[INTRO], "img")["src"]
    return (
        f'<div id="title"><h1>{config["title"]}</h1><p>Distributed training with PyTorch, in a book whose code '
        f'runs in its tests</p><img src="{picture}" alt=""><p>{config["author"]}</p>'
        f"<small>{config['copyright']}</small></div>"
        f'<nav id="contents"><h1>Contents</h1>{"".join(contents(parts, articles, numbers))}</nav>'
    )


def contents(parts: list[Part], articles: Mapping[str, Tag], numbers: PageNumbers) -> Iterator[str]:
    """Yield the lines of the table of contents, as HTML: captions of parts, pages, and the sections of chapters."""
    for part in parts:
        if part.caption:
            yield f'<p class="part">{escape(part.caption)}</p>'
        for page in part.pages:
            yield contents_line("of-page", id_in_book(page), title_of(articles[page]), numbers)
            if is_chapter(page):
                for anchor, heading in sections_of(articles[page]):
                    yield contents_line("of-section", anchor, heading, numbers)


def contents_line(kind: str, target: str, text: str, numbers: PageNumbers) -> str:
    """A line of the table of contents, as HTML: a link to the element with the id ``target``, and its page's number.

    ``kind`` is the line's class. The style sheet print_pdf.css shows the number behind a line of dots, the ``<i>``.
    """
    attribute = ""
    if target in numbers:
        attribute = f' data-page="{numbers[target]}"'
    return f'<div class="{kind}"{attribute}><a href="#{target}">{escape(text)}</a><i></i></div>'


def document(html: Path, body: str, articles: Mapping[str, Tag]) -> str:
    """A complete HTML document around ``body``, which may be the whole book or only its title page and contents.

    ``articles`` are all pages of the book, {"book/glossary": its content}, also those that are not in ``body``: two
    documents with the same styles break their lines and pages at the same places. Relative addresses in the document
    count from ``html``, the folder of the built book.
    """
    links_to_style_sheets = ""
    for address in style_sheets_of(html, list(articles)):
        links_to_style_sheets += f'<link rel="stylesheet" href="{escape(address)}">'
    # The top of each sheet of paper has the title of the page of the book that is printed there.
    running_heads = [running_head(id_in_book(page), title_of(content)) for page, content in articles.items()]
    rules = PAPER_STYLE + "\n".join(running_heads)
    return (
        '<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>World Size One</title>'
        f"{links_to_style_sheets}<style>{rules}</style></head>"
        f'<body><main class="bd-content">{body}</main></body></html>'
    )


def style_sheets_of(html: Path, pages: list[str]) -> list[str]:
    """The addresses of all style sheets that these pages load, each once: ``["_static/styles/theme.css", …]``.

    A page loads only the style sheets that it needs, so every page is read. The addresses are relative to ``html``, the
    folder of the built book.
    """
    style_sheets: list[str] = []
    for page in pages:
        text = (html / f"{page}.html").read_text(encoding="utf-8")
        head, _, _ = text.partition("</head>")
        for link in BeautifulSoup(head, "html.parser")("link", rel="stylesheet"):
            address = address_in_book(html, page, str(link["href"]))
            if address not in style_sheets:
                style_sheets.append(address)
    return style_sheets


def running_head(page_id: str, title: str) -> str:
    """The rules of CSS that print a title at the top left of all paper pages of one page of the book.

    The element with this id is printed on paper pages of its own kind, ``@page``, which has the same name as the id.
    """
    head = f'@top-left {{ content: "{title}"; font: 8.5pt Inter; color: #555; }}'
    return f"#{page_id} {{ page: {page_id}; }} @page {page_id} {{ {head} }}"


# --- printing ---------------------------------------------------------------------------------------------------------


def print_pdf(html: Path, out: Path) -> int:
    """Print the book in the folder ``html`` to the file ``out``; return the number of pages.

    The table of contents needs page numbers, which are known only when the book has been printed. So the whole book is
    printed without them, and then its front, which is the title page and the table of contents, once more with them.
    """
    parts = table_of_contents()
    pages = [page for part in parts for page in part.pages]
    articles = {page: article_of(page, html, pages) for page in pages}
    body = "".join(str(content) for content in articles.values())
    with chromium() as browser:
        front_without_numbers = front(parts, articles, numbers={})
        whole_book = document(html, front_without_numbers + body, articles)
        book = PdfWriter(printed(browser, html, whole_book))

        numbers = page_numbers(book)
        front_with_numbers = document(html, front(parts, articles, numbers), articles)
        numbered_front = PdfReader(printed(browser, html, front_with_numbers))

    pages_before_the_body = numbers[id_in_book(pages[0])] - 1
    if len(numbered_front.pages) != pages_before_the_body:
        raise SystemExit("Page numbers make the table of contents longer. Give its lines room for them.")
    draw_numbered_front(book, numbered_front)
    add_bookmarks(book, articles, numbers)
    book.write(out)
    return len(book.pages)


def draw_numbered_front(book: PdfWriter, numbered_front: PdfReader) -> None:
    """Draw the title page and the contents of the second print, which have page numbers, over those of the book.

    The book's own links stay. Links of the second print would lead nowhere, because the chapters are not in it.
    """
    front_of_book = book.pages[: len(numbered_front.pages)]
    for page_of_book, page_with_numbers in zip(front_of_book, numbered_front.pages, strict=True):
        del page_of_book["/Contents"]  # what is drawn on the page; the page's links are in another entry
        page_of_book.merge_page(page_with_numbers)


def add_bookmarks(book: PdfWriter, articles: Mapping[str, Tag], numbers: PageNumbers) -> None:
    """Give the PDF a bookmark for each page of the book, which a reader's program lists beside the text."""
    for page, content in articles.items():
        index = numbers[id_in_book(page)] - 1  # pypdf counts the pages from 0
        book.add_outline_item(title=title_of(content), page_number=index)


def page_numbers(book: PdfWriter) -> PageNumbers:
    """The number of the page, counted from 1, on which each element with an id is printed: ``{"book-glossary": 412}``.

    The browser has written these places into the PDF as the targets of links.
    """
    numbers = {}
    for name, destination in book.named_destinations.items():
        index = book.get_destination_page_number(destination)
        if index is not None:
            numbers[name.removeprefix("/")] = index + 1
    return numbers


def printed(browser: Browser, html: Path, text: str) -> io.BytesIO:
    """Print ``text``, an HTML document whose relative addresses count from the folder ``html``; return the PDF.

    Exits with a message if something in it is wider than the paper, because it would be cut off.
    """
    file = html.resolve() / "print.html"  # in this folder, so that the browser finds what the addresses name
    file.write_text(text, encoding="utf-8")
    try:
        page = browser.new_page(color_scheme="light", viewport={"width": PAPER_WIDTH, "height": 1000})
        page.set_default_timeout(300_000)  # milliseconds, for a machine that is busy with other things
        page.emulate_media(media="print")
        page.goto(file.as_uri())
        # Wait until all fonts are loaded. `then` makes null of the set of fonts, which Playwright cannot send here.
        page.evaluate("document.fonts.ready.then(() => null)")
        if page.evaluate("document.documentElement.scrollWidth") > PAPER_WIDTH:
            raise SystemExit("An element is wider than the paper. Look at tools/print_pdf.css and your last change.")
        return io.BytesIO(page.pdf(prefer_css_page_size=True, print_background=True))
    finally:
        file.unlink()


def link_pdf(html: Path, pdf: Path, pages: int) -> None:
    """Put the PDF into the book's folder, and a link to it into the intro, in place of the hint how to make it."""
    shutil.copy(pdf, html / NAME)
    link_from_intro(html, NAME, f'<a href="../{NAME}">The whole book as one PDF</a>, {pages} pages.')


def main() -> None:
    """Carry out the command line: print the book, and link the PDF from its first page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", type=Path, help="the folder of the built book")
    parser.add_argument("out", type=Path, help="the file to write")
    args = parser.parse_args()
    try:
        pages = print_pdf(args.html, args.out)
    except Missing as missing:
        sys.exit(str(missing))
    link_pdf(args.html, args.out, pages)
    print(f"{args.out}: {pages} pages, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    gc.disable()  # the pages' elements stay until the end, and looking for garbage takes an eighth of the time
    main()
