"""The logs of all steps as one file, logs.zip: a machine that is lent may hand back few files."""

import shutil
import zipfile
from pathlib import Path

from helpers.ranks.collecting import end_of_file

LARGEST = 200_000  # bytes of one log that are kept: its end, where the error is
NAME = "logs.zip"


def keep_logs(folder: Path, out: Path) -> None:
    """Move all logs of a folder to the archive in ``out``, which is replaced at once or not at all."""
    archive = out / NAME
    part = archive.with_suffix(".part")
    earlier: list[tuple[str, bytes]] = []
    logs = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if archive.exists():
        with zipfile.ZipFile(archive) as kept:
            earlier = [(name, kept.read(name)) for name in kept.namelist() if name not in logs]
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in earlier:
            new.writestr(name, content)
        for name, path in logs.items():
            new.writestr(name, end_of_file(path, LARGEST))
    part.replace(archive)
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
