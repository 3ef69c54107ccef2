"""The planner's form in a notebook: the book's page of it, as a widget of the kernel."""

from typing import Any

import ipywidgets as widgets

from helpers.planner import form


def planner() -> widgets.VBox:
    """The form; its answer and the fastest layouts follow each change."""
    boxes: dict[str, Any] = {}
    answer = widgets.HTML()
    best = widgets.HTML()

    def update(_: Any = None) -> None:
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
    style = {"description_width": "initial"}
    if entry.choices:
        return widgets.Dropdown(options=entry.choices, value=entry.value, description=entry.label, style=style)
    return widgets.Text(value=entry.value, description=entry.label, style=style)
