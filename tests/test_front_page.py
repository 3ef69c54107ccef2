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
# The picture has a panel for each of three places of the mistake, once broken and once repaired. The panel for the
# second place, repaired, has the id hero-1-1.
BROKEN = 0
REPAIRED = 1
PANELS = [(0, BROKEN), (0, REPAIRED), (1, BROKEN), (1, REPAIRED), (2, BROKEN), (2, REPAIRED)]
SIZES_OF_SCREENS = [(1440, 900), (1180, 800), (390, 844)]


# --- what the picture says --------------------------------------------------------------------------------------------


def test_one_mistake_has_three_endings():
    """Before the loop the ranks hang, in the loop the sums are wrong, and after it rank 0 loses the others."""
    picture = BeautifulSoup(hero.picture(Chapter(ROOT / hero.CHAPTER)), "html.parser")
    before, inside, after = [picture.select_one(f"#hero-{place}-{BROKEN}") for place in range(3)]
    assert before["class"] == ["hero-panel", "hero-hang"]
    assert inside["class"] == ["hero-panel", "hero-wrong"]
    assert after["class"] == ["hero-panel", "hero-lost"]

    frames = json.loads(inside["data-frames"])
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
    """2400 words take 12 minutes, and 210 lines of code 21. The sum, 33, is rounded to 35."""
    text = {"cell_type": "markdown", "source": "word " * 2400, "metadata": {}}
    code = {"cell_type": "code", "source": "x = 1\n" * 30, "metadata": {}}
    closed_code = {"cell_type": "code", "source": "x = 1\n" * 30, "metadata": {"tags": ["hide-cell"]}}
    seven_times_code = [code] * 7
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": [text, *seven_times_code, closed_code]}))
    assert front_page.minutes(notebook) == 35


# --- how it moves, and where it stands still --------------------------------------------------------------------------


def assert_at_its_end(page, place, who):
    """Wait until this panel has stopped walking, and check that it shows its last frame and is the only one in view.

    ``place`` is the number of the mistake's place; ``who`` is BROKEN or REPAIRED.
    """
    panel = page.locator(f"#hero-{place}-{who}:not(.hero-walking)")
    panel.locator(".hero-output").wait_for(state="visible")
    last_frame = json.loads(panel.get_attribute("data-frames"))[-1]
    assert panel.locator(".hero-says").text_content() == last_frame["says"]
    lines_of_ranks = panel.locator(".hero-rank").evaluate_all(
        "ranks => ranks.map(rank => +rank.style.getPropertyValue('--line'))"
    )
    assert lines_of_ranks == last_frame["at"]
    assert page.locator(".hero-panel:visible").count() == 1


def choose(page, place, who):
    """Choose a panel by the arrow keys alone. The page has a group of buttons for the place, and one for who calls."""
    for group, number in (("place", place), ("who", who)):
        page.locator(f"input[name=hero-{group}]:checked").focus()
        while not page.locator(f"#hero-{group}-{number}").is_checked():
            page.keyboard.press("ArrowRight")


def assert_inside_the_screen(box, width, height, where):
    """Check that a box of the page needs no scrolling on a screen of this size. A failure names ``where``."""
    assert box["x"] >= 0, where
    assert box["y"] >= 0, where
    assert box["x"] + box["width"] <= width, where
    assert box["y"] + box["height"] <= height, where


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
    for width, height in SIZES_OF_SCREENS:
        page.set_viewport_size({"width": width, "height": height})
        for place, who in PANELS:
            choose(page, place, who)
            assert_at_its_end(page, place, who)
            for selector in [".bd-article h1", ".bd-article h1 + p", "ul.doors", ".hero", ".hero-output:visible"]:
                box = page.locator(selector).first.bounding_box()
                assert_inside_the_screen(box, width, height, where=(selector, place, who, box))
            cut_lines = page.locator(f"#hero-{place}-{who} .hero-line").evaluate_all(
                "lines => lines.filter(line => line.scrollWidth > line.clientWidth).map(line => line.textContent)"
            )
            assert cut_lines == []
    page.close()


# --- what else the build adds to pages --------------------------------------------------------------------------------


# What only Sphinx understands, and a page of plain Markdown may not have.
MYST = re.compile(
    r"^[:`]{3,}\{.*"  # a directive, such as :::{admonition}
    r"|^\{\..*"  # a class for the block below it, such as {.doors}
    r"|\{(?:term|cite|download|minutes)\}`",  # a role, such as {term}`rank`
    flags=re.MULTILINE,
)


def test_llms_txt_lists_each_page_and_each_is_markdown(book):
    llms_txt = (book.html / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^- \[(.+)\]\((.+)\.md\)$", llms_txt)  # - [title](page.md)
    assert [page for _, page in listed] == toc_files()
    for title, page in listed:
        text = (book.html / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n"), page
        assert MYST.findall(text) == [], page


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
    """With a repository, a page that says ADDRESS in its source has this line in the built book."""
    source = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    assert "ADDRESS" in source
    options = {"repository_url": "https://github.com/an-owner/a.name"}
    config = SimpleNamespace(html_theme_options=options, html_baseurl="https://an-owner.github.io/a.name/")
    app = SimpleNamespace(config=config)

    source_in_a_list = [source]  # as Sphinx gives it, so that a function can replace it
    book_address.fill_in_address(app, page, source_in_a_list)

    [changed_source] = source_in_a_list
    assert line in changed_source.splitlines()
    assert "ADDRESS" not in changed_source
