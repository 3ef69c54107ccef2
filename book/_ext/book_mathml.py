"""Write formulas as MathML, which browsers draw themselves: MathJax outweighs a chapter. The fonts are the page's."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

VARIABLE = re.compile(r"<mi>(&#x\w+;|.)</mi>")  # one letter; a function's name has several


def mathml(latex: str, display: str) -> str:
    """A formula of LaTeX as MathML. Its variables get a class, for which the style sheet has an italic font.

    ``display`` is "inline" for a formula in a line of text, or "block".
    """
    return VARIABLE.sub(r'<mi class="variable">\1</mi>', convert(latex.strip(), display=display))


def write_inline_formula(self: Any, node: nodes.math) -> None:
    """Write a formula in a line of text. Sphinx calls it with its translator as ``self``."""
    self.body.append(f'<span class="math notranslate nohighlight">{mathml(node.astext(), "inline")}</span>')
    raise nodes.SkipNode  # or Sphinx would write the formula's text, too


def write_formula(self: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own. Sphinx calls it with its translator as ``self``."""
    self.body.append(f'<div class="math notranslate nohighlight">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode  # or Sphinx would write the formula's text, too


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (write_inline_formula, None), (write_formula, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
