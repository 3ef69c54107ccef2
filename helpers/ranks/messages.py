"""What a reader sees of ranks: their output, folded, and the errors that name the rank, the line and the cause."""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        """The arguments are the attributes. The traceback of the rank that failed first is shown under the message."""
        super().__init__(message)
        self.rank = rank
        self.failures = failures or {}
        if rank in self.failures:
            self.add_note(self.failures[rank])  # Python prints notes under the message

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the rank's traceback in place of the launcher's."""
        lines = []
        if self.rank in self.failures:
            lines = self.failures[self.rank].splitlines()
        return [*lines, f"{type(self).__name__}: {self}"]


def first_failure(failures: dict[int, Failure], out_of_memory: bool) -> RankError:
    """The RankError about the failure that came first, such as ``ranks 0-1 failed: ValueError: no data``.

    ``failures`` is {rank: its failure}. The message names all ranks that failed in the same way, and the error carries
    every rank's traceback. ``out_of_memory`` says whether Linux killed a process because memory ran out.
    """

    def order_of_cause(rank: int) -> tuple[bool, float]:
        """Sorts ranks by the time of their failures, and behind all others those that only lost their peer."""
        return failures[rank].lost_peer, failures[rank].when

    first = min(failures, key=order_of_cause)
    ranks_alike = [rank for rank in sorted(failures) if are_alike(rank, failures[rank], first, failures[first])]
    rank_to_name = ranks_alike[0]  # the lowest, so that the error is the same in every run
    message = message_about(ranks_alike, failures[rank_to_name], out_of_memory)
    texts = {}
    for rank, failure in failures.items():
        texts[rank] = failure.traceback or failure.what  # a rank that was killed has no traceback
    return RankError(message, rank=rank_to_name, failures=texts)


def message_about(ranks: list[int], failure: Failure, out_of_memory: bool) -> str:
    """The message about ranks that have all failed in the same way: ``rank 1 died first: killed by SIGKILL (…)``.

    If it is known in which line of the code they failed, a second line of the message says so.
    """
    what = failure.what.split("\n")[0]  # the traceback has the other lines
    if what == "killed by SIGKILL" and out_of_memory:
        what += " (the system's out-of-memory killer: use less memory)"
    elif what == "killed by SIGKILL":
        what += " (the system reports no out-of-memory kill)"
    if failure.traceback:
        verb = "failed"
    else:
        verb = "died"  # a rank that is killed leaves no traceback
    if len(ranks) == 1:
        verb += " first"
    message = f"{label(ranks)} {verb}: {what}"
    if failure.where:
        message += f"\n  at {failure.where}"
    return message


def are_alike(rank: int, failure: Failure, other_rank: int, other: Failure) -> bool:
    """Whether two ranks failed in the same way at the same line.

    Some messages of torch name the rank that raises them, so a rank's own number does not count as a difference.
    """
    what = re.sub(rf"\brank {rank}\b", "rank", failure.what)
    other_what = re.sub(rf"\brank {other_rank}\b", "rank", other.what)
    return what == other_what and failure.where == other.where


def hang(lines: dict[int, str], finished: Collection[int], timeout: float) -> RankError:
    """The RankError about a timeout: it says which ranks have finished, and in which line each of the others was.

    ``lines`` is {rank: its line} of all ranks, such as {0: "line 3 of step: loss = f(x)"}. ``finished`` has the numbers
    of the ranks that have returned.
    """
    states = {}
    states_of_hanging = {}
    for rank, line in sorted(lines.items()):
        if rank in finished:
            states[rank] = "finished"
        else:
            states[rank] = f"at {line}"
            states_of_hanging[rank] = states[rank]
    still_running = len(states) - len(finished)
    message = f"{still_running} of {len(states)} ranks still ran after timeout={timeout:g} s:"
    for ranks_and_state in by_line(states):
        message += f"\n  {ranks_and_state}"
    return RankError(message, rank=None, failures=states_of_hanging)


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
    try:
        statistics = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    # The file has a line "oom_kill 3".
    count = re.search(r"^oom_kill (\d+)", statistics, re.MULTILINE)
    if count is None:
        return 0
    return int(count[1])


def fold(outputs: list[str]) -> Iterator[str]:
    """Merge what the ranks printed, and yield the lines with labels: ``[ranks 0-3] step 1``.

    ``outputs`` has each rank's text. Each rank's lines keep their order. A line that several ranks print is yielded
    once with all of them, if the order of the other lines allows it.
    """
    remaining = [deque(split_lines(output)) for output in outputs]  # for each rank the lines that are not yet yielded
    counts = [Counter(lines) for lines in remaining]  # for each rank how often each line is among these
    while any(remaining):
        next_lines = {rank: lines[0] for rank, lines in enumerate(remaining) if lines}
        line = choose_line(next_lines, counts)
        ranks = [rank for rank, next_line in next_lines.items() if next_line == line]
        for rank in ranks:
            remaining[rank].popleft()
            counts[rank][line] -= 1
        yield f"[{label(ranks)}] {line}".rstrip()


def split_lines(output: str) -> list[str]:
    """The lines of an output. Only a newline ends a line here; str.splitlines would also cut at a form feed."""
    if not output:
        return []
    return output.removesuffix("\n").split("\n")


def choose_line(next_lines: Mapping[int, str], remaining: Sequence[Counter[str]]) -> str:
    """Which line to show next, where the ranks' outputs are merged: one of {rank: its next line}.

    ``remaining`` has for each rank {line: how often the rank still prints it}. If another rank comes to the same line
    later, it is best to wait until then, because the line is shown once for both. So the first line is taken that no
    rank prints later, or else the first rank's line.
    """
    for line in next_lines.values():
        is_printed_later = False
        for rank, next_line in next_lines.items():
            if next_line != line and remaining[rank][line] > 0:
                is_printed_later = True
        if not is_printed_later:
            return line
    lines = list(next_lines.values())
    return lines[0]


def label(ranks: list[int]) -> str:
    """``rank 2``, ``ranks 0-3`` or ``ranks 0, 2`` for a list of ranks in order."""
    first = ranks[0]
    last = ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    has_no_gap = ranks == list(range(first, last + 1))
    if has_no_gap:
        return f"ranks {first}-{last}"
    numbers = ", ".join(str(rank) for rank in ranks)
    return f"ranks {numbers}"


def tidy(text: str) -> str:
    """A rank's output without what changes from run to run, so that a notebook's stored output stays the same."""
    # A path of a cell, such as /tmp/ipykernel_4711/815.py, has the kernel's process id. It becomes "notebook cell".
    text = re.sub(r"""(?<![^\s"'(])[^\s"'(]*ipykernel_\d+/\d+\.py""", NOTEBOOK, text)
    # A message that torch's C++ code logs has the number of its rank and its time:
    # [rank0]:[W1120 23:56:46.832225602 reducer.cpp:1529] … becomes [W reducer.cpp:1529] …
    return re.sub(r"^(?:\[rank\d+\]:)?\[([IWEF])\d{4} [\d:.]+ ", r"[\1 ", text, flags=re.MULTILINE)
