"""What differed between a chapter's runs: on GPUs, on gloo, and as rehearsed. Pure functions of the records."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from helpers.counts import COLLECTIVE, NOT_PINNED, UPLOAD, WAIT
from helpers.verify.runs import Run

UNCOMPARED = """\
Not compared: copies with `non_blocking=True` from memory that is not pinned, of which torch's mode says nothing; \
the buckets of DDP and what else C++ does there; collectives on gloo beside NCCL, because a stop request's depend on \
time; ranks other than rank 0. Calls of `synchronize` and barriers are counted by name, as torch's mode leaves them out.
"""
BROADCAST_OF_DDP = "broadcast (C++)"


@dataclass(frozen=True)
class Count:
    """How often an event happened in all, and how often between the first optimizer step and the last."""

    in_all: int = 0
    in_steps: int = 0


def differences(on_gpus: Run, on_gloo: Run, rehearsed: Run, tolerance: float) -> list[str]:
    """How three runs of a chapter's script differ, a line for each difference: on GPUs, on gloo, and as rehearsed.

    The run on GPUs is compared with the rehearsal: whether they failed, and their counts of events. It is compared with
    the run on gloo by the numbers of their results, which may differ by ``tolerance``. Any run may have failed or hung.
    """
    lines = []
    if on_gpus.trouble:
        verdict = rehearsed.trouble or "accepted it"
        lines.append(f"on GPUs it {on_gpus.trouble}; the rehearsal {verdict}")
    elif rehearsed.trouble:
        lines.append(f"on GPUs it ran, and the rehearsal {rehearsed.trouble}")
    else:
        lines += compare_counts(event_counts(on_gpus.lines), event_counts(rehearsed.lines))
    if on_gloo.trouble:
        lines.append(f"on gloo it {on_gloo.trouble}")
    elif not on_gpus.trouble:
        lines += numbers(on_gpus.result, on_gloo.result, tolerance)
    return lines


def numbers(result: dict[str, float], expected: dict[str, float], tolerance: float) -> Iterator[str]:
    """Yields a line for each number of a result that differs from gloo's, or is missing from one of them."""
    if not result:
        yield "it printed no result"
    for name in sorted(result.keys() | expected.keys()):
        number = result.get(name)
        on_gloo = expected.get(name)
        # If one of them is NaN, so is the difference, and the comparison is false.
        is_near = number is not None and on_gloo is not None and abs(number - on_gloo) <= tolerance
        if is_near:
            continue
        yield f"{name} is {number} on GPUs and {on_gloo} on gloo (tolerance {tolerance:g})"


def event_counts(rows: Iterable[dict[str, Any]]) -> dict[str, Count]:
    """Sum up rows of ``helpers.counts``: {event: its count}, of the events that are compared (see ``event_of``)."""
    counts: dict[str, Count] = {}
    for row in rows:
        event = event_of(row)
        if event:
            before = counts.get(event, Count())
            counts[event] = Count(
                in_all=before.in_all + row["count"],
                in_steps=before.in_steps + row["in_steps"],
            )
    return counts


def event_of(row: dict[str, Any]) -> str:
    """The event that a row counts, with the line of the script: "x.py:7 waits" or "x.py:9 allreduce (NCCL)".

    It is "" for an event that is not compared (UNCOMPARED says why). row: a Row of ``helpers.counts`` as a dictionary.
    """
    kind = row["kind"]
    what = row["what"]
    is_wait = kind in (WAIT, UPLOAD) and what != NOT_PINNED
    if is_wait:
        return f"{row['line']} waits"
    is_collective_on_gpus = kind == COLLECTIVE and "(gloo)" not in what and what != BROADCAST_OF_DDP
    if is_collective_on_gpus:
        return f"{row['line']} {what}"
    return ""


def compare_counts(seen: Mapping[str, Count], predicted: Mapping[str, Count]) -> Iterator[str]:
    """Yields a line for each event that happened more or less often on GPUs than in the rehearsal."""
    for event in sorted(seen.keys() | predicted.keys()):
        on_gpus = seen.get(event, Count())
        rehearsed = predicted.get(event, Count())
        if on_gpus == rehearsed:
            continue
        if on_gpus.in_steps != rehearsed.in_steps:
            where = "in the steps"
        else:
            where = "outside of the steps"
        yield f"{event}: {on_gpus.in_all} times on GPUs, {rehearsed.in_all} as rehearsed, {where}"
