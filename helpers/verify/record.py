"""What a verification has found so far, as a file: the machine, the predictions, and the result of each step.

``results.json`` is written before the first step and after each one. The book's pages show copies of such files, which
are in book/measured. A record with ``rehearsed`` among its facts was made on simulated GPUs: its figures mean nothing.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """What is expected of the figure with this name: a value, and perhaps an interval. Made before any measurement."""

    name: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    version: str = ""  # what the page calls this prediction, if the same figure has several


@dataclass(frozen=True)
class Figure:
    """A measured number. The name is what a reader sees in a table, such as "bfloat16, 4096 x 4096"."""

    name: str
    value: float
    unit: str  # such as "TFLOP/s" or "ms"


@dataclass(frozen=True)
class Probe:
    """What a probe has measured."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # {name: what a program printed}
    trouble: str = ""  # why not everything was measured, in a line: "hung: …", "failed: …"


@dataclass(frozen=True)
class Step:
    """The result of a script, of the doctor, or of the checks of ``launch``."""

    differences: list[str]
    summary: str  # what is said if nothing differs
    # Only a script has the following.
    command: str = ""
    result: dict[str, float] = field(default_factory=dict)  # on GPUs
    script_seconds: list[float] = field(default_factory=list)  # on GPUs, on gloo
    memory: list[int] = field(default_factory=list)  # bytes: the peak of each rank on GPUs


@dataclass
class Record:
    """All that a verification has found on one machine at one commit."""

    facts: dict[str, str]  # {what: value}: machine, ranks of the scripts, commit, command, date
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)  # {name of a probe: for its figures}
    probes: dict[str, Probe] = field(default_factory=dict)  # {name: its results}
    steps: dict[str, Step] = field(default_factory=dict)  # {name: its results}


def read(path: Path) -> Record:
    """Read the record that a verification has written to a file. Raises ValueError if the file holds no record."""
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
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:  # The file may hold any JSON.
        raise ValueError(f"{path} is not a record of a verification: {error!r}") from None


def probe_from(entry: dict[str, Any]) -> Probe:
    """Make a Probe from its entry in a file, in which it and its figures are dictionaries."""
    return Probe(
        title=entry["title"],
        figures=[Figure(**figure) for figure in entry["figures"]],
        texts=entry["texts"],
        trouble=entry["trouble"],
    )
