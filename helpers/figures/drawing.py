"""Figures in the book's style, and ``show``, which puts one on the page: for notebooks.

A figure function takes what it draws as arguments and returns a matplotlib Figure; ``show`` makes it inline SVG whose
ink is the page's own text colour, so that it reads on white, on the dark theme and in JupyterLab alike.
"""

import hashlib
import html
import io
import itertools
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager

# Without a home folder to write to, matplotlib would complain in a reader's first cell.
if not os.access(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("MPLCONFIGDIR", f"{tempfile.gettempdir()}/matplotlib-{os.getuid()}")

import matplotlib
import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

# Rank k has the k-th colour everywhere. Each has a contrast of 3 to 1 or more on white and on the dark page, and any
# two stay apart for readers with protanopia, deuteranopia and tritanopia (tests/test_figures.py computes both).
RANK_COLORS = ["#3355ee", "#bb8800", "#ff4499", "#227755", "#cc2200", "#4499bb", "#aa77ff", "#994499"]
HATCHES = ["", "///", "...", "xxx"]  # ranks 8 to 15 repeat the colours with the second hatch, and so on
DASHES = ["-", "--", ":", "-."]  # the same for lines
INK = "black"  # what is no rank's; show() turns black into the page's text colour

STYLE = {
    "font.family": "DejaVu Sans",  # measures the layout only: the page draws in its own, narrower, font
    "font.size": 13,
    "axes.prop_cycle": matplotlib.cycler(color=RANK_COLORS),
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

# What a figure needs wherever it is shown: the book's own style sheet says more. The selectors ask for role=img
# because JupyterLab strips it, and the SVG with it, from a notebook that it does not trust: that one shows the note.
STYLE_SHEET = (
    "figure.wso{margin:1em 0;color:inherit}"
    ".wso-on[role=img]{display:block!important;overflow-x:auto}"
    ".wso-on[role=img]~.wso-note{display:none}"
    ".wso svg{display:block;width:100%;height:auto;margin:0 auto;overflow:visible}"
    ".wso svg text{white-space:pre}"
    ".wso figcaption{margin:.5em auto 0;max-width:46em;text-align:center}"
    ".wso-controls{display:flex;flex-wrap:wrap;justify-content:center;gap:.25em 2.5em;margin-bottom:.75em}"
    ".wso-controls[hidden]{display:none}"
    ".wso-controls div,.wso-controls label{display:flex;align-items:center;gap:.6em;margin:0}"
    ".wso-controls input{width:9em;height:1.75em;margin:0;accent-color:var(--pst-color-primary,#3355ee);cursor:pointer}"
    ".wso-controls span{min-width:5.5em;text-align:right}"
    ".wso-controls output{min-width:2em;font-weight:bold;font-variant-numeric:tabular-nums}"
)


@contextmanager
def style():
    """The book's matplotlib style, for a ``with`` block or as a decorator: ``@style()`` on a figure function."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def rank_color(rank):
    """The colour of a rank, the same in every figure. From rank 8 on they repeat: add ``rank_hatch(rank)``."""
    if not isinstance(rank, int) or rank < 0:
        raise ValueError(f"rank_color({rank!r}): a rank is a whole number from 0 on.")
    return RANK_COLORS[rank % len(RANK_COLORS)]


def rank_hatch(rank):
    """The hatch that tells rank 8 from rank 0, rank 16 from rank 8, …; empty for ranks 0 to 7."""
    return HATCHES[rank // len(RANK_COLORS) % len(HATCHES)]


def figure(width, height, **kwargs):
    """An empty Figure of ``width`` times ``height`` pixels, as the page counts them."""
    return Figure(figsize=(width / 72, height / 72), **kwargs)  # the SVG counts points, 72 to the inch


def canvas(width, height):
    """A Figure of one Axes without frame or ticks, whose data coordinates are pixels, y downwards."""
    fig = figure(width, height)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    return fig, ax


def boxes(ax, rectangles, **look):
    """Draw rectangles (x, y, width, height) of one look as one path, which keeps the SVG small."""
    paths = [Path([(x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)], closed=True) for x, y, w, h in rectangles]
    ax.add_artist(PathPatch(Path.make_compound_path(*paths), **{"linewidth": 0, "clip_on": False, **look}))


# --- Measured figures -------------------------------------------------------------------------------------------------


@style()
def lines(series, x, xlabel, ylabel):
    """Curves over a shared x axis.

    ``series`` maps a name to the y values, as many as ``x`` has. An int names a rank and takes its colour; other
    names are drawn in ink, told apart by their dashes: four at most. Both labels carry their unit.
    """
    fig = figure(440, 260, layout="constrained")
    ax = fig.add_subplot()
    inks = itertools.cycle(DASHES)
    for name, values in series.items():
        if isinstance(name, int):
            dash = DASHES[HATCHES.index(rank_hatch(name))]
            ax.plot(x, values, dash, color=rank_color(name), label=f"rank {name}")
        else:
            ax.plot(x, values, next(inks), color=INK, label=name)
    ax.set(xlabel=xlabel, title=ylabel)
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    if len(series) > 1:
        fig.legend(loc="outside upper left", ncols=min(len(series), 4), handlelength=1.6, columnspacing=1.4)
    return fig


@style()
def bars(values, xlabel, number="{:.3g}"):
    """Horizontal bars, from the top down, each with its number.

    ``values`` maps a name to the bar's length; an int names a rank and takes its colour. ``xlabel`` carries the unit;
    ``number`` formats the numbers.
    """
    fig = figure(440, 75 + 34 * len(values), layout="constrained")
    ax = fig.add_subplot()
    for row, (name, value) in enumerate(values.items()):
        is_rank = isinstance(name, int)
        color, hatch = (rank_color(name), rank_hatch(name)) if is_rank else (INK, "")
        ax.barh(row, value, 0.62, color=color, alpha=1 if is_rank else 0.55, hatch=hatch, linewidth=0)
        ax.annotate(number.format(value), (value, row), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(len(values)), [f"rank {name}" if isinstance(name, int) else name for name in values])
    ax.set(xlabel=xlabel, ylim=(len(values) - 0.5, -0.5))
    ax.margins(x=0.12)
    ax.set_xlim(left=0)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return fig


@style()
def timeline(spans, xlabel):
    """What each rank did when, its lanes one below the other.

    ``spans`` maps a rank to a list of (lane, start, end, label); times are in the unit that ``xlabel`` names. Lanes are
    drawn in the order in which they first appear, the first one filled, the others solid.
    """
    lanes = list(dict.fromkeys(lane for events in spans.values() for lane, *_ in events))
    rows = [(rank, lane) for rank in spans for lane in lanes]
    fig = figure(600, 70 + 32 * len(rows), layout="constrained")
    ax = fig.add_subplot()
    for row, (rank, lane) in enumerate(rows):
        for name, start, end, _ in spans[rank]:
            if name == lane:
                solid = lane != lanes[0]
                ax.barh(
                    row, end - start, 0.7, left=start, edgecolor=rank_color(rank), linewidth=1,
                    facecolor=(rank_color(rank), 0.85 if solid else 0.25),
                )  # fmt: skip
    ax.set_yticks(range(len(rows)), [f"rank {rank}, {lane}" for rank, lane in rows])
    ax.set(xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
    ax.set_xlim(left=0)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    return fig


# --- On the page ------------------------------------------------------------------------------------------------------


class Shown:
    """What a cell ends with to show HTML: ``text`` is what a terminal prints instead."""

    def __init__(self, page, text):
        self.page, self.text = page, text

    def _repr_html_(self):
        return self.page

    def __repr__(self):
        return self.text


def show(fig, alt, caption="", measured=False):
    """Put a Figure on the page, as the last line of a cell.

    ``alt`` says in words what the figure shows, for those who cannot see it; ``caption`` says its message under it
    (`backticks` make code). The same figure gives the same bytes, so nbval compares it. ``measured=True`` is for one
    drawn from times or other numbers of this machine: nbval then compares all but the drawing
    (tests/nbval_sanitize.cfg).

    Raises ValueError when ``alt`` is empty, and TypeError when ``fig`` is not a Figure.
    """
    return Shown(figure_html(view(fig, alt, measured=measured, salt=caption), caption), f"Figure: {alt}")


def figure_html(views, caption="", controls="", script=""):
    """A ``<figure>`` around what ``view`` made, once or several times, with the style it needs outside of the book."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(caption, quote=False))
    return (
        f'<figure class="wso"><style>{STYLE_SHEET}</style>{controls}{views}'
        '<p class="wso-note">Run this cell to draw the figure.</p>'
        f"{f'<figcaption>{text}</figcaption>' if text else ''}{script}</figure>"
    )


def view(fig, alt, measured=False, salt="", on=True):
    """A Figure as the ``<div>`` that holds its SVG and says ``alt`` in its place; not ``on`` is hidden."""
    if not isinstance(fig, Figure):
        raise TypeError(f"A matplotlib Figure was expected, not {type(fig).__name__}: give the figure, not its axes.")
    if not alt.strip():
        raise ValueError("The alt text is empty: say in one sentence what the figure shows.")
    drawing = svg(fig, salt=alt + salt, attributes={"class": "measured"} if measured else {})
    return (
        f'<div class="wso-view{" wso-on" if on else ""}" hidden="hidden" role="img" tabindex="0" '
        f'aria-label="{html.escape(alt)}">{drawing}</div>'
    )


def svg(fig, salt="", attributes=None):
    """A Figure as one ``<svg>`` for the middle of a page: byte-stable, its ids its own, its ink currentColor.

    ``salt`` goes into the ids: a page may hold equal figures. Closes ``fig`` for pyplot, so that it shows once.
    """
    buffer = io.BytesIO()
    with style():
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(fig)
    root = ElementTree.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.tail = None
        if element.tag != "text":
            element.text = None
        names = [(name.rpartition("}")[2], value) for name, value in element.attrib.items()]
        element.attrib = {name: tidied for name, value in names if (tidied := tidy(name, value))}
    clean(root)

    width, height = (float(number) for number in root.get("viewBox").split()[2:])
    root.attrib = {
        **(attributes or {}),
        "viewBox": root.get("viewBox"),
        "width": f"{width:g}",
        "height": f"{height:g}",
        # Never so narrow that the text falls under 9 pixels: the view scrolls sideways then.
        "style": f"max-width:{width:g}px;min-width:{round(width * 9 / STYLE['font.size'])}px",
        "fill": "currentColor",  # matplotlib writes no fill that is black
        "stroke-linejoin": "round",
    }
    text = ElementTree.tostring(root, encoding="unicode").replace("#000000", "currentColor")
    used = dict.fromkeys(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text))
    for number, name in enumerate(used):
        text = re.sub(rf"(id=\"|#){re.escape(name)}(?=[\")])", rf"\1ID-{number}", text)
    own = "f" + hashlib.sha256((salt + text).encode()).hexdigest()[:8]
    return re.sub(r"(id=\"|#)ID-", rf"\1{own}-", text)


def tidy(name, value):
    """An SVG attribute's value with short numbers and the page's font; empty when it says nothing."""
    if name == "style":
        rules = dict(re.split(r":\s*", rule, maxsplit=1) for rule in re.split(r";\s*", value) if rule)
        rules.pop("font-family", None)
        value = ";".join(f"{key}:{setting}" for key, setting in rules.items())
    digits = {"d": 1, "x": 1, "y": 1, "width": 1, "height": 1, "style": 2, "transform": 2}.get(name)
    if digits:
        value = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), digits) + 0:.8g}", value)
    value = re.sub(r"rotate\(-?0 [^)]*\)", "", " ".join(value.split()))
    if name == "d":
        value = re.sub(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 z", r"M\1 \2H\3V\4H\1z", value)  # a rectangle
        value = re.sub(r" ?([MLHVQCz]) ?", r"\1", value)
    return value


def clean(parent):
    """Drop what the page has no use for below ``parent``: metadata, a style for all of the page, empty groups, ids."""
    for child in list(parent):
        clean(child)
        look = child.get("style", "")
        invisible = child.tag == "path" and "fill:none" in look and "stroke:" not in look
        if child.tag in ("metadata", "style", "title") or invisible:
            parent.remove(child)
        elif child.tag == "g" and not (set(child.attrib) - {"id"}):
            where = list(parent).index(child)
            parent.remove(child)
            for offset, grandchild in enumerate(list(child)):
                parent.insert(where + offset, grandchild)
        elif child.tag == "defs" and not len(child):
            parent.remove(child)
