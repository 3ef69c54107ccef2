"""Measure the built book's chapters as a reader sees them, in screens: ``make pages``, after ``make book``."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from chromium import Missing, chromium
from playwright.sync_api import Browser, Page, ViewportSize

ROOT = Path(__file__).parents[1]
SCREEN = ViewportSize(width=1180, height=800)
KINDS = ("code", "text", "output", "figure", "table", "heading", "box")

# [kind, top, bottom] of each block of the article, in pixels, its height, and how many lines of code are in view. What
# is closed has the height of its box.
BLOCKS = """() => {
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
        if (kind == 'output') {
            const drawn = element.querySelector('figure');
            if (drawn) return [...element.children].forEach(walk);
        }
        if (kind) return blocks.push([kind, box.top - top, box.bottom - top]);
        [...element.children].forEach(walk);
    };
    [...article.children].forEach(walk);
    const open = [...article.querySelectorAll('.cell_input pre')].filter(pre => !pre.closest('details'));
    const lines = open.flatMap(pre => pre.textContent.split('\\n')).filter(line => line.trim());
    return [blocks, article.getBoundingClientRect().height, lines.length];
}"""


@dataclass(frozen=True)
class Measures:
    """A chapter in screens of 1180 x 800 pixels."""

    screens: float
    by_kind: dict[str, float]
    first_picture: float | None  # from the top
    first_output: float | None
    walls: int  # stretches of more than a screen of code in which no sentence or figure stands
    without_picture: float  # the longest stretch
    lines: int  # of code in view
    words: int = 0  # of the notebook's text

    @property
    def code_percent(self) -> float:
        return 100 * self.by_kind["code"] / self.screens


def walls(blocks: list[tuple[str, float, float]]) -> Iterator[float]:
    """The heights of code that stands together; outputs and closed boxes do not interrupt it."""
    height = 0.0
    for kind, top, bottom in blocks:
        if kind == "code":
            height += bottom - top
        elif kind in ("text", "figure", "table", "heading"):
            yield height
            height = 0.0
    yield height


def measure(page: Page) -> Measures:
    """The measures of the page that is open."""
    blocks, height, lines = page.evaluate(BLOCKS)
    screen = SCREEN["height"]
    blocks = [(kind, top / screen, bottom / screen) for kind, top, bottom in blocks]
    pictures = [(top, bottom) for kind, top, bottom in blocks if kind == "figure"]
    ends = [0.0, *(bottom for _, bottom in pictures)]
    starts = [*(top for top, _ in pictures), height / screen]
    return Measures(
        screens=height / screen,
        by_kind={name: sum(bottom - top for kind, top, bottom in blocks if kind == name) for name in KINDS},
        first_picture=pictures[0][0] if pictures else None,
        first_output=next((top for kind, top, _ in blocks if kind == "output"), None),
        walls=sum(wall > 1 for wall in walls(blocks)),
        without_picture=max(start - end for start, end in zip(starts, ends, strict=True)),
        lines=lines,
    )


def words_of(notebook: Path) -> int:
    """How many words the text of a notebook has."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return sum(len("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")


def measured(browser: Browser, html: Path) -> dict[str, Measures]:
    """{a chapter's name: its measures} for each chapter of the built book."""
    page = browser.new_page(viewport=SCREEN, color_scheme="light")
    found = {}
    for path in sorted((html / "notebooks").glob("[0-9][0-9]_*.html")):
        notebook = ROOT / "notebooks" / f"{path.stem}.ipynb"
        if not notebook.exists():  # the address of an older edition, which leads to today's
            continue
        page.goto(path.resolve().as_uri())
        page.evaluate("document.fonts.ready.then(() => null)")
        found[path.stem] = replace(measure(page), words=words_of(notebook))
    page.close()
    return found


def table(found: dict[str, Measures]) -> str:
    """The measures as text, and their sums."""
    head = ["screens", *KINDS, "1st picture", "1st output", "walls", "without picture", "code %", "lines", "words"]
    lines = [f"{'chapter':26}" + "".join(f"{name:>{max(len(name), 5) + 2}}" for name in head)]
    for name, row in found.items():
        numbers = [row.screens, *row.by_kind.values(), row.first_picture, row.first_output, row.walls]
        cells = ["-" if number is None else f"{number:.{0 if isinstance(number, int) else 1}f}" for number in numbers]
        cells += [f"{row.without_picture:.1f}", f"{row.code_percent:.0f}", str(row.lines), str(row.words)]
        lines.append(f"{name:26}" + "".join(f"{c:>{max(len(n), 5) + 2}}" for c, n in zip(cells, head, strict=True)))
    screens = sum(row.screens for row in found.values())
    shares = {kind: sum(row.by_kind[kind] for row in found.values()) / screens for kind in KINDS}
    lines_of_code, words = sum(row.lines for row in found.values()), sum(row.words for row in found.values())
    total = f"{screens:.0f} screens: " + ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    return "\n".join([*lines, f"{total}; {lines_of_code} lines of code in view, {words} words"])


if __name__ == "__main__":
    try:
        with chromium() as browser:
            print(table(measured(browser, Path(sys.argv[1]) if sys.argv[1:] else ROOT / "_build" / "html")))
    except Missing as missing:
        sys.exit(str(missing))
