"""The built book in a real browser, which visits each page once: errors, requests, width, fonts, sliders, axe, dark."""

import io
import re
from base64 import b64encode

import pytest
from conftest import CHAPTERS, toc_files
from fontTools.fontBuilder import FontBuilder
from fontTools.ttLib.tables._g_l_y_f import Glyph
from visits import PATIENCE, WIDE, open_page, seen_by_axe, too_wide, unfold

from helpers.export.chapters import find_notebook

OWN_FONTS = re.compile("Inter-|JetBrainsMono-")
PAGE = f"notebooks/{find_notebook('04').stem}"  # it has figures, tables, errors and shell lines
WITH_CONTROLS = "figure:has(.wso-controls)"

VISIBLE_PICTURE = """figure => [...figure.querySelectorAll('.wso-view')]
    .filter(view => view.checkVisibility())
    .map(view => view.outerHTML)"""


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


LOOKS = """() => {
    const looks = {}, texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const tag = texts.currentNode.parentElement;
        if (tag.closest('script, style, noscript')) continue;
        const {fontFamily, fontWeight, fontStyle} = getComputedStyle(tag);
        const look = `${fontStyle} ${fontWeight} 16px ${fontFamily}`;
        looks[look] = [...new Set((looks[look] ?? '') + texts.currentNode.data.replace(/\\s/g, ''))].join('');
    }
    return looks;
}"""
SAMPLES = """looks => Promise.all(Object.entries(looks).map(([look, characters]) => {
    const sample = document.body.appendChild(document.createElement('p'));
    sample.className = 'sample';
    sample.style.font = look + ', Last';
    for (const character of characters) sample.appendChild(document.createElement('span')).append(character);
    return document.fonts.load('16px Last', characters);
})).then(() => null)"""


def last_font(characters):
    """A style sheet with a font of blanks for these characters, which is used only where no other font has them."""
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
    looks = page.evaluate(LOOKS)
    style = page.add_style_tag(content=last_font(set("".join(looks.values()))))
    page.evaluate(SAMPLES, looks)
    session = page.context.new_cdp_session(page)
    for domain in ["DOM", "CSS"]:
        session.send(f"{domain}.enable")
    root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]

    def nodes(selector):
        return session.send("DOM.querySelectorAll", {"nodeId": root, "selector": selector})["nodeIds"]

    def foreign(node):
        fonts = session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]
        own = [font for font in fonts if font["isCustomFont"] and OWN_FONTS.match(font["postScriptName"])]
        return [font["familyName"] for font in fonts if font not in own]

    if any(foreign(sample) for sample in nodes(".sample")):
        for node in nodes(".sample span"):
            for family in foreign(node):
                character = re.sub("<.*?>", "", session.send("DOM.getOuterHTML", {"nodeId": node})["outerHTML"])
                yield f"not in the book's fonts: {character!r}, drawn in {family}"
    session.detach()
    style.evaluate("style => { for (const tag of [style, ...document.querySelectorAll('.sample')]) tag.remove() }")


def not_drawn(page):
    """Yields formulas that are not set, and images that the browser cannot read."""
    for formula in page.locator(".math:not(:has(math))").all():
        yield f"not set: {formula.inner_text()}"
    for address in page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"):
        yield f"no picture: {address}"


PLACES = """figure => JSON.stringify([...figure.querySelectorAll('input')].map(input => {
    const box = input.getBoundingClientRect();
    return [Math.round(box.x), Math.round(box.y + scrollY)];
}).concat([[Math.round(figure.getBoundingClientRect().height)]]))"""


def controls_that_fail(page):
    """Yields a problem for each control that has no label, does not move its figure, or moves while it is used.

    A slider is dragged from end to end and moved by keyboard, and each button is pressed.
    """
    # A locator would search the whole page for each of its uses.
    for figure in page.locator(WITH_CONTROLS).element_handles():
        figure.scroll_into_view_if_needed()
        places = figure.evaluate(PLACES)
        for slider in figure.query_selector_all("input[type=range]"):
            name = slider.evaluate("input => (input.labels[0]?.innerText ?? '').trim()")
            if not name:
                yield "a slider without a label"
            slider.scroll_into_view_if_needed()
            box, last, seen = slider.bounding_box(), int(slider.get_attribute("max")), set()
            page.mouse.move(box["x"] + 10, box["y"] + box["height"] / 2)
            page.mouse.down()
            for step in range(last + 1):
                across = 10 + (box["width"] - 20) * step / last
                page.mouse.move(box["x"] + across, box["y"] + box["height"] / 2)
                pictures = figure.evaluate(VISIBLE_PICTURE)
                if len(pictures) != 1:
                    yield f"slider {name!r}: {len(pictures)} pictures at once"
                seen.add((slider.input_value(), pictures[0]))
                if figure.evaluate(PLACES) != places:
                    yield f"slider {name!r} moves a control or the page while it is dragged"
            page.mouse.up()
            if len(seen) <= last:
                yield f"slider {name!r} does not follow the mouse"
            slider.focus()
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
            if (slider.input_value(), figure.evaluate(VISIBLE_PICTURE)[0]) not in seen or slider.input_value() != "1":
                yield f"slider {name!r} does not follow the keyboard"
        for group in figure.query_selector_all("fieldset"):
            name, seen = group.query_selector("legend").inner_text().strip(), []
            if not name:
                yield "buttons without a label"
            for button in group.query_selector_all("label"):
                button.scroll_into_view_if_needed()
                button.click()
                seen.append(figure.evaluate(VISIBLE_PICTURE)[0])
                if figure.evaluate(PLACES) != places:
                    yield f"a button of {name!r} moves a control or the page"
            if len(set(seen)) < len(seen):
                yield f"two buttons of {name!r} show the same picture"


@pytest.mark.parametrize("name", [*toc_files(), "search", "genindex", "404"])
def test_page_has_no_problem(visit, name):
    page = visit(name)
    unfold(page)
    checks = [too_wide, not_drawn, foreign_characters, *[controls_that_fail] * (name in CHAPTERS), seen_by_axe]
    problems = [problem for check in checks for problem in check(page)]
    assert not problems, "\n".join(problems)


# JavaScript that spoils a page, the check that sees it, and what its problems say.
DULL = """article p { color: #bbbbb0 !important } article pre .k { color: #bbbbb1 !important }
    article figcaption { color: #bbbbb2 !important }"""
SPOILED = [
    ("document.querySelector('article p').style.width = '999px'", too_wide, ["pixels wide where 360 are shown"]),
    (
        """document.querySelector('article').insertAdjacentHTML('beforeend', `<span class="math">x</span>`);
        document.images[0].src = 'data:,'""",
        not_drawn,
        ["not set: x", "no picture: data:,"],
    ),
    (
        """document.querySelector('article p').append('\u2714 \u6f22');
        const title = document.querySelector('article h1');
        title.textContent = 'Title';
        title.style.fontFamily = 'serif'""",
        foreign_characters,
        [f"not in the book's fonts: {letter!r}, drawn in " for letter in "\u2714\u6f22Title"],
    ),
    (
        """for (const control of document.querySelectorAll('figure .wso-controls')) {
            for (const words of control.querySelectorAll('legend, div > label > span')) words.textContent = '';
            control.replaceWith(control.cloneNode(true));  // without its listeners
        }""",
        controls_that_fail,
        ["buttons without a label", "two buttons of '' show the same picture"],
    ),
    (
        f"""const dull = `{DULL}`;
        const dark = dull.replaceAll('article', 'html[data-theme=dark] article').replaceAll('bbbbb', '55555');
        document.head.insertAdjacentHTML('beforeend', `<style>${{dull}} ${{dark}}</style>`)""",
        seen_by_axe,
        [f"{scheme}: color-contrast: <{tag}" for scheme in ("light", "dark") for tag in ("p", "span", "figcaption")],
    ),
]


@pytest.mark.parametrize(("spoil", "check", "problems"), SPOILED, ids=[check.__name__ for _, check, _ in SPOILED])
def test_the_check_sees_a_spoiled_page(visit, spoil, check, problems):
    page = visit(PAGE)
    unfold(page)
    page.evaluate(f"() => {{ {spoil} }}")
    lines = list(check(page))
    assert {problem for problem in problems if any(problem in line for line in lines)} == set(problems), lines
    assert [line for line in lines if not any(problem in line for problem in problems)] == []


def test_figures_show_their_first_frame_and_no_dead_slider_without_javascript(browser, book_url):
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{book_url}/{PAGE}.html", timeout=PATIENCE)
    figures = page.locator(WITH_CONTROLS).all()
    counts = [[figure.locator(f"{tag}:visible").count() for tag in ("svg", "label")] for figure in figures]
    page.close()
    assert counts and counts == [[1, 0]] * len(counts)


def test_complaints_are_heard(context, book_url):
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
    words = ["gone.png", "gone.css", "outside request: https://outside", "page error: thrown", "9/refused", "warned"]
    assert [word for word in words if not any(word in complaint for complaint in complaints)] == []


def test_dark_mode_toggles(browser, book_url):
    """The button cycles through the system's setting, light and dark. The page and the ink of its figures follow."""
    page = open_page(browser, book_url, CHAPTERS[0], [])
    unfold(page)  # in a closed fold a colour's transition never ends
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('figure')).color]"
    )
    schemes = {}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        page.evaluate("Promise.allSettled(document.getAnimations().map(it => it.finished)).then(() => null)")
        schemes[page.locator("html").get_attribute("data-theme")] = page.evaluate(colours)
    assert set(schemes) == {"light", "dark"}
    assert all(light != dark for light, dark in zip(schemes["light"], schemes["dark"], strict=True))
    page.close()


def test_cheat_sheet_prints_on_one_page(visit):
    """The book promises one page. Another of its pages needs several, so the count can fail."""

    def pages_on_paper(page):
        return visit(page).pdf(format="A4").count(b"/Type /Page\n")

    assert pages_on_paper("notebooks/cheat_sheet") == 1
    assert pages_on_paper("book/glossary") > 1
