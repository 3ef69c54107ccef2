"""The addresses that pages had before: each leads to the page of today, with its #section, and nothing links to it."""

import re
import sys

from bs4 import BeautifulSoup
from conftest import ROOT, toc_files

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_redirects

REDIRECTS = book_redirects.redirects(ROOT / "notebooks")
FORMER = "notebooks/checkpoints_in_practice"
TODAY = f"notebooks/{find_notebook('10b').stem}"


def test_each_former_address_is_a_page_that_leads_on_also_without_javascript(book):
    assert f"notebooks/{REDIRECTS[FORMER]}" == f"{TODAY}.html"
    for former, target in REDIRECTS.items():
        assert f"notebooks/{target.removesuffix('.html')}" in toc_files(), target
        page = BeautifulSoup((book.html / f"{former}.html").read_text(encoding="utf-8"), "html.parser")
        assert page.select_one("noscript meta[http-equiv=refresh]")["content"] == f"0; url={target}"
        assert [link["href"] for link in page("a")] == [target]


def test_no_page_links_to_a_former_address(book):
    former_files = {(book.html / f"{name}.html").resolve() for name in REDIRECTS}
    for name in toc_files():
        html = (book.html / f"{name}.html").read_text(encoding="utf-8")
        for address in set(re.findall(r'href="([^"#]+)', html)):
            assert ((book.html / name).parent / address).resolve() not in former_files, (name, address)


def test_a_former_address_leads_to_the_same_section(visit, book):
    """The book is opened from a folder, where the server's answers cannot help."""
    url = book.html.as_uri()
    page = visit("genindex", url)
    page.goto(f"{url}/{FORMER}.html#frozen-layers")
    page.wait_for_url(f"{url}/{TODAY}.html#frozen-layers")
