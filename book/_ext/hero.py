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
    "wrong": "Wrong sums: SUMS would be right. No error until the others have ended.",
    "lost": "The others have ended. Rank 0 loses its connection.",
    "right": "Fixed: every rank makes the call, and the sums are right.",
}
# The line that begins the mistake at a place, and a call of a collective with the tensor that it is given.
MISTAKE = re.compile(r'if place == "(?P<place>.*)" and rank in callers:')
COLLECTIVE = re.compile(r"dist\.(?P<name>all_reduce|broadcast)\((?P<tensor>\w+)")


@dataclass
class Line:
    """A line of the loop as the picture shows it. The mistake's lines are marked."""

    text: str
    is_marked: bool
    html: str = ""  # with the colours of its syntax


@dataclass
class Frame:
    """One moment of the picture. hero.js reads the fields, and hero.css has a look for each mood."""

    at: list[int]  # the number of the line, from 0, at which each rank is
    says: str = ""  # the sentence below the picture
    mood: str = ""  # "", "meet", "mixed"; in the last frame one of ENDINGS


@dataclass(frozen=True)
class Panel:
    """What the picture shows for a place of the mistake, broken or repaired. The template hero.html reads it."""

    name: str  # in its HTML id
    is_repaired: bool
    lines: list[Line]
    frames: list[Frame]
    output: str  # as stored in the chapter

    @property
    def ending(self) -> str:
        """How the walk ends, as a key of ENDINGS."""
        return self.frames[-1].mood

    @property
    def last_lines(self) -> list[str]:
        """The line at which each rank ends, or "" for a rank that has ended."""
        texts = [*(line.text.strip() for line in self.lines), ""]
        return [texts[number] for number in self.frames[-1].at]

    @property
    def seconds(self) -> str:
        """How long the ranks waited until launch() ended them, as its error says. "0" if they ended by themselves."""
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
    """The lines of ``train_by_hand`` as the picture shows them, with the mistake at ``place`` or its repair.

    In the chapter the function has a mistake at each of three places, ``if place == "…" and rank in callers:``. The
    picture shows one of them, as ``if rank == 0:``, or its repair: without that line, every rank makes the call below
    it. The other two are left out.
    """
    function = ast.parse(source).body[-1]
    assert isinstance(function, ast.FunctionDef)
    shown = function.body[3:-1]  # without the docstring, the rank and the weight at the top, and the return at the end
    lines = list(shown_statements(shown, source.splitlines(), place, repaired))
    code = "\n".join(line.text for line in lines)
    # All lines are colored at once: what a word is may depend on lines above it.
    colored_lines = highlight(code, PythonLexer(stripall=False), HtmlFormatter(nowrap=True)).splitlines()
    for line, html in zip(lines, colored_lines, strict=True):
        line.html = Markup(html)
    return lines


def shown_statements(
    statements: list[ast.stmt],
    source_lines: list[str],
    place: str,
    repaired: bool,
    indent: str = "",
    is_marked: bool = False,
) -> Iterator[Line]:
    """Yield the lines of these statements and of those inside them, as ``lines_of`` says.

    ``source_lines`` are those of the function. The lines get ``indent`` and, if they belong to the mistake at
    ``place``, the mark.
    """
    for statement in statements:
        text = source_lines[statement.lineno - 1].strip()
        mistake = MISTAKE.match(text)
        if mistake is None:
            yield Line(indent + text, is_marked)
            if isinstance(statement, ast.For):
                yield from shown_statements(statement.body, source_lines, place, repaired, indent + "    ")
            continue

        # An `if` with a mistake. Those at the two other places are left out.
        if mistake["place"] != place:
            continue
        assert isinstance(statement, ast.If)
        indent_of_call = indent  # repaired, the call stands where the `if` stood
        if not repaired:
            yield Line(f"{indent}if rank == 0:", is_marked=True)
            indent_of_call += "    "
        yield from shown_statements(statement.body, source_lines, place, repaired, indent_of_call, is_marked=True)


def executed_lines(statements: list[ast.stmt], rank: int) -> Iterator[int]:
    """Yield the numbers, from 0, of the lines that a rank executes, in the order in which it does.

    The statements are those of the picture. They have no condition but ``rank == 0``, and a loop is over ``range(N)``.
    """
    for statement in statements:
        yield statement.lineno - 1
        if isinstance(statement, ast.If) and rank == 0:
            yield from executed_lines(statement.body, rank)
        if isinstance(statement, ast.For):
            assert isinstance(statement.iter, ast.Call)
            [number_of_rounds] = statement.iter.args
            for _ in range(ast.literal_eval(number_of_rounds)):
                yield from executed_lines(statement.body, rank)


# --- how the ranks walk through it ------------------------------------------------------------------------------------


def walk(lines: list[str], output: str) -> list[Frame]:
    """Simulate how four ranks go through the lines, and return a frame for each of their steps.

    A rank waits at a collective until all ranks have come to one. As in gloo, the n-th collective of a rank then meets
    the n-th one of each other rank, whatever their tensors are. ``output`` is what the chapter printed, and the frames
    quote it.
    """
    end = len(lines)
    texts = [*lines, ""]  # a rank that has come to its end calls nothing
    statements = ast.parse("\n".join(lines)).body
    paths = [[*executed_lines(statements, rank), end] for rank in RANKS]
    steps = [0 for _ in RANKS]  # each rank's position in its path
    sent_gradients = [0 for _ in RANKS]
    frames: list[Frame] = []
    has_mixed = False  # whether different tensors have met
    while True:
        frame = Frame(at=[paths[rank][steps[rank]] for rank in RANKS])
        frames.append(frame)
        ended = [line == end for line in frame.at]
        calls = [COLLECTIVE.search(texts[line]) for line in frame.at]
        moving = [rank for rank in RANKS if calls[rank] is None and not ended[rank]]
        if moving:
            for rank in moving:
                steps[rank] += 1
            continue

        collectives = {call["name"] for call in calls if call is not None}
        frame.mood = ending_of(ended, collectives, has_mixed)
        if frame.mood:
            frame.says = ENDINGS[frame.mood]
            return frames

        # No rank has ended, and all of them make the same call: it takes place.
        tensors = []
        for rank, call in enumerate(calls):
            assert call is not None
            tensor = call["tensor"]
            if tensor == "gradient":  # each rank sends one in each round of the loop
                tensor = f"gradient {sent_gradients[rank]}"
                sent_gradients[rank] += 1
            tensors.append(tensor)
        if len(set(tensors)) > 1:
            has_mixed = True
            frame.mood = "mixed"
            frame.says = (
                f"Rank 0's {tensors[0]} meets the others' {tensors[1]}: {printed_of_rank_0(tensors[0], output)}"
            )
        else:
            frame.mood = "meet"
            frame.says = f"Four ranks meet in {collectives.pop()}({tensors[0]})."
        steps = [step + 1 for step in steps]


def printed_of_rank_0(tensor: str, output: str) -> str:
    """The value that rank 0 printed for a tensor: ``3.2`` of the line ``[rank 0] gradient 1: 3.2``."""
    printed = re.search(rf"\[ranks? 0[^]]*\] {tensor}: (\S+)", output)
    assert printed is not None, f"rank 0 printed nothing of its {tensor}"
    return printed[1]


def ending_of(ended: list[bool], collectives: set[str], has_mixed: bool) -> str:
    """How the walk ends, as a key of ENDINGS, when each rank waits or has ended; "" if their collectives can meet.

    ``collectives`` are the names of those at which ranks wait.
    """
    if all(ended):
        return "right"
    if any(ended) and has_mixed:
        return "wrong"
    if any(ended):
        return "lost"
    if len(collectives) > 1:
        return "hang"
    return ""


def output_of_repair(chapter: Chapter, place: str) -> str:
    """What the ranks print if every rank makes the call at this place. Raises ExtensionError if it is not stored."""
    repair = chapter.output(REPAIR_CELL)
    after_place = re.search(rf"(?m)^{place}\n((?:\[.*\n?)+)", repair)
    if after_place is None:
        raise ExtensionError(f"The cell {REPAIR_CELL!r} of {CHAPTER} says nothing of the place {place!r}.")
    return after_place[1].rstrip()


def right_sums(chapter: Chapter, place: str) -> str:
    """The sums of the repaired loop in the order in which they are printed, each once: ``4, 400 and 200``."""
    printed = re.findall(r": ([\d.]+)$", output_of_repair(chapter, place), flags=re.M)
    *first, last = dict.fromkeys(f"{float(number):.0f}" for number in printed)
    return f"{', '.join(first)} and {last}"


def panel_of(chapter: Chapter, place: str, repaired: bool) -> Panel:
    """The panel of a place. Raises ExtensionError if the stored output says that the ranks stood at other lines."""
    if repaired:
        output = output_of_repair(chapter, place)
    else:
        output = chapter.output(RUNS[place])
    lines = lines_of(chapter.source(LOOP_CELL), place, repaired)
    number = list(RUNS).index(place)
    panel = Panel(
        name=f"{number}-{int(repaired)}",
        is_repaired=repaired,
        lines=lines,
        frames=walk([line.text for line in lines], output),
        output=output,
    )
    last_frame = panel.frames[-1]
    last_frame.says = last_frame.says.replace("SUMS", right_sums(chapter, place))
    stored_lines = last_lines_in(output)
    if panel.last_lines != stored_lines:
        raise ExtensionError(
            f"The first page's picture of the mistake {place} ends with {panel.ending!r}, {panel.last_lines}. "
            f"The stored output of {CHAPTER} says {stored_lines}:\n{output}"
        )
    return panel


def last_lines_in(output: str) -> list[str]:
    """The line at which each rank ended, as an error of ``launch`` says it, or "" for a rank that it does not name."""
    last_lines = ["" for _ in RANKS]
    reports = re.findall(r"ranks? ([\d-]+)(?::| lost its connection) at line \d+ of \w+: (.*)", output)
    for ranks, line in reports:  # ranks: "2" or "1-3"
        first, _, last = ranks.partition("-")
        if last == "":
            last = first
        for rank in range(int(first), int(last) + 1):
            last_lines[rank] = line
    return last_lines


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
