"""The moving picture of the first page: four ranks walk through chapter 0's loop with its mistake at three places.

Lines, places, numbers and errors are read from the chapter: from the source of ``train_by_hand`` and from the stored
outputs of the cells that run it. How the ranks walk is computed here, and has to end where these outputs say that the
ranks stood. So the picture cannot show what was not run: the build fails instead. Without JavaScript, or for a reader
who asks for less motion, the picture shows where the ranks end; hero.js lets them walk.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from helpers.figures.drawing import rank_color

CHAPTER = "notebooks/00_first_run.ipynb"
LOOP, REPAIR = "by-hand", "repair"
RUNS = {"before the loop": "break", "in the loop": "break-loop", "after the loop": "break-end"}  # place: cell
RANKS = range(4)
ENDINGS = {  # how the walk ends: what the picture says
    "hang": "All four ranks wait, and nothing moves.",
    "wrong": "Wrong numbers. No error, until the others have ended.",
    "lost": "The others have ended. Rank 0 loses its connection.",
    "right": "Repaired: every rank makes the call, and the sums are right.",
}
OTHER = {False: "Repair it: every rank calls", True: "Break it again: rank 0 alone calls"}


@dataclass
class Walk:
    """Where each rank stands, a frame at a time, and how it ends."""

    frames: list[dict[str, Any]] = field(default_factory=list)
    mixed: bool = False  # whether two different tensors met in one call
    ending: str = ""


class Chapter:
    """A notebook's cells by their ids. Raises ExtensionError where one is missing or has no such text."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.cells = {cell["id"]: cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}

    def cell(self, name: str) -> dict[str, Any]:
        if name not in self.cells:
            raise ExtensionError(f"{self.name} has no cell {name!r}, which the first page shows.")
        return self.cells[name]

    def source(self, name: str) -> str:
        return "".join(self.cell(name)["source"])

    def output(self, name: str) -> str:
        """What the cell printed, or the error with which it ended."""
        texts = []
        for output in self.cell(name)["outputs"]:
            if output["output_type"] == "error":
                texts.append(f"{output['ename']}: {output['evalue']}\n")
            texts.append("".join(output.get("text", "")))
        if not (text := "".join(texts).rstrip()):
            raise ExtensionError(f"Cell {name!r} of {self.name} has no stored output, which the first page shows.")
        return text


# --- the loop, and how ranks walk through it --------------------------------------------------------------------------


def listing(source: str, place: str, repaired: bool) -> tuple[list[str], set[int]]:
    """The lines of the loop with the mistake at ``place`` alone, or repaired there, and the numbers of these lines."""
    lines: list[str] = []
    marked: set[int] = set()
    keep, depth = True, None
    body = source.partition("dist.get_rank()")[2].partition("    return")[0]
    for line in body.splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        if depth is not None and indent <= depth:
            keep, depth = True, None
        if match := re.match(r'( *)if place == "(.*)" and rank in callers:$', line):
            keep, depth = match[2] == place, indent
            if not keep or repaired:
                continue
            line = f"{match[1]}if rank == 0:"
        if keep:
            if depth is not None:
                marked.add(len(lines))
                line = line[4:] if repaired else line
            lines.append(line[4:])
    if not marked:
        raise ExtensionError(f"Cell {LOOP!r} of {CHAPTER} has no line for the place {place!r}.")
    return lines, marked


def visited(lines: list[str], rank: int, first: int = 0, indent: int = 0) -> Iterator[int]:
    """The numbers of the lines that a rank goes through, in their order."""
    number = first
    while number < len(lines) and len(lines[number]) - len(lines[number].lstrip()) >= indent:
        yield number
        inside = number + 1
        number = inside
        while number < len(lines) and len(lines[number]) - len(lines[number].lstrip()) > indent:
            number += 1
        if number > inside:
            times = re.search(r"in range\((\d+)\)", lines[inside - 1])
            for _ in range(int(times[1]) if times else rank == 0):
                yield from visited(lines[:number], rank, inside, indent + 4)


def call(line: str) -> tuple[str, str] | None:
    """(name, tensor) of the collective in a line, if there is any."""
    match = re.search(r"dist\.(all_reduce|broadcast)\((\w+)", line)
    return (match[1], match[2]) if match else None


def walk(lines: list[str], output: str) -> Walk:
    """Let four ranks go through the lines. The n-th collective of a rank meets the n-th of each other rank.

    Where different tensors meet, a frame says what rank 0 printed afterwards, which is in ``output``.
    """
    paths = [[*visited(lines, rank), len(lines)] for rank in RANKS]
    at, result = [0 for _ in RANKS], Walk()
    seen: Counter[tuple[int, str]] = Counter()
    while True:
        stand = [path[step] for path, step in zip(paths, at, strict=True)]
        result.frames.append({"at": stand, "says": "", "mood": ""})
        calls = [call(lines[line]) if line < len(lines) else None for line in stand]
        ended = [line == len(lines) for line in stand]
        if moving := [rank for rank in RANKS if not calls[rank] and not ended[rank]]:
            at = [step + (rank in moving) for rank, step in enumerate(at)]
            continue
        names = {name for name, _ in filter(None, calls)}
        if all(ended):
            result.ending = "right"
        elif any(ended):
            result.ending = "wrong" if result.mixed else "lost"
        elif len(names) > 1:
            result.ending = "hang"
        if result.ending:
            result.frames[-1] |= {"says": ENDINGS[result.ending], "mood": result.ending}
            return result
        tensors = []
        for rank, (_, tensor) in enumerate(filter(None, calls)):
            tensors.append(f"gradient {seen[rank, tensor]}" if tensor == "gradient" else tensor)
            seen[rank, tensor] += 1
        if len(set(tensors)) > 1:
            result.mixed = True
            sums = re.search(rf"\[ranks? 0[^]]*\] {tensors[0]}: (\S+)", output)
            says = f"Rank 0's {tensors[0]} meets the others' {tensors[1]}: {sums[1] if sums else '?'}"
        else:
            says = f"Four ranks meet in {names.pop()}({tensors[0]})."
        result.frames[-1] |= {"says": says, "mood": "mixed" if len(set(tensors)) > 1 else "meet"}
        at = [step + 1 for step in at]


def check(place: str, lines: list[str], walked: Walk, output: str, ending: str) -> None:
    """Raise ExtensionError unless the stored output says that the ranks stood where they stand in the picture."""
    told = {}
    for who, line in re.findall(r"ranks? ([\d-]+)(?::| lost its connection) at line \d+ of \w+: (.*)", output):
        first, _, last = who.partition("-")
        told |= {rank: line for rank in range(int(first), int(last or first) + 1)}
    shown = {rank: lines[line].strip() for rank, line in enumerate(walked.frames[-1]["at"]) if line < len(lines)}
    kinds = {"hang": "still ran after timeout", "lost": "lost its connection", "wrong": "lost its connection"}
    if shown != told or kinds.get(walked.ending, "[ranks 0-3]") not in output or ending not in ("", walked.ending):
        raise ExtensionError(
            f"The first page's picture of the mistake {place} ends with {walked.ending!r}, {shown}. "
            f"The stored output of {CHAPTER} says {told}:\n{output}"
        )


# --- the picture ------------------------------------------------------------------------------------------------------


def outcome(text: str) -> str:
    """The stored output as the picture shows it: without the file's line numbers, which are the chapter's."""
    return (
        re.sub(r" at line \d+ of \w+:", " at", text).replace(": at ", ": ").replace("connection at", "connection at:")
    )


def panel(chapter: Chapter, place: str, repaired: bool, number: str) -> str:
    lines, marked = listing(chapter.source(LOOP), place, repaired)
    output = chapter.output(REPAIR if repaired else RUNS[place])
    if repaired:
        part = re.search(rf"(?m)^{place}\n((?:\[.*\n?)+)", output)
        if not part:
            raise ExtensionError(f"The cell {REPAIR!r} of {CHAPTER} says nothing of the place {place!r}.")
        output = part[1].rstrip()
    walked = walk(lines, output)
    check(place, lines, walked, output, "right" if repaired else "")
    coloured = highlight("\n".join(lines), PythonLexer(stripall=False), HtmlFormatter(nowrap=True)).splitlines()
    rows = "".join(
        f'<code class="hero-line{" hero-marked" if line in marked else ""}">{text}</code>'
        for line, text in enumerate([*coloured, '<span class="hero-ended">ended</span>'])
    )
    last = walked.frames[-1]["at"]
    ranks = "".join(
        f'<span class="hero-rank" style="--rank:{rank};--line:{last[rank]};--colour:{rank_color(rank)}">{rank}</span>'
        for rank in RANKS
    )
    seconds = re.search(r"timeout=(\d+) s", output)
    frames = escape(json.dumps(walked.frames, separators=(",", ":")), quote=False).replace("'", "&#39;")
    where = "; ".join(
        f"rank {rank} {'has ended' if line == len(lines) else f'stands at {lines[line].strip()}'}"
        for rank, line in enumerate(last)
    )
    return (
        f'<div class="hero-panel hero-{walked.ending}" id="hero-{number}" '
        f"data-frames='{frames}'"
        f' data-seconds="{seconds[1] if seconds else 0}">'
        f'<div class="hero-stage highlight" role="img" aria-label="{escape(" ".join(lines))}. At the end, {where}.">'
        f"{rows}{ranks}</div>"
        f'<div class="hero-end"><p class="hero-says" role="status">{ENDINGS[walked.ending]}</p>'
        f'<pre class="hero-output">{escape(outcome(output))}</pre>'
        f'<label class="hero-other" for="hero-who-{int(not repaired)}">{OTHER[repaired]}</label></div></div>'
    )


def choice(name: str, legend: str, values: list[str], checked: int) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="hero-{name}" id="hero-{name}-{number}"'
        f"{' checked' if number == checked else ''}><span>{value}</span></label>"
        for number, value in enumerate(values)
    )
    return f"<fieldset><legend>{legend}</legend><div>{buttons}</div></fieldset>"


def picture(chapter: Chapter) -> str:
    """The picture as HTML: for each place a panel with the mistake, and one with the repair."""
    places = re.findall(r'if place == "(.*?)"', chapter.source(LOOP))
    if places != list(RUNS):
        raise ExtensionError(f"The places in the cell {LOOP!r} of {CHAPTER} are {places}, not {list(RUNS)}.")
    panels = [
        panel(chapter, place, repaired, f"{number}-{int(repaired)}")
        for number, place in enumerate(places)
        for repaired in (False, True)
    ]
    return (
        '<div class="hero"><div class="hero-bar">'
        + choice("place", "The loss is added up", places, 1)
        + choice("who", "by", ["rank 0 alone", "every rank"], 0)
        + '<button type="button" class="hero-run" hidden>Run</button></div>'
        + "".join(panels)
        + "</div>"
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
