"""The planner's form in a notebook: the book's page of it, as a widget of the kernel."""

from typing import Any

import ipywidgets as widgets

from helpers.planner import form


def planner() -> widgets.VBox:
    """The form as a widget for a notebook. Its answer and the fastest layouts follow each change of a value."""
    boxes: dict[str, Any] = {}  # {name of an input: its control}
    answer = widgets.HTML()
    best = widgets.HTML()

    def update(_: Any = None) -> None:
        """Answer anew. A control calls this with its change; what changed does not matter."""
        values = {name: box.value for name, box in boxes.items()}
        answer.value = form.answer(values).html
        best.value = form.best(values).html

    groups = []
    for title, entries in form.GROUPS.items():
        controls = [widgets.HTML(f"<b>{title}</b>")]
        for entry in entries:
            boxes[entry.name] = control(entry)
            boxes[entry.name].observe(update, names="value")
            controls.append(boxes[entry.name])
        groups.append(widgets.VBox(controls))
    update()
    return widgets.VBox([widgets.HBox(groups), answer, best])


def control(entry: form.Input) -> widgets.Dropdown | widgets.Text:
    """A list to choose from if the input has choices, or else a line to type a number in."""
    style = {"description_width": "initial"}  # as wide as the label; by default long labels are cut off
    if entry.choices:
        return widgets.Dropdown(options=entry.choices, value=entry.value, description=entry.label, style=style)
    return widgets.Text(value=entry.value, description=entry.label, style=style)
