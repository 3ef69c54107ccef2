"""What a page shows of a cell: closed boxes say what is in them, and code that is wrong on purpose is marked.

A cell that is closed by its tags (hide-input, hide-cell, hide-output) gets its box's title here. Of an open cell,
the end that prints and asserts is closed too, as "How this is checked", and what is more than a screen holds.
The notebook, its tests and its script have the same cells as before.
"""

import ast
import re
import textwrap
from typing import Any

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

MISTAKES = {"hangs": "hangs", "wrong-numbers": "wrong numbers, no error", "error": "error"}
TITLES = {"imports": "Imports", "parameters": "Parameters", "measured": "How this was measured"}
CHECKED = "How this is checked"
MOST, SHORTEST = 34, 3  # lines that an open cell shows, and lines of an end that is closed
DEFINES = (ast.FunctionDef, ast.ClassDef)


def source_of(cell: nodes.Element) -> str:
    return next(iter(cell.findall(nodes.literal_block))).astext()


def title_of(cell: nodes.Element, box: nodes.Element, solutions: int) -> str:
    """The title of a closed box of a cell. ``solutions`` counts the page's solutions up to this cell."""
    if "tag_solution" in cell["classes"]:
        return f"Solution {solutions}"
    if "above-input" not in box["classes"] or "tag_hide-cell" in cell["classes"]:
        return "Run it: what happens"
    for tag, title in TITLES.items():
        if f"tag_{tag}" in cell["classes"]:
            return title
    if has_figure(cell):
        return "How this figure is drawn"
    return code_of(source_of(cell))


def defined(source: str) -> list[str]:
    """What a source defines, or the methods that it goes on with."""
    return re.findall(r"^(?:class|def) (\w+)", textwrap.dedent(source), flags=re.M)


def code_of(source: str) -> str:
    names = defined(source)
    return f"Code: {', '.join(names[:4])}{', …' if names[4:] else ''}" if names else CHECKED


def has_figure(cell: nodes.Element) -> bool:
    return any('<figure class="wso' in raw.astext() for raw in cell.findall(nodes.raw))


def shown_lines(source: str) -> int:
    """How many lines of an open cell are shown: those before its end, which begins with a check or a print and defines
    nothing, and of a long cell as many whole statements as a screen holds.
    """
    lines = source.splitlines()
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic
        return len(lines)
    checks = len(body)
    while checks and not isinstance(body[checks - 1], DEFINES):
        checks -= 1
    while checks < len(body) and not tells(body[checks]):
        checks += 1
    whole = [part for statement in body[:checks] for part in [*parts_of(statement), statement]]
    fitting = [part.end_lineno or 0 for part in whole if (part.end_lineno or 0) <= MOST]
    shown = max(fitting, default=body[0].end_lineno or 0 if checks else 0)
    return shown if sum(map(bool, lines[shown:])) >= SHORTEST else len(lines)


def parts_of(statement: ast.stmt) -> list[ast.stmt]:
    """The methods of a class, between which it can be cut."""
    return [part for part in statement.body if isinstance(part, DEFINES)] if isinstance(statement, ast.ClassDef) else []


def tells(statement: ast.stmt) -> bool:
    """Whether a statement asserts or prints."""
    return any(isinstance(node, ast.Assert) or getattr(node, "id", "") == "print" for node in ast.walk(statement))


def closed(title: str, *children: nodes.Node) -> HideCodeCellNode:
    box = HideCodeCellNode(prompt_show=title, prompt_hide=title, classes=["above-input"])
    box.extend(children)
    return box


class ShowCells(SphinxPostTransform):
    """It runs after myst-nb has closed what the tags close."""

    default_priority = 200
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        cells = [node for node in self.document.findall(nodes.container) if node.get("nb_element") == "cell_code"]
        solutions = 0
        for cell in cells:
            solutions += "tag_solution" in cell["classes"]
            boxes = [child for child in cell.children if isinstance(child, HideCodeCellNode)]
            for box in boxes:
                box["prompt_show"] = box["prompt_hide"] = title_of(cell, box, solutions)
            if has_figure(cell) and "tag_hide-input" in cell["classes"]:  # the figure comes first, then its code
                cell.children = [*cell.children[1:], cell.children[0]]
            elif cell.children and cell.children[0].get("nb_element") == "cell_code_source":
                self.close_end(cell)
        for imports in cells:
            if "tag_imports" in imports["classes"]:
                put_behind_a_picture(imports)

    def close_end(self, cell: nodes.Element) -> None:
        """Close the end of an open cell, and say of a mistake that it is one."""
        code = cell.children[0]
        literal = next(iter(code.findall(nodes.literal_block)))
        lines = literal.astext().splitlines()
        shown = shown_lines(literal.astext())
        if not shown:  # the cell only checks
            cell.replace(code, closed(CHECKED, code.deepcopy()))
        elif shown < len(lines):
            start, end = ("\n".join(part).strip("\n") for part in (lines[:shown], lines[shown:]))
            rest = literal.deepcopy()
            for part, text in ((literal, start), (rest, end)):
                part.rawsource, part.children = text, [nodes.Text(text)]
            code.append(closed(code_of(end), rest))
        for tag, words in MISTAKES.items():
            if f"tag_{tag}" in cell["classes"]:
                cell["classes"].append("mistake")
                code.insert(0, nodes.raw("", f'<p class="mistake-badge">{words}</p>', format="html"))


def put_behind_a_picture(imports: nodes.Element) -> None:
    """A chapter opens with its picture, whose cell needs the imports and so stands after them in the notebook."""
    parent = imports.parent
    place = parent.index(imports)
    below = parent[place + 1 : place + 2]
    if below and isinstance(below[0], nodes.container) and has_figure(below[0]):
        parent.remove(imports)
        parent.insert(place + 1, imports)


def visit(self: Any, node: HideCodeCellNode) -> None:
    classes, title = " ".join(node["classes"]), self.encode(node["prompt_show"])
    self.body.append(f'<details class="hide {classes}"><summary>{title}</summary>\n')


def depart(self: Any, node: HideCodeCellNode) -> None:
    self.body.append("</details>\n")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_node(HideCodeCellNode, override=True, html=(visit, depart))
    app.add_post_transform(ShowCells)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
