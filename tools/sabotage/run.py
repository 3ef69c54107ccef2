"""Tell the chapters one lie after the other, and see which cell notices it: ``make sabotage``.

    make sabotage                               every lie, every chapter without one, and every assert
    make sabotage ARGS=all_reduce_adds_nothing  one lie
    make sabotage ARGS=--clean=04,05            chapters without a lie, by the same path: no cell may fail
    make sabotage ARGS=--asserts=04,05          the asserts of these chapters that cannot fail (flips.py)

With a lie, the chapters that teach its subject run in a copy of the project, each up to its first failing cell. What
the cells said goes to book/recorded/sabotage.csv, which the book shows. The exit status is 1 if no cell notices a lie,
if the cell that notices it is about something else, or if an assert cannot fail.
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
from typing import Any

import nbformat
from mdit_py_plugins.anchors.index import slugify

from sabotage import flips
from sabotage.lies import LIES, Lie

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "book" / "recorded" / "sabotage.csv"
COLUMNS = ["The lie", "Noticed in", "Cell", "By", "What the cell said"]
KERNELS = "tests/support/ipc_kernels.py"  # which the root conftest.py may import
MOST_SECONDS = 3600  # a chapter that takes longer is ended
PAIRS = [(lie, chapter) for lie in LIES.values() for chapter in lie.chapters]  # in the record's order


@dataclass(frozen=True)
class Failure:
    cell: str
    kind: str  # assert, error, hang, output, or fault
    text: str  # what the cell said


def run(lie: Lie | None, chapter: str, until: str | None = None) -> Failure | None:
    """The first failing cell of a chapter under a lie; None if all cells pass.

    Without a lie the chapter runs unchanged, in the same way. ``until`` is the id of the last cell to run. It is a
    fault where the lie itself raised an error, or where no process imported what the lie changes.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_project(Path(folder, "book"))
        notebook = copy / "notebooks" / notebook_of(chapter).name
        if lie and (lie.file or lie.notebook):
            file = copy / file_of(lie, chapter)
            file.write_text(lie.tell(file.read_text()))
        failure, proof = Path(folder, "failure.json"), Path(folder, "told")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "load"), str(copy)]),
            "TMPDIR": folder,
            "WORLD_SIZE_ONE_LIE": lie.name if lie else "",
            "WORLD_SIZE_ONE_TOLD": str(proof),
            "WORLD_SIZE_ONE_FAILURE": str(failure),
            "WORLD_SIZE_ONE_UNTIL": until or "",
        }
        command = [sys.executable, "-m", "pytest", "--nbval", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-p", "first_failure", "--nbval-cell-timeout=600", "--timeout=900", str(notebook.relative_to(copy))]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            process = subprocess.run(command, cwd=copy, env=environment, text=True, timeout=MOST_SECONDS, **pipes)
        except subprocess.TimeoutExpired:
            return Failure("", "fault", f"the chapter did not end in {MOST_SECONDS} s")
        if failure.exists():
            return Failure(**json.loads(failure.read_text()))
        if process.returncode:
            return Failure("", "fault", process.stdout[-1000:])
        if lie and lie.module and not proof.exists():
            return Failure("", "fault", f"no process imported {lie.module}")
        return None


def copy_of_the_project(folder: Path) -> Path:
    """Copy what a chapter needs of this project to a folder, where a lie may change it."""
    for name in ("helpers", "notebooks", "book/recorded"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    (folder / "tests" / "support").mkdir(parents=True)
    for name in ("pyproject.toml", "conftest.py", "tests/nbval_sanitize.cfg", KERNELS):
        shutil.copy(ROOT / name, folder / name)
    return folder


def notebook_of(chapter: str) -> Path:
    """The notebook of a chapter's number, such as 04 or 10b, or of how its name begins."""
    has_number = chapter[0].isdigit()
    [path] = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb" if has_number else f"{chapter}*.ipynb")
    return path


def file_of(lie: Lie, chapter: str) -> str:
    """The path in the project of the file that a lie changes, told in this chapter."""
    if lie.notebook:
        return f"notebooks/{notebook_of(chapter).name}"
    return lie.file


@cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def row(lie: Lie, chapter: str, failure: Failure | None) -> tuple[dict[str, str], str]:
    """What a lie came to in a chapter: (the row for the record, what is wrong with it or "")."""
    cells = dict.fromkeys(COLUMNS, "") | {"The lie": lie.says, "Noticed in": f"chapter {label(chapter)}"}
    if failure is None:
        return cells, "no cell notices it"
    if failure.kind == "fault":
        return cells, f"the lie does not work: {failure.cell} {failure.text}"
    heading, anchor, words = place(read(notebook_of(chapter)), failure.cell)
    cells["Noticed in"] = f"[{label(chapter)}, {heading}](../notebooks/{notebook_of(chapter).name}#{anchor})"
    cells |= {"Cell": f"`{failure.cell}`", "By": failure.kind, "What the cell said": as_code(failure.text)}
    about = re.search(lie.words, words, re.IGNORECASE)
    return cells, "" if about else f"neither the cell nor the prose around it has the words {lie.words}"


def place(nb: nbformat.NotebookNode, cell_id: str) -> tuple[str, str, str]:
    """(the heading above a cell, the heading's anchor, the text of the cell and of the prose before and after it)."""
    at = next(index for index, cell in enumerate(nb.cells) if cell.id == cell_id)
    prose = [index for index, cell in enumerate(nb.cells) if cell.cell_type == "markdown"]
    before, after = [i for i in prose if i < at], [i for i in prose if i > at]
    text = "\n".join(nb.cells[index].source for index in before)
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    around = [nb.cells[index].source for index in [*before[-1:], at, *after[:1]]]
    heading = re.sub(r"^\d+\. ", "", headings[-1])  # a chapter's title begins with its number
    return heading, slugify(headings[-1].replace("`", "")), "\n".join([heading, *around])


def as_code(text: str, most: int = 160) -> str:
    """A line of code, or of an error, as inline code for a page, without this machine's path of Python, cut after
    ``most`` characters.
    """
    text = " ".join(text.replace("`", "'").replace(f"{Path(sys.executable).parent}/", "").split())
    return f"`{text if len(text) <= most else text[: most - 2].rstrip() + ' …'}`"


def read_record() -> list[dict[str, str]]:
    """The rows of the record, as dicts."""
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label(chapter: str) -> str:
    """What the record calls a chapter: its number, such as 4 or 10b, or the name of a page of the appendix."""
    if chapter[0].isdigit():
        return re.sub(r"^0(?=\d)", "", chapter)
    return chapter.replace("_", " ")


def key(row: dict[str, str]) -> tuple[str, str]:
    """(the lie, the chapter's label): no two rows have the same key."""
    return row["The lie"], re.findall(r"(?:chapter |\[)([\w ]+)", row["Noticed in"])[0]


def record(row: dict[str, str]) -> None:
    """Write a row to the record, in the order of the lies, and remove rows of lies that no longer exist."""
    rows = {key(entry): entry for entry in [*read_record(), row]}
    order = [(lie.says, label(chapter)) for lie, chapter in PAIRS]
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[pair] for pair in order if pair in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LIE", help="the lies to tell (default: all)")
    parser.add_argument("--clean", metavar="CHAPTERS", help="run these chapters without a lie, and no other: 04,05")
    parser.add_argument("--asserts", metavar="CHAPTERS", help="name the asserts of these that cannot fail: 04,05")
    parser.add_argument("--jobs", type=int, default=1, help="chapters that run at a time (default: 1)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in LIES]:
        parser.error(f"there is no lie {unknown[0]}; the lies are {', '.join(LIES)}")
    if options.asserts:
        return int(flips.main([notebook_of(chapter) for chapter in options.asserts.split(",")]))
    with ThreadPoolExecutor(options.jobs) as pool:
        bad: list[str] = []
        if options.clean or not options.names:
            chapters = options.clean.split(",") if options.clean else sorted({chapter for _, chapter in PAIRS})
            for chapter, failure in zip(chapters, pool.map(lambda chapter: run(None, chapter), chapters), strict=True):
                print(f"chapter {chapter} without a lie: {failure or 'every cell passes'}", flush=True)
                bad += [chapter] if failure else []
        names = [] if options.clean else options.names or LIES
        pairs = [(lie, chapter) for lie, chapter in PAIRS if lie.name in names]
        pending = {pool.submit(run, *pair): pair for pair in pairs}
        for future in as_completed(pending):
            lie, chapter = pending[future]
            cells, problem = row(lie, chapter, future.result())
            print(f"{lie.name}, chapter {chapter}: {' '.join(list(cells.values())[2:])}", flush=True)
            if problem:
                print(f"  {problem}", flush=True)
                bad.append(lie.name)
            record(cells)
    print(f"{len(pairs)} told, {len(bad)} bad{': ' if bad else ''}{', '.join(bad)}")
    weak = not (options.clean or options.names) and flips.main(sorted((ROOT / "notebooks").glob("*.ipynb")))
    return 1 if bad or weak else 0


if __name__ == "__main__":
    sys.exit(main())
