"""The moving picture of the first page: four ranks walk through chapter 0's loop with its mistake at three places.

Lines, places, numbers and errors are read from the chapter: from the source of ``train_by_hand`` and from the stored
outputs of the cells that run it. How the ranks walk is computed here, and has to end where these outputs say that the
ranks stood. So the picture cannot show what was not run: the build fails instead. Without JavaScript, or for a reader
who asks for less motion, the picture shows where the ranks end; hero.js lets them walk.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from book_chapter import Chapter
from docutils import nodes
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from helpers.figures.drawing import rank_color

CHAPTER = "notebooks/00_first_run.ipynb"
LOOP_CELL = "by-hand"  # defines train_by_hand
REPAIR_CELL = "repair"  # runs it with each place repaired
RUNS = {  # place of the mistake: the cell that runs it
    "before the loop": "break",
    "in the loop": "break-loop",
    "after the loop": "break-end",
}
RANKS = range(4)
TEMPLATES = Path(__file__).parents[1] / "_templates"

ENDINGS = {  # how the walk ends, which hero.css knows too: what the picture says
    "hang": "All four ranks wait, and nothing moves.",
    "wrong": "Wrong numbers. No error, until the others have ended.",
    "lost": "The others have ended. Rank 0 loses its connection.",
    "right": "Repaired: every rank makes the call, and the sums are right.",
}
MISTAKE = re.compile(r'if place == "(.*)" and rank in callers:')
COLLECTIVE = re.compile(r"dist\.(all_reduce|broadcast)\((\w+)")


@dataclass
class Line:
    """A line of the loop as the picture shows it. The mistake's lines are marked."""

    text: str
    is_marked: bool
    html: str = ""  # with the colours of its syntax


@dataclass
class Frame:
    """At which line each rank is, and what the picture says of it. hero.js and hero.css know the moods."""

    at: list[int]
    says: str = ""
    mood: str = ""  # "", "meet", "mixed", and in the last frame how the walk ended


@dataclass(frozen=True)
class Panel:
    """What the picture shows for a place of the mistake, broken or repaired."""

    name: str  # in its HTML id
    is_repaired: bool
    lines: list[Line]
    frames: list[Frame]
    output: str  # as stored in the chapter

    @property
    def ending(self) -> str:
        return self.frames[-1].mood

    @property
    def last_lines(self) -> list[str]:
        """The line at which each rank ends, or "" for a rank that has ended."""
        texts = [*(line.text.strip() for line in self.lines), ""]
        return [texts[number] for number in self.frames[-1].at]

    @property
    def seconds(self) -> str:
        """How long the ranks waited until launch() ended them."""
        timeout = re.search(r"timeout=(\d+) s", self.output)
        if timeout is None:
            return "0"
        return timeout[1]

    @property
    def shown_output(self) -> str:
        """The stored output without line numbers: they are the chapter's, and the picture leaves lines out."""
        output = re.sub(r": at line \d+ of \w+: ", ": ", self.output)
        return re.sub(r"connection at line \d+ of \w+: ", "connection at: ", output)


# --- the loop ---------------------------------------------------------------------------------------------------------


def lines_of(source: str, place: str, repaired: bool) -> list[Line]:
    """The body of ``train_by_hand`` with the mistake at ``place`` alone, or repaired there.

    In the chapter each mistake is ``if place == "…" and rank in callers:``. The picture shows ``if rank == 0:``; where
    it is repaired, the lines below are called by every rank.
    """
    function = ast.parse(source).body[-1]
    assert isinstance(function, ast.FunctionDef)
    _, _, _, *shown, _ = function.body  # without the docstring, the rank, the weight, and the return
    source_lines = source.splitlines()
    lines: list[Line] = []

    def add(statements: list[ast.stmt], indent: str, marked: bool = False) -> None:
        for statement in statements:
            text = source_lines[statement.lineno - 1].strip()
            mistake = MISTAKE.match(text)
            if mistake is None:
                lines.append(Line(indent + text, marked))
                if isinstance(statement, ast.For):
                    add(statement.body, indent + "    ")
            elif mistake[1] == place:
                assert isinstance(statement, ast.If)
                inner_indent = indent
                if not repaired:
                    lines.append(Line(f"{indent}if rank == 0:", is_marked=True))
                    inner_indent += "    "
                add(statement.body, inner_indent, marked=True)

    add(shown, indent="")
    code = "\n".join(line.text for line in lines)
    highlighted = highlight(code, PythonLexer(stripall=False), HtmlFormatter(nowrap=True)).splitlines()
    for line, html in zip(lines, highlighted, strict=True):
        line.html = Markup(html)
    return lines


def executed_lines(statements: list[ast.stmt], rank: int) -> Iterator[int]:
    """The numbers of the lines that a rank goes through, in their order, from 0 on."""
    for statement in statements:
        yield statement.lineno - 1
        if isinstance(statement, ast.If) and rank == 0:  # the only condition of the loop is `rank == 0`
            yield from executed_lines(statement.body, rank)
        if isinstance(statement, ast.For):
            assert isinstance(statement.iter, ast.Call)
            for _ in range(ast.literal_eval(statement.iter.args[0])):
                yield from executed_lines(statement.body, rank)


# --- how the ranks walk through it ------------------------------------------------------------------------------------


def walk(lines: list[str], output: str) -> list[Frame]:
    """Let four ranks go through the lines. The n-th collective of a rank meets the n-th of each other rank.

    Where different tensors meet, a frame says what rank 0 printed afterwards, which is in ``output``.
    """
    end = len(lines)
    texts = [*lines, ""]  # at its end a rank calls nothing
    statements = ast.parse("\n".join(lines)).body
    paths = [[*executed_lines(statements, rank), end] for rank in RANKS]
    steps = [0 for _ in RANKS]
    gradients = [0 for _ in RANKS]  # how many gradients a rank has sent
    frames: list[Frame] = []
    has_mixed = False  # whether different tensors have met
    while True:
        frame = Frame(at=[paths[rank][steps[rank]] for rank in RANKS])
        frames.append(frame)
        ended = [line == end for line in frame.at]
        calls = [COLLECTIVE.search(texts[line]) for line in frame.at]

        # A rank waits at a collective until all have come to one, or to their ends.
        moving = [rank for rank in RANKS if calls[rank] is None and not ended[rank]]
        if moving:
            for rank in moving:
                steps[rank] += 1
            continue

        collectives = {call[1] for call in calls if call is not None}
        frame.mood = ending_of(ended, collectives, has_mixed)
        if frame.mood:
            frame.says = ENDINGS[frame.mood]
            return frames

        tensors = []
        for rank, call in enumerate(calls):
            assert call is not None
            tensor = call[2]
            if tensor == "gradient":
                tensor = f"gradient {gradients[rank]}"
                gradients[rank] += 1
            tensors.append(tensor)
        if len(set(tensors)) > 1:
            has_mixed = True
            printed = re.search(rf"\[ranks? 0[^]]*\] {tensors[0]}: (\S+)", output)
            assert printed is not None, f"rank 0 printed nothing of its {tensors[0]}"
            frame.mood = "mixed"
            frame.says = f"Rank 0's {tensors[0]} meets the others' {tensors[1]}: {printed[1]}"
        else:
            frame.mood = "meet"
            frame.says = f"Four ranks meet in {collectives.pop()}({tensors[0]})."
        steps = [step + 1 for step in steps]


def ending_of(ended: list[bool], collectives: set[str], has_mixed: bool) -> str:
    """How a walk ends in which no rank moves by itself: one of ENDINGS, or "" if the ranks' collectives can meet."""
    if all(ended):
        return "right"
    if any(ended) and has_mixed:
        return "wrong"
    if any(ended):
        return "lost"
    if len(collectives) > 1:
        return "hang"
    return ""


def panel_of(chapter: Chapter, place: str, repaired: bool) -> Panel:
    """The panel of a place. Raises ExtensionError if the stored output says that the ranks stood at other lines."""
    if repaired:
        repair = chapter.output(REPAIR_CELL)
        after_place = re.search(rf"(?m)^{place}\n((?:\[.*\n?)+)", repair)
        if after_place is None:
            raise ExtensionError(f"The cell {REPAIR_CELL!r} of {CHAPTER} says nothing of the place {place!r}.")
        output = after_place[1].rstrip()
    else:
        output = chapter.output(RUNS[place])
    lines = lines_of(chapter.source(LOOP_CELL), place, repaired)
    frames = walk([line.text for line in lines], output)
    number = list(RUNS).index(place)
    panel = Panel(f"{number}-{int(repaired)}", repaired, lines, frames, output)

    stored = ["" for _ in RANKS]
    reports = re.findall(r"ranks? ([\d-]+)(?::| lost its connection) at line \d+ of \w+: (.*)", output)
    for ranks, line in reports:
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            stored[rank] = line
    if panel.last_lines != stored:
        raise ExtensionError(
            f"The first page's picture of the mistake {place} ends with {panel.ending!r}, {panel.last_lines}. "
            f"The stored output of {CHAPTER} says {stored}:\n{output}"
        )
    return panel


def picture(chapter: Chapter) -> str:
    """The picture as HTML: for each place a panel with the mistake, and one with the repair."""
    panels = [panel_of(chapter, place, repaired) for place in RUNS for repaired in (False, True)]
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    templates.policies["json.dumps_kwargs"] = {"default": vars}  # a frame is written as its fields
    return templates.get_template("hero.html").render(places=list(RUNS), panels=panels, rank_color=rank_color)


class Hero(SphinxDirective):
    """``{hero}``: the picture."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir, CHAPTER)
        self.env.note_dependency(str(path))
        return [nodes.raw("", picture(Chapter(path)), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("hero", Hero)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
