"""Tell the chapters one lie after the other, and see which cell notices: ``make sabotage``.

    python tools/sabotage                      # every lie; writes book/recorded/sabotage.csv
    python tools/sabotage all_reduce_adds_nothing  # one lie, and its rows of the record
    python tools/sabotage --clean 04 05        # chapters without a lie, by the same path: nothing may fail

A lie runs the chapters that teach the thing, in a copy of the project, each to its first failing cell. The exit status
is 1 if a lie is not noticed, or by a cell that is about something else.
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
from pathlib import Path

import nbformat
from lies import LIES
from mdit_py_plugins.anchors.index import slugify

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "book" / "recorded" / "sabotage.csv"
COLUMNS = ["The lie", "Chapter", "Section", "Cell", "By", "What the cell said"]
NOTICED = ("assert", "error", "hang", "output")


def run(lie, notebook, seconds=600):
    """The first failing cell of a chapter under a lie, as a dict with cell, kind, said; None if all cells pass.

    The kind is "fault" where the lie broke something else than the thing that it is about.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, failure, told = Path(folder, "book"), Path(folder, "failure.json"), Path(folder, "told")
        for name in ("helpers", "notebooks"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
            )
        (copy / "tests").mkdir()
        for name in ("pyproject.toml", "tests/nbval_sanitize.cfg"):
            shutil.copy(ROOT / name, copy / name)
        if lie and lie.file:
            file = copy / lie.file.format(chapter=notebook.name)
            file.write_text(lie.tell(file.read_text()))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "load"), str(copy)]),
            "TMPDIR": folder,
            "CUDA_VISIBLE_DEVICES": "",  # the pages' outputs are those of a CPU
            "OMP_WAIT_POLICY": "passive",  # other chapters may run beside this one
            "WORLD_SIZE_ONE_FAILURE": str(failure),
            "WORLD_SIZE_ONE_LIE_TOLD": str(told),
            "WORLD_SIZE_ONE_LIE": lie.name if lie else "",
        }
        command = [sys.executable, "-m", "pytest", "--nbval", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-p", "first_failure", f"notebooks/{notebook.name}"]
        done = subprocess.run(
            command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=seconds,
        )  # fmt: skip
        if failure.exists():
            return json.loads(failure.read_text().replace(str(copy) + "/", ""))
        if done.returncode:
            return {"cell": "", "kind": "fault", "said": done.stdout[-500:]}
        if lie and lie.module and not told.exists():
            return {"cell": "", "kind": "fault", "said": f"no process imported {lie.module}"}
        return None


def place(nb, cell_id):
    """(heading that a cell stands under, its anchor, the text around it: its own and its neighbours')."""
    at = next(index for index, cell in enumerate(nb.cells) if cell.id == cell_id)
    prose = [index for index, cell in enumerate(nb.cells) if cell.cell_type == "markdown"]
    before, after = [i for i in prose if i < at][-1:], [i for i in prose if i > at][:1]
    headings = [
        line.lstrip("#").strip()
        for cell in nb.cells[:at]
        if cell.cell_type == "markdown"
        for line in re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL).splitlines()
        if line.startswith("#")
    ]
    words = "\n".join([headings[-1], *(nb.cells[index].source for index in [*before, at, *after])])
    return headings[-1], slugify(re.sub(r"`", "", headings[-1])), words


def row(lie, notebook):
    """The record's row for a lie in a chapter, and what is wrong with it, or ""."""
    try:
        failure = run(lie, notebook)
    except subprocess.TimeoutExpired:
        failure = {"cell": "", "kind": "fault", "said": "the chapter did not end"}
    said = dict.fromkeys(COLUMNS, "") | {"The lie": lie.says, "Chapter": link(notebook)}
    if failure is None:
        return said, "no cell noticed"
    said["By"] = failure["kind"]
    said["What the cell said"] = quoted(failure["said"])
    if not failure["cell"]:
        return said, failure["said"]
    heading, anchor, words = place(nbformat.read(notebook, as_version=4), failure["cell"])
    said["Section"] = f"[{heading}](../notebooks/{notebook.stem}.ipynb#{anchor})"
    said["Cell"] = f"`{failure['cell']}`"
    if failure["kind"] not in NOTICED:
        return said, f"a fault of the lie: {failure['said']}"
    if not re.search(lie.words, words, re.IGNORECASE):
        return said, f"the cell is not about /{lie.words}/"
    return said, ""


def quoted(text, most=160):
    """A line of code or of an error as inline code of a page, cut where it is long."""
    text = " ".join(text.replace("`", "'").split())
    return f"`{text if len(text) <= most else text[: most - 2] + ' …'}`"


def notebook_of(chapter):
    [path] = (ROOT / "notebooks").glob(f"{chapter}_*.ipynb")
    return path


def recorded():
    """The rows of the record, as dicts."""
    if not RECORD.exists():
        return []
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="LIE", help="the lies to tell (default: all)")
    parser.add_argument("--clean", action="store_true", help="run the chapters that are named, without a lie")
    parser.add_argument("--jobs", type=int, default=1, help="chapters that run at a time (default: 1)")
    options = parser.parse_args(arguments)
    if unknown := [] if options.clean else [name for name in options.names if name not in LIES]:
        parser.error(f"there is no lie {unknown[0]}; the lies are: {', '.join(LIES)}")
    taught = sorted({chapter for lie in LIES.values() for chapter in lie.chapters})
    status = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.clean or not options.names:
            chapters = options.names or taught
            for chapter, failure in zip(chapters, pool.map(lambda c: run(None, notebook_of(c)), chapters), strict=True):
                print(f"chapter {chapter} without a lie: {failure or 'all cells pass'}", flush=True)
                status |= failure is not None
        if options.clean:
            return status
        names = options.names or list(LIES)
        pairs = [(LIES[name], notebook_of(chapter)) for name in names for chapter in LIES[name].chapters]
        running = {pool.submit(row, lie, notebook): (lie, notebook) for lie, notebook in pairs}
        for done in as_completed(running):
            (lie, notebook), (said, problem) = running[done], done.result()
            what = f"{said['By']} {said['Cell']} {said['What the cell said']}"
            print(f"{lie.name}, chapter {notebook.stem[:2]}: {what}", flush=True)
            if problem:
                print(f"  PROBLEM: {problem}", flush=True)
                status = 1
            record(said)
    return status


def record(row):
    """Put a row in its place in the record, and drop those of lies that are gone."""
    rows = {(old["The lie"], old["Chapter"]): old for old in [*recorded(), row]}
    order = [(lie.says, link(notebook_of(chapter))) for lie in LIES.values() for chapter in lie.chapters]
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in order if key in rows)


def link(notebook):
    return f"[{int(notebook.stem[:2])}](../notebooks/{notebook.stem}.ipynb)"


if __name__ == "__main__":
    sys.exit(main())
