"""What pages say of where they and their code come from: a repository's link and launch buttons, an address.

BOOK_REPOSITORY_URL names the repository. The book's address is then the one that GitHub Pages gives it.
"""

import os
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util import logging


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


def name_the_address(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the repository's address where the page says ADDRESS, and leave out the words on what ADDRESS means."""
    if page == "book/how_to_run" and (url := app.config.html_theme_options.get("repository_url")):
        text[0] = re.sub(r"(?m)^\{\.address\}\n.*\n\n", "", text[0]).replace("ADDRESS", url)


def add_mark(app: Sphinx, config: Config) -> None:
    mark = "_static/favicon.svg"
    config.html_theme_options["logo"] = {"image_light": mark, "image_dark": mark, "text": config.html_title}


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


def end_descriptions(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """A description of 200 letters may end inside a word, where a link to the page is shown elsewhere. End it after its
    last whole sentence, or else after a word.
    """

    def whole(match: re.Match[str]) -> str:
        sentences = re.match(r".{60,}[.?!](?= )", match[2])
        return f'{match[1]}{sentences[0] if sentences else match[2].rpartition(" ")[0] + " …"}"'

    cut = r'(escription" content=")([^"]*)\.\.\."'
    context["metatags"] = re.sub(cut, whole, context.get("metatags") or "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_mark)
    app.connect("config-inited", add_repository)
    app.connect("html-page-context", end_descriptions, priority=900)
    app.connect("source-read", name_the_address)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
