"""What a reader sees of the built book: how much code, how its boxes are called, and how its mistakes are marked."""

import csv
import io
import json
import re
import sys

import nbformat
import pytest
from conftest import CHAPTERS, ROOT, toc_files
from measure_pages import KINDS, SCREEN, Measures, measure, measured, table, walls, words_of
from visits import unfold

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_cells
import book_tables

PAGE = f"notebooks/{find_notebook('04').stem}"  # it has figures, tables, errors and shell lines


@pytest.fixture(scope="module")
def chapters(browser, book):
    return measured(browser, book.html)


def test_each_chapter_is_measured_and_has_code_and_a_picture(chapters):
    """How much of them is right is for its author to judge: nothing here is a limit."""
    assert list(chapters) == [name.partition("/")[2] for name in CHAPTERS]
    assert [name for name, row in chapters.items() if not row.lines or row.first_picture is None] == []


def test_the_measures_of_a_page_are_those_of_its_blocks(browser):
    """Code above and below an output stands together; a sentence or a picture parts it. Closed code does not count."""

    def box(tag, height, classes="", inside=""):
        return f'<{tag} class="{classes}" style="height: {height}px">{inside}</{tag}>'

    def cell(height, inside=""):
        return box("div", height, "cell_input", f'<div class="highlight-python"><pre>{inside}</pre></div>')

    figure = box("div", 80, "cell_output", f'<div class="output">{box("figure", 80)}</div>')
    closed = f"<details><summary style='height: 40px'></summary>{cell(400, 'e = 5')}</details>"
    blocks = [
        box("p", 160),
        cell(480, "a = 1\n\n  b = 2\n"),
        box("div", 80, "cell_output"),
        cell(400, "c = 3"),
        closed,
        figure,
        cell(400),
        box("p", 80),
    ]
    page = browser.new_page(viewport=SCREEN)
    page.set_content(f"<style>* {{ margin: 0; display: block }}</style><article>{''.join(blocks)}</article>")
    found = measure(page)
    page.close()
    height = 160 + 480 + 80 + 400 + 40 + 80 + 400 + 80
    shares = {"text": 240, "code": 1280, "output": 80, "box": 40, "figure": 80, "table": 0, "heading": 0}
    assert found == Measures(
        screens=height / 800,
        by_kind={kind: pytest.approx(shares[kind] / 800) for kind in KINDS},
        first_picture=pytest.approx(1160 / 800),
        first_output=pytest.approx(640 / 800),
        walls=1,
        without_picture=pytest.approx(1160 / 800),
        lines=3,
    )
    assert list(walls([("code", 0, 1), ("box", 1, 2), ("code", 2, 3), ("text", 3, 4), ("code", 4, 4.5)])) == [2, 0.5]


# --- boxes and marks --------------------------------------------------------------------------------------------------


def test_lines_in_view_and_words_of_a_chapter_are_in_the_table(tmp_path):
    cells = [("markdown", "# A title\n\nfour words are here"), ("code", "not = 'words'")]
    notebook = {"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    assert words_of(tmp_path / "a.ipynb") == 7
    row = Measures(2.0, dict.fromkeys(KINDS, 0.5), None, None, 0, 1.0, lines=31, words=7)
    head, line, total = table({"a": row}).splitlines()
    assert head.split()[-2:] == ["lines", "words"] and line.split()[-2:] == ["31", "7"]
    assert total.endswith("31 lines of code in view, 7 words")


def test_every_closed_box_says_what_is_in_it(book):
    for name in toc_files():
        page = (book.html / f"{name}.html").read_text(encoding="utf-8")
        titles = re.findall(r'<details class="hide[^"]*"><summary>(.*?)</summary>', page)
        assert page.count('<details class="hide') == len(titles), name
        assert not [title for title in titles if not title or "Show code" in title], name
        if name in CHAPTERS:
            assert titles.count("Parameters") == 1 and "Imports" in titles and "How this was measured" in titles, name
            cells = nbformat.read(ROOT / f"{name}.ipynb", 4).cells
            solutions = sum("solution" in cell.metadata.get("tags", []) for cell in cells)
            numbered = [title for title in titles if title.startswith("Solution")]
            assert numbered == [f"Solution {number}" for number in range(1, solutions + 1)]


def test_the_code_of_an_open_cell_is_on_the_page_once_and_whole(book):
    """What is closed of an open cell is in the box below it."""
    for name in CHAPTERS:
        page = book_text((book.html / f"{name}.html").read_text(encoding="utf-8"))
        for cell in nbformat.read(ROOT / f"{name}.ipynb", 4).cells:
            if cell.cell_type == "code":
                shown = [line.strip() for line in cell.source.splitlines() if line.strip()]
                assert [line for line in shown if "".join(line.split()) not in page] == []


def book_text(page):
    from bs4 import BeautifulSoup

    return "".join(BeautifulSoup(page, "html.parser").select_one("article").get_text().split())


SHOWN = [  # (source, how many of its lines are shown)
    ("def f(x):\n    return x\n\n\nprint(f(1))\nassert f(1) == 1\nassert f(2) == 2", 2),
    ("def f(x):\n    return x\n\n\ny = f(1)\nprint(y)\nz = f(2)\nassert z == y", 5),  # from the first print on
    ("def f(x):\n    return x\n\n\nprint(f(1))", 5),  # too little to close
    ("assert 1\nassert 2\nassert 3", 0),
    ("%%ranks 2\nprint(1)\nprint(2)\nprint(3)", 4),  # no Python
    ("a = 1\n" * 40, 34),
    ("def f():\n" + "    a = 1\n" * 40, 41),  # a function is not cut
    ("class A:\n    def f(self):\n" + "        a = 1\n" * 20 + "    def g(self):\n" + "        a = 1\n" * 20, 22),
]


@pytest.mark.parametrize("source, lines", SHOWN)
def test_an_open_cell_shows_what_a_reader_would_write(source, lines):
    assert book_cells.shown_lines(source) == lines


def test_a_mistake_has_a_mark_and_no_copy_button(browser, book_url):
    page = browser.new_page()
    page.goto(f"{book_url}/{CHAPTERS[0]}.html")
    mistakes = page.locator(".cell.mistake")
    assert [cell.locator(".mistake-badge").inner_text() for cell in mistakes.all()] == [
        "hangs",
        "wrong numbers, no error",
        "hangs",
    ]
    assert mistakes.locator("button.copybtn").count() == 0 < page.locator(".cell:not(.mistake) button.copybtn").count()
    edges = page.evaluate("""['.cell.mistake', '.cell:not(.mistake)'].map(cell =>
        getComputedStyle(document.querySelector(cell + ' > .cell_input')).borderLeftColor)""")
    assert edges[0] != edges[1]
    page.close()


def test_every_error_on_purpose_is_marked():
    """Each cell that raises an error says whether it hangs; a hang is what `launch` ended by its timeout."""
    for name in CHAPTERS:
        for cell in nbformat.read(ROOT / f"{name}.ipynb", 4).cells:
            tags = set(cell.metadata.get("tags", []))
            if "raises-exception" in tags:
                [error] = [output.evalue for output in cell.outputs if output.output_type == "error"]
                assert tags & {*book_cells.MISTAKES} == {"hangs" if "still ran after" in error else "error"}, cell.id


def test_a_row_of_a_wide_table_can_be_a_card():
    head = "<thead><tr><th><p>A <em>name</em></p></th><th>B &amp; C</th><th>D</th></tr></thead>"
    rows = "<tbody><tr><td><p>1</p></td><td>2</td><td>3</td></tr></tbody>"
    whole = f'<table class="table">{head}{rows}</table>'
    found = book_tables.TABLE.sub(book_tables.labelled, whole)
    assert re.findall(r'data-label="(.*?)"', found) == ["A name", "B &amp; C", "D"] and 'class="table cards"' in found
    narrow = whole.replace("<th>D</th>", "").replace("<td>3</td>", "")
    assert book_tables.TABLE.sub(book_tables.labelled, narrow) == narrow


def test_the_lies_are_counted_by_chapter_and_kind(book):
    page = (book.html / "book" / "sabotage.html").read_text(encoding="utf-8")
    told = (ROOT / "book" / "recorded" / "sabotage.csv").read_text(encoding="utf-8")
    dots = page.partition('class="lies')[2].partition("</table>")[0].count("\u2022")
    lies, cells = map(
        int, re.search(r"<p>(\d+) lies were told, and (\d+) cells of \d+ chapters and pages noticed", page).groups()
    )
    assert dots == cells == len(list(csv.DictReader(io.StringIO(told)))) and 50 < lies <= cells


# --- type, phones, paper ----------------------------------------------------------------------------------------------


def test_type_has_lines_that_can_be_read_and_headings_in_their_order(browser, book_url):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="dark")
    page.goto(f"{book_url}/{PAGE}.html")
    widths = page.evaluate("[...document.querySelectorAll('article section > p')].map(p => p.clientWidth)")
    assert max(widths) <= 672
    sizes = page.evaluate("""['h1', 'h2', 'h3'].map(tag => document.querySelector('article ' + tag)).map(
        tag => [parseFloat(getComputedStyle(tag).fontSize), getComputedStyle(tag).fontWeight])""")
    assert [size for size, _ in sizes] == sorted((size for size, _ in sizes), reverse=True)
    assert [weight for _, weight in sizes] == ["600"] * 3
    code = page.evaluate("""(({fontSize, lineHeight}) => [fontSize, lineHeight])(
        getComputedStyle(document.querySelector('.cell_input pre')))""")
    assert code == ["13.5px", "20px"]
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate("getComputedStyle(document.querySelector('.highlight .c1')).color") == "rgb(154, 167, 181)"
    page.set_viewport_size({"width": 1180, "height": 800})
    contents = page.locator("#pst-secondary-sidebar, .bd-sidebar-secondary").first
    assert contents.is_visible() and contents.bounding_box()["x"] + contents.bounding_box()["width"] <= 1180
    page.close()


def test_on_a_phone_a_wide_drawing_says_so_and_tables_are_cards(browser, book_url):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{book_url}/{PAGE}.html")
    wide = page.locator("figure:has(.wso-hint)")
    assert wide.count() and page.locator(".wso-hint").first.is_visible()
    page.set_viewport_size({"width": 1180, "height": 800})
    page.locator(".wso-hint").first.wait_for(state="detached")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{book_url}/notebooks/environment_variables.html")
    hidden = page.evaluate("""[...document.querySelectorAll('table.cards td')].filter(
        cell => cell.getBoundingClientRect().right > innerWidth).length""")
    assert page.locator("table.cards").count() and hidden == 0
    page.close()


IN_SIGHT = """() => [...document.querySelectorAll('figure.wso')].map(figure => {
    const view = figure.querySelector('.wso-on'), svg = view.querySelector('svg');
    const sheet = view.getBoundingClientRect(), scale = svg.getScreenCTM().a;
    const words = [...svg.querySelectorAll('text')];
    return {
        scrolls: figure.querySelector('.wso-hint') !== null,
        letter: Math.min(...words.map(word => parseFloat(getComputedStyle(word).fontSize) * scale)),
        cut: words.filter(word => {
            const {left, right, top, bottom} = word.getBoundingClientRect();
            return left < sheet.left - 3 || right > sheet.right + 3 || top < sheet.top - 3 || bottom > sheet.bottom + 3;
        }).map(word => word.textContent),
    };
})"""


@pytest.mark.parametrize("name", [CHAPTERS[2], CHAPTERS[4], CHAPTERS[8]])
def test_on_a_phone_a_drawing_is_all_in_sight_and_its_letters_can_be_read(browser, book_url, name):
    page = browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    page.goto(f"{book_url}/{name}.html")
    unfold(page)
    page.wait_for_function("[...document.querySelectorAll('figure.wso svg')].some(svg => svg.style.minWidth == '0px')")
    narrow = page.evaluate(IN_SIGHT)
    whole = [figure for figure in narrow if not figure["scrolls"]]
    assert len(whole) > len(narrow) / 2 and all(figure["letter"] > 8.9 for figure in narrow)
    assert [figure["cut"] for figure in whole if figure["cut"]] == []
    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_function("![...document.querySelectorAll('figure.wso svg')].some(svg => svg.style.minWidth == '0px')")
    before = page.evaluate(IN_SIGHT)
    page.reload()
    unfold(page)
    assert before == page.evaluate(IN_SIGHT), "a wide page draws what it drew"
    page.close()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_a_ring_plays_once_when_it_is_seen(browser, book_url, motion):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion=motion)
    page.goto(f"{book_url}/book/intro.html")
    figure = page.locator("figure.wso:has(.wso-controls button)")
    assert figure.locator("output").text_content() == "0" and not page.locator(".wso-playing").count()
    figure.evaluate("figure => figure.scrollIntoView({block: 'center'})")
    if motion == "reduce":
        page.wait_for_timeout(2500)  # two steps' time
        assert figure.locator("output").text_content() == "0"
    else:
        figure.locator("output:text('6')").wait_for()
        page.locator(".wso-playing").wait_for(state="detached")
    page.close()


def test_a_filter_hides_rows_of_the_table_of_lies(browser, book_url):
    page = browser.new_page()
    page.goto(f"{book_url}/book/sabotage.html")
    rows, field = page.locator("table.sabotage tbody tr"), page.get_by_label("Show lies with")
    field.focus()
    page.keyboard.type("HANG gradient")
    shown = rows.locator("visible=true").all_inner_texts()
    assert 0 < len(shown) < rows.count()
    assert all("hang" in text.lower() and "gradient" in text.lower() for text in shown)
    assert page.locator("label.filter output").text_content() == f"{len(shown)} of {rows.count()} rows"
    page.close()
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{book_url}/book/sabotage.html")
    everything = page.locator("table.sabotage tbody tr")
    assert everything.locator("visible=true").count() == everything.count() > 50
    assert not page.locator("label.filter").count()
    page.close()


def test_error_messages_and_shell_lines_are_not_cut_off(browser, book_url):
    page = browser.new_page(viewport={"width": 1180, "height": 800})
    page.goto(f"{book_url}/{PAGE}.html")
    cut = page.evaluate("""[...document.querySelectorAll('.traceback pre, .highlight-bash pre')].map(
        block => block.scrollWidth - block.clientWidth)""")
    assert cut and max(cut) <= 0
    page.close()


def test_on_paper_long_cells_break_and_answers_are_open(browser, book_url):
    page = browser.new_page()
    page.goto(f"{book_url}/{PAGE}.html")
    page.emulate_media(media="print")
    breaks = page.evaluate("""['.cell_input', '.cell_input pre', 'figure.wso'].map(
        place => getComputedStyle(document.querySelector(place)).breakInside)""")
    assert breaks == ["auto", "auto", "avoid"]
    monolithic = page.evaluate("""() => {
        const found = new Set();
        for (const pre of document.querySelectorAll('.cell_input pre, .cell_output pre'))
            for (let tag = pre; tag.tagName != 'ARTICLE'; tag = tag.parentElement)
                if (getComputedStyle(tag).overflowY != 'visible') found.add(tag.className || tag.tagName);
        return [...found];
    }""")
    assert monolithic == [], "what scrolls cannot break"
    shown = page.evaluate("""[...document.querySelectorAll('details.below-input, details:not([class])')].map(
        fold => fold.lastElementChild.getBoundingClientRect().height)""")
    assert shown and min(shown) > 0
    page.close()
