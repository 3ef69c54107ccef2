"""The logs of all steps as one file, logs.zip, because a borrowed machine may hand back only few files."""

import zipfile
from pathlib import Path

from helpers.ranks.collecting import end_of_file

LARGEST = 200_000  # how many bytes of one log are kept, from its end, where the error is


def keep_logs(folder: Path, out: Path) -> None:
    """Write logs.zip to the folder ``out``, with the ends of all logs in ``folder``.

    It replaces an older one only when it is complete, because the command may be killed at any moment.
    """
    unfinished = out / "logs.part"
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = str(path.relative_to(folder))
                archive.writestr(name, end_of_file(path, LARGEST))
    unfinished.replace(out / "logs.zip")
