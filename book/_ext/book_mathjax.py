"""Ship MathJax with the book, from the package sphinx-mathjax-offline, so that no page asks an outside host.

The package's own Sphinx extension copies every bundle (24 MB); this one copies what a page can ask for.
"""

from importlib.resources import files
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

from sphinx.application import Sphinx

UNUSED = ignore_patterns("*-svg*.js", "svg*", "*-full*.js", "mml-chtml.js", "tex-mml-*.js", "latest.js", "node-main.js")


def copy_mathjax(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        package = Path(str(files("sphinx-mathjax-offline")))
        target = Path(app.outdir, "_static", "mathjax")
        copytree(package / "static" / "mathjax", target, ignore=UNUSED, dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.config.mathjax_path = "mathjax/tex-chtml.js"
    app.connect("build-finished", copy_mathjax)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
