"""How the commands write a file: whole, or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a text file. A kill or a full disk leaves the file that was there, or none.

    A symbolic link at ``path`` is replaced; what it points to stays as it is. Raises OSError, with ``path`` as its
    ``filename``.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        unfinished.unlink(missing_ok=True)
