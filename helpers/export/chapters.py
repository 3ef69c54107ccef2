"""What the command line does with chapters: find them, name them, export them, write their scripts."""

import os
from pathlib import Path

from helpers.export.launch_files import launch_files
from helpers.export.notebook import ExportError, read_notebook, title_and_purpose
from helpers.export.script import script_from_notebook

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def chapters():
    """The chapters' notebooks, in order. The template is none."""
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def find_notebook(chapter):
    """The notebook of a chapter: its number, its name with or without the number, or any notebook's path."""
    if Path(chapter).is_file():
        return Path(chapter)
    for path in chapters():
        number, _, topic = path.stem.partition("_")
        if chapter in (path.stem, topic) or (chapter.isdecimal() and int(chapter) == int(number)):
            return path
    known = ", ".join(path.stem for path in chapters()) or "none yet"
    raise ExportError(f"There is no chapter or notebook {chapter!r}.\nChapters: {known}. Or the path of a notebook.")


def titles():
    """Every chapter as (name, title)."""
    return [(path.stem, title_and_purpose(read_notebook(path), path.stem)[0]) for path in chapters()]


def export(chapter, folder, force=False, cluster=None):
    """Write a chapter's script, or with None every chapter's, into the folder; return the paths.

    With ``cluster``, {"nodes": 2, "gpus": 8, "time": "04:00:00"}, what starts it there stands beside it.
    Raises ExportError, before it writes anything, when a file is there that differs and ``force`` is not given.
    Each file is written at once or not at all.
    """
    notebooks = chapters() if chapter is None else [find_notebook(chapter)]
    targets = {}
    for path in notebooks:
        script = script_from_notebook(read_notebook(path), path.stem)
        files = {f"{path.stem}.py": script} | (launch_files(path.stem, script, **cluster) if cluster else {})
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
    except OSError as error:
        raise ExportError(
            f"{error.filename} cannot be written: {error.strerror}.\nChoose a folder: --out DIR"
        ) from None
    return list(targets)
