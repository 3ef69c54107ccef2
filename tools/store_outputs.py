"""Run notebooks and store their outputs, which the book shows and nbval compares: ``make outputs ARGS=…``.

It leaves out what differs from run to run or from machine to machine. So a notebook's file changes only where a cell
or its output has changed.
"""

import re
import sys
import sysconfig
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = {"tags", "mystnb", "jupyter"}  # entries of a cell's metadata that are kept
# {tag of a cell: what JupyterLab folds of it}, because a cell that is folded on the page is folded in JupyterLab too.
FOLDED = {
    "hide-cell": ["source_hidden", "outputs_hidden"],
    "hide-input": ["source_hidden"],
    "hide-output": ["outputs_hidden"],
}


def normalised(nb: NotebookNode) -> NotebookNode:
    """A copy of the notebook without what differs between runs and machines: timings, widget state, versions, paths.

    In the copy, cells that are folded on the book's page are folded in JupyterLab too.
    """
    nb = deepcopy(nb)
    metadata = dict(METADATA)
    if "book" in nb.metadata:
        metadata["book"] = nb.metadata.book
    nb.metadata = nbformat.from_dict(metadata)
    nb.nbformat_minor = 5  # the first minor version of format 4 in which cells have ids
    for cell in nb.cells:
        lasting_metadata = {key: value for key, value in cell.metadata.items() if key in CELL_METADATA}
        cell.metadata = nbformat.from_dict(lasting_metadata)
        folded = folded_parts(cell.metadata.get("tags", []))
        if folded:
            cell.metadata["jupyter"] = folded
        for output in cell.get("outputs", []):
            if "traceback" in output:
                output.traceback = [without_machine_paths(line) for line in output.traceback]
    return nb


def folded_parts(tags: Sequence[str]) -> dict[str, bool]:
    """What JupyterLab folds of a cell with these tags: ``{"source_hidden": True}``, as the cell's metadata say it."""
    folded = {}
    for tag in tags:
        for part in FOLDED.get(tag, []):
            folded[part] = True
    return folded


def without_machine_paths(text: str) -> str:
    """Shorten the paths in the text of a traceback, so that it is the same on every machine.

    A path begins at the folder of the packages, of Python or of the project. The name of a cell's file loses the number
    of the kernel's process: ipykernel_4711 becomes ipykernel.
    """
    home = str(Path.home())
    # A folder comes before those that it is in, so that as much as possible of a path is left out.
    for folder in [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(NOTEBOOKS.parent), home]:
        text = text.replace(f"{folder}/", "")
        if folder.startswith(f"{home}/"):  # IPython writes ~ for the home folder
            text = text.replace(folder.replace(home, "~", 1) + "/", "")
    return re.sub(r"ipykernel_\d+", "ipykernel", text)


def text_of(nb: NotebookNode) -> str:
    """The text of a notebook's file, in the format in which this project stores notebooks."""
    return nbformat.writes(nb, version=4, indent=1, ensure_ascii=False) + "\n"


def run(path: Path) -> NotebookNode:
    """Run the notebook at ``path`` in a new kernel, in the notebook's folder; return it with its new outputs.

    Raises CellExecutionError if a cell raises an exception that its tags do not allow, and FileNotFoundError if there
    is no such notebook.
    """
    nb = nbformat.read(path, as_version=4)
    client = NotebookClient(
        nb,
        timeout=600,  # seconds of a cell
        kernel_name="python3",
        coalesce_streams=True,  # one output for all that a cell prints, however many messages brought it
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    return client.execute()


def main(names: Sequence[str]) -> str | None:
    """Run the notebooks at these paths, such as ``["notebooks/04_ddp.ipynb"]``, and store their outputs in them.

    If ``names`` is empty, all notebooks are run. Returns None if all is well, or else what went wrong, as the text with
    which the program exits. A notebook with a failing cell is left as it was, and later ones are not run.
    """
    paths = [Path(name) for name in names]
    if not paths:
        paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in paths:
        try:
            nb = run(path)
        except FileNotFoundError:
            return f"There is no notebook {path}. Name one: make outputs ARGS=notebooks/04_ddp.ipynb"
        except CellExecutionError as error:
            return f"{error}\n{path} is unchanged: the cell above failed."
        path.write_text(text_of(normalised(nb)), encoding="utf-8")
        code_cells = [cell for cell in nb.cells if cell.cell_type == "code"]
        print(f"{path}: {len(code_cells)} cells run, outputs stored")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
