"""Translations: their links and anchors are those of the English book, and a text that changes is noticed."""

import re
import subprocess
import sys
from collections import Counter

import pytest
import translate
from babel.messages import Catalog
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, build, copy_sources, toc_files

CATALOGUES = sorted(translate.CATALOGUES.glob("*/LC_MESSAGES/**/*.po"))
GERMAN_PAGE = "book/how_to_run"


def catalogue(texts):
    """A catalogue with these texts, {text: translation or ""}."""
    catalog = Catalog(locale="de")
    for text, translation in texts.items():
        catalog.add(text, translation)
    return catalog


@pytest.fixture
def locale(tmp_path, monkeypatch):
    """A folder for the catalogues of a test, in the place of the book's."""
    folder = tmp_path / "locale"
    monkeypatch.setattr(translate, "CATALOGUES", folder)
    monkeypatch.setattr(translate, "ROOT", tmp_path)
    return folder


@pytest.fixture
def templates(tmp_path):
    """A function that says which texts a page has today. It returns the folder of such templates."""

    def write(page, texts):
        path = tmp_path / "gettext" / f"{page}.pot"
        translate.write_catalogue(catalogue(dict.fromkeys(texts, "")), path)
        return tmp_path / "gettext"

    return write


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.relative_to(translate.CATALOGUES).as_posix())
def test_each_translation_has_the_links_terms_and_code_of_the_original(path):
    """A text that is missing or has changed is English on the page, so it breaks nothing."""
    # de/LC_MESSAGES/book/glossary
    language, _, *parts_of_page = path.relative_to(translate.CATALOGUES).with_suffix("").parts
    assert "/".join(parts_of_page) in toc_files()

    messages = translate.texts_of(translate.read_catalogue(path, language))
    assert any(message.string for message in messages), "nothing is translated"
    for message in messages:
        is_shown = message.string and not message.fuzzy  # a fuzzy one is of a text that has changed since
        if is_shown:
            assert translate.targets_of(message.string) == translate.targets_of(message.id), message.id


def test_targets_are_links_terms_and_code():
    text = "The {term}`ranks <rank>` use {term}`gloo`: [see](a.md#b), and `launch`."
    assert translate.targets_of(text) == Counter(
        [("", "term", "rank", ""), ("", "term", "gloo", ""), ("a.md#b", "", "", ""), ("", "", "", "`launch`")]
    )


def test_a_page_whose_translation_begins_gets_a_catalogue(locale, templates, capsys):
    folder = templates("book/glossary", ["A rank is a process."])
    translate.update_catalogues("de", folder, ["book/glossary"])
    assert [path.stem for path in locale.rglob("*.po")] == ["glossary"]
    output = capsys.readouterr().out
    assert "0 of 1 texts are translated" in output
    assert f"{len(toc_files()) - 1} pages have no catalogue yet" in output
    with pytest.raises(SystemExit, match="There is no page book/nothing"):
        translate.update_catalogues("de", folder, ["book/nothing"])


def test_the_command_lists_what_a_translator_has_to_do(locale, templates, capsys):
    """After a change of the page: a new text, a changed one, one with another link. What is right is not listed."""
    page = "book/glossary"
    path = translate.catalogue_of(page, "de")
    translations = {
        "A rank is a process of the group.": "Ein Rank ist ein Prozess der Gruppe.",
        "It has [a number](a.md).": "Er hat [eine Nummer](b.md).",
        "Numbers begin at 0.": "Die Nummern beginnen bei 0.",
    }
    translate.write_catalogue(catalogue(translations), path)
    texts_of_page = [
        "A rank is one process of the group.",
        "It has [a number](a.md).",
        "Numbers begin at 0.",
        "A world has many.",
    ]

    translate.update_catalogues("de", templates(page, texts_of_page), [])

    assert capsys.readouterr().out.splitlines()[:4] == [
        "locale/de/LC_MESSAGES/book/glossary.po: 1 of 4 texts are translated",
        "  changed: A rank is one process of the group.",
        "  other links, terms or code than the original: It has [a number](a.md).",
        "  missing: A world has many.",
    ]
    changed = translate.read_catalogue(path, "de")["A rank is one process of the group."]
    assert changed.fuzzy
    assert changed.string == "Ein Rank ist ein Prozess der Gruppe."

    before = path.read_bytes()
    translate.update_catalogues("de", templates(page, texts_of_page), [])
    assert path.read_bytes() == before  # or each run would leave something to commit


def test_it_asks_for_a_language():
    command = [sys.executable, ROOT / "tools" / "translate.py"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    assert "make translate LANGUAGE=de" in process.stderr


# --- the built book ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def german(book, tmp_path_factory):
    """The folder of the book's HTML, built in German without complaints."""
    folder = tmp_path_factory.mktemp("german") / "book"
    copy_sources(folder)
    (folder / "scripts").symlink_to(book.scripts)
    done = build(folder, BOOK_REPOSITORY_URL="", BOOK_LANGUAGE="de")
    assert done.status == 0
    assert done.complaints == ""
    return done.html


def article(html, page):
    """The content of a page of the book that is built in the folder ``html``, as text of HTML."""
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    start = text.index('<article class="bd-article"')
    return text[start : text.index("</article>", start)]


def ids_in(article):
    """The anchors of a page's content, in order."""
    return re.findall(r'\bid="([^"]+)"', article)


def addresses_in(article):
    """The addresses to which a page's content links, each with how often it does."""
    links = BeautifulSoup(article, "html.parser").find_all("a", href=True)
    return Counter(link["href"] for link in links)


@pytest.mark.daily
@pytest.mark.timeout(1800)
def test_links_and_anchors_hold_in_both_languages(book, german):
    for page in toc_files():
        assert ids_in(article(german, page)) == ids_in(article(book.html, page)), page
    assert addresses_in(article(german, GERMAN_PAGE)) == addresses_in(article(book.html, GERMAN_PAGE))


@pytest.mark.daily
@pytest.mark.timeout(1800)
def test_a_translated_page_is_german_and_the_others_are_english(german):
    html = (german / f"{GERMAN_PAGE}.html").read_text(encoding="utf-8")
    assert '<html lang="de"' in html

    page = BeautifulSoup(article(german, GERMAN_PAGE), "html.parser")
    assert page.select_one("h1").get_text().startswith("Das Buch ausführen")
    assert page.select_one("#what-is-installed h2").get_text().startswith("Was installiert wird")
    assert "Start ranks from a cell" not in page.get_text(), "a heading of the English page"
    assert "make lab" in page.get_text(), "a command, which is the same in both"

    first_chapter = BeautifulSoup(article(german, CHAPTERS[0]), "html.parser")
    assert "A mistake and its error" in first_chapter.get_text()
