"""A plugin of pytest, for notebooks (--nbval): it writes which cell failed first under a lie, and how.

A lie is a planted fault: see sabotage/lies. The environment variable WORLD_SIZE_ONE_LIE names it, and
WORLD_SIZE_ONE_FAILURE is the file that the plugin writes, for sabotage/run.py.
"""

import ast
import json
import os
import re
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The beginning of an error's text, such as "NameError: name 'x' is not defined", if the error is one of code that uses
# what does not exist, or not in this way.
ERROR_OF_A_LIE = re.compile(r"\b(Attribute|Import|Name|Type|Lookup|Key)Error: ")
# A terminal's command to change the color, such as "\x1b[1;31m", which IPython writes into tracebacks.
COLOR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Failure:
    """How a cell failed.

    ``kind`` is assert, error, hang or output if the cell has noticed the lie. It is fault if something else went
    wrong, such as a mistake in the lie itself. ``text`` is what the cell said, on one line.
    """

    kind: str
    text: str


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """Write how a notebook's first failing cell failed to a file, as JSON: its id, the kind of failure, what it said.

    pytest calls this hook three times for each cell: after its set-up, its call and its end. ``item`` is the cell, as
    nbval has it, ``call.when`` is the phase that has just ended, and ``call.excinfo`` has its error. A later failure
    may only be a consequence of the first one, so it is not written. The report goes on to pytest as it came.
    """
    report = yield
    path = Path(os.environ["WORLD_SIZE_ONE_FAILURE"])
    is_first_failure = report.failed and not path.exists()
    if is_first_failure:
        error = call.excinfo.value
        if call.when == "call":
            failure = describe(item, error)
        else:  # the cell was not run, because its kernel did not start or did not end
            failure = Failure("fault", str(error))
        record = {"cell": item.cell.id, "kind": failure.kind, "text": without_folders(failure.text)}
        path.write_text(json.dumps(record))
    return report


def without_folders(text: str) -> str:
    """A text without the names of temporary folders, which differ from run to run."""
    for folder in (os.getcwd(), tempfile.gettempdir()):
        text = text.replace(f"{folder}/", "")
    # Folders inside the temporary one get names such as tmpab3de_9x from Python's module tempfile.
    return re.sub(r"\btmp\w{8}/", "", text)


def describe(item: Any, error: Exception) -> Failure:
    """Say how a cell failed that was run. The kind of the failure is

    * "output" if the cell printed something else than what is stored;
    * as ``describe_exception`` says, if the cell's code raised an exception;
    * "fault" if nbval, the plugin of pytest that runs notebooks, could not run the cell to its end.

    ``item`` is the cell, and ``error`` is what nbval raised. If the cell's code has raised an exception, then ``error``
    is another one, of nbval's own, and the code's exception is among the cell's outputs.
    """
    message_of_nbval = str(error)
    if message_of_nbval.startswith("Timeout"):
        # The machine was too busy. Ranks that hang are no cause, because helpers.launch ends them long before.
        return Failure("fault", message_of_nbval)

    outputs = item.test_outputs or []  # nbval has None for a cell that printed nothing
    if message_of_nbval.startswith("Cell outputs differ"):
        return Failure("output", difference(stored=lines_of(item.cell.outputs), now=lines_of(outputs)))

    exceptions = [output for output in outputs if output.output_type == "error"]
    if not exceptions:
        return Failure("fault", message_of_nbval)
    exception = exceptions[-1]  # the one that ended the cell; it may have shown other errors before, on purpose
    message = " ".join(exception.evalue.split())
    traceback = COLOR.sub("", str(getattr(error, "inner_traceback", "")))  # not every error of nbval has one
    return describe_exception(exception.ename, message, traceback, item.cell.source)


def describe_exception(name: str, message: str, traceback: str, source: str) -> Failure:
    """Say how a cell failed whose code raised an exception, ``name: message``. The kind of the failure is

    * "assert" if one of the cell's asserts failed, in the notebook or on a rank;
    * "hang" if ranks had to be ended;
    * "fault" if the planted bug itself has a mistake, for example if it calls a function that does not exist;
    * "error" if it was another exception.

    ``source`` is the cell's code.
    """
    text = f"{name}: {message}"
    if name in ("ImportError", "NameError"):
        return Failure("fault", text)
    if is_mistake_of_the_lie(text, traceback):
        return Failure("fault", text)

    if name == "AssertionError":
        line = innermost_line(traceback)
        if line is None:
            return Failure("assert", message)
        return Failure("assert", assert_with_line(source, line))

    # A cell that starts ranks raises a RankError, whose text has the rank's own error, or says which ranks hang.
    if name == "RankError" and ": AssertionError" in message:
        return Failure("assert", text)
    if name == "RankError" and " still ran after" in message:
        return Failure("hang", text)
    return Failure("error", text)


def is_mistake_of_the_lie(error: str, traceback: str) -> bool:
    """Whether an error shows that the planted bug, the lie, uses what does not exist, or not in this way.

    ``error`` is ``TypeError: message``. The files of lies have names that end in "lies.py", and a traceback or a rank's
    error names the file. Python's message about a wrong call begins with the function that was called, which is inside
    of the lie's own: ``no_sync_that_syncs.<locals>.replacement() takes 1 positional argument``.
    """
    lie = os.environ["WORLD_SIZE_ONE_LIE"]
    names_the_lie = "lies.py" in traceback or "lies.py" in error or f"{lie}." in error
    return names_the_lie and ERROR_OF_A_LIE.search(error) is not None


def innermost_line(traceback: str) -> str | None:
    """The line of code that raised the error of this traceback of IPython; None if it shows no line.

    IPython marks the line of each frame by an arrow, as in ``----> 3 assert x == y``. The last frame is the innermost.
    """
    marked_lines = re.findall(r"^-+> *\d+ (.*)$", traceback, re.MULTILINE)
    if not marked_lines:
        return None
    return marked_lines[-1].strip()


def assert_with_line(source: str, line: str) -> str:
    """The whole assert statement of which a traceback shows only one line, ``line``, as one line of text.

    For example ``assert all(x == y for x, y in pairs)`` for the line ``x == y for x, y in pairs``. ``source`` is the
    code of the cell. If none of its asserts has this line, or if it cannot be parsed, ``line`` is returned.
    """
    try:
        cell = ast.parse(source)
    except SyntaxError:  # a cell that begins with a magic such as %%ranks
        return line
    line_without_comment = line.partition("  #")[0]
    for statement in ast.walk(cell):
        if not isinstance(statement, ast.Assert):
            continue
        text = ast.get_source_segment(source, statement) or ""
        lines_of_statement = [part.strip() for part in text.splitlines()]
        if line_without_comment not in lines_of_statement:
            continue
        if len(lines_of_statement) == 1:
            return text
        return ast.unparse(statement)  # unparse writes a statement on one line
    return line


def lines_of(outputs: list) -> list[str]:
    """All text that a cell has printed, raised or shown, as lines. ``outputs`` are outputs as nbformat has them."""
    text = ""
    for output in outputs:
        if output.output_type == "stream":
            text += output.text
        elif output.output_type == "error":
            text += output.evalue
        else:
            text += output.data.get("text/plain", "")  # a figure may have no text
    return text.splitlines()


def difference(stored: list[str], now: list[str]) -> str:
    """How the lines that a cell prints now differ from the stored ones: the first new line and the first missing one.

    If no line is new or missing, the outputs differ in a picture.
    """
    new = [line.strip() for line in now if line not in stored]
    missing = [line.strip() for line in stored if line not in now]
    if not new and not missing:
        return "another picture"
    first_new = "nothing"
    if new:
        first_new = new[0]
    first_missing = "nothing"
    if missing:
        first_missing = missing[0]
    return f"{first_new}; stored is: {first_missing}"
