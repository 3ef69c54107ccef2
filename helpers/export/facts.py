"""What a notebook says of itself: the entry ``book`` of its metadata, for the commands, the tests and the book's pages.

In JupyterLab it stands under Property Inspector, Advanced Tools, Notebook Metadata. Its entries have the names of the
fields below, and an entry that is left out has the default.
"""

import dataclasses
import json
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from helpers.export.error import ExportError

RELATIONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
CONDITION = re.compile(r"(?P<relation><=|>=|==|<|>) (?P<bound>[-+.\w]+)")  # "> 0.95" or "== steps"


def folder_of_notebooks() -> Path:
    """The folder of the chapters: in the package if it is installed, and beside it in a copy of the repository."""
    package = Path(__file__).resolve().parents[1]
    in_package = package / "chapters"
    if in_package.is_dir():
        return in_package
    return package.parent / "notebooks"


NOTEBOOKS = folder_of_notebooks()


@dataclass(frozen=True)
class Bound:
    """A part of a condition of a number: ``> 0.95``."""

    relation: str  # a key of RELATIONS
    limit: str  # a number, or the name of another number of the same result


@dataclass(frozen=True)
class Line:
    """A torchrun line that a chapter prints for its reader, and what a test that runs it expects.

    The test has two CPU cores and no GPU, so that some lines need other flags there.
    """

    flags: str  # the script's flags in the line, by which the test finds this record
    here: str = ""  # flags that a test takes in their place on two cores; empty keeps those of the line
    why: str = ""  # the reason for other flags
    prints: str = ""  # a regular expression of a line that the run has to print
    writes: str = ""  # a file, or a folder with files, that the run has to write
    trains: bool = True  # whether the run ends with a result that meets the script's conditions


@dataclass(frozen=True)
class Rehearsal:
    """A run of the script on many simulated GPUs, for ``make rehearse``."""

    nodes: int = 1
    gpus: int = 8  # of each node
    flags: str = ""  # of the script
    why: str = ""  # the reason for these flags


@dataclass(frozen=True)
class Script:
    """What a chapter says of its script. Flags are written as one types them."""

    result: dict[str, str] = field(default_factory=dict)  # what its numbers must be: {"val_accuracy": "> 0.95"}
    quick_flags: str = ""  # flags with which it ends soon on CPUs, and with the same counts in each run
    rehearsal_flags: str = ""  # further flags, which the tests' rehearsals on simulated GPUs add to the quick ones
    gpus: int = 2  # how many GPUs these rehearsals simulate
    tolerance: float = 0.01  # of a result on GPUs beside gloo's: one of 357 images judged otherwise is 0.003
    tolerance_why: str = ""  # the reason for another tolerance
    fresh_interpreter: bool = False  # whether a test of one rank needs a new interpreter, and cannot be a fork
    preflight: bool = False  # whether it checks all links of a cluster, so that it runs before other scripts
    how_to_start: list[str] = field(default_factory=list)  # its docstring's commands, if not the usual ones
    saves_with: str = ""  # the function that saves: a test makes it slow, and tells the job to stop meanwhile
    rehearsals: list[Rehearsal] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Chapter:
    """What a notebook says of itself: a chapter, a practice page, or a page of the appendix."""

    question: str = ""  # the first page prints it behind the title
    formerly: list[str] = field(default_factory=list)  # names of the notebook's file in older editions
    searches: dict[str, str] = field(default_factory=dict)  # {what readers type: a pattern of the heading to be found}
    search_weight: float = 1.0  # what the search multiplies its scores by
    longest: bool = False  # its cells take so long that the tests start with them
    script: Script = field(default_factory=Script)

    def line(self, flags: str) -> Line:
        """What is said of the torchrun line with these flags: its record, or one with the defaults."""
        for line in self.script.lines:
            if line.flags == flags:
                return line
        return Line(flags)


def chapters_in(folder: Path = NOTEBOOKS) -> list[Path]:
    """The paths of the chapters' notebooks, in order, without practice pages and the template."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def is_called(stem: str, chapter: str) -> bool:
    """Whether a notebook or a script whose file is called NN_topic is meant by its number, NN, topic or NN_topic."""
    number, _, topic = stem.partition("_")
    return chapter in (stem, topic, number, number.removeprefix("0"))


def facts_at(path: Path) -> Chapter:
    """What the notebook at a path says of itself. Raises ExportError where it cannot be read."""
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    except (OSError, ValueError, KeyError) as error:
        what = f"{path} is not a notebook that can be read: {type(error).__name__}"
        raise ExportError(f"{what}\nGive an .ipynb that JupyterLab opens.") from None
    return facts_in(metadata, path.name)


def facts_in(metadata: Mapping[str, Any], name: str) -> Chapter:
    """What a notebook's metadata says, under ``book``. Raises ExportError for an entry that no field reads.

    ``name`` is the notebook's, for messages.
    """
    location = f"{name}: metadata.book"
    book = dict(metadata.get("book", {}))
    script = dict(book.get("script", {}))
    # The innermost records first: the fields of a record hold records, not dicts.
    for entry_name, kind in (("lines", Line), ("rehearsals", Rehearsal)):
        entries = script.get(entry_name, [])
        script[entry_name] = [record(kind, entry, f"{location}.script.{entry_name}") for entry in entries]
    book["script"] = record(Script, script, f"{location}.script")
    chapter = record(Chapter, book, location)
    for number, condition in chapter.script.result.items():
        try:
            parts_of(condition)
        except ValueError as error:
            raise ExportError(f"{location}.script.result.{number} {error}") from None
    return chapter


def record(kind: Any, entries: Mapping[str, Any], location: str) -> Any:
    """A record of the dataclass ``kind`` from a dict of JSON, whose entries have the names of the fields.

    Raises ExportError for an entry that is unknown, is missing or has another type. ``location`` says in its message
    where in the notebook the dict is.
    """
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name, value in entries.items():
        if name not in fields:
            raise ExportError(f"{location} has an unknown entry: {name}.\nIt may have: {', '.join(fields)}.")
        field_type = fields[name].type
        if not has_type(value, field_type):
            expected = getattr(field_type, "__name__", field_type)  # list[str] has no name, and says itself what it is
            raise ExportError(f"{location}.{name} is {value!r}.\nIts type must be {expected}.")
    for name, each in fields.items():
        has_default = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
        if not has_default and name not in entries:
            raise ExportError(f"{location}: an entry of it has no {name}.\nAdd it: {name} says which one is meant.")
    return kind(**entries)


def has_type(value: object, kind: Any) -> bool:
    """Whether a value from JSON may stand in a field of this type. There, true is no number, and 1 may be a float."""
    if isinstance(value, bool):  # in Python a bool is an int, too
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    without_parameters = get_origin(kind) or kind  # list of list[str]
    return isinstance(value, without_parameters)


def parts_of(condition: str) -> list[Bound]:
    """The parts of a condition: ``"> 15.9 and < 16.1"`` has two. Raises ValueError for any other text."""
    bounds = []
    for part in condition.split(" and "):
        match = CONDITION.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"is {condition!r}.\nWrite a relation and a number, or a name of the result: > 0.95")
        bounds.append(Bound(match["relation"], match["bound"]))
    return bounds


def unmet(conditions: Mapping[str, str], result: Mapping[str, float]) -> list[str]:
    """A line for each number of a result that does not meet its condition, such as ``loss is 2.1, and not < 1.5``.

    ``conditions`` are those of ``Script.result``.
    """
    lines = []
    for name, condition in conditions.items():
        if name not in result:
            lines.append(f"the result has no {name}, only {', '.join(result)}")
            continue
        for bound in parts_of(condition):
            if bound.limit in result:
                limit = result[bound.limit]
            else:
                limit = float(bound.limit)
            is_met = RELATIONS[bound.relation](result[name], limit)
            if not is_met:
                lines.append(f"{name} is {result[name]}, and not {bound.relation} {bound.limit}")
    return lines
