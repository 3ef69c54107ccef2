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
from book_chapter import Chapter
from book_measured import with_measurements
from book_sabotage import totals
from book_verified import last_run
from front_page import minutes, with_chapters
from hero import RUNS, panel_of
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
    """A page's text as Markdown; of a notebook also its cells, with what they print."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text_of(with_chapters(text, root=source.parents[1]), source)
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
    """What the page shows of a code cell, in its order. ``solution`` is the number of the page's latest solution."""
    source = "".join(cell["source"])
    tags = cell["metadata"].get("tags", [])
    language = "text"
    if "diff" in tags:
        language = "diff"
    outputs = [part for output in cell["outputs"] for part in parts_of_output(output, language)]
    has_figure = any(part.startswith("*Figure: ") for part in outputs)

    def title(hides_output: bool) -> str:
        return box_title(tags, source, hides_output, has_figure, solution)

    if "hide-cell" in tags:
        return [details(title(hides_output=False), fenced(source, "python"), *outputs)]
    if "hide-input" in tags:
        code = details(title(hides_output=False), fenced(source, "python"))
        if "hide-output" in tags:
            return [code, details(title(hides_output=True), *outputs)]
        if has_figure:  # the figure comes first, then its code
            return [*outputs, code]
        return [code, *outputs]

    lines = source.splitlines()
    shown = shown_lines(source)
    parts = [f"*{MISTAKES[tag]}:*" for tag in tags if tag in MISTAKES]
    if shown > 0:
        parts.append(fenced("\n".join(lines[:shown]), "python"))
    if shown < len(lines):
        end = "\n".join(lines[shown:]).strip("\n")
        parts.append(details(title_of_code(end), fenced(end, "python")))
    if "hide-output" in tags:
        return [*parts, details(title(hides_output=True), *outputs)]
    return parts + outputs


def parts_of_output(output: dict[str, Any], language: str) -> list[str]:
    """An output as Markdown. Of a figure it is what the figure shows in words, and its caption."""
    if output["output_type"] == "stream":
        return [fenced("".join(output["text"]), language)]
    if output["output_type"] == "error":
        return [fenced(f"{output['ename']}: {output['evalue']}", language)]
    text = "".join(output["data"].get("text/plain", ""))
    if not text.startswith("Figure: "):
        return [fenced(text, language)]
    caption = CAPTION.search("".join(output["data"].get("text/html", "")))
    parts = [f"*{text}*"]
    if caption is not None:
        parts.append(html.unescape(re.sub("<[^>]+>", "", caption[1])))
    return parts


def fenced(text: str, language: str) -> str:
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
    def replacement(directive: re.Match[str]) -> str:
        options = {}
        lines = directive["body"].splitlines()
        for line in list(lines):
            option = OPTION.fullmatch(line)
            if option is None:
                break
            options[option["name"]] = option["value"]
            del lines[0]
        body = without_directives("\n".join(lines).strip("\n"), source)
        show = DIRECTIVES.get(directive["name"])
        if show is None:
            return directive[0]
        return show(directive["argument"].strip(), options, body, source)

    return DIRECTIVE.sub(replacement, text)


def text_of_role(role: re.Match[str], source: Path) -> str:
    text = role["text"]
    target = text
    with_target = WITH_TARGET.fullmatch(text)
    if with_target is not None:
        text, target = with_target.groups()
    match role["name"]:
        case "download":
            return f"[{text}]({target})"
        case "minutes":
            return f"{minutes(source.parents[1] / 'notebooks' / f'{text}.ipynb')} minutes"
        case "cite":
            works = bibliography(source).entries
            return "(" + "; ".join(title_with_link(works[key.strip()]) for key in text.split(",")) + ")"
    return text


def bibliography(source: Path) -> BibliographyData:
    return works_in(source.parents[1] / "book" / "references.bib")


@functools.cache
def works_in(path: Path) -> BibliographyData:
    return parse_file(path)


def title_with_link(work: Any) -> str:
    title = re.sub(r"[{}]", "", work.fields["title"])
    if "url" not in work.fields:
        return title
    return f"[{title}]({work.fields['url']})"


# --- what each directive inserts --------------------------------------------------------------------------------------


def admonition(title: str, options: dict[str, str], body: str, source: Path) -> str:
    lines = [f"**{title}**", "", *body.splitlines()]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def dropdown(title: str, options: dict[str, str], body: str, source: Path) -> str:
    return details(title, body)


def literalinclude(name: str, options: dict[str, str], body: str, source: Path) -> str:
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
    return f"*Figure: {options['alt']}*"


def cell(names: str, options: dict[str, str], body: str, source: Path) -> str:
    chapter_name, cell_id = names.split()
    shown = Chapter(source.parents[1] / "notebooks" / f"{chapter_name}.ipynb").cell(cell_id)
    outputs = [part for output in shown["outputs"] for part in parts_of_output(output, "text")]
    if "output-only" in options:
        return "\n\n".join(outputs)
    return "\n\n".join([fenced("".join(shown["source"]), "python"), *outputs])


def hero(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The first page's moving picture: the loop with each of its mistakes, and how it ends."""
    chapter = Chapter(source.parents[1] / "notebooks" / "00_first_run.ipynb")
    parts = []
    for place in RUNS:
        panel = panel_of(chapter, place, repaired=False)
        code = "\n".join(line.text for line in panel.lines)
        parts += [f"**{place.capitalize()}:** {panel.frames[-1].says}"]
        parts += [fenced(code, "python"), fenced(panel.shown_output, "text")]
    return "\n\n".join(parts)


def csv_table(title: str, options: dict[str, str], body: str, source: Path) -> str:
    with (source.parent / options["file"]).open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def lies(name: str, options: dict[str, str], body: str, source: Path) -> str:
    sentence, head, rows = totals(source.parent / name)
    return f"{sentence}\n\n{table(head, rows)}"


def planner(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    """The answer to the form's first values. The form itself computes only on the page."""
    return form.answer({}).html


def references(argument: str, options: dict[str, str], body: str, source: Path) -> str:
    lines = []
    for work in bibliography(source).entries.values():
        authors = ", ".join(str(person) for person in work.persons.get("author", []))
        lines.append(f"* {authors} ({work.fields.get('year', 'no year')}). {title_with_link(work)}.")
    return "\n".join(lines)


def as_it_is(argument: str, options: dict[str, str], body: str, source: Path) -> str:
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
