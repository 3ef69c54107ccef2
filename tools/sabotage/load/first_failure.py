"""For `pytest -p` with --nbval: writes which cell of a notebook failed first, and how, to WORLD_SIZE_ONE_FAILURE."""

import ast
import json
import os
import re
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FAULT = r"\b(Attribute|Import|Name|Type|Lookup|Key)Error: "  # errors of a lie that calls what does not exist


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    path = Path(os.environ["WORLD_SIZE_ONE_FAILURE"])
    if report.failed and not path.exists():
        if call.when == "call":
            kind, text = describe(item, call.excinfo.value)
        else:
            kind = "fault"
            text = str(call.excinfo.value)
        for folder in (os.getcwd(), tempfile.gettempdir()):  # folders of this run
            text = text.replace(f"{folder}/", "")
        text = re.sub(r"\btmp\w{8}/", "", text)  # the name of a chapter's own folder is random
        path.write_text(json.dumps({"cell": item.cell.id, "kind": kind, "text": text}))
    return report


def describe(item: Any, error: Exception) -> tuple[str, str]:
    """(kind: assert, error, hang, output or fault; what the cell said, on one line) of a cell that failed."""
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
    """(kind, what the cell said), as from ``describe``, of an exception that a cell with this source raised."""
    text = f"{name}: {value}"
    lie = os.environ["WORLD_SIZE_ONE_LIE"]
    is_from_the_lie = "lies.py" in traceback or "lies.py" in value or f"{lie}." in value
    # Such an error says that the lie itself is wrong: it uses what does not exist.
    if name in ("ImportError", "NameError") or (is_from_the_lie and re.search(FAULT, text)):
        return "fault", text
    if name == "AssertionError":
        lines = re.findall(r"^-+> *\d+ (.*)$", traceback, re.MULTILINE)  # IPython's arrows
        if lines:
            innermost_line = lines[-1].strip()
            return "assert", assert_with_line(source, innermost_line)
        return "assert", value
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
