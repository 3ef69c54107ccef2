"""The doctor's report, in 80 columns: a function of the findings, and of a plan."""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import harmonic_mean, mean

from helpers.command_line import aligned
from helpers.doctor.findings import Findings, slowest
from helpers.doctor.plan import Plan, compare
from helpers.doctor.problems import Problem, notes, problems, span, three_digits
from helpers.doctor.trials import Trial

WIDTH = 80  # characters of a line
MOST_RANKS_WITH_A_TABLE_OF_LINKS = 8  # A table of more does not fit a screen.
# How many characters of a cell are shown in the table of ranks, so that its columns fit into the width.
LONGEST_RANKS = 28
LONGEST_HOST = 20
LONGEST_DEVICE = 24
LONGEST_INTERFACE = 28


@dataclass(frozen=True)
class Report:
    """The report's text, and how many problems it names."""

    text: str
    problems: int


def report(findings: Findings, plan: Plan | None = None) -> Report:
    """What the doctor prints: tables of what it found, and then each problem with a remedy.

    If there is a plan, what it counts on is compared with what the cluster has.
    """
    all_problems = problems(findings)
    lines = [
        f"{counted(findings.world_size, 'rank')} on {counted(len(findings.hosts), 'host')}, {findings.backend}",
        "",
        *table_of_ranks(findings),
        "",
        *summary(findings),
        "",
        *table_of_collectives(findings),
        *table_of_links(findings),
        "",
    ]
    if plan is not None:
        lines.append(f"the plan of {plan.title}")
        for comparison in compare(findings, plan):
            lines.append(comparison.line)
            if comparison.problem is not None:
                all_problems.append(comparison.problem)
        lines.append("")
    for problem in all_problems:
        lines += paragraph("WRONG", problem)
    for note in notes(findings):
        lines += paragraph("note", note)
    if all_problems:
        lines.append(f"{counted(len(all_problems), 'problem')} found")
    else:
        lines.append("Nothing is wrong here.")
    return Report("\n".join(lines), len(all_problems))


def counted(count: int, noun: str) -> str:
    """``1 rank`` or ``2 ranks``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"


def paragraph(label: str, problem: Problem) -> list[str]:
    """A problem and its remedy as lines, indented after a label such as "WRONG"."""
    indent = 7
    following_lines = " " * indent
    return [
        *textwrap.wrap(problem.text, WIDTH, initial_indent=f"{label:{indent}}", subsequent_indent=following_lines),
        *textwrap.wrap(problem.remedy, WIDTH, initial_indent="  try: ", subsequent_indent=following_lines),
    ]


def gigabytes(bandwidth: float) -> str:
    """Bytes per second as a number of GB/s."""
    return three_digits(bandwidth / 1e9)


def microseconds(seconds: float) -> str:
    """Seconds as a whole number of microseconds."""
    return f"{1e6 * seconds:.0f}"


def table_of_ranks(findings: Findings) -> list[str]:
    """A table of the ranks' hosts, devices and interfaces. Neighbouring ranks that share all three share a row."""

    def shared_cells(rank: int) -> list[str]:
        """The host, device and interface of a rank: the cells that neighbouring ranks may share."""
        facts = findings.facts[rank]
        device = facts.gpu_model or facts.device
        address = facts.address or ""
        interface = f"{facts.interface} {address}"
        return [facts.host[:LONGEST_HOST], device[:LONGEST_DEVICE], interface[:LONGEST_INTERFACE]]

    head = ["rank", "local", "host", "device", "interface"]
    rows = [head]
    for cells, ranks_that_share in groupby(sorted(findings.facts), key=shared_cells):
        ranks = list(ranks_that_share)
        local_ranks = sorted(findings.facts[rank].local_rank for rank in ranks)
        rows.append([span(ranks)[:LONGEST_RANKS], span(local_ranks)[:LONGEST_RANKS], *cells])
    return aligned(rows, left=range(len(head)))


def summary(findings: Findings) -> list[str]:
    """The lines between the tables. Each is about one thing that was examined: ``clocks    less than 1 ms apart``."""
    return [
        *lines_about_hosts(findings),
        *lines_about_drivers(findings),
        *lines_about_connections(findings),
        *lines_about_slowest(findings),
    ]


def lines_about_hosts(findings: Findings) -> Iterator[str]:
    """Yields the versions of the programs on all ranks, and the free shared memory of the host that has least."""
    all_facts = findings.facts.values()
    programs = []
    for program in ("python", "torch", "NCCL"):
        versions = {facts.versions[program] for facts in all_facts} - {""}
        if versions:
            programs.append(f"{program} {' and '.join(sorted(versions))}")
    yield f"versions  {', '.join(programs)}"

    free_bytes = [facts.shared_memory for facts in all_facts if facts.shared_memory is not None]
    if free_bytes:
        yield f"memory    {min(free_bytes) / 1e9:.1f} GB of shared memory free"


def lines_about_drivers(findings: Findings) -> Iterator[str]:
    """Yields what the drivers know about the GPUs, and what could not be read. Yields nothing without GPUs."""
    healths = [facts.health for facts in findings.facts.values() if facts.health is not None]
    if not healths:
        return
    error_counts = [health.uncorrected_errors for health in healths if health.uncorrected_errors is not None]
    errors = sum(error_counts)
    yield f"driver    uncorrected memory errors: {errors}, counted by {len(error_counts)} of {len(healths)} GPUs"

    slowed = [health for health in healths if health.slowdowns]
    with_xids = [health for health in healths if health.xids]
    yield f"          seen: {len(slowed)} GPUs slowed down, {len(with_xids)} with a bad Xid"

    not_read: set[str] = set()
    for health in healths:
        not_read.update(health.not_read)
    for reason in sorted(not_read):
        yield f"          not read: {reason}"


def lines_about_connections(findings: Findings) -> Iterator[str]:
    """Yields how many ranks reach the store, how many TCP connections and links work, and how far the clocks differ."""
    answering = len(findings.facts)
    yield f"store     {findings.store_address}, reached by {answering} of {findings.world_size}"

    with_address = [facts for facts in findings.facts.values() if facts.address]
    tried = len(with_address) * (answering - 1)  # every other rank connects to each rank that has an address
    failed = sum(len(reasons) for reasons in findings.unreachable.values())
    yield f"tcp       {tried - failed} of {tried} connections between ranks open"

    offsets = findings.clock_offsets.values()
    milliseconds = 1e3 * (max(offsets) - min(offsets))
    if milliseconds > 1:
        yield f"clocks    at most {milliseconds:.0f} ms apart"
    else:
        yield "clocks    less than 1 ms apart"

    number_of_pairs = math.comb(len(findings.members), 2)
    right_links = [link for link in findings.links.values() if link.right]
    yield f"links     {len(right_links)} of {number_of_pairs} pairs right"


def lines_about_slowest(findings: Findings) -> Iterator[str]:
    """Yields the rank that computes most slowly, and the pair of ranks with the slowest link, beside the median.

    For example::

        slowest   rank 2 computes in 1.30 times the median
                  ranks 0 and 3: 1.25 GB/s, the median pair 2.50

    A line is left out if fewer than two speeds are known.
    """
    slowest_rank = slowest(findings.compute_speeds)
    if slowest_rank is not None:
        # The line compares times: a rank with half the median speed needs twice the time.
        times_the_median_time = slowest_rank.median_speed / slowest_rank.speed
        yield f"slowest   rank {slowest_rank.key} computes in {times_the_median_time:.2f} times the median"

    slowest_link = slowest({pair: link.speed for pair, link in findings.links.items()})
    if slowest_link is not None:
        first_rank, second_rank = slowest_link.key
        speed = gigabytes(slowest_link.speed)
        median_speed = gigabytes(slowest_link.median_speed)
        yield f"          ranks {first_rank} and {second_rank}: {speed} GB/s, the median pair {median_speed}"


def table_of_collectives(findings: Findings) -> list[str]:
    """A table with a row for each collective: right or not, latency in microseconds, bus bandwidth in GB/s.

    The bus bandwidth is defined by nccl-tests, doc/PERFORMANCE.md: it does not depend on the number of ranks.
    """
    if not findings.collectives:
        return ["no process group: no collective was tried"]
    size = "4 MiB"
    if findings.device == "cuda":
        size = "64 MiB"
    rows = [["collective", "right", "us (4 KiB)", f"GB/s busbw ({size})"]]
    for name, trial_of_rank in findings.collectives.items():
        rows.append(row_of_collective(name, list(trial_of_rank.values()), ranks=len(findings.members)))
    return aligned(rows, left=[0, 1])


def row_of_collective(name: str, trials: list[Trial | None], ranks: int) -> list[str]:
    """A row of the table of collectives: [name, right, latency, bus bandwidth], such as ["reduce", "yes", "80", "2.5"].

    ``trials`` has the trial of each rank, or None for a rank where the collective raised an error.
    """
    measured = [trial for trial in trials if trial is not None]
    raised_nowhere = len(measured) == len(trials)
    if raised_nowhere and all(trial.right for trial in measured):
        right = "yes"
    else:
        right = "NO"
    communicates = ranks > 1
    if not measured or not communicates:
        return [name, right, "", ""]
    latency = mean(trial.seconds for trial in measured)
    # The harmonic mean of the ranks' speeds is the bytes divided by the mean of their times.
    algorithm_bandwidth = harmonic_mean([trial.speed for trial in measured])
    bus_bandwidth = algorithm_bandwidth * bus_factor(name, ranks)
    return [name, right, microseconds(latency), gigabytes(bus_bandwidth)]


def bus_factor(collective: str, ranks: int) -> float:
    """How many times a collective's bytes each link has to carry (nccl-tests, doc/PERFORMANCE.md).

    The bus bandwidth is this factor times the algorithm bandwidth, which is the collective's bytes divided by its time.
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    share_of_the_others = (ranks - 1) / ranks  # A rank does not send its own part of the bytes.
    if collective == "all_reduce":
        return 2 * share_of_the_others  # It is a reduce-scatter and then an all-gather.
    return share_of_the_others


def table_of_links(findings: Findings) -> list[str]:
    """A table of every pair's bandwidth and latency. [] for a single rank, and for more ranks than fit a screen."""
    members = findings.members
    if not findings.links or len(members) > MOST_RANKS_WITH_A_TABLE_OF_LINKS:
        return []
    head = ["", *map(str, members)]
    rows = [head]
    for row_rank in members:
        cells = [cell_of_link(findings, row_rank, column_rank) for column_rank in members]
        rows.append([f"rank {row_rank}", *cells])
    return ["", "pairs: GB/s above the diagonal, microseconds below", *aligned(rows, left=[0])]


def cell_of_link(findings: Findings, row_rank: int, column_rank: int) -> str:
    """A cell of the table of links: the bandwidth above the diagonal, the latency below, and "-" on it.

    A "!" is added where the data arrived changed. A link that could not be tried is "none".
    """
    if row_rank == column_rank:
        return "-"
    lower_rank = min(row_rank, column_rank)
    higher_rank = max(row_rank, column_rank)
    link = findings.links.get((lower_rank, higher_rank))
    if link is None:
        return "none"
    is_above_diagonal = row_rank < column_rank
    if is_above_diagonal:
        text = gigabytes(link.speed)
    else:
        text = microseconds(link.seconds)
    if not link.right:
        text += "!"
    return text
