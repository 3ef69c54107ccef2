"""What pages say of where they and their code come from: a repository's link and launch buttons, an address.

BOOK_REPOSITORY_URL names the repository. The book's address is then the one that GitHub Pages gives it.
"""

import os
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

LOGO = "_static/favicon.svg"
ADDRESS_PAGE = "book/how_to_run"
GITHUB = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)")


def add_logo(app: Sphinx, config: Config) -> None:
    """Put the book's logo and its title above the list of pages."""
    config.html_theme_options["logo"] = {"image_light": LOGO, "image_dark": LOGO, "text": config.html_title}


def add_repository(app: Sphinx, config: Config) -> None:
    """Add the links to the repository, if there is one. Raises ConfigError for an address that is not on GitHub."""
    url = os.environ.get("BOOK_REPOSITORY_URL", "").removesuffix("/").removesuffix(".git")
    if not url:
        return
    repository = GITHUB.fullmatch(url)
    if repository is None:
        raise ConfigError(
            f"BOOK_REPOSITORY_URL is {url!r}, which is not the address of a repository on GitHub. "
            "Correct it, or unset it to build the book without links to a repository."
        )
    name = repository["name"]
    config.html_theme_options.update(
        repository_url=url,
        repository_branch="main",
        path_to_docs="",
        use_repository_button=True,
        use_issues_button=True,
        launch_buttons={
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
        },
    )
    # GitHub Pages serves the book from a folder with the repository's name. Each page names its own address below it.
    config.html_baseurl = f"https://{repository['owner'].lower()}.github.io/{name}/"
    config.ogp_site_url = config.html_baseurl
    # The page 404 is shown at any address, so its links cannot be relative: they begin at the root, "/", and have to
    # begin at the book's folder instead.
    config.notfound_urls_prefix = f"/{name}/"
    context = dict(config.notfound_context)
    context["body"] = context["body"].replace('href="/', f'href="/{name}/')
    config.notfound_context = context


def fill_in_address(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the repository's address where the page says ADDRESS, and leave out its paragraph on what ADDRESS means."""
    url = app.config.html_theme_options.get("repository_url")
    if page == ADDRESS_PAGE and url:
        without_explanation = re.sub(r"(?m)^\{\.address\}\n.*\n\n", "", text[0])
        text[0] = without_explanation.replace("ADDRESS", url)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_logo)
    app.connect("config-inited", add_repository)
    app.connect("source-read", fill_in_address)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
