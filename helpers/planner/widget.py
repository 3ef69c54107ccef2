"""The planner's form in a notebook: the book's page of it, as a widget of the kernel."""

from typing import Any

import ipywidgets as widgets

from helpers.planner import form


def planner() -> widgets.VBox:
    """The planner's form as a widget for a notebook: its inputs in groups, the plan, and the fastest layouts.

    The plan and the fastest layouts follow each change of an input.
    """
    boxes: dict[str, Any] = {}  # {name of an input: its control}
    answer = widgets.HTML()
    best = widgets.HTML()

    def update(_: Any = None) -> None:
        """Plan anew. A control calls this with a record of its change, which is not needed."""
        values = {name: box.value for name, box in boxes.items()}
        answer.value = form.answer(values).html
        best.value = form.best(values).html

    columns = []
    for title, entries in form.GROUPS.items():
        column = [widgets.HTML(f"<b>{title}</b>")]
        for entry in entries:
            box = control(entry)
            box.observe(update, names="value")
            boxes[entry.name] = box
            column.append(box)
        columns.append(widgets.VBox(column))
    update()
    return widgets.VBox([widgets.HBox(columns), answer, best])


def control(entry: form.Input) -> widgets.Dropdown | widgets.Text:
    """A list to choose from if the input has choices, or else a line to type a number in."""
    style = {"description_width": "initial"}  # as wide as the label; by default long labels are cut off
    if entry.choices:
        return widgets.Dropdown(options=entry.choices, value=entry.value, description=entry.label, style=style)
    return widgets.Text(value=entry.value, description=entry.label, style=style)
