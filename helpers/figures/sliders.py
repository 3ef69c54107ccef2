"""``explore``, for notebooks: one call makes a figure function interactive, in a live kernel and on a static page."""

import html
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from IPython import get_ipython
from matplotlib.figure import Figure

from helpers.figures.drawing import figure_html, view

MOST_FRAMES = 64

# A page may have several such figures. Each script uses the figure around it, so that no ids can collide.
SCRIPT = f"<script>{Path(__file__).with_name('sliders.js').read_text(encoding='utf-8').strip()}</script>"


def explore(fn: Callable[..., Figure], *, alt: str, caption: str = "", **sliders: Iterable[Any]) -> "Explorer":
    """Show the Figure ``fn(**values)`` with a slider for each keyword, as in ``explore(fn, alt="…", rank=[0, 1])``.

    In a live kernel the sliders are ipywidgets. On a static page they choose one of the frames that this call draws,
    one for each combination of values, at most 64. A slider starts at the function's default if that is among its
    values, or else at the first value. ``alt`` and ``caption`` are as in ``drawing.show``; each frame's ``alt`` also
    names its values.

    Raises ValueError for no slider, for a slider without values or with repeated ones, and for too many frames, and
    TypeError where ``fn`` does not return a Figure.
    """
    choices = {name: list(values) for name, values in sliders.items()}
    if not choices:
        raise ValueError("explore() has no slider. Name an argument and list its values: world_size=[1, 2, 4].")
    for name, values in choices.items():
        if not values:
            raise ValueError(f"explore({name}=[]) has no values. List those to show.")
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"explore({name}={values}) repeats a value. List each value once.")
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
        self.views: dict[tuple[int, ...], str] = {}  # by the sliders' positions
        for frame in frames:
            arguments = {name: sliders[name][position] for name, position in zip(sliders, frame, strict=True)}
            says = ", ".join(f"{label(name)} {value}" for name, value in arguments.items())
            words = f"{alt} ({says})" if alt.strip() else ""
            self.views[frame] = view(fn(**arguments), words, salt=caption, on=frame == self.start)
        self.widget: Any = None

    def frame(self, positions: Sequence[int]) -> str:
        """The figure for these positions of the sliders, as HTML."""
        frame = self.views[tuple(positions)].replace('"wso-view"', '"wso-view wso-on"', 1)
        return figure_html(frame, self.caption)

    def live(self) -> Any:
        """The sliders and the figure as an ipywidget, which is made at the first call."""
        import ipywidgets

        if self.widget is None:
            drawing = ipywidgets.HTML(self.frame(self.start))
            knobs = [
                ipywidgets.SelectionSlider(
                    options=[(str(value), position) for position, value in enumerate(values)],
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
        """The sliders and all frames as HTML that loads nothing."""
        controls = ""  # data-lm-suppress-shortcuts: in JupyterLab the arrow keys move the slider
        for start, (name, values) in zip(self.start, self.sliders.items(), strict=True):
            labels = [str(value) for value in values]
            first, data = html.escape(labels[start]), html.escape(json.dumps(labels))
            controls += (
                f'<div><label><span>{html.escape(label(name))}</span><input type="range" min="0" '
                f'max="{len(values) - 1}" step="1" value="{start}" autocomplete="off" aria-valuetext="{first}" '
                f'data-labels="{data}" data-lm-suppress-shortcuts></label>'
                f'<output aria-live="off">{first}</output></div>'
            )
        # The script shows the sliders: where it does not run, they would do nothing.
        controls = f'<div class="wso-controls" hidden="hidden">{controls}</div>'
        return figure_html("".join(self.views.values()), self.caption, controls, SCRIPT)

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
    """A slider's name in words."""
    return name.replace("_", " ")
