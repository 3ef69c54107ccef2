"""What the first page shows of the chapters: their list, a cell with its stored output, the time to read a chapter."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from book_cells import shown_lines
from book_chapter import Chapter
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole

from helpers.export.facts import facts_at

WORDS_A_MINUTE = 200  # that a reader reads of the text
LINES_A_MINUTE = 10  # of the code in view
CLOSED_TAGS = {"hide-cell", "hide-input"}
CHAPTERS = re.compile(r"```\{chapters\}\n(?P<questions>.*?)```\n", re.DOTALL)


class Cell(SphinxDirective):
    """``{cell} 00_first_run four``: a cell of a chapter, and what it printed or drew."""

    required_arguments = 2  # the notebook's name and the cell's id
    option_spec = {"output-only": directives.flag}

    def run(self) -> list[nodes.Node]:
        """The cell's code, unless ``:output-only:`` is given, and behind it its figures, or else what it printed."""
        chapter_name, cell_id = self.arguments
        path = Path(self.env.srcdir, "notebooks", f"{chapter_name}.ipynb")
        self.env.note_dependency(str(path))
        chapter = Chapter(path)
        shown: list[nodes.Node] = []
        if "output-only" not in self.options:
            source = chapter.source(cell_id)
            shown.append(nodes.literal_block(source, source, language="python"))
        figures = figures_of(chapter.cell(cell_id))
        if figures:
            return shown + figures
        text = chapter.output(cell_id)
        return [*shown, nodes.literal_block(text, text, language="text", classes=["output"])]


def figures_of(cell: dict[str, Any]) -> list[nodes.Node]:
    """What a notebook's cell drew, as nodes of HTML; none for a cell that only printed."""
    figures: list[nodes.Node] = []
    for output in cell["outputs"]:
        formats = output.get("data", {})  # printed text has none
        html = formats.get("text/html")
        if html:
            figures.append(nodes.raw("", "".join(html), format="html"))
    return figures


# --- the time to read a chapter ---------------------------------------------------------------------------------------


def minutes(path: Path) -> int:
    """How many minutes it takes to read a notebook, rounded to 5, 10, 15 and so on.

    Code that the page shows in closed boxes does not count, because few readers open all of them.
    """
    words = 0
    lines_of_code = 0
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "markdown":
            words += len(source.split())
        elif CLOSED_TAGS.isdisjoint(tags):
            open_lines = source.splitlines()[: shown_lines(source)]
            lines_of_code += len([line for line in open_lines if line.strip()])
    exact_minutes = words / WORDS_A_MINUTE + lines_of_code / LINES_A_MINUTE
    rounded_to_5 = 5 * round(exact_minutes / 5)
    return max(5, rounded_to_5)


class Minutes(SphinxRole):
    """``{minutes}`00_first_run```: the reading time of a chapter."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """The time as a node, and no messages. A change of the notebook makes Sphinx read the page again."""
        path = Path(self.env.srcdir, "notebooks", f"{self.text}.ipynb")
        self.env.note_dependency(str(path))
        text = f"{minutes(path)} minutes"
        time_to_read = nodes.inline(text, text, classes=["minutes"])
        messages: list[nodes.system_message] = []
        return [time_to_read], messages


# --- the list of the chapters -----------------------------------------------------------------------------------------


def with_chapters(text: str, root: Path) -> str:
    """Replace the block ``{chapters}`` in the first page's Markdown by a list of all pages, with a question for each.

    The block looks so, with a line for each page that is no notebook (a notebook has its question in its metadata)::

        ```{chapters}
        glossary: What does this word mean?
        ```

    ``text`` is the page's Markdown; without the block, it is returned unchanged. ``root`` is the project's folder, in
    which _toc.yml lists the pages. Raises ExtensionError for a page without a question, or a question without a page.
    """
    block = CHAPTERS.search(text)
    if block is None:
        return text
    questions = {}  # {name of a page: its question}
    for line in block["questions"].splitlines():
        name, question = line.split(": ", 1)
        questions[name] = question

    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    # The list leaves out parts without a caption, because the first page names their pages elsewhere.
    parts = [part for part in toc["parts"] if "caption" in part]
    check_pages(questions, parts)
    list_of_pages = "\n".join(lines_of_list(parts, questions, root))
    return text.replace(block[0], list_of_pages)


def lines_of_list(parts: list[dict], questions: dict[str, str], root: Path) -> list[str]:
    """The lines of the first page's list of pages, as Markdown: for each part its caption, and a line for each page.

    ``parts`` are those of the table of contents, such as {"caption": "Data", "chapters": [{"file": "book/glossary"}]}.
    ``questions`` has those of the pages that are no notebooks. ``root`` is the project's folder.
    """
    lines = ["{.chapters}"]  # gives the list below it the class `chapters`, for its style
    for part in parts:
        lines += [f"* **{part['caption']}**", ""]
        for entry in part["chapters"]:
            folder, name = entry["file"].split("/")  # notebooks/04_ddp, or book/glossary
            if folder == "notebooks":
                lines.append(line_of_notebook(root, name))
            else:
                lines.append(line_of_page(root, name, questions[name]))
        lines.append("")
    return lines


def check_pages(questions: dict[str, str], parts: list[dict]) -> None:
    """Raise ExtensionError unless there is a question for each page that is no notebook, and for nothing else.

    ``questions`` are {"glossary": "What does this word mean?"}, as the first page gives them. ``parts`` are those of
    the table of contents, such as {"caption": "Data", "chapters": [{"file": "book/glossary"}]}.
    """
    pages = []
    for part in parts:
        for entry in part["chapters"]:
            folder, name = entry["file"].split("/")
            if folder != "notebooks":  # a notebook has its question in its metadata
                pages.append(name)
    for name in pages:
        if name not in questions:
            raise ExtensionError(f"the block {{chapters}} of the first page has no line for book/{name}.md")
    unknown = [name for name in questions if name not in pages]
    if unknown:
        raise ExtensionError(f"the block {{chapters}} names pages that _toc.yml does not: {', '.join(unknown)}")


def line_of_page(root: Path, name: str, question: str) -> str:
    """The line of a page without a notebook in the first page's list: a link with its title, and its question."""
    text = (root / "book" / f"{name}.md").read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    return f"  * [{title}]({name}.md): {question}"  # the first page is in the same folder


def line_of_notebook(root: Path, name: str) -> str:
    """The line of a notebook in the first page's list: a link with its title, its question, and the time to read it.

    ``name`` is that of the notebook's file: a chapter such as 04_ddp, a page that belongs to one such as
    04b_ddp_in_real_projects, or a page in which readers look things up such as decision_guide, whose line has no time.
    ``root`` is the project's folder. Raises ExtensionError if the notebook's metadata has no question.
    """
    path = root / "notebooks" / f"{name}.ipynb"
    question = facts_at(path).question
    if not question:
        raise ExtensionError(f"notebooks/{name}.ipynb has no question for the first page: write metadata.book.question")
    first_cell = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
    title = "".join(first_cell["source"]).partition("\n")[0].removeprefix("# ")
    time_to_read = f" {{minutes}}`{name}`"  # a role of Sphinx, which computes it

    numbered = re.fullmatch(r"(\d+)\. (.*)", title)  # "4. DDP"
    if numbered is not None:
        number, title = numbered.groups()
        return f"  {number}. [{title}](../notebooks/{name}.ipynb): {question}{time_to_read}"
    line = f"  * [{title}](../notebooks/{name}.ipynb): {question}"
    belongs_to_a_chapter = re.match(r"\d\d[a-z]_", name) is not None
    if belongs_to_a_chapter:
        line += time_to_read
    return line


def list_the_chapters(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the list into the first page. Sphinx calls it with a page's text, the one element of ``text``."""
    if page == app.config.root_doc:
        text[0] = with_chapters(text[0], Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("cell", Cell)
    app.add_role("minutes", Minutes())
    app.connect("source-read", list_the_chapters)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
