"""What the command line does with chapters: find their notebooks, list their titles, write their scripts."""

import os
import sys
from pathlib import Path

from helpers.export.launch_files import launch_files
from helpers.export.notebook import ExportError, read_notebook, script_name, title_and_purpose
from helpers.export.script import script_and_notes

HELPERS = Path(__file__).resolve().parents[1]
# An installed package holds the notebooks; in a copy of the repository they are beside it.
NOTEBOOKS = HELPERS / "chapters" if (HELPERS / "chapters").is_dir() else HELPERS.parent / "notebooks"


def chapters():
    """The paths of the chapters' notebooks, in order, without the template. Raises ExportError where there are none."""
    if found := sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        return found
    raise ExportError(
        f"There is no chapter in {NOTEBOOKS}, so only the path of a notebook can be given.\n"
        "For the chapters, install the whole project, or start this in a copy of its repository."
    )


def find_notebook(chapter):
    """The path of a chapter's notebook. Raises ExportError for a chapter that does not exist.

    ``chapter`` is its number, its name with or without the number, or the path of any notebook.
    """
    if os.path.isfile(chapter):  # which is False, too, for a text that cannot be a path
        return Path(chapter)
    for path in chapters():
        number, _, topic = path.stem.partition("_")
        if chapter in (path.stem, topic) or (chapter and chapter.lstrip("0") == number.lstrip("0")):
            return path
    known = ", ".join(path.stem for path in chapters())
    raise ExportError(f"There is no chapter or notebook {chapter!r}.\nChapters: {known}. Or the path of a notebook.")


def titles():
    """Every chapter as (name, title)."""
    return [(path.stem, title_and_purpose(read_notebook(path), path.stem)[0]) for path in chapters()]


def export(chapter, folder, force=False, cluster=None, allow_single=False):
    """Write the script of a chapter, or of every chapter where that is None, into the folder; return the files' paths.

    With ``cluster``, such as {"nodes": 2, "gpus": 8, "time": "04:00:00"}, the launch files are written too.
    ``allow_single`` exports a notebook that starts no process group as well. Notes on what a script leaves out or
    changes go to stderr. Raises ExportError where a notebook cannot be exported, a file cannot be written, or one
    exists and differs, unless ``force`` is given: in that case nothing is written. No file is ever half written.
    """
    notebooks = chapters() if chapter is None else [find_notebook(chapter)]
    targets = {}
    for path in notebooks:
        notebook = read_notebook(path)
        name = script_name(notebook, path.stem)
        if name != path.stem:
            print(
                f"note: {path.name} becomes {name}.py; Python would import a {path.stem}.py in place of the module "
                f"{path.stem}.",
                file=sys.stderr,
            )
        script, notes = script_and_notes(notebook, name, allow_single)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        files = {f"{name}.py": script} | (launch_files(name, script, **cluster) if cluster else {})
        targets |= {Path(folder) / name: text for name, text in files.items()}
    try:
        for target, text in targets.items():
            if not force and target.exists() and target.read_bytes() != text.encode():
                raise ExportError(f"{target} exists and differs.\nKeep your changes elsewhere, or overwrite: --force")
        Path(folder).mkdir(parents=True, exist_ok=True)
        for target, text in targets.items():
            if target.exists() and target.read_bytes() == text.encode():
                continue
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                draft.write_text(text, encoding="utf-8", newline="\n")
                os.replace(draft, target)
            finally:
                draft.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        where = getattr(error, "filename", None) or repr(folder)
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"{where} cannot be written: {reason}.\nChoose a folder: --out DIR") from None
    return list(targets)
