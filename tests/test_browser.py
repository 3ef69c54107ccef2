"""The built book in a real browser, which loads each page once and checks all of it.

It looks for errors and requests to other hosts, what is too wide or too heavy, letters in a wrong font, controls
without effect, and what axe finds.
"""

import io
import re
from base64 import b64encode
from urllib.parse import unquote, urlsplit

import pytest
from conftest import CHAPTERS, toc_files
from fontTools.fontBuilder import FontBuilder
from fontTools.ttLib.tables._g_l_y_f import Glyph
from visits import PATIENCE, WIDE, open_page, seen_by_axe, too_wide, unfold

from helpers.export.chapters import find_notebook

PAGE = f"notebooks/{find_notebook('04').stem}"  # it has figures, tables, errors and shell lines
OTHER_PAGES = ["search", "genindex", "404"]  # that the table of contents does not list
OWN_FONTS = re.compile("Inter-|JetBrainsMono-")
MAX_BYTES = 1_000_000  # of a page with all that it loads, as `make serve` sends it: not packed
MAX_BYTES_OF_FIRST_PAGE = 410_000


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

# {a style as CSS: the characters that the page shows in it}
CHARACTERS_BY_STYLE = """() => {
    const styles = {}, texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const tag = texts.currentNode.parentElement;
        if (tag.closest('script, style, noscript')) continue;
        const {fontFamily, fontWeight, fontStyle} = getComputedStyle(tag);
        const style = `${fontStyle} ${fontWeight} 16px ${fontFamily}`;
        styles[style] = [...new Set((styles[style] ?? '') + texts.currentNode.data.replace(/\\s/g, ''))].join('');
    }
    return styles;
}"""
SHOW_SAMPLES = """styles => Promise.all(Object.entries(styles).map(([style, characters]) => {
    const sample = document.body.appendChild(document.createElement('p'));
    sample.className = 'sample';
    sample.style.font = style + ', Last';
    for (const character of characters) sample.appendChild(document.createElement('span')).append(character);
    return document.fonts.load('16px Last', characters);
})).then(() => null)"""
REMOVE_SAMPLES = "style => [style, ...document.querySelectorAll('.sample')].forEach(tag => tag.remove())"


def last_font(characters):
    """A style sheet with a font of blanks for these characters, which is used only where no other font has them.

    Without it the browser would look for each missing character in all fonts of the machine, which takes long.
    """
    names = {ord(character): f"u{ord(character):X}" for character in characters}
    font = FontBuilder(1000)
    font.setupGlyphOrder([".notdef", *names.values()])
    font.setupCharacterMap(names)
    font.setupGlyf({name: Glyph() for name in font.font.getGlyphOrder()})
    font.setupHorizontalMetrics({name: (500, 0) for name in font.font.getGlyphOrder()})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": "Last", "styleName": "Regular", "psName": "Last"})
    font.setupOS2()
    font.setupPost()
    file = io.BytesIO()
    font.save(file)
    return f"@font-face {{ font-family: Last; src: url(data:font/ttf;base64,{b64encode(file.getvalue()).decode()}) }}"


def foreign_characters(page):
    """Yields a problem for each character of a page that is not drawn in one of the book's fonts."""
    styles = page.evaluate(CHARACTERS_BY_STYLE)
    style_sheet = page.add_style_tag(content=last_font(set("".join(styles.values()))))
    page.evaluate(SHOW_SAMPLES, styles)
    session = page.context.new_cdp_session(page)  # of Chrome's developer tools, which know the font of a text
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]

    def nodes(selector):
        return session.send("DOM.querySelectorAll", {"nodeId": root, "selector": selector})["nodeIds"]

    def foreign_fonts(node):
        fonts = session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]
        return [
            font["familyName"]
            for font in fonts
            if not font["isCustomFont"] or not OWN_FONTS.match(font["postScriptName"])
        ]

    if any(foreign_fonts(sample) for sample in nodes(".sample")):
        for node in nodes(".sample span"):
            for family in foreign_fonts(node):
                character = re.sub("<.*?>", "", session.send("DOM.getOuterHTML", {"nodeId": node})["outerHTML"])
                yield f"not in the book's fonts: {character!r}, drawn in {family}"
    session.detach()
    style_sheet.evaluate(REMOVE_SAMPLES)


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


def too_heavy(page, html, name):
    """Yields a problem if a page has too many bytes, with all that it has loaded from the folder ``html``."""
    addresses = page.evaluate("[location.href, ...performance.getEntriesByType('resource').map(entry => entry.name)]")
    sizes = {}
    for address in addresses:
        file = html / unquote(urlsplit(address).path).lstrip("/")
        sizes[file.name] = file.stat().st_size
    limit = MAX_BYTES
    if name == toc_files()[0]:
        limit = MAX_BYTES_OF_FIRST_PAGE
    if sum(sizes.values()) > limit:
        largest = sorted(sizes, key=sizes.get, reverse=True)[:8]
        yield f"{sum(sizes.values()):,} bytes: {', '.join(f'{name} {sizes[name]:,}' for name in largest)}"


@pytest.mark.parametrize("name", [*toc_files(), *OTHER_PAGES])
def test_page_has_no_problem(visit, book, name):
    page = visit(name)
    problems = list(too_heavy(page, book.html, name))
    unfold(page)
    checks = (too_wide, not_drawn, words_that_cannot_be_read, foreign_characters, controls_that_fail, seen_by_axe)
    for check in checks:
        problems += check(page)
    assert not problems, "\n".join(problems)


# --- whether the checks see problems ----------------------------------------------------------------------------------

SPOIL = """() => {
    const article = document.querySelector('article'), [first, second] = article.querySelectorAll('p');
    first.style.width = '999px';
    article.insertAdjacentHTML('beforeend', '<span class="math">x</span>');
    document.images[0].src = 'data:,';
    second.append('\u6f22');
    for (const controls of document.querySelectorAll('figure .wso-controls')) {
        for (const label of controls.querySelectorAll('legend')) label.textContent = '';
        controls.replaceWith(controls.cloneNode(true));  // without its listeners
    }
    const word = document.querySelector('.wso-on svg text');
    word.after(word.cloneNode(true));
    document.head.insertAdjacentHTML('beforeend', `<style>
        article figcaption { color: #bbbbb2 !important }
        html[data-theme=dark] article figcaption { color: #555552 !important }</style>`);
}"""
SEEN = [
    (too_wide, "pixels wide where 360 are shown"),
    (not_drawn, "not set: x"),
    (not_drawn, "no picture: data:,"),
    (words_that_cannot_be_read, "on each other: "),
    (foreign_characters, "not in the book's fonts: '\u6f22', drawn in "),
    (controls_that_fail, "a control without a label"),
    (controls_that_fail, "two values show the same frame"),
    (seen_by_axe, "light: color-contrast: <figcaption"),
    (seen_by_axe, "dark: color-contrast: <figcaption"),
]


def test_the_checks_see_a_spoiled_page(visit):
    page = visit(PAGE)
    unfold(page)
    page.evaluate(SPOIL)
    problems = {check: list(check(page)) for check in dict.fromkeys(check for check, _ in SEEN)}
    for check, problem in SEEN:
        assert any(problem in seen for seen in problems[check]), f"{problem}: {problems[check]}"


def test_complaints_of_the_browser_are_heard(context, book_url):
    complaints = []
    page = open_page(context, book_url, "genindex", complaints)
    assert complaints == []
    page.evaluate("""() => {
        document.body.insertAdjacentHTML('beforeend', `<img src="gone.png"><link rel="stylesheet" href="gone.css">
            <img src="https://outside.example/x.png">`);
        setTimeout(() => { throw Error('thrown') });
        return fetch('http://127.0.0.1:9/refused').catch(() => console.warn('warned'));
    }""")
    page.wait_for_load_state("networkidle")
    page.close()
    for words in [
        "gone.png",
        "gone.css",
        "outside request: https://outside",
        "page error: thrown",
        "refused",
        "warned",
    ]:
        assert any(words in complaint for complaint in complaints), f"{words}: {complaints}"


# --- other ways to see a page -----------------------------------------------------------------------------------------


def test_figures_show_their_first_frame_and_no_dead_slider_without_javascript(browser, book_url):
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{book_url}/{PAGE}.html", timeout=PATIENCE)
    figures = page.locator("figure:has(.wso-controls)").all()
    assert figures
    for figure in figures:
        assert figure.locator("svg:visible").count() == 1
        assert figure.locator("label:visible").count() == 0
    page.close()


def test_dark_mode_toggles(browser, book_url):
    """The button cycles through the system's setting, light and dark. The page and the ink of its figures follow."""
    page = open_page(browser, book_url, CHAPTERS[0], [])
    unfold(page)  # in a closed fold a colour's transition never ends
    colours = {}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        page.evaluate("Promise.allSettled(document.getAnimations().map(it => it.finished)).then(() => null)")
        scheme = page.locator("html").get_attribute("data-theme")
        colours[scheme] = page.evaluate("""[getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('figure')).color]""")
    assert set(colours) == {"light", "dark"}
    light_paper, light_ink = colours["light"]
    dark_paper, dark_ink = colours["dark"]
    assert light_paper != dark_paper
    assert light_ink != dark_ink
    page.close()


def test_cheat_sheet_prints_on_one_page(visit):
    """The book promises one page. Another of its pages needs several, so the count can fail."""

    def pages_on_paper(name):
        return visit(name).pdf(format="A4").count(b"/Type /Page\n")

    assert pages_on_paper("notebooks/cheat_sheet") == 1
    assert pages_on_paper("book/glossary") > 1
