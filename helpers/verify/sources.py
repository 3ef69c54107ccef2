"""Where a verification gets what it runs: the chapters' scripts, what the chapters say of them, and the commit."""

import subprocess
from pathlib import Path

from helpers.export.facts import Script as Facts
from helpers.export.facts import chapters_in, facts_at, is_called

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "scripts"  # by `make scripts`
COMMIT = MADE / "COMMIT"


def scripts_of(names: list[str], folder: Path) -> list[Path]:
    """The paths of the scripts of these chapters, or of all for none. A name that ends with .py is a path already.

    Scripts are exported to ``folder``. A machine that lacks what the export needs takes those of `make scripts`.
    Raises ValueError where there are none.
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
    """The path of one chapter's script."""
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
    """The script that `make scripts` wrote for a chapter. ``missing`` is the module for lack of which none is exported.

    Raises ValueError where there is no such script.
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
    """{name: what the chapter says of its script}, in the chapters' order."""
    return {path.stem: facts_at(path).script for path in chapters_in()}


def commit() -> str:
    """The repository's commit, with ``-dirty`` where files differ from it; or "unknown", as in an installed package.

    A copy without .git has it from scripts/COMMIT, which `make scripts` wrote.
    """
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    if (ROOT / ".git").exists():  # git would take a repository around site-packages
        try:
            return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    if COMMIT.exists():
        return COMMIT.read_text("utf-8").strip()
    return "unknown"
