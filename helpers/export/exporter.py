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
        # nbconvert says how the notebook is called and in which folder it is. If it reads the notebook from standard
        # input, it says nothing.
        metadata = resources["metadata"]
        notebook_name = metadata.get("name") or "notebook"
        folder = metadata.get("path") or "."
        name = script_name(nb, notebook_name)
        resources["unique_key"] = name  # the name of the file that nbconvert writes
        versions = tested_with(Path(folder, f"{notebook_name}.ipynb"))
        try:
            return script_from_notebook(nb, name, versions), resources
        except ExportError as error:  # nbconvert would show its traceback
            sys.exit(f"error: {error}")
