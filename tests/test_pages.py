"""What a reader sees of the built book: how much code, how its boxes are called, and how its mistakes are marked."""

import csv
import html
import re
import sys

import nbformat
import pytest
from conftest import CHAPTERS, ROOT, toc_files
from measure_pages import SCREEN, measure, measure_chapters
from visits import unfold

from helpers.export.chapters import find_notebook

sys.path.append(str(ROOT / "book" / "_ext"))
import book_cells
import book_tables

PAGE = f"notebooks/{find_notebook('04').stem}"  # it has figures, tables, errors and shell lines


def code_cells(chapter):
    cells = nbformat.read(ROOT / f"{chapter}.ipynb", as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


# --- how long a chapter is --------------------------------------------------------------------------------------------


def test_each_chapter_is_measured_and_has_code_and_a_picture(browser, book):
    """How much of them is right is for its author to judge: nothing here is a limit."""
    measures = measure_chapters(browser, book.html)
    assert list(measures) == [name.removeprefix("notebooks/") for name in CHAPTERS]
    for name, chapter in measures.items():
        assert chapter["lines"] > 0, name
        assert chapter["figure"] > 0, name


def test_the_measures_of_a_page_are_those_of_its_blocks(browser):
    page = browser.new_page(viewport=SCREEN)
    page.set_content("""<style>* { margin: 0; display: block }</style><article>
        <p style="height: 160px"></p>
        <div class="cell_input" style="height: 880px"><pre>a = 1\n\n  b = 2\n</pre></div>
        <div class="cell_output" style="height: 80px"></div>
        <details><summary style="height: 40px"></summary><div class="cell_input"><pre>closed = 3</pre></div></details>
        <div class="cell_output"><div class="output"><figure style="height: 80px"></figure></div></div>
        </article>""")
    measures = measure(page)
    page.close()
    assert measures.pop("lines") == 2
    in_pixels = {what: round(800 * screens) for what, screens in measures.items() if screens}
    assert in_pixels == {"screens": 1240, "text": 160, "code": 880, "output": 80, "box": 40, "figure": 80}


# --- boxes and marks --------------------------------------------------------------------------------------------------


def test_every_closed_box_says_what_is_in_it(book):
    for name in toc_files():
        page = (book.html / f"{name}.html").read_text(encoding="utf-8")
        titles = re.findall(r'<details class="hide[^"]*"><summary>(.*?)</summary>', page)
        assert page.count('<details class="hide') == len(titles), name
        assert not [title for title in titles if not title or "Show code" in title], name
        if name in CHAPTERS:
            assert {"Parameters", "Imports", "How this was measured"} <= set(titles), name
            solutions = [cell for cell in code_cells(name) if "solution" in cell.metadata.get("tags", [])]
            numbered = [title for title in titles if title.startswith("Solution")]
            assert numbered == [f"Solution {number}" for number in range(1, len(solutions) + 1)], name


def test_all_code_of_a_chapter_is_on_its_page(book):
    """What is closed of an open cell is in the box below it."""
    for name in CHAPTERS:
        page = (book.html / f"{name}.html").read_text(encoding="utf-8")
        article = page.partition("<article")[2].partition("</article>")[0]
        text = "".join(html.unescape(re.sub(r"<[^>]*>", "", article)).split())
        for cell in code_cells(name):
            for line in cell.source.splitlines():
                assert "".join(line.split()) in text, (name, line)


DEFINITION = "def f(x):\n    return x\n\n\n"
CLASS = "class A:\n    def f(self):\n" + "        a = 1\n" * 20 + "    def g(self):\n" + "        a = 1\n" * 20


@pytest.mark.parametrize(
    "source, lines",
    [
        (f"{DEFINITION}print(f(1))\nassert f(1) == 1\nassert f(2) == 2", 2),
        (f"{DEFINITION}y = f(1)\nprint(y)\nz = f(2)\nassert z == y", 5),  # from the first print on
        (f"{DEFINITION}print(f(1))", 5),  # too little to close
        ("%%ranks 2\nprint(1)\nprint(2)\nprint(3)", 4),  # no Python
        ("a = 1\n" * 40, 34),
        ("def f():\n" + "    a = 1\n" * 40, 41),  # a function is not cut
        (CLASS, 22),  # a class is cut between its methods
    ],
)
def test_an_open_cell_shows_what_a_reader_would_write(source, lines):
    assert book_cells.shown_lines(source) == lines


def test_a_mistake_has_a_mark_and_no_copy_button(browser, book_url):
    page = browser.new_page()
    page.goto(f"{book_url}/{CHAPTERS[0]}.html")
    marks = page.locator(".cell.mistake .mistake-badge").all_inner_texts()
    assert marks == ["hangs", "wrong numbers, no error", "hangs"]
    assert page.locator(".cell.mistake button.copybtn").count() == 0
    assert page.locator(".cell:not(.mistake) button.copybtn").count() > 0
    page.close()


def test_every_error_on_purpose_is_marked():
    """Each cell that raises an error says whether it hangs; a hang is what `launch` ended by its timeout."""
    for name in CHAPTERS:
        for cell in code_cells(name):
            tags = set(cell.metadata.get("tags", []))
            if "raises-exception" not in tags:
                continue
            [error] = [output.evalue for output in cell.outputs if output.output_type == "error"]
            mark = "error"
            if "still ran after" in error:
                mark = "hangs"
            assert tags & set(book_cells.MISTAKES) == {mark}, cell.id


def test_a_row_of_a_wide_table_can_be_a_card():
    head = "<thead><tr><th><p>A <em>name</em></p></th><th>B &amp; C</th><th>D</th></tr></thead>"
    rows = "<tbody><tr><td><p>1</p></td><td>2</td><td>3</td></tr></tbody>"
    table = f'<table class="table">{head}{rows}</table>'
    cards = book_tables.TABLE.sub(book_tables.labelled, table)
    assert re.findall(r'data-label="(.*?)"', cards) == ["A name", "B &amp; C", "D"]
    assert 'class="table cards"' in cards
    narrow = table.replace("<th>D</th>", "").replace("<td>3</td>", "")
    assert book_tables.TABLE.sub(book_tables.labelled, narrow) == narrow


def test_the_lies_are_counted_by_chapter_and_kind(book):
    page = (book.html / "book" / "sabotage.html").read_text(encoding="utf-8")
    with (ROOT / "book" / "recorded" / "sabotage.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    lies = len({row["The lie"] for row in rows})
    assert f"<p>{lies} lies were told, and {len(rows)} cells of " in page
    table = page.partition('class="lies')[2].partition("</table>")[0]
    assert table.count("•") == len(rows)


# --- type, phones, paper ----------------------------------------------------------------------------------------------


def test_lines_can_be_read_and_headings_have_their_order(browser, book_url):
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{book_url}/{PAGE}.html")
    widths = page.evaluate("[...document.querySelectorAll('article section > p')].map(p => p.clientWidth)")
    assert max(widths) <= 672
    sizes = page.evaluate("""['h1', 'h2', 'h3'].map(
        tag => parseFloat(getComputedStyle(document.querySelector('article ' + tag)).fontSize))""")
    assert sizes == sorted(sizes, reverse=True)

    page.set_viewport_size({"width": 1180, "height": 800})
    box = page.locator(".bd-sidebar-secondary").first.bounding_box()
    assert box["x"] + box["width"] <= 1180  # the contents of the page are beside it
    cut = page.evaluate("""[...document.querySelectorAll('.traceback pre, .highlight-bash pre')].map(
        block => block.scrollWidth - block.clientWidth)""")
    assert cut and max(cut) <= 0, "an error message or a shell line is cut off"
    page.close()


# Of each figure: whether the page says that it goes on to the right, the smallest letter in pixels, and words that are
# cut off.
FIGURES = """() => [...document.querySelectorAll('figure.wso')].map(figure => {
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
IS_NARROW = "[...document.querySelectorAll('figure.wso svg')].some(svg => svg.style.minWidth == '0px')"


@pytest.mark.parametrize("name", [CHAPTERS[2], CHAPTERS[4], CHAPTERS[8]])
def test_on_a_phone_a_drawing_is_all_in_sight_or_says_that_it_goes_on(browser, book_url, name):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page.goto(f"{book_url}/{name}.html")
    unfold(page)
    wide = page.evaluate(FIGURES)
    assert not [figure for figure in wide if figure["scrolls"]]

    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_function(IS_NARROW)
    narrow = page.evaluate(FIGURES)
    in_sight = [figure for figure in narrow if not figure["scrolls"]]
    assert len(in_sight) > len(narrow) / 2
    assert [figure["cut"] for figure in in_sight if figure["cut"]] == []
    assert min(figure["letter"] for figure in narrow) > 8.9

    page.set_viewport_size({"width": 1440, "height": 900})
    page.wait_for_function(f"!{IS_NARROW}")
    assert page.evaluate(FIGURES) == wide, "a wide page draws what it drew"
    page.close()


def test_on_a_phone_the_rows_of_a_wide_table_are_cards(browser, book_url):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto(f"{book_url}/notebooks/environment_variables.html")
    assert page.locator("table.cards").count()
    hidden = page.evaluate("""[...document.querySelectorAll('table.cards td')].filter(
        cell => cell.getBoundingClientRect().right > innerWidth).length""")
    assert hidden == 0
    page.close()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_a_ring_plays_once_when_it_is_seen(browser, book_url, motion):
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion=motion)
    page.goto(f"{book_url}/book/intro.html")
    figure = page.locator("figure.wso:has(.wso-controls button)")
    assert figure.locator("output").text_content() == "0"
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
    rows = page.locator("table.sabotage tbody tr")
    page.get_by_label("Show lies with").fill("HANG gradient")
    shown = rows.locator("visible=true").all_inner_texts()
    assert 0 < len(shown) < rows.count()
    assert all("hang" in text.lower() and "gradient" in text.lower() for text in shown)
    assert page.locator("label.filter output").text_content() == f"{len(shown)} of {rows.count()} rows"
    page.close()


# What scrolls cannot break across two pages of paper.
SCROLLS = """() => {
    const found = new Set();
    for (const pre of document.querySelectorAll('.cell_input pre, .cell_output pre'))
        for (let tag = pre; tag.tagName != 'ARTICLE'; tag = tag.parentElement)
            if (getComputedStyle(tag).overflowY != 'visible') found.add(tag.className || tag.tagName);
    return [...found];
}"""


def test_on_paper_long_cells_break_and_answers_are_open(browser, book_url):
    page = browser.new_page()
    page.goto(f"{book_url}/{PAGE}.html")
    page.emulate_media(media="print")
    breaks = page.evaluate("""['.cell_input', '.cell_input pre', 'figure.wso'].map(
        selector => getComputedStyle(document.querySelector(selector)).breakInside)""")
    assert breaks == ["auto", "auto", "avoid"]
    assert page.evaluate(SCROLLS) == []
    answers = page.evaluate("""[...document.querySelectorAll('details.below-input, details:not([class])')].map(
        fold => fold.lastElementChild.getBoundingClientRect().height)""")
    assert answers and min(answers) > 0
    page.close()
