"""``explore``, for notebooks: one call makes a figure function interactive, in JupyterLab and on a static page."""

import functools
import hashlib
import html
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from helpers.figures.drawing import Shown, figure_html, view

MAX_FRAMES = 64
MAX_BUTTONS = 5  # more values become a slider
LABELS = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline stages", "zero": "ZeRO stage"}
UNITS = {"seconds": "s", "minutes": "min"}  # the argument "save_seconds" is labelled "save", its values "60 s"

# A page may have several such figures, each with this script, which looks only at the figure around it.
SCRIPT = f"<script>{Path(__file__).with_name('sliders.js').read_text(encoding='utf-8').strip()}</script>"
# The attributes of an <svg> that say how large it is: viewBox="0 0 660 352" width="660" height="352".
DRAWING_SIZE = re.compile(r'viewBox="0 0 (?P<width>\S+) (?P<height>\S+)" width="\S+" height="\S+"')


def explore(fn: Callable[..., Figure], *, alt: str, caption: str = "", **sliders: Iterable[Any]) -> Shown:
    """Show the Figure ``fn(**values)`` with a control for each argument, as in ``explore(fn, alt="…", rank=[0, 1])``.

    ``sliders`` are {argument: the values to choose from}. Up to five values become a row of buttons, and more become a
    slider; one for an argument named ``step`` can be played. A control starts at the function's default if that is
    among its values, or else at the first value. This call draws a frame for each combination of values, at most 64,
    and the controls choose which one is visible. So they work in JupyterLab and on a page without a kernel.

    ``alt`` and ``caption`` are as in ``drawing.show``; the ``alt`` of each frame also names its values. A part of the
    figure whose gid is "move 0 -42" moves to its place from 42 pixels above when its frame is shown.

    Raises ValueError if there is no control, if one has no values, and if there are too many frames, and TypeError if
    ``fn`` does not return a Figure.
    """
    controls = []
    for argument, values in sliders.items():
        controls.append(Control(argument, list(values), default_of(fn, argument)))
    frames = positions_of_frames(controls)
    first_frame = tuple(control.start for control in controls)
    views = []
    for positions in frames:
        arguments = {}
        values_in_words = []
        for control, position in zip(controls, positions, strict=True):
            arguments[control.argument] = control.values[position]
            values_in_words.append(f"{control.label} {control.texts[position]}")
        alt_of_frame = ""  # an empty alt text stays empty, so that view() refuses it
        if alt.strip():
            alt_of_frame = f"{alt} ({', '.join(values_in_words)})"
        is_first_frame = positions == first_frame
        views.append(view(fn(**arguments), alt_of_frame, salt=caption, visible=is_first_frame))
    call = ", ".join(f"{control.argument}={control.values}" for control in controls)
    return Shown(page_of(equally_tall(views), controls, caption), text=f"explore({name_of(fn)}, {call})")


def positions_of_frames(controls: "Sequence[Control]") -> list[tuple[int, ...]]:
    """All combinations of the controls' positions, such as [(0, 0), (0, 1), (1, 0), (1, 1)] for two of two values.

    sliders.js counts the frames in the same order. Raises ValueError, in the words of ``explore``, if there is no
    control, if one has no values, and if there are too many combinations.
    """
    if not controls:
        raise ValueError("explore() has no slider. Name an argument and list its values: world_size=[1, 2, 4].")
    for control in controls:
        if not control.values:
            raise ValueError(f"explore({control.argument}=[]) has no values. List those to show.")
    positions_of_controls = [range(len(control.values)) for control in controls]
    frames = list(itertools.product(*positions_of_controls))
    if len(frames) > MAX_FRAMES:
        raise ValueError(f"explore() draws at most {MAX_FRAMES} frames, not {len(frames)}. List fewer values.")
    return frames


def default_of(fn: Callable[..., Figure], argument: str) -> Any:
    """The default of a function's argument; None if the function has no argument of this name."""
    parameter = inspect.signature(fn).parameters.get(argument)
    if parameter is None:  # the function takes **kwargs
        return None
    return parameter.default


def name_of(fn: Callable[..., Figure]) -> str:
    """The name of a function, also of one that functools.partial has given some arguments."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
    return fn.__name__


def equally_tall(views: list[str]) -> list[str]:
    """Make the drawings in all views as tall as the tallest one, so that the page below the figure does not move.

    ``views`` are pieces of HTML, each with one SVG. Drawings of different widths are left as they are, because the page
    scales them differently, so no height would make them equally tall.
    """
    widths = set()
    heights = []
    for html_of_view in views:
        size = DRAWING_SIZE.search(html_of_view)
        if size is None:
            return views
        widths.add(size["width"])
        heights.append(size["height"])
    if len(widths) > 1:
        return views
    tallest = max(heights, key=float)
    attributes = rf'viewBox="0 0 \g<width> {tallest}" width="\g<width>" height="{tallest}"'
    return [DRAWING_SIZE.sub(attributes, html_of_view, count=1) for html_of_view in views]


@dataclass(frozen=True)
class Control:
    """Buttons or a slider for one argument of the figure function."""

    argument: str
    values: list[Any]
    default: Any

    @property
    def start(self) -> int:
        """The position of the value that is shown first."""
        if self.default in self.values:
            return self.values.index(self.default)
        return 0

    @property
    def label(self) -> str:
        """The argument's name in words, without the unit at its end."""
        if self.argument in LABELS:
            return LABELS[self.argument]
        words = self.argument.split("_")
        if words[-1] in UNITS:
            words = words[:-1]
        return " ".join(words)

    @property
    def texts(self) -> list[str]:
        """The values in words, with the unit that the argument's name ends with."""
        last_word = self.argument.split("_")[-1]
        unit = UNITS.get(last_word)
        if unit is None:
            return [str(value) for value in self.values]
        return [f"{value} {unit}" for value in self.values]

    def buttons(self, group: str) -> str:
        """This control as a row of radio buttons, in HTML. ``group`` is the name that the buttons share."""
        buttons = ""
        for position, text in enumerate(self.texts):
            checked = ""
            if position == self.start:
                checked = " checked"
            # With data-lm-suppress-shortcuts, JupyterLab leaves the arrow keys to the button.
            buttons += (
                f'<label><input type="radio" name="{group}" value="{position}" autocomplete="off" '
                f"data-lm-suppress-shortcuts{checked}><span>{html.escape(text)}</span></label>"
            )
        return (
            f'<fieldset data-labels="{html.escape(json.dumps(self.texts))}"><legend>{html.escape(self.label)}</legend>'
            f"<div>{buttons}</div></fieldset>"
        )

    def slider(self) -> str:
        """A slider as HTML, with the chosen value beside it and, if it counts steps, a button that plays them."""
        play = ""
        if self.argument == "step":
            play = '<button type="button" aria-label="Play the steps"></button>'
        first = html.escape(self.texts[self.start])
        width = max(len(text) for text in self.texts)
        return (
            f'<div data-labels="{html.escape(json.dumps(self.texts))}">{play}<label>'
            f'<span>{html.escape(self.label)}</span><input type="range" min="0" '
            f'max="{len(self.values) - 1}" step="1" value="{self.start}" autocomplete="off" aria-valuetext="{first}" '
            f'data-lm-suppress-shortcuts></label><output aria-live="off" style="width:{width}ch">{first}</output></div>'
        )


def page_of(views: list[str], controls: list[Control], caption: str) -> str:
    """A figure with its controls and all its frames as HTML, which loads no other file and works without a kernel."""
    frames = "".join(views)
    # Of all radio buttons with the same name, only one can be chosen. So each row needs a name that no other row of the
    # page has.
    prefix = "f" + hashlib.sha256((caption + frames).encode()).hexdigest()[:8]
    html_of_controls = ""
    for number, control in enumerate(controls):
        if len(control.values) <= MAX_BUTTONS:
            html_of_controls += control.buttons(group=f"{prefix}-{number}")
        else:
            html_of_controls += control.slider()
    # The controls are hidden until the script shows them, because without JavaScript they would do nothing.
    html_of_controls = f'<div class="wso-controls" hidden="hidden">{html_of_controls}</div>'
    return figure_html(frames, caption, html_of_controls, SCRIPT)
