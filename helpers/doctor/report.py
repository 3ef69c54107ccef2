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

WIDTH = 80  # characters of a line
MOST_RANKS_WITH_A_TABLE_OF_LINKS = 8  # A table of more does not fit a screen.


@dataclass(frozen=True)
class Report:
    """The report's text, and how many problems it names."""

    text: str
    problems: int


def report(findings: Findings, plan: Plan | None = None) -> Report:
    """What the doctor prints: tables of what it found, and then each problem with a remedy.

    With a plan, there is also a comparison of what the plan counts on with what the cluster has.
    """
    found = problems(findings)
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
                found.append(comparison.problem)
        lines.append("")
    for problem in found:
        lines += paragraph("WRONG", problem)
    for note in notes(findings):
        lines += paragraph("note", note)
    if found:
        lines.append(f"{counted(len(found), 'problem')} found")
    else:
        lines.append("Nothing is wrong here.")
    return Report("\n".join(lines), len(found))


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
    """A table of the ranks' hosts, devices and interfaces; neighbouring ranks that share all three share a line."""

    def shared_cells(rank: int) -> tuple[str, str, str]:
        """The host, the device and the interface of a rank, cut so that the columns fit into the width."""
        facts = findings.facts[rank]
        device = facts.gpu_model or facts.device
        interface = f"{facts.interface} {facts.address or ''}"
        return facts.host[:20], device[:24], interface[:28]

    head = ["rank", "local", "host", "device", "interface"]
    rows = [head]
    for cells, group in groupby(sorted(findings.facts), shared_cells):
        ranks = list(group)
        local_ranks = sorted(findings.facts[rank].local_rank for rank in ranks)
        rows.append([span(ranks)[:28], span(local_ranks)[:28], *cells])
    return aligned(rows, left=range(len(head)))


def summary(findings: Findings) -> Iterator[str]:
    """Yields a line for each thing that was looked at."""
    all_facts = list(findings.facts.values())

    programs = []
    for program in ("python", "torch", "NCCL"):
        versions = sorted({facts.versions[program] for facts in all_facts} - {""})
        if versions:
            programs.append(f"{program} {' and '.join(versions)}")
    yield f"versions  {', '.join(programs)}"

    shared_memory = [facts.shared_memory for facts in all_facts if facts.shared_memory is not None]
    if shared_memory:
        yield f"memory    {min(shared_memory) / 1e9:.1f} GB of shared memory free"

    yield f"store     {findings.store_address}, reached by {len(all_facts)} of {findings.world_size}"

    with_address = [facts for facts in all_facts if facts.address]
    connections = len(with_address) * (len(all_facts) - 1)  # from each other rank one to each that has an address
    failed = sum(len(reasons) for reasons in findings.unreachable.values())
    yield f"tcp       {connections - failed} of {connections} connections between ranks open"

    offsets = findings.clock_offsets.values()
    milliseconds = 1e3 * (max(offsets) - min(offsets))
    if milliseconds > 1:
        yield f"clocks    at most {milliseconds:.0f} ms apart"
    else:
        yield "clocks    less than 1 ms apart"

    pairs = math.comb(len(findings.members), 2)
    right = [link for link in findings.links.values() if link.right]
    yield f"links     {len(right)} of {pairs} pairs right"

    rank = slowest(findings.compute_speeds)
    if rank is not None:
        yield f"slowest   rank {rank.key} computes in {rank.median / rank.speed:.2f} times the median"
    pair = slowest({ranks: link.speed for ranks, link in findings.links.items()})
    if pair is not None:
        first, second = pair.key
        speeds = f"{gigabytes(pair.speed)} GB/s, the median pair {gigabytes(pair.median)}"
        yield f"          ranks {first} and {second}: {speeds}"


def table_of_collectives(findings: Findings) -> list[str]:
    """A table of each collective: right or not, latency in microseconds, bus bandwidth in GB/s.

    The bus bandwidth is that of nccl-tests, doc/PERFORMANCE.md: it does not depend on the number of ranks.
    """
    if not findings.collectives:
        return ["no process group: no collective was tried"]
    count = len(findings.members)
    size = "4 MiB"
    if findings.device == "cuda":
        size = "64 MiB"
    rows = [["collective", "right", "us (4 KiB)", f"GB/s busbw ({size})"]]
    for name, by_rank in findings.collectives.items():
        trials = [trial for trial in by_rank.values() if trial is not None]
        raised_nowhere = len(trials) == len(by_rank)
        right = "NO"
        if raised_nowhere and all(trial.right for trial in trials):
            right = "yes"
        latency = ""
        bus_bandwidth = ""
        if trials and count > 1:  # one rank alone communicates with nobody
            latency = microseconds(mean(trial.seconds for trial in trials))
            # The harmonic mean is the bytes divided by the mean of the ranks' times.
            algorithm_bandwidth = harmonic_mean([trial.speed for trial in trials])
            bus_bandwidth = gigabytes(algorithm_bandwidth * bus_factor(name, count))
        rows.append([name, right, latency, bus_bandwidth])
    return aligned(rows, left=[0, 1])


def bus_factor(collective: str, ranks: int) -> float:
    """A collective's bus bandwidth divided by its algorithm bandwidth, which is its bytes divided by its time.

    It is the share of the bytes that each link has to carry (nccl-tests, doc/PERFORMANCE.md).
    """
    if collective in ("broadcast", "reduce"):
        return 1.0
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def table_of_links(findings: Findings) -> list[str]:
    """A table of every pair's bandwidth and latency; [] for one rank, and for more than fit a screen."""
    members = findings.members
    if not findings.links or len(members) > MOST_RANKS_WITH_A_TABLE_OF_LINKS:
        return []

    def cell(row: int, column: int) -> str:
        """What stands in the row of one rank and the column of another; with "!" where the data arrived changed."""
        if row == column:
            return "-"
        link = findings.links.get((min(row, column), max(row, column)))
        if link is None:
            return "none"
        is_above_diagonal = row < column
        if is_above_diagonal:
            text = gigabytes(link.speed)
        else:
            text = microseconds(link.seconds)
        if not link.right:
            text += "!"
        return text

    head = ["", *map(str, members)]
    rows = [head]
    for row in members:
        cells = [cell(row, column) for column in members]
        rows.append([f"rank {row}", *cells])
    return ["", "pairs: GB/s above the diagonal, microseconds below", *aligned(rows, left=[0])]
