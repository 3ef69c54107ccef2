"""Let the address that a page had before lead to the page, with its #section.

A notebook says in its metadata which names it had: ``{"book": {"formerly": ["checkpoints_in_practice"]}}``. The library
sphinx-reredirects writes a small page for each, from book/_templates/redirect.html.
"""

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

from helpers.export.facts import facts_at


def redirects(notebooks: Path) -> dict[str, str]:
    """Where the former addresses of notebooks lead: ``{"notebooks/old_name": "new_name.html"}``.

    ``notebooks`` is their folder. Each notebook says in its metadata, as ``formerly``, which names it had. The address
    is relative to the former page.
    """
    addresses = {}
    for path in sorted(notebooks.glob("*.ipynb")):
        for name in facts_at(path).formerly:
            addresses[f"{notebooks.name}/{name}"] = f"{path.stem}.html"
    return addresses


def configure(app: Sphinx, config: Config) -> None:
    """Tell sphinx-reredirects which pages to write, and from which template."""
    config.redirects = redirects(Path(app.srcdir, "notebooks"))
    config.redirect_html_template_file = "book/_templates/redirect.html"


def setup(app: Sphinx) -> dict[str, Any]:
    app.setup_extension("sphinx_reredirects")
    app.connect("config-inited", configure)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
