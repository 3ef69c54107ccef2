"""What a page shows of a cell: closed boxes say what is in them, and code that is wrong on purpose is marked.

A cell that is closed by its tags (hide-input, hide-cell, hide-output) gets its box's title here. Of an open cell,
the asserts at its end are closed too, as "How this is checked", and what is more than a screen holds. What prints stays
open, so that each output has its line in view.
The notebook, its tests and its script have the same cells as before.
"""

import ast
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

MISTAKES = {"hangs": "hangs", "wrong-numbers": "wrong numbers, no error", "error": "error"}  # tag: what the mark says
TITLES = {"imports": "Imports", "parameters": "Parameters", "measured": "How this was measured"}  # tag: box's title
CHECKED = "How this is checked"
REST = "The rest of this cell"
MAX_OPEN_LINES = 34  # of a cell: about a screen
MIN_CLOSED_LINES = 3  # fewer are not worth a box
MAX_NAMES = 4  # in a box's title

# --- titles of boxes --------------------------------------------------------------------------------------------------


def has_tag(cell: nodes.Element, tag: str) -> bool:
    """Whether a notebook's cell has a tag. On the page, myst-nb makes a class of each."""
    return f"tag_{tag}" in cell["classes"]


def title_of(cell: nodes.Element, box: nodes.Element, solution_number: int) -> str:
    """The title of ``box``, one of the closed boxes of a cell on the page.

    If the cell solves an exercise, the title has the number ``solution_number``. For other cells it is not used.
    """
    tags = [name.removeprefix("tag_") for name in cell["classes"]]
    hides_output = "above-input" not in box["classes"]  # myst-nb's class of a box that has code
    return box_title(tags, listing_of(cell).astext(), hides_output, has_figure(cell), solution_number)


def box_title(tags: Sequence[str], source: str, hides_output: bool, has_figure: bool, solution_number: int) -> str:
    """The title of a closed box on the page of a notebook, which has the code of a cell, or what the cell printed.

    The title says what is in the box. The first of these cases that applies decides:

    - the cell solves an exercise: "Solution 3", with ``solution_number``, which only this case uses
    - the box has the cell's output (``hides_output``), or the whole cell: "Run it: what happens"
    - one of the cell's tags has a title in TITLES: "Imports"
    - the cell draws a figure (``has_figure``): "How this figure is drawn"
    - otherwise, the title names what the code in ``source`` defines: "Code: train, evaluate"
    """
    if "solution" in tags:
        return f"Solution {solution_number}"
    if hides_output or "hide-cell" in tags:
        return "Run it: what happens"
    for tag, title in TITLES.items():
        if tag in tags:
            return title
    if has_figure:
        return "How this figure is drawn"
    return title_of_code(source)


def title_of_definitions(source: str) -> str | None:
    """The names of the functions and classes in a source: ``Code: train, evaluate``. None if it defines nothing."""
    # The end of a cell may begin inside a class, with indented methods.
    names = re.findall(r"^(?:class|def) (\w+)", textwrap.dedent(source), flags=re.M)
    if not names:
        return None
    shown = names[:MAX_NAMES]
    if len(names) > MAX_NAMES:
        shown.append("…")
    return f"Code: {', '.join(shown)}"


def title_of_code(source: str) -> str:
    """The title of a box with this code: the names of what it defines, or else whether it has checks.

    The code may begin with a magic, such as ``%%ranks``, so it cannot be parsed as Python.
    """
    title = title_of_definitions(source)
    if title is not None:
        return title
    if re.search(r"^ *assert\b", source, flags=re.M):
        return CHECKED
    return "Code"


def title_of_end(source: str) -> str:
    """The title of a box with the last lines of a cell, whose first lines are shown.

    The lines define something, or are checks, or are only the rest of a cell that is too long for a screen.
    """
    title = title_of_definitions(source)
    if title is not None:
        return title
    if contains_assert(ast.parse(source).body[0]):
        return CHECKED
    return REST


def listing_of(cell: nodes.Element) -> nodes.literal_block:
    """The code of a cell on the page. It comes before the outputs, which may be listings too."""
    listings = list(cell.findall(nodes.literal_block))
    return listings[0]


def has_figure(cell: nodes.Element) -> bool:
    """Whether a cell on the page shows a figure of helpers.figures."""
    return any('<figure class="wso' in raw.astext() for raw in cell.findall(nodes.raw))


# --- how much of an open cell is shown --------------------------------------------------------------------------------


def shown_lines(source: str) -> int:
    """How many lines of a cell's code the page shows, counted from its first line. The others go into a closed box.

    For example, 2 of these lines. The others are checks, which a reader need not see::

        def double(x):
            return 2 * x
        assert double(1) == 2
        assert double(2) == 4
        assert double(3) == 6

    The checks are the asserts at the end of a cell, after its last print. If the lines before the checks do not fit on
    a screen, their end goes into the box too.
    """
    lines = source.splitlines()
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # the cell begins with a magic, such as %%ranks
        return len(lines)
    statements_before_checks = statements[: start_of_checks(statements)]
    number_shown = 0  # if the whole cell is a check
    if statements_before_checks:
        number_shown = count_lines_on_screen(statements_before_checks)
    if is_worth_a_box(lines[number_shown:]):
        return number_shown
    return len(lines)


def is_worth_a_box(lines: Sequence[str]) -> bool:
    """Whether these lines, the end of a cell, are enough to close them. Empty lines do not count."""
    lines_with_code = [line for line in lines if line]
    return len(lines_with_code) >= MIN_CLOSED_LINES


def count_lines_on_screen(statements: Sequence[ast.stmt]) -> int:
    """How many lines of a cell that begins with these statements are shown, so that they fit on a screen.

    A cell is cut only between statements, and a class between its methods, so that no function is cut in two.
    """
    possible_cuts = []
    for statement in statements:
        possible_cuts += [end_of(method) for method in methods_of(statement)]
        possible_cuts.append(end_of(statement))
    cuts_on_the_screen = [line for line in possible_cuts if line <= MAX_OPEN_LINES]
    if not cuts_on_the_screen:  # even the first statement is too long for a screen: it is shown whole
        return end_of(statements[0])
    return max(cuts_on_the_screen)


def start_of_checks(statements: Sequence[ast.stmt]) -> int:
    """The index of the statement with which the checks at the end of a cell begin: the first of its last asserts.

    A reader wants to see what made the output that stands below the code. So a check comes after the last statement
    that defines something, prints, or is the cell's value. Returns the number of statements if there is no check.
    """
    if statements and isinstance(statements[-1], ast.Expr):
        return len(statements)  # the cell's value comes last
    after_last_shown = 0
    for index, statement in enumerate(statements):
        if is_definition(statement) or contains_print(statement):
            after_last_shown = index + 1
    for index in range(after_last_shown, len(statements)):
        if contains_assert(statements[index]):
            return index
    return len(statements)


def end_of(statement: ast.stmt) -> int:
    """The number of a statement's last line, from 1. A statement that was parsed has one."""
    assert statement.end_lineno is not None
    return statement.end_lineno


def is_definition(statement: ast.stmt) -> bool:
    """Whether a statement defines a function or a class."""
    return isinstance(statement, (ast.FunctionDef, ast.ClassDef))


def methods_of(statement: ast.stmt) -> list[ast.stmt]:
    """The methods of a class, between which it can be cut; none for another statement."""
    if isinstance(statement, ast.ClassDef):
        return [part for part in statement.body if is_definition(part)]
    return []


def contains_assert(statement: ast.stmt) -> bool:
    """Whether an assert is anywhere in a statement, such as in the body of a loop."""
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def contains_print(statement: ast.stmt) -> bool:
    """Whether a statement prints, wherever the print is in it."""
    return any(isinstance(node, ast.Name) and node.id == "print" for node in ast.walk(statement))


# --- the page ---------------------------------------------------------------------------------------------------------


class ShowCells(SphinxPostTransform):
    """Changes how a page shows its code cells. It runs after myst-nb has put into boxes what the tags close."""

    default_priority = 200  # myst-nb's transform has a lower number, so it runs before this one
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        """Change the code cells of one page, ``self.document``: a tree of nodes, which Sphinx will write as HTML."""
        cells = [node for node in self.document.findall(nodes.container) if node.get("nb_element") == "cell_code"]
        solution_number = 0  # solutions of exercises are numbered from the top of the page on
        for cell in cells:
            if has_tag(cell, "solution"):
                solution_number += 1
            give_titles(cell, solution_number)
            if has_tag(cell, "hide-input") and has_figure(cell):
                put_figure_first(cell)
            if code_is_open(cell):
                mark_mistake(cell)
                close_end(cell)
            if has_tag(cell, "diff"):
                color_diff(cell)
            if has_tag(cell, "imports"):
                put_behind_figure(cell)


def give_titles(cell: nodes.Element, solution_number: int) -> None:
    """Give each closed box of a cell its title, which is the same when the box is open.

    The title of a solution has the number ``solution_number``.
    """
    for child in cell.children:
        if isinstance(child, HideCodeCellNode):
            title = title_of(cell, child, solution_number)
            child["prompt_show"] = title
            child["prompt_hide"] = title


def put_figure_first(cell: nodes.Element) -> None:
    """Move the closed box with a figure's code below the figure. A cell's first child is its code."""
    code_box = cell.children[0]
    outputs = cell.children[1:]
    cell.children = [*outputs, code_box]


def code_is_open(cell: nodes.Element) -> bool:
    """Whether a cell shows its code. If tags close the code, myst-nb has put it into a box, or has left it out."""
    return bool(cell.children) and cell.children[0].get("nb_element") == "cell_code_source"


def mark_mistake(cell: nodes.Element) -> None:
    """Say above code that is wrong on purpose what is wrong with it, if a tag of the open cell says so."""
    code = cell.children[0]
    assert isinstance(code, nodes.Element)
    for tag, text in MISTAKES.items():
        if has_tag(cell, tag):
            cell["classes"].append("mistake")
            code.insert(0, nodes.raw("", f'<p class="mistake-badge">{text}</p>', format="html"))


def color_diff(cell: nodes.Element) -> None:
    """Color what a cell prints as a diff: lines that begin with + or -."""
    listings = list(cell.findall(nodes.literal_block))
    for output in listings[1:]:  # the first one is the code
        output["language"] = "diff"


def close_end(cell: nodes.Element) -> None:
    """Move the last lines of a cell's code into a closed box below the others, if a reader need not see them.

    These are the cell's checks, and the lines that do not fit on a screen, as ``shown_lines`` counts them. ``cell`` is
    the cell's node in the page's tree of nodes, which is changed.
    """
    code = cell.children[0]  # a container with a listing of the code; what the cell printed follows it
    assert isinstance(code, nodes.Element)
    listing = listing_of(code)
    source = listing.astext()
    lines = source.splitlines()
    number_of_open_lines = shown_lines(source)
    if number_of_open_lines == len(lines):
        return  # nothing is to be closed
    if number_of_open_lines == 0:
        # The whole cell is a check, so a box with all of its code takes the place of the code.
        cell.replace(code, closed_box(CHECKED, code.deepcopy()))
        return

    open_text = "\n".join(lines[:number_of_open_lines]).strip("\n")
    closed_text = "\n".join(lines[number_of_open_lines:]).strip("\n")
    closed_listing = listing.deepcopy()  # a copy, so that it has the same attributes, such as its language
    set_text(listing, open_text)
    set_text(closed_listing, closed_text)
    code.append(closed_box(title_of_end(closed_text), closed_listing))


def set_text(listing: nodes.literal_block, text: str) -> None:
    """Replace the text of a listing. Sphinx colours a listing only if its source is the same as its text."""
    listing.rawsource = text
    listing.children = [nodes.Text(text)]


def closed_box(title: str, content: nodes.Node) -> HideCodeCellNode:
    """A closed box with code, as myst-nb makes it for a cell with the tag hide-input."""
    box = HideCodeCellNode(prompt_show=title, prompt_hide=title, classes=["above-input"])
    box.append(content)
    return box


def put_behind_figure(imports: nodes.Element) -> None:
    """Move the cell with a chapter's imports below the next cell if that draws a figure: a chapter opens with it.

    In the notebook the imports come first, because the figure needs them.
    """
    parent = imports.parent
    position = parent.index(imports)
    if position + 1 == len(parent):
        return
    next_cell = parent[position + 1]
    if isinstance(next_cell, nodes.container) and has_figure(next_cell):
        parent.remove(imports)
        parent.insert(position + 1, imports)


def open_box(self: Any, node: HideCodeCellNode) -> None:
    """Write the start of a closed box as HTML. Sphinx calls it with its translator as ``self``."""
    classes = " ".join(node["classes"])
    self.body.append(f'<details class="hide {classes}"><summary>{self.encode(node["prompt_show"])}</summary>\n')


def end_box(self: Any, node: HideCodeCellNode) -> None:
    """Write the end of a closed box as HTML."""
    self.body.append("</details>\n")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_node(HideCodeCellNode, override=True, html=(open_box, end_box))
    app.add_post_transform(ShowCells)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
