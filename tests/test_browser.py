"""The built book in a real browser: no outside request, no error, sliders, dark mode, narrow pages, axe, search."""

import re

import nbformat
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from axe_playwright_python.sync_playwright import Axe
from conftest import CHAPTERS, ROOT, toc_files

PAGES = [*toc_files(), "search", "genindex"]
OF_COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
THEMES_OWN = {"label-content-name-mismatch", "region"}  # axe's findings on an empty page of the theme

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 360, "height": 740}
VISIBLE_PICTURE = """figure => [...figure.querySelectorAll('.wso-view')]
    .filter(view => view.checkVisibility())
    .map(view => view.outerHTML)"""


class Visit:
    """A page of the book, opened, with everything that its browser complained about or asked of another host."""

    def __init__(self, context, url, page):
        self.complaints = []
        self.page = context.new_page()
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.complain(message.text))
        self.page.on("pageerror", lambda error: self.complain(f"page error: {error}"))
        self.page.on("requestfailed", lambda request: self.complain(f"failed: {request.url}"))
        self.page.on("request", lambda request: self.check(request.url, url))
        self.page.on("response", lambda reply: reply.status >= 400 and self.complain(f"{reply.status}: {reply.url}"))
        self.page.goto(f"{url}/{page}.html", wait_until="networkidle")

    def complain(self, text):
        self.complaints.append(text)

    def check(self, address, url):
        if not address.startswith((url, "data:", "blob:")):
            self.complain(f"outside request: {address}")


@pytest.fixture
def visit(browser, book_url):
    """visit(page, viewport=WIDE, **context options) opens a page of the book; no address resolves to another host."""
    contexts = []

    def open_page(page, viewport=WIDE, **options):
        contexts.append(browser.new_context(viewport=viewport, **options))
        return Visit(contexts[-1], book_url, page)

    yield open_page
    for context in contexts:
        context.close()


def figures(page):
    """The figures of the page that have a slider."""
    return page.locator("figure:has(input[type=range])")


def unfold(page):
    """Open what is folded, so that it is looked at too, and let it fade in."""
    page.evaluate("""() => {
        for (const fold of document.querySelectorAll('details')) fold.open = true;
        return Promise.allSettled(document.getAnimations().map(animation => animation.finished));
    }""")


def turn(page, scheme):
    """Turn a page light or dark, as the system's own setting does; what is folded is opened."""
    page.emulate_media(color_scheme=scheme)
    page.locator(f"html[data-theme={scheme}]").wait_for(timeout=5_000)
    unfold(page)


# A page's listings have 13,000 coloured words. Of those whose classes and ancestors' classes are the same axe is shown
# the first; the others join the text around them.
ONE_OF_A_KIND = """() => {
    const seen = new Set();
    for (const word of [...document.querySelectorAll('pre span[class]:not(:has(*))')]) {
        let kind = '';
        for (let tag = word; tag; tag = tag.parentElement) kind += tag.className + '/';
        seen.has(kind) ? word.replaceWith(...word.childNodes) : seen.add(kind);
    }
}"""

# Axe takes 5 ms for the contrast of a text. It depends on the text's own style and on what its ancestors paint behind
# it: of the visible texts in which those are the same the first is marked, and looked at, if it is longer than a
# letter, of which axe says nothing.
ONE_OF_A_LOOK = """() => {
    const seen = new Set(), behind = new Map([[null, '']]);
    const look = (tag, ...names) => names.map(name => getComputedStyle(tag)[name]).join();
    const ground = tag => {
        if (!behind.has(tag))
            behind.set(tag, ground(tag.parentElement) + look(tag, 'backgroundColor', 'backgroundImage', 'opacity'));
        return behind.get(tag);
    };
    for (const tag of document.querySelectorAll('body *')) {
        delete tag.dataset.look;
        const texts = [...tag.childNodes].filter(node => node.nodeType == Node.TEXT_NODE && node.data.trim()[1]);
        if (!texts.length || !tag.checkVisibility({checkVisibilityCSS: true, checkOpacity: true})) continue;
        const kind = look(tag, 'color', 'fontSize', 'fontWeight', 'textShadow') + ground(tag);
        if (!seen.has(kind)) tag.dataset.look = 'first';
        seen.add(kind);
    }
}"""
AXE = Axe(AXE_SCRIPT + ";axe.configure({rules: [{id: 'color-contrast', selector: '[data-look]'}]})")


def violations(page, **options):
    """What axe finds on a page, by (rule, HTML), but for what the theme brings."""
    page.evaluate(ONE_OF_A_KIND)
    page.evaluate(ONE_OF_A_LOOK)
    found = AXE.run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        (rule["id"], node["html"][:200]) for rule in found if rule["id"] not in THEMES_OWN for node in rule["nodes"]
    ]


@pytest.mark.parametrize("name", PAGES)
def test_page_is_clean_and_accessible(visit, name):
    """No error, no outside request, mathematics set; at 360 pixels nothing makes the page itself scroll sideways.

    In light nothing for axe but what the theme brings, nor in dark for those of its rules that look at colours.
    """
    seen = visit(name, color_scheme="light")
    unfold(seen.page)
    seen.page.set_viewport_size(NARROW)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    seen.page.evaluate("window.scrollTo(200, 0)")
    assert seen.page.evaluate("window.scrollX") == 0
    seen.page.set_viewport_size(WIDE)
    for formula in seen.page.locator(".math").all():
        assert formula.locator("mjx-container").count() == 1
    for scheme, rules in {"light": {}, "dark": OF_COLOURS}.items():
        turn(seen.page, scheme)
        assert not seen.complaints, "\n".join(seen.complaints)  # before axe, which fetches style sheets by itself
        assert (scheme, violations(seen.page, **rules)) == (scheme, [])
        seen.complaints.clear()


def test_a_text_that_is_hard_to_read_is_found(visit):
    """In paragraphs, in a listing's keywords and below figures."""
    page = visit(CHAPTERS[0]).page
    for scheme, colour in {"light": "#bbb", "dark": "#555"}.items():
        turn(page, scheme)
        page.add_style_tag(content=f"article p, article pre .k, figcaption {{ color: {colour} !important }}")
        found = {(rule, re.match(r"<(\w+)", html)[1]) for rule, html in violations(page, **OF_COLOURS)}
        assert found >= {("color-contrast", tag) for tag in ("figcaption", "p", "span")}


def test_index_leads_to_the_first_page(visit):
    seen = visit("index")
    seen.page.wait_for_url(f"**/{toc_files()[0]}.html")
    assert not seen.complaints, "\n".join(seen.complaints)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_sliders_move_by_mouse_and_by_keyboard(visit, chapter):
    seen = visit(chapter)
    assert figures(seen.page).count() > 0, "a chapter has at least one figure with a slider"
    for figure in figures(seen.page).all():
        for slider in figure.locator("input[type=range]").all():
            name = slider.evaluate("input => (input.labels[0]?.innerText ?? '') + (input.ariaLabel ?? '')")
            assert name.strip(), "a slider without a label"
            slider.scroll_into_view_if_needed()
            first, value = figure.evaluate(VISIBLE_PICTURE), slider.input_value()
            assert len(first) == 1

            box = slider.bounding_box()
            at_the_end = value == slider.get_attribute("max")  # then the other end is the one to click
            seen.page.mouse.click(box["x"] + (3 if at_the_end else box["width"] - 3), box["y"] + box["height"] / 2)
            assert slider.input_value() != value
            assert figure.evaluate(VISIBLE_PICTURE) != first

            slider.focus()
            seen.page.keyboard.press("Home")
            seen.page.keyboard.press("ArrowRight")
            assert slider.input_value() == str(int(slider.get_attribute("min")) + 1)
            second = figure.evaluate(VISIBLE_PICTURE)
            seen.page.keyboard.press("ArrowLeft")
            assert figure.evaluate(VISIBLE_PICTURE) != second
    assert not seen.complaints, "\n".join(seen.complaints)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_figures_show_their_first_frame_without_javascript(visit, chapter):
    page = visit(chapter, java_script_enabled=False).page
    for figure in figures(page).all():
        shown = [svg for svg in figure.locator("svg").all() if svg.is_visible()]
        assert len(shown) == 1
        assert not any(slider.is_visible() for slider in figure.locator("input").all()), "a slider that moves nothing"


def test_dark_mode_toggles(visit):
    """The button goes through the system's choice, light and dark; the page and its figures' ink follow."""
    page = visit(CHAPTERS[0], color_scheme="light").page
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('figure')).color]"
    )
    seen = {}
    for _ in range(3):
        page.locator(".theme-switch-button:visible").first.click()
        page.wait_for_timeout(100)
        seen[page.locator("html").get_attribute("data-theme")] = page.evaluate(colours)
    assert set(seen) == {"light", "dark"}
    for light, dark in zip(seen["light"], seen["dark"], strict=True):
        assert light != dark


def test_search_finds_every_chapter_by_its_title(visit):
    seen = visit(toc_files()[0])
    for chapter in CHAPTERS:
        title = nbformat.read(ROOT / f"{chapter}.ipynb", as_version=4).cells[0].source.splitlines()[0].lstrip("# ")
        word = max(re.findall(r"\w+", title), key=len)
        seen.page.keyboard.press("Control+k")
        seen.page.locator("input[type=search]:visible").first.fill(word)
        with seen.page.expect_navigation():
            seen.page.keyboard.press("Enter")
        seen.page.locator(f"#search-results a[href*='{chapter}.html']").first.wait_for(timeout=10_000)
        seen.page.wait_for_load_state("networkidle")  # the results' excerpts
    assert not seen.complaints, "\n".join(seen.complaints)


def test_cheat_sheet_prints_on_one_page(visit):
    """As the book promises; another page takes several, so the count counts."""

    def printed(page):
        return visit(page).page.pdf(format="A4").count(b"/Type /Page\n")

    assert printed("notebooks/cheat_sheet") == 1
    assert printed("book/glossary") > 1
