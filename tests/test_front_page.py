"""The first page: what its picture says was run, how it moves, where it stands still; what else the build adds."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, toc_files
from sphinx.errors import ExtensionError

sys.path.insert(0, str(ROOT / "book" / "_ext"))  # as in the build
import book_address
import front_page
import hero
from book_chapter import Chapter

from helpers.export.chapters import find_notebook

INTRO = toc_files()[0]
BROKEN, REPAIRED = 0, 1  # in the ids of panels
PANELS = [(place, who) for place in range(3) for who in (BROKEN, REPAIRED)]
SIZES = [(1440, 900), (1180, 800), (390, 844)]


# --- what the picture says --------------------------------------------------------------------------------------------


def test_one_mistake_has_three_endings():
    page = BeautifulSoup(hero.picture(Chapter(ROOT / hero.CHAPTER)), "html.parser")
    panels = [page.select_one(f"#hero-{place}-{BROKEN}") for place in range(3)]
    assert [panel["class"][1] for panel in panels] == ["hero-hang", "hero-wrong", "hero-lost"]
    frames = json.loads(panels[1]["data-frames"])
    assert [frame["says"] for frame in frames if frame["mood"] == "mixed"] == [
        "Rank 0's loss meets the others' gradient 0: 301.0",
        "Rank 0's gradient 0 meets the others' gradient 1: 250.0",
    ]


def test_a_picture_that_differs_from_the_run_fails_the_build(tmp_path):
    notebook = (ROOT / hero.CHAPTER).read_text(encoding="utf-8")
    path = tmp_path / "00.ipynb"
    path.write_text(notebook.replace("of train_by_hand: dist.all_reduce(loss)", "of train_by_hand: finished"))
    with pytest.raises(ExtensionError, match="The stored output of .* says"):
        hero.picture(Chapter(path))


def test_the_time_to_read_a_chapter_is_that_of_its_text_and_of_the_code_in_view(tmp_path):
    text = {"cell_type": "markdown", "source": "word " * 2400, "metadata": {}}
    code = {"cell_type": "code", "source": "x = 1\n" * 30, "metadata": {}}
    closed = {**code, "metadata": {"tags": ["hide-cell"]}}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [text, *[code] * 7, closed]}))
    assert front_page.minutes(tmp_path / "a.ipynb") == 35  # 12 for the text, and 21 for 210 lines


# --- how it moves, and where it stands still --------------------------------------------------------------------------


def assert_at_its_end(page, place, who):
    """Wait until the panel of a choice, which is the only visible one, shows how the walk ended."""
    panel = page.locator(f"#hero-{place}-{who}:not(.hero-walking)")
    panel.locator(".hero-output").wait_for(state="visible")
    last = json.loads(panel.get_attribute("data-frames"))[-1]
    assert panel.locator(".hero-says").text_content() == last["says"]
    lines = panel.locator(".hero-rank").evaluate_all("ranks => ranks.map(r => +r.style.getPropertyValue('--line'))")
    assert lines == last["at"]
    assert page.locator(".hero-panel:visible").count() == 1


def choose(page, place, who):
    """Make both choices with the arrow keys alone."""
    for name, number in (("place", place), ("who", who)):
        page.locator(f"input[name=hero-{name}]:checked").focus()
        while not page.locator(f"#hero-{name}-{number}").is_checked():
            page.keyboard.press("ArrowRight")


def test_it_walks_by_itself_stops_when_asked_and_walks_again_for_another_choice(visit, book):
    """The book is opened from a folder, where a page may load scripts and nothing else."""
    page = visit(INTRO, book.html.as_uri())
    page.locator(".hero-walking").wait_for()
    page.locator(".hero-run").click()
    assert_at_its_end(page, 1, BROKEN)
    page.locator(f"#hero-1-{BROKEN} .hero-other").click()
    page.locator(f"#hero-1-{REPAIRED}.hero-walking").wait_for()
    assert not page.locator(f"#hero-1-{REPAIRED} .hero-output").is_visible()
    assert_at_its_end(page, 1, REPAIRED)
    assert page.locator(".hero-run").text_content() == "Run"


def test_without_javascript_each_choice_shows_its_end_and_all_of_it_is_in_the_first_screen(browser, book_url):
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{book_url}/{INTRO}.html")
    figure = page.locator("figure:has(.wso-controls)")
    assert figure.locator("svg:visible").count() == 1
    assert figure.locator("label:visible").count() == 0, "a control that does nothing"
    assert not page.locator(".hero-run").is_visible()
    assert page.locator("ul.doors a").count() == 3
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        for place, who in PANELS:
            choose(page, place, who)
            assert_at_its_end(page, place, who)
            for selector in [".bd-article h1", ".bd-article h1 + p", "ul.doors", ".hero", ".hero-output:visible"]:
                box = page.locator(selector).first.bounding_box()
                where = (selector, place, who, box)
                assert box["x"] >= 0 and box["x"] + box["width"] <= width, where
                assert box["y"] >= 0 and box["y"] + box["height"] <= height, where
            cut = page.locator(f"#hero-{place}-{who} .hero-line").evaluate_all(
                "lines => lines.filter(line => line.scrollWidth > line.clientWidth).map(line => line.textContent)"
            )
            assert cut == []
    page.close()


# --- what else the build adds to pages --------------------------------------------------------------------------------


def test_llms_txt_lists_each_page_and_each_is_markdown(book):
    listed = re.findall(r"(?m)^- \[(.+)\]\((.+)\.md\)$", (book.html / "llms.txt").read_text(encoding="utf-8"))
    assert [page for _, page in listed] == toc_files()
    for title, page in listed:
        text = (book.html / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n"), page
        left = re.findall(r"(?m)^[:`]{3,}\{.*|^\{\..*|\{(?:term|cite|download|minutes)\}`", text)
        assert left == [], page


def test_the_markdown_of_a_page_shows_what_the_page_shows(book):
    chapter = (book.html / f"{CHAPTERS[0]}.md").read_text(encoding="utf-8")
    assert "```python\ndef compute(step):\n" in chapter
    assert "```text\nRankError: 4 of 4 ranks" in chapter
    assert "*Figure: Three falling curves" in chapter
    assert "<details><summary>Imports</summary>\n\n```python\n%load_ext helpers" in chapter
    intro = (book.html / f"{INTRO}.md").read_text(encoding="utf-8")
    assert "**In the loop:** The sums should be 4, 400 and 200." in intro
    assert "mean of four ranks: within 1e-5 of one rank" in intro  # of a cell that it shows
    shown = (book.html / f"notebooks/{find_notebook('13b').stem}.md").read_text(encoding="utf-8")
    assert "```python\ndef print_news(" in shown  # a function of a file
    assert shown.count("def print_news(") == 2  # and once in the whole file


def test_a_page_that_is_missing_leads_to_the_first(book):
    page = BeautifulSoup((book.html / "404.html").read_text(encoding="utf-8"), "html.parser")
    assert [link["href"] for link in page.article.select("p a")] == ["/index.html"]


@pytest.mark.parametrize(
    "page, line",
    [
        ("book/how_to_run", "git clone https://github.com/an-owner/a.name world-size-one && cd world-size-one"),
        ("book/references", "  url    = {https://an-owner.github.io/a.name/}"),
    ],
)
def test_an_address_stands_where_the_page_says_so(page, line):
    source = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    assert "ADDRESS" in source
    options = {"repository_url": "https://github.com/an-owner/a.name"}
    config = SimpleNamespace(html_theme_options=options, html_baseurl="https://an-owner.github.io/a.name/")
    text = [source]
    book_address.fill_in_address(SimpleNamespace(config=config), page, text)
    assert line in text[0].splitlines()
    assert "ADDRESS" not in text[0]
