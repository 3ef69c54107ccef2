"""The logs of all steps as one file, logs.zip: a machine that is lent may hand back few files."""

import zipfile
from pathlib import Path

from helpers.ranks.collecting import end_of_file

LARGEST = 200_000  # bytes of one log that are kept: its end, where the error is


def keep_logs(folder: Path, out: Path) -> None:
    """Write logs.zip in the folder ``out`` with all logs of a folder. An older one is replaced whole, or not at all."""
    part = out / "logs.part"
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.writestr(str(path.relative_to(folder)), end_of_file(path, LARGEST))
    part.replace(out / "logs.zip")
