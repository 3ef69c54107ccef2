"""For `pytest -p` beside --nbval: writes to WORLD_SIZE_ONE_FAILURE which cell of a notebook failed first, and how."""

import json
import os
import re
from pathlib import Path

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = Path(os.environ["WORLD_SIZE_ONE_FAILURE"])
    if report.failed and not path.exists():
        kind, said = ("fault", str(call.excinfo.value)) if call.when != "call" else describe(item, call.excinfo.value)
        path.write_text(json.dumps({"cell": item.cell.id, "kind": kind, "said": said}))
    return report


def describe(item, error):
    """(assert, error, hang, output or fault; what the cell said, on one line) of a cell that failed."""
    text = re.sub(r"\x1b\[[\d;]*m", "", f"{getattr(error, 'inner_traceback', '') or ''}")
    raised = [output for output in item.test_outputs or [] if output.output_type == "error"]
    if str(error).startswith("Timeout"):
        return "hang", str(error)
    if raised and not str(error).startswith("Cell outputs differ"):
        name, value = raised[-1].ename, " ".join(raised[-1].evalue.split())
        lines = re.findall(r"^-+> *\d+ (.*)$", text, re.MULTILINE)
        if name == "AssertionError":
            line = " ".join(lines[-1].split()) if lines else ""
            return "assert", f"{line}: {value}" if value else line
        if name == "RankError":
            kind = "assert" if ": AssertionError" in value else "hang" if " still ran after" in value else "error"
            return kind, f"{name}: {value}"
        faulty = name in ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError") or "/lies.py" in text
        return "fault" if faulty else "error", f"{name}: {value}"
    if str(error).startswith("Cell outputs differ"):
        return "output", difference(shown(item.cell.outputs), shown(item.test_outputs))
    return "fault", str(error)


def shown(outputs):
    """The lines of text that a cell shows."""
    texts = []
    for output in outputs or []:
        texts.append(output.get("text") or output.get("evalue") or output.get("data", {}).get("text/plain", ""))
    return "".join(texts).splitlines()


def difference(stored, now):
    """The first line that differs, as stored and as it is now."""
    pairs = zip([*stored, *[""] * len(now)], [*now, *[""] * len(stored)], strict=False)
    before, after = next(((a.strip(), b.strip()) for a, b in pairs if a != b), ("a figure", "another figure"))
    return f"{after or 'nothing'}; it was: {before or 'nothing'}"
