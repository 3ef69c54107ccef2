"""Sabotage: the record agrees with the lies and the notebooks, and three lies are really told."""

import ast
import contextlib
import dataclasses

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sabotage import run
from sabotage.lies import LIES
from sabotage.lies.telling_lies import instead_of

# One lie in the kernel, one in the ranks of launch, one in the processes of a torchrun that a cell starts.
EXAMPLES = {"autocast_is_off": "05", "all_reduce_sums_where_it_should_average": "02", "local_rank_is_the_rank": "01"}
ROWS = {run.key(row): row for row in run.read_record()}


def test_the_record_has_a_row_for_every_lie_and_no_other():
    assert set(ROWS) == {(lie.says, run.label(chapter)) for lie, chapter in run.PAIRS}, (
        "run `make sabotage` for what differs"
    )
    assert len(run.read_record()) == len(ROWS) and len({lie.says for lie in LIES.values()}) == len(LIES)


def test_a_lie_about_a_file_changes_it():
    for lie, chapter in run.PAIRS:
        if lie.file or lie.notebook:
            text = (run.ROOT / run.file_of(lie, chapter)).read_text()
            assert lie.tell(text) != text, lie.name  # and raises LookupError where it finds nothing to change


@pytest.mark.parametrize("lie, chapter", run.PAIRS, ids=[f"{lie.name}-{chapter}" for lie, chapter in run.PAIRS])
def test_a_row_quotes_a_cell_about_the_lie(lie, chapter):
    """If not, run `make sabotage` for this lie."""
    row = ROWS[lie.says, run.label(chapter)]
    failure = run.Failure(*(row[column].strip("`") for column in ("Cell", "By", "What the cell said")))
    assert run.row(lie, chapter, failure) == (row, "")
    if failure.text.startswith("assert "):
        cells = run.read(run.notebook_of(chapter)).cells
        [source] = [cell.source for cell in cells if cell.id == failure.cell]
        with contextlib.suppress(SyntaxError):  # for a cell that begins with %%
            source += "\n" + ast.unparse(ast.parse(source))  # a statement of several lines is quoted as one
        assert failure.text.removesuffix(" …") in run.as_code(source, len(source))


def test_a_lies_own_error_is_known_by_its_file():
    """first_failure.py looks for this name in what a cell or a rank says."""
    functions = [instead_of, *(lie.tell for lie in LIES.values())]
    assert [f.__name__ for f in functions if not f.__code__.co_filename.endswith("lies.py")] == []


@pytest.mark.daily
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_lie_is_noticed_as_recorded(name):
    lie, chapter = LIES[name], EXAMPLES[name]
    assert run.row(lie, chapter, run.run(lie, chapter)) == (ROWS[lie.says, run.label(chapter)], "")


@pytest.mark.parametrize("weak", [False, True])
def test_an_assert_that_cannot_fail_is_a_failure_too(weak, monkeypatch):
    monkeypatch.setattr(run, "PAIRS", [])
    monkeypatch.setattr(run.flips, "main", lambda notebooks: weak)
    assert run.main([]) == weak


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
    assert problem in run.row(lie, "05", run.run(lie, "05"))[1]
