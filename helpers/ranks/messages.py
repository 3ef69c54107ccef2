"""What a reader sees of ranks: their output, folded, and the errors that name the rank, the line and the cause."""

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from helpers.ranks.rank import NOTEBOOK, Failure


class LaunchError(ValueError):
    """The call cannot work, and no rank was started. The message names the next thing to try."""

    __module__ = "helpers.ranks.launch"  # from where readers import it: a traceback shows this name

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the launcher's frames."""
        return [f"{type(self).__name__}: {self}"]


class RankError(RuntimeError):
    """A rank raised an exception, died or hung.

    ``rank`` is the rank that failed first, or None after a hang. ``failures`` is {rank: text}, with each failed rank's
    traceback, the signal that killed the rank, or the line in which it hung.
    """

    __module__ = "helpers.ranks.launch"

    def __init__(self, message: str, rank: int | None = None, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank, self.failures = rank, failures or {}
        if rank in self.failures:
            self.add_note(self.failures[rank])  # Python prints notes under the message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the rank's traceback in place of the launcher's."""
        story = "" if self.rank is None else self.failures.get(self.rank, "")
        return [*story.splitlines(), f"{type(self).__name__}: {self}"]


def first_failure(failures: dict[int, Failure], out_of_memory: bool) -> RankError:
    """The RankError for the first failure. A lost connection comes after its cause, and equal failures count as one."""

    def story(rank: int) -> tuple[str, str]:  # without the rank's own number, which torch puts into its messages
        return re.sub(rf"\brank {rank}\b", "rank", failures[rank].what), failures[rank].where

    first = min(failures, key=lambda rank: (failures[rank].echo, failures[rank].when))
    alike = [rank for rank in sorted(failures) if story(rank) == story(first)]
    cause = failures[alike[0]]
    what = cause.what.split("\n")[0]  # the traceback has the rest
    if what == "killed by SIGKILL":
        by_system = "the system's out-of-memory killer: use less memory"
        what += f" ({by_system if out_of_memory else 'the system reports no out-of-memory kill'})"
    how = ("failed" if cause.traceback else "died") + (" first" if len(alike) == 1 else "")
    message = f"{label(alike)} {how}: {what}" + (f"\n  at {cause.where}" if cause.where else "")
    return RankError(message, alike[0], {rank: failure.traceback or failure.what for rank, failure in failures.items()})


def hang(stands: dict[int, str], finished: Collection[int], timeout: float) -> RankError:
    """The RankError that says in which line each rank was when the time was over. ``finished`` are ranks."""
    lines = {rank: "finished" if rank in finished else f"at {line}" for rank, line in sorted(stands.items())}
    message = f"{len(lines) - len(finished)} of {len(lines)} ranks still ran after timeout={timeout:g} s:"
    message += "".join(f"\n  {line}" for line in by_line(lines))
    return RankError(message, None, {rank: line for rank, line in lines.items() if rank not in finished})


def by_line(lines: dict[int, str]) -> list[str]:
    """``ranks 0-1: at line 3 in f()`` for each line in {rank: line}."""
    return [f"{label(ranks)}: {line}" for line, ranks in ranks_by_line(lines).items()]


def ranks_by_line(lines: Mapping[int, str]) -> dict[str, list[int]]:
    """{line: the ranks that have it} for {rank: line}."""
    groups: dict[str, list[int]] = {}
    for rank, line in lines.items():
        groups.setdefault(line, []).append(rank)
    return groups


def count_oom_kills() -> int:
    """How many processes Linux has killed since its start because memory ran out; 0 on other systems."""
    with contextlib.suppress(OSError):
        if count := re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(count[1])
    return 0


def fold(outputs: list[str]) -> Iterator[str]:
    """Yields the ranks' outputs as labelled lines; what several ranks print at the same point comes once, with them."""
    texts = [output.removesuffix("\n").split("\n") if output else [] for output in outputs]
    ahead = [Counter(lines) for lines in texts]
    at = [0] * len(texts)
    while unread := [rank for rank, lines in enumerate(texts) if at[rank] < len(lines)]:
        heads = {rank: texts[rank][at[rank]] for rank in unread}
        # A line waits while another rank has yet to print the same line after other lines.
        ready = (r for r in unread if all(heads[o] == heads[r] or not ahead[o][heads[r]] for o in unread))
        line = heads[next(ready, unread[0])]
        same = [rank for rank in unread if heads[rank] == line]
        for rank in same:
            ahead[rank][line] -= 1
            at[rank] += 1
        yield f"[{label(same)}] {line}".rstrip()


def label(ranks: list[int]) -> str:
    """``rank 2``, ``ranks 0-3`` or ``ranks 0, 2`` for a list of ranks in order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def tidy(text: str) -> str:
    """A rank's output without what changes from run to run: the kernel's process id, the times of C++ messages."""
    text = re.sub(r"""(?<![^\s"'(])[^\s"'(]*ipykernel_\d+/\d+\.py""", NOTEBOOK, text)
    # [rank0]:[W1120 23:56:46.832225602 reducer.cpp:1529] … becomes [W reducer.cpp:1529] …
    return re.sub(r"^(?:\[rank\d+\]:)?\[([IWEF])\d{4} [\d:.]+ ", r"[\1 ", text, flags=re.MULTILINE)
