"""A plan as lines of text, and plans and searches as tables for JSON, which the doctor reads. Pure."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from helpers.command_line import aligned
from helpers.planner.description import describe, settings
from helpers.planner.memory import NOT_COUNTED
from helpers.planner.plan import Plan
from helpers.planner.search import Search
from helpers.planner.step_time import COVERAGE


def lines(plan: Plan) -> Iterator[str]:
    """The report of a plan, line by line."""
    for section in describe(plan):
        yield section.title
        rows = [[row.label, row.value, row.unit, row.reason] for row in section.rows]
        for line in aligned(rows, left=[0, 2, 3]):
            yield f"  {line}"


def tables(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it: numbers in base units, seconds, bytes, FLOP/s and shares in 0..1."""
    model = plan.model
    cluster = plan.cluster
    step = plan.step
    run = {name: value for name, value in asdict(plan.run).items() if value is not None}
    if plan.run.goodput is not None:
        run["save_seconds"] = plan.job.save_seconds
        run["restart_seconds"] = plan.job.restart_seconds
    result: dict[str, Any] = {
        "conventions": asdict(plan.conventions),
        "model": {
            "name": model.name,
            "parameters": model.parameters(),
            "active": model.parameters(active=True),
            "flops_per_token": model.flops_per_token(plan.conventions.flops),
        },
        "cluster": {
            "gpu": cluster.gpu,
            "gpus": cluster.gpus,
            "nodes": cluster.nodes,
            "power_limit": cluster.power_limit,
            "link_in_node": cluster.link_in_node,
            "link_between": cluster.link_between,
            "peak": plan.peak,
        },
        "layout": settings(plan.layout),
        "memory": {
            "stages": plan.stages,
            "fullest": plan.fullest,
            "fits": plan.fits,
            "limit": cluster.memory,
            "not_counted": NOT_COUNTED,
        },
        "collectives": [
            {
                "dimension": group.dimension,
                "kind": group.kind,
                "phase": group.phase,
                "what": group.what,
                "ranks": group.ranks,
                "count": group.count,
                "sent": group.sent,
                "bytes": group.size,
                "seconds": group.seconds(),
            }
            for group in plan.collectives
        ],
        "step": {
            **asdict(step),
            "coverage": None if step.extrapolated else COVERAGE,
            "bubble": plan.bubble,
            "tokens": plan.tokens,
            "tokens_per_second": plan.tokens / step.seconds,
            **asdict(plan.utilization),
        },
        "binds": asdict(plan.bottleneck),
        "next": {**asdict(plan.next), "layout": settings(plan.next.layout) if plan.next.layout else None},
        "run": run,
    }
    if plan.measured:
        measured = asdict(plan.measured)
        result["measured"] = {**measured.pop("utilization"), **measured}
    return result


def search_tables(search: Search) -> dict[str, Any]:
    """A search as JSON has it, with the ten fastest layouts."""
    return {
        "conventions": asdict(search.conventions),
        "tried": search.tried,
        "refused": search.refusals,
        "too_large": search.too_large_by_memory(),
        "fits": len(search.fits),
        "ranked": [
            {
                "seconds": fit.seconds,
                "low": fit.step.low,
                "high": fit.step.high,
                "bytes": fit.bytes,
                "words": fit.layout.summary,
                "layout": asdict(fit.layout),
            }
            for fit in search.fits[:10]
        ],
    }
