"""Plant one fault after the other, each called a lie, and see which cell of the book notices it: ``make sabotage``.

    make sabotage                               every lie
    make sabotage ARGS=all_reduce_adds_nothing  one lie

A lie is a wrong change of torch, of helpers or of a chapter. To tell a lie is to run the chapters that teach its
subject with the fault in place, in a copy of the project, each up to its first failing cell. What the cells said goes
to book/recorded/sabotage.csv, which the book shows. The exit status is 1 if no cell notices a lie, or if the cell that
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
# Each lie with each chapter that has to notice it, in the record's order.
PAIRS = [(lie, chapter) for lie in LIES.values() for chapter in lie.chapters]


@dataclass(frozen=True)
class Failure:
    """How a chapter failed in which a bug, a lie, was planted.

    ``kind`` says in which way its first failing cell failed: assert, error, hang or output. The kind "fault" says that
    no cell noticed the bug, but that the run itself failed, for example because the bug could not be planted. Then it
    is not known whether a cell would notice it.
    """

    cell: str  # the id of the cell
    kind: str
    text: str  # what the cell said, or why the run failed


@dataclass(frozen=True)
class Verdict:
    """What a run shows of a lie: whether the chapter notices it, and the row that the record gets."""

    row: dict[str, str]  # {column: text}
    problem: str  # why the run does not show that the chapter notices the lie; empty if it does


@dataclass(frozen=True)
class Section:
    """Where in a chapter a cell is."""

    heading: str  # the last one above the cell
    anchor: str  # of the heading, in the address of the page
    text: str  # the heading, the prose before the cell, the cell, and the prose after it


# --- one chapter under one lie ----------------------------------------------------------------------------------------


def run(lie: Lie, chapter: str) -> Failure | None:
    """Run a chapter with a planted bug, a lie, in a copy of the project, up to its first failing cell.

    Returns

    - None if all cells passed, so that no cell notices the bug;
    - a Failure of the kind "fault" if the run itself failed: for example, the chapter did not end, or the bug was not
      planted;
    - otherwise the Failure that describes the failing cell.
    """
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of_the_project(Path(folder, "book"))
        notebook = project / "notebooks" / notebook_of(chapter).name
        if lie.changes_notebook:
            notebook.write_text(lie.apply(notebook.read_text()))
        failure_file = Path(folder, "failure.json")
        applied_file = Path(folder, "applied")
        environment = environment_of_run(lie, project, folder, failure_file, applied_file)
        try:
            pytest = run_pytest(f"notebooks/{notebook.name}", project, environment)
        except subprocess.TimeoutExpired:
            return fault(f"the chapter did not end in {MOST_SECONDS} s")
        if failure_file.exists():
            return Failure(**json.loads(failure_file.read_text()))
        if pytest.returncode != 0:  # pytest failed before it came to a cell
            return fault(pytest.stdout[-1000:])
        was_applied = lie.changes_notebook or applied_file.exists()
        if not was_applied:
            return fault(f"no process imported {lie.module}")
        return None


def environment_of_run(
    lie: Lie, project: Path, temporary_folder: str, failure_file: Path, applied_file: Path
) -> dict[str, str]:
    """The environment variables of a run with a planted bug, a lie.

    The bug has to be planted also in the processes that the chapter starts. They inherit these variables, which name
    the bug and the files to which they write what happened. ``project`` is the folder of the project's copy.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "load"), str(project)]),
        "TMPDIR": temporary_folder,
        # load/sitecustomize.py applies the lie in each process that imports its module, and then makes this file.
        "WORLD_SIZE_ONE_LIE": lie.name,
        "WORLD_SIZE_ONE_APPLIED": str(applied_file),
        # load/first_failure.py, a plugin of pytest, writes the first failing cell to this file.
        "WORLD_SIZE_ONE_FAILURE": str(failure_file),
    }


def fault(text: str) -> Failure:
    """The Failure of a run that itself failed, for this reason. No cell of the chapter has to do with it."""
    return Failure(cell="", kind="fault", text=text)


def run_pytest(notebook: str, project: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the cells of a notebook up to the first that fails. Raises TimeoutExpired after MOST_SECONDS."""
    command = [sys.executable, "-m", "pytest", notebook]
    command += ["--nbval", "--nbval-cell-timeout=600", "--timeout=900"]
    command += ["-x", "-q"]  # end at the first failure
    command += ["-p", "first_failure"]  # the plugin in load/
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]  # one notebook, whose folder is then removed, needs neither
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
    """The file of a chapter's notebook. ``chapter`` is its number, such as 04 or 10b, or how its file's name begins."""
    if chapter[0].isdigit():
        pattern = f"{chapter}_*.ipynb"  # so that 10 does not find 10b_topic.ipynb
    else:
        pattern = f"{chapter}*.ipynb"
    [path] = (ROOT / "notebooks").glob(pattern)
    return path


# --- what it came to --------------------------------------------------------------------------------------------------


def verdict_on(lie: Lie, chapter: str, failure: Failure | None) -> Verdict:
    """Judge a run of a chapter with a planted bug, a lie: whether the chapter notices the bug, and the record's row.

    ``failure`` is the chapter's first failing cell, or None if all cells passed. That some cell fails is not enough.
    The cell or the prose around it has to be about the bug's subject, so it has to match the pattern ``lie.words``:
    otherwise the chapter says nothing that this bug makes wrong.
    """
    row = {column: "" for column in COLUMNS}
    row["The lie"] = lie.description
    row["Noticed in"] = f"chapter {label(chapter)}"
    if failure is None:
        return Verdict(row, problem="no cell notices it")
    if failure.kind == "fault":
        return Verdict(row, problem=f"the lie does not work: {failure.cell} {failure.text}")

    notebook = notebook_of(chapter)
    section = section_of(read_notebook(notebook), failure.cell)
    row["Noticed in"] = f"[{label(chapter)}, {section.heading}](../notebooks/{notebook.name}#{section.anchor})"
    row["Cell"] = f"`{failure.cell}`"
    row["By"] = failure.kind
    row["What the cell said"] = as_code(failure.text)
    is_about_the_subject = re.search(lie.words, section.text, re.IGNORECASE) is not None
    if not is_about_the_subject:
        return Verdict(row, problem=f"neither the cell nor the prose around it has the words {lie.words}")
    return Verdict(row, problem="")


@cache
def read_notebook(path: Path) -> nbformat.NotebookNode:
    """A notebook. It is read once, because the record has many rows of the same chapter."""
    return nbformat.read(path, as_version=4)


def section_of(nb: nbformat.NotebookNode, cell_id: str) -> Section:
    """Where in a notebook a cell is: the heading above it, the heading's anchor, and the text around the cell.

    Raises ValueError if the notebook has no cell with this id.
    """
    index_of_cell = [cell.id for cell in nb.cells].index(cell_id)
    prose_before = prose_of(nb.cells[:index_of_cell])
    prose_after = prose_of(nb.cells[index_of_cell:])

    # Listings, from one line of ``` to the next, are removed, because a comment in them would look like a heading: both
    # begin with #.
    without_listings = re.sub(r"(?ms)^```.*?^```", "", "\n".join(prose_before))
    headings = re.findall(r"(?m)^#+ (.*)$", without_listings)
    heading_above = headings[-1]
    without_number = re.sub(r"^\d+\. ", "", heading_above)  # a chapter's title is "4. DistributedDataParallel"
    anchor = slugify(heading_above.replace("`", ""))

    # Of the prose, the nearest Markdown cell on each side. At the end of a chapter there may be none after the cell.
    nearest_before = prose_before[-1:]
    nearest_after = prose_after[:1]
    text = "\n".join([without_number, *nearest_before, nb.cells[index_of_cell].source, *nearest_after])
    return Section(without_number, anchor, text)


def prose_of(cells: list[nbformat.NotebookNode]) -> list[str]:
    """The texts of the Markdown cells among these."""
    return [cell.source for cell in cells if cell.cell_type == "markdown"]


def as_code(text: str, longest: int = LONGEST_QUOTE) -> str:
    """A piece of code or of an error's message as inline code for a page, on one line.

    It is cut if it has more than ``longest`` characters, and the folder of this machine's Python is left out.
    """
    folder_of_python = f"{Path(sys.executable).parent}/"
    text = text.replace("`", "'").replace(folder_of_python, "")
    text = " ".join(text.split())
    if len(text) > longest:
        text = text[: longest - 2].rstrip() + " …"
    return f"`{text}`"


# --- the record -------------------------------------------------------------------------------------------------------


def read_record() -> list[dict[str, str]]:
    """The rows of the record, {column: text}: what each chapter said of each lie when it was told last."""
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label(chapter: str) -> str:
    """What the record calls a chapter: its number, such as 4 or 10b, or the name of a page of the appendix."""
    if chapter[0].isdigit():
        return re.sub(r"^0(?=\d)", "", chapter)  # 4 for 04
    return chapter.replace("_", " ")


def key(row: dict[str, str]) -> tuple[str, str]:
    """The two things that only one row of the record has: (the lie's description, the chapter's label)."""
    # The column is "chapter 4" if no cell noticed the lie, and otherwise a link: "[4, The heading](address)".
    [chapter] = re.findall(r"^(?:chapter |\[)([\w ]+)", row["Noticed in"])
    return row["The lie"], chapter


def record(row: dict[str, str]) -> None:
    """Write a row to the record, in the order of the lies, and remove rows of lies that no longer exist."""
    rows = {key(stored_row): stored_row for stored_row in read_record()}
    rows[key(row)] = row  # It replaces the row of an earlier run.
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for lie, chapter in PAIRS:
            key_of_pair = (lie.description, label(chapter))
            if key_of_pair in rows:  # A new lie may have no row yet.
                writer.writerow(rows[key_of_pair])


# --- the command ------------------------------------------------------------------------------------------------------


def tell_lies(names: list[str], jobs: int) -> int:
    """Run each of these planted bugs, called lies, with the chapters that have to notice it; record what cells said.

    ``names`` are the names of the lies, and ``jobs`` is how many chapters run at a time. Returns how many of the runs
    have a problem: no cell noticed the bug, or a cell about something else did, or the bug could not be planted.
    """
    chosen = [(lie, chapter) for lie, chapter in PAIRS if lie.name in names]
    lies_with_problem = []  # their names, once for each run with a problem, so a lie may be there twice
    with ThreadPoolExecutor(jobs) as pool:
        runs = {}  # {the future of a run: its lie and its chapter}
        for lie, chapter in chosen:
            future = pool.submit(run, lie, chapter)
            runs[future] = (lie, chapter)
        for future in as_completed(runs):  # each verdict is shown as soon as its run has ended
            lie, chapter = runs[future]
            verdict = verdict_on(lie, chapter, failure=future.result())
            record(verdict.row)
            show(lie, chapter, verdict)
            if verdict.problem:
                lies_with_problem.append(lie.name)
    print(f"{len(chosen)} told, {len(lies_with_problem)} bad: {', '.join(lies_with_problem)}")
    return len(lies_with_problem)


def show(lie: Lie, chapter: str, verdict: Verdict) -> None:
    """Print a line with what the cell said and, if there is a problem, a second one with the problem."""
    cell = verdict.row["Cell"]
    kind = verdict.row["By"]
    text = verdict.row["What the cell said"]
    print(f"{lie.name}, chapter {chapter}: {cell} {kind} {text}", flush=True)
    if verdict.problem:
        print(f"  {verdict.problem}", flush=True)


def main() -> int:
    """Carry out the command line; return the exit status: 1 if a run has a problem."""
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LIE", help="the lies to tell (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="chapters that run at a time (default: 1)")
    options = parser.parse_args()
    for name in options.names:
        if name not in LIES:
            parser.error(f"there is no lie {name}; the lies are {', '.join(LIES)}")
    names = options.names or list(LIES)
    num_problems = tell_lies(names, options.jobs)
    if num_problems > 0:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
