"""Where a verification gets what it runs: the chapters' scripts, the chapters' facts about them, and the commit."""

import subprocess
from pathlib import Path

from helpers.export.facts import Script as Facts
from helpers.export.facts import chapters_in, facts_at, is_called

ROOT = Path(__file__).resolve().parent.parent.parent  # of the repository
MADE = ROOT / "scripts"  # where `make scripts` puts all chapters' scripts
COMMIT = MADE / "COMMIT"


def scripts_of(names: list[str], folder: Path) -> list[Path]:
    """The paths of these chapters' scripts, or of all chapters' scripts if no name is given.

    A name that ends with .py is the path of a script already. The other scripts are exported to ``folder``. On a
    machine that lacks what the export needs, those are taken that `make scripts` has made. Raises ValueError if there
    is no such script.
    """
    if not names:
        names = [path.stem for path in chapters_in()]
    scripts = []
    for name in names:
        if name.endswith(".py"):
            scripts.append(Path(name).absolute())
        else:
            scripts.append(script_of(name, folder))
    return scripts


def script_of(chapter: str, folder: Path) -> Path:
    """Export one chapter's script to the folder, and return its path; or that of the script made by `make scripts`.

    Raises ValueError if there is no such chapter or script.
    """
    try:
        # The export needs nbformat and ruff, which a machine with GPUs may not have. It takes a second to import.
        from helpers.export.chapters import ExportError, export
    except ModuleNotFoundError as missing:
        return made_script(chapter, str(missing.name))

    try:
        [script] = export(chapter, folder, force=True)
    except ExportError as error:
        raise ValueError(str(error)) from None
    return script.absolute()


def made_script(chapter: str, missing: str, folder: Path = MADE) -> Path:
    """The path of the script that `make scripts` has made for a chapter. Raises ValueError if there is none.

    ``missing`` is the name of the module without which nothing can be exported. The error names it.
    """
    scripts = sorted(folder.glob("[0-9][0-9]_*.py"))
    for script in scripts:
        if is_called(script.stem, chapter):
            return script
    if scripts:
        names = ", ".join(script.stem for script in scripts)
        raise ValueError(f"There is no script of a chapter {chapter!r} in {folder}.\nThere are: {names}")
    raise ValueError(
        f"No script can be exported without {missing}, and {folder} has none.\n"
        "Install nbformat and ruff, or run make scripts where the book is set up, and bring the folder scripts along."
    )


def facts_of_chapters() -> dict[str, Facts]:
    """{name of a chapter: what it says about its script}, in the chapters' order."""
    return {path.stem: facts_at(path).script for path in chapters_in()}


def commit() -> str:
    """The repository's commit, with ``-dirty`` behind it if files have been changed since.

    If git does not know it, as in a copy without .git, it is read from scripts/COMMIT, which `make scripts` writes. It
    is "unknown" if there is no such file either, as in an installed package.
    """
    no_tags = "--exclude=*"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", no_tags]
    # An installed package may lie in a folder of another repository, which git would describe.
    is_repository = (ROOT / ".git").exists()
    if is_repository:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    if COMMIT.exists():
        return COMMIT.read_text("utf-8").strip()
    return "unknown"
