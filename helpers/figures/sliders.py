"""``explore``, for notebooks: one call makes a figure function interactive, in a live kernel and on a static page."""

import hashlib
import html
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from IPython import get_ipython
from matplotlib.figure import Figure

from helpers.figures.drawing import figure_html, view

MOST_FRAMES = 64
MOST_BUTTONS = 5  # more values become a slider
NAMES = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline stages", "zero": "ZeRO stage"}
UNITS = {"seconds": "s", "minutes": "min"}  # a control "save_seconds" is called "save" and says "60 s"

# A page may have several such figures. Each script uses the figure around it, so that no ids can collide.
SCRIPT = f"<script>{Path(__file__).with_name('sliders.js').read_text(encoding='utf-8').strip()}</script>"


def explore(fn: Callable[..., Figure], *, alt: str, caption: str = "", **sliders: Iterable[Any]) -> "Explorer":
    """Show the Figure ``fn(**values)`` with a control for each keyword, as in ``explore(fn, alt="…", rank=[0, 1])``.

    Up to five values become a row of buttons, and more become a slider. A slider named ``step`` can be played. In a
    live kernel the controls are ipywidgets. On a static page they choose one of the frames that this call draws, one
    for each combination of values, at most 64. A control starts at the function's default if that is among its values,
    or else at the first value. ``alt`` and ``caption`` are as in ``drawing.show``; each frame's ``alt`` also names its
    values. An artist whose gid is "move 0 -42" comes from 42 pixels above when its frame is shown.

    Raises ValueError for no control, for one without values, with repeated ones or with numbers that do not ascend, and
    for too many frames, and TypeError where ``fn`` does not return a Figure.
    """
    choices = {name: list(values) for name, values in sliders.items()}
    if not choices:
        raise ValueError("explore() has no slider. Name an argument and list its values: world_size=[1, 2, 4].")
    for name, values in choices.items():
        if not values:
            raise ValueError(f"explore({name}=[]) has no values. List those to show.")
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"explore({name}={values}) repeats a value. List each value once.")
        sizes = [size for value in values if (size := size_of(value)) is not None]
        if len(sizes) == len(values) and sizes != sorted(sizes):
            raise ValueError(f"explore({name}={values}) does not ascend. The function's default says where it starts.")
    return Explorer(fn, alt, caption, choices)


class Explorer:
    """What ``explore`` returns: all frames, shown by widgets or on a static page."""

    def __init__(self, fn: Callable[..., Figure], alt: str, caption: str, sliders: dict[str, list]) -> None:
        self.name = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)  # a partial has a .func
        self.caption, self.sliders = caption, sliders
        parameters = inspect.signature(fn).parameters
        defaults = [getattr(parameters.get(name), "default", None) for name in sliders]
        self.start = tuple(
            values.index(default) if default in values else 0
            for default, values in zip(defaults, sliders.values(), strict=True)
        )
        frames = list(itertools.product(*(range(len(values)) for values in sliders.values())))
        if len(frames) > MOST_FRAMES:
            raise ValueError(f"explore() draws at most {MOST_FRAMES} frames, not {len(frames)}. List fewer values.")
        self.views: dict[tuple[int, ...], str] = {}  # by the controls' positions
        for frame in frames:
            arguments = {name: sliders[name][position] for name, position in zip(sliders, frame, strict=True)}
            says = ", ".join(f"{label(name)} {value_of(name, value)}" for name, value in arguments.items())
            words = f"{alt} ({says})" if alt.strip() else ""
            self.views[frame] = view(fn(**arguments), words, salt=caption, on=frame == self.start)
        self.views = dict(zip(self.views, equally_tall([*self.views.values()]), strict=True))
        self.widget: Any = None

    def frame(self, positions: Sequence[int]) -> str:
        """The figure for these positions of the sliders, as HTML."""
        frame = self.views[tuple(positions)].replace('"wso-view"', '"wso-view wso-on"', 1)
        return figure_html(frame, self.caption)

    def live(self) -> Any:
        """The controls and the figure as an ipywidget, which is made at the first call."""
        import ipywidgets

        if self.widget is None:
            drawing = ipywidgets.HTML(self.frame(self.start))
            knobs = [
                (ipywidgets.ToggleButtons if len(values) <= MOST_BUTTONS else ipywidgets.SelectionSlider)(
                    options=[(value_of(name, value), position) for position, value in enumerate(values)],
                    value=start,
                    description=label(name),
                    style={"description_width": "initial"},
                )
                for start, (name, values) in zip(self.start, self.sliders.items(), strict=True)
            ]

            def draw(_: object) -> None:
                drawing.value = self.frame([knob.value for knob in knobs])

            for knob in knobs:
                knob.observe(draw, "value")
            self.widget = ipywidgets.VBox([*knobs, drawing])
        return self.widget

    def page(self) -> str:
        """The controls and all frames as HTML that loads nothing."""
        frames = "".join(self.views.values())
        own = hashlib.sha256((self.caption + frames).encode()).hexdigest()[:8]  # radio buttons of a page share names
        places = zip(self.start, self.sliders.items(), strict=True)
        controls = "".join(
            control(f"f{own}-{number}", label(name), [value_of(name, value) for value in values], start, name == "step")
            for number, (start, (name, values)) in enumerate(places)
        )
        # The script shows the controls: where it does not run, they would do nothing.
        controls = f'<div class="wso-controls" hidden="hidden">{controls}</div>'
        return figure_html(frames, self.caption, controls, SCRIPT)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.page()}
        if getattr(get_ipython(), "kernel", None):
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.live().model_id,
            }
        return bundle

    def __repr__(self) -> str:
        turns = ", ".join(f"{name}={values}" for name, values in self.sliders.items())
        return f"explore({self.name}, {turns})"


def label(name: str) -> str:
    """A control's name in words, without a unit at its end."""
    words = name.split("_")
    return NAMES.get(name) or " ".join(words[: -1 if words[-1] in UNITS else None])


def value_of(name: str, value: Any) -> str:
    """A value in words, with the unit at the end of its control's name."""
    unit = UNITS.get(name.rpartition("_")[2])
    return f"{value} {unit}" if unit else str(value)


def size_of(value: Any) -> float | None:
    """The number that a value is, or begins with if its other words are a unit; None for a name or a truth value."""
    if isinstance(value, str):
        number = re.fullmatch(r"(-?\d+(?:\.\d+)?) ?%", value)
        return float(number[1]) if number else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def control(own: str, name: str, labels: list[str], start: int, steps: bool) -> str:
    """Buttons for up to five values, or a slider; data-lm-suppress-shortcuts keeps the arrow keys in JupyterLab."""
    title, data = html.escape(name), html.escape(json.dumps(labels))
    if len(labels) <= MOST_BUTTONS:
        buttons = "".join(
            f'<label><input type="radio" name="{own}" value="{place}" autocomplete="off" data-lm-suppress-shortcuts'
            f"{' checked' if place == start else ''}><span>{html.escape(words)}</span></label>"
            for place, words in enumerate(labels)
        )
        return f'<fieldset data-labels="{data}"><legend>{title}</legend><div>{buttons}</div></fieldset>'
    first, wide = html.escape(labels[start]), max(map(len, labels))
    play = '<button type="button" aria-label="Play the steps"></button>' if steps else ""
    return (
        f'<div data-labels="{data}">{play}<label><span>{title}</span><input type="range" min="0" '
        f'max="{len(labels) - 1}" step="1" value="{start}" autocomplete="off" aria-valuetext="{first}" '
        f'data-lm-suppress-shortcuts></label><output aria-live="off" style="width:{wide}ch">{first}</output></div>'
    )


def equally_tall(views: list[str]) -> list[str]:
    """Views whose drawings all have the height of the tallest one, so that the page below a figure stays in place."""
    size = re.compile(r'viewBox="0 0 (\S+) (\S+)" width="\S+" height="\S+"')
    sizes = [match.groups() for view in views if (match := size.search(view))]
    if len(sizes) < len(views) or len({width for width, _ in sizes}) > 1:
        return views
    tallest = max((height for _, height in sizes), key=float)
    return [size.sub(rf'viewBox="0 0 \1 {tallest}" width="\1" height="{tallest}"', view, count=1) for view in views]
