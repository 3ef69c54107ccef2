"""What differed between a chapter's runs: on GPUs, on gloo, and as rehearsed. It only computes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from helpers.counts import COLLECTIVE, NOT_PINNED, UPLOAD, WAIT
from helpers.verify.runs import Run

UNCOMPARED = """\
Not compared: copies with `non_blocking=True` from memory that is not pinned, of which torch's mode says nothing; \
the buckets of DDP and what else C++ does there; collectives on gloo beside NCCL, because a stop request's depend on \
time; ranks other than rank 0. Calls of `synchronize` and barriers are counted by name, as torch's mode leaves them out.
"""


def differences(on_gpus: Run, gloo: Run, rehearsed: Run, tolerance: float) -> list[str]:
    """A line for each difference between a chapter's runs; ``tolerance`` is that of its result's numbers."""
    lines = []
    if on_gpus.trouble:
        lines.append(f"on GPUs it {on_gpus.trouble}; the rehearsal {rehearsed.trouble or 'accepted it'}")
    elif rehearsed.trouble:
        lines.append(f"on GPUs it ran, and the rehearsal {rehearsed.trouble}")
    else:
        lines += against(times(on_gpus.lines), times(rehearsed.lines))
    if gloo.trouble:
        lines.append(f"on gloo it {gloo.trouble}")
    elif not on_gpus.trouble:
        lines += numbers(on_gpus.result, gloo.result, tolerance)
    return lines


def numbers(result: dict[str, float], other: dict[str, float], tolerance: float) -> Iterator[str]:
    """Yields a line for each number that differs from gloo's, or is missing."""
    if not result:
        yield "it printed no result"
    for name in sorted(result.keys() | other.keys()):
        mine, theirs = result.get(name), other.get(name)
        if mine is None or theirs is None or not abs(mine - theirs) <= tolerance:
            yield f"{name} is {mine} on GPUs and {theirs} on gloo (tolerance {tolerance:g})"


def event(row: dict[str, Any]) -> str:
    """What a row of counts counts, with its line: ``x.py:7 waits``, ``x.py:9 allreduce (NCCL)``; "" if uncompared."""
    kind, what = row["kind"], row["what"]
    if kind in (WAIT, UPLOAD) and what != NOT_PINNED:
        return f"{row['line']} waits"
    compared = kind == COLLECTIVE and "(gloo)" not in what and what != "broadcast (C++)"  # which is DDP's
    return f"{row['line']} {what}" if compared else ""


def times(rows: Iterable[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """How often each event came in all, and between the first optimizer step and the last."""
    totals, in_steps = Counter[str](), Counter[str]()
    for row in rows:
        totals[event(row)] += row["count"]
        in_steps[event(row)] += row["in_steps"]
    return totals, in_steps


def against(seen: tuple[Counter[str], Counter[str]], predicted: tuple[Counter[str], Counter[str]]) -> Iterator[str]:
    """Yields a line for each event that came more or less often than predicted."""
    for name in sorted((seen[0] | predicted[0]).keys() - {""}):
        if any(counts[name] != expected[name] for counts, expected in zip(seen, predicted, strict=True)):
            where = "in the steps" if seen[1][name] != predicted[1][name] else "outside of the steps"
            yield f"{name}: {seen[0][name]} times on GPUs, {predicted[0][name]} as rehearsed, {where}"
