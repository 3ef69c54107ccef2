"""What the commands of ``python -m helpers`` share: a parser, types of its arguments, names of files, and tables."""

import argparse
import shlex
from collections.abc import Container, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser, and by it those of its commands, that says what is wrong in two lines, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nSee {self.prog} --help.\n")


def whole(text: str) -> int:
    """An argument as a number. Raises ArgumentTypeError for anything but a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0; give 1, 2, 3, …")
    return int(text)


def positive(text: str) -> float:
    """An argument as a number of seconds. Raises ArgumentTypeError for 0, less, or text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; give 60, say")
    return seconds


def as_argument(file: str) -> str:
    """A file's name for a command line. With ./ before it, a name such as -rf.py is no option."""
    if file.startswith("-"):
        file = f"./{file}"
    return shlex.quote(file)


def of_bytes(size: float) -> str:
    """A number of bytes with three digits that say something: 512 B, 1.5 kB, 3 MB."""
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit:
            return f"{float(f'{size / unit:.3g}'):g} {name}"
    return f"{size:.0f} B"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Rows of text as lines with aligned columns: flush left if a column's number is in ``left``, else flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if k in left else text.rjust(width)
            for k, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
