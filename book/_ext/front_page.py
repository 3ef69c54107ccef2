"""What the first page shows of the chapters: their list, a cell with its stored output, the time to read a chapter."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from book_cells import shown_lines
from docutils import nodes
from docutils.parsers.rst import directives
from hero import Chapter
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole

from helpers.export.facts import facts_at

WORDS, LINES = 240, 20  # that are read in a minute: of text, and of code in view
CLOSED = {"hide-cell", "hide-input"}
CHAPTERS = re.compile(r"```\{chapters\}\n(.*?)```\n", re.DOTALL)


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


def with_chapters(text: str, root: Path) -> str:
    """A page's Markdown, in which the list of all pages takes the place of a block ``{chapters}``, if there is one.

    A notebook brings its own question (``book.question`` in its metadata). The block has those of the pages without a
    notebook, one a line: ``glossary: the terms``. ``root`` is the project's folder.
    """
    block = CHAPTERS.search(text)
    if block is None:
        return text
    questions = dict(line.split(": ", 1) for line in block[1].splitlines())
    lines = ["{.chapters}"]
    for part in yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))["parts"]:
        if "caption" in part:
            lines += [f"* **{part['caption']}**", ""]
            lines += [item(root, page["file"], questions) for page in part["chapters"]]
            lines += [""]
    if questions:
        raise ExtensionError(f"the block {{chapters}} names pages that _toc.yml does not: {', '.join(questions)}")
    return text.replace(block[0], "\n".join(lines))


def item(root: Path, page: str, questions: dict[str, str]) -> str:
    """The line of a page, such as ``book/glossary``, in the list. It takes its question out of ``questions``."""
    folder, _, name = page.partition("/")
    if folder == "book":
        title = (root / f"{page}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        if name not in questions:
            raise ExtensionError(f"the block {{chapters}} of the first page has no line for {page}.md")
        return f"  * [{title}]({name}.md): {questions.pop(name)}"
    path = root / f"{page}.ipynb"
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    number, title = re.match(r"# (?:(\d+)\. )?(.*)", first).groups()  # type: ignore[union-attr]
    question = facts_at(path).question
    if not question:
        raise ExtensionError(f"{page}.ipynb has no question for the first page: write metadata.book.question")
    link = f"[{title}](../{page}.ipynb): {question}"
    return f"  {number}. {link} {{minutes}}`{name}`" if number else f"  * {link}"


def list_the_chapters(app: Sphinx, page: str, text: list[str]) -> None:
    if page == app.config.root_doc:
        text[0] = with_chapters(text[0], Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("cell", Cell)
    app.add_role("minutes", Minutes())
    app.connect("source-read", list_the_chapters)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
