"""Keep a translation of the book: update its catalogues, list what is left, build it (``make translate LANGUAGE=de``).

A catalogue has the texts of one page, such as paragraphs and headings, each with its translation. The catalogues of a
language are in book/locale, and only pages that somebody translates have one. All other texts stay English.
"""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from babel.messages import Catalog, Message
from babel.messages.pofile import read_po, write_po
from built_pages import ROOT, book_settings, table_of_contents

JUPYTER_BOOK = Path(sys.executable).with_name("jupyter-book")
CATALOGUES = ROOT / "book" / "locale"
# What a translation may not change: where links lead, the terms of the glossary, and code. The three lines match
# "](../book/cluster.md)" of a link, "{term}`ranks <rank>`" or "{term}`rank`", and "`loss.backward()`".
TARGETS = re.compile(
    r"""\]\((?P<link>[^)]+)\)
      | \{(?P<role>\w+)\}`(?:[^`<]*<)?(?P<target>[^`>]+)>?`
      | (?P<code>`[^`]+`)""",
    flags=re.X,
)


def catalogue_of(page: str, language: str) -> Path:
    """The file with the translation of a page such as ``book/glossary``. Its folders are those that Sphinx expects."""
    return CATALOGUES / language / "LC_MESSAGES" / f"{page}.po"


def targets_of(text: str) -> Counter[tuple[str, ...]]:
    """Count how often each link, term and piece of code is in a text. A translation has to have the same counts.

    A key of the counts has the four named groups of TARGETS, such as ``("", "term", "rank", "")``.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for match in TARGETS.finditer(text):
        counts[match.groups(default="")] += 1
    return counts


def updated(catalogue: Catalog, template: Catalog) -> Catalog:
    """Bring a catalogue up to date with the texts of its page today, which are in ``template``.

    A new text has no translation yet. If a text has changed, its old translation is kept and marked *fuzzy*: the book
    does not show it until a translator has looked at it and has removed the mark.
    """
    catalogue.update(template, update_creation_date=False)
    return catalogue


def what_is_left(catalogue: Catalog) -> Iterator[str]:
    """Yield a line for each text that needs a translator: missing, changed, or with other links than the original."""
    for message in texts_of(catalogue):
        beginning = str(message.id)[:80]
        if not message.string:
            yield f"missing: {beginning}"
        elif message.fuzzy:
            yield f"changed: {beginning}"
        elif targets_of(str(message.id)) != targets_of(str(message.string)):
            yield f"other links, terms or code than the original: {beginning}"


def texts_of(catalogue: Catalog) -> list[Message]:
    """The texts of a catalogue, without its first entry, which describes the catalogue itself and has an empty text."""
    return [message for message in catalogue if message.id]


def read_catalogue(path: Path, language: str) -> Catalog:
    """Read the catalogue in a file. If there is no such file, make an empty one, for a page that nobody has begun."""
    if not path.exists():
        authors = book_settings()["author"]
        return Catalog(
            locale=language,
            header_comment="# Licensed under CC BY 4.0, as all prose of this book.",
            project="World Size One,",
            version="the book",
            msgid_bugs_address="the book's repository",
            last_translator=authors,
            language_team=authors,
            revision_date=datetime.now(UTC),
            charset="utf-8",
            fuzzy=False,
        )
    with path.open("rb") as file:
        return read_po(file, locale=language)


def write_catalogue(catalogue: Catalog, path: Path) -> None:
    """Write a catalogue to a file.

    It does not say on which lines of the page the texts are, because lines change more often than texts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_po(file, catalogue, width=120, no_location=True)


def build(options: list[str], out: Path, language: str = "") -> None:
    """Build the book with jupyter-book into the folder ``out``. Exits with its messages if that fails.

    ``options`` are further options of jupyter-book, and ``language`` that of the pages, or "" for English.
    """
    command = [str(JUPYTER_BOOK), "build", str(ROOT), "--path-output", str(out), *options]
    command += ["--warningiserror", "--keep-going", "-n", "--quiet"]  # -n reports links that lead nowhere
    environment = {**os.environ, "BOOK_LANGUAGE": language}
    process = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if process.returncode != 0:
        sys.exit(process.stderr)


def update_catalogues(language: str, templates: Path, new_pages: list[str]) -> None:
    """Update the catalogues of a language, begin those of ``new_pages``, and print what is left to translate.

    ``templates`` is the folder with the English texts of each page. Exits with a message if the book has no such page.
    """
    pages = [page for part in table_of_contents() for page in part.pages]
    unknown = set(new_pages) - set(pages)
    if unknown:
        sys.exit(f"There is no page {', '.join(sorted(unknown))}. A page is named as in _toc.yml: book/glossary")
    not_begun = 0
    for page in pages:
        path = catalogue_of(page, language)
        if not path.exists() and page not in new_pages:
            not_begun += 1
            continue
        with (templates / f"{page}.pot").open("rb") as file:
            template = read_po(file)
        catalogue = updated(read_catalogue(path, language), template)
        write_catalogue(catalogue, path)
        left = list(what_is_left(catalogue))
        number = len(texts_of(catalogue))
        print(f"{path.relative_to(ROOT)}: {number - len(left)} of {number} texts are translated")
        for line in left:
            print(f"  {line}")
    print(f"{not_begun} pages have no catalogue yet, and stay English.")


def main() -> None:
    """Carry out the command line: update the catalogues, and build the book in their language."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("language", nargs="?", default="", help="such as de or pt_BR")
    parser.add_argument("pages", nargs="*", help="pages whose translation begins, such as book/glossary")
    args = parser.parse_args()
    if not re.fullmatch(r"[a-z]{2,3}(_[A-Z]{2})?", args.language):
        sys.exit("Name the language: make translate LANGUAGE=de")
    out = ROOT / "_build" / args.language
    write_templates = ["--builder", "custom", "--custom-builder", "gettext"]  # instead of pages
    build(write_templates, out)
    update_catalogues(args.language, out / "_build" / "gettext", args.pages)
    build([], out, args.language)
    print(f"The book is in {(out / '_build' / 'html').relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
