"""``python -m helpers nccl-log``: what the logs of a slow or hanging job say about NCCL.

The functions that read the logs are in the notebook of the page on NCCL, where each is explained and tested. So the
command takes them from there.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PAGE = "14b"
# Functions of the page. Each takes the text of a log, and raises ValueError if the log has no lines that it can read.
READERS = ("who_lags", "transports", "advice")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``nccl-log`` to its parser."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="what the ranks printed, in files")
    group_help = "the process group that waits, as its lines name it; 0, the group of all ranks, unless given"
    parser.add_argument("--group", default="0", metavar="NAME", help=group_help)


def main(arguments: argparse.Namespace) -> int:
    """Print what the logs say. Returns the exit status: 1 if no function of the page can read them."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in arguments.logs]
    found = read_log("\n".join(texts), arguments.group)
    for title, lines in found.items():
        if lines is None:
            print(f"{title}: these logs have no such lines")
            continue
        print(f"{title}:")
        for line in lines or ["nothing"]:
            print(f"  {line}")
    if all(lines is None for lines in found.values()):
        print("error: no line is NCCL's or its watchdog's.\nGive the whole logs of all ranks.", file=sys.stderr)
        return 1
    return 0


def read_log(log: str, group: str) -> dict[str, list[str] | None]:
    """Read a log by the functions of the page: {title: the lines to print, or None if the log has no such lines}.

    ``group`` is the name that the log has for the process group that waits, such as "0".
    """
    functions = functions_of(PAGE, READERS)
    found: dict[str, list[str] | None] = {"who waits": None, "paths": None, "advice": None}
    with suppress(ValueError):
        found["who waits"] = lines_about_waiting(functions["who_lags"](log, group))
    with suppress(ValueError):
        found["paths"] = lines_about_paths(functions["transports"](log))
    with suppress(ValueError):
        found["advice"] = functions["advice"](log)
    return found


def lines_about_waiting(answer: Any) -> list[str]:
    """What ``who_lags`` answers, as lines: why the ranks wait, then what is known about each rank that matters."""
    lines = [answer.why]
    for rank, known in sorted(answer.ranks.items()):
        lines.append(f"rank {rank}: {known}")
    return lines


def lines_about_paths(paths: dict[tuple[int, int], set[str]]) -> list[str]:
    """What ``transports`` returns, a line for each connection between two ranks, such as "0 -> 1: P2P/CUMEM".

    paths: {(sending rank, receiving rank): names of transports}.
    """
    lines = []
    for (sender, receiver), names in sorted(paths.items()):
        lines.append(f"{sender} -> {receiver}: {', '.join(sorted(names))}")
    return lines


def functions_of(page: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Take functions out of a page's notebook without running the rest of the page: {name: function}.

    Only the definitions, constants and imports that the functions use are executed. page: its number, such as "10b".
    """
    # The package export needs nbformat, which a cluster's environment for the doctor may lack.
    from helpers.export.chapters import find_notebook
    from helpers.export.notebook import read_notebook
    from helpers.source import Statement, split

    statements: list[Statement] = []
    for cell in read_notebook(find_notebook(page)).cells:
        if cell.cell_type == "code":
            lines_of_python = [line for line in cell.source.splitlines() if not line.startswith("%")]  # no magics
            statements += split("\n".join(lines_of_python))
    needed = set(names)
    used: list[Statement] = []
    for statement in reversed(statements):  # from the end, because a name's last definition above its use counts
        if statement.binds & needed:
            used.insert(0, statement)
            needed |= statement.reads
    namespace: dict[str, Any] = {"__name__": page}
    for statement in used:
        exec(compile(statement.code, page, "exec"), namespace)
    return {name: namespace[name] for name in names}
