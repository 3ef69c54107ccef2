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

import pytest
from sabotage import run
from sabotage.lies import LIES

EXAMPLES = {  # {lie: the chapter that notices it}
    "autocast_is_off": "05",  # changes the notebook's own process
    "all_reduce_sums_where_it_should_average": "02",  # changes the ranks that launch starts
    "local_rank_is_the_rank": "01",  # changes the ranks of a torchrun that a cell starts
}
ROWS = {run.key(row): row for row in run.read_record()}  # {(the lie's description, the chapter's label): row}


def error_of_applying(lie, chapter):
    """Apply a lie, and return its error, such as "AttributeError: …" if it names what no longer exists; "" for none."""
    try:
        if lie.changes_notebook:
            lie.apply(run.notebook_of(chapter).read_text())
        else:
            lie.apply(importlib.import_module(lie.module))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def print_what_does_not_apply():
    """Apply each lie in a fork of its own, because it changes the modules of its process. Print those that fail."""
    for lie in LIES.values():
        if not lie.changes_notebook:
            with contextlib.suppress(ImportError):
                importlib.import_module(lie.module)  # so that no fork has to import it
    for lie, chapter in run.PAIRS:
        fork = os.fork()
        if fork == 0:
            error = error_of_applying(lie, chapter)
            if error:
                print(f"{lie.name}: {error}", flush=True)
            os._exit(0)
        os.waitpid(fork, 0)


@pytest.mark.timeout(3600)  # beside other work, hundreds of forks of a large process take more than ten minutes
def test_each_lie_finds_what_it_changes():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    lies_that_fail = process.stdout
    assert lies_that_fail == "", (
        f"{lies_that_fail}Correct these in tools/sabotage/lies. Then run them: make sabotage ARGS=NAME"
    )


def test_the_record_has_a_row_for_every_lie_and_no_other():
    assert set(ROWS) == {(lie.description, run.label(chapter)) for lie, chapter in run.PAIRS}, "run: make sabotage"
    assert len(run.read_record()) == len(ROWS)
    assert len({lie.description for lie in LIES.values()}) == len(LIES)


def test_each_row_quotes_a_cell_about_its_lie():
    """What a row says that a cell said must still be in that cell, and the cell must still be about the lie."""
    problems = []
    for lie, chapter in run.PAIRS:
        row = ROWS[lie.description, run.label(chapter)]
        recorded = failure_in(row)
        is_still_the_verdict = run.verdict_on(lie, chapter, recorded) == run.Verdict(row, "")
        is_still_in_the_cell = True
        if recorded.text.startswith("assert "):
            is_still_in_the_cell = quotes_the_cell(recorded.text, chapter, recorded.cell)
        if not is_still_the_verdict or not is_still_in_the_cell:
            problems.append(f"chapter {chapter}: make sabotage ARGS={lie.name}")
    assert not problems, "\n".join(["These rows no longer agree with their chapters:", *problems])


def failure_in(row):
    """The Failure of a chapter's cell of which a row of the record says what it said."""
    return run.Failure(
        cell=row["Cell"].strip("`"),
        kind=row["By"].strip("`"),
        text=row["What the cell said"].strip("`"),
    )


def quotes_the_cell(text, chapter, cell_id):
    """Whether a text, such as "assert x == 1", is a statement of a cell, or the beginning of one and then " …".

    The record has each statement in one line. One that has several lines in the cell is looked for as ast writes it.
    """
    notebook = run.read_notebook(run.notebook_of(chapter))
    [source] = [cell.source for cell in notebook.cells if cell.id == cell_id]
    with contextlib.suppress(SyntaxError):  # a cell that begins with %%
        source += "\n" + ast.unparse(ast.parse(source))
    return text.removesuffix(" …") in run.as_code(source, len(source))


@pytest.mark.daily
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_lie_is_noticed_as_recorded(name):
    lie = LIES[name]
    chapter = EXAMPLES[name]
    row = ROWS[lie.description, run.label(chapter)]
    assert run.verdict_on(lie, chapter, run.run(lie, chapter)) == run.Verdict(row, "")


def test_a_lie_is_a_problem_unless_a_cell_about_it_fails():
    about_autocast = LIES["autocast_is_off"]
    about_giraffes = dataclasses.replace(about_autocast, words="giraffes")

    failed_assert = run.Failure("op-lists", "assert", "assert x")
    fault = run.Failure("op-lists", "fault", "NameError")

    def problem(lie, failure):
        return run.verdict_on(lie, "05", failure).problem

    assert problem(about_autocast, failed_assert) == ""
    assert problem(about_giraffes, failed_assert).startswith("neither the cell nor the prose")
    assert problem(about_autocast, None) == "no cell notices it"
    assert problem(about_autocast, fault).startswith("the lie does not work")


if __name__ == "__main__":
    print_what_does_not_apply()
