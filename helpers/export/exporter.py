"""``jupyter nbconvert --to torchrun``: a notebook as a script for torchrun. It executes no cell."""

import sys
from pathlib import Path
from typing import Any

from nbconvert.exporters import Exporter
from nbformat import NotebookNode

from helpers.export.chapters import tested_with
from helpers.export.notebook import ExportError, script_name
from helpers.export.script import script_from_notebook


class TorchrunExporter(Exporter):
    """The exporter that nbconvert finds by the package's entry point."""

    export_from_notebook = "Script for torchrun"
    file_extension = ".py"
    output_mimetype = "text/x-python"

    def from_notebook_node(self, nb: NotebookNode, resources: Any = None, **keywords: Any) -> tuple[Any, Any]:
        """Convert a notebook, as nbconvert calls it: returns the script, and nbconvert's resources with its name.

        Exits with one line for a notebook that has no script.
        """
        resources = self._init_resources(resources)  # and no preprocessors: one of them executes notebooks
        about_the_notebook = resources["metadata"]
        name = script_name(nb, about_the_notebook.get("name") or "notebook")
        resources["unique_key"] = name  # which nbconvert takes for the file's name
        # nbconvert names the notebook's folder, unless it reads the notebook from standard input.
        path = Path(about_the_notebook.get("path") or ".", f"{about_the_notebook.get('name')}.ipynb")
        try:
            return script_from_notebook(nb, name, tested_with(path)), resources
        except ExportError as error:  # nbconvert would show its traceback
            sys.exit(f"error: {error}")
