"""Sabotage: each lie still applies, the record agrees with the lies and the notebooks, and three lies are really told.

``PYTHONPATH=.:tools:tests/support python tests/test_sabotage.py`` prints the lies that no longer apply.
"""

import ast
import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sabotage import run
from sabotage.lies import LIES
from sabotage.lies.telling_lies import instead_of

# One lie in the kernel, one in the ranks of launch, one in the processes of a torchrun that a cell starts.
EXAMPLES = {"autocast_is_off": "05", "all_reduce_sums_where_it_should_average": "02", "local_rank_is_the_rank": "01"}
ROWS = {run.key(row): row for row in run.read_record()}


def does_not_apply(lie, chapter):
    """The error of a lie that names or quotes what no longer exists; empty if it applies."""
    try:
        if lie.changes_notebook:
            lie.tell(run.notebook_of(chapter).read_text())
        else:
            lie.tell(importlib.import_module(lie.module))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def print_what_does_not_apply():
    """Tell each lie in a fork of its own, because it changes the modules of its process."""
    for lie in LIES.values():
        if not lie.changes_notebook:
            with contextlib.suppress(ImportError):
                importlib.import_module(lie.module)  # so that no fork has to import it
    for lie, chapter in run.PAIRS:
        fork = os.fork()
        if fork == 0:
            error = does_not_apply(lie, chapter)
            if error:
                print(f"{lie.name}: {error}", flush=True)
            os._exit(0)
        os.waitpid(fork, 0)


def test_each_lie_finds_what_it_changes():
    path = os.pathsep.join(sys.path)
    process = subprocess.run([sys.executable, __file__], env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
    lies = process.stdout.decode()
    assert lies == "", f"{lies}Correct these in tools/sabotage/lies. Then run them: make sabotage ARGS=NAME"


def test_the_record_has_a_row_for_every_lie_and_no_other():
    assert set(ROWS) == {(lie.says, run.label(chapter)) for lie, chapter in run.PAIRS}, "run: make sabotage"
    assert len(run.read_record()) == len(ROWS)
    assert len({lie.says for lie in LIES.values()}) == len(LIES)


@pytest.mark.parametrize("lie, chapter", run.PAIRS, ids=[f"{lie.name}-{chapter}" for lie, chapter in run.PAIRS])
def test_a_row_quotes_a_cell_about_the_lie(lie, chapter):
    row = ROWS[lie.says, run.label(chapter)]
    cell_id, kind, text = (row[column].strip("`") for column in ("Cell", "By", "What the cell said"))
    command = f"run: make sabotage ARGS={lie.name}"
    assert run.verdict_on(lie, chapter, run.Failure(cell_id, kind, text)) == run.Verdict(row, ""), command
    if text.startswith("assert "):
        cells = run.read_notebook(run.notebook_of(chapter)).cells
        [source] = [cell.source for cell in cells if cell.id == cell_id]
        with contextlib.suppress(SyntaxError):  # a cell that begins with %%
            source += "\n" + ast.unparse(ast.parse(source))  # a statement of several lines is quoted as one
        assert text.removesuffix(" …") in run.as_code(source, len(source)), command


def test_a_lies_own_error_is_known_by_the_name_of_its_file():
    """first_failure.py looks for this name in what a cell or a rank says."""
    functions = [instead_of, *(lie.tell for lie in LIES.values())]
    assert [f.__name__ for f in functions if not Path(f.__code__.co_filename).name.endswith("lies.py")] == []


@pytest.mark.daily
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_lie_is_noticed_as_recorded(name):
    lie = LIES[name]
    chapter = EXAMPLES[name]
    row = ROWS[lie.says, run.label(chapter)]
    assert run.verdict_on(lie, chapter, run.run(lie, chapter)) == run.Verdict(row, "")


UNNOTICED = {
    "no cell notices it": "import torch",
    "no process imported torch.amp.autocast_mode": "pass",
    "neither the cell nor the prose": "import torch\nassert torch.autocast('cpu')._enabled",
    "the lie does not work: only NameError": "import torch\nif not torch.autocast('cpu')._enabled:\n    a_patch_s_name",
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", UNNOTICED)
def test_a_lie_that_is_not_noticed_is_a_problem(problem, tmp_path, monkeypatch):
    project = run.copy_of_the_project(tmp_path / "project")
    for notebook in (project / "notebooks").glob("*.ipynb"):
        notebook.unlink()
    cells = [new_markdown_cell("# Elephants"), new_code_cell(UNNOTICED[problem], id="only", execution_count=1)]
    nbformat.write(new_notebook(cells=cells), project / "notebooks" / "05_tiny.ipynb")
    monkeypatch.setattr(run, "ROOT", project)
    lie = dataclasses.replace(LIES["autocast_is_off"], words="giraffes")
    assert problem in run.verdict_on(lie, "05", run.run(lie, "05")).problem


if __name__ == "__main__":
    print_what_does_not_apply()
