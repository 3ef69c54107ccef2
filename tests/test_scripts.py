"""Every notebook's script: alone in an empty folder, under real torchrun and in a rehearsal, with equal results.

A script's last line is ``result {json}``, printed by rank 0. Its ``world_size`` must be the launched one; its other
numbers must not depend on it.
"""

import functools
import json
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib

import nbformat
import pytest
import recorded
import torch
from forked import forked, script_alone, script_on_ranks
from ruff import find_ruff_bin
from scripting import CHAPTERS, ROOT, TOLERANCE, export, rehearse_here, result, stand_alone, torchrun

from helpers.export.chapters import find_notebook
from helpers.export.facts import facts_at, unmet

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

TEMPLATE = ROOT / "notebooks" / "template.ipynb"
SHEET = ROOT / "notebooks" / "cheat_sheet.ipynb"
FACTS = {path.stem: facts_at(path).script for path in CHAPTERS}
RECORDED = find_notebook("04")  # its rehearsal is on the first page
TRAINER = find_notebook("11")


# What scripts may call and PyTorch 2.11 and 2.12 do not have.
NEWER = {
    "dist": ["all_gather_single", "record_comm", "reduce_scatter_single"],
    "FSDPModule": [
        "reset_iter_state",
        "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params",
        "set_separate_reduce_scatter_group",
        "set_symm_mem_for_comm",
    ],
}
HIDE = f"""\
import runpy

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

for owner, names in ((dist, {NEWER["dist"]}), (FSDPModule, {NEWER["FSDPModule"]})):
    for name in names:
        delattr(owner, name)
"""


def uses_newer_names(notebook):
    """Whether a newer name is in a cell that is exported, or in the code that each script gets a part of."""
    cells = nbformat.read(notebook, as_version=4).cells
    text = "".join(cell.source for cell in cells if "export" in cell.metadata.get("tags", []))
    text += "".join(path.read_text() for path in (ROOT / "helpers" / "runtime").glob("*.py"))
    return any(name in text for names in NEWER.values() for name in names)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture(scope="module")
def result_of_one_rank(alone, tmp_path_factory):
    """A function that gives the result of a chapter's script with its quick flags on one rank, and runs it once."""

    @functools.cache
    def run(notebook):
        script = export(notebook, tmp_path_factory.mktemp("one_rank"))
        return on_one(script, alone, *FACTS[notebook.stem].quick_flags.split())

    return run


def written(notebook, folder):
    """Write a notebook's script, alone in its folder, and check that ruff has nothing to change; return its path."""
    script = export(notebook, folder)
    assert os.listdir(folder) == [f"{notebook.stem}.py"]
    for command in (["check", *ruff_rules()], ["format", "--check"]):
        style = ["--isolated", "--line-length=88", "--target-version=py311"]
        done = subprocess.run([find_ruff_bin(), *command, *style, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return script


def ruff_rules():
    """The options of `ruff check` for this project's rules, but for annotations, which a script need not have."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    selected = [rule for rule in lint["select"] if rule != "ANN"]
    return [f"--select={','.join(selected)}", f"--ignore={','.join(lint['ignore'])}"]


def on_one(script, environment, *flags):
    """The result of a script that runs by itself; some in an interpreter of their own, to its end."""
    if FACTS[script.stem].fresh_interpreter:
        command = [sys.executable, script, *flags]
        done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240)
        return on_ranks(1, (done.returncode, done.stdout, done.stderr, []))
    return on_ranks(1, forked(script_alone(script, *flags), environment))


def on_ranks(nproc, ended):
    """The result of a script that has ended on so many ranks. One rank by itself says nothing on standard error."""
    status, out, errors, left = ended
    assert status is not None, f"{nproc} ranks hung\n{out}{errors}"
    assert status == 0, f"{nproc} ranks: {status}\n{out}{errors}"
    assert not left
    assert "Warning" not in errors, errors
    if nproc == 1:
        assert not errors
    return numbers(out, nproc, f"{nproc} rank(s), gloo on cpu\n")


def on_four_ranks(script, environment, *flags):
    """The result of a script on four ranks: on forked ones or, if one of these hung, on real ones.

    Twice one of four forked ranks hung, probably in a lock that another thread of its agent held at the fork; in which
    one was not found. Real ranks cannot hang so, but each spends two seconds of a processor on its imports.
    """
    ended = forked(script_on_ranks(script, 4, *flags), environment)
    status, _, errors, _ = ended
    if status is None or "forcefully exiting via SIGKILL" in errors:  # its agent's signal did not end a rank
        ended = torchrun(script, 4, environment, *flags)
    return on_ranks(4, ended)


def numbers(out, world_size, group):
    """The numbers that do not depend on how many ranks there are. ``group`` is the first line of the process group."""
    assert group in out
    values = result(out)
    assert values.pop("world_size") == world_size
    return values


@pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(notebook, result_of_one_rank, alone, tmp_path):
    facts = FACTS[notebook.stem]
    folder = tmp_path / "empty"
    script = written(notebook, folder)
    flags = facts.quick_flags.split()
    expected = result_of_one_rank(notebook)
    assert facts.result, "metadata.book.script.result does not say what the script's numbers must be"
    if not flags:
        assert unmet(facts.result, expected) == []
    on_4 = on_four_ranks(script, alone, *flags)
    assert on_4 == pytest.approx(expected, abs=TOLERANCE)
    assert set(os.listdir(folder)) <= {script.name, "__pycache__"}


@pytest.mark.daily  # the page's own cells train as long, and assert as much
@pytest.mark.parametrize(
    "notebook", [path for path in CHAPTERS if FACTS[path.stem].quick_flags], ids=lambda path: path.stem
)
def test_without_its_quick_flags_it_trains_to_its_result(notebook, alone, tmp_path):
    assert unmet(FACTS[notebook.stem].result, on_one(export(notebook, tmp_path), alone)) == []


def rehearsed(notebook):
    """A chapter as a parameter. Two are rehearsed on each push, the others once a day."""
    if notebook in (RECORDED, TRAINER):
        return pytest.param(notebook, id=notebook.stem)
    return pytest.param(notebook, id=notebook.stem, marks=pytest.mark.daily)


@pytest.mark.parametrize("notebook", [rehearsed(notebook) for notebook in CHAPTERS])
def test_a_rehearsal_has_the_result_of_one_rank(notebook, result_of_one_rank, tmp_path):
    facts = FACTS[notebook.stem]
    script = export(notebook, tmp_path / "empty")
    report = script.with_name("report.json")
    flags = facts.quick_flags.split()
    expected = result_of_one_rank(notebook)
    flags += facts.rehearsal_flags.split()
    gpus = facts.gpus
    command = script
    if notebook == RECORDED:
        command = "04"  # by its number, as its user writes it
    done = rehearse_here(command, "--gpus", gpus, "--json", report, flags=flags)
    out = done.stdout + done.stderr
    assert done.returncode == 0, out
    assert numbers(out, gpus, f"{gpus} rank(s), nccl on cuda") == pytest.approx(expected, abs=TOLERANCE)
    assert out.count(f"Rehearsal on {gpus} pretended GPUs") == 1
    # All collectives of the default group used the GPUs, so they are NCCL's.
    assert re.search(r"\((NCCL|C\+\+)\)|by DDP", out)
    if notebook == RECORDED:
        text = out[out.index("Rehearsal on") :]
        recorded.compare("rehearsal", text, f"python -m pytest tests/test_scripts.py -k {notebook.stem}")
    if notebook == TRAINER:  # a step waits for no GPU; logging, evaluation and checkpoints may, and come rarely
        counts = json.loads(report.read_text())
        waits = [row for row in counts["lines"] if row["kind"] in ("wait", "upload")]
        assert counts["steps"] > 10
        assert [row for row in waits if row["per_step"] > 1 / 3] == []


@pytest.mark.parametrize("notebook", [path for path in CHAPTERS if uses_newer_names(path)], ids=lambda path: path.stem)
def test_without_the_newer_names(notebook, result_of_one_rank, alone, tmp_path):
    """On an older PyTorch a script falls back to older names, or does not call what only a flag needs."""
    script = export(notebook, tmp_path)
    older = tmp_path / "older.py"
    older.write_text(f"{HIDE}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    flags = FACTS[notebook.stem].quick_flags.split()
    status, out, errors, _ = forked(script_alone(older, *flags), alone)
    assert status == 0, errors
    expected = result_of_one_rank(notebook)
    assert numbers(out, 1, "1 rank(s), gloo on cpu\n") == pytest.approx(expected, abs=TOLERANCE)


def test_the_template_on_1_and_4_ranks(alone, tmp_path):
    folder = tmp_path / "empty"
    script = written(TEMPLATE, folder)
    on_1, on_4 = [on_ranks(nproc, torchrun(script, nproc, alone)) for nproc in (1, 4)]
    assert unmet(facts_at(TEMPLATE).script.result, on_1) == []
    assert on_4 == pytest.approx(on_1, abs=TOLERANCE)
    assert set(os.listdir(folder)) <= {script.name, "__pycache__"}


def test_the_cheat_sheet_on_two_ranks(tmp_path):
    """Its code in its order. torchrun says which rank of how many a process is, and both share a folder."""
    cells = [cell.source for cell in nbformat.read(SHEET, as_version=4).cells if cell.cell_type == "code"]
    setup, *rest = cells
    code = [
        setup.replace("%load_ext helpers\n", ""),
        f"runs, where = {str(tmp_path)!r}, {{}}",
        *rest,
        'print("the end")',
    ]
    (tmp_path / "sheet.py").write_text("\n\n".join(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, tmp_path / "sheet.py"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("the end") == 2, done.stderr


def test_the_clock_of_chapter_2_leaves_out_the_first_call_and_slow_means(tmp_path, monkeypatch):
    functions = runpy.run_path(str(export("02", tmp_path)))
    now = 0.0  # the time of a pretended clock
    calls = []

    def call():
        nonlocal now
        calls.append("call")
        now += 0.005
        if len(calls) in (1, 4):  # the first call, and one of the first mean
            now += 0.5

    functions["start_process_group"]("gloo")
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    seconds = functions["time_call"](call, repeat=0.015, device=torch.device("cpu"))
    functions["stop_process_group"]()
    assert seconds == pytest.approx(0.005)
    assert len(calls) == 1 + 1 + 3 * 3  # one that is left out, one to choose how many, and three means of three


WRONG_RESULTS = {  # {chapter: (a line of its script, what makes its result wrong, what the script then says)}
    "01": ("return total.item() == expected", "return False", "The sum over all ranks is wrong."),
    "02": ("num_correct = sum(row.correct for row in rows)", "num_correct = 0", "A collective gave a wrong result."),
}


@pytest.mark.parametrize("chapter", WRONG_RESULTS)
def test_a_check_of_a_new_machine_that_fails_ends_with_an_error(chapter, alone, tmp_path):
    line, wrong_line, message = WRONG_RESULTS[chapter]
    script = export(chapter, tmp_path)
    text = script.read_text()
    assert text.count(line) == 1
    script.write_text(text.replace(line, wrong_line))
    status, _, errors, _ = forked(script_alone(script, "--backend=gloo"), alone)
    assert status == 1 and errors.endswith(f"{message}\n"), errors
