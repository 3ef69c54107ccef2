"""The first page: what its picture says was run, how it moves, where it stands still; what else the build adds."""

import functools
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
import book_icons
import book_weight
import front_page
import hero
from book_chapter import Chapter

INTRO = toc_files()[0]
BROKEN, REPAIRED = 0, 1  # in the ids of panels
PANELS = [(place, who) for place in range(3) for who in (BROKEN, REPAIRED)]
SIZES = [(1440, 900), (1180, 800), (390, 844)]


@functools.cache
def first_page(html):
    return BeautifulSoup((html / f"{INTRO}.html").read_text(encoding="utf-8"), "html.parser")


# --- what the picture says --------------------------------------------------------------------------------------------


def test_one_mistake_has_three_endings(book):
    panels = [first_page(book.html).select_one(f"#hero-{place}-{BROKEN}") for place in range(3)]
    assert [panel["class"][1] for panel in panels] == ["hero-hang", "hero-wrong", "hero-lost"]
    frames = json.loads(panels[1]["data-frames"])
    assert [frame["says"] for frame in frames if frame["mood"] == "mixed"] == [
        "Rank 0's loss meets the others' gradient 0: 301.0",
        "Rank 0's gradient 0 meets the others' gradient 1: 250.0",
    ]


@pytest.mark.parametrize(
    "cell, old, new, error",
    [
        ("break", "dist.all_reduce(loss)", "finished", "The stored output of .* says"),
        ("break-end", "lost its connection", "is fine", "ends with 'lost'"),
        ("by-hand", "dist.broadcast(weight, src=0)", "dist.all_reduce(weight)", "The stored output of .* says"),
    ],
)
def test_a_picture_that_differs_from_the_run_fails_the_build(tmp_path, cell, old, new, error):
    notebook = json.loads((ROOT / hero.CHAPTER).read_text(encoding="utf-8"))
    for position, original in enumerate(notebook["cells"]):
        if original["id"] == cell:
            changed = json.dumps(original).replace(old, new)
            assert json.loads(changed) != original
            notebook["cells"][position] = json.loads(changed)
    (tmp_path / "00.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(ExtensionError, match=error):
        hero.picture(Chapter(tmp_path / "00.ipynb"))


def test_every_chapter_has_a_reading_time(book, tmp_path):
    assert len(first_page(book.html).select("ul.chapters .minutes")) == len(CHAPTERS)
    text = {"cell_type": "markdown", "source": "word " * 2400, "metadata": {}}
    code = {"cell_type": "code", "source": "x = 1\n" * 30, "metadata": {}}
    closed = {**code, "metadata": {"tags": ["hide-cell"]}}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [text, *[code] * 7, closed]}))
    assert front_page.minutes(tmp_path / "a.ipynb") == 20  # 10 for the text, and 10 for 210 lines


# --- how it moves, and where it stands still --------------------------------------------------------------------------


def assert_at_its_end(page, place, who):
    """Wait until the panel of a choice, which is the only visible one, shows how the walk ended."""
    panel = page.locator(f"#hero-{place}-{who}:not(.hero-walking)")
    panel.locator(".hero-output").wait_for(state="visible")
    last = json.loads(panel.get_attribute("data-frames"))[-1]
    assert panel.locator(".hero-says").text_content() == last["says"]
    lines = panel.locator(".hero-rank").evaluate_all("ranks => ranks.map(r => +r.style.getPropertyValue('--line'))")
    assert lines == last["at"]
    visible = page.locator(".hero-panel:visible")
    assert [panel.get_attribute("id") for panel in visible.all()] == [f"hero-{place}-{who}"]


def choose(page, place, who):
    """Make both choices with the arrow keys alone."""
    for name, number in (("place", place), ("who", who)):
        page.locator(f"input[name=hero-{name}]:checked").focus()
        while not page.locator(f"#hero-{name}-{number}").is_checked():
            page.keyboard.press("ArrowRight")


def test_a_choice_by_keyboard_walks_to_its_end(visit):
    page = visit(INTRO)
    choose(page, 0, BROKEN)
    page.locator(f"#hero-0-{BROKEN}.hero-walking").wait_for()
    assert not page.locator(f"#hero-0-{BROKEN} .hero-output").is_visible()
    assert_at_its_end(page, 0, BROKEN)
    assert page.locator(".hero-run").text_content() == "Run"


def test_it_walks_by_itself_in_a_folder_stops_when_asked_and_the_repair_is_a_button(visit, book):
    page = visit(INTRO, book.html.as_uri())
    page.locator(".hero-walking").wait_for()
    page.locator(".hero-run").click()
    assert_at_its_end(page, 1, BROKEN)
    page.locator(f"#hero-1-{BROKEN} .hero-other").click()
    assert_at_its_end(page, 1, REPAIRED)


@pytest.mark.parametrize("options", [{"reduced_motion": "reduce"}, {"java_script_enabled": False}], ids=str)
def test_without_motion_each_choice_shows_its_end(browser, book_url, options):
    page = browser.new_page(**options)
    page.goto(f"{book_url}/{INTRO}.html")
    assert not page.locator(".hero-run").is_visible()
    for place, who in PANELS:
        choose(page, place, who)
        assert_at_its_end(page, place, who)
    page.close()


def test_promise_doors_and_picture_are_in_the_first_screen(browser, book_url):
    page = browser.new_page(reduced_motion="reduce")
    page.goto(f"{book_url}/{INTRO}.html")
    assert page.locator("ul.doors a").count() == 3
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        for place, who in PANELS:
            choose(page, place, who)
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


# --- what the build adds to pages, and leaves out ---------------------------------------------------------------------

SHEET = """.a, .b > p, #c:not(.z) { color: var(--read); --never: 1 } .gone, p.gone { color: red }
@media print { .gone { color: red } .d::after { content: "; , >" } } @media screen { .gone { color: red } }
:root { --read: var(--too); --too: 1px; --never: 2 } /* words */ /*! A licence */ .js-adds { color: red }"""


def test_a_style_sheet_keeps_what_a_page_or_a_script_can_match():
    names = book_weight.names_in_use(['<p class="a b"><i id="c"><u class="d">'], ["add('js-adds')"])
    light = book_weight.lighten({"sheet": SHEET}, names, [])["sheet"]
    assert light == (
        "/*! A licence */.a,.b > p,#c:not(.z){color:var(--read)}"
        '@media print{.d::after{content:"; , >"}}:root{--read:var(--too);--too:1px}.js-adds{color:red}'
    )


def test_an_icon_that_the_small_font_lacks_is_seen():
    sheet = '.fa-bars:before,.fa-navicon:before{content:"\\f0c9"}.fa-anchor:before{content:"\\f13d"}'
    pages = ['<i class="fa-solid fa-bars fa-lg">', '<i class="fas fa-anchor">']
    assert book_icons.missing_icons(sheet, pages) == {"anchor": "f13d"}


def test_a_menu_opens_and_closes_and_the_contents_follow_the_reader(visit):
    page = visit(CHAPTERS[4])
    button, menu = page.locator("[data-bs-toggle=dropdown]").first, page.locator(".dropdown-menu").first
    for close in (lambda: page.keyboard.press("Escape"), button.click, page.locator("article h1").click):
        button.click()
        menu.wait_for(state="visible")
        box = menu.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
        assert button.get_attribute("aria-expanded") == "true"
        close()
        page.mouse.move(5, 500)  # while the mouse is on the button, the theme shows the menu
        menu.wait_for(state="hidden")
        assert button.get_attribute("aria-expanded") == "false"
    section = page.locator("article section > section").nth(3)
    section.evaluate("section => section.scrollIntoView()")
    link = page.locator(f".page-toc a.nav-link.active[href='#{section.get_attribute('id')}']")
    link.wait_for()
    page.evaluate("scrollTo(0, 0)")
    link.wait_for(state="detached")


def test_llms_txt_lists_each_page_and_each_is_markdown(book):
    listed = re.findall(r"(?m)^- \[(.+)\]\((.+)\.md\)$", (book.html / "llms.txt").read_text(encoding="utf-8"))
    assert [page for _, page in listed] == toc_files()
    for title, page in listed:
        text = (book.html / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n"), page
    chapter = (book.html / f"{CHAPTERS[0]}.md").read_text(encoding="utf-8")
    assert "```python\ndef compute(step):\n" in chapter
    assert "```text\nRankError: 4 of 4 ranks" in chapter
    assert "{hero}" not in (book.html / f"{INTRO}.md").read_text(encoding="utf-8")


def test_a_page_that_is_missing_leads_to_the_first(book):
    page = BeautifulSoup((book.html / "404.html").read_text(encoding="utf-8"), "html.parser")
    assert [link["href"] for link in page.article.select("p a")] == ["/index.html"]


def test_how_to_run_it_names_the_repository():
    text = [(ROOT / "book" / "how_to_run.md").read_text(encoding="utf-8")]
    assert "ADDRESS is the address" in text[0]
    options = {"repository_url": "https://github.com/an-owner/a.name"}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options=options))
    book_address.fill_in_address(app, "book/how_to_run", text)
    assert "git clone https://github.com/an-owner/a.name world-size-one && cd world-size-one\nmake lab" in text[0]
    assert "ADDRESS" not in text[0]
