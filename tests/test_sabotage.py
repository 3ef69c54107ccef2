"""Sabotage: the record agrees with the lies and the notebooks, and three lies are really told."""

import ast
import contextlib
import dataclasses
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sabotage import run
from sabotage.lies import LIES

# One lie in the kernel, one in the ranks of launch, one in the processes of a torchrun that a cell starts.
TOLD = {"autocast_is_off": "05", "all_reduce_sums_where_it_should_average": "02", "local_rank_is_the_rank": "01"}
ROWS = {run.key(row): row for row in run.recorded()}


def test_the_record_has_a_row_for_every_lie_and_no_other():
    taught = {(lie.says, int(chapter)) for lie in LIES.values() for chapter in lie.chapters}
    assert set(ROWS) == taught, "run `make sabotage` for what differs"
    assert len(run.recorded()) == len(ROWS) and len({lie.says for lie in LIES.values()}) == len(LIES)


def test_a_lie_about_a_file_changes_it():
    for lie in LIES.values():
        for chapter in lie.chapters if lie.file else ():
            text = (run.ROOT / lie.file.format(chapter=run.notebook_of(chapter).name)).read_text()
            assert lie.tell(text) != text, lie.name  # and raises LookupError where it finds nothing to change


def code_of(source):
    """A cell's source as the record quotes it: as it is written, and then with each statement on one line."""
    with contextlib.suppress(SyntaxError):  # for a cell that begins with %%
        source += "\n" + ast.unparse(ast.parse(source))
    return run.quoted(source, len(source))


def test_rows_quote_a_cell_about_the_lie():
    problems = []
    pairs = [(lie, chapter) for lie in LIES.values() for chapter in lie.chapters]
    for lie, chapter in pairs:
        row, notebook = ROWS[lie.says, int(chapter)], run.notebook_of(chapter)
        nb = nbformat.read(notebook, as_version=4)
        sources = {cell.id: cell.source for cell in nb.cells}
        if (cell := row["Cell"].strip("`")) not in sources:
            problems.append(f"{lie.name}: chapter {chapter} has no cell {cell} now")
            continue
        heading, anchor, words = run.place(nb, cell)
        if row["Noticed in"] != f"[{int(chapter)}, {heading}](../notebooks/{notebook.name}#{anchor})":
            problems.append(f"{lie.name}: {cell} stands under {heading}, not {row['Noticed in']}")
        if row["By"] not in ("assert", "error", "hang", "output") or not re.search(lie.words, words, re.IGNORECASE):
            problems.append(f"{lie.name}: {cell} is not about {lie.words}")
        text = row["What the cell said"].strip("`").removesuffix(" …")
        if text.startswith("assert ") and text not in code_of(sources[cell]):
            problems.append(f"{lie.name}: {cell} does not say {text}")
    assert not problems, "\n".join([*problems, "run `make sabotage ARGS=…` for these"])


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_a_lie_is_noticed_as_recorded(name):
    row, problem = run.row(LIES[name], TOLD[name])
    assert not problem
    assert row == ROWS[LIES[name].says, int(TOLD[name])]


@pytest.mark.slow
def test_nothing_is_noticed_without_a_lie():
    name = "all_reduce_sums_where_it_should_average"
    cell = ROWS[LIES[name].says, int(TOLD[name])]["Cell"].strip("`")
    assert run.run(None, TOLD[name], until=cell) is None


@pytest.mark.parametrize("weak", [False, True])
def test_an_assert_that_cannot_fail_is_a_failure_too(weak, monkeypatch):
    monkeypatch.setattr(run, "LIES", {})
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
    assert problem in run.row(lie, "05")[1]
