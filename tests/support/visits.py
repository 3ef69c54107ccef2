"""Pages of the built book in a browser: what it complains about, what axe finds, whether a page fits a phone."""

from axe_playwright_python.base import AXE_SCRIPT

COLOUR_RULES = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
RULES_THAT_THE_THEME_BREAKS = {"label-content-name-mismatch", "region"}  # also on an empty page

WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 360, "height": 740}
PATIENCE = 120_000  # milliseconds: a busy machine is slow, and no test here measures speed


def open_page(context, url, name, complaints):
    """Open a page of the book. Returns the page of the browser.

    As long as the page is open, what is wrong is added to the list ``complaints``: the browser's errors and warnings,
    also on requests that fail and replies such as 404, the errors of scripts, and requests to other hosts.
    """
    page = context.new_page()
    page.set_default_timeout(PATIENCE)

    def on_console(message):
        if message.type in ("error", "warning"):
            complaints.append(f"{message.text} {message.location['url']}")

    def on_error(error):
        complaints.append(f"page error: {error}")

    def on_request(request):
        if not request.url.startswith((url, "data:", "blob:")):
            complaints.append(f"outside request: {request.url}")

    page.on("console", on_console)
    page.on("pageerror", on_error)
    page.on("request", on_request)
    page.emulate_media(color_scheme="light")
    page.goto(f"{url}/{name}.html")
    return page


def unfold(page):
    """Open all folds, so that their contents are checked too, and wait until they have faded in."""
    page.evaluate("""() => {
        for (const fold of document.querySelectorAll('details')) fold.open = true;
        return Promise.allSettled(document.getAnimations().map(animation => animation.finished));
    }""")


# A page's listings have up to 13,000 coloured words. Of the words with equal classes and ancestors' classes, axe gets
# the first one. The others lose their element and become a part of the text around them.
KEEP_ONE_WORD_OF_A_KIND = """() => {
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
MARK_ONE_TEXT_OF_A_LOOK = """() => {
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
RUN_AXE = "options => axe.run({resultTypes: ['violations'], preload: false, ...options}).then(all => all.violations)"

# Axe says nothing about what is hidden. The drawings of the frames that a figure hides are half of a page's elements.
REMOVE_HIDDEN_FRAMES = """() => {
    for (const view of document.querySelectorAll('.wso-view')) if (!view.checkVisibility()) view.replaceChildren();
}"""


def seen_by_axe(page):
    """Yields what axe finds on a page, as lines: "dark: color-contrast: <span ...".

    On the light page all rules are checked. On the dark one only those on colours are.
    """
    page.evaluate(REMOVE_HIDDEN_FRAMES)
    page.evaluate(KEEP_ONE_WORD_OF_A_KIND)
    page.evaluate(AXE)
    for scheme, rules in {"light": {}, "dark": COLOUR_RULES}.items():
        page.emulate_media(color_scheme=scheme)
        page.locator(f"html[data-theme={scheme}]").wait_for()
        unfold(page)
        page.evaluate(MARK_ONE_TEXT_OF_A_LOOK)
        for violation in page.evaluate(RUN_AXE, rules):
            rule = violation["id"]
            if rule not in RULES_THAT_THE_THEME_BREAKS:
                for node in violation["nodes"]:
                    yield f"{scheme}: {rule}: {node['html'][:200]}"


def too_wide(page):
    """Yields one problem, as a line, if a page does not fit on a phone: at 360 pixels, it can be scrolled sideways."""
    page.set_viewport_size(NARROW)
    width = page.evaluate("document.documentElement.scrollWidth")
    scrolled = page.evaluate("window.scrollTo(200, 0), window.scrollX")
    if width > NARROW["width"] or scrolled > 0:
        yield f"{width} pixels wide where {NARROW['width']} are shown"
    page.set_viewport_size(WIDE)
