"""Hygiene of the notebooks: every rule of hygiene.py on every notebook, and each rule on one that breaks it."""

import re
from copy import deepcopy

import hygiene
import nbformat
import pytest
import torch
from conftest import ROOT, run_nbval
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from store_outputs import normalised, text_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.stem)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_follows_every_rule(path):
    nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    rules = list(hygiene.RULES)
    if path in CHAPTERS or path.stem == "template":
        rules += hygiene.PATTERN
    if path in CHAPTERS[1:] or path.stem == "template":
        rules += hygiene.EXERCISES
    problems = [finding for rule in rules for finding in rule.findings(nb)]
    if path.read_text(encoding="utf-8") != text_of(nb):
        problems.append("the file is not laid out as stored: run `make outputs` for this notebook")
    assert not problems, "\n".join([f"{len(problems)} problems in {path.name}:", *problems])


# --- the rules themselves ---------------------------------------------------------------------------------------------

FOLDED = {"source_hidden": True, "outputs_hidden": True}
SOLUTION = {"tags": ["solution", "hide-cell"], "jupyter": FOLDED}
UNCOMPARED = {"tags": ["solution", "hide-cell", "nbval-ignore-output"], "jupyter": FOLDED}
ANSWER = {"tags": ["hide-output"], "jupyter": {"outputs_hidden": True}}
GOOD = new_notebook(
    metadata=normalised(new_notebook()).metadata,
    cells=[
        new_markdown_cell(
            "# Title\n\n## What you will prove\n\n- [one](#one)\n- two: [it\n  holds](#two)\n- [three](#three)\n\n"
            "```text\n# no heading\n```"
        ),
        new_code_cell("%load_ext helpers", execution_count=1),
        new_code_cell("steps: int = 3  # how many", execution_count=2, metadata={"tags": ["parameters"]}),
        new_code_cell("def f(x):\n    return x", execution_count=3, metadata={"tags": ["export"]}),
        new_code_cell("f(steps)", execution_count=4, outputs=[
            new_output("execute_result", {"text/plain": "3"}, execution_count=4)]),
        new_code_cell("f()", execution_count=5, metadata={"tags": ["raises-exception"]}, outputs=[
            new_output("error", ename="TypeError", evalue="f() misses x", traceback=["Cell In[5], line 1"])]),
        new_markdown_cell(
            "## Take it to your GPUs\n\n```bash\n# on one node\ntorchrun a.py\n```\n\n"
            "## Exercises\n\n### One\n\nTry rank 1.\n\n### Two\n\nAgain."
        ),
        new_code_cell("# not compared: seconds differ\nassert f(1) == 1", execution_count=6, metadata=UNCOMPARED),
        new_code_cell("assert f(2) == 2", execution_count=7, metadata=SOLUTION),
        new_markdown_cell(
            "## Recap\n\n| ran | proved |\n|---|---|\n| f | x |\n\n:::{admonition} Predict\nWhat will it print?\n:::"
        ),
        new_code_cell("f(8)", execution_count=8, metadata=ANSWER, outputs=[
            new_output("execute_result", {"text/plain": "8"}, execution_count=8)]),
        new_markdown_cell("<details><summary>Why</summary>\n\nIt is what was given.\n\n</details>"),
    ],
)  # fmt: skip


@pytest.mark.parametrize(
    "rule", hygiene.RULES + hygiene.PATTERN + hygiene.EXERCISES, ids=lambda rule: rule.problem[:40]
)
def test_rule_passes_a_good_notebook_and_sees_all_that_breaks_it(rule):
    assert list(rule.findings(GOOD)) == []
    for number, breaks in enumerate(rule.breaks):
        nb = deepcopy(GOOD)
        breaks(nb)
        assert nb != GOOD
        assert list(rule.findings(nb)), f"it passes change {number}"


def test_normalising_twice_changes_nothing_more():
    nb = deepcopy(GOOD)
    nb.cells[5].outputs[0].traceback = [f"File {torch.__file__}:3", f"File {ROOT}/helpers/ranks/launch.py:4"]
    clean = normalised(nb)
    assert normalised(clean) == clean
    assert clean.cells[5].outputs[0].traceback == ["File torch/__init__.py:3", "File helpers/ranks/launch.py:4"]


@pytest.mark.ranks
def test_warning_of_a_chapters_own_line_fails_under_nbval(tmp_path):
    """In the kernel and on a rank, a warning about a line of the notebook prints text that is not stored."""
    sources = ["%load_ext helpers\nimport warnings\nfrom helpers.ranks.launch import launch"]
    for category in ("FutureWarning", "DeprecationWarning"):
        line = f"warnings.warn('old', {category})"
        sources += [line, f"def warn():\n    {line}\n_ = launch(warn, nproc=1)"]
    cells = [new_code_cell(source, execution_count=count) for count, source in enumerate(sources, 1)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "warns.ipynb")
    process = run_nbval(tmp_path / "warns.ipynb", "-rA")
    outcomes = re.findall(r"^(PASSED|FAILED) .*?\.ipynb::(Cell \d)", process.stdout, flags=re.M)
    failures = [("FAILED", f"Cell {number}") for number in (1, 2, 3, 4)]
    assert sorted(outcomes) == [*failures, ("PASSED", "Cell 0")], process.stdout
