"""Make an EPUB of the built book, for e-readers and phones, and link it from the intro (``make epub``).

The pages of _build/html become XHTML, which is XML: every element is closed, and drawings and formulas name their kind.
An e-reader runs no scripts. So a figure with sliders shows the frame with which it opens, closed boxes are open, and
what needs a browser is a picture or a sentence.
"""

import argparse
import gc
import re
import shutil
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from bs4 import BeautifulSoup, Tag
from built_pages import (
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
from pygments.formatters import HtmlFormatter

NAME = "world-size-one.epub"
COVER = "_static/card.png"
STYLE = "style.css"
NAVIGATION = "contents.xhtml"
LANGUAGE = "en"
# What keeps its attributes. Other elements keep those of ATTRIBUTES; the rest is for scripts and for the theme.
DRAWINGS_AND_FORMULAS = "svg, svg *, math, math *"
ATTRIBUTES = {"alt", "aria-label", "class", "colspan", "href", "id", "role", "rowspan", "src", "start", "title"}
# HTML knows these names of SVG in any case, and BeautifulSoup writes them in small letters. In XML they have capitals.
NAMES_WITH_CAPITALS = {
    name.lower(): name
    for name in ("clipPath", "clipPathUnits", "linearGradient", "patternUnits", "preserveAspectRatio", "viewBox")
}
PLAIN_CODE = re.compile(r'<span class="[npw]">([^<]*)</span>')  # names, punctuation and spaces, which have no color
MEDIA_TYPES = {".css": "text/css", ".png": "image/png", ".svg": "image/svg+xml", ".xhtml": "application/xhtml+xml"}

CONTAINER = """<?xml version="1.0" encoding="utf-8"?>
<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container" version="1.0">
<rootfiles><rootfile full-path="EPUB/book.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>
"""


# --- a page of the book -----------------------------------------------------------------------------------------------


def article_of(page: str, html: Path, pages: list[str]) -> Tag:
    """Read the content of one built page, and make it one that an e-reader can show.

    ``html`` is the folder of the built book. A page such as ``book/glossary`` is the path of its file in that folder,
    without the suffix .html. ``pages`` are all pages of the EPUB.
    """
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    start = text.index('<article class="bd-article"')
    article = text[start : text.index("</article>", start)]
    document = parsed(PLAIN_CODE.sub(r"\1", article))
    content = element(document, "article.bd-article")
    make_static(content, document)
    for hero in content.select(".hero"):
        replace_hero(hero, document)
    for form in content.select("form.planner"):
        replace_planner(form, document)
    for tag in content.select("figure style, button, [aria-hidden=true]"):
        tag.decompose()
    for link in content("a", href=True):
        lead_inside(link, html, page, pages)
    keep_attributes_of_xhtml(content)
    return content


def replace_hero(hero: Tag, document: BeautifulSoup) -> None:
    """Replace the first page's animation by its picture, and by the code and the output of each of its mistakes."""
    places = [label.get_text() for label in hero.select('[name="hero-place"] + span')]
    picture = document.new_tag("img", attrs={"src": f"../{COVER}", "alt": str(ogp_alt())})
    parts = [picture]
    for number, place in enumerate(places):
        panel = element(hero, f"#hero-{number}-0")  # 0: of rank 0 alone, so with the mistake
        says = element(panel, ".hero-says").get_text()
        lines = [line.get_text() for line in panel.select(".hero-line") if line.select_one(".hero-ended") is None]
        parts.append(document.new_tag("p", string=f"Rank 0 alone adds up the loss {place}. {says}"))
        parts.append(document.new_tag("pre", string="\n".join(lines)))
        parts.append(document.new_tag("pre", string=element(panel, ".hero-output").get_text()))
    hero.replace_with(*parts)


def ogp_alt() -> str:
    """What the picture of the book's first page shows, in words."""
    return str(book_settings()["sphinx"]["config"]["ogp_image_alt"])


def replace_planner(form: Tag, document: BeautifulSoup) -> None:
    """Replace the planner's form, whose answer to its first values follows it on the page."""
    sentence = (
        "The form computes in a browser, so it is not here. This is its answer to the values with which it opens."
    )
    form.replace_with(document.new_tag("p", string=sentence))


def lead_inside(link: Tag, html: Path, page: str, pages: list[str]) -> None:
    """Make a link to a page of the book lead to that page's XHTML.

    A link to the web stays as it is. A link to any other file, such as a download, becomes plain text, because the EPUB
    does not contain it.
    """
    address = str(link["href"])  # such as "../book/cluster.html#a-section"
    file, hash_sign, anchor = address.partition("#")
    is_on_the_web = urlsplit(address).scheme != ""
    if is_on_the_web or not file:
        return
    if address_in_book(html, page, file).removesuffix(".html") in pages:
        link["href"] = file.removesuffix(".html") + ".xhtml" + hash_sign + anchor
    else:
        link.unwrap()


def keep_attributes_of_xhtml(content: Tag) -> None:
    """Give the elements of a page the names and the attributes that they have in XHTML."""
    drawn = {id(tag) for tag in content.select(DRAWINGS_AND_FORMULAS)}
    for tag in content(True):
        if id(tag) not in drawn:
            tag.attrs = {name: value for name, value in tag.attrs.items() if name in ATTRIBUTES}
            continue
        tag.name = NAMES_WITH_CAPITALS.get(tag.name, tag.name)
        tag.attrs = {NAMES_WITH_CAPITALS.get(name, name): value for name, value in tag.attrs.items()}
        if tag.name == "svg":
            width = tag["width"]
            tag.attrs |= {"xmlns": "http://www.w3.org/2000/svg", "xmlns:xlink": "http://www.w3.org/1999/xlink"}
            tag["style"] = f"max-width:{width}px"
        elif "href" in tag.attrs:  # of use and image; readers of EPUB know the older name alone
            tag["xlink:href"] = str(tag.attrs.pop("href")).replace(" ", "")


def xhtml(title: str, body: str, depth: int) -> str:
    """A complete XHTML document. ``depth`` is the number of folders in which it is."""
    style = "../" * depth + STYLE
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n'
        f'<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" lang="{LANGUAGE}" '
        f'xml:lang="{LANGUAGE}">\n<head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f'<link rel="stylesheet" href="{style}"/></head>\n<body>{body}</body>\n</html>\n'
    )


# --- the whole book ---------------------------------------------------------------------------------------------------


def files_of_book(html: Path) -> dict[str, bytes]:
    """The files of the EPUB's folder, {path: content}, in reading order. ``html`` is the folder of the built book."""
    parts = table_of_contents()
    pages = [page for part in parts for page in part.pages]
    articles = {page: article_of(page, html, pages) for page in pages}
    config = book_settings()
    title = config["title"]
    cover = (
        f'<section class="cover" epub:type="cover"><h1>{escape(title)}</h1><p>Distributed training with PyTorch, in a '
        f'book whose code runs in its tests</p><p><img src="{COVER}" alt="{escape(ogp_alt())}"/></p>'
        f"<p>{escape(config['author'])}, {config['copyright']}</p></section>"
    )
    contents = f'<nav epub:type="toc" id="toc"><h1>Contents</h1><ol>{"".join(entries(parts, articles))}</ol></nav>'
    texts = {"cover.xhtml": xhtml(title, cover, depth=0), NAVIGATION: xhtml("Contents", contents, depth=0)}
    for page, article in articles.items():
        texts[f"{page}.xhtml"] = xhtml(title_of(article), article.decode(), depth=page.count("/"))
    texts[STYLE] = style_sheet()

    files = {name: text.encode() for name, text in texts.items()}
    files[COVER] = (html / COVER).read_bytes()
    for page, article in articles.items():
        for image in article("img", src=True):
            name = address_in_book(html, page, str(image["src"]))
            files[name] = (html / name).read_bytes()
    return files


def entries(parts: list[Part], articles: Mapping[str, Tag]) -> Iterator[str]:
    """Yield the entries of the table of contents: parts, their pages, and the sections of chapters."""
    for part in parts:
        if part.caption:
            yield f"<li><span>{escape(part.caption)}</span><ol>"
        for page in part.pages:
            yield f'<li><a href="{page}.xhtml">{escape(title_of(articles[page]))}</a>'
            if is_chapter(page):
                yield "<ol>"
                for anchor, heading in sections_of(articles[page]):
                    yield f'<li><a href="{page}.xhtml#{anchor}">{escape(heading)}</a></li>'
                yield "</ol>"
            yield "</li>"
        if part.caption:
            yield "</ol></li>"


def style_sheet() -> str:
    """The style of all pages, with the colors of code."""
    colors = HtmlFormatter(style="default").get_style_defs(".highlight")
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8") + colors + "\n"


def package(files: Mapping[str, bytes], now: datetime) -> str:
    """The EPUB's description of itself, book.opf: what it is, its files, and the order in which they are read."""
    config = book_settings()
    items = []
    order = []
    for number, (name, content) in enumerate(files.items()):
        suffix = Path(name).suffix
        properties = []
        if name == COVER:
            properties.append("cover-image")
        if name == NAVIGATION:
            properties.append("nav")
        if suffix == ".xhtml":
            order.append(f'<itemref idref="file-{number}"/>')
            if b"<svg" in content:
                properties.append("svg")
            if b"<math" in content:
                properties.append("mathml")
        attribute = ""
        if properties:
            attribute = f' properties="{" ".join(properties)}"'
        items.append(f'<item id="file-{number}" href="{name}" media-type="{MEDIA_TYPES[suffix]}"{attribute}/>')
    identifier = uuid.uuid5(uuid.NAMESPACE_URL, config["title"])  # the same for each edition of the book
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="{LANGUAGE}">\n'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:identifier id="id">urn:uuid:{identifier}'
        f"</dc:identifier><dc:title>{escape(config['title'])}</dc:title><dc:creator>{escape(config['author'])}"
        f"</dc:creator><dc:language>{LANGUAGE}</dc:language><dc:date>{config['copyright']}</dc:date>"
        f'<meta property="dcterms:modified">{now:%Y-%m-%dT%H:%M:%SZ}</meta></metadata>\n'
        f"<manifest>{''.join(items)}</manifest>\n<spine>{''.join(order)}</spine>\n</package>\n"
    )


def write_epub(files: Mapping[str, bytes], out: Path) -> None:
    """Write an EPUB: a zip archive whose first file says, uncompressed, what it is."""
    with zipfile.ZipFile(out, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", compress_type=zipfile.ZIP_STORED)
        archive.writestr("META-INF/container.xml", CONTAINER)
        archive.writestr("EPUB/book.opf", package(files, datetime.now(UTC)))
        for name, content in files.items():
            archive.writestr(f"EPUB/{name}", content)


def main() -> None:
    """Carry out the command line: make the EPUB, and link it from the book's first page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", type=Path, help="the folder of the built book")
    parser.add_argument("out", type=Path, help="the file to write")
    args = parser.parse_args()
    write_epub(files_of_book(args.html), args.out)
    shutil.copy(args.out, args.html / NAME)
    megabytes = f"{args.out.stat().st_size / 1e6:.1f} MB"
    link_from_intro(args.html, NAME, f'<a href="../{NAME}">The whole book as an EPUB</a>, {megabytes}.')
    print(f"{args.out}: {megabytes}")


if __name__ == "__main__":
    gc.disable()  # the pages' elements stay until the end, and looking for garbage takes an eighth of the time
    main()
