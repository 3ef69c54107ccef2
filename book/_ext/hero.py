"""The moving picture of the first page: four ranks walk through chapter 0's loop with its mistake at three places.

Lines, places, numbers and errors are read from the chapter: from the source of ``train_by_hand`` and from the stored
outputs of the cells that run it. How the ranks walk is computed here, and has to end where these outputs say that the
ranks stood. So the picture cannot show what was not run: the build fails instead. Without JavaScript, or for a reader
who asks for less motion, the picture shows where the ranks end; hero.js lets them walk.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from book_chapter import Chapter
from docutils import nodes
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

HANG = "hang"
WRONG = "wrong"
LOST = "lost"
RIGHT = "right"
ENDINGS = {  # how the walk ends: what the picture says
    HANG: "All four ranks wait, and nothing moves.",
    WRONG: "Wrong numbers. No error, until the others have ended.",
    LOST: "The others have ended. Rank 0 loses its connection.",
    RIGHT: "Repaired: every rank makes the call, and the sums are right.",
}
EVIDENCE = {  # how the walk ends: what the stored output must say
    HANG: "still ran after timeout",
    WRONG: "lost its connection",
    LOST: "lost its connection",
    RIGHT: "[ranks 0-3]",
}
MISTAKE = re.compile(r'if place == "(.*)" and rank in callers:')
COLLECTIVE = re.compile(r"dist\.(all_reduce|broadcast)\((\w+)")


@dataclass(frozen=True)
class Listing:
    """The lines of the loop as the picture shows them. ``marked`` are the numbers of those that the mistake is in."""

    lines: list[str]
    marked: set[int]


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
    repaired: bool
    listing: Listing
    frames: list[Frame]
    output: str  # as stored in the chapter

    @property
    def ending(self) -> str:
        return self.frames[-1].mood


# --- the loop ---------------------------------------------------------------------------------------------------------


def listing_of(source: str, place: str, repaired: bool) -> Listing:
    """The body of ``train_by_hand`` with the mistake at ``place`` alone, or repaired there.

    In the chapter each mistake is ``if place == "…" and rank in callers:``. The picture shows ``if rank == 0:``; where
    it is repaired, the lines below are called by every rank.
    """
    function = ast.parse(source).body[-1]
    assert isinstance(function, ast.FunctionDef)
    _, _, *shown, _ = function.body  # without the docstring, the rank and the weight, and the return
    source_lines = source.splitlines()
    lines: list[str] = []
    marked: set[int] = set()

    def add(line: str, indent: int, mark: bool = False) -> None:
        if mark:
            marked.add(len(lines))
        lines.append(" " * indent + line.strip())

    def add_statements(statements: list[ast.stmt], indent: int, mark: bool = False) -> None:
        for statement in statements:
            line = source_lines[statement.lineno - 1]
            mistake = MISTAKE.match(line.strip())
            if mistake is None:
                add(line, indent, mark)
                if isinstance(statement, ast.For):
                    add_statements(statement.body, indent + 4)
            elif mistake[1] == place:
                assert isinstance(statement, ast.If)
                if repaired:
                    add_statements(statement.body, indent, mark=True)
                else:
                    add("if rank == 0:", indent, mark=True)
                    add_statements(statement.body, indent + 4, mark=True)

    add_statements(shown, indent=0)
    return Listing(lines, marked)


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
    statements = ast.parse("\n".join(lines)).body
    paths = [[*executed_lines(statements, rank), end] for rank in RANKS]
    steps = [0 for _ in RANKS]
    gradients = [0 for _ in RANKS]  # that a rank has sent
    frames: list[Frame] = []
    has_mixed = False  # whether different tensors have met
    while True:
        frame = Frame(at=[paths[rank][steps[rank]] for rank in RANKS])
        frames.append(frame)
        calls = []
        for line in frame.at:
            calls.append(None if line == end else COLLECTIVE.search(lines[line]))
        ended = [line == end for line in frame.at]

        # A rank waits at a collective until all have come to one, or to their ends.
        moving = [rank for rank in RANKS if calls[rank] is None and not ended[rank]]
        if moving:
            for rank in moving:
                steps[rank] += 1
            continue

        collectives = {call[1] for call in calls if call is not None}
        if all(ended):
            frame.mood = RIGHT
        elif any(ended) and has_mixed:
            frame.mood = WRONG
        elif any(ended):
            frame.mood = LOST
        elif len(collectives) > 1:
            frame.mood = HANG
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
            result = printed[1] if printed else "?"
            frame.mood = "mixed"
            frame.says = f"Rank 0's {tensors[0]} meets the others' {tensors[1]}: {result}"
        else:
            frame.mood = "meet"
            frame.says = f"Four ranks meet in {collectives.pop()}({tensors[0]})."
        steps = [step + 1 for step in steps]


def check(place: str, panel: Panel) -> None:
    """Raise ExtensionError unless the stored output says that the ranks stood where they stand in the picture."""
    stored = {}
    reports = re.findall(r"ranks? ([\d-]+)(?::| lost its connection) at line \d+ of \w+: (.*)", panel.output)
    for ranks, line in reports:
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            stored[rank] = line
    shown = {}
    for rank, number in enumerate(panel.frames[-1].at):
        if number < len(panel.listing.lines):
            shown[rank] = panel.listing.lines[number].strip()
    ends_right = panel.ending == RIGHT
    if shown != stored or EVIDENCE[panel.ending] not in panel.output or ends_right != panel.repaired:
        raise ExtensionError(
            f"The first page's picture of the mistake {place} ends with {panel.ending!r}, {shown}. "
            f"The stored output of {CHAPTER} says {stored}:\n{panel.output}"
        )


def panel_of(chapter: Chapter, place: str, repaired: bool) -> Panel:
    if repaired:
        repair = chapter.output(REPAIR_CELL)
        after_place = re.search(rf"(?m)^{place}\n((?:\[.*\n?)+)", repair)
        if after_place is None:
            raise ExtensionError(f"The cell {REPAIR_CELL!r} of {CHAPTER} says nothing of the place {place!r}.")
        output = after_place[1].rstrip()
    else:
        output = chapter.output(RUNS[place])
    listing = listing_of(chapter.source(LOOP_CELL), place, repaired)
    number = list(RUNS).index(place)
    panel = Panel(f"{number}-{int(repaired)}", repaired, listing, walk(listing.lines, output), output)
    check(place, panel)
    return panel


# --- the picture as HTML ----------------------------------------------------------------------------------------------


def panel_html(panel: Panel) -> str:
    last = panel.frames[-1]
    positions = []
    for rank, number in enumerate(last.at):
        if number < len(panel.listing.lines):
            positions.append(f"rank {rank} stands at {panel.listing.lines[number].strip()}")
        else:
            positions.append(f"rank {rank} has ended")
    alt = escape(f"{' '.join(panel.listing.lines)}. At the end, {'; '.join(positions)}.")
    frames = json.dumps([asdict(frame) for frame in panel.frames], separators=(",", ":"))
    frames = escape(frames, quote=False).replace("'", "&#39;")  # the attribute stands in single quotes
    timeout = re.search(r"timeout=(\d+) s", panel.output)
    seconds = timeout[1] if timeout else "0"
    if panel.repaired:
        other_choice = "hero-who-0"
        other = "Break it again: rank 0 alone calls"
    else:
        other_choice = "hero-who-1"
        other = "Repair it: every rank calls"
    return (
        f'<div class="hero-panel hero-{panel.ending}" id="hero-{panel.name}" '
        f"data-frames='{frames}' data-seconds=\"{seconds}\">"
        f'<div class="hero-stage highlight" role="img" aria-label="{alt}">'
        f"{lines_html(panel.listing)}{ranks_html(last)}</div>"
        f'<div class="hero-end"><p class="hero-says" role="status">{last.says}</p>'
        f'<pre class="hero-output">{escape(without_line_numbers(panel.output))}</pre>'
        f'<label class="hero-other" for="{other_choice}">{other}</label></div></div>'
    )


def lines_html(listing: Listing) -> str:
    code = highlight("\n".join(listing.lines), PythonLexer(stripall=False), HtmlFormatter(nowrap=True))
    html = ""
    for number, line in enumerate(code.splitlines()):
        classes = "hero-line"
        if number in listing.marked:
            classes = "hero-line hero-marked"
        html += f'<code class="{classes}">{line}</code>'
    return html + '<code class="hero-line"><span class="hero-ended">ended</span></code>'


def ranks_html(frame: Frame) -> str:
    """A chip for each rank, which the style sheet places beside the rank's line."""
    html = ""
    for rank, line in enumerate(frame.at):
        style = f"--rank:{rank};--line:{line};--colour:{rank_color(rank)}"
        html += f'<span class="hero-rank" style="{style}">{rank}</span>'
    return html


def without_line_numbers(output: str) -> str:
    """The stored output without line numbers: they are the chapter's, and the picture leaves lines out."""
    output = re.sub(r": at line \d+ of \w+: ", ": ", output)
    return re.sub(r"connection at line \d+ of \w+: ", "connection at: ", output)


def choice(name: str, legend: str, values: list[str], checked: int) -> str:
    """Radio buttons, of which one is checked."""
    buttons = ""
    for number, value in enumerate(values):
        attribute = ""
        if number == checked:
            attribute = " checked"
        buttons += (
            f'<label><input type="radio" name="hero-{name}" id="hero-{name}-{number}"{attribute}>'
            f"<span>{value}</span></label>"
        )
    return f"<fieldset><legend>{legend}</legend><div>{buttons}</div></fieldset>"


def picture(chapter: Chapter) -> str:
    """The picture as HTML: for each place a panel with the mistake, and one with the repair."""
    places = re.findall(r'if place == "(.*?)"', chapter.source(LOOP_CELL))
    if places != list(RUNS):
        raise ExtensionError(f"The places in the cell {LOOP_CELL!r} of {CHAPTER} are {places}, not {list(RUNS)}.")
    panels = ""
    for place in places:
        panels += panel_html(panel_of(chapter, place, repaired=False))
        panels += panel_html(panel_of(chapter, place, repaired=True))
    return (
        '<div class="hero"><div class="hero-bar">'
        f"{choice('place', 'The loss is added up', places, checked=1)}"
        f"{choice('who', 'by', ['rank 0 alone', 'every rank'], checked=0)}"
        f'<button type="button" class="hero-run" hidden>Run</button></div>{panels}</div>'
    )


class Hero(SphinxDirective):
    """``{hero}``: the picture."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir, CHAPTER)
        self.env.note_dependency(str(path))
        return [nodes.raw("", picture(Chapter(path)), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("hero", Hero)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
