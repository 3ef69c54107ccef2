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
from enum import StrEnum
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
CELL_OF_MISTAKE = {  # place of the mistake: the cell that runs the loop with the mistake there
    "before the loop": "break",
    "in the loop": "break-loop",
    "after the loop": "break-end",
}
RANKS = range(4)
TEMPLATES = Path(__file__).parents[1] / "_templates"


class Ending(StrEnum):
    """How the ranks' walk through the loop ends. hero.css has a look for each of these words."""

    HANG = "hang"  # all ranks wait, in different collectives
    WRONG = "wrong"  # before some ranks ended, and the others lost them, a collective added up different tensors
    LOST = "lost"  # some ranks have ended, and the others wait for them in a collective
    RIGHT = "right"  # all ranks have ended


LAST_SENTENCE = {  # what the picture says at the end; {sums} are the sums that would be right
    Ending.HANG: "All four ranks wait for each other, until a timeout ends them.",
    Ending.WRONG: "The sums should be {sums}. No error is raised until the other ranks have ended.",
    Ending.LOST: "The other ranks have ended, so rank 0 loses its connection.",
    Ending.RIGHT: "Fixed: every rank makes the call, and the sums are right.",
}
# The line that begins a mistake: ``if place == "in the loop" and rank in callers:``
MISTAKE = re.compile(r'if place == "(?P<place>.*)" and rank in callers:')
# A call of a collective, with the tensor that it is given: ``dist.all_reduce(loss``
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
    # "meet" if a collective takes place, "mixed" if the ranks give it different tensors; in the last frame an Ending
    mood: str = ""


@dataclass
class Walker:
    """One of the four ranks, on its way through the lines of the picture."""

    lines: list[str]  # all lines of the picture
    path: list[int]  # the numbers of the lines that the rank executes, in order; at the end the number after the last
    step: int = 0  # its position in ``path``
    sent_gradients: int = 0

    @property
    def line(self) -> int:
        """The number of the line at which the rank is; the number after the last one if it has ended."""
        return self.path[self.step]

    @property
    def has_ended(self) -> bool:
        return self.line == len(self.lines)

    @property
    def waits(self) -> bool:
        """Whether the rank is at a collective, which it leaves only when all other ranks have come to one."""
        return self.call is not None

    @property
    def call(self) -> re.Match[str] | None:
        """The collective at which the rank waits, as a match of COLLECTIVE; None for a rank that does not wait."""
        if self.has_ended:
            return None
        return COLLECTIVE.search(self.lines[self.line])

    def send(self) -> str:
        """The name of the tensor that the rank gives to the collective at which it waits: ``loss``, ``gradient 1``.

        A gradient has a number, because the rank sends one in each round of the loop.
        """
        assert self.call is not None
        tensor = self.call["tensor"]
        if tensor == "gradient":
            tensor = f"gradient {self.sent_gradients}"
            self.sent_gradients += 1
        return tensor


@dataclass(frozen=True)
class Panel:
    """What the picture shows for a place of the mistake, broken or repaired. The template hero.html reads it."""

    name: str  # in its HTML id
    is_repaired: bool
    lines: list[Line]
    frames: list[Frame]
    output: str  # as stored in the chapter

    @property
    def ending(self) -> Ending:
        """How the walk ends."""
        return Ending(self.frames[-1].mood)

    @property
    def last_lines(self) -> list[str]:
        """The code of the line at which each rank ends, or "" for a rank that has ended."""
        last_lines = []
        for number in self.frames[-1].at:
            if number == len(self.lines):  # where the walk puts a rank that has ended
                last_lines.append("")
            else:
                last_lines.append(self.lines[number].text.strip())
        return last_lines

    @property
    def seconds(self) -> str:
        """How long the ranks waited until ``launch``, with which the chapter starts ranks, ended them.

        Its error says so: ``4 of 4 ranks still ran after timeout=2 s``. "0" if the ranks ended by themselves.
        """
        timeout = re.search(r"timeout=(\d+) s", self.output)
        if timeout is None:
            return "0"
        return timeout[1]

    @property
    def shown_output(self) -> str:
        """The stored output without line numbers: they are the chapter's, and the picture leaves lines out.

        So ``rank 0: at line 7 of train_by_hand: dist.all_reduce(loss)`` becomes ``rank 0: dist.all_reduce(loss)``, and
        ``rank 0 lost its connection at line 13 of train_by_hand: …`` becomes ``rank 0 lost its connection at: …``.
        """
        output = re.sub(r": at line \d+ of \w+: ", ": ", self.output)
        return re.sub(r"connection at line \d+ of \w+: ", "connection at: ", output)


# --- the loop ---------------------------------------------------------------------------------------------------------


def lines_of(source: str, mistake_place: str, is_repaired: bool) -> list[Line]:
    """The lines of code that the animation on the book's first page shows, with their syntax highlighted.

    In the animation, four ranks go through a training loop of chapter 0, the function ``train_by_hand``. ``source`` is
    its code. It has the same mistake at three places, of which its argument ``place`` chooses one::

        if place == "in the loop" and rank in callers:
            dist.all_reduce(loss)

    The animation shows only the mistake at ``mistake_place``, as ``if rank == 0:`` with the call below it. If
    ``is_repaired``, it shows the call alone, which every rank then makes.
    """
    function = ast.parse(source).body[-1]
    assert isinstance(function, ast.FunctionDef)
    # Not shown are the docstring, ``rank = dist.get_rank()`` and ``weight = torch.tensor(0.0)`` at the top, and the
    # statement at the end, which is a ``return``.
    shown_statements = function.body[3:-1]
    lines = lines_of_statements(shown_statements, source.splitlines(), mistake_place, is_repaired)

    # All lines are highlighted together, because the color of a word may depend on the lines above it.
    code = "\n".join(line.text for line in lines)
    highlighted_lines = highlight(code, PythonLexer(stripall=False), HtmlFormatter(nowrap=True)).splitlines()
    for line, html in zip(lines, highlighted_lines, strict=True):
        line.html = Markup(html)
    return lines


def lines_of_statements(
    statements: list[ast.stmt],
    source_lines: list[str],
    mistake_place: str,
    is_repaired: bool,
    indent: str = "",
) -> list[Line]:
    """The lines that the first page's animation shows of these statements of a training loop, and of those inside them.

    The loop has the same mistake at several places, and the animation shows only the one at ``mistake_place``. If that
    is "in the loop", these lines are shown so::

        for step in range(2):                               # shown as it is
            if place == "in the loop" and rank in callers:  # the mistake that is shown: see `lines_of_mistake`
                dist.all_reduce(loss)
        if place == "after the loop" and rank in callers:   # another mistake: left out, with the call below it
            dist.all_reduce(loss)

    ``source_lines`` are all lines of the file that ``statements`` were parsed from. Each line of the result begins with
    ``indent``.
    """
    lines: list[Line] = []
    for statement in statements:
        first_line = source_lines[statement.lineno - 1].strip()
        mistake = MISTAKE.match(first_line)
        if mistake is not None:
            is_shown = mistake["place"] == mistake_place
            if is_shown:
                assert isinstance(statement, ast.If)
                lines += lines_of_mistake(statement, source_lines, is_repaired, indent)
            continue

        lines.append(Line(indent + first_line, is_marked=False))
        if isinstance(statement, ast.For):
            body_indent = indent + "    "
            lines += lines_of_statements(statement.body, source_lines, mistake_place, is_repaired, body_indent)
    return lines


def lines_of_mistake(mistake: ast.If, source_lines: list[str], is_repaired: bool, indent: str) -> list[Line]:
    """The lines that the first page's animation shows of the mistake, marked as belonging to it.

    The mistake is an ``if`` that only some ranks enter, with calls that all ranks should make. It is shown as
    ``if rank == 0:`` with these calls below it. If ``is_repaired``, only the calls are shown.
    """
    lines: list[Line] = []
    if is_repaired:
        indent_of_calls = indent
    else:
        lines.append(Line(f"{indent}if rank == 0:", is_marked=True))
        indent_of_calls = indent + "    "
    for call in mistake.body:  # each is on one line, such as ``dist.all_reduce(loss)``
        code = source_lines[call.lineno - 1].strip()
        lines.append(Line(indent_of_calls + code, is_marked=True))
    return lines


def executed_lines(statements: list[ast.stmt], rank: int) -> Iterator[int]:
    """Yield the numbers, from 0, of the lines that a rank would execute, in the order in which it would.

    Nothing is run. The statements are those that the first page's animation shows, so they are of three kinds: a
    condition, which is always ``if rank == 0:`` without an ``else``; a loop, which always says its number of rounds,
    such as ``for step in range(2):``; and statements of one line.
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
    """Simulate how four ranks execute these lines of Python, and return a frame of the animation for each step.

    In each step of the simulation, one of three things happens:

    - Each rank that is at an ordinary line goes on to its next line.
    - If there is no such rank, and all four wait at the same collective, such as ``dist.all_reduce(loss)``, the
      collective takes place, and all go on. As in gloo, this is also so if the ranks call it with different tensors.
    - Otherwise no rank can go on, and the simulation ends. The last frame says how, as its mood: see Ending.

    ``output`` is what the chapter printed when it ran this code. If ranks called a collective with different tensors,
    the frame quotes a wrong sum from it. The last frame has no sentence yet.
    """
    statements = ast.parse("\n".join(lines)).body
    walkers = []
    for rank in RANKS:
        path = [*executed_lines(statements, rank), len(lines)]
        walkers.append(Walker(lines, path))
    frames: list[Frame] = []
    has_mixed_tensors = False  # whether a collective has added up different tensors
    while True:
        frame = Frame(at=[walker.line for walker in walkers])
        frames.append(frame)

        running = [walker for walker in walkers if not walker.waits and not walker.has_ended]
        if running:
            for walker in running:
                walker.step += 1
            continue

        ending = ending_of(walkers, has_mixed_tensors)
        if ending is not None:
            frame.mood = ending
            return frames

        tensors = [walker.send() for walker in walkers]  # the name of each rank's tensor, such as "loss"
        if len(set(tensors)) > 1:
            has_mixed_tensors = True
            frame.mood = "mixed"
            wrong_sum = printed_of_rank_0(tensors[0], output)
            frame.says = f"Rank 0's {tensors[0]} meets the others' {tensors[1]}: {wrong_sum}"
        else:
            call = walkers[0].call
            assert call is not None
            frame.mood = "meet"
            frame.says = f"Four ranks meet in {call['name']}({tensors[0]})."
        for walker in walkers:
            walker.step += 1


def printed_of_rank_0(tensor: str, output: str) -> str:
    """The value that rank 0 printed for a tensor: ``3.2`` of the line ``[rank 0] gradient 1: 3.2``."""
    printed = re.search(rf"\[ranks? 0[^]]*\] {tensor}: (\S+)", output)
    assert printed is not None, f"rank 0 printed nothing of its {tensor}"
    return printed[1]


def ending_of(walkers: list[Walker], has_mixed_tensors: bool) -> Ending | None:
    """How the simulation of four ranks ends; None if the ranks can go on, because all wait in the same collective.

    Each rank now waits in a collective, or has ended. ``has_mixed_tensors`` says whether an earlier collective has
    added up different tensors of the ranks, which raises no error.
    """
    ended = [walker.has_ended for walker in walkers]
    if all(ended):
        return Ending.RIGHT
    if any(ended):
        # The others wait for ranks that have ended, and lose their connections to them. If a collective has added up
        # different tensors before, the picture tells of the wrong sums instead.
        if has_mixed_tensors:
            return Ending.WRONG
        return Ending.LOST
    names_of_calls = {walker.call["name"] for walker in walkers if walker.call is not None}
    if len(names_of_calls) > 1:  # such as an all_reduce and a broadcast, which wait for each other
        return Ending.HANG
    return None


def output_of_repair(chapter: Chapter, place: str) -> str:
    """What the ranks print if every rank makes the call at this place. Raises ExtensionError if it is not stored.

    One cell of the chapter runs the repaired loop for all places. It prints ``in the loop``, which is the place, and
    below it the lines of the ranks, such as ``[ranks 0-3] loss: 4.0``; then the next place and its lines.
    """
    output = chapter.output(REPAIR_CELL)
    lines_of_ranks = re.search(rf"(?m)^{place}\n((?:\[.*\n?)+)", output)
    if lines_of_ranks is None:
        raise ExtensionError(f"The cell {REPAIR_CELL!r} of {CHAPTER} says nothing of the place {place!r}.")
    return lines_of_ranks[1].rstrip()


def right_sums(chapter: Chapter, place: str) -> str:
    """The sums of the repaired loop in the order in which they are printed, each once: ``4, 400 and 200``.

    They stand at the ends of lines such as ``[ranks 0-3] loss: 4.0``.
    """
    sums: list[str] = []
    for printed in re.findall(r": ([\d.]+)$", output_of_repair(chapter, place), flags=re.M):
        rounded = f"{float(printed):.0f}"
        if rounded not in sums:
            sums.append(rounded)
    return f"{', '.join(sums[:-1])} and {sums[-1]}"


def panel_of(chapter: Chapter, mistake_place: str, is_repaired: bool) -> Panel:
    """Make one panel of the first page's animation, which shows four ranks in a training loop.

    - ``chapter`` has the loop's code, and the output of its real run.
    - ``mistake_place`` says where the loop has its mistake: "before the loop", "in the loop" or "after the loop".
    - ``is_repaired`` says whether to show the loop with this mistake repaired.

    The ranks are simulated. Raises ExtensionError if they end at other lines of code than in the real run.
    """
    lines = lines_of(chapter.source(LOOP_CELL), mistake_place, is_repaired)
    if is_repaired:
        output = output_of_repair(chapter, mistake_place)
    else:
        output = chapter.output(CELL_OF_MISTAKE[mistake_place])
    frames = walk([line.text for line in lines], output)  # simulates the ranks: a frame for each moment

    panel = Panel(panel_name(mistake_place, is_repaired), is_repaired, lines, frames, output)
    check_last_lines(panel, mistake_place)
    # The last frame says how the run ends, and which sums would be right.
    sums = right_sums(chapter, mistake_place)
    frames[-1].says = LAST_SENTENCE[panel.ending].format(sums=sums)
    return panel


def panel_name(mistake_place: str, is_repaired: bool) -> str:
    """The name by which hero.js finds a panel: "1-0" for the second place and no repair, "1-1" for its repair."""
    number_of_place = list(CELL_OF_MISTAKE).index(mistake_place)
    return f"{number_of_place}-{int(is_repaired)}"


def check_last_lines(panel: Panel, place: str) -> None:
    """Raise ExtensionError if the ranks end at other lines than the chapter's stored output says."""
    stored_lines = last_lines_in(panel.output)
    if panel.last_lines != stored_lines:
        raise ExtensionError(
            f"The first page's picture of the mistake {place} ends with '{panel.ending}', {panel.last_lines}. "
            f"The stored output of {CHAPTER} says {stored_lines}:\n{panel.output}"
        )


def last_lines_in(output: str) -> list[str]:
    """The line of code at which each rank ended, by rank; "" for a rank that the output does not name.

    The output is what ``launch``, with which the chapter starts ranks, said of those that had to be ended. For example,
    the first rank's line is ``dist.all_reduce(loss)``, and the second one's ``dist.broadcast(weight, src=0)``, in::

        rank 0: at line 7 of train_by_hand: dist.all_reduce(loss)
        ranks 1-3: at line 9 of train_by_hand: dist.broadcast(weight, src=0)
    """
    last_lines = ["" for _ in RANKS]
    reports = re.findall(r"ranks? ([\d-]+)(?::| lost its connection) at line \d+ of \w+: (.*)", output)
    for ranks, line in reports:  # ranks: "2" or "1-3"
        first_rank, _, last_rank = ranks.partition("-")
        if last_rank == "":
            last_rank = first_rank
        for rank in range(int(first_rank), int(last_rank) + 1):
            last_lines[rank] = line
    return last_lines


def picture(chapter: Chapter) -> str:
    """The picture as HTML: for each place a panel with the mistake, and one with the repair."""
    panels = []
    for place in CELL_OF_MISTAKE:
        panels.append(panel_of(chapter, place, is_repaired=False))
        panels.append(panel_of(chapter, place, is_repaired=True))
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    templates.policies["json.dumps_kwargs"] = {"default": vars}  # a frame is written as its fields
    return templates.get_template("hero.html").render(
        places=list(CELL_OF_MISTAKE), panels=panels, rank_color=rank_color
    )


class Hero(SphinxDirective):
    """``{hero}``: the picture."""

    def run(self) -> list[nodes.Node]:
        """The picture as a node. A change of the chapter makes Sphinx read the page again."""
        path = Path(self.env.srcdir, CHAPTER)
        self.env.note_dependency(str(path))
        return [nodes.raw("", picture(Chapter(path)), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("hero", Hero)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
