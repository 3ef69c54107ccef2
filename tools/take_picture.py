"""Take the first page's picture for README.md and cards of links, from the built book (``make book`` first)."""

import sys
from pathlib import Path

from chromium import Missing, chromium

ROOT = Path(__file__).parents[1]
PAGE = "book/intro.html"
# A style sheet that hides all of the page except its title and the animation.
ALONE = """
  .bd-article > section > :not(h1, .hero), .bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article,
  .hero-run, .hero-other, .headerlink { display: none !important; }
  .bd-main .bd-content .bd-article-container { max-width: none; padding: 0; width: 100%; }
  .bd-article-container .bd-article { padding: 14px 28px 0; }
  .bd-article h1 { margin: 0 0 14px !important; }
"""


def take(html: Path, file: Path) -> None:
    """Write the picture to a PNG file of 1200 x 630 pixels. ``html`` is the folder of the built book.

    With ``reduced_motion`` the page shows the animation as it is at its end.
    """
    with chromium() as browser:
        page = browser.new_page(
            viewport={"width": 900, "height": 473},
            device_scale_factor=4 / 3,  # each pixel of the page becomes 4/3 of the picture's: 900 are 1200
            color_scheme="light",
            reduced_motion="reduce",
        )
        page.goto((html / PAGE).resolve().as_uri())
        page.wait_for_load_state("networkidle")
        page.add_style_tag(content=ALONE)
        page.screenshot(path=file, clip={"x": 0, "y": 0, "width": 900, "height": 472.5})


if __name__ == "__main__":
    try:
        take(ROOT / "_build" / "html", ROOT / "book" / "_static" / "card.png")
    except Missing as missing:
        sys.exit(str(missing))
