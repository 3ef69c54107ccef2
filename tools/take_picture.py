"""Take the picture of a page that README.md and the previews of shared links show: ``make picture``."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from print_pdf import BROWSERS

ROOT = Path(__file__).parents[1]
PAGE = "notebooks/04_ddp.html"


def take(html, file):
    """Write the book's first figure, with the text above it, to a PNG file of 1200 x 630 pixels."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("There is no chromium. Install it with: make system")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(
            viewport={"width": 1600, "height": 840}, device_scale_factor=0.75, color_scheme="light"
        )
        page.goto((html / PAGE).resolve().as_uri())
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelector('article figure').scrollIntoView({block: 'end', behavior: 'instant'})")
        page.evaluate("document.querySelector('.bd-sidebar-primary').scrollTop = 0")
        page.screenshot(path=file)
        chromium.close()


if __name__ == "__main__":
    take(ROOT / "_build" / "html", ROOT / "book" / "_static" / "card.png")
