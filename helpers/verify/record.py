"""What a verification has found so far, as a file: the machine, the predictions, and what each step came to.

``results.json`` is written before the first step and after each one. A copy of it in book/measured is what the book's
pages show. A record whose facts have ``rehearsed`` was made on pretended GPUs: its figures mean nothing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """What is expected of the figure with this name, and between which numbers. It is made before any measurement."""

    name: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    version: str = ""  # what the page calls it, if the same figure has more than one prediction


@dataclass(frozen=True)
class Figure:
    """A measured number. The name is what a reader sees in a table, such as "bfloat16, 4096 x 4096"."""

    name: str
    value: float
    unit: str  # such as "TFLOP/s" or "ms"


@dataclass(frozen=True)
class Probe:
    """What a probe has measured. ``texts`` are {name: what a program printed}, where messages are the result."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    trouble: str = ""  # why not everything was measured, in a line: "hung: …", "failed: …"


@dataclass(frozen=True)
class Step:
    """What a script, the doctor or the checks of ``launch`` came to. Only a script has more than the first two."""

    differences: list[str]
    summary: str  # what is said where nothing differs
    command: str = ""
    result: dict[str, float] = field(default_factory=dict)  # on GPUs
    script_seconds: list[float] = field(default_factory=list)  # on GPUs, on gloo
    memory: list[int] = field(default_factory=list)  # bytes on GPUs, each rank's peak


@dataclass
class Record:
    """All that is known of one machine at one commit."""

    facts: dict[str, str]  # machine, ranks of the scripts, commit, command, date
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)  # by the probe that measures them
    probes: dict[str, Probe] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)


def read(path: Path) -> Record:
    """The record that a verification has written to a file. Raises ValueError where the file is not one."""
    try:
        content = json.loads(path.read_text("utf-8"))
        record = Record(facts=content["facts"])
        for name, predictions in content["predictions"].items():
            record.predictions[name] = [Prediction(**prediction) for prediction in predictions]
        for name, probe in content["probes"].items():
            record.probes[name] = probe_from(probe)
        for name, step in content["steps"].items():
            record.steps[name] = Step(**step)
        return record
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:  # any JSON may be in the file
        raise ValueError(f"{path} is not a record of a verification: {error!r}") from None


def probe_from(entry: dict[str, Any]) -> Probe:
    """A probe from its entry in a file, in which its figures are dictionaries."""
    return Probe(
        title=entry["title"],
        figures=[Figure(**figure) for figure in entry["figures"]],
        texts=entry["texts"],
        trouble=entry["trouble"],
    )
