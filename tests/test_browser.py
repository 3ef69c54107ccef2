"""The built book in a real browser, which loads each page once and checks all of it.

It looks for errors and requests to other hosts, what is too wide, too heavy or cut off, controls without effect, and
what axe finds.
"""

import gzip
from urllib.parse import unquote, urlsplit

import pytest
from conftest import toc_files
from measure_pages import SCREEN, measure
from visits import NARROW, PATIENCE, WIDE, seen_by_axe, too_wide, unfold

OTHER_PAGES = ["search", "genindex", "404"]  # that the table of contents does not list
MAX_BYTES = 600_000  # of a page with all that it loads, packed as a host sends it; the search's index has 373,000


@pytest.fixture(scope="module")
def context(browser, book_url):
    """One browser context for all pages, which loads shared files once. No host's name resolves in it.

    One page stays open, so that the browser shows all pages in one process: a new one would take 0.7 s each time.
    """
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(PATIENCE)
    context.new_page().goto(f"{book_url}/genindex.html")
    yield context
    context.close()


# --- what is wrong with a page ----------------------------------------------------------------------------------------


def not_drawn(page):
    """Yields formulas that are not set, and images that the browser cannot read."""
    for formula in page.locator(".math:not(:has(math))").all():
        yield f"not set: {formula.inner_text()}"
    for address in page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"):
        yield f"no picture: {address}"


WORDS_OF_FIGURES = """() => {
    const problems = [];
    for (const svg of document.querySelectorAll('.wso-on svg')) {
        const sheet = svg.getBoundingClientRect();
        const words = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
        words.forEach(([word, box], number) => {
            if (box.left < sheet.left - 3 || box.right > sheet.right + 3 || box.bottom > sheet.bottom + 3)
                problems.push(`outside of its drawing: ${word}`);
            for (const [other, {left, right, top, bottom}] of words.slice(number + 1)) {
                const width = Math.min(box.right, right) - Math.max(box.left, left);
                const height = Math.min(box.bottom, bottom) - Math.max(box.top, top);
                if (width > 2 && height > 4) problems.push(`on each other: ${word}, ${other}`);
            }
        });
    }
    return problems;
}"""


def words_that_cannot_be_read(page):
    """Yields words of figures that are outside of the drawing, or on each other."""
    yield from page.evaluate(WORDS_OF_FIGURES)


# It sets each control of each figure to all of its values, one after the other.
CONTROLS_THAT_FAIL = """() => {
    const problems = [];
    for (const figure of document.querySelectorAll('figure:has(.wso-controls)')) {
        figure.scrollIntoView();
        const visible = () => [...figure.querySelectorAll('.wso-view')].filter(view => view.checkVisibility());
        const layout = () => [figure, ...figure.querySelectorAll('input')].map(tag => {
            const {x, y, height} = tag.getBoundingClientRect();
            return [x, y + scrollY, height].map(Math.round).join();
        }).join(' ');
        const before = layout();
        for (const control of figure.querySelectorAll('[data-labels]')) {
            const name = control.querySelector('legend, label > span').textContent.trim();
            const values = JSON.parse(control.dataset.labels);
            const shown = new Set();
            if (!name) problems.push('a control without a label');
            for (const position of values.keys()) {
                const range = control.querySelector('[type=range]');
                if (range) {
                    range.value = position;
                    range.dispatchEvent(new Event('input', {bubbles: true}));
                } else {
                    control.querySelectorAll('[type=radio]')[position].click();
                }
                const views = visible();
                if (views.length != 1) problems.push(`${views.length} drawings at once: ${name}`);
                if (layout() != before) problems.push(`a value moves a control or the page: ${name}`);
                shown.add(views[0]);
            }
            if (shown.size < values.length) problems.push(`two values show the same frame: ${name}`);
        }
    }
    return [...new Set(problems)];
}"""


def controls_that_fail(page):
    """Yields a problem for each control without a label, without effect, or that moves while it is used."""
    yield from page.evaluate(CONTROLS_THAT_FAIL)


# Of each drawing whether words are cut off, without a hint that it goes on to the right, or too small.
PROBLEMS_ON_A_PHONE = """async () => {
    // figures.js has drawn again, after the event of the new size, when two frames have been shown.
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const problems = [];
    for (const cell of document.querySelectorAll('table.cards td'))
        if (cell.getBoundingClientRect().right > innerWidth) problems.push(`cut off: ${cell.textContent}`);
    for (const figure of document.querySelectorAll('figure.wso:has(.wso-on svg)')) {
        const svg = figure.querySelector('.wso-on svg');
        const sheet = figure.querySelector('.wso-on').getBoundingClientRect();
        for (const word of svg.querySelectorAll('text')) {
            const {left, right, top, bottom} = word.getBoundingClientRect();
            const isWideEnough = left > sheet.left - 3 && right < sheet.right + 3;
            const isTallEnough = top > sheet.top - 3 && bottom < sheet.bottom + 3;
            const goesOn = figure.querySelector('.wso-hint') !== null;
            if (!(isWideEnough && isTallEnough || goesOn)) problems.push(`cut off: ${word.textContent}`);
            const size = parseFloat(getComputedStyle(word).fontSize) * svg.getScreenCTM().a;
            if (size < 8.9) problems.push(`a letter of ${size} pixels: ${word.textContent}`);
        }
    }
    return problems;
}"""


def problems_on_a_phone(page):
    """Yields what is cut off, or too small to read, on a narrow page."""
    page.set_viewport_size(NARROW)
    yield from page.evaluate(PROBLEMS_ON_A_PHONE)
    page.set_viewport_size(WIDE)


def cut_listings(page):
    """Yields error messages and shell lines that are longer than their box."""
    yield from page.evaluate("""[...document.querySelectorAll('.traceback pre, .highlight-bash pre')]
        .filter(block => block.scrollWidth > block.clientWidth).map(block => `cut off: ${block.textContent}`)""")


def too_heavy(page, html):
    """Yields a problem if a page has too many bytes, with all that it has loaded from the folder ``html``."""
    addresses = page.evaluate("[location.href, ...performance.getEntriesByType('resource').map(entry => entry.name)]")
    bytes_by_file = {}
    for address in addresses:
        file = html / unquote(urlsplit(address).path).lstrip("/")
        bytes_by_file[file.name] = len(gzip.compress(file.read_bytes(), compresslevel=6))
    total = sum(bytes_by_file.values())
    if total > MAX_BYTES:
        yield f"{total:,} bytes: {bytes_by_file}"


@pytest.mark.parametrize("name", [*toc_files(), *OTHER_PAGES])
def test_page_has_no_problem(visit, book, name):
    page = visit(name)
    problems = list(too_heavy(page, book.html))
    unfold(page)
    checks = [
        too_wide,
        cut_listings,
        not_drawn,
        words_that_cannot_be_read,
        controls_that_fail,
        problems_on_a_phone,
        seen_by_axe,  # the last, because it removes parts of the page
    ]
    for check in checks:
        problems += check(page)
    assert not problems, "\n".join(problems)


# --- single pages -----------------------------------------------------------------------------------------------------


def test_cheat_sheet_prints_on_one_page(visit):
    assert visit("notebooks/cheat_sheet").pdf(format="A4").count(b"/Type /Page\n") == 1


def test_a_figure_with_steps_plays_once_when_it_is_seen(visit):
    """The first page's figure goes from step 0 to its last step, 6, and stops."""
    page = visit("book/intro")
    figure = page.locator("figure.wso:has(.wso-controls button)")
    assert figure.locator("output").text_content() == "0"
    figure.evaluate("figure => figure.scrollIntoView({block: 'center'})")
    figure.locator("output:text('6')").wait_for()
    page.locator(".wso-playing").wait_for(state="detached")


def test_a_filter_hides_rows_of_the_table_of_lies(visit):
    page = visit("book/sabotage")
    rows = page.locator("table.sabotage tbody tr")
    page.get_by_label("Show lies with").fill("HANG gradient")
    shown_rows = rows.locator("visible=true").all_inner_texts()
    assert 0 < len(shown_rows) < rows.count()
    for text in shown_rows:
        assert "hang" in text.lower()
        assert "gradient" in text.lower()
    assert page.locator("label.filter output").text_content() == f"{len(shown_rows)} of {rows.count()} rows"


def test_the_measures_of_a_page_are_those_of_its_blocks(browser):
    """`make pages` prints how many screens a page fills, and its kinds of blocks. A screen is 800 pixels high.

    The code of this page is open and 880 pixels high; a closed box counts with its title alone.
    """
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
    lines_of_open_code = measures.pop("lines")
    assert lines_of_open_code == 2
    in_pixels = {kind: round(800 * screens) for kind, screens in measures.items() if screens}
    assert in_pixels == {"screens": 1240, "text": 160, "code": 880, "output": 80, "box": 40, "figure": 80}
