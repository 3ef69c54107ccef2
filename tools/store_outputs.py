"""Run notebooks and store their outputs as the book and nbval read them: ``make outputs NOTEBOOK=…``.

What differs from run to run or from machine to machine is left out, so that a notebook changes only where its
cells or what they print changed.
"""

import re
import sys
import sysconfig
from copy import deepcopy
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = {"tags", "mystnb", "jupyter"}
# What a page folds, JupyterLab folds too.
FOLDED = {
    "hide-cell": ["source_hidden", "outputs_hidden"],
    "hide-input": ["source_hidden"],
    "hide-output": ["outputs_hidden"],
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"  # names a model of a kernel that is gone


def normalised(nb):
    """A copy of the notebook without widget state, timings, version numbers and this machine's paths."""
    nb = deepcopy(nb)
    nb.metadata = nbformat.from_dict(METADATA)
    nb.nbformat_minor = 5
    for cell in nb.cells:
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key in CELL_METADATA})
        if folded := [name for tag in FOLDED if tag in cell.metadata.get("tags", []) for name in FOLDED[tag]]:
            cell.metadata["jupyter"] = dict.fromkeys(folded, True)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET_VIEW, None)
            if "traceback" in output:  # nbval does not compare it
                output.traceback = [without_machine_paths(line) for line in output.traceback]
    return nb


def without_machine_paths(text):
    """The text with paths told from the packages' folder or the project's, wherever these are."""
    home = str(Path.home())
    for folder in [sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(NOTEBOOKS.parent), home]:
        text = text.replace(f"{folder}/", "")
        if folder.startswith(f"{home}/"):  # IPython writes ~ for it
            text = text.replace(folder.replace(home, "~", 1) + "/", "")
    return re.sub(r"ipykernel_\d+", "ipykernel", text)


def text_of(nb):
    """The notebook's file, as this project stores it."""
    return nbformat.writes(nb, version=4, indent=1, ensure_ascii=False) + "\n"


def run(path):
    """Run the notebook in a fresh kernel, in its own folder, and return it with the new outputs."""
    nb = nbformat.read(path, as_version=4)
    client = NotebookClient(
        nb, timeout=600, kernel_name="python3", coalesce_streams=True, store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )  # fmt: skip
    return client.execute()


def main(names):
    paths = [Path(name) for name in names] or sorted(NOTEBOOKS.glob("*.ipynb"))
    for path in paths:
        try:
            nb = run(path)
        except FileNotFoundError:
            return f"There is no notebook {path}. Name one: make outputs NOTEBOOK=notebooks/04_ddp.ipynb"
        except CellExecutionError as error:
            return f"{error}\n{path} is unchanged: the cell above failed."
        path.write_text(text_of(normalised(nb)), encoding="utf-8")
        print(f"{path}: {sum(cell.cell_type == 'code' for cell in nb.cells)} cells run, outputs stored")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
