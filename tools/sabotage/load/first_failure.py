"""For `pytest -p` with --nbval: writes which cell of a notebook failed first, and how, to WORLD_SIZE_ONE_FAILURE.

WORLD_SIZE_ONE_UNTIL is the id of the last cell to run, or empty.
"""

import ast
import contextlib
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
        kind, text = ("fault", str(call.excinfo.value)) if call.when != "call" else describe(item, call.excinfo.value)
        for folder in (os.getcwd(), tempfile.gettempdir()):  # folders of this run
            text = text.replace(f"{folder}/", "")
        text = re.sub(r"\btmp\w{8}/", "", text)  # the name of a chapter's own folder is random
        path.write_text(json.dumps({"cell": item.cell.id, "kind": kind, "text": text}))
    return report


def pytest_collection_modifyitems(items: list) -> None:
    ids = [item.cell.id for item in items]
    if last := os.environ["WORLD_SIZE_ONE_UNTIL"]:
        del items[ids.index(last) + 1 :]


def describe(item: Any, error: Exception) -> tuple[str, str]:
    """(kind: assert, error, hang, output or fault; what the cell said, on one line) of a cell that failed."""
    text = re.sub(r"\x1b\[[\d;]*m", "", f"{getattr(error, 'inner_traceback', '') or ''}")
    raised = [output for output in item.test_outputs or [] if output.output_type == "error"]
    if str(error).startswith("Timeout"):
        return "fault", str(error)  # launch ends a hang much earlier: here the machine was too busy
    if raised and not str(error).startswith("Cell outputs differ"):
        name, value = raised[-1].ename, " ".join(raised[-1].evalue.split())
        own = "lies.py" in text + value or f"{os.environ['WORLD_SIZE_ONE_LIE'] or None}." in value
        if name in ("ImportError", "NameError") or (own and re.search(FAULT, f"{name}: {value}")):
            return "fault", f"{name}: {value}"
        if name == "AssertionError":
            lines = re.findall(r"^-+> *\d+ (.*)$", text, re.MULTILINE)
            return "assert", whole(item.cell.source, lines[-1].strip()) if lines else value
        if name == "RankError":
            kind = "assert" if ": AssertionError" in value else "hang" if " still ran after" in value else "error"
            return kind, f"{name}: {value}"
        return "error", f"{name}: {value}"
    if str(error).startswith("Cell outputs differ"):
        return "output", difference(shown(item.cell.outputs), shown(item.test_outputs))
    return "fault", str(error)


def whole(source: str, line: str) -> str:
    """The assert statement of a cell that this line belongs to, on one line; or the line, if it belongs to none."""
    with contextlib.suppress(SyntaxError):  # for a cell that begins with %%
        for node in ast.walk(ast.parse(source)):
            text = ""
            if isinstance(node, ast.Assert):
                text = ast.get_source_segment(source, node) or ""
            if line.partition("  #")[0] in map(str.strip, text.splitlines()):
                return text if text in line else ast.unparse(node)
    return line


def shown(outputs: list | None) -> list[str]:
    """The lines of text in a cell's outputs."""
    texts = []
    for output in outputs or []:
        texts.append(output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain", ""))
    return "".join(texts).splitlines()


def difference(stored: list[str], now: list[str]) -> str:
    """The first line that is not among the stored lines, and the first stored line that is missing, as text."""
    new, gone = [line for line in now if line not in stored], [line for line in stored if line not in now]
    if not new and not gone:
        return "another picture"
    return f"{(new or ['nothing'])[0].strip()}; stored is: {(gone or ['nothing'])[0].strip()}"
