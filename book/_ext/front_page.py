"""What the first page shows of the chapters: a cell with its stored output, and how long it takes to read a chapter."""

import json
from pathlib import Path
from typing import Any

from book_cells import shown_lines
from docutils import nodes
from docutils.parsers.rst import directives
from hero import Chapter
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

WORDS, LINES = 240, 20  # that are read in a minute: of text, and of code in view
CLOSED = {"hide-cell", "hide-input"}


class Cell(SphinxDirective):
    """``{cell} 00_first_run four``: a cell of a chapter, and what it printed or drew."""

    required_arguments = 2
    option_spec = {"output-only": directives.flag}

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir, "notebooks", f"{self.arguments[0]}.ipynb")
        self.env.note_dependency(str(path))
        chapter, name = Chapter(path), self.arguments[1]
        shown: list[nodes.Node] = []
        if "output-only" not in self.options:
            source = chapter.source(name)
            shown.append(nodes.literal_block(source, source, language="python"))
        figures = [output.get("data", {}).get("text/html") for output in chapter.cell(name)["outputs"]]
        for figure in filter(None, figures):
            shown.append(nodes.raw("", "".join(figure), format="html"))
        if not any(figures):
            text = chapter.output(name)
            shown.append(nodes.literal_block(text, text, language="text", classes=["output"]))
        return shown


def minutes(path: Path) -> int:
    """How many minutes it takes to read a notebook's text and the code that is in view, to five minutes."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    words = lines = 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            words += len(source.split())
        elif not CLOSED & set(cell["metadata"].get("tags", [])):
            lines += sum(bool(line.strip()) for line in source.splitlines()[: shown_lines(source)])
    return max(5, 5 * round((words / WORDS + lines / LINES) / 5))


class Minutes(SphinxRole):
    """``{minutes}`00_first_run```: the reading time of a chapter."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path = Path(self.env.srcdir, "notebooks", f"{self.text}.ipynb")
        self.env.note_dependency(str(path))
        text = f"{minutes(path)} minutes"
        return [nodes.inline(text, text, classes=["minutes"])], []


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("cell", Cell)
    app.add_role("minutes", Minutes())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
