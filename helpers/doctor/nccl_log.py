"""``python -m helpers nccl-log``: what the logs of a slow or hanging job say, by the functions of the page on NCCL.

The functions stay on the page, where each is explained and tested. So the command reads them from its notebook.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = "14b"
READERS = ("who_lags", "transports", "advice")  # each takes the text of a log, and raises ValueError if it reads none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``nccl-log`` to its parser."""
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="what the ranks printed, in files")
    group_help = "the process group that waits, as its lines name it; 0, the group of all ranks, unless given"
    parser.add_argument("--group", default="0", metavar="NAME", help=group_help)


def main(arguments: argparse.Namespace) -> int:
    """Print what the logs say; return the exit status: 1 if no function of the page can read them."""
    log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in arguments.logs)
    functions = functions_of(PAGE, READERS)
    found = {
        "who waits": attempt(lambda: words_of_answer(functions["who_lags"](log, arguments.group))),
        "paths": attempt(lambda: words_of_paths(functions["transports"](log))),
        "advice": attempt(lambda: functions["advice"](log)),
    }
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


def attempt(read: Callable[[], list[str]]) -> list[str] | None:
    """What a function reads in the logs, or None if it refuses them."""
    try:
        return read()
    except ValueError:
        return None


def words_of_answer(answer: Any) -> list[str]:
    """The page's Answer as lines: why the ranks wait, then what is known of each rank that matters."""
    return [answer.why, *(f"rank {rank}: {known}" for rank, known in sorted(answer.ranks.items()))]


def words_of_paths(paths: dict[tuple[int, int], set[str]]) -> list[str]:
    """A line for each connection between two ranks."""
    lines = []
    for (sender, receiver), names in sorted(paths.items()):
        lines.append(f"{sender} -> {receiver}: {', '.join(sorted(names))}")
    return lines


def functions_of(page: str, names: tuple[str, ...]) -> dict[str, Any]:
    """{name: function} of a page's notebook, executed without the rest of the page.

    Only the definitions, constants and imports that these functions use are executed. page: a number such as 10b.
    """
    # The package export needs nbformat, which a cluster's environment for the doctor may lack.
    from helpers.export.chapters import find_notebook
    from helpers.export.notebook import read_notebook
    from helpers.source import Statement, split

    statements: list[Statement] = []
    for cell in read_notebook(find_notebook(page)).cells:
        if cell.cell_type == "code":
            python = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
            statements += split(python)
    needed = set(names)
    used: list[Statement] = []
    for statement in reversed(statements):  # A name's last binding above its use is what the function sees.
        if statement.binds & needed:
            used.insert(0, statement)
            needed |= statement.reads
    namespace: dict[str, Any] = {"__name__": page}
    for statement in used:
        exec(compile(statement.code, page, "exec"), namespace)
    return {name: namespace[name] for name in names}
