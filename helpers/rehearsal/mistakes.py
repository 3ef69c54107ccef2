"""Mistakes that raise no error: an observer in each rank notes what the script does, and the command compares them.

What is noted, and how it is compared, is ``helpers.training_check``'s. Here are its seams to the rehearsal: pretended
tensors, and a file for the notes of each rank.
"""

import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path

from helpers import training_check
from helpers.rehearsal.devices import replace
from helpers.rehearsal.tensor import cpu_tensor
from helpers.training_check import Finding, TrainingObserver, compare, mistakes_among, report

STEPS = 200  # of an optimizer: after so many a rank is observed no longer


def observe() -> TrainingObserver:
    """Begin to observe this rank, once its GPUs are pretended: what torch's functions are then is wrapped."""
    replace(training_check, plain_tensor=cpu_tensor)
    observer = TrainingObserver(STEPS)
    observer.start(note_existing=False)  # the script has not begun, so it has no model
    return observer


def write_notes(observer: TrainingObserver, folder: Path) -> None:
    """End the observation, and write the rank's notes for the command."""
    observer.stop()
    (folder / f"notes-{observer.record.rank}").write_bytes(pickle.dumps(observer.record))


def write_section(folder: Path, world_size: int, allow: list[str], path: Path | None) -> bool:
    """Compare the notes of all ranks of a script that has ended well, and print the report's section.

    The findings are added to rank 0's JSON in ``path``, unless that is None. Returns whether there is a mistake.
    """
    records = []
    for rank in range(world_size):
        notes = folder / f"notes-{rank}"
        if notes.is_file():
            records.append(pickle.loads(notes.read_bytes()))
    findings = [found for found in compare(records) if found.kind not in allow]
    failures = [failure for record in records for failure in record.failures]
    if len(records) < world_size:
        failures.append(f"only {len(records)} of {world_size} ranks left notes")
    print(report(findings, failures), file=sys.stderr, flush=True)
    if path:
        add_to_json(findings, path)
    return bool(mistakes_among(findings))


def add_to_json(findings: list[Finding], path: Path) -> None:
    counts = json.loads(path.read_text(encoding="utf-8"))
    counts["silent_mistakes"] = [asdict(found) for found in findings]
    path.write_text(json.dumps(counts, indent=1), encoding="utf-8")
