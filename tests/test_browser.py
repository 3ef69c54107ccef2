"""The built book in a real browser, which visits each page once: errors, requests, width, fonts, sliders, axe, dark."""

import io
import re
from base64 import b64encode

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from conftest import CHAPTERS, toc_files
from fontTools.fontBuilder import FontBuilder
from fontTools.ttLib.tables._g_l_y_f import Glyph

PAGES = [*toc_files(), "search", "genindex"]
OF_COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
THEMES_OWN = {"label-content-name-mismatch", "region"}  # axe's findings on an empty page of the theme

OWN = re.compile("Inter-|JetBrainsMono-")

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 360, "height": 740}
PATIENCE = 120_000  # milliseconds: a busy machine is slow, and no test here measures speed
VISIBLE_PICTURE = """figure => [...figure.querySelectorAll('.wso-view')]
    .filter(view => view.checkVisibility())
    .map(view => view.outerHTML)"""


class Visit:
    """An open page of the book, with all replies and complaints: the browser's, and of requests to other hosts."""

    def __init__(self, context, url, page):
        self.complaints, self.replies = [], []
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.complain(message.text))
        self.page.on("pageerror", lambda error: self.complain(f"page error: {error}"))
        self.page.on("requestfailed", self.failed)
        self.page.on("request", lambda request: self.check(request.url, url))
        self.page.on("response", self.replied)
        self.page.emulate_media(color_scheme="light")
        self.page.goto(f"{url}/{page}.html")
        self.page.wait_for_function("window.MathJax ? MathJax.startup?.promise.then(() => true) : true")

    def complain(self, text):
        self.complaints.append(text)

    def failed(self, request):
        # Chromium requests the icon again a second later, and ends that request where another page comes first. An icon
        # that is missing is still a complaint: the page itself loads the same file, as its logo.
        if (request.url.rpartition("/")[2], request.failure) != ("favicon.svg", "net::ERR_ABORTED"):
            self.complain(f"failed: {request.url}")

    def replied(self, reply):
        self.replies.append(reply)
        if reply.status >= 400:
            self.complain(f"{reply.status}: {reply.url}")

    def check(self, address, url):
        if not address.startswith((url, "data:", "blob:")):
            self.complain(f"outside request: {address}")


@pytest.fixture(scope="module")
def shared_context(browser, book_url):
    """One browser context for all pages, which loads shared files once. No host's name resolves in it.

    One page stays open, so that the browser shows all pages in one process: a new one would take 0.7 s each time.
    """
    context = browser.new_context(viewport=WIDE)
    context.set_default_timeout(PATIENCE)
    context.new_page().goto(f"{book_url}/genindex.html")
    yield context
    context.close()


@pytest.fixture
def visit(shared_context, book_url):
    """A function that opens a page of the book and returns the Visit."""
    visits = []

    def open_page(page):
        visits.append(Visit(shared_context, book_url, page))
        return visits[-1]

    yield open_page
    for seen in visits:
        seen.page.close()


def figures(page):
    """The figures of the page that have a slider."""
    return page.locator("figure:has(input[type=range])")


def unfold(page):
    """Open all folds, so that their contents are checked too, and wait until they have faded in."""
    page.evaluate("""() => {
        for (const fold of document.querySelectorAll('details')) fold.open = true;
        return Promise.allSettled(document.getAnimations().map(animation => animation.finished));
    }""")


def turn(page, scheme):
    """Turn a page light or dark, as the system's setting would, and open its folds."""
    page.emulate_media(color_scheme=scheme)
    page.locator(f"html[data-theme={scheme}]").wait_for()
    unfold(page)


# A page's listings have up to 13,000 coloured words. Of the words with equal classes and ancestors' classes, axe gets
# the first one. The others lose their element and become a part of the text around them.
ONE_OF_A_KIND = """() => {
    const seen = new Set();
    for (const word of [...document.querySelectorAll('pre span[class]:not(:has(*))')]) {
        let kind = '';
        for (let tag = word; tag; tag = tag.parentElement) kind += tag.className + '/';
        seen.has(kind) ? word.replaceWith(...word.childNodes) : seen.add(kind);
    }
}"""

# Axe takes 5 ms for the contrast of a text. The contrast depends on the text's style and on what its ancestors paint
# behind it. So of the visible texts for which all of that is equal, only the first is marked and checked. Texts of one
# letter are left out, because axe says nothing about them.
ONE_OF_A_LOOK = """() => {
    const seen = new Set(), behind = new Map([[null, '']]);
    const look = (tag, ...names) => names.map(name => getComputedStyle(tag)[name]).join();
    const ground = tag => {
        if (!behind.has(tag)) {
            const paint = look(tag, 'backgroundColor', 'backgroundImage', 'opacity');
            behind.set(tag, ground(tag.parentElement) + (paint == 'rgba(0, 0, 0, 0),none,1' ? '' : paint));
        }
        return behind.get(tag);
    };
    for (const tag of document.querySelectorAll('body *')) {
        delete tag.dataset.look;
        const texts = [...tag.childNodes].filter(node => node.nodeType == Node.TEXT_NODE && node.data.trim()[1]);
        if (!texts.length || !tag.checkVisibility({checkVisibilityCSS: true, checkOpacity: true})) continue;
        const {fontSize, fontWeight} = getComputedStyle(tag);
        const large = parseFloat(fontSize) >= (fontWeight >= 700 ? 18.67 : 24);  // then axe asks for less contrast
        const kind = large + look(tag, 'color', 'textShadow') + ground(tag);
        if (!seen.has(kind)) tag.dataset.look = 'first';
        seen.add(kind);
    }
}"""
AXE = AXE_SCRIPT + ";axe.configure({rules: [{id: 'color-contrast', selector: '[data-look]'}]})"
RUN_AXE = (
    "options => axe.run({resultTypes: ['violations'], preload: false, ...options}).then(found => found.violations)"
)

# Axe says nothing about what is hidden. The drawings of the frames that a figure hides are half of a page's elements.
WITHOUT_HIDDEN_FRAMES = """() => {
    for (const view of document.querySelectorAll('.wso-view')) if (!view.checkVisibility()) view.replaceChildren();
}"""


def violations(page, **options):
    """[(rule, HTML)] of axe's findings on a page, without those about the theme."""
    if not page.evaluate("!!window.axe"):
        page.evaluate(WITHOUT_HIDDEN_FRAMES)
        page.evaluate(ONE_OF_A_KIND)
        page.evaluate(AXE)
    page.evaluate(ONE_OF_A_LOOK)
    found = page.evaluate(RUN_AXE, options)
    return [
        (rule["id"], node["html"][:200]) for rule in found if rule["id"] not in THEMES_OWN for node in rule["nodes"]
    ]


LOOKS = """() => {
    const looks = {}, texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const tag = texts.currentNode.parentElement;
        if (tag.closest('script, style, noscript, mjx-container')) continue;
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
        used = session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]
        return [font["familyName"] for font in used if not (font["isCustomFont"] and OWN.match(font["postScriptName"]))]

    if any(foreign(sample) for sample in nodes(".sample")):
        for node in nodes(".sample span"):
            for family in foreign(node):
                character = re.sub("<.*?>", "", session.send("DOM.getOuterHTML", {"nodeId": node})["outerHTML"])
                yield f"not in the book's fonts: {character!r}, drawn in {family}"
    session.detach()
    style.evaluate("style => { for (const tag of [style, ...document.querySelectorAll('.sample')]) tag.remove() }")


def too_wide(page):
    """Yields a problem where a page that is 360 pixels wide scrolls sideways."""
    page.set_viewport_size(NARROW)
    width = page.evaluate("document.documentElement.scrollWidth")
    if width > NARROW["width"] or page.evaluate("window.scrollTo(200, 0), window.scrollX"):
        yield f"{width} pixels wide where {NARROW['width']} are shown"
    page.set_viewport_size(WIDE)


def not_drawn(page):
    """Yields formulas that MathJax has not set, and images that the browser cannot read."""
    for formula in page.locator(".math:not(:has(mjx-container))").all():
        yield f"not set: {formula.inner_text()}"
    for address in page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"):
        yield f"no picture: {address}"


def sliders_that_fail(page):
    """Yields a problem for each slider without a label, or that does not move its figure by mouse and by keyboard."""
    for figure in figures(page).element_handles():  # a locator would search the whole page for each of its uses
        for slider in figure.query_selector_all("input[type=range]"):
            name = slider.evaluate("input => ((input.labels[0]?.innerText ?? '') + (input.ariaLabel ?? '')).trim()")
            if not name:
                yield "a slider without a label"
            slider.scroll_into_view_if_needed()
            first, value = figure.evaluate(VISIBLE_PICTURE), slider.input_value()
            if len(first) != 1:
                yield f"slider {name!r}: {len(first)} pictures at once"

            box = slider.bounding_box()
            at_the_end = value == slider.get_attribute("max")  # then the other end is the one to click
            page.mouse.click(box["x"] + (3 if at_the_end else box["width"] - 3), box["y"] + box["height"] / 2)
            if slider.input_value() == value or figure.evaluate(VISIBLE_PICTURE) == first:
                yield f"slider {name!r} does not follow the mouse"

            slider.focus()
            page.keyboard.press("Home")
            page.keyboard.press("ArrowRight")
            moved, second = slider.input_value(), figure.evaluate(VISIBLE_PICTURE)
            page.keyboard.press("ArrowLeft")
            if moved != str(int(slider.get_attribute("min")) + 1) or figure.evaluate(VISIBLE_PICTURE) == second:
                yield f"slider {name!r} does not follow the keyboard"


@pytest.mark.parametrize("name", PAGES)
def test_page_has_no_problem(visit, name):
    """Axe finds nothing but the theme's own problems, light or dark. In dark, only rules on colours are checked."""
    seen = visit(name)
    unfold(seen.page)
    problems = [*too_wide(seen.page), *not_drawn(seen.page), *foreign_characters(seen.page)]
    if name in CHAPTERS:
        problems += sliders_that_fail(seen.page)
    for scheme, rules in {"light": {}, "dark": OF_COLOURS}.items():
        turn(seen.page, scheme)
        problems += seen.complaints  # before axe, which fetches style sheets by itself
        problems += [f"{scheme}: {rule}: {html}" for rule, html in violations(seen.page, **rules)]
        seen.complaints.clear()
    assert not problems, "\n".join(problems)


def test_figures_show_their_first_frame_and_no_dead_slider_without_javascript(browser, book, book_url):
    """The figures of all chapters are shown on one page, in place of the first figure with sliders."""
    pages = {name: (book.html / f"{name}.html").read_text(encoding="utf-8") for name in CHAPTERS}
    found = {
        name: [figure for figure in re.findall(r"(?s)<figure\b.*?</figure>", text) if 'type="range"' in figure]
        for name, text in pages.items()
    }
    assert sum(map(bool, found.values())) > len(CHAPTERS) / 2
    first = next(name for name in CHAPTERS if found[name])
    every = [figure for of_page in found.values() for figure in of_page]
    body = pages[first].replace(every[0], "".join(every), 1)
    page = browser.new_page(java_script_enabled=False)
    page.set_default_timeout(PATIENCE)
    page.route(f"**/{first}.html", lambda route: route.fulfill(body=body, content_type="text/html"))
    page.goto(f"{book_url}/{first}.html")
    shown = figures(page).evaluate_all("""figures => figures.map(figure => ['svg', 'input'].map(
        name => [...figure.querySelectorAll(name)].filter(tag => tag.checkVisibility()).length))""")
    page.close()
    assert shown == [[1, 0]] * (len(every) + len(found[first]) - 1)


def test_a_text_that_is_hard_to_read_is_found(visit):
    """It is found in paragraphs, in a listing's keywords and in captions, each of its own colour."""
    page = visit(CHAPTERS[0]).page
    for scheme, digit in {"light": "b", "dark": "5"}.items():
        turn(page, scheme)
        for k, tag in enumerate(["p", "pre .k", "figcaption"]):
            page.add_style_tag(content=f"article {tag} {{ color: #{digit * 5}{k} !important }}")
        found = {(rule, re.match(r"<(\w+)", html)[1]) for rule, html in violations(page, **OF_COLOURS)}
        assert found >= {("color-contrast", tag) for tag in ("figcaption", "p", "span")}


def test_index_leads_to_the_first_page(visit):
    seen = visit("index")
    seen.page.wait_for_url(f"**/{toc_files()[0]}.html")
    assert not seen.complaints, "\n".join(seen.complaints)


def test_a_character_that_the_fonts_lack_is_found(visit):
    page = visit(toc_files()[0]).page
    page.evaluate("document.querySelector('article p').append('\u2714 \u6f22')")
    page.evaluate("document.querySelector('article h1').style.fontFamily = 'serif'")
    found = {re.search("'(.)', drawn", problem)[1] for problem in foreign_characters(page)}
    assert found == {"\u2714", "\u6f22"} | set("WorldSizeOne#")


def test_dark_mode_toggles(browser, book_url):
    """The button cycles through the system's setting, light and dark. The page and the ink of its figures follow."""
    page = Visit(browser, book_url, CHAPTERS[0]).page
    unfold(page)  # in a closed fold a colour's transition never ends
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('figure')).color]"
    )
    seen = {}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        page.evaluate("Promise.allSettled(document.getAnimations().map(one => one.finished)).then(() => null)")
        seen[page.locator("html").get_attribute("data-theme")] = page.evaluate(colours)
    assert set(seen) == {"light", "dark"}
    for light, dark in zip(seen["light"], seen["dark"], strict=True):
        assert light != dark
    page.close()


def test_cheat_sheet_prints_on_one_page(visit):
    """The book promises one page. Another of its pages needs several, so the count can fail."""

    def printed(page):
        return visit(page).page.pdf(format="A4").count(b"/Type /Page\n")

    assert printed("notebooks/cheat_sheet") == 1
    assert printed("book/glossary") > 1
