"""Take the picture of a page that README.md and cards of links show, from the built book (``make book`` first)."""

import sys
from pathlib import Path

from chromium import Missing, chromium

ROOT = Path(__file__).parents[1]
PAGE = "notebooks/04_ddp.html"


def take(html: Path, file: Path) -> None:
    """Write the built book's first figure, with what stands above it, to a PNG file of 1200 x 630 pixels."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 840}, device_scale_factor=0.75, color_scheme="light")
        page.goto((html / PAGE).resolve().as_uri())
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelector('article figure').scrollIntoView({block: 'end', behavior: 'instant'})")
        page.evaluate("document.querySelector('.bd-sidebar-primary').scrollTop = 0")
        page.screenshot(path=file)


if __name__ == "__main__":
    try:
        take(ROOT / "_build" / "html", ROOT / "book" / "_static" / "card.png")
    except Missing as missing:
        sys.exit(str(missing))
