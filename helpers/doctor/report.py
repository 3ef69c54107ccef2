"""The doctor's report, in 80 columns. It only computes."""

import math
import textwrap
from collections.abc import Iterator
from itertools import groupby
from statistics import harmonic_mean, mean

from helpers.command_line import aligned
from helpers.doctor.findings import Findings, notes, problems, slowest, span
from helpers.doctor.plan import Plan, compared


def short(number: float) -> str:
    """A number as text with three digits, or with all digits before the point: ``0.0123``, ``1.23``, ``1234``."""
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def who_is_where(findings: Findings) -> list[str]:
    """A table of the ranks' hosts, devices and interfaces; neighbouring ranks that share all three share a line."""

    def place(rank: int) -> tuple[str, ...]:
        facts = findings.facts[rank]
        return facts.host[:20], facts.model or facts.device, f"{facts.interface} {facts.address or ''}"

    rows = [["rank", "local", "host", "device", "interface"]]
    for (host, device, interface), group in groupby(sorted(findings.facts), place):
        ranks = list(group)
        local_ranks = span(sorted(findings.facts[rank].local_rank for rank in ranks))
        rows.append([text[:28] for text in (span(ranks), local_ranks, host, device[:24], interface)])
    return aligned(rows, left=range(5))


def table_of_collectives(findings: Findings) -> list[str]:
    """A table of each collective: right or not, latency in microseconds, bus bandwidth in GB/s.

    The bus bandwidth is that of nccl-tests, doc/PERFORMANCE.md: it does not depend on the number of ranks.
    """
    if not findings.collectives:
        return ["no process group: no collective was tried"]
    count = len(findings.members)
    share = (count - 1) / count
    factors = {"all_reduce": 2 * share, "broadcast": 1, "reduce": 1}  # bus bandwidth / algorithm bandwidth
    size = "64" if findings.device == "cuda" else "4"
    rows = [["collective", "right", "us (4 KiB)", f"GB/s busbw ({size} MiB)"]]
    for name, by_rank in findings.collectives.items():
        trials = [trial for trial in by_rank.values() if trial]
        right = "yes" if len(trials) == len(by_rank) and all(trial.right for trial in trials) else "NO"
        latency = bandwidth = ""
        if trials and count > 1:
            latency = f"{1e6 * mean(trial.seconds for trial in trials):.0f}"
            algbw = harmonic_mean([trial.speed for trial in trials])  # as bytes divided by the mean of the ranks' times
            bandwidth = short(algbw * factors.get(name, share) / 1e9)
        rows.append([name, right, latency, bandwidth])
    return aligned(rows, left=[0, 1])


def table_of_links(findings: Findings) -> list[str]:
    """A table of every pair's bandwidth and latency; [] for one rank, and for more than a screen has room for."""
    members = findings.members
    if not findings.links or not 1 < len(members) <= 8:
        return []

    def cell(a: int, b: int) -> str:
        if a == b:
            return "-"
        link = findings.links.get((min(a, b), max(a, b)))
        if not link:
            return "none"
        return (short(link.speed / 1e9) if a < b else f"{1e6 * link.seconds:.0f}") + ("" if link.right else "!")

    rows = [["", *map(str, members)], *([f"rank {a}", *(cell(a, b) for b in members)] for a in members)]
    return ["", "pairs: GB/s above the diagonal, microseconds below", *aligned(rows, left=[0])]


def summary(findings: Findings) -> Iterator[tuple[str, str]]:
    """Yields a line on each thing that was looked at, as (label, text)."""
    facts = list(findings.facts.values())
    versions = {name: sorted({getattr(own, name) for own in facts} - {""}) for name in ("python", "torch", "NCCL")}
    yield "versions", ", ".join(f"{name} {' and '.join(each)}" for name, each in versions.items() if each)
    free = [own.memory for own in facts if own.memory is not None]
    yield "memory", f"{min(free) / 1e9:.1f} GB of shared memory free" if free else "shared memory: not known here"
    yield "store", f"{findings.master}, reached by {len(facts)} of {findings.world_size}"
    tries = sum(bool(own.address) for own in facts) * (len(facts) - 1)
    successes = tries - sum(map(len, findings.unreached.values()))
    yield "tcp", f"{successes} of {tries} connections between ranks open" if tries else "one rank: no connections"
    apart = 1e3 * (max(findings.clocks.values()) - min(findings.clocks.values()))
    yield "clocks", f"at most {apart:.0f} ms apart" if apart > 1 else "less than 1 ms apart"
    pairs, right = math.comb(len(findings.members), 2), sum(link.right for link in findings.links.values())
    yield "links", f"{right} of {pairs} pairs right" if pairs else "one rank: no links"
    for rank, speed, middle in slowest(findings.alone):
        yield "slowest", f"rank {rank} computes in {middle / speed:.2f} times the median"
    for (a, b), speed, middle in slowest({pair: link.speed for pair, link in findings.links.items()}):
        yield "", f"ranks {a} and {b}: {short(speed / 1e9)} GB/s, the median pair {short(middle / 1e9)}"


def report(findings: Findings, plan: Plan | None = None) -> tuple[str, int]:
    """(the report's text, the exit status: 0 if nothing is wrong, or 1)."""
    count, hosts = findings.world_size, len(findings.hosts)
    lines = [f"{count} rank{'s' * (count > 1)} on {hosts} host{'s' * (hosts > 1)}, {findings.backend}", ""]
    lines += [*who_is_where(findings), "", *(f"{label:10}{text}" for label, text in summary(findings)), ""]
    lines += table_of_collectives(findings)
    lines += [*table_of_links(findings), ""]
    wrong = problems(findings)
    if plan:
        comparison = list(compared(findings, plan))
        lines.append(f"the plan of {plan.title}")
        lines += [*(line for line, _ in comparison), ""]
        wrong += [problem for _, problem in comparison if problem]
    for label, entries in (("WRONG", wrong), ("note", notes(findings))):
        for what, remedy in entries:
            what = "R" + what[1:] if what.startswith("rank") else what
            lines += textwrap.wrap(what, 80, initial_indent=f"{label:7}", subsequent_indent=" " * 7)
            lines += textwrap.wrap(remedy, 80, initial_indent="  try: ", subsequent_indent=" " * 7)
    lines.append(f"{len(wrong)} problem{'s' * (len(wrong) > 1)} found" if wrong else "Nothing is wrong here.")
    return "\n".join(lines), int(bool(wrong))
