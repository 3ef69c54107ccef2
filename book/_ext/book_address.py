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
    """Let the pages link to the book's repository, if the environment variable BOOK_REPOSITORY_URL has its address.

    Sphinx calls this when it has read its configuration, which is changed here. Raises ConfigError if the address is
    not that of a repository on GitHub, such as ``https://github.com/OWNER/NAME``.
    """
    url = os.environ.get("BOOK_REPOSITORY_URL", "").removesuffix("/").removesuffix(".git")
    if url == "":
        return
    repository = GITHUB.fullmatch(url)
    if repository is None:
        raise ConfigError(
            f"BOOK_REPOSITORY_URL is {url!r}, which is not the address of a repository on GitHub. "
            "Correct it, or unset it to build the book without links to a repository."
        )
    add_buttons(config, url)
    # GitHub Pages serves the book at https://OWNER.github.io/NAME/.
    host = f"{repository['owner'].lower()}.github.io"
    folder = f"/{repository['name']}/"
    config.html_baseurl = f"https://{host}{folder}"
    config.ogp_site_url = config.html_baseurl  # for the preview that a chat or a social network shows of a link
    move_links_of_404(config, folder)


def add_buttons(config: Config, url: str) -> None:
    """Show buttons on each page: to the repository at ``url``, to its issues, and to services that run a notebook."""
    config.html_theme_options.update(
        repository_url=url,
        repository_branch="main",
        path_to_docs="",  # the book begins in the repository's main folder
        use_repository_button=True,
        use_issues_button=True,
        launch_buttons={
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
        },
    )


def move_links_of_404(config: Config, folder: str) -> None:
    """Let the links of the page 404 begin at ``folder``, from which the book is served, such as ``/a-name/``.

    A server shows this page at any address that does not exist, so its links cannot be relative. As configured, they
    begin at the server's root: ``/index.html`` becomes ``/a-name/index.html``.
    """
    config.notfound_urls_prefix = folder  # for the links that Sphinx adds, such as those to its styles
    # The text of the page is set in _config.yml. The configuration's own dictionary is left as it is.
    context = dict(config.notfound_context)
    context["body"] = context["body"].replace('href="/', f'href="{folder}')
    config.notfound_context = context


def fill_in_address(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the repository's address where one page says ADDRESS, and leave out its paragraph on what ADDRESS means.

    The paragraph has the line ``{.address}`` above it. Sphinx calls this with the source of each page, which is the one
    element of ``text``, so that it can be replaced.
    """
    url = app.config.html_theme_options.get("repository_url")  # add_repository has set it, if there is one
    if page == ADDRESS_PAGE and url:
        without_explanation = re.sub(r"(?m)^\{\.address\}\n.*\n\n", "", text[0])
        text[0] = without_explanation.replace("ADDRESS", url)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_logo)
    app.connect("config-inited", add_repository)
    app.connect("source-read", fill_in_address)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
