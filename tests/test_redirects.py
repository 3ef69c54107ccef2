"""The addresses that pages had before: each leads to the page of today, with its #section, and nothing links to it."""

import re
import sys

import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, toc_files

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_redirects

# {address of a page before: where the page is today, relative to it}: {"notebooks/old_name": "new_name.html"}
REDIRECTS = book_redirects.redirects(ROOT / "notebooks")
FORMER = "notebooks/checkpoints_in_practice"  # a page that has another name today
TODAY = f"notebooks/{find_notebook('10b').stem}"


def test_the_former_names_of_a_notebook_are_read_from_its_metadata():
    assert f"notebooks/{REDIRECTS[FORMER]}" == f"{TODAY}.html"


@pytest.mark.parametrize("former", REDIRECTS)
def test_each_former_address_is_a_page_that_leads_on_also_without_javascript(book, former):
    address_today = REDIRECTS[former]
    page_today = address_today.removesuffix(".html")
    assert f"notebooks/{page_today}" in toc_files()

    html = (book.html / f"{former}.html").read_text(encoding="utf-8")
    page = BeautifulSoup(html, "html.parser")
    without_javascript = page.select_one("noscript meta[http-equiv=refresh]")
    assert without_javascript["content"] == f"0; url={address_today}"
    assert [link["href"] for link in page("a")] == [address_today]


def test_no_page_links_to_a_former_address(book):
    former_files = {(book.html / f"{name}.html").resolve() for name in REDIRECTS}
    for name in toc_files():
        page = book.html / f"{name}.html"
        addresses = set(re.findall(r'href="([^"#]+)', page.read_text(encoding="utf-8")))
        for address in addresses:
            linked_file = (page.parent / address).resolve()
            assert linked_file not in former_files, (name, address)


def test_a_former_address_leads_to_the_same_section(visit, book):
    """The book is opened from a folder, where the server's answers cannot help."""
    url = book.html.as_uri()
    page = visit("genindex", url)
    page.goto(f"{url}/{FORMER}.html#frozen-layers")
    page.wait_for_url(f"{url}/{TODAY}.html#frozen-layers")
