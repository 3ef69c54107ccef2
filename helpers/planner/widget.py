"""The planner's form in a notebook: the book's page of it, as a widget of the kernel."""

from typing import Any

import ipywidgets as widgets

from helpers.planner import form


def planner() -> widgets.VBox:
    """The form; its answer and the fastest layouts follow each change."""
    boxes: dict[str, Any] = {}
    for entry in form.INPUTS.values():
        shared = {"value": entry.value, "description": entry.label, "style": {"description_width": "initial"}}
        boxes[entry.name] = (
            widgets.Dropdown(options=entry.choices, **shared) if entry.choices else widgets.Text(**shared)
        )
    answer, best = widgets.HTML(), widgets.HTML()

    def update(_: Any = None) -> None:
        values = {name: box.value for name, box in boxes.items()}
        answer.value, best.value = form.answer(values).html, form.best(values).html

    for box in boxes.values():
        box.observe(update, names="value")
    update()
    groups = [
        widgets.VBox([widgets.HTML(f"<b>{name}</b>"), *(boxes[entry.name] for entry in entries)])
        for name, entries in form.GROUPS.items()
    ]
    return widgets.VBox([widgets.HBox(groups), answer, best])
