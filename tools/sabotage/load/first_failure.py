"""A plugin of pytest, for --nbval: which cell of a notebook failed first under a lie, and how.

A lie is a planted fault: see sabotage/lies. WORLD_SIZE_ONE_LIE names it, and WORLD_SIZE_ONE_FAILURE is the file for the
answer. If a cell has noticed the lie, the kind of the failure is assert, error, hang or output. It is "fault" if
something else went wrong, such as a mistake in the lie itself.
"""

import ast
import json
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Errors by which a lie shows that it uses what does not exist, or not in this way:
ERROR_OF_A_LIE = r"\b(Attribute|Import|Name|Type|Lookup|Key)Error: "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """pytest calls this for each cell. Writes the first failure; later cells may fail because of it."""
    report = yield
    path = Path(os.environ["WORLD_SIZE_ONE_FAILURE"])
    if report.failed and not path.exists():
        if call.when == "call":
            kind, text = describe(item, call.excinfo.value)
        else:
            kind = "fault"  # the cell was not run, because its kernel did not start or did not end
            text = str(call.excinfo.value)
        path.write_text(json.dumps({"cell": item.cell.id, "kind": kind, "text": without_folders(text)}))
    return report


def without_folders(text: str) -> str:
    """A text without the names of temporary folders, which are other ones in the next run."""
    for folder in (os.getcwd(), tempfile.gettempdir()):
        text = text.replace(f"{folder}/", "")
    return re.sub(r"\btmp\w{8}/", "", text)


def describe(item: Any, error: Exception) -> tuple[str, str]:
    """(the kind of a cell's failure, what the cell said on one line)."""
    if str(error).startswith("Timeout"):
        return "fault", str(error)  # launch ends a hang much earlier: here the machine was too busy
    outputs = item.test_outputs or []  # nbval has None for a cell that printed nothing
    if str(error).startswith("Cell outputs differ"):
        return "output", difference(lines_of(item.cell.outputs), lines_of(outputs))
    for output in reversed(outputs):
        if output.output_type == "error":
            traceback = re.sub(r"\x1b\[[\d;]*m", "", str(getattr(error, "inner_traceback", "")))
            value = " ".join(output.evalue.split())
            return describe_exception(output.ename, value, traceback, item.cell.source)
    return "fault", str(error)


def describe_exception(name: str, value: str, traceback: str, source: str) -> tuple[str, str]:
    """``describe`` for a cell with this source that raised an exception of this name and value."""
    text = f"{name}: {value}"
    lie = os.environ["WORLD_SIZE_ONE_LIE"]
    is_from_the_lie = "lies.py" in traceback or "lies.py" in value or f"{lie}." in value
    if name in ("ImportError", "NameError") or (is_from_the_lie and re.search(ERROR_OF_A_LIE, text)):
        return "fault", text
    if name == "AssertionError":
        # IPython's traceback marks the line of each frame by an arrow: "----> 3 assert x == y".
        lines = re.findall(r"^-+> *\d+ (.*)$", traceback, re.MULTILINE)
        if lines:
            innermost_line = lines[-1].strip()
            return "assert", assert_with_line(source, innermost_line)
        return "assert", value
    # launch raises a RankError, whose text has the rank's own error, or says which ranks hang.
    if name == "RankError" and ": AssertionError" in value:
        return "assert", text
    if name == "RankError" and " still ran after" in value:
        return "hang", text
    return "error", text


def assert_with_line(source: str, line: str) -> str:
    """The assert statement of a cell that this line belongs to, on one line; or the line, if it belongs to none."""
    try:
        cell = ast.parse(source)
    except SyntaxError:  # a cell that begins with %%
        return line
    code = line.partition("  #")[0]
    for node in ast.walk(cell):
        if isinstance(node, ast.Assert):
            statement = ast.get_source_segment(source, node) or ""
            if code in [part.strip() for part in statement.splitlines()]:
                if statement in line:
                    return statement
                return ast.unparse(node)
    return line


def lines_of(outputs: list) -> list[str]:
    """The lines of text in a cell's outputs."""
    text = ""
    for output in outputs:
        if output.output_type == "stream":
            text += output.text
        elif output.output_type == "error":
            text += output.evalue
        else:
            text += output.data.get("text/plain", "")
    return text.splitlines()


def difference(stored: list[str], now: list[str]) -> str:
    """The first line that is not among the stored lines, and the first stored line that is missing, as text."""
    new = [line.strip() for line in now if line not in stored]
    gone = [line.strip() for line in stored if line not in now]
    if not new and not gone:
        return "another picture"
    return f"{next(iter(new), 'nothing')}; stored is: {next(iter(gone), 'nothing')}"
