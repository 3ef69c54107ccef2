"""What full runs of the tests recorded in notebooks/verified.json: on which versions each page and script passed.

`make test ALL=1` writes the file (tests/support/verified_run.py). The last line of each page shows its dates and
versions, and a script's docstring shows its versions.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helpers.writing import write_text

FILE_NAME = "verified.json"


@dataclass(frozen=True)
class Run:
    """A run in which a page passed: ``torch`` is 2.15.0, ``python`` is 3.11, and ``date`` is 2026-11-28."""

    torch: str
    python: str
    date: str


@dataclass(frozen=True)
class PageRecord:
    """The runs in which a page passed, one for each pair of versions. They ran the code that has this fingerprint."""

    fingerprint: str
    runs: list[Run]


@dataclass
class Record:
    """What the file holds, of the pages of the book and of the chapters' scripts."""

    pages: dict[str, PageRecord] = field(default_factory=dict)  # by names such as notebooks/04_ddp and book/intro
    # By names such as 04_ddp: on which versions of PyTorch a script passed, and the fingerprint of its notebook then.
    scripts: dict[str, list[str]] = field(default_factory=dict)
    script_fingerprints: dict[str, str] = field(default_factory=dict)


def version_key(version: str) -> list[int]:
    """Sorts versions by their numbers, so that 2.9.1 comes before 2.13.0."""
    return [int(number) for number in re.findall(r"\d+", version)]


def code_cells(notebook: Path) -> list[str]:
    """The sources of a notebook's code cells."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def fingerprint(page: Path) -> str:
    """A fingerprint of what the tests check of a page: a notebook's code cells, or all of a Markdown page."""
    if page.suffix == ".ipynb":
        text = json.dumps(code_cells(page))
    else:
        text = page.read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_record(file: Path) -> Record:
    """The record in a file. It is empty if there is no file. Raises ValueError for a file that holds something else."""
    if not file.exists():
        return Record()
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        pages = {name: page_record(page) for name, page in stored["pages"].items()}
        return Record(pages, stored["scripts"], stored["script_fingerprints"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} does not hold what a test run recorded: {type(error).__name__}: {error}.\n"
            "Restore it with git, or delete it and run: make test ALL=1"
        ) from None


def page_record(stored: dict[str, Any]) -> PageRecord:
    """A PageRecord as the file's JSON holds it."""
    runs = [Run(**run) for run in stored["runs"]]
    return PageRecord(stored["fingerprint"], runs)


def write_record(record: Record, file: Path) -> None:
    """Write a record. Whoever reads meanwhile, or kills this process, finds the old file or the new one."""
    write_text(file, json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")


def add_page(record: Record, page: str, code_fingerprint: str, run: Run) -> None:
    """Add a run in which a page passed to the record.

    It takes the place of an older run with the same versions, and of all runs of other code. ``page`` is its name, such
    as book/intro, and ``code_fingerprint`` that of its code.
    """
    runs = [run]
    known = record.pages.get(page)
    if known is not None and known.fingerprint == code_fingerprint:
        for older_run in known.runs:
            has_same_versions = (older_run.torch, older_run.python) == (run.torch, run.python)
            if not has_same_versions:
                runs.append(older_run)
    runs.sort(key=lambda run: (version_key(run.torch), version_key(run.python)))
    record.pages[page] = PageRecord(code_fingerprint, runs)


def add_script(record: Record, script: str, code_fingerprint: str, torch: str) -> None:
    """Note that a chapter's script passed on a version of PyTorch.

    ``code_fingerprint`` is that of the code of the chapter's notebook. If the record has another one, the versions in
    it passed with other code, and are dropped.
    """
    versions = {torch}
    if record.script_fingerprints.get(script) == code_fingerprint:
        versions.update(record.scripts[script])
    record.scripts[script] = sorted(versions, key=version_key)
    record.script_fingerprints[script] = code_fingerprint


def drop_what_is_gone(record: Record, fingerprints: dict[str, str]) -> None:
    """Drop pages that are no longer there, and scripts whose chapter is not the one that passed.

    ``fingerprints`` is {page: fingerprint} of all pages of today. A page that has changed keeps its old runs, so that
    its last line can say since when nobody has run it.
    """
    for page in set(record.pages) - set(fingerprints):
        del record.pages[page]
    for script, code_fingerprint in list(record.script_fingerprints.items()):
        if fingerprints.get(f"notebooks/{script}") != code_fingerprint:
            del record.script_fingerprints[script]
            del record.scripts[script]
