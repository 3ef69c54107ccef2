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
# A selector of the elements that keep all their attributes. The others keep only those of ATTRIBUTES, because their
# other attributes are for scripts and for the theme.
DRAWINGS_AND_FORMULAS = "svg, svg *, math, math *"
ATTRIBUTES = {"alt", "aria-label", "class", "colspan", "href", "id", "role", "rowspan", "src", "start", "title"}
# Names of SVG's elements and attributes. BeautifulSoup writes them in small letters, which are right in HTML. In XML,
# and so in an EPUB, an e-reader knows them only with their capitals.
NAMES_WITH_CAPITALS = {
    "clippath": "clipPath",
    "clippathunits": "clipPathUnits",
    "lineargradient": "linearGradient",
    "patternunits": "patternUnits",
    "preserveaspectratio": "preserveAspectRatio",
    "viewbox": "viewBox",
}
# A piece of code that has no color, because it is a name (n), punctuation (p) or white space (w), as in
# <span class="n">loss</span>. It is written without the span.
PLAIN_CODE = re.compile(r'<span class="[npw]">([^<]*)</span>')
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
    """Replace the first page's animation by its picture, and by the code and the output of each of its mistakes.

    In the animation, a reader chooses the place in the code at which rank 0 alone calls a collective. Each place has a
    panel with a sentence about what happens, the lines of the code, and what the ranks print.
    """
    picture = document.new_tag("img", attrs={"src": f"../{COVER}", "alt": alt_of_cover()})
    parts = [picture]
    for number, label in enumerate(hero.select('[name="hero-place"] + span')):
        place = label.get_text()
        panel = element(hero, f"#hero-{number}-0")  # 0: of rank 0 alone, so with the mistake
        sentence = element(panel, ".hero-says").get_text()
        output = element(panel, ".hero-output").get_text()
        lines = []
        for line in panel.select(".hero-line"):
            is_code = line.select_one(".hero-ended") is None
            if is_code:
                lines.append(line.get_text())
        parts.append(document.new_tag("p", string=f"Rank 0 alone adds up the loss {place}. {sentence}"))
        parts.append(document.new_tag("pre", string="\n".join(lines)))
        parts.append(document.new_tag("pre", string=output))
    hero.replace_with(*parts)


def alt_of_cover() -> str:
    """What the picture of the book's first page shows, in words."""
    return str(book_settings()["sphinx"]["config"]["ogp_image_alt"])


def replace_planner(form: Tag, document: BeautifulSoup) -> None:
    """Replace the planner's form by a sentence. The page's answer to the form's first values, below it, stays."""
    sentence = (
        "The form computes in a browser, so it is not here. This is its answer to the values with which it opens."
    )
    form.replace_with(document.new_tag("p", string=sentence))


def lead_inside(link: Tag, html: Path, page: str, pages: list[str]) -> None:
    """Make a link to a page of the book lead to that page's XHTML.

    ``html``, ``page`` and ``pages`` are those of ``article_of``. A link to the web stays as it is, and so does one to
    a section of the same page. A link to any other file, such as a download, becomes plain text, because the EPUB does
    not contain it.
    """
    address = str(link["href"])  # such as "../book/cluster.html#a-section"
    file, hash_sign, anchor = address.partition("#")
    is_on_the_web = urlsplit(address).scheme != ""
    is_on_this_page = file == ""
    if is_on_the_web or is_on_this_page:
        return
    if address_in_book(html, page, file).removesuffix(".html") in pages:
        link["href"] = file.removesuffix(".html") + ".xhtml" + hash_sign + anchor
    else:
        link.unwrap()


def keep_attributes_of_xhtml(content: Tag) -> None:
    """Give the elements of a page the names and the attributes that they have in XHTML."""
    # An element is known by its id(), because two elements with the same content are equal.
    ids_of_drawn = {id(tag) for tag in content.select(DRAWINGS_AND_FORMULAS)}
    every_element = content(True)
    for tag in every_element:
        if id(tag) in ids_of_drawn:
            write_as_xml(tag)
        else:
            tag.attrs = {name: value for name, value in tag.attrs.items() if name in ATTRIBUTES}


def write_as_xml(tag: Tag) -> None:
    """Give an element of a drawing or of a formula the names that it has in XML."""
    tag.name = NAMES_WITH_CAPITALS.get(tag.name, tag.name)
    tag.attrs = {NAMES_WITH_CAPITALS.get(name, name): value for name, value in tag.attrs.items()}
    if tag.name == "svg":
        width = tag["width"]
        tag.attrs |= {"xmlns": "http://www.w3.org/2000/svg", "xmlns:xlink": "http://www.w3.org/1999/xlink"}
        tag["style"] = f"max-width:{width}px"
    elif "href" in tag.attrs:
        # Of <use> and <image>. E-readers know only the attribute's older name, xlink:href.
        tag["xlink:href"] = str(tag.attrs.pop("href")).replace(" ", "")


def xhtml(title: str, body: str, depth: int) -> str:
    """A complete XHTML document with this title and this content of its <body>.

    ``depth`` is the number of folders in which the document is: 1 for book/glossary.xhtml.
    """
    style = "../" * depth + STYLE
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<!DOCTYPE html>\n'
        f'<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" lang="{LANGUAGE}" '
        f'xml:lang="{LANGUAGE}">\n<head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f'<link rel="stylesheet" href="{style}"/></head>\n<body>{body}</body>\n</html>\n'
    )


# --- the whole book ---------------------------------------------------------------------------------------------------


def files_of_book(html: Path) -> dict[str, bytes]:
    """Make the files of the EPUB; return {path in the EPUB: content}, in reading order.

    ``html`` is the folder of the built book.
    """
    parts = table_of_contents()
    pages = [page for part in parts for page in part.pages]
    articles = {page: article_of(page, html, pages) for page in pages}
    texts = {
        "cover.xhtml": xhtml(book_settings()["title"], cover(), depth=0),
        NAVIGATION: xhtml("Contents", contents(parts, articles), depth=0),
    }
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


def cover() -> str:
    """The first page of the EPUB, with the book's title and picture, as XHTML."""
    config = book_settings()
    return (
        f'<section class="cover" epub:type="cover"><h1>{escape(config["title"])}</h1><p>Distributed training with '
        f'PyTorch, in a book whose code runs in its tests</p><p><img src="{COVER}" alt="{escape(alt_of_cover())}"/></p>'
        f"<p>{escape(config['author'])}, {config['copyright']}</p></section>"
    )


def contents(parts: list[Part], articles: Mapping[str, Tag]) -> str:
    """The table of contents as XHTML, which an e-reader shows as a menu, too. ``articles`` is {page: its content}."""
    items = "".join(entries(parts, articles))
    return f'<nav epub:type="toc" id="toc"><h1>Contents</h1><ol>{items}</ol></nav>'


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
    """The style sheet of all pages: make_epub.css, and Pygments' colors of code."""
    own_rules = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    colors_of_code = HtmlFormatter(style="default").get_style_defs(".highlight")
    return f"{own_rules}{colors_of_code}\n"


def package(files: Mapping[str, bytes], now: datetime) -> str:
    """The EPUB's description of itself, book.opf: what it is, its files, and the order in which they are read."""
    config = book_settings()
    items = ""
    reading_order = ""
    for number, (name, content) in enumerate(files.items()):
        suffix = Path(name).suffix
        attribute = ""
        properties = properties_of(name, content)
        if properties:
            attribute = f' properties="{" ".join(properties)}"'
        items += f'<item id="file-{number}" href="{name}" media-type="{MEDIA_TYPES[suffix]}"{attribute}/>'
        if suffix == ".xhtml":
            reading_order += f'<itemref idref="file-{number}"/>'
    identifier = uuid.uuid5(uuid.NAMESPACE_URL, config["title"])  # the same for each edition of the book
    year = config["copyright"]
    metadata = "".join(
        [
            f'<dc:identifier id="id">urn:uuid:{identifier}</dc:identifier>',
            f"<dc:title>{escape(config['title'])}</dc:title>",
            f"<dc:creator>{escape(config['author'])}</dc:creator>",
            f"<dc:language>{LANGUAGE}</dc:language>",
            f"<dc:date>{year}</dc:date>",
            f'<meta property="dcterms:modified">{now:%Y-%m-%dT%H:%M:%SZ}</meta>',
        ]
    )
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="{LANGUAGE}">\n'
        f'<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">{metadata}</metadata>\n'
        f"<manifest>{items}</manifest>\n<spine>{reading_order}</spine>\n</package>\n"
    )


def properties_of(name: str, content: bytes) -> list[str]:
    """What the EPUB's description has to say of a file: whether it is the cover or the contents, and what is in it."""
    properties = []
    if name == COVER:
        properties.append("cover-image")
    if name == NAVIGATION:
        properties.append("nav")
    is_page = name.endswith(".xhtml")
    if is_page and b"<svg" in content:
        properties.append("svg")
    if is_page and b"<math" in content:
        properties.append("mathml")
    return properties


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
    files = files_of_book(args.html)
    write_epub(files, args.out)
    shutil.copy(args.out, args.html / NAME)
    size = f"{args.out.stat().st_size / 1e6:.1f} MB"
    link_from_intro(args.html, NAME, f'<a href="../{NAME}">The whole book as an EPUB</a>, {size}.')
    print(f"{args.out}: {size}")


if __name__ == "__main__":
    gc.disable()  # the pages' elements stay until the end, and looking for garbage takes an eighth of the time
    main()
