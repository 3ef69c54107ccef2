"""The browser that prints the book, takes its picture and shows its pages to tests: chromium or Chrome, headless."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

CHROME_ON_MACOS = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
NAMES = ["chromium", "chromium-browser", "google-chrome", CHROME_ON_MACOS]
FLAGS = [
    "--no-sandbox",  # root, as in a container of CI, cannot start the sandbox
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]


class Missing(Exception):
    """This machine has no such browser."""

    def __init__(self) -> None:
        super().__init__("No chromium or Chrome on this machine.\nTry `make system`.")


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Playwright's browser, until the end of the block. Raises Missing if this machine has none of NAMES."""
    path = installed_browser()
    if path is None:
        raise Missing
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def installed_browser() -> str | None:
    """The path of the first browser of NAMES that is installed; None if none is."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    return None
