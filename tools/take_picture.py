"""Take the picture of a page that README.md and the cards of shared links show: ``make picture``."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from print_pdf import BROWSERS

ROOT = Path(__file__).parents[1]
PAGE, FIRST = "notebooks/00_first_run.html", "#the-same-numbers-on-four-ranks"


def take(html, file):
    """Write the built book's first figure, with what stands above it, to a PNG file of 1200 x 630 pixels."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("There is no chromium. Install it with: make system")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1200, "height": 630}, color_scheme="light")
        page.goto(f"{(html / PAGE).resolve().as_uri()}{FIRST}")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=file)
        chromium.close()


if __name__ == "__main__":
    take(ROOT / "_build" / "html", ROOT / "book" / "_static" / "card.png")
