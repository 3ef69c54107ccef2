"""Hygiene of the notebooks: every rule of hygiene.py on every notebook."""

import re

import hygiene
import nbformat
import pytest
import torch
from conftest import ROOT, run_nbval
from nbformat.v4 import new_code_cell, new_notebook, new_output
from store_outputs import normalised, text_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.stem)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_follows_every_rule(path):
    nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    problems = hygiene.problems_of(nb, hygiene.RULES)
    if path in CHAPTERS or path.stem == "template":
        problems += hygiene.problems_of(nb, hygiene.PATTERN)
    if path.read_text(encoding="utf-8") != text_of(nb):
        problems.append("the file is not laid out as stored: run `make outputs` for this notebook")
    assert not problems, "\n".join([f"{len(problems)} problems in {path.name}:", *problems])


def test_normalising_takes_out_the_paths_of_this_machine():
    traceback = [f"File {torch.__file__}:3", f"File {ROOT}/helpers/ranks/launch.py:4"]
    error = new_output("error", ename="TypeError", evalue="f() misses x", traceback=traceback)
    notebook = new_notebook(cells=[new_code_cell("f()", outputs=[error])])
    [cell] = normalised(notebook).cells
    assert cell.outputs[0].traceback == ["File torch/__init__.py:3", "File helpers/ranks/launch.py:4"]


CELLS_THAT_WARN = [
    "warnings.warn('old', FutureWarning)",
    "def warn():\n    warnings.warn('old', FutureWarning)\n_ = launch(warn, nproc=1)",
    "warnings.warn('old', DeprecationWarning)",
    "def warn():\n    warnings.warn('old', DeprecationWarning)\n_ = launch(warn, nproc=1)",
]


@pytest.mark.ranks
def test_warning_of_a_chapters_own_line_fails_under_nbval(tmp_path):
    """In the kernel and on a rank, a warning about a line of the notebook prints text that is not stored."""
    imports = "%load_ext helpers\nimport warnings\nfrom helpers.ranks.launch import launch"
    cells = []
    for count, source in enumerate([imports, *CELLS_THAT_WARN], start=1):
        cells.append(new_code_cell(source, execution_count=count))
    nbformat.write(new_notebook(cells=cells), tmp_path / "warns.ipynb")

    process = run_nbval(tmp_path / "warns.ipynb", "-rA")

    # pytest prints a line for each cell, such as "FAILED warns.ipynb::Cell 1".
    outcomes = re.findall(r"^(PASSED|FAILED) .*?\.ipynb::Cell (\d)", process.stdout, flags=re.M)
    outcome_of_cell = {int(number): outcome for outcome, number in outcomes}
    assert len(outcomes) == len(cells), process.stdout
    assert outcome_of_cell == {0: "PASSED", 1: "FAILED", 2: "FAILED", 3: "FAILED", 4: "FAILED"}, process.stdout
