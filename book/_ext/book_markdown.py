"""Each page as Markdown beside its HTML, and llms.txt, which lists them: for readers that are programs.

A page's Markdown shows what its HTML shows. So a directive is replaced by what it inserts, and code that the page
closes stands in a ``<details>``, with the title of the page's box.
"""

import csv
import functools
import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from book_cells import MISTAKES, box_title, shown_lines, title_of_code
from book_chapter import Chapter, root_of
from book_measured import with_measurements
from book_sabotage import totals
from book_verified import last_run
from front_page import minutes, with_chapters
from hero import CHAPTER, RUNS, panel_of
from pybtex.database import BibliographyData, parse_file
from sphinx.application import Sphinx

from helpers.planner import form

PROMISE = "Learn distributed PyTorch on your laptop. Each claim is a cell that fails if the claim is false."
DIRECTIVE = re.compile(
    r"^(?P<fence>:{3,}|`{3,})\{(?P<name>[\w-]+)\} *(?P<argument>[^\n]*)\n(?P<body>.*?)^(?P=fence)$",
    flags=re.M | re.S,
)
OPTION = re.compile(r":(?P<name>[\w-]+): *(?P<value>.*)")
ROLE = re.compile(r"\{(?P<name>term|cite|download|minutes)\}`(?P<text>[^`]+)`")
WITH_TARGET = re.compile(r"(?P<text>.*?) *<(?P<target>.*)>", flags=re.S)
ATTRIBUTES = re.compile(r"^\{\.[\w-]+\}\n", flags=re.M)
LINK_TO_NOTEBOOK = re.compile(r"(\]\((?!https?:)[^)\s]*)\.ipynb")
CAPTION = re.compile(r"<figcaption>(.*?)</figcaption>", flags=re.S)


def markdown(source: Path) -> str:
    """A page's text as Markdown; of a notebook also its cells, with what they print. ``source`` is the page's file."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text_of(with_chapters(text, root_of(source)), source)
    parts = []
    solution = 0
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(text_of("".join(cell["source"]), source))
            continue
        if "solution" in cell["metadata"].get("tags", []):
            solution += 1
        parts += parts_of_cell(cell, solution)
    return "\n\n".join(parts) + "\n"


# --- a cell -----------------------------------------------------------------------------------------------------------


def parts_of_cell(cell: dict[str, Any], solution: int) -> list[str]:
    """What the page shows of a code cell, in its order, as pieces of Markdown.

    ``solution`` is the number of the page's latest solution.
    """
    source = "".join(cell["source"])
    tags = cell["metadata"].get("tags", [])
    language = "text"
    if "diff" in tags:
        language = "diff"
    outputs = [part for output in cell["outputs"] for part in parts_of_output(output, language)]
    has_figure = any(part.startswith("*Figure: ") for part in outputs)
    title_of_code_box = box_title(tags, source, hides_output=False, has_figure=has_figure, solution=solution)
    title_of_output_box = box_title(tags, source, hides_output=True, has_figure=has_figure, solution=solution)

    if "hide-cell" in tags:
        return [details(title_of_code_box, fenced(source, "python"), *outputs)]
    if "hide-input" in tags:
        code = details(title_of_code_box, fenced(source, "python"))
        if "hide-output" in tags:
            return [code, details(title_of_output_box, *outputs)]
        if has_figure:  # the figure comes first, then its code
            return [*outputs, code]
        return [code, *outputs]
    parts = parts_of_open_code(source, tags)
    if "hide-output" in tags:
        return [*parts, details(title_of_output_box, *outputs)]
    return parts + outputs


def parts_of_open_code(source: str, tags: list[str]) -> list[str]:
    """What the page shows of code that no tag closes: its mark, the open lines, and the others in a closed box."""
    lines = source.splitlines()
    shown = shown_lines(source)
    parts = [f"*{MISTAKES[tag]}:*" for tag in tags if tag in MISTAKES]
    if shown > 0:
        parts.append(fenced("\n".join(lines[:shown]), "python"))
    if shown < len(lines):
        end = "\n".join(lines[shown:]).strip("\n")
        parts.append(details(title_of_code(end), fenced(end, "python")))
    return parts


def parts_of_output(output: dict[str, Any], language: str) -> list[str]:
    """An output of a cell as pieces of Markdown. ``language`` is that of what the cell prints.

    A figure is an SVG, which Markdown does not show. Its text for terminals, ``Figure: …``, says what it shows in
    words, and its HTML has a caption. These two take its place.
    """
    if output["output_type"] == "stream":
        return [fenced("".join(output["text"]), language)]
    if output["output_type"] == "error":
        return [fenced(f"{output['ename']}: {output['evalue']}", language)]
    text = "".join(output["data"].get("text/plain", ""))
    if not text.startswith("Figure: "):
        return [fenced(text, language)]
    parts = [f"*{text}*"]
    page = "".join(output["data"].get("text/html", ""))
    caption = CAPTION.search(page)
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
    """MyST as plain Markdown: without directives, roles and attributes. ``source`` is the page's file."""
    text = with_measurements(text, source)
    text = without_directives(text, source)
    text = ROLE.sub(lambda role: text_of_role(role, source), text)
    text = ATTRIBUTES.sub("", text)
    return LINK_TO_NOTEBOOK.sub(r"\1.md", text)


def without_directives(text: str, source: Path) -> str:
    """The text with what each directive inserts in its place, also inside of others.

    A directive that DIRECTIVES does not have stays as it was written.
    """

    def replacement(directive: re.Match[str]) -> str:
        show = DIRECTIVES.get(directive["name"])
        if show is None:
            return directive[0]
        options, content = options_and_content(directive["body"].splitlines())
        body = without_directives("\n".join(content).strip("\n"), source)
        return show(directive["argument"].strip(), options, body, source)

    return DIRECTIVE.sub(replacement, text)


def options_and_content(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    """Divide the lines inside a directive: its options, which come first (``:name: value``), and the other lines."""
    options: dict[str, str] = {}
    for position, line in enumerate(lines):
        option = OPTION.fullmatch(line)
        if option is None:
            return options, lines[position:]
        options[option["name"]] = option["value"]
    return options, []


def text_of_role(role: re.Match[str], source: Path) -> str:
    """A role as Markdown: of {term}`rank <Rank>` the word rank. ``role`` is a match of ROLE in the file ``source``."""
    text = role["text"]
    target = text
    with_target = WITH_TARGET.fullmatch(text)
    if with_target is not None:
        text = with_target["text"]
        target = with_target["target"]
    match role["name"]:
        case "download":
            return f"[{text}]({target})"
        case "minutes":
            notebook = root_of(source) / "notebooks" / f"{text}.ipynb"
            return f"{minutes(notebook)} minutes"
        case "cite":
            works = bibliography(source).entries
            titles = [title_with_link(works[key.strip()]) for key in text.split(",")]
            return f"({'; '.join(titles)})"
    return text  # of a term


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
#
# All these functions have the same four arguments, for the table DIRECTIVES: what stands on the directive's first line
# (a title, a file's name, or nothing), its options, the text inside it as Markdown, and the page's file.


def admonition(title: str, options: dict[str, str], body: str, source: Path) -> str:
    """A box: a quotation that begins with the title."""
    lines = [f"**{title}**", "", *body.splitlines()]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def dropdown(title: str, options: dict[str, str], body: str, source: Path) -> str:
    """A closed box."""
    return details(title, body)


def literalinclude(name: str, options: dict[str, str], body: str, source: Path) -> str:
    """The lines of a file that the options choose, as a block of code. ``name`` is its path from the page's folder."""
    lines = (source.parent / name).read_text(encoding="utf-8").splitlines()
    if "lines" in options:  # "4-": from the fourth on
        lines = lines[int(options["lines"].removesuffix("-")) - 1 :]
    if "start-at" in options:
        lines = lines[position_of(options["start-at"], lines) :]
    if "end-before" in options:
        lines = lines[: position_of(options["end-before"], lines)]
    return fenced("\n".join(lines), options.get("language", "text"))


def position_of(quoted_text: str, lines: list[str]) -> int:
    """The number of the first line that has the text, counted from 0."""
    text = quoted_text.strip('"')
    return next(number for number, line in enumerate(lines) if text in line)


def image(name: str, options: dict[str, str], body: str, source: Path) -> str:
    """What an image shows, in words."""
    return f"*Figure: {options['alt']}*"


def cell(names: str, options: dict[str, str], body: str, source: Path) -> str:
    """A cell of a chapter: ``names`` are the notebook's name and the cell's id."""
    chapter_name, cell_id = names.split()
    shown = Chapter(root_of(source) / "notebooks" / f"{chapter_name}.ipynb").cell(cell_id)
    outputs = [part for output in shown["outputs"] for part in parts_of_output(output, "text")]
    if "output-only" in options:
        return "\n\n".join(outputs)
    return "\n\n".join([fenced("".join(shown["source"]), "python"), *outputs])


def hero(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The first page's moving picture: the loop with each of its mistakes, and how it ends."""
    chapter = Chapter(root_of(source) / CHAPTER)
    parts = []
    for place in RUNS:
        panel = panel_of(chapter, place, repaired=False)
        code = "\n".join(line.text for line in panel.lines)
        parts.append(f"**{place.capitalize()}:** {panel.frames[-1].says}")
        parts.append(fenced(code, "python"))
        parts.append(fenced(panel.shown_output, "text"))
    return "\n\n".join(parts)


def csv_table(title: str, options: dict[str, str], body: str, source: Path) -> str:
    """The file that the option ``file`` names, as a table. Its first row is the head."""
    with (source.parent / options["file"]).open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = []
    for row in [head, ["---"] * len(head), *rows]:
        cells = [text.replace("|", "\\|") for text in row]  # a bar would begin another cell
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def lies(name: str, options: dict[str, str], body: str, source: Path) -> str:
    """How many lies, which are planted faults, each chapter noticed. ``name`` is the path of the record."""
    sentence, head, rows = totals(source.parent / name)
    return f"{sentence}\n\n{table(head, rows)}"


def planner(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The answer to the form's first values. The form itself computes only on the page."""
    return form.answer({}).html


def references(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The list of the works that the book cites."""
    lines = []
    for work in bibliography(source).entries.values():
        authors = ", ".join(str(person) for person in work.persons.get("author", []))
        lines.append(f"* {authors} ({work.fields.get('year', 'no year')}). {title_with_link(work)}.")
    return "\n".join(lines)


def as_it_is(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The text inside the directive alone."""
    return body


DIRECTIVES: dict[str, Callable[[str, dict[str, str], str, Path], str]] = {
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
    """Write the Markdown of all pages beside their HTML, and llms.txt. Sphinx calls it at the end of a build."""
    if exception or app.builder.format != "html":
        return
    lines = [f"# {app.config.html_title}", "", f"> {PROMISE}", ""]
    for page in [app.config.root_doc, *app.env.toctree_includes[app.config.root_doc]]:
        text = markdown(Path(app.env.doc2path(page)))
        Path(app.outdir, f"{page}.md").write_text(f"{text}\n{last_run(app, page)}\n", encoding="utf-8")
        lines.append(f"- [{app.env.titles[page].astext()}]({page}.md)")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
