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
from forked import Ended, forked, script_alone, script_on_ranks
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


# What scripts may call and PyTorch 2.11 and 2.12 do not have, by the object that has it in newer ones.
NEWER_NAMES = {
    "dist": ["all_gather_single", "record_comm", "reduce_scatter_single"],
    "FSDPModule": [
        "reset_iter_state",
        "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params",
        "set_separate_reduce_scatter_group",
        "set_symm_mem_for_comm",
    ],
}
# The beginning of a script that makes of the installed PyTorch one without these names.
REMOVE_NEWER_NAMES = f"""\
import runpy

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

for owner, names in ((dist, {NEWER_NAMES["dist"]}), (FSDPModule, {NEWER_NAMES["FSDPModule"]})):
    for name in names:
        delattr(owner, name)
"""


def uses_newer_names(notebook):
    """Whether a newer name is in a cell that is exported, or in the files of which each script gets a part."""
    sources = [path.read_text() for path in (ROOT / "helpers" / "runtime").glob("*.py")]
    for cell in nbformat.read(notebook, as_version=4).cells:
        if "export" in cell.metadata.get("tags", []):
            sources.append(cell.source)

    for names in NEWER_NAMES.values():
        for name in names:
            for source in sources:
                if name in source:
                    return True
    return False


def quick_flags(notebook):
    """The flags with which a chapter's script takes only seconds, as a list."""
    return FACTS[notebook.stem].quick_flags.split()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Environment variables for a script that must run without this project."""
    return stand_alone(tmp_path_factory.mktemp("path"))


@pytest.fixture(scope="module")
def result_of_one_rank(alone, tmp_path_factory):
    """A function that returns the result of a chapter's script on one rank, with its quick flags. It runs it once."""

    @functools.cache
    def run(notebook):
        script = export(notebook, tmp_path_factory.mktemp("one_rank"))
        return run_on_one_rank(script, alone, *quick_flags(notebook))

    return run


def export_and_check_style(notebook, folder):
    """Write a notebook's script, alone in its folder, and check that ruff has nothing to change. Returns its path."""
    script = export(notebook, folder)
    assert os.listdir(folder) == [f"{notebook.stem}.py"]
    style = ["--isolated", "--line-length=88", "--target-version=py311"]
    for command in (["check", *ruff_rules()], ["format", "--check"]):
        done = subprocess.run([find_ruff_bin(), *command, *style, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return script


def ruff_rules():
    """The options of `ruff check` for this project's rules, but for annotations, which a script need not have."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    selected = [rule for rule in lint["select"] if rule != "ANN"]
    return [f"--select={','.join(selected)}", f"--ignore={','.join(lint['ignore'])}"]


def run_on_one_rank(script, environment, *flags):
    """Run a script by itself, and return its result.

    It runs in a fork, which saves time, or in a new interpreter if the chapter's metadata asks for one.
    """
    if FACTS[script.stem].fresh_interpreter:
        command = [sys.executable, script, *flags]
        done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240)
        ended = Ended(done.returncode, done.stdout, done.stderr, left=[])
    else:
        ended = forked(script_alone(script, *flags), environment)
    return result_of(ended, nproc=1)


def run_on_four_ranks(script, environment, *flags):
    """Run a script on four ranks, and return its result. The ranks are forked or, if one of these hung, real ones.

    Twice one of four forked ranks hung, probably in a lock that another thread of its agent held at the fork; in which
    one was not found. Real ranks cannot hang so, but each spends two seconds of a processor on its imports.
    """
    ended = forked(script_on_ranks(script, 4, *flags), environment)
    agent_had_to_kill_a_rank = "forcefully exiting via SIGKILL" in ended.errors
    if ended.status is None or agent_had_to_kill_a_rank:
        ended = torchrun(script, 4, environment, *flags)
    return result_of(ended, nproc=4)


def result_of(ended, nproc):
    """The result of a script that has ended on ``nproc`` ranks, after a check that it ended well.

    A script that runs on one rank, without torchrun, must not write anything to stderr.
    """
    assert ended.status is not None, f"{nproc} ranks hung\n{ended.out}{ended.errors}"
    assert ended.status == 0, f"{nproc} ranks: {ended.status}\n{ended.out}{ended.errors}"
    assert not ended.left
    assert "Warning" not in ended.errors, ended.errors
    if nproc == 1:
        assert ended.errors == ""
    return result_without_world_size(ended.out, nproc, first_line=f"{nproc} rank(s), gloo on cpu\n")


def result_without_world_size(out, world_size, first_line):
    """The numbers of a result that do not depend on how many ranks there are.

    ``out`` is what the script printed. The line with which a process group starts, such as "4 rank(s), gloo on cpu",
    must be in it, and the result must have this world size.
    """
    assert first_line in out
    numbers = result(out)
    assert numbers.pop("world_size") == world_size
    return numbers


@pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
def test_chapter(notebook, result_of_one_rank, alone, tmp_path):
    """The script has the same result on one rank and on four, and writes no files."""
    conditions = FACTS[notebook.stem].result
    assert conditions, "metadata.book.script.result does not say what the script's numbers must be"
    folder = tmp_path / "empty"
    script = export_and_check_style(notebook, folder)
    flags = quick_flags(notebook)

    result_of_one = result_of_one_rank(notebook)
    if not flags:  # with flags that make it quick, it cannot meet the conditions
        assert unmet(conditions, result_of_one) == []
    result_of_four = run_on_four_ranks(script, alone, *flags)
    assert result_of_four == pytest.approx(result_of_one, abs=TOLERANCE)
    assert set(os.listdir(folder)) <= {script.name, "__pycache__"}


@pytest.mark.daily  # the page's own cells train as long, and assert as much
@pytest.mark.parametrize("notebook", [path for path in CHAPTERS if quick_flags(path)], ids=lambda path: path.stem)
def test_without_its_quick_flags_it_trains_to_its_result(notebook, alone, tmp_path):
    script = export(notebook, tmp_path)
    result_of_one = run_on_one_rank(script, alone)
    assert unmet(FACTS[notebook.stem].result, result_of_one) == []


def rehearsed(notebook):
    """A chapter as a parameter. Two are rehearsed on each push, the others once a day."""
    if notebook in (RECORDED, TRAINER):
        return pytest.param(notebook, id=notebook.stem)
    return pytest.param(notebook, id=notebook.stem, marks=pytest.mark.daily)


@pytest.mark.parametrize("notebook", [rehearsed(notebook) for notebook in CHAPTERS])
def test_a_rehearsal_has_the_result_of_one_rank(notebook, result_of_one_rank, tmp_path):
    facts = FACTS[notebook.stem]
    gpus = facts.gpus
    script = export(notebook, tmp_path / "empty")
    report = script.with_name("report.json")
    script_or_number = script
    if notebook == RECORDED:
        script_or_number = "04"  # as its user writes it, for the recorded text
    flags = quick_flags(notebook) + facts.rehearsal_flags.split()
    done = rehearse_here(script_or_number, "--gpus", gpus, "--json", report, flags=flags)
    out = done.stdout + done.stderr

    assert done.returncode == 0, out
    result_on_gpus = result_without_world_size(out, gpus, first_line=f"{gpus} rank(s), nccl on cuda")
    assert result_on_gpus == pytest.approx(result_of_one_rank(notebook), abs=TOLERANCE)
    assert out.count(f"Rehearsal on {gpus} simulated GPUs") == 1
    # All collectives of the default group used the GPUs, so they are NCCL's. The report has lines such as
    # "trainer.py:88  allreduce (NCCL)" and "trainer.py:67  allreduce by DDP, in backward".
    assert re.search(r"\((NCCL|C\+\+)\)|by DDP", out)
    if notebook == RECORDED:
        text = out[out.index("Rehearsal on") :]
        recorded.compare("rehearsal", text, f"python -m pytest tests/test_scripts.py -k {notebook.stem}")
    if notebook == TRAINER:
        assert lines_that_often_wait(json.loads(report.read_text())) == []


def lines_that_often_wait(counts):
    """The lines of a rehearsal's report that wait for the GPU more often than in every third step.

    Only logging, evaluation and checkpoints of the trainer may wait, and they come rarely.
    """
    assert counts["steps"] > 10
    waits = [line for line in counts["lines"] if line["kind"] in ("wait", "upload")]
    return [line for line in waits if line["per_step"] > 1 / 3]


@pytest.mark.parametrize("notebook", [path for path in CHAPTERS if uses_newer_names(path)], ids=lambda path: path.stem)
def test_without_the_newer_names(notebook, result_of_one_rank, alone, tmp_path):
    """On an older PyTorch a script falls back to older names, or does not call what only a flag needs."""
    script = export(notebook, tmp_path)
    older = tmp_path / "older.py"
    older.write_text(f"{REMOVE_NEWER_NAMES}\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    ended = forked(script_alone(older, *quick_flags(notebook)), alone)
    assert ended.status == 0, ended.errors
    result_of_older = result_without_world_size(ended.out, 1, first_line="1 rank(s), gloo on cpu\n")
    assert result_of_older == pytest.approx(result_of_one_rank(notebook), abs=TOLERANCE)


def test_the_template_on_1_and_4_ranks(alone, tmp_path):
    folder = tmp_path / "empty"
    script = export_and_check_style(TEMPLATE, folder)
    result_of_one = result_of(torchrun(script, 1, alone), nproc=1)
    result_of_four = result_of(torchrun(script, 4, alone), nproc=4)
    assert unmet(facts_at(TEMPLATE).script.result, result_of_one) == []
    assert result_of_four == pytest.approx(result_of_one, abs=TOLERANCE)
    assert set(os.listdir(folder)) <= {script.name, "__pycache__"}


def test_the_cheat_sheet_on_two_ranks(tmp_path):
    """The code of all its cells runs as one script. torchrun gives each rank its number, and both share a folder."""
    setup, *rest = [cell.source for cell in nbformat.read(SHEET, as_version=4).cells if cell.cell_type == "code"]
    code = [
        setup.replace("%load_ext helpers\n", ""),
        f"runs, where = {str(tmp_path)!r}, {{}}",
        *rest,
        'print("the end")',
    ]
    script = tmp_path / "sheet.py"
    script.write_text("\n\n".join(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the end") == 2


class SimulatedClock:
    """A clock, and a call that takes 5 ms by it. Two calls take half a second more: the first and the fourth."""

    def __init__(self):
        self.now = 0.0
        self.calls = 0

    def perf_counter(self):
        return self.now

    def call(self):
        self.calls += 1
        self.now += 0.005
        if self.calls in (1, 4):
            self.now += 0.5


def test_the_clock_of_chapter_2_leaves_out_the_first_call_and_slow_means(tmp_path, monkeypatch):
    functions = runpy.run_path(str(export("02", tmp_path)))
    clock = SimulatedClock()
    functions["start_process_group"]("gloo")
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    seconds = functions["time_call"](clock.call, repeat=0.015, device=torch.device("cpu"))
    functions["stop_process_group"]()

    assert seconds == pytest.approx(0.005)
    first_call = 1  # is left out
    call_to_choose_how_many = 1
    calls_of_three_means = 3 * 3  # the fourth call is one of the first mean, so this mean does not count
    assert clock.calls == first_call + call_to_choose_how_many + calls_of_three_means


# {chapter: (a line of its script, a line that makes its result wrong, what the script then says)}
WRONG_RESULTS = {
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

    ended = forked(script_alone(script, "--backend=gloo"), alone)
    assert ended.status == 1
    assert ended.errors.endswith(f"{message}\n"), ended.errors
