"""What git takes from a notebook that a reader has saved: his changes of the text, and not the outputs of his run.

It is git's clean filter for notebooks, which `make` sets up, so that `git status` is clean after all cells of a chapter
were run and saved. git gives it the notebook on standard input and its path as the argument. What a cell shows to
readers is stored by `make outputs` alone. The filter knows a notebook that Jupyter saved, because only Jupyter stores
the version of Python; any other passes unchanged.

It imports the standard library only, because git may call it with any Python.
"""

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

# What a run or a look at a notebook changes, of a cell, of its metadata, and of the notebook's metadata.
OF_A_CELL = ("outputs", "execution_count")
OF_ITS_METADATA = ("jupyter", "collapsed", "scrolled", "execution")
OF_THE_NOTEBOOK = ("kernelspec", "language_info", "widgets")


def main() -> None:
    saved_text = sys.stdin.buffer.read().decode()
    sys.stdout.buffer.write(filtered(saved_text, sys.argv[1]).encode())


def filtered(saved_text: str, path: str) -> str:
    """The text of a notebook as git should take it. ``path`` is relative to the repository."""
    try:
        notebook = json.loads(saved_text)
    except ValueError:  # half of a merge, perhaps
        return saved_text
    if "version" not in notebook.get("metadata", {}).get("language_info", {}):
        return saved_text
    staged = subprocess.run(["git", "show", f":{path}"], capture_output=True)
    if staged.returncode != 0:  # a new notebook
        return saved_text
    known = json.loads(staged.stdout.decode())
    forget_run(notebook, known)
    if notebook == known:
        return staged.stdout.decode()
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def forget_run(notebook: dict[str, Any], known: dict[str, Any]) -> None:
    """Give a notebook, and each of its cells whose source is known, what they had before the run."""
    put_back(OF_THE_NOTEBOOK, notebook["metadata"], known["metadata"])
    known_cells = {cell["id"]: cell for cell in known["cells"] if "id" in cell}
    for cell in notebook["cells"]:
        known_cell = known_cells.get(cell.get("id"))
        if known_cell is not None and "".join(cell["source"]) == "".join(known_cell["source"]):
            put_back(OF_A_CELL, cell, known_cell)
            put_back(OF_ITS_METADATA, cell["metadata"], known_cell["metadata"])


def put_back(names: Iterable[str], changed: dict[str, Any], known: dict[str, Any]) -> None:
    """Give these keys of a dict the values that they had. What was not there goes."""
    for name in names:
        changed.pop(name, None)
        if name in known:
            changed[name] = known[name]


if __name__ == "__main__":
    main()
