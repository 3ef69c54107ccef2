"""Measure the built book's chapters as a reader sees them, in screens: ``make pages``, after ``make book``."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from chromium import Missing, chromium
from playwright.sync_api import Browser, Page, ViewportSize

ROOT = Path(__file__).parents[1]
SCREEN = ViewportSize(width=1180, height=800)
KINDS = ("code", "text", "output", "figure", "table", "heading", "box")
COLUMN_WIDTH = 9

# The blocks of the article as {kind, top, bottom}, in pixels, its height, and how many lines of code are in view. What
# is closed has the height of its box.
MEASURE = """() => {
    const blocks = [], article = document.querySelector('article');
    const top = article.getBoundingClientRect().top;
    const kinds = [
        ['heading', 'h1, h2, h3, h4'], ['figure', 'figure, img, .cell_output:has(> .output figure)'],
        ['box', 'details, .admonition'], ['output', '.cell_output'],
        ['code', '.cell_input:not(:has(details)), [class*=highlight-]'],
        ['table', 'table, .pst-scrollable-table-container'], ['text', 'p, ul, ol, dl, blockquote, .math'],
    ];
    const walk = element => {
        const box = element.getBoundingClientRect();
        if (!box.height) return;
        const kind = kinds.find(([, selector]) => element.matches(selector))?.[0];
        const holdsFigure = kind == 'output' && element.querySelector('figure');
        if (kind && !holdsFigure) blocks.push({kind, top: box.top - top, bottom: box.bottom - top});
        else [...element.children].forEach(walk);
    };
    [...article.children].forEach(walk);
    const open = [...article.querySelectorAll('.cell_input pre')].filter(pre => !pre.closest('details'));
    const lines = open.flatMap(pre => pre.textContent.split('\\n')).filter(line => line.trim());
    return {blocks, height: article.getBoundingClientRect().height, lines: lines.length};
}"""


@dataclass(frozen=True)
class Block:
    """A part of a page: its kind, one of KINDS, and where it is, in screens from the top."""

    kind: str
    top: float
    bottom: float

    @property
    def height(self) -> float:
        return self.bottom - self.top


@dataclass(frozen=True)
class Measures:
    """A chapter in screens of 1180 x 800 pixels."""

    screens: float
    by_kind: dict[str, float]
    first_picture: float | None  # from the top
    first_output: float | None
    lines: int  # of code in view


def measure(page: Page) -> Measures:
    """The measures of the page that is open."""
    measured = page.evaluate(MEASURE)
    screen = SCREEN["height"]
    blocks = []
    for block in measured["blocks"]:
        blocks.append(Block(block["kind"], block["top"] / screen, block["bottom"] / screen))
    by_kind = dict.fromkeys(KINDS, 0.0)
    for block in blocks:
        by_kind[block.kind] += block.height
    return Measures(
        screens=measured["height"] / screen,
        by_kind=by_kind,
        first_picture=first_of("figure", blocks),
        first_output=first_of("output", blocks),
        lines=measured["lines"],
    )


def first_of(kind: str, blocks: Sequence[Block]) -> float | None:
    for block in blocks:
        if block.kind == kind:
            return block.top
    return None


def count_words(notebook: Path) -> int:
    """How many words the text of a notebook has."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = " ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return len(text.split())


def measure_chapters(browser: Browser, html: Path) -> dict[str, Measures]:
    """{a chapter's name: its measures} for each chapter of the built book."""
    page = browser.new_page(viewport=SCREEN, color_scheme="light")
    measures = {}
    for notebook in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        page.goto((html / "notebooks" / f"{notebook.stem}.html").resolve().as_uri())
        page.evaluate("document.fonts.ready.then(() => null)")
        measures[notebook.stem] = measure(page)
    page.close()
    return measures


def table(measures: dict[str, Measures], words: dict[str, int]) -> str:
    """The measures as text, a line for each chapter, and the shares of the kinds in all of them."""
    columns = ["screens", *KINDS, "picture", "output", "lines", "words"]
    table_lines = [line_of("chapter", columns)]
    for name, chapter in measures.items():
        kinds = [f"{height:.1f}" for height in chapter.by_kind.values()]
        firsts = ["-" if top is None else f"{top:.1f}" for top in (chapter.first_picture, chapter.first_output)]
        counts = [str(count) for count in (chapter.lines, words[name])]
        table_lines.append(line_of(name, [f"{chapter.screens:.1f}", *kinds, *firsts, *counts]))
    screens = sum(chapter.screens for chapter in measures.values())
    shares = []
    for kind in KINDS:
        height = sum(chapter.by_kind[kind] for chapter in measures.values())
        shares.append(f"{kind} {height / screens:.0%}")
    code_lines = sum(chapter.lines for chapter in measures.values())
    total = (
        f"{screens:.0f} screens: {', '.join(shares)}; {code_lines} lines of code in view, {sum(words.values())} words"
    )
    return "\n".join([*table_lines, total])


def line_of(name: str, cells: Sequence[str]) -> str:
    return f"{name:26}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def main() -> None:
    html = ROOT / "_build" / "html"
    if sys.argv[1:]:
        html = Path(sys.argv[1])
    try:
        with chromium() as browser:
            measures = measure_chapters(browser, html)
    except Missing as missing:
        sys.exit(str(missing))
    words = {name: count_words(ROOT / "notebooks" / f"{name}.ipynb") for name in measures}
    print(table(measures, words))


if __name__ == "__main__":
    main()
