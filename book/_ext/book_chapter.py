"""Where a page is, and a chapter's cells by their ids, for the first page and its moving picture, which show some."""

import json
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError


def root_of(page: Path) -> Path:
    """The folder of the project, given the file of a page, which is in the project's ``book`` or ``notebooks``."""
    return page.parent.parent


class Chapter:
    """A notebook's cells with their stored outputs. The methods raise ExtensionError for what it does not have."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        self.cells = {cell["id"]: cell for cell in cells}

    def cell(self, cell_id: str) -> dict[str, Any]:
        """A cell as nbformat stores it: ``source`` and texts of outputs are lists of lines."""
        if cell_id not in self.cells:
            raise ExtensionError(f"{self.name} has no cell {cell_id!r}, which the first page shows.")
        return self.cells[cell_id]

    def source(self, cell_id: str) -> str:
        """The cell's code."""
        return "".join(self.cell(cell_id)["source"])

    def output(self, cell_id: str) -> str:
        """What the cell printed, or the error with which it ended. Raises ExtensionError if neither is stored."""
        text = ""
        for output in self.cell(cell_id)["outputs"]:
            if output["output_type"] == "error":
                text += f"{output['ename']}: {output['evalue']}\n"
            text += "".join(output.get("text", ""))  # only what was printed has a text
        if not text.strip():
            raise ExtensionError(f"Cell {cell_id!r} of {self.name} has no stored output, which the first page shows.")
        return text.rstrip()
