"""Mistakes that raise no error: an observer in each rank notes what the script does, and the command compares notes.

``helpers.training_check`` has the observer and the comparison. This module lets it read simulated tensors, and carries
each rank's notes to the command in a file.
"""

import json
import pickle
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers import training_check
from helpers.rehearsal.devices import replace
from helpers.rehearsal.tensor import cpu_tensor
from helpers.training_check import Finding, Record, TrainingObserver, compare, mistakes_among, report

MOST_STEPS = 200  # after so many steps of an optimizer a rank is observed no longer


def observe() -> TrainingObserver:
    """Begin to observe this rank, and return the observer, which notes what the script does.

    The observer wraps torch's functions. So this is called after the rehearsal has replaced them, and before the script
    runs.
    """
    replace(training_check, plain_tensor=cpu_tensor)  # with this function the observer reads a tensor's values
    observer = TrainingObserver(MOST_STEPS)
    observer.start(note_existing=False)  # the script has not begun, so it has no model
    return observer


def write_notes(observer: TrainingObserver, folder: Path) -> None:
    """End the observation, and write the rank's notes to the folder, where the command reads those of all ranks."""
    observer.stop()
    (folder / f"notes-{observer.record.rank}").write_bytes(pickle.dumps(observer.record))


@dataclass(frozen=True)
class Comparison:
    """What came out when the notes of all ranks were compared."""

    findings: list[Finding]  # the silent mistakes of the script, and notes that are none
    failures: list[str]  # why the comparison may have missed some: errors of the check itself

    @property
    def has_mistakes(self) -> bool:
        """Whether one of the findings is a mistake, and not only a note."""
        return bool(mistakes_among(self.findings))


def compare_notes(folder: Path, world_size: int, allow: list[str]) -> Comparison:
    """Compare the notes that all ranks of a script have left in the folder. The script has ended well.

    ``allow``: kinds of findings to leave out, because the reader has said that they are meant.
    """
    records = read_notes(folder, world_size)
    findings = [found for found in compare(records) if found.kind not in allow]
    failures = []
    for record in records:
        failures += record.failures
    if len(records) < world_size:
        failures.append(f"only {len(records)} of {world_size} ranks left notes")
    return Comparison(findings, failures)


def write_section(comparison: Comparison, path: Path | None) -> None:
    """Print the section on silent mistakes, and add the findings to rank 0's JSON in ``path``, unless that is None."""
    print(report(comparison.findings, comparison.failures), file=sys.stderr, flush=True)
    if path:
        add_to_json(comparison.findings, path)


def read_notes(folder: Path, world_size: int) -> list[Record]:
    """The notes of the ranks that have left some, in the order of the ranks."""
    records = []
    for rank in range(world_size):
        path = folder / f"notes-{rank}"
        if path.is_file():
            records.append(pickle.loads(path.read_bytes()))
    return records


def add_to_json(findings: list[Finding], path: Path) -> None:
    """Add the findings to the file of rank 0's counts, which that rank has written before it ended."""
    counts = json.loads(path.read_text(encoding="utf-8"))
    counts["silent_mistakes"] = [asdict(found) for found in findings]
    path.write_text(json.dumps(counts, indent=1), encoding="utf-8")
