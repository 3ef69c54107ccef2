"""A chapter's cells by their ids, for the pages that show a cell of it: the first page and its moving picture."""

import json
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError


class Chapter:
    """The cells of a notebook, with their stored outputs. Raises ExtensionError for what it does not have."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        self.cells = {cell["id"]: cell for cell in cells}

    def cell(self, cell_id: str) -> dict[str, Any]:
        if cell_id not in self.cells:
            raise ExtensionError(f"{self.name} has no cell {cell_id!r}, which the first page shows.")
        return self.cells[cell_id]

    def source(self, cell_id: str) -> str:
        return "".join(self.cell(cell_id)["source"])

    def output(self, cell_id: str) -> str:
        """What the cell printed, or the error with which it ended."""
        text = ""
        for output in self.cell(cell_id)["outputs"]:
            if output["output_type"] == "error":
                text += f"{output['ename']}: {output['evalue']}\n"
            text += "".join(output.get("text", ""))
        if not text.strip():
            raise ExtensionError(f"Cell {cell_id!r} of {self.name} has no stored output, which the first page shows.")
        return text.rstrip()
