"""``explore``: one call makes a figure function interactive, in a live kernel and on a static page: for notebooks."""

import html
import inspect
import itertools
import json

from IPython import get_ipython

from helpers.figures.drawing import figure_html, view

MOST_FRAMES = 64

# The figures of one page do not know of each other: the script finds its own by where it stands, and uses no ids.
SCRIPT = """<script>(function () {
  var script = document.currentScript, figure = script && script.closest("figure");
  if (!figure) return;
  var views = figure.querySelectorAll(".wso-view"), inputs = figure.querySelectorAll("input");
  var shown = figure.querySelector(".wso-on");
  function draw() {
    var frame = 0;
    inputs.forEach(function (input) {
      var label = JSON.parse(input.dataset.labels)[+input.value];
      frame = frame * (+input.max + 1) + +input.value;
      input.setAttribute("aria-valuetext", label);
      input.closest("label").nextElementSibling.textContent = label;
    });
    var left = shown.scrollLeft;
    shown.classList.remove("wso-on");
    shown = views[frame];
    shown.classList.add("wso-on");
    shown.scrollLeft = left;
  }
  inputs.forEach(function (input) { input.addEventListener("input", draw); });
  figure.querySelector(".wso-controls").hidden = false;
  draw();
})();</script>"""


def explore(fn, *, alt, caption="", **sliders):
    """Show ``fn(**values)``, a Figure, with a slider for each keyword, as in ``explore(fn, alt="…", rank=[0, 1])``.

    In a live kernel the sliders are ipywidgets; on a static page they move between frames drawn now, one for each
    combination of values (at most 64). A slider starts at the function's own default where that is among its values,
    else at the first. ``alt`` and ``caption`` are as in ``figures.show``; each frame's ``alt`` adds its values.

    Raises ValueError for no slider, a slider without values or with a repeated one, and too many frames; TypeError
    when ``fn`` does not return a Figure.
    """
    sliders = {name: list(values) for name, values in sliders.items()}
    if not sliders:
        raise ValueError("explore() needs a slider: give an argument of the function its values, world_size=[1, 2, 4].")
    for name, values in sliders.items():
        if not values:
            raise ValueError(f"explore({name}=[]) has no values: list the ones to show.")
        if len(set(map(str, values))) < len(values):
            raise ValueError(f"explore({name}={values}) repeats a value: list each once.")
    return Explorer(fn, alt, caption, sliders)


class Explorer:
    """What ``explore`` returns: all frames, and two ways to show them."""

    def __init__(self, fn, alt, caption, sliders):
        self.name = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)  # a partial has a .func
        self.caption, self.sliders = caption, sliders
        self.start = [values.index(default) if default in values else 0 for default, values in defaults(fn, sliders)]
        combinations = list(itertools.product(*sliders.values()))
        if (count := len(combinations)) > MOST_FRAMES:
            raise ValueError(f"explore() draws at most {MOST_FRAMES} frames, these are {count}: list fewer values.")
        self.views = []
        for number, combination in enumerate(combinations):
            values = dict(zip(sliders, combination, strict=True))
            says = ", ".join(f"{label(name)} {value}" for name, value in values.items())
            words = f"{alt} ({says})" if alt.strip() else ""
            self.views.append(view(fn(**values), words, salt=caption, on=number == self.number(self.start)))
        self.widget = None

    def number(self, positions):
        """Which frame belongs to these positions of the sliders."""
        number = 0
        for position, values in zip(positions, self.sliders.values(), strict=True):
            number = number * len(values) + position
        return number

    def frame(self, positions):
        """The figure for these positions of the sliders, as HTML."""
        frame = self.views[self.number(positions)].replace('"wso-view"', '"wso-view wso-on"', 1)
        return figure_html(frame, self.caption)

    def live(self):
        """The sliders and the figure as an ipywidget, made once."""
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

            def draw(_):
                drawing.value = self.frame([knob.value for knob in knobs])

            for knob in knobs:
                knob.observe(draw, "value")
            self.widget = ipywidgets.VBox([*knobs, drawing])
        return self.widget

    def page(self):
        """The sliders and all frames as HTML that needs nothing from outside."""
        controls = ""  # data-lm-suppress-shortcuts leaves them the arrow keys in JupyterLab
        for start, (name, values) in zip(self.start, self.sliders.items(), strict=True):
            labels = [str(value) for value in values]
            first, data = html.escape(labels[start]), html.escape(json.dumps(labels))
            controls += (
                f'<div><label><span>{html.escape(label(name))}</span><input type="range" min="0" '
                f'max="{len(values) - 1}" step="1" value="{start}" autocomplete="off" aria-valuetext="{first}" '
                f'data-labels="{data}" data-lm-suppress-shortcuts></label>'
                f'<output aria-live="off">{first}</output></div>'
            )
        # Hidden until the script runs, without which they are dead.
        controls = f'<div class="wso-controls" hidden="hidden">{controls}</div>'
        return figure_html("".join(self.views), self.caption, controls, SCRIPT)

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"text/plain": repr(self), "text/html": self.page()}
        if getattr(get_ipython(), "kernel", None):
            bundle["application/vnd.jupyter.widget-view+json"] = {
                "version_major": 2,
                "version_minor": 0,
                "model_id": self.live().model_id,
            }
        return bundle

    def __repr__(self):
        turns = ", ".join(f"{name}={values}" for name, values in self.sliders.items())
        return f"explore({self.name}, {turns})"


def defaults(fn, sliders):
    """Each slider's (default in ``fn``'s signature, values)."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some builtins have none
        parameters = {}
    return [(getattr(parameters.get(name), "default", None), values) for name, values in sliders.items()]


def label(name):
    """A slider's name in words."""
    return name.replace("_", " ")
