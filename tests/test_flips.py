"""tools/sabotage/flips.py finds the asserts that cannot fail, in the kernel and on ranks, and no others."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from sabotage import flips

CELLS = {  # {name: (a cell, what is wrong with it)}
    "setup": ("%load_ext helpers\nimport torch\nfrom helpers.ranks.launch import launch\nloss, empty = 2.0, []", ""),
    "equal": ("assert loss == 2 and [loss] == [2.0]\nassert abs(loss - 2.01) < 0.02 and not empty", ""),
    "constants": ("assert 2 < 3", "compares constants alone"),
    "skipped": ("if empty:\n    assert loss == 2", "never reached"),
    "old": ("if torch.__version__ < '2':\n    assert loss == 3\nelse:\n    assert loss == 2", ""),
    "new": ("if torch.__version__ >= '2':\n    if empty:\n        assert loss == 2", "never reached"),
    "nothing": ("assert all(value < 3 for value in empty)", "over nothing: all((value < 3 for value in empty))"),
    "wide": ("assert abs(loss - 2.1) < 0.5", "10 % off still holds: abs(loss - 2.1) < 0.5"),
    "far": ("assert loss > 0.05", "a number twice too large or small still holds: loss > 0.05"),
    "once": ("calls = iter([1, 2])\nassert next(calls) == 1\nassert next(calls) == 2", ""),
    "or": ("assert loss == 2 or loss == 5", "flipped still holds: loss == 5"),
    "caught": ("try:\n    empty[0]\nexcept IndexError:\n    assert loss == 2", "passes where nothing is raised"),
    "ranks": ("%%ranks 2\nassert rank in (0, 1)\nassert rank < 90", "or small still holds: rank < 90"),
    "sent": ("def far(x):\n    assert x < 90\n\n\nlaunch(far, 2, nproc=2)", "or small still holds: x < 90"),
    "fails": ('assert loss == 3, f"it is\\n{loss}"', "failed: AssertionError: it is\n2.0"),
}


@pytest.mark.ranks
def test_asserts_that_cannot_fail_are_named(tmp_path):
    cells = [new_code_cell(source, id=name) for name, (source, _) in CELLS.items()]
    nbformat.write(new_notebook(cells=cells), tmp_path / "small.ipynb")
    rows = flips.survey(tmp_path / "small.ipynb")
    for name, (_, flaw) in CELLS.items():
        flaws = [row[2] for row in rows if row[0] == name]
        assert len(flaws) == bool(flaw) and flaw in "".join(flaws), (name, flaws)


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("%%bash\necho assert x", "echo assert x"),
        ("x = !ls\nassert x, (\n    1\n)\ny = 2", "y = 2"),
        ("s = 'é'; assert (\n    s\n); t = 1", "; t = 1"),
    ],
)
def test_lines_stay_where_they_are(source, last):
    lines = flips.rewrite(new_code_cell(source, id="a"), {}).split("\n")
    assert len(lines) == len(source.split("\n")) and lines[-1].endswith(last)
