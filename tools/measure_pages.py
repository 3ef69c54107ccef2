"""Measure the built book's chapters as a reader sees them, in screens: ``make pages``, after ``make book``."""

import sys
from pathlib import Path

from chromium import Missing, chromium
from playwright.sync_api import Browser, Page, ViewportSize

from helpers.command_line import aligned

ROOT = Path(__file__).parents[1]
SCREEN = ViewportSize(width=1180, height=800)
KINDS = ("code", "text", "output", "figure", "table", "heading", "box")

# JavaScript for the page. It goes through the article's elements from the outside to the inside, and adds the height of
# each element that is of one of the KINDS to that kind, without looking inside it. It returns {kind: the sum of heights
# in pixels}, with the whole article's height as "screens", and the number of lines of code in view as "lines". What is
# closed has the height of its box.
MEASURE = """() => {
    const heights = {}, article = document.querySelector('article');
    const kinds = [
        ['heading', 'h1, h2, h3, h4'], ['figure', 'figure, img, .cell_output:has(> .output figure)'],
        ['box', 'details, .admonition'], ['output', '.cell_output'],
        ['code', '.cell_input:not(:has(details)), [class*=highlight-]'],
        ['table', 'table, .pst-scrollable-table-container'], ['text', 'p, ul, ol, dl, blockquote, .math'],
    ];
    const walk = element => {
        const height = element.getBoundingClientRect().height;
        if (!height) return;
        const kind = kinds.find(([, selector]) => element.matches(selector))?.[0];
        const holdsFigure = kind == 'output' && element.querySelector('figure');
        if (kind && !holdsFigure) heights[kind] = (heights[kind] ?? 0) + height;
        else [...element.children].forEach(walk);
    };
    [...article.children].forEach(walk);
    const open = [...article.querySelectorAll('.cell_input pre')].filter(pre => !pre.closest('details'));
    const lines = open.flatMap(pre => pre.textContent.split('\\n')).filter(line => line.trim()).length;
    return {...heights, screens: article.getBoundingClientRect().height, lines};
}"""


def measure(page: Page) -> dict[str, float]:
    """Measure the page that is open: its height and that of each kind of block in screens, and its lines of code."""
    measured = page.evaluate(MEASURE)
    measures = {"screens": measured["screens"] / SCREEN["height"]}
    for kind in KINDS:
        measures[kind] = measured.get(kind, 0) / SCREEN["height"]
    measures["lines"] = measured["lines"]
    return measures


def measure_chapters(browser: Browser, html: Path) -> dict[str, dict[str, float]]:
    """{a chapter's name: its measures} for each chapter of the built book in the folder ``html``."""
    page = browser.new_page(viewport=SCREEN, color_scheme="light")
    measures = {}
    for notebook in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        page.goto((html / "notebooks" / f"{notebook.stem}.html").resolve().as_uri())
        # The height of a text is known only when its font has been loaded. `then` makes null of the set of fonts, which
        # Playwright cannot send here.
        page.evaluate("document.fonts.ready.then(() => null)")
        measures[notebook.stem] = measure(page)
    page.close()
    return measures


def main() -> None:
    """Print a table with a line for each chapter."""
    try:
        with chromium() as browser:
            measures = measure_chapters(browser, ROOT / "_build" / "html")
    except Missing as missing:
        sys.exit(str(missing))
    height_columns = ("screens", *KINDS)
    rows = [["chapter", *height_columns, "lines"]]
    for name, measures_of_chapter in measures.items():
        heights = [f"{measures_of_chapter[column]:.1f}" for column in height_columns]
        lines = f"{measures_of_chapter['lines']:.0f}"
        rows.append([name, *heights, lines])
    print(*aligned(rows, left=[0]), sep="\n")


if __name__ == "__main__":
    main()
