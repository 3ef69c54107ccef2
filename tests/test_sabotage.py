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

# One lie in the kernel, one in the ranks of launch, one in the processes of a torchrun that a cell starts.
EXAMPLES = {"autocast_is_off": "05", "all_reduce_sums_where_it_should_average": "02", "local_rank_is_the_rank": "01"}
ROWS = {run.key(row): row for row in run.read_record()}


def does_not_apply(lie, chapter):
    """The error of a lie that names or quotes what no longer exists; empty if it applies."""
    try:
        if lie.changes_notebook:
            lie.apply(run.notebook_of(chapter).read_text())
        else:
            lie.apply(importlib.import_module(lie.module))
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
    assert set(ROWS) == {(lie.description, run.label(chapter)) for lie, chapter in run.PAIRS}, "run: make sabotage"
    assert len(run.read_record()) == len(ROWS)
    assert len({lie.description for lie in LIES.values()}) == len(LIES)


def test_each_row_quotes_a_cell_about_its_lie():
    problems = []
    for lie, chapter in run.PAIRS:
        row = ROWS[lie.description, run.label(chapter)]
        cell_id, kind, text = (row[column].strip("`") for column in ("Cell", "By", "What the cell said"))
        is_as_recorded = run.verdict_on(lie, chapter, run.Failure(cell_id, kind, text)) == run.Verdict(row, "")
        if not is_as_recorded or (text.startswith("assert ") and not quotes_the_cell(text, chapter, cell_id)):
            problems.append(f"chapter {chapter}: make sabotage ARGS={lie.name}")
    assert not problems, "\n".join(["These rows no longer agree with their chapters:", *problems])


def quotes_the_cell(text, chapter, cell_id):
    """Whether a text is a statement of a cell, or the beginning of a long one. One of several lines is one line."""
    [source] = [cell.source for cell in run.read_notebook(run.notebook_of(chapter)).cells if cell.id == cell_id]
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

    def problem(lie, failure):
        return run.verdict_on(lie, "05", failure).problem

    failed_assert = run.Failure("op-lists", "assert", "assert x")
    assert problem(about_autocast, failed_assert) == ""
    assert problem(about_giraffes, failed_assert).startswith("neither the cell nor the prose")
    assert problem(about_autocast, None) == "no cell notices it"
    assert problem(about_autocast, run.Failure("op-lists", "fault", "NameError")).startswith("the lie does not work")


if __name__ == "__main__":
    print_what_does_not_apply()
