"""Figures in the book's style, and ``show``, which puts one on the page: for notebooks.

A figure function takes what it draws as arguments and returns a matplotlib Figure. ``show`` turns that into inline SVG
in the page's own text colour, so that it can be read on a white page, on a dark one and in JupyterLab.
"""

import html
import io
import itertools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree

# matplotlib keeps a cache in the home folder. If it cannot write there, it warns, and the warning would be printed in a
# reader's first cell. So it gets a folder of its own before it is imported.
if not os.access(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("MPLCONFIGDIR", f"{tempfile.gettempdir()}/matplotlib-{os.getuid()}")

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.rcsetup import cycler

from helpers.figures.svg import compact, with_own_ids

# Rank k has the k-th colour everywhere. Each colour has a contrast of 3 to 1 or more with the white and the dark page.
# Readers with protanopia, deuteranopia or tritanopia can tell any two apart: in the simulation of Machado, Oliveira and
# Fernandes (2009), any two colours are at least 0.065 apart in OKLab, where 0.02 is just noticeable.
RANK_COLORS = ["#3355ee", "#bb8800", "#ff4499", "#227755", "#cc2200", "#4499bb", "#aa77ff", "#994499"]
DASHES = ["-", "--", ":", "-."]  # for lines that belong to no rank
INK = "black"  # for what belongs to no rank; svg() turns black into the page's text colour
LETTERS_IN_A_ROW = 40  # of a legend, with four names: more of them would be wider than the figure
MIN_TEXT_SIZE = 9  # pixels: smaller text cannot be read on a phone

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # only for the layout: the page draws in its own font, which is narrower
    "font.size": 13,
    "axes.prop_cycle": cycler(color=RANK_COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "axes.titlepad": 10,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": INK,
    "grid.alpha": 0.15,
    "hatch.color": INK,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "lines.linewidth": 2,
    "lines.markersize": 5,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "world-size-one",
}

# Every figure brings its style sheet along, because JupyterLab does not have the book's. JupyterLab removes role=img,
# and the SVG too, from a notebook that it does not trust. So the selectors ask for role=img: without it, a note tells
# the reader to run the cell.
STYLE_SHEET = "".join(pathlib.Path(__file__).with_name("figure.css").read_text(encoding="utf-8").splitlines())


class Span(NamedTuple):
    """What a rank did in one part of a timeline. A plain tuple of the same four values will do, too."""

    lane: str  # the row of the timeline, such as "compute"
    start: float  # in the unit of the timeline
    end: float
    label: str  # what it did, such as "forward"


@contextmanager
def style() -> Iterator[None]:
    """The book's matplotlib style, for a ``with`` block, or as a decorator of a figure function: ``@style()``."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def rank_color(rank: int) -> str:
    """The colour of a rank, such as "#3355ee", in every figure. Ranks 8 and above repeat colours.

    Raises ValueError for anything but a whole number from 0 on.
    """
    if not isinstance(rank, int) or rank < 0:
        raise ValueError(f"rank_color({rank!r}): a rank is a whole number from 0 on.")
    return RANK_COLORS[rank % len(RANK_COLORS)]


def figure(width: float, height: float, **kwargs: Any) -> Figure:
    """An empty Figure that is so many CSS pixels wide and high. ``kwargs`` are those of matplotlib's Figure."""
    # matplotlib takes inches, and writes an SVG in points, 72 to the inch. The page shows a point as a pixel.
    return Figure(figsize=(width / 72, height / 72), **kwargs)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A Figure to draw on, with one Axes without frame and ticks, whose coordinates are pixels. y grows downwards."""
    fig = figure(width, height)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    return fig, ax


Rectangle = tuple[float, float, float, float]  # x and y of its upper left corner, width, height


def boxes(ax: Axes, rectangles: Sequence[Rectangle], **look: Any) -> None:
    """Draw rectangles that look alike. They become one path, which keeps the SVG small.

    ``look`` are arguments of matplotlib's PathPatch, such as ``facecolor``.
    """
    paths = []
    for x, y, width, height in rectangles:
        right = x + width
        bottom = y + height
        paths.append(Path([(x, y), (right, y), (right, bottom), (x, bottom), (x, y)], closed=True))
    look = {"linewidth": 0, "clip_on": False, **look}
    ax.add_artist(PathPatch(Path.make_compound_path(*paths), **look))


# --- Measured figures -------------------------------------------------------------------------------------------------


@style()
def lines(series: Mapping[int | str, Sequence[float]], x: Sequence[float], xlabel: str, ylabel: str) -> Figure:
    """A Figure of curves over a shared x axis.

    ``series`` is {name: y values}, each as long as ``x``. A name that is an int is a rank, whose curve has the rank's
    colour. Other curves are in ink, and up to four of them have different dashes. ``xlabel`` and ``ylabel`` say what
    the axes show, with the unit.
    """
    fig = figure(440, 260, layout="constrained")
    ax = fig.add_subplot()
    unused_dashes = itertools.cycle(DASHES)
    for name, values in series.items():
        if isinstance(name, int):
            ax.plot(x, values, "-", color=rank_color(name), label=f"rank {name}")
        else:
            ax.plot(x, values, next(unused_dashes), color=INK, label=name)
    ax.set(xlabel=xlabel, title=ylabel)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    if len(series) > 1:
        columns = min(len(series), 4)  # of the legend
        letters = sum(len(str(name)) for name in series)
        is_wider_than_figure = columns == 4 and letters > LETTERS_IN_A_ROW
        if is_wider_than_figure:
            columns = 2
        fig.legend(loc="outside upper left", ncols=columns, handlelength=1.6, columnspacing=1.4)
    return fig


@style()
def bars(values: Mapping[int | str, float], xlabel: str, number: str = "{:.3g}") -> Figure:
    """A Figure of horizontal bars, the first at the top, each with its number behind it.

    ``values`` is {name: length}. A name that is an int is a rank, whose bar has the rank's colour. ``xlabel`` says what
    the lengths are, with the unit, and ``number`` is the format in which they are written.
    """
    fig = figure(440, 75 + 34 * len(values), layout="constrained")  # 75 pixels for the axis, 34 for each bar
    ax = fig.add_subplot()
    names = []
    look: dict[str, Any]
    for row, (name, value) in enumerate(values.items()):
        if isinstance(name, int):
            names.append(f"rank {name}")
            look = {"color": rank_color(name), "alpha": 1.0}
        else:
            names.append(name)
            look = {"color": INK, "alpha": 0.55}
        ax.barh(row, value, height=0.62, linewidth=0, **look)
        # The number stands 5 points behind the end of the bar.
        end_of_bar = (value, row)
        ax.annotate(number.format(value), end_of_bar, xytext=(5, 0), textcoords="offset points", va="center")
    ax.margins(x=0.12)  # so that the longest bar's number has space
    label_rows(ax, names, xlabel)
    return fig


@style()
def timeline(spans: Mapping[int, Sequence[Span]], xlabel: str) -> Figure:
    """A Figure of what each rank did at which time, with a row for each lane of each rank.

    ``spans`` is {rank: [(lane, start, end, label), …]}, such as {0: [("compute", 0.0, 2.5, "forward")]}, with times in
    the unit that ``xlabel`` names. The lanes are in the order in which they first appear. Bars of the first lane are
    pale, and those of the others are dark.
    """
    lanes = lanes_of(spans)
    rows = [(rank, lane) for rank in spans for lane in lanes]
    fig = figure(600, 70 + 32 * len(rows), layout="constrained")  # 70 pixels for the axis, 32 for each row
    ax = fig.add_subplot()
    for row, (rank, lane) in enumerate(rows):
        color = rank_color(rank)
        if lane == lanes[0]:
            opacity = 0.25
        else:
            opacity = 0.85
        look: dict[str, Any] = {"facecolor": (color, opacity), "edgecolor": color, "linewidth": 1}
        for fields in spans[rank]:
            span = Span(*fields)  # plain tuples will do, too
            if span.lane == lane:
                ax.barh(row, span.end - span.start, height=0.7, left=span.start, **look)
    label_rows(ax, [f"rank {rank}, {lane}" for rank, lane in rows], xlabel)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    return fig


def lanes_of(spans: Mapping[int, Sequence[Span]]) -> list[str]:
    """The names of all lanes of ``spans``, {rank: its spans}, each once, in the order in which they first appear."""
    lanes: list[str] = []
    for spans_of_rank in spans.values():
        for fields in spans_of_rank:
            lane = Span(*fields).lane
            if lane not in lanes:
                lanes.append(lane)
    return lanes


def label_rows(ax: Axes, names: list[str], xlabel: str) -> None:
    """Name the rows of a chart of horizontal bars, put the first at the top, and let the x axis begin at zero."""
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))  # row k is at y = k, and y grows downwards
    ax.set_xlim(left=0)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


# --- On the page ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """The value of a cell that shows HTML. In a terminal it prints ``text`` instead."""

    page: str
    text: str

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        return self.text


def show(fig: Figure, alt: str, caption: str = "", measured: bool = False) -> Shown:
    """Put a Figure on the page. The call is the last line of a cell.

    ``alt`` says in words what the figure shows, for readers who cannot see it. ``caption`` is the message under the
    figure; `backticks` make code, *asterisks* stress. nbval compares the output, because equal figures have equal
    bytes. A figure of times or of other numbers of this machine needs ``measured=True``: then nbval compares all but
    the drawing (tests/nbval_sanitize.cfg).

    Raises ValueError when ``alt`` is empty, and TypeError when ``fig`` is not a Figure.
    """
    drawing = view(fig, alt, measured=measured, salt=caption)
    return Shown(figure_html(drawing, caption), f"Figure: {alt}")


def figure_html(views: str, caption: str = "", controls: str = "", script: str = "") -> str:
    """A ``<figure>`` around one view or several, as HTML, with the style that it needs outside of the book."""
    figcaption = ""
    if caption:
        text = html.escape(caption, quote=False)
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)  # `no_sync`
        text = re.sub(r"\*(\w[^*]*\w)\*", r"<em>\1</em>", text)  # *all ranks*, but not 2 * 3 * 4
        figcaption = f"<figcaption>{text}</figcaption>"
    return (
        f'<figure class="wso"><style>{STYLE_SHEET}</style>{controls}{views}'
        f'<p class="wso-note">Run this cell to draw the figure.</p>{figcaption}{script}</figure>'
    )


def view(fig: Figure, alt: str, measured: bool = False, salt: str = "", visible: bool = True) -> str:
    """A Figure as HTML: a ``<div>`` with its SVG, in place of which a screen reader reads the text ``alt``.

    ``measured`` marks a figure whose numbers differ from run to run. ``salt`` makes the ids in the SVG unique. A figure
    with sliders has a view for each position of them, of which only one is ``visible``. Raises TypeError if ``fig`` is
    not a Figure, and ValueError if ``alt`` is empty.
    """
    if not isinstance(fig, Figure):
        raise TypeError(f"A matplotlib Figure was expected, not {type(fig).__name__}. Pass the figure, not its axes.")
    if not alt.strip():
        raise ValueError("The alt text is empty: say in one sentence what the figure shows.")
    attributes = {}
    if measured:
        attributes["class"] = "measured"
    drawing = svg(fig, salt=alt + salt, attributes=attributes)
    classes = "wso-view"
    if visible:
        classes = "wso-view wso-on"
    # The style sheet shows a visible view in spite of hidden="hidden". JupyterLab removes the style sheet and the
    # drawing of a notebook that it does not trust: then the attribute hides the box, which would be empty.
    return (
        f'<div class="{classes}" hidden="hidden" role="img" tabindex="0" aria-label="{html.escape(alt)}">'
        f"{drawing}</div>"
    )


def svg(fig: Figure, salt: str = "", attributes: Mapping[str, str] | None = None) -> str:
    """A Figure as the text of one ``<svg>`` element, which is the same for equal figures.

    Black becomes currentColor, which is the page's text colour. ``attributes`` are added to the element, such as
    {"class": "measured"}. Two equal figures on one page need a different ``salt``, or their ids would be equal too.
    """
    file = io.BytesIO()
    with style():
        fig.savefig(file, format="svg", metadata={"Date": None})  # the date would change the bytes each time
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)  # at the end of the cell, pyplot would show it once more

    root = compact(file.getvalue())
    view_box = root.attrib["viewBox"]  # four numbers: "0 0 660 352"
    _left, _top, width, height = (float(number) for number in view_box.split())
    root.attrib = {
        **(attributes or {}),
        "viewBox": view_box,
        "width": f"{width:g}",
        "height": f"{height:g}",
        "style": f"max-width:{width:g}px;min-width:{readable_width(root, width)}px",
        "fill": "currentColor",  # matplotlib writes no fill where it is black
        "stroke-linejoin": "round",
    }
    text = ElementTree.tostring(root, encoding="unicode")
    return with_own_ids(text.replace("#000000", "currentColor"), salt)


def readable_width(root: ElementTree.Element, width: float) -> int:
    """The pixels to which a drawing, ``width`` pixels wide, may shrink on a narrow screen before it scrolls instead.

    At this width its smallest text has MIN_TEXT_SIZE. A drawing whose text is that small already may not shrink.
    """
    styles = " ".join(element.get("style", "") for element in root.iter())
    text_sizes = [float(size) for size in re.findall(r"font-size:([\d.]+)px", styles)]
    smallest_text = min(text_sizes, default=STYLE["font.size"])
    return round(width * MIN_TEXT_SIZE / max(smallest_text, MIN_TEXT_SIZE))
