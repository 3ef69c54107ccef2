"""What a verification has found so far, as a file: the machine, the steps, and the figures that were measured.

``results.json`` is written before the first step and after each one. A copy of it in book/measured is what the book's
pages show. A record whose facts have ``rehearsed`` was made on pretended GPUs: its figures mean nothing.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers.writing import write_text


@dataclass(frozen=True)
class Prediction:
    """What is expected of a figure with this name, and between which numbers; written before anything is measured."""

    name: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Figure:
    """A measured number, and what was predicted for it before the run."""

    name: str  # what a reader sees in a table's first column, such as "bfloat16, 4096 x 4096"
    value: float
    unit: str  # such as "TFLOP/s" or "ms"
    predicted: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a prediction."""
        if not self.predicted:
            return None
        return self.value / self.predicted


@dataclass(frozen=True)
class Probe:
    """What a probe has measured. ``texts`` are {name: what a program printed}, where messages are the result."""

    title: str
    seconds: float  # from its start to its end
    figures: list[Figure] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    trouble: str = ""  # why not everything was measured, in a line: "hung: …", "failed: …"


@dataclass(frozen=True)
class Step:
    """What a step came to. A script's step has more: its result and memory on GPUs, seconds on GPUs and on gloo."""

    seconds: float  # from its start to its end
    differences: list[str]
    summary: str  # where nothing differs
    command: str
    result: dict[str, float] = field(default_factory=dict)
    script_seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)  # bytes, each rank's peak
    printed: str = ""  # where a script measures speed


@dataclass
class Record:
    """All that is known of one machine at one commit."""

    facts: dict[str, str] = field(default_factory=dict)  # machine, ranks of the scripts, commit, command, date
    steps: dict[str, Step] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)
    predictions: dict[str, list[Prediction]] = field(default_factory=dict)  # by the probe that measures them


def beside(figure: Figure, predictions: list[Prediction]) -> Figure:
    """The figure with what was predicted for it, if anything."""
    for prediction in predictions:
        if prediction.name == figure.name:
            return replace(
                figure,
                predicted=prediction.value,
                predicted_low=prediction.low,
                predicted_high=prediction.high,
            )
    return figure


def write(record: Record, path: Path) -> None:
    """Write a record. Whoever kills the process meanwhile leaves the former file whole."""
    write_whole(json.dumps(asdict(record), indent=1), path)


def write_whole(text: str, path: Path) -> None:
    """Write a file at once or not at all."""
    write_text(path, text)


def read(path: Path) -> Record:
    """The record in a file. Raises ValueError where the file is not one."""
    try:
        content = json.loads(path.read_text("utf-8"))
        predictions = content.get("predictions", {})  # Older records have none.
        return Record(
            facts=content["facts"],
            steps={name: Step(**step) for name, step in content["steps"].items()},
            probes={name: probe(entry) for name, entry in content["probes"].items()},
            predictions={name: [Prediction(**each) for each in group] for name, group in predictions.items()},
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a record of a verification: {error!r}") from None


def probe(entry: dict[str, Any]) -> Probe:
    """A probe from its part of a file."""
    figures = [Figure(**figure) for figure in entry["figures"]]
    return Probe(**{**entry, "figures": figures})
