"""What pages say of where they and their code come from: a repository's link and launch buttons, an address.

BOOK_REPOSITORY_URL names the repository. The book's address is then the one that GitHub Pages gives it.
"""

import os
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging

LOGO = "_static/favicon.svg"
ADDRESS_PAGE = "book/how_to_run"
SHORTENED_DESCRIPTION = re.compile(r'(?P<start>escription" content=")(?P<text>[^"]*)\.\.\."')


def theme_options(url: str) -> dict[str, Any]:
    """The theme's options for a repository on GitHub; ValueError for any other address."""
    url = url.strip().removesuffix("/").removesuffix(".git")
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", url):
        raise ValueError(
            f"BOOK_REPOSITORY_URL is {url!r}, which is not the address of a repository on GitHub. "
            "Correct it, or unset it to build the book without links to a repository."
        )
    return {
        "repository_url": url,
        "repository_branch": "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "use_issues_button": True,
        "launch_buttons": {
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
        },
    }


def add_logo(app: Sphinx, config: Config) -> None:
    config.html_theme_options["logo"] = {"image_light": LOGO, "image_dark": LOGO, "text": config.html_title}


def add_repository(app: Sphinx, config: Config) -> None:
    url = os.environ.get("BOOK_REPOSITORY_URL")
    if not url:
        return
    try:
        options = theme_options(url)
    except ValueError as error:
        logging.getLogger(__name__).warning(str(error))  # an error where the book is built with -W, as it should be
        return
    config.html_theme_options.update(options)
    owner, name = options["repository_url"].split("/")[-2:]
    config.ogp_site_url = f"https://{owner.lower()}.github.io/{name}/"
    config.notfound_urls_prefix = f"/{name}/"
    page = config.notfound_context["body"].replace('href="/', f'href="/{name}/')
    config.notfound_context = {**config.notfound_context, "body": page}


def fill_in_address(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the repository's address where the page says ADDRESS, and leave out its paragraph on what ADDRESS means."""
    url = app.config.html_theme_options.get("repository_url")
    if page == ADDRESS_PAGE and url:
        without_explanation = re.sub(r"(?m)^\{\.address\}\n.*\n\n", "", text[0])
        text[0] = without_explanation.replace("ADDRESS", url)


def end_descriptions(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """End a page's description after a whole sentence, or else after a whole word.

    It is shown where somebody shares a link to the page. sphinxext-opengraph cuts it after 200 letters, also inside a
    word.
    """

    def shorten(description: re.Match[str]) -> str:
        text = description["text"]
        sentences = re.match(r".{60,}[.?!](?= )", text)
        if sentences:
            shorter = sentences[0]
        else:
            shorter = text.rpartition(" ")[0] + " …"
        return f'{description["start"]}{shorter}"'

    context["metatags"] = SHORTENED_DESCRIPTION.sub(shorten, context.get("metatags") or "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_logo)
    app.connect("config-inited", add_repository)
    app.connect("source-read", fill_in_address)
    # Hooks run in the order of their priorities, and 500 is the usual one. The description has to be there already:
    # sphinxext-opengraph writes it in the same event.
    app.connect("html-page-context", end_descriptions, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
