"""The chapters' notebooks: where they are, what they say of themselves, and their scripts as files."""

import os
import re
from pathlib import Path

from helpers.command_line import as_argument
from helpers.export.facts import NOTEBOOKS, chapters_in, facts_at, is_called
from helpers.export.launch_files import Allocation, launch_files
from helpers.export.notebook import ExportError, read_notebook, script_name
from helpers.export.script import script_from_notebook
from helpers.export.verified import FILE_NAME, fingerprint, read_record
from helpers.writing import write_text


def chapters() -> list[Path]:
    """The paths of the chapters' notebooks, in order, without practice pages and the template."""
    return chapters_in(NOTEBOOKS)


def numbered() -> list[Path]:
    """The paths of the chapters' notebooks, and of the practice pages beside them, such as 10b, in order."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]*_*.ipynb"))


def tested_with(notebook: Path) -> list[str] | None:
    """The recorded versions of PyTorch on which a chapter's script was run, as its notebook is now.

    There are none for a chapter that has changed since. It is None for a notebook that is no chapter of this book.
    """
    is_of_this_book = notebook.resolve().parent == NOTEBOOKS.resolve()
    if not is_of_this_book:
        return None
    record = read_record(NOTEBOOKS / FILE_NAME)
    if record.script_fingerprints.get(notebook.stem) != fingerprint(notebook):
        return []
    return record.scripts[notebook.stem]


def find_notebook(chapter: str | Path) -> Path:
    """The notebook of a number, such as 4, 04 or 10b, or of a name, or at a path.

    Raises ExportError for what does not exist.
    """
    if os.path.isfile(chapter):
        if Path(chapter).suffix == ".py":
            line = f"torchrun --nproc-per-node=2 {as_argument(str(chapter))}"
            raise ExportError(f"{chapter} is a script already.\nStart it: {line}")
        return Path(chapter)
    for path in numbered():
        if is_called(path.stem, str(chapter)):
            return path
    if Path(chapter).suffix or os.sep in str(chapter):
        raise ExportError(f"There is no file {chapter}.\nCheck the path, or see python -m helpers list.")
    names = ", ".join(path.stem for path in numbered())
    raise ExportError(f"There is no chapter or notebook {chapter!r}.\nChapters: {names}. Or the path of a notebook.")


def preflight() -> str:
    """The name of the one chapter whose script checks a cluster's links before other scripts run."""
    [notebook] = [path for path in chapters() if facts_at(path).script.preflight]
    return notebook.stem


def export(
    chapter: str | Path | None, folder: str | Path, force: bool = False, allocation: Allocation | None = None
) -> list[Path]:
    """Write the script of a chapter, or of every chapter (None), into a folder; return the paths of what was written.

    With an allocation of a cluster, files that start each script there are written, too. Raises ExportError if a
    notebook cannot be exported, or if a file is there with another text, unless ``force``. Nothing is written then.
    """
    if chapter is None:
        notebooks = chapters()
    else:
        notebooks = [find_notebook(chapter)]
    text_of_path: dict[Path, str] = {}
    for notebook in notebooks:
        for file_name, text in files_of(notebook, allocation).items():
            text_of_path[Path(folder, file_name)] = text
    try:
        if not force:
            for path, text in text_of_path.items():
                refuse_other_text(path, text)
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in text_of_path.items():
            write_text(path, text)
    except OSError as error:
        what = f"{error.filename} cannot be written: {error.strerror}"
        raise ExportError(f"{what}.\nChoose a folder: --out DIR") from None
    return list(text_of_path)


def export_script(chapter: str | Path, folder: str | Path) -> Path:
    """Write the script of one chapter into a folder; return its path. Raises ExportError as ``export`` does."""
    [script] = export(chapter, folder)  # without an allocation, a chapter has no other file
    return script


def files_of(path: Path, allocation: Allocation | None) -> dict[str, str]:
    """{file name: text} of a notebook's script, and with an allocation of its launch files."""
    refuse_practice_page(path)
    notebook = read_notebook(path)
    name = script_name(notebook, path.stem)
    script = script_from_notebook(notebook, name, tested_with(path))
    files = {f"{name}.py": script}
    if allocation is not None:
        files.update(launch_files(name, script, allocation, preflight()))
    return files


def refuse_other_text(path: Path, text: str) -> None:
    """Raise ExportError if a file holds another text: the reader may have changed it."""
    if path.exists() and path.read_bytes() != text.encode():
        raise ExportError(f"{path} exists and differs.\nKeep your changes elsewhere, or overwrite: --force")


def refuse_practice_page(path: Path) -> None:
    """Raise ExportError for the notebook of a practice page, such as 10b: it has no script, and its chapter has one."""
    beside = re.match(r"(?P<chapter>\d\d)[a-z]_", path.name)
    if beside is None:
        return
    is_of_this_book = path.resolve() in [page.resolve() for page in numbered()]
    if is_of_this_book:
        chapter = beside["chapter"]
        what = f"{path.stem} has no script: it is a page beside chapter {chapter}"
        raise ExportError(f"{what}.\nGive the chapter's number: {chapter}")
