"""Each page as Markdown beside its HTML, and llms.txt, which lists them: for readers that are programs.

A page's Markdown shows what its HTML shows. So a directive is replaced by what it inserts, and code that the page
closes stands in a ``<details>``, with the title of the page's box.
"""

import ast
import csv
import functools
import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from book_cells import MISTAKES, box_title, shown_lines, title_of_code
from book_chapter import Chapter, root_of
from book_measured import with_measurements
from book_sabotage import summary_of
from book_verified import last_run
from front_page import minutes, with_chapters
from hero import CELL_OF_MISTAKE, CHAPTER, panel_of
from pybtex.database import BibliographyData, parse_file
from sphinx.application import Sphinx

from helpers.planner import form

PROMISE = "Learn distributed PyTorch on your laptop. Each claim is a cell that fails if the claim is false."

# What MyST has and Markdown has not. The first is a block: from ":::{admonition} On GPUs" to the ":::" that ends it.
DIRECTIVE = re.compile(
    r"^(?P<fence>:{3,}|`{3,})\{(?P<name>[\w-]+)\} *(?P<argument>[^\n]*)\n(?P<body>.*?)^(?P=fence)$",
    flags=re.M | re.S,
)
OPTION = re.compile(r":(?P<name>[\w-]+): *(?P<value>.*)")  # in a directive: ":class: note"
ROLE = re.compile(r"\{(?P<name>term|cite|download|minutes)\}`(?P<text>[^`]+)`")  # {term}`rank`
WITH_TARGET = re.compile(r"(?P<text>.*?) *<(?P<target>.*)>", flags=re.S)  # in a role: "ranks <Rank>"
ATTRIBUTES = re.compile(r"^\{\.[\w-]+\}\n", flags=re.M)  # "{.doors}"

LINK_TO_NOTEBOOK = re.compile(r"(\]\((?!https?:)[^)\s]*)\.ipynb")  # "](04_ddp.ipynb", of a link inside the book
# In the HTML of a figure:
CAPTION = re.compile(r"<figcaption>(.*?)</figcaption>", flags=re.S)
LABEL = re.compile(r'aria-label="([^"]*)"')  # what the figure shows, in words


@dataclass(frozen=True)
class Directive:
    """A block of MyST, which begins with ``:::{name} argument``. The table DIRECTIVES has a function for each name."""

    argument: str  # what follows its name: a title, a file's name, or nothing
    options: dict[str, str]  # {"class": "note"} of the line ``:class: note``
    body: str  # the text inside it, as Markdown
    source: Path  # the file of the page that has it


def markdown(source: Path) -> str:
    """A page of the book as plain Markdown. ``source`` is its file, a notebook or a file of Markdown for Sphinx.

    A notebook's page has its text, and the code of its cells with what they printed.
    """
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text_of(with_chapters(text, root_of(source)), source)
    parts = []
    solution_number = 0  # the number of the last solution of an exercise
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(text_of("".join(cell["source"]), source))
            continue
        if "solution" in cell["metadata"].get("tags", []):
            solution_number += 1
        parts += parts_of_cell(cell, solution_number)
    return "\n\n".join(parts) + "\n"


# --- a cell -----------------------------------------------------------------------------------------------------------


def parts_of_cell(cell: dict[str, Any], solution_number: int) -> list[str]:
    """A code cell of a notebook as pieces of Markdown: its code, and what it printed or drew.

    A tag of the cell may say that the page shows a part of it in a box that is closed at first. In Markdown, such a box
    is a ``<details>`` with a title:

    - ``hide-input``: the code is in a box
    - ``hide-output``: what the cell printed or drew is in a box
    - ``hide-cell``: both are in the same box

    ``solution_number`` is for a cell that solves an exercise: its box has the title ``Solution 3``.
    """
    source = "".join(cell["source"])
    tags = cell["metadata"].get("tags", [])
    output_parts = parts_of_outputs(cell["outputs"], tags)
    has_figure = any(part.startswith("*Figure: ") for part in output_parts)
    code_title = box_title(tags, source, hides_output=False, has_figure=has_figure, solution_number=solution_number)

    if "hide-cell" in tags:
        return [details(code_title, fenced(source, "python"), *output_parts)]

    if "hide-output" in tags:
        title = box_title(tags, source, hides_output=True, has_figure=has_figure, solution_number=solution_number)
        output_parts = [details(title, *output_parts)]

    if "hide-input" not in tags:
        return parts_of_open_code(source, tags) + output_parts

    code_box = details(code_title, fenced(source, "python"))
    if has_figure and "hide-output" not in tags:
        return [*output_parts, code_box]  # few readers want the code that draws a figure, so the figure comes first
    return [code_box, *output_parts]


def parts_of_outputs(outputs: list[dict[str, Any]], tags: list[str]) -> list[str]:
    """What a cell with these tags printed and drew, as pieces of Markdown."""
    if "diff" in tags:  # the cell prints a diff of two files, whose lines get the colors of one
        language = "diff"
    else:
        language = "text"
    parts: list[str] = []
    for output in outputs:
        parts += parts_of_output(output, language)
    return parts


def parts_of_open_code(source: str, tags: list[str]) -> list[str]:
    """The code of a cell that the page shows open, as pieces of Markdown.

    Code that is wrong on purpose has a tag which says so, such as ``hangs``: the first piece is then ``*hangs:*``. The
    last lines of an open cell, such as its asserts, may be in a closed box all the same.
    """
    lines = source.splitlines()
    number_of_open_lines = shown_lines(source)
    parts = [f"*{MISTAKES[tag]}:*" for tag in tags if tag in MISTAKES]
    if number_of_open_lines > 0:
        open_code = "\n".join(lines[:number_of_open_lines])
        parts.append(fenced(open_code, "python"))
    if number_of_open_lines < len(lines):
        closed_code = "\n".join(lines[number_of_open_lines:]).strip("\n")
        parts.append(details(title_of_code(closed_code), fenced(closed_code, "python")))
    return parts


def parts_of_output(output: dict[str, Any], language: str) -> list[str]:
    """One output of a notebook's cell, as nbformat stores it, as pieces of Markdown.

    What the cell printed becomes a block of code in ``language``, such as "text" or "diff". A figure is stored as HTML
    with an SVG, which Markdown cannot show, and as a text that says what it shows, ``Figure: …``. So it becomes this
    text, and behind it the figure's caption. The text of a figure with sliders is only its call, so there the HTML's
    label says what it shows.
    """
    if output["output_type"] == "stream":
        return [fenced("".join(output["text"]), language)]
    if output["output_type"] == "error":
        return [fenced(f"{output['ename']}: {output['evalue']}", language)]

    text = "".join(output["data"].get("text/plain", ""))
    html_of_figure = "".join(output["data"].get("text/html", ""))
    if not html_of_figure.startswith('<figure class="wso'):
        return [fenced(text, language)]
    if not text.startswith("Figure: "):
        label = LABEL.search(html_of_figure)
        assert label is not None
        text = f"Figure: {html.unescape(label[1])}"
    parts = [f"*{text}*"]
    caption = CAPTION.search(html_of_figure)
    if caption is not None:
        without_tags = re.sub("<[^>]+>", "", caption[1])
        parts.append(html.unescape(without_tags))
    return parts


def fenced(text: str, language: str) -> str:
    """A block of code. Its fence is longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def details(title: str, *parts: str) -> str:
    """A closed box. Without any parts, nothing."""
    if not parts:
        return ""
    content = "\n\n".join(parts)
    return f"<details><summary>{html.escape(title, quote=False)}</summary>\n\n{content}\n\n</details>"


# --- a page's text ----------------------------------------------------------------------------------------------------


def text_of(text: str, source: Path) -> str:
    """The text of a page, which is MyST, as plain Markdown. ``source`` is the page's file.

    MyST has more than Markdown. A directive is a block that begins with its name, such as ``:::{image}``. A role is a
    part of a line, such as {term}`rank`. A line of its own such as ``{.doors}`` gives the list below it a class.
    """
    text = with_measurements(text, source)
    text = without_directives(text, source)
    text = ROLE.sub(lambda role: text_of_role(role, source), text)
    text = ATTRIBUTES.sub("", text)
    return LINK_TO_NOTEBOOK.sub(r"\1.md", text)  # a chapter's Markdown is beside its page


def without_directives(text: str, source: Path) -> str:
    """The text of a page, with plain Markdown in the place of each directive. ``source`` is the page's file.

    A directive is a block of text with a name, such as ``admonition``, of which Sphinx makes a part of the page::

        :::{admonition} On GPUs
        :class: note
        Text, which may have other directives in it.
        :::
    """
    return DIRECTIVE.sub(lambda block: text_of_directive(block, source), text)


def text_of_directive(block: re.Match[str], source: Path) -> str:
    """One directive as plain Markdown: what the page shows of it. Directives in its text are replaced as well.

    ``block`` is a match of DIRECTIVE in the page's file, ``source``. A directive whose name is not in DIRECTIVES stays
    as it was written.
    """
    markdown_of = DIRECTIVES.get(block["name"])  # one of this file's functions, such as `admonition`
    if markdown_of is None:
        return block[0]  # the whole block
    options, content = options_and_content(block["body"].splitlines())
    body = without_directives("\n".join(content).strip("\n"), source)
    return markdown_of(Directive(block["argument"].strip(), options, body, source))


def options_and_content(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """Divide the lines inside a directive, and return its options and its content.

    The options are the lines at the beginning such as ``:class: note``, which is returned as {"class": "note"}. The
    content is the lines below them.
    """
    options: dict[str, str] = {}
    for position, line in enumerate(lines):
        option = OPTION.fullmatch(line)
        if option is None:
            return options, lines[position:]
        options[option["name"]] = option["value"]
    return options, []


def text_of_role(role: re.Match[str], source: Path) -> str:
    """A role of MyST as plain Markdown. A role is a part of a line that Sphinx replaces, of one of four kinds:

    - {term}`ranks <Rank>`, a link to a term of the glossary: ``ranks``
    - {download}`the script <../scripts/04_ddp.py>`: ``[the script](../scripts/04_ddp.py)``
    - {cite}`li2020ddp,goyal2017`, keys of works that the book cites: their titles
    - {minutes}`04_ddp`, the time to read a notebook: ``20 minutes``

    ``role`` is a match of ROLE in the page's file, ``source``.
    """
    text = role["text"]
    target = text
    with_target = WITH_TARGET.fullmatch(text)  # such as "ranks <Rank>"
    if with_target is not None:
        text = with_target["text"]
        target = with_target["target"]

    if role["name"] == "term":
        return text
    if role["name"] == "download":
        return f"[{text}]({target})"
    if role["name"] == "cite":
        works = bibliography(source).entries
        titles = [title_with_link(works[key.strip()]) for key in text.split(",")]
        return f"({'; '.join(titles)})"
    assert role["name"] == "minutes"
    notebook = root_of(source) / "notebooks" / f"{text}.ipynb"
    return f"{minutes(notebook)} minutes"


def bibliography(source: Path) -> BibliographyData:
    """The works that the book cites. ``source`` is the file of any page."""
    return works_in(root_of(source) / "book" / "references.bib")


@functools.cache
def works_in(path: Path) -> BibliographyData:
    """The works in a file, which is parsed once for all pages."""
    return parse_file(path)


def title_with_link(work: Any) -> str:
    """A work's title, as a link if the work has an address."""
    title = re.sub(r"[{}]", "", work.fields["title"])  # braces keep BibTeX from changing capital letters
    if "url" not in work.fields:
        return title
    return f"[{title}]({work.fields['url']})"


# --- what each directive inserts --------------------------------------------------------------------------------------


def admonition(directive: Directive) -> str:
    """A box with a title, as a quotation that begins with the title."""
    lines = [f"**{directive.argument}**", "", *directive.body.splitlines()]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def dropdown(directive: Directive) -> str:
    """A box that is closed at first, with its title."""
    return details(directive.argument, directive.body)


def literalinclude(directive: Directive) -> str:
    """The directive ``literalinclude``: lines of another file, as a block of code.

    Its argument is the file's path, relative to the page's folder. Its options choose the lines: ``lines: 4-`` begins
    with the fourth line, ``start-at: "def main"`` with the first one that has this text, and ``end-before`` ends before
    the first one that has its text. ``pyobject: name`` takes the class or the function of this name.
    """
    options = directive.options
    text = (directive.source.parent / directive.argument).read_text(encoding="utf-8")
    lines = text.splitlines()
    if "pyobject" in options:
        lines = lines_of_object(options["pyobject"], text)
    if "lines" in options:
        first_number = int(options["lines"].removesuffix("-"))
        lines = lines[first_number - 1 :]
    if "start-at" in options:
        lines = lines[position_of(options["start-at"], lines) :]
    if "end-before" in options:
        lines = lines[: position_of(options["end-before"], lines)]
    return fenced("\n".join(lines), options.get("language", "text"))


def lines_of_object(name: str, text: str) -> list[str]:
    """The lines of a class or a function of a Python file, with its decorators."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            first_line = node.lineno
            if node.decorator_list:
                first_line = node.decorator_list[0].lineno
            return text.splitlines()[first_line - 1 : node.end_lineno]
    raise ValueError(f"the file has no class or function {name}")


def position_of(quoted_text: str, lines: list[str]) -> int:
    """The number, from 0, of the first line that has a text. An option of a page gives the text in quotes."""
    text = quoted_text.strip('"')
    for number, line in enumerate(lines):
        if text in line:
            return number
    raise ValueError(f"no line has the text {text}")


def image(directive: Directive) -> str:
    """What an image shows, in words."""
    return f"*Figure: {directive.options['alt']}*"


def cell(directive: Directive) -> str:
    """A cell of a chapter with what it printed or drew. The argument is ``00_first_run four``: a notebook, a cell's id.

    With the option ``output-only``, the cell's code is left out.
    """
    chapter_name, cell_id = directive.argument.split()
    chapter = Chapter(root_of(directive.source) / "notebooks" / f"{chapter_name}.ipynb")
    shown = chapter.cell(cell_id)
    parts: list[str] = []
    if "output-only" not in directive.options:
        parts.append(fenced(chapter.source(cell_id), "python"))
    for output in shown["outputs"]:
        parts += parts_of_output(output, "text")
    return "\n\n".join(parts)


def hero(directive: Directive) -> str:
    """The first page's moving picture, in words: a training loop with its mistake at each place, and how it ends."""
    chapter = Chapter(root_of(directive.source) / CHAPTER)
    parts = []
    for place in CELL_OF_MISTAKE:
        panel = panel_of(chapter, place, is_repaired=False)
        lines = []
        for line in panel.lines:
            text = line.text
            if line.is_marked and text.endswith("if rank == 0:"):
                text += "  # the mistake"
            lines.append(text)
        code = "\n".join(lines)
        parts.append(f"**{place.capitalize()}:** {panel.frames[-1].says}")
        parts.append(fenced(code, "python"))
        parts.append(fenced(panel.shown_output, "text"))
    return "\n\n".join(parts)


def csv_table(directive: Directive) -> str:
    """The CSV file that the option ``file`` names, as a table. Its first row is the head."""
    path = directive.source.parent / directive.options["file"]
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = []
    for row in [head, ["---"] * len(head), *rows]:
        cells = [text.replace("|", "\\|") for text in row]  # a bar would begin another cell
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def lies(directive: Directive) -> str:
    """How many lies, which are planted bugs, each chapter noticed. The argument is the path of the record."""
    summary = summary_of(directive.source.parent / directive.argument)
    return f"{summary.sentence}\n\n{table(summary.head, summary.rows)}"


def planner(directive: Directive) -> str:
    """The planner's answer to the values with which its form begins. The form itself computes only on the page."""
    return form.answer({}).html


def references(directive: Directive) -> str:
    """The list of the works that the book cites."""
    lines = []
    for work in bibliography(directive.source).entries.values():
        authors = ", ".join(str(person) for person in work.persons.get("author", []))
        year = work.fields.get("year", "no year")
        lines.append(f"* {authors} ({year}). {title_with_link(work)}.")
    return "\n".join(lines)


def as_it_is(directive: Directive) -> str:
    """The text inside the directive alone."""
    return directive.body


DIRECTIVES: dict[str, Callable[[Directive], str]] = {
    "admonition": admonition,
    "bibliography": references,
    "cell": cell,
    "csv-table": csv_table,
    "dropdown": dropdown,
    "glossary": as_it_is,
    "hero": hero,
    "image": image,
    "lies": lies,
    "literalinclude": literalinclude,
    "planner": planner,
}

# --- Sphinx -----------------------------------------------------------------------------------------------------------


def write_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write the Markdown of all pages beside their HTML, and llms.txt, which lists them.

    Sphinx calls it at the end of a build, with the exception if the build failed.
    """
    if exception or app.builder.format != "html":
        return
    first_page = app.config.root_doc
    lines_of_llms_txt = [f"# {app.config.html_title}", "", f"> {PROMISE}", ""]
    for page in [first_page, *app.env.toctree_includes[first_page]]:
        source = Path(app.env.doc2path(page))
        text = f"{markdown(source)}\n{last_run(app, page)}\n"
        Path(app.outdir, f"{page}.md").write_text(text, encoding="utf-8")
        title = app.env.titles[page].astext()
        lines_of_llms_txt.append(f"- [{title}]({page}.md)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines_of_llms_txt) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
