"""The addresses that pages had before: each leads to the page of today, with its #section, and nothing links to it."""

import json
import re
import sys

import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, toc_files
from sphinx.errors import ExtensionError

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_redirects

REDIRECTS = book_redirects.redirects(ROOT / "notebooks")
FORMER = "notebooks/checkpoints_in_practice"
TODAY = f"notebooks/{find_notebook('10b').stem}"


def write_notebook(folder, name, formerly=()):
    metadata = {"book": {"formerly": list(formerly)}}
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": [], "metadata": metadata}))


def test_former_names_are_read_from_the_notebooks(tmp_path):
    write_notebook(tmp_path, "01_new", formerly=["old", "older"])
    write_notebook(tmp_path, "02_other")
    folder = tmp_path.name
    assert book_redirects.redirects(tmp_path) == {f"{folder}/old": "01_new.html", f"{folder}/older": "01_new.html"}


@pytest.mark.parametrize("taken, reason", [("02_other", "is a page of today"), ("old", "says so too")])
def test_a_former_name_that_leads_to_two_pages_is_refused(tmp_path, taken, reason):
    write_notebook(tmp_path, "01_new", formerly=["old"])
    write_notebook(tmp_path, "02_other")
    write_notebook(tmp_path, "03_another", formerly=[taken])
    with pytest.raises(ExtensionError, match=f"03_another.ipynb was formerly {taken}, but .*{reason}"):
        book_redirects.redirects(tmp_path)


def test_each_former_address_is_a_page_that_leads_on_also_without_javascript(book):
    assert f"notebooks/{REDIRECTS[FORMER]}" == f"{TODAY}.html"
    for former, target in REDIRECTS.items():
        assert f"notebooks/{target.removesuffix('.html')}" in toc_files(), target
        page = BeautifulSoup((book.html / f"{former}.html").read_text(encoding="utf-8"), "html.parser")
        assert page.select_one("meta[name=robots]")["content"] == "noindex"
        assert page.select_one("noscript meta[http-equiv=refresh]")["content"] == f"0; url={target}"
        assert [link["href"] for link in page("a")] == [target]


def test_no_page_links_to_a_former_address_and_no_list_has_one(book):
    former_files = {(book.html / f"{name}.html").resolve() for name in REDIRECTS}
    for name in toc_files():
        html = (book.html / f"{name}.html").read_text(encoding="utf-8")
        for address in set(re.findall(r'href="([^"#]+)', html)):
            assert ((book.html / name).parent / address).resolve() not in former_files, (name, address)
    pages_as_markdown = (book.html / "llms.txt").read_text(encoding="utf-8")
    for name in REDIRECTS:
        assert f"({name}.md)" not in pages_as_markdown


@pytest.mark.parametrize("place", ["served", "in a folder"])
def test_a_former_address_leads_to_the_same_section(visit, book, book_url, place):
    url = book_url
    if place == "in a folder":
        url = book.html.as_uri()
    page = visit("genindex", url)
    page.goto(f"{url}/{FORMER}.html#frozen-layers")
    page.wait_for_url(f"{url}/{TODAY}.html#frozen-layers")
