"""Take back two roles that docutils gives a list of references, because axe-core reports both.

The list has no list items, and doc-biblioentry is deprecated. Without roles, screen readers read the text as it is.
"""

from typing import Any

from sphinx.application import Sphinx


def drop_roles(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Remove the two roles from a page. Sphinx calls it when it has made the page's HTML, ``context["body"]``."""
    body = context.get("body", "")
    if "citation-list" in body:
        body = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
        context["body"] = body.replace(' role="doc-biblioentry"', "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", drop_roles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
