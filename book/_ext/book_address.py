"""What pages say about where they and their code come from: a repository's link and launch buttons, an address.

BOOK_REPOSITORY_URL names the repository, and ``make publish ADDRESS=…`` sets it. The book's address is then the one
that GitHub Pages gives it.
"""

import os
import re
from typing import Any
from urllib.parse import quote, urlsplit

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

LOGO = "_static/favicon.svg"
BRANCH = "published"  # has main's files, and notebooks that install the helpers where they are missing
GITHUB = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)")


def add_logo(app: Sphinx, config: Config) -> None:
    """Put the book's logo and its title above the list of pages."""
    config.html_theme_options["logo"] = {"image_light": LOGO, "image_dark": LOGO, "text": config.html_title}


def add_repository(app: Sphinx, config: Config) -> None:
    """Let the pages link to the book's repository, if the environment variable BOOK_REPOSITORY_URL has its address.

    Sphinx calls this when it has read its configuration, which is changed here. Raises ConfigError if the address is
    not that of a repository on GitHub, such as ``https://github.com/OWNER/NAME``.
    """
    url = os.environ.get("BOOK_REPOSITORY_URL", "")
    if url == "":
        return
    try:
        address = address_of_book(url)
    except ValueError as error:
        raise ConfigError(f"BOOK_REPOSITORY_URL: {error}") from None
    add_buttons(config, repository_of(url))
    config.html_baseurl = address
    config.ogp_site_url = address  # for the preview that a chat or a social network shows of a link
    move_links_of_404(config, urlsplit(address).path)


def repository_of(url: str) -> str:
    """A repository's address without the ``/`` or ``.git`` with which some write it."""
    return url.removesuffix("/").removesuffix(".git")


def address_of_book(url: str) -> str:
    """Where GitHub Pages serves the book of the repository at ``url``: ``https://OWNER.github.io/NAME/``.

    Raises ValueError if ``url`` is not the address of a repository on GitHub, such as ``https://github.com/OWNER/NAME``.
    """
    repository = GITHUB.fullmatch(repository_of(url))
    if repository is None:
        raise ValueError(
            f"{url!r} is not the address of a repository on GitHub, such as https://github.com/OWNER/NAME. "
            "Correct it, or leave it out to build the book without links to a repository."
        )
    return f"https://{repository['owner'].lower()}.github.io/{repository['name']}/"


def add_buttons(config: Config, url: str) -> None:
    """Show buttons on each page: to the repository at ``url``, to its issues, and to services that run a notebook."""
    config.html_theme_options.update(
        repository_url=url,
        repository_branch=BRANCH,
        path_to_docs="",  # the book begins in the repository's main folder
        use_repository_button=True,
        use_issues_button=True,
        launch_buttons={
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
        },
    )


def add_kaggle_button(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add Kaggle to the services that run a notebook, below those that the theme knows.

    Sphinx calls this with what a page's template will read. The theme has put its own buttons there before, if the
    page is a notebook and the book has an address.
    """
    for group in context.get("header_buttons", []):
        if group.get("label") == "launch-buttons":
            repository = app.config.html_theme_options["repository_url"]
            notebook = quote(f"{repository}/blob/{BRANCH}/{page}.ipynb", safe="")
            button = {
                "type": "link",
                "text": "Kaggle",
                "tooltip": "Launch on Kaggle",
                "icon": "fas fa-k",
                "url": f"https://www.kaggle.com/kernels/welcome?src={notebook}",
            }
            group["buttons"].append(button)


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
    """Put an address where a page says ADDRESS, and leave out the page's paragraph on what ADDRESS means.

    How to run it needs the repository's address, and a citation the book's. The paragraph has the line ``{.address}``
    above it. Sphinx calls this with the source of each page, which is the one element of ``text``, so that it can be
    replaced.
    """
    url = app.config.html_theme_options.get("repository_url")  # add_repository has set it, if there is one
    if not url:
        return
    addresses = {"book/how_to_run": url, "book/references": app.config.html_baseurl}
    if page in addresses:
        without_explanation = re.sub(r"(?m)^\{\.address\}\n.*\n\n", "", text[0])
        text[0] = without_explanation.replace("ADDRESS", addresses[page])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_logo)
    app.connect("config-inited", add_repository)
    app.connect("source-read", fill_in_address)
    app.connect("html-page-context", add_kaggle_button, priority=900)  # after the theme, whose buttons it extends
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
