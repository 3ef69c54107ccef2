"""Hygiene of the notebooks: every rule of hygiene.py on every notebook, and each rule on one that breaks it."""

import re
from copy import deepcopy

import hygiene
import nbformat
import pytest
import torch
from conftest import ROOT, run_nbval, toc_files
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from store_outputs import WIDGET_VIEW, normalised, text_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CHAPTERS = [path for path in NOTEBOOKS if re.match(r"\d", path.stem)]
TEMPLATE = ROOT / "notebooks" / "template.ipynb"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_follows_every_rule(path):
    nb = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    rules = list(hygiene.RULES)
    if path in [*CHAPTERS, TEMPLATE]:
        rules += hygiene.PATTERN
    if path in CHAPTERS:
        rules += hygiene.CHAPTERS_RULES
    if path in CHAPTERS and not path.stem.startswith("00"):  # the first run is ten minutes long
        rules += hygiene.EXERCISES
    problems = [f"{rule.__name__}: {problem}" for rule in rules for problem in rule(nb)]
    if path.read_text(encoding="utf-8") != text_of(nb):
        problems.append("the file is not laid out as stored: run `make outputs` for this notebook")
    assert not problems, "\n".join([f"{len(problems)} problems in {path.name}:", *problems])


# --- the rules themselves ---------------------------------------------------------------------------------------------

SOLUTION = {"tags": ["solution", "hide-cell"], "jupyter": {"source_hidden": True, "outputs_hidden": True}}
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
            "## Take it to your GPUs\n\n{download}`notebook <a.ipynb>` {download}`script <../scripts/a.py>`\n\n"
            "```{literalinclude} ../scripts/a.py\n```\n\n```bash\n# on one node\ntorchrun a.py\n```\n\n"
            "## Exercises\n\n### One\n\nTry `rank` on one {term}`rank`, on rank 1.\n\n### Two\n\nAgain."
        ),
        new_code_cell("assert f(1) == 1", execution_count=6, metadata=SOLUTION),
        new_code_cell("assert f(2) == 2", execution_count=7, metadata=SOLUTION),
        new_markdown_cell(
            "## Recap\n\n| ran | proved |\n|---|---|\n| f | x |\n\n:::{admonition} Predict\nWhat will it print?\n:::"
        ),
        new_code_cell("f(8)", execution_count=8, metadata=ANSWER, outputs=[
            new_output("execute_result", {"text/plain": "8"}, execution_count=8)]),
        new_markdown_cell("<details><summary>Why</summary>\n\nIt is what was given.\n\n</details>"),
    ],
)  # fmt: skip


def prints(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def change(cell, **new):
    """A change of the good notebook: new attributes for one of its cells."""
    return lambda nb: nb.cells[cell].update(nbformat.from_dict(new))


def replace(cell, old, new):
    return lambda nb: nb.cells[cell].update(source=nb.cells[cell].source.replace(old, new))


SECRET_PATH = "/".join(["", "home", "reader", "book.py"])
BROKEN = [
    (hygiene.is_valid, lambda nb: nb.update(nbformat_minor=4)),
    (hygiene.is_valid, lambda nb: nb.cells[1].pop("id")),
    (hygiene.is_valid, change(1, id=GOOD.cells[2].id)),
    (hygiene.is_valid, change(1, cell_type="kode")),
    (hygiene.is_executed_in_order, change(4, execution_count=None, outputs=[])),
    (hygiene.is_executed_in_order, change(4, execution_count=9)),
    (hygiene.is_executed_in_order, change(4, source="")),
    (hygiene.is_normalised, lambda nb: nb.metadata.update(widgets={})),
    (hygiene.is_normalised, lambda nb: nb.metadata.kernelspec.update(name="my-env")),
    (hygiene.is_normalised, lambda nb: nb.metadata.language_info.update(version="3.11.7")),
    (hygiene.is_normalised, change(4, metadata={"execution": {"iopub.execute_input": "12:00"}})),
    (hygiene.is_normalised, change(7, metadata={"tags": ["solution", "hide-cell"]})),
    (hygiene.is_normalised, change(4, metadata={"collapsed": True})),
    (hygiene.is_normalised, change(4, outputs=[new_output("display_data", {WIDGET_VIEW: {}})])),
    (hygiene.has_no_attachments, change(0, attachments={"a.png": {"image/png": "AAAA"}})),
    (hygiene.has_known_magics, replace(4, "f(steps)", "%tiem f(steps)")),
    (hygiene.has_known_magics, replace(4, "f(steps)", "%%bash\nls")),
    (hygiene.has_known_magics, replace(4, "f(steps)", "!ls")),
    (hygiene.has_known_magics, replace(4, "f(steps)", "files = !ls")),
    (hygiene.has_known_magics, change(4, outputs=[prints("UsageError: Line magic function `%tiem` not found.")])),
    (hygiene.raises_what_it_announces, change(5, outputs=[])),
    (hygiene.raises_what_it_announces, change(5, metadata={})),
    (hygiene.raises_what_it_announces, replace(4, "f(steps)", "# NBVAL_RAISES_EXCEPTION\nf(steps)")),
    (hygiene.compares_every_output, change(4, metadata={"tags": ["nbval-skip"]})),
    (hygiene.compares_every_output, replace(4, "f(steps)", "# NBVAL_SKIP\nf(steps)")),
    (hygiene.compares_every_output, change(7, metadata={"tags": ["nbval-ignore-output"]})),
    (hygiene.compares_every_output, replace(7, "assert", "# NBVAL_IGNORE_OUTPUT\nassert")),
    (hygiene.compares_every_output, lambda nb: (change(4, source="# not compared: a time\nf(steps)")(nb),
                                              change(4, metadata={"tags": ["nbval-ignore-output"]})(nb))),
    (hygiene.has_no_warnings, change(4, outputs=[prints("hello", "stderr")])),
    (hygiene.has_no_warnings, change(4, outputs=[prints("[rank 1] FutureWarning: use all_gather_single\n")])),
    (hygiene.names_no_machine, replace(4, "f(steps)", f"open({SECRET_PATH!r})")),
    (hygiene.names_no_machine, change(0, source=f"# Title\n\nSee {SECRET_PATH}.")),
    (hygiene.names_no_machine, change(4, outputs=[prints(f"wrote {SECRET_PATH}")])),
    (hygiene.names_no_machine, change(4, outputs=[prints("<object at 0x7f6e1529c710>")])),
    (hygiene.names_no_machine, change(4, outputs=[prints("rank 0 has pid 4711")])),
    (hygiene.names_no_machine, change(5, outputs=[new_output("error", traceback=[f"File {SECRET_PATH}, line 3"])])),
    (hygiene.describes_its_images, change(4, outputs=[new_output("display_data", {"image/png": "AAAA"})])),
    (hygiene.ends_no_cell_with_a_semicolon, replace(4, "f(steps)", "f(steps);  # quiet\n# end")),
    (hygiene.has_sensible_headings, replace(0, "# Title", "Title")),
    (hygiene.has_sensible_headings, replace(9, "## Recap", "# Recap")),
    (hygiene.has_sensible_headings, replace(6, "### One", "#### One")),
    (hygiene.is_small, change(4, outputs=[prints("x" * hygiene.MOST_BYTES)])),
    (hygiene.starts_with_helpers, change(1, source="import torch")),
    (hygiene.promises_what_it_proves, replace(0, "What you will prove", "Contents")),
    (hygiene.promises_what_it_proves, replace(0, "- [one](#one)\n", "")),
    (hygiene.promises_what_it_proves, replace(0, "[one](#one)", "one")),
    (hygiene.has_one_parameters_cell, change(2, metadata={})),
    (hygiene.has_one_parameters_cell, replace(2, "  # how many", "")),
    (hygiene.has_one_parameters_cell, replace(2, ": int", "")),
    (hygiene.exports_a_script, change(3, metadata={})),
    (hygiene.asks_for_a_prediction, replace(9, "Predict", "Note")),
    (hygiene.hides_its_answers, change(10, metadata={})),
    (hygiene.hides_its_answers, replace(11, "details", "p")),
    (hygiene.is_short, replace(0, "- two", f"- {'word ' * hygiene.MOST_WORDS}")),
    (hygiene.is_short, lambda nb: nb.cells.extend([new_markdown_cell("More.")] * hygiene.MOST_CELLS)),
    (hygiene.hands_over_its_script, replace(6, "{download}`notebook <a.ipynb>`", "")),
    (hygiene.hands_over_its_script, replace(6, "torchrun", "python")),
    (hygiene.has_solved_exercises, lambda nb: (change(7, metadata={})(nb), change(8, metadata={})(nb))),
    (hygiene.has_solved_exercises, change(7, metadata={"tags": ["solution"]})),
    (hygiene.has_solved_exercises, change(7, source="f(1)")),
    (hygiene.has_solved_exercises, replace(6, "## Exercises", "## More")),
    (hygiene.has_several_exercises, replace(6, "### Two", "Two")),
    (hygiene.recapitulates, replace(9, "|", "")),
    (hygiene.links_terms_at_first_use, replace(6, "{term}`rank`", "rank")),
    (hygiene.links_terms_at_first_use, replace(0, "- two", "- two ranks")),
]  # fmt: skip


@pytest.mark.parametrize(
    "rule", hygiene.RULES + hygiene.PATTERN + hygiene.EXERCISES + hygiene.CHAPTERS_RULES, ids=lambda rule: rule.__name__
)
def test_rule_passes_a_good_notebook_and_sees_all_that_breaks_it(rule):
    assert list(rule(GOOD)) == []
    ways = [(number, breaks) for number, (broken, breaks) in enumerate(BROKEN) if broken is rule]
    assert ways
    for number, breaks in ways:
        nb = deepcopy(GOOD)
        breaks(nb)
        assert nb != GOOD
        assert list(rule(nb)) != [], f"{rule.__name__} passes BROKEN[{number}]"


def test_uncompared_output_is_allowed_with_a_reason_and_an_assertion():
    nb = deepcopy(GOOD)
    source = "# not compared: seconds differ\nassert f(1) == 1"
    nb.cells[7].update(source=source, metadata={"tags": ["nbval-ignore-output"]})
    assert list(hygiene.compares_every_output(nb)) == []


def test_normalising_twice_changes_nothing_more():
    nb = deepcopy(GOOD)
    nb.metadata.language_info.version = "3.13.0"
    nb.cells[5].outputs[0].traceback = [f"File {torch.__file__}:3", f"File {ROOT}/helpers/ranks/launch.py:4"]
    once = normalised(nb)
    assert normalised(once) == once != nb
    assert once.cells[5].outputs[0].traceback == ["File torch/__init__.py:3", "File helpers/ranks/launch.py:4"]
    assert list(hygiene.names_no_machine(once)) == []


# --- nbval really sees warnings ---------------------------------------------------------------------------------------

WARNING_CELLS = {
    "kernel": "import warnings\nwarnings.warn('old', {category})",
    "rank": "import warnings\nfrom helpers.ranks.launch import launch\n"
    "def warn():\n    warnings.warn('old', {category})\n_ = launch(warn, nproc=1)",
    "calm": "pass",
}


@pytest.mark.ranks
def test_warning_of_a_chapters_own_line_fails_under_nbval(tmp_path):
    """In the kernel and on a rank, a warning about a line of the notebook prints text that is not stored."""
    named = [(name, category) for name in WARNING_CELLS for category in ("FutureWarning", "DeprecationWarning")]
    sources = ["%load_ext helpers", *(WARNING_CELLS[name].format(category=category) for name, category in named)]
    cells = [new_code_cell(source, execution_count=count) for count, source in enumerate(sources, 1)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "warns.ipynb")
    done = run_nbval(tmp_path / "warns.ipynb", "-rA")
    outcomes = {
        int(cell): outcome
        for outcome, cell in re.findall(r"^(PASSED|FAILED) .*?\.ipynb::Cell (\d)", done.stdout, flags=re.M)
    }
    assert sorted(outcomes) == list(range(len(cells))), done.stdout
    failed = {named[cell - 1] for cell, outcome in outcomes.items() if outcome == "FAILED"}
    assert outcomes[0] == "PASSED" and failed == {pair for pair in named if pair[0] != "calm"}, done.stdout


# --- the table of contents against the files --------------------------------------------------------------------------


def test_toc_names_every_page_once():
    files = [*(ROOT / "book").glob("*.md"), *NOTEBOOKS]
    pages = {path.relative_to(ROOT).with_suffix("").as_posix() for path in files}
    assert sorted(toc_files()) == sorted(pages - {"notebooks/template"})


def test_chapters_come_in_the_order_of_their_numbers():
    chapters = [name for name in toc_files() if name.startswith("notebooks/")][: len(CHAPTERS)]  # the others follow
    assert chapters == sorted(chapters)
    assert all(re.fullmatch(r"notebooks/\d\d_[a-z0-9_]+", name) for name in chapters)
