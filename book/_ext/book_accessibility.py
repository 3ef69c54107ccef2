"""Take back two roles that docutils gives a list of references, and that axe-core reports: the list has no list items,
and doc-biblioentry is deprecated. Without them it is read as the text that it is.
"""

from typing import Any

from sphinx.application import Sphinx


def drop_roles(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    if "citation-list" in context.get("body", ""):
        body = context["body"].replace('<div role="list" class="citation-list">', '<div class="citation-list">')
        context["body"] = body.replace(' role="doc-biblioentry"', "")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", drop_roles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
