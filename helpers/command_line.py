"""What the commands of ``python -m helpers`` share: a parser, arguments, names of files, the output, and tables."""

import argparse
import errno
import os
import shlex
import sys
from collections.abc import Container, Sequence
from typing import NoReturn

READER_HAS_LEFT = 141  # the exit status that a shell gives for SIGPIPE
FAILED_WRITES = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
LARGEST_NUMBER = 1_000_000  # of ranks, nodes, GPUs or seconds: more than any job has
BYTES_PER_UNIT = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}  # the largest first


class Parser(argparse.ArgumentParser):
    """A parser that says in two lines what is wrong, without the whole usage. So do the parsers of its commands."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\nSee {self.prog} --help.\n")


def positive_int(text: str) -> int:
    """An argument as a number. Raises ArgumentTypeError for anything but a whole number from 1 to LARGEST_NUMBER."""
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST_NUMBER}")
    return int(text)


def positive_seconds(text: str) -> float:
    """An argument as a number of seconds. Raises ArgumentTypeError for text, for 0 and less, and for far too many."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LARGEST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0; give 60, say")
    return seconds


def as_argument(file: str) -> str:
    """A file's name as one writes it in a shell, with quotes if it needs them.

    A name that begins with a dash, such as -rf.py, gets a ./ before it, so that no program takes it for an option.
    """
    if file.startswith("-"):
        file = f"./{file}"
    return shlex.quote(file)


def open_closed_streams() -> None:
    """Open /dev/null in place of the standard streams that the shell has closed, as in ``list >&-``.

    Otherwise the next file that is opened would get the stream's number, and output of ranks would go there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        is_closed = getattr(sys, name) is None  # so says Python of a stream that was closed when it started
        if is_closed:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            setattr(sys, name, open(number, mode, closefd=False))


def is_failed_output(error: OSError) -> bool:
    """Whether an error says that standard output takes no more, because the disk is full or its reader has gone.

    It has no file name, in contrast to the error of a file that this program opened.
    """
    return error.filename is None and error.errno in FAILED_WRITES


def status_of_failed_output(error: OSError) -> int:
    """Stop writing to standard output, say why, and return the exit status. A reader who has left gets no message."""
    # Python flushes the stream once more at its end. What is still in it goes to /dev/null then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:  # as in ``list | head``
        return READER_HAS_LEFT
    print(f"error: the output cannot be written: {error.strerror}. Send it elsewhere.", file=sys.stderr)
    return 1


def of_bytes(size: float) -> str:
    """A number of bytes in words, with at most three significant digits: 512 B, 1.5 kB, 3 MB."""
    for unit, bytes_per_unit in BYTES_PER_UNIT.items():
        if size >= bytes_per_unit:
            rounded = float(f"{size / bytes_per_unit:.3g}")
            return f"{rounded:g} {unit}"
    return f"{size:.0f} B"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Rows of a table, each a list of texts, as lines with aligned columns.

    ``left`` has the numbers of the columns that are flush left, from 0; the others are flush right.
    """
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(text) for text in column))
    lines = []
    for row in rows:
        cells = []
        for column_number, text in enumerate(row):
            width = widths[column_number]
            if column_number in left:
                cells.append(text.ljust(width))
            else:
                cells.append(text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
