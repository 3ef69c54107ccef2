"""Tell the chapters one lie after the other, and see which cell notices it: ``make sabotage``.

    make sabotage                               every lie
    make sabotage ARGS=all_reduce_adds_nothing  one lie

A lie is a planted fault: a wrong change of torch, of helpers or of a chapter. With a lie, the chapters that teach its
subject run in a copy of the project, each up to its first failing cell. What the cells said goes to
book/recorded/sabotage.csv, which the book shows. The exit status is 1 if no cell notices a lie, or if the cell that
notices it is about something else.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
from mdit_py_plugins.anchors.index import slugify

from sabotage.lies import LIES, Lie

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "book" / "recorded" / "sabotage.csv"
COLUMNS = ["The lie", "Noticed in", "Cell", "By", "What the cell said"]
MOST_SECONDS = 3600  # a chapter that takes longer is ended
LONGEST_QUOTE = 160  # characters of what a cell said
PAIRS = [(lie, chapter) for lie in LIES.values() for chapter in lie.chapters]  # in the record's order


@dataclass(frozen=True)
class Failure:
    """A chapter's first failing cell. The kind "fault" means that the lie itself failed, so the run proves nothing."""

    cell: str  # its id
    kind: str  # assert, error, hang, output, or fault
    text: str  # what the cell said


@dataclass(frozen=True)
class Verdict:
    """``row`` is for the record, and ``problem`` is empty if a cell about the lie's subject has noticed the lie."""

    row: dict[str, str]
    problem: str


@dataclass(frozen=True)
class Section:
    """Where a cell is. ``text`` is the cell, the prose before and after it, and the heading above."""

    heading: str
    anchor: str
    text: str


# --- one chapter under one lie ----------------------------------------------------------------------------------------


def run(lie: Lie, chapter: str) -> Failure | None:
    """Run a chapter under a lie, in a copy of the project. Returns its first failing cell; None if all cells pass."""
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of_the_project(Path(folder, "book"))
        notebook = project / "notebooks" / notebook_of(chapter).name
        if lie.changes_notebook:
            notebook.write_text(lie.apply(notebook.read_text()))
        failure_file = Path(folder, "failure.json")
        applied_file = Path(folder, "applied")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "load"), str(project)]),
            "TMPDIR": folder,
            # load/sitecustomize.py applies the lie in each process that imports its module, and then makes this file.
            "WORLD_SIZE_ONE_LIE": lie.name,
            "WORLD_SIZE_ONE_APPLIED": str(applied_file),
            # load/first_failure.py, a plugin of pytest, writes the first failing cell to this file.
            "WORLD_SIZE_ONE_FAILURE": str(failure_file),
        }
        try:
            pytest = run_pytest(f"notebooks/{notebook.name}", project, environment)
        except subprocess.TimeoutExpired:
            return fault(f"the chapter did not end in {MOST_SECONDS} s")
        if failure_file.exists():
            return Failure(**json.loads(failure_file.read_text()))
        if pytest.returncode != 0:
            return fault(pytest.stdout[-1000:])
        if not lie.changes_notebook and not applied_file.exists():
            return fault(f"no process imported {lie.module}")
        return None


def fault(text: str) -> Failure:
    """The failure of a run that proves nothing, without a cell."""
    return Failure(cell="", kind="fault", text=text)


def run_pytest(notebook: str, project: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the cells of a notebook up to the first that fails. Raises TimeoutExpired after MOST_SECONDS."""
    command = [sys.executable, "-m", "pytest", "--nbval", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "first_failure", "--nbval-cell-timeout=600", "--timeout=900", notebook]
    return subprocess.run(
        command,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )


def copy_of_the_project(folder: Path) -> Path:
    """Copy what a chapter needs of this project to a folder, where a lie may change it."""
    ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
    for name in ("helpers", "notebooks", "book/recorded"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "tests" / "support").mkdir(parents=True)
    for name in ("pyproject.toml", "conftest.py", "tests/nbval_sanitize.cfg", "tests/support/ipc_kernels.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def notebook_of(chapter: str) -> Path:
    """The notebook of a chapter's number, such as 04 or 10b, or of how its name begins, such as cheat_sheet."""
    pattern = f"{chapter}*.ipynb"
    if chapter[0].isdigit():
        pattern = f"{chapter}_*.ipynb"
    [path] = (ROOT / "notebooks").glob(pattern)
    return path


# --- what it came to --------------------------------------------------------------------------------------------------


def verdict_on(lie: Lie, chapter: str, failure: Failure | None) -> Verdict:
    """Whether a chapter's first failing cell, or None, shows that the chapter notices the lie."""
    row = dict.fromkeys(COLUMNS, "")
    row["The lie"] = lie.description
    row["Noticed in"] = f"chapter {label(chapter)}"
    if failure is None:
        return Verdict(row, "no cell notices it")
    if failure.kind == "fault":
        return Verdict(row, f"the lie does not work: {failure.cell} {failure.text}")

    notebook = notebook_of(chapter)
    section = section_of(read_notebook(notebook), failure.cell)
    row["Noticed in"] = f"[{label(chapter)}, {section.heading}](../notebooks/{notebook.name}#{section.anchor})"
    row["Cell"] = f"`{failure.cell}`"
    row["By"] = failure.kind
    row["What the cell said"] = as_code(failure.text)
    if re.search(lie.words, section.text, re.IGNORECASE):
        return Verdict(row, "")
    return Verdict(row, f"neither the cell nor the prose around it has the words {lie.words}")


@cache
def read_notebook(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def section_of(nb: nbformat.NotebookNode, cell_id: str) -> Section:
    """The part of a notebook in which a cell is."""
    [position] = [index for index, cell in enumerate(nb.cells) if cell.id == cell_id]
    before = prose_of(nb.cells[:position])
    after = prose_of(nb.cells[position:])
    # A comment in a listing begins with # as a heading does.
    without_listings = re.sub(r"(?ms)^```.*?^```", "", "\n".join(before))
    last_heading = re.findall(r"(?m)^#+ (.*)$", without_listings)[-1]
    heading = re.sub(r"^\d+\. ", "", last_heading)  # a chapter's title begins with its number
    text = "\n".join([heading, *before[-1:], nb.cells[position].source, *after[:1]])
    return Section(heading, slugify(last_heading.replace("`", "")), text)


def prose_of(cells: list[nbformat.NotebookNode]) -> list[str]:
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def as_code(text: str, longest: int = LONGEST_QUOTE) -> str:
    """A line of code, or of an error, as inline code for a page: cut, and without the path of this machine's Python."""
    text = text.replace("`", "'").replace(f"{Path(sys.executable).parent}/", "")
    text = " ".join(text.split())
    if len(text) > longest:
        text = text[: longest - 2].rstrip() + " …"
    return f"`{text}`"


# --- the record -------------------------------------------------------------------------------------------------------


def read_record() -> list[dict[str, str]]:
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label(chapter: str) -> str:
    """What the record calls a chapter: its number, such as 4 or 10b, or the name of a page of the appendix."""
    if chapter[0].isdigit():
        return re.sub(r"^0(?=\d)", "", chapter)
    return chapter.replace("_", " ")


def key(row: dict[str, str]) -> tuple[str, str]:
    """(the lie, the chapter's label): no two rows have the same key."""
    [chapter] = re.findall(r"^(?:chapter |\[)([\w ]+)", row["Noticed in"])
    return row["The lie"], chapter


def record(row: dict[str, str]) -> None:
    """Write a row to the record, in the order of the lies, and remove rows of lies that no longer exist."""
    rows = {key(stored): stored for stored in read_record()}
    rows[key(row)] = row
    order = [(lie.description, label(chapter)) for lie, chapter in PAIRS]
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[pair] for pair in order if pair in rows)


# --- the command ------------------------------------------------------------------------------------------------------


def tell_lies(names: list[str], jobs: int) -> int:
    """Run the chapters that have to notice these lies, ``jobs`` at a time, and record what the cells said.

    Returns how many of the runs have a problem.
    """
    chosen = [(lie, chapter) for lie, chapter in PAIRS if lie.name in names]
    lies_with_problem = []
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, lie, chapter): (lie, chapter) for lie, chapter in chosen}
        for finished in as_completed(runs):
            lie, chapter = runs[finished]
            verdict = verdict_on(lie, chapter, finished.result())
            record(verdict.row)
            show(lie, chapter, verdict)
            if verdict.problem:
                lies_with_problem.append(lie.name)
    print(f"{len(chosen)} told, {len(lies_with_problem)} bad: {', '.join(lies_with_problem)}")
    return len(lies_with_problem)


def show(lie: Lie, chapter: str, verdict: Verdict) -> None:
    """Print in one line what the cell said, and the problem, if there is one, in a second."""
    said = [verdict.row[column] for column in ("Cell", "By", "What the cell said")]
    print(f"{lie.name}, chapter {chapter}: {' '.join(said)}", flush=True)
    if verdict.problem:
        print(f"  {verdict.problem}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LIE", help="the lies to tell (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="chapters that run at a time (default: 1)")
    options = parser.parse_args()
    for name in options.names:
        if name not in LIES:
            parser.error(f"there is no lie {name}; the lies are {', '.join(LIES)}")
    problems = tell_lies(options.names or list(LIES), options.jobs)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
