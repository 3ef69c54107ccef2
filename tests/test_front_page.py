"""The first page: what its picture says was run, how it moves, where it stands still, its weight; 404 and llms.txt."""

import functools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import CHAPTERS, ROOT, toc_files
from sphinx.errors import ExtensionError
from visits import seen_by_axe

sys.path.insert(0, str(ROOT / "book" / "_ext"))  # as in the build
import book_address
import book_icons
import book_weight
import front_page
import hero

INTRO = toc_files()[0]
PLACES = [(place, who) for place in range(3) for who in range(2)]
SIZES = [(1440, 900), (1180, 800), (390, 844)]
FIRST_PAGES_BYTES, A_PAGES_BYTES = 410_000, 1_000_000  # with all that they load, as http.server sends them: not packed


@functools.cache
def first_page(html):
    return BeautifulSoup((html / f"{INTRO}.html").read_text(encoding="utf-8"), "html.parser")


@pytest.fixture(scope="module")
def cells():
    """{id: (source, what the cell printed or raised)} of chapter 0."""
    cells = nbformat.read(ROOT / f"{CHAPTERS[0]}.ipynb", 4).cells
    said = {
        cell.id: "".join(output.get("text", f"RankError: {output.get('evalue')}") for output in cell.outputs)
        for cell in cells
        if cell.cell_type == "code"
    }
    return {cell.id: (cell.source, said[cell.id]) for cell in cells if cell.id in said}


# --- what the picture says --------------------------------------------------------------------------------------------


def test_code_and_results_of_the_picture_are_those_of_the_chapter(book, cells):
    source = {line.strip() for line in cells["by-hand"][0].splitlines()}
    [picture] = first_page(book.html).select(".hero")
    for number, (place, cell) in enumerate(hero.RUNS.items()):
        broken, repaired = (picture.select_one(f"#hero-{number}-{who}") for who in range(2))
        for panel in (broken, repaired):
            lines = [line.get_text().strip() for line in panel.select(".hero-line")]
            assert [line for line in lines if line not in source] in (["if rank == 0:", "ended"], ["ended"])
            assert ("if rank == 0:" in lines) == (panel is broken)
        shown = [line.split(": at")[0] for line in broken.select_one(".hero-output").text.splitlines()]
        stored = re.sub(r"at line \d+ of train_by_hand: ", "", cells[cell][1]).splitlines()
        as_shown = [line.replace("connection dist", "connection at: dist") for line in stored]
        assert shown == as_shown, place
        after = cells["repair"][1].split(f"{place}\n")[1]
        assert repaired.select_one(".hero-output").text == re.match(r"(\[.*\n?)+", after)[0].rstrip()


def test_the_three_endings_are_three(book):
    panels = [first_page(book.html).select_one(f"#hero-{place}-0") for place in range(3)]
    assert [panel["class"][1] for panel in panels] == ["hero-hang", "hero-wrong", "hero-lost"]
    assert [panel.select_one(".hero-says").text for panel in panels] == [
        hero.ENDINGS[ending] for ending in ("hang", "wrong", "lost")
    ]
    met = [frame["says"] for frame in json.loads(panels[1]["data-frames"]) if frame["mood"] == "mixed"]
    assert met == [
        "Rank 0's loss meets the others' gradient 0: 301.0",
        "Rank 0's gradient 0 meets the others' gradient 1: 250.0",
    ]


CHANGES = {  # of the chapter: what the build says
    "no cell": ("break-end", None, "has no cell 'break-end'"),
    "no output": ("break-loop", "", "has no stored output"),
    "another line": (
        "break",
        ("rank 0: at line 11 of train_by_hand: dist.all_reduce(loss)", "rank 0: finished"),
        "says",
    ),
    "another ending": ("break-end", ("lost its connection", "is fine"), "ends with 'lost'"),
    "another place": ("by-hand", ("in the loop", "somewhere"), "The places in the cell"),
    "another call": ("by-hand", ("dist.broadcast(weight, src=0)", "dist.all_reduce(weight)"), "says"),
    "no repair": ("repair", ("in the loop", "there"), "says nothing of the place 'in the loop'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_picture_that_differs_from_the_run_fails_the_build(change, tmp_path):
    name, what, says = CHANGES[change]
    notebook = json.loads((ROOT / hero.CHAPTER).read_text(encoding="utf-8"))
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == name]
    if what is None:
        notebook["cells"].remove(cell)
    elif what == "":
        cell["outputs"] = []
    else:
        text = json.dumps(cell)
        assert what[0] in text
        notebook["cells"][notebook["cells"].index(cell)] = json.loads(text.replace(*what))
    (tmp_path / "00.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(ExtensionError, match=re.escape(says)):
        hero.picture(hero.Chapter(tmp_path / "00.ipynb"))


def test_what_the_page_shows_below_is_stored(book, cells):
    text = first_page(book.html).select_one("#what-you-get").text
    assert cells["four"][0] in text and cells["four"][1].rstrip() in text
    rehearsal = (ROOT / "book" / "recorded" / "rehearsal.txt").read_text().split("\n\n", 1)[1]
    assert rehearsal.rstrip() in text
    script = (book.scripts / f"{Path(CHAPTERS[0]).name}.py").read_text()
    assert re.search(r"(?s)def main\(args\):.*?stop_process_group\(\)", script)[0] in text
    assert first_page(book.html).select("#what-you-get figure.wso input[type=range]")


def test_every_chapter_has_a_reading_time(book, tmp_path):
    shown = [tag.text for tag in first_page(book.html).select("ul.chapters .minutes")]
    assert len(shown) == len(CHAPTERS) and all(re.fullmatch(r"\d+ minutes", text) for text in shown)
    words = {"cell_type": "markdown", "source": "word " * 2400, "metadata": {}}
    code = {"cell_type": "code", "source": "x = 1\n" * 200, "metadata": {}}
    closed = {**code, "metadata": {"tags": ["hide-cell"]}}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [words, *[code] * 6, closed]}))  # 34 lines of each are shown
    assert front_page.minutes(tmp_path / "a.ipynb") == 20


# --- how it moves, and where it stands still --------------------------------------------------------------------------


def visible(page):
    """The ids of the panels that one sees."""
    return page.locator(".hero-panel").evaluate_all(
        "panels => panels.filter(panel => panel.checkVisibility()).map(panel => panel.id)"
    )


def at_its_end(page, place, who, ranks_stand=True):
    """Wait until the panel of a choice shows how it ended."""
    panel = page.locator(f"#hero-{place}-{who}:not(.hero-walking)")
    panel.locator(".hero-output").wait_for(state="visible")
    frames = json.loads(panel.get_attribute("data-frames"))
    assert panel.locator(".hero-says").text_content() == frames[-1]["says"]
    lines = panel.locator(".hero-rank").evaluate_all("ranks => ranks.map(r => r.style.getPropertyValue('--line'))")
    assert [int(line) for line in lines] == frames[-1]["at"]
    assert visible(page) == [f"hero-{place}-{who}"]


def choose(page, place, who):
    """Make both choices with the arrow keys alone."""
    for name, number, others in (("place", place, 3), ("who", who, 2)):
        page.locator(f"input[name=hero-{name}]:checked").focus()
        for _ in range(others):
            if page.locator(f"#hero-{name}-{number}").is_checked():
                break
            page.keyboard.press("ArrowRight")


@pytest.mark.parametrize("place, who", PLACES)
def test_each_choice_runs_to_its_end_by_keyboard(visit, place, who):
    page = visit(INTRO)
    choose(page, place, who)
    walking = page.locator(f"#hero-{place}-{who}.hero-walking")
    if not walking.count():  # it had been chosen, and walked by itself
        page.locator(".hero-run").focus()
        page.keyboard.press("Enter")
    walking.wait_for()
    assert not page.locator(f"#hero-{place}-{who} .hero-output").is_visible()
    at_its_end(page, place, who)
    assert page.locator(".hero-run").text_content() == "Run"


def test_it_stops_when_asked_and_the_repair_is_a_button(visit):
    page = visit(INTRO)
    button = page.locator(".hero-run")
    page.locator(".hero-walking").wait_for()
    button.click()
    at_its_end(page, 1, 0)
    page.locator("#hero-1-0 .hero-other").click()
    at_its_end(page, 1, 1)


@pytest.mark.parametrize("options", [{"reduced_motion": "reduce"}, {"java_script_enabled": False}], ids=str)
def test_without_motion_each_choice_shows_its_end(browser, book_url, options):
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(f"{book_url}/{INTRO}.html")
    at_its_end(page, 1, 0)
    assert not page.locator(".hero-run").is_visible()
    for place, who in PLACES:
        choose(page, place, who)
        at_its_end(page, place, who)
    context.close()


def test_it_walks_in_a_page_from_a_folder(visit, book):
    page = visit(INTRO, book.html.as_uri())
    page.locator(".hero-walking").wait_for()
    at_its_end(page, 1, 0)


# --- what one sees first, and what it weighs --------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_promise_doors_and_picture_are_in_the_first_screen(browser, book_url, size, scheme):
    width, height = size
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(f"{book_url}/{INTRO}.html")
    assert page.locator("ul.doors a").count() == 3
    for place, who in PLACES:
        choose(page, place, who)
        for selector in [".bd-article h1", ".bd-article h1 + p", "ul.doors", ".hero", ".hero-output:visible"]:
            box = page.locator(selector).first.bounding_box()
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, (selector, place, who, box)
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, (selector, place, who, box)
        cut = page.locator(f"#hero-{place}-{who} .hero-line").evaluate_all(
            "lines => lines.filter(line => line.scrollWidth > line.clientWidth).map(line => line.textContent)"
        )
        assert cut == []
    assert list(seen_by_axe(page)) == []
    page.close()


def loaded(browser, address):
    """{file: bytes} of what a page loads until it is still; a page's server may pack them, `make serve` does not."""
    page, replies = browser.new_page(), {}
    page.on("response", lambda reply: replies.setdefault(reply.url, reply))
    page.goto(address)
    page.wait_for_load_state("networkidle")
    names = {url: url.rpartition("/")[2].partition("?")[0] for url in replies if not url.startswith("data:")}
    sizes = {name: len(replies[url].body()) for url, name in names.items()}
    page.close()
    return sizes


def test_the_first_page_is_light(browser, book_url):
    sizes = loaded(browser, f"{book_url}/{INTRO}.html")
    assert {"fonts.css", "hero.js", "menus.js", "pydata-sphinx-theme.css"} <= set(sizes)
    assert not {"bootstrap.js", "planner.js", "search_entries.js"} & set(sizes)
    assert sum(sizes.values()) <= FIRST_PAGES_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:8]


@pytest.mark.parametrize("name", toc_files()[1:])
def test_no_page_is_heavy(browser, book_url, name):
    sizes = loaded(browser, f"{book_url}/{name}.html")
    assert sum(sizes.values()) <= A_PAGES_BYTES, sorted(sizes.items(), key=lambda item: -item[1])[:8]
    assert "hero.js" not in sizes and ("planner.js" in sizes) == ("planner.css" in sizes) == (name == "book/planner")


SHEET = """.a, .b > p, #c:not(.z) { color: var(--read); --never: 1 } .gone, p.gone { color: red }
@media print { .gone { color: red } .d::after { content: "; , >" } } @media screen { .gone { color: red } }
:root { --read: var(--too); --too: 1px; --never: 2 } /* words */ /*! A licence */ .js-adds { color: red }"""


def test_a_style_sheet_keeps_what_a_page_or_a_script_can_match():
    known = book_weight.words(['<p class="a b"><i id="c"><u class="d">'], ["add('js-adds')"])
    light = book_weight.lighten({"sheet": SHEET}, known, [])["sheet"]
    assert light == (
        "/*! A licence */.a,.b > p,#c:not(.z){color:var(--read)}"
        '@media print{.d::after{content:"; , >"}}:root{--read:var(--too);--too:1px}.js-adds{color:red}'
    )
    for wrong, says in {".a { .b { color: red } }": "rules inside '.a'", ".a { } }": "no rule in line 1"}.items():
        with pytest.raises(ExtensionError, match=re.escape(says)):
            book_weight.lighten({"sheet": wrong}, {"a", "b"}, [])


def test_a_menu_opens_and_closes_and_the_contents_follow_the_reader(visit):
    page = visit(CHAPTERS[4])
    button, menu = page.locator("[data-bs-toggle=dropdown]").first, page.locator(".dropdown-menu").first
    for close in (lambda: page.keyboard.press("Escape"), button.click, page.locator("article h1").click):
        button.click()
        menu.wait_for(state="visible")
        box = menu.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
        assert button.get_attribute("aria-expanded") == "true" and "show" in menu.get_attribute("class")
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
    kinds = set(re.findall(r'data-bs-toggle="(\w+)"', page.content()))
    assert kinds <= {"dropdown", "tooltip"}, "menus.js knows no other part of Bootstrap; a tooltip is the title"


def test_icons_are_letters_of_the_small_font(visit, book_url):
    page = visit(CHAPTERS[4])
    page.evaluate("document.fonts.ready.then(() => null)")
    loaded = "[...document.fonts].filter(font => font.family.includes('Awesome') && font.status === 'loaded').length"
    font = page.request.get(f"{book_url}/_static/vendor/fontawesome/webfonts/fa-solid-900.woff2").body()
    assert (
        page.evaluate(loaded) == 1
        and font == (ROOT / "book" / "fonts" / "Icons-Solid.woff2").read_bytes()
        and len(font) < 5_000
    )


def test_an_icon_that_the_small_font_lacks_is_seen():
    sheet = '.fa-bars:before,.fa-navicon:before{content:"\\f0c9"}.fa-anchor:before{content:"\\f13d"}'
    pages = ['<i class="fa-solid fa-bars fa-lg">', '<i class="fas fa-anchor">']
    assert book_icons.used(sheet, pages) == {"bars": "f0c9", "anchor": "f13d"} and "f13d" not in book_icons.CODES


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_llms_txt_lists_each_page_and_each_is_markdown(book):
    listed = re.findall(r"(?m)^- \[(.+)\]\((.+)\.md\)$", (book.html / "llms.txt").read_text(encoding="utf-8"))
    assert [page for _, page in listed] == toc_files()
    for title, page in listed:
        text = (book.html / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n"), page
    chapter = (book.html / f"{CHAPTERS[0]}.md").read_text(encoding="utf-8")
    assert "```python\ndef compute(step):\n" in chapter and "```text\nRankError: 4 of 4 ranks" in chapter
    assert "hero" not in (book.html / f"{INTRO}.md").read_text(encoding="utf-8")


def test_a_page_that_is_missing_leads_to_the_first(book):
    page = BeautifulSoup((book.html / "404.html").read_text(encoding="utf-8"), "html.parser")
    assert [link["href"] for link in page.article.select("p a")] == ["/index.html"]


@pytest.mark.parametrize("url", ["", "https://github.com/an-owner/a.name"])
def test_how_to_run_it_names_the_repository(url):
    text = [(ROOT / "book" / "how_to_run.md").read_text(encoding="utf-8")]
    options = {"repository_url": url} if url else {}
    app = SimpleNamespace(config=SimpleNamespace(html_theme_options=options))
    book_address.name_the_address(app, "book/how_to_run", text)
    assert ("ADDRESS is the address" in text[0]) == (url == "")
    assert f"git clone {url or 'ADDRESS'} world-size-one && cd world-size-one\nmake lab" in text[0]
    assert text[0].count("ADDRESS") == (0 if url else 3)
