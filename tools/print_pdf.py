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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from bs4 import BeautifulSoup, Tag
from chromium import Missing, chromium
from pypdf import PdfReader, PdfWriter

ROOT = Path(__file__).parents[1]
NAME = "world-size-one.pdf"
INTRO = "book/intro"
PAPER_WIDTH = 665  # pixels between the margins of A4: 210 mm - 2 * 17 mm, at 96 to the inch

# Elements that only a screen needs. Links to downloads are kept as text, because paper has no file beside it.
ON_SCREEN_ONLY = "a.headerlink, .wso-note, .wso-view:not(.wso-on), p.pdf, figure.wso script"

LOOK = Path(__file__).with_suffix(".css").read_text()
Parts = list[tuple[str, list[str]]]  # (the part's caption or "", its pages: files without suffix)


def element(tag: Tag, selector: str) -> Tag:
    """The first element that a selector finds; ValueError where the theme has changed and there is none."""
    match = tag.select_one(selector)
    if match is None:
        raise ValueError(f"A built page has no element {selector}: has the theme changed?")
    return match


def title_of(article: Tag) -> str:
    return element(article, "h1").get_text()


def table_of_contents() -> Parts:
    """The parts in the order of _toc.yml."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    parts = [(part.get("caption", ""), [page["file"] for page in part["chapters"]]) for part in toc["parts"]]
    return [("", [toc["root"]]), *parts]


def name_of(docname: str, anchor: str = "") -> str:
    """The id that a page, or an anchor on it, has in the one long page."""
    return re.sub(r"\W", "-", docname) + (f"--{anchor}" if anchor else "")


def article(html: Path, docname: str, docnames: Sequence[str]) -> Tag:
    """One built page, ready for the one document that holds all pages."""
    page = BeautifulSoup((html / f"{docname}.html").read_text(encoding="utf-8"), "html.parser")
    content = element(page, "article.bd-article")
    for tag in content.select(ON_SCREEN_ONLY):
        tag.decompose()
    for controls in content.select(".wso-controls"):
        settings = []
        for control in controls.select("[data-labels]"):
            name, value = element(control, "legend, label > span"), element(control, ":checked + span, output")
            settings.append(f"{name.get_text()} {value.get_text()}")
        controls.name, controls.attrs, controls.string = "p", {"class": "folded"}, f"Shown: {', '.join(settings)}."
    for fold in content("details"):
        listing, solution = fold.select_one(".sd-summary-text"), fold.find_parent(class_="tag_solution")
        title = page.new_tag("p", attrs={"class": "folded"})
        summary = element(fold, "summary")
        title.string = listing.get_text() if listing else summary.get_text()
        summary.replace_with(title)
        fold.name, fold.attrs = "div", {"class": "fold solution" if solution else "fold"}
    for tag in content(id=True):
        if not tag.find_parent("svg") and tag.name != "svg":
            tag["id"] = name_of(docname, str(tag["id"]))
    for link in content("a", href=True):
        redirect(link, html, docname, docnames)
    for image in content("img", src=True):
        image["src"] = address_in_book(html, docname, str(image["src"]))
    content.name, content.attrs = "article", {"class": "bd-article page", "id": name_of(docname)}
    return content


def address_in_book(html: Path, docname: str, address: str) -> str:
    """A relative address on a page, as an address relative to the folder of the HTML."""
    target = ((html / docname).parent / unquote(urlsplit(address).path)).resolve()
    return target.relative_to(html.resolve()).as_posix()


def redirect(link: Tag, html: Path, docname: str, docnames: Sequence[str]) -> None:
    """Make a link lead to the same place in the one document. A link to a file outside of it becomes text."""
    address = str(link["href"])
    if urlsplit(address).scheme:
        return
    path, _, anchor = address.partition("#")
    target = address_in_book(html, docname, path).removesuffix(".html") if path else docname
    if target in docnames:
        link["href"] = "#" + name_of(target, unquote(anchor))
        del link["title"]
    else:
        link.unwrap()


def contents(parts: Parts, articles: Mapping[str, Tag], numbers: Mapping[str, int]) -> Iterator[str]:
    """The lines of the table of contents, as HTML. ``numbers`` is {id: page number}."""

    def line(kind: str, target: str, text: str) -> str:
        page = f' data-page="{numbers[target]}"' if target in numbers else ""
        return f'<div class="{kind}"{page}><a href="#{target}">{escape(text)}</a><i></i></div>'

    for caption, docnames in parts:
        if caption:
            yield f'<p class="part">{escape(caption)}</p>'
        for docname in docnames:
            yield line("of-page", name_of(docname), title_of(articles[docname]))
            if re.match(r"notebooks/\d\d_", docname):
                for section in articles[docname].select("section > section"):
                    if section.h2 and section.h2.parent is section:
                        yield line("of-section", str(section["id"]), section.h2.get_text())


def front(parts: Parts, articles: Mapping[str, Tag], numbers: Mapping[str, int]) -> str:
    """The title page and the table of contents, as HTML."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    picture = element(articles[INTRO], "img")["src"]
    return (
        f'<div id="title"><h1>{config["title"]}</h1><p>Distributed training with PyTorch, in a book whose code '
        f'runs in its tests</p><img src="{picture}" alt=""><p>{config["author"]}</p>'
        f"<small>{config['copyright']}</small></div>"
        f'<nav id="contents"><h1>Contents</h1>{"".join(contents(parts, articles, numbers))}</nav>'
    )


def document(html: Path, body: str, articles: Mapping[str, Tag]) -> str:
    """The complete HTML document, with the style for paper. Its addresses count from the folder ``html``."""
    texts = {docname: (html / f"{docname}.html").read_text(encoding="utf-8") for docname in articles}
    styles: dict[str, None] = {}  # of all pages: each loads those that it needs
    for docname, text in texts.items():
        head = BeautifulSoup(text.partition("</head>")[0], "html.parser")
        links = [str(tag["href"]) for tag in head("link", rel="stylesheet")]
        styles |= dict.fromkeys(address_in_book(html, docname, link) for link in links)
    running_heads = "\n".join(
        f"#{name_of(docname)} {{ page: {name_of(docname)}; }} @page {name_of(docname)} "
        f'{{ @top-left {{ content: "{title_of(article)}"; font: 8.5pt Inter; color: #555; }} }}'
        for docname, article in articles.items()
    )
    return (
        '<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8"><title>World Size One</title>'
        + "".join(f'<link rel="stylesheet" href="{escape(style)}">' for style in styles)
        + f"<style>{LOOK}{running_heads}</style></head>"
        + f'<body><main class="bd-content">{body}</main></body></html>'
    )


def print_pdf(html: Path, out: Path) -> int:
    """Print the book in the folder ``html`` to the file ``out``; return the number of pages."""
    parts = table_of_contents()
    docnames = [docname for _, names in parts for docname in names]
    articles = {docname: article(html, docname, docnames) for docname in docnames}
    body = "".join(map(str, articles.values()))
    with printer(html) as pdf_of:
        book = PdfWriter(pdf_of(document(html, front(parts, articles, {}) + body, articles)))
        numbers = {
            name.removeprefix("/"): number + 1
            for name, target in book.named_destinations.items()
            if (number := book.get_destination_page_number(target)) is not None
        }
        numbered = PdfReader(pdf_of(document(html, front(parts, articles, numbers), articles)))
    if len(numbered.pages) != numbers[name_of(docnames[0])] - 1:
        raise SystemExit("Page numbers make the table of contents longer. Give its lines room for them.")
    for unnumbered, page in zip(book.pages, numbered.pages, strict=False):  # keep the links, replace the text
        del unnumbered["/Contents"]
        unnumbered.merge_page(page)
    for docname, part in articles.items():
        book.add_outline_item(title=title_of(part), page_number=numbers[name_of(docname)] - 1)
    book.write(out)
    return len(book.pages)


@contextmanager
def printer(html: Path) -> Iterator[Callable[[str], io.BytesIO]]:
    """A function that prints a document, opened in the folder ``html``, and returns the PDF as a file in memory."""
    file = html.resolve() / "print.html"
    with chromium() as browser:

        def pdf_of(text: str) -> io.BytesIO:
            file.write_text(text, encoding="utf-8")
            page = browser.new_page(color_scheme="light", viewport={"width": PAPER_WIDTH, "height": 1000})
            page.set_default_timeout(300_000)  # milliseconds, for a machine that is busy with other things
            page.emulate_media(media="print")
            page.goto(file.as_uri())
            page.evaluate("document.fonts.ready.then(() => null)")
            if page.evaluate("document.documentElement.scrollWidth") > PAPER_WIDTH:
                raise SystemExit(
                    "An element is wider than the paper. Look at tools/print_pdf.css and your last change."
                )
            return io.BytesIO(page.pdf(prefer_css_page_size=True, print_background=True))

        try:
            yield pdf_of
        finally:
            file.unlink(missing_ok=True)


def link_from_intro(html: Path, pdf: Path, pages: int) -> None:
    """Put the PDF into the book's folder, and a link to it into the intro, in place of the hint how to make it."""
    shutil.copy(pdf, html / NAME)
    intro = html / f"{INTRO}.html"
    link = f'<p class="pdf"><a href="../{NAME}">The whole book as one PDF</a>, {pages} pages.</p>'
    text, count = re.subn(r'<p class="pdf">.*?</p>', link, intro.read_text(encoding="utf-8"), flags=re.S)
    if count != 1:
        raise SystemExit(f"{intro} has {count} paragraphs of the class pdf, and the link belongs into one.")
    intro.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", type=Path, help="the folder of the built book")
    parser.add_argument("out", type=Path, help="the file to write")
    args = parser.parse_args()
    try:
        pages = print_pdf(args.html, args.out)
    except Missing as missing:
        sys.exit(str(missing))
    link_from_intro(args.html, args.out, pages)
    print(f"{args.out}: {pages} pages, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    gc.disable()  # the pages' elements stay until the end, and looking for garbage takes an eighth of the time
    main()
