"""The addresses that pages had before: each leads to the page of today, with its #section, and nothing links to it."""

import json
import sys

import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, toc_files
from sphinx.errors import ExtensionError

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_redirects

SAVING, READING = find_notebook("10b").stem, find_notebook("14b").stem
REDIRECTS = book_redirects.redirects(ROOT / "notebooks")


def write_notebook(folder, name, **metadata):
    (folder / f"{name}.ipynb").write_text(json.dumps({"cells": [], "metadata": metadata}))


def test_former_names_are_read_from_the_notebooks(tmp_path):
    write_notebook(tmp_path, "01_new", book={"formerly": ["old", "older"]})
    write_notebook(tmp_path, "02_other")
    write_notebook(tmp_path, "03_another", book={})
    folder = tmp_path.name
    assert book_redirects.redirects(tmp_path) == {f"{folder}/old": "01_new.html", f"{folder}/older": "01_new.html"}


@pytest.mark.parametrize("taken, says", [("02_other", "is a page of today"), ("old", "says so too")])
def test_a_former_name_that_leads_to_two_pages_is_refused(tmp_path, taken, says):
    write_notebook(tmp_path, "01_new", book={"formerly": ["old"]})
    write_notebook(tmp_path, "02_other")
    write_notebook(tmp_path, "03_another", book={"formerly": [taken]})
    with pytest.raises(ExtensionError, match=f"03_another.ipynb was formerly {taken}, but .*{says}"):
        book_redirects.redirects(tmp_path)


def test_each_former_address_is_a_page_that_leads_on(book):
    assert REDIRECTS["notebooks/checkpoints_in_practice"] == f"{SAVING}.html"
    for former, target in REDIRECTS.items():
        assert f"notebooks/{target.removesuffix('.html')}" in toc_files(), target
        page = BeautifulSoup((book.html / f"{former}.html").read_text(encoding="utf-8"), "html.parser")
        assert page.select_one("meta[name=robots]")["content"] == "noindex"
        assert page.select_one("noscript meta")["content"] == f"0; url={target}"
        assert [link["href"] for link in page("a")] == [target]


def test_no_page_links_to_a_former_address_and_no_list_has_one(book):
    former = {f"{name}.html" for name in REDIRECTS}
    for name in toc_files():
        page = BeautifulSoup((book.html / f"{name}.html").read_text(encoding="utf-8"), "html.parser")
        links = {link["href"].partition("#")[0] for link in page("a", href=True)}
        folder = (book.html / name).parent
        targets = {(folder / link).resolve() for link in links if link and "//" not in link}
        assert not targets & {(book.html / name).resolve() for name in former}, name
    listed = (book.html / "llms.txt").read_text(encoding="utf-8")
    assert not [name for name in REDIRECTS if f"({name}.md)" in listed or (book.html / f"{name}.md").exists()]


@pytest.mark.parametrize("place", ["served", "in a folder"])
def test_a_former_address_leads_to_the_same_section(visit, book, book_url, place):
    url = book_url if place == "served" else book.html.as_uri()
    section = "#frozen-layers"
    page = visit("notebooks/checkpoints_in_practice", url)
    page.wait_for_url(f"{url}/notebooks/{SAVING}.html")
    page.goto(f"{url}/notebooks/checkpoints_in_practice.html{section}")
    page.wait_for_url(f"{url}/notebooks/{SAVING}.html{section}")
    assert page.locator("article h1").count() == 1


def test_without_javascript_a_former_address_leads_to_the_page(browser, book_url):
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{book_url}/notebooks/reading_nccl.html")
    page.wait_for_url(f"{book_url}/notebooks/{READING}.html")
    page.close()
