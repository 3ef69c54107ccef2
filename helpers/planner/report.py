"""A plan in words, and as tables for JSON, which the doctor reads. Pure."""

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from helpers.command_line import aligned, of_bytes
from helpers.planner.conventions import GIGA
from helpers.planner.layout import Layout
from helpers.planner.memory import NOT_COUNTED
from helpers.planner.plan import MESH, Plan, Run
from helpers.planner.search import Search, words
from helpers.planner.step_time import COVERAGE


def of_time(seconds: float) -> str:
    """Seconds in the unit that is easy to read."""
    for name, size in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * size or (name == "s" and seconds >= 1):
            return f"{seconds / size:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def of_days(days: float) -> str:
    """Days with three digits that say something."""
    return f"{float(f'{days:.3g}'):,g} days"


def memory_lines(plan: Plan) -> Iterator[str]:
    """The first, the fullest and the last stage by kind."""
    stages, unit = plan.stages, plan.conventions.memory
    columns = sorted({0, plan.fullest, len(stages) - 1})
    kinds = {kind: None for stage in stages for kind in stage if kind != "total"}
    rows = [[unit] + [f"stage {stage}" for stage in columns]]
    for kind in [*kinds, "total"]:
        rows.append([kind] + [f"{stages[stage].get(kind, 0) / GIGA[unit]:.2f}" for stage in columns])
    yield "memory of a rank"
    yield from (f"  {line}" for line in aligned(rows, left=[0]))
    word = "fits in" if plan.fits else "does not fit in"
    yield f"  {word} {plan.cluster.memory / GIGA[unit]:.1f} {unit} of a GPU; not counted: {NOT_COUNTED}"


def collective_lines(plan: Plan) -> Iterator[str]:
    if not plan.collectives:
        return
    yield f"collectives of a step, on a rank of stage {plan.fullest}; seconds at the links' full speed"
    rows = [["", "ranks", "count", "size", "sent in all", "seconds"]]
    for group in plan.collectives:
        words = f"{group.dimension} {group.kind}, {group.phase}: {group.what}"
        sizes = [of_bytes(group.size), of_bytes(group.sent), of_time(group.seconds())]
        rows.append([words, f"{group.ranks}", f"{group.count}", *sizes])
    yield from (f"  {line}" for line in aligned(rows, left=[0]))


def step_lines(plan: Plan) -> Iterator[str]:
    step, use = plan.step, plan.utilization
    between = f"{of_time(step.low)} to {of_time(step.high)}"
    between += ", extrapolated: how often is not known" if step.extrapolated else f" in {COVERAGE:.0%}"
    yield f"step: {of_time(step.seconds)} ({between}), {plan.tokens / step.seconds:,.0f} tokens/s"
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    yield "  " + ", ".join(f"{name} {of_time(seconds)}" for name, seconds in parts if seconds)
    if step.extrapolated:
        yield f"  not among the fitted steps: {step.extrapolated}"
    bubble = f"bubble {plan.bubble:.1%} of the {plan.conventions.bubble} time"
    yield f"  {bubble}; MFU {use.mfu:.1%}, HFU {use.hfu:.1%} by {plan.conventions.flops}"
    if measured := plan.measured:
        use = measured.utilization
        yield (
            f"measured: {of_time(measured.seconds)} a step, the prediction is {measured.error:+.1%} off; "
            f"MFU {use.mfu:.2%}, HFU {use.hfu:.2%}, {use.achieved / 1e12:.4g} TFLOP/s a GPU"
        )


def run_lines(run: Run, save_seconds: float, restart_seconds: float) -> Iterator[str]:
    if run.days is not None:
        yield f"run: {run.tokens:.4g} tokens, {run.steps:,.0f} steps, {of_days(run.days)} without failures"
    if run.mttf_hours is not None and run.checkpoint_every_seconds is not None:
        yield (
            f"failures: one in {of_time(run.mttf_hours * 3600)}; save every {of_time(run.checkpoint_every_seconds)} "
            f"(a save takes {of_time(save_seconds)}, a restart {of_time(restart_seconds)}); goodput {run.goodput:.1%}"
        )
    if run.failures_between is not None and run.days_with_failures is not None:
        low, high = run.failures_between
        days, count = of_days(run.days_with_failures), f"{run.failures:.0f}"
        yield f"  {days} with about {count} failures ({low} to {high} in 95 %)"
    if run.cost is not None:
        yield f"cost: {run.cost:,.0f} in the price's currency"


def lines(plan: Plan) -> Iterator[str]:
    """The report of a plan, line by line."""
    model, cluster, count = plan.model, plan.cluster, plan.model.parameters(active=True)
    active = f" ({count:,} active)" if count != model.parameters() else ""
    flops = model.flops_per_token(plan.conventions.flops)
    yield f"{model.name}: {model.parameters():,} parameters{active}; {flops:.4g} FLOPs a token"
    limited = f", {cluster.limited_peak(plan.layout.dtype) / 1e12:.4g} at {cluster.power_limit:g} W"
    peak = f"{plan.peak / 1e12:.4g} TFLOP/s each" + limited * (cluster.power_limit > 0)
    yield f"{cluster.gpus} x {cluster.gpu} in {cluster.nodes} nodes, {peak}"
    yield "layout: " + ", ".join(f"{name} {str(value).lower()}" for name, value in settings(plan.layout).items())
    yield "conventions: " + ", ".join(f"{name} {value}" for name, value in asdict(plan.conventions).items())
    yield from memory_lines(plan)
    yield from collective_lines(plan)
    yield from step_lines(plan)
    yield from run_lines(plan.run, plan.job.save_seconds, plan.job.restart_seconds)
    limit, largest = plan.binds
    yield f"what binds: {limit}, most of it {largest}"
    seconds = f" ({of_time(plan.next.seconds)} a step)" if plan.next.seconds else ""
    yield f"try next: {plan.next.words}{seconds}"


def settings(layout: Layout) -> dict[str, Any]:
    """{field: value} of a layout where it differs from the defaults, and always its sizes."""
    always = (*MESH, "micro_batch", "batch")
    defaults = {field.name: field.default for field in fields(layout)}
    return {name: value for name, value in vars(layout).items() if name in always or value != defaults[name]}


def values_of(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def tables(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it: numbers in base units, seconds, bytes, FLOP/s and shares in 0..1."""
    model, cluster, step, measured = plan.model, plan.cluster, plan.step, plan.measured
    result: dict[str, Any] = {
        "conventions": asdict(plan.conventions),
        "model": {
            "name": model.name,
            "parameters": model.parameters(),
            "active": model.parameters(active=True),
            "flops_per_token": model.flops_per_token(plan.conventions.flops),
        },
        "cluster": values_of(cluster, "gpu", "gpus", "nodes", "power_limit", "link_in_node", "link_between")
        | {"peak": plan.peak},
        "layout": settings(plan.layout),
        "memory": {**values_of(plan, "stages", "fullest", "fits"), "limit": cluster.memory, "not_counted": NOT_COUNTED},
        "collectives": [
            values_of(group, "dimension", "kind", "phase", "what", "ranks", "count", "sent")
            | {"bytes": group.size, "seconds": group.seconds()}
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
        "binds": dict(zip(("limit", "largest"), plan.binds, strict=True)),
        "next": {**asdict(plan.next), "layout": settings(plan.next.layout) if plan.next.layout else None},
        "run": {name: value for name, value in asdict(plan.run).items() if value is not None},
    }
    if plan.run.goodput is not None:
        result["run"] |= values_of(plan.job, "save_seconds", "restart_seconds")
    if measured:
        result["measured"] = {**values_of(measured, "seconds", "error"), **asdict(measured.utilization)}
    return result


def search_tables(search: Search) -> dict[str, Any]:
    """A search as JSON has it, with the ten fastest layouts."""
    return {
        "conventions": vars(search.conventions),
        "tried": search.tried,
        "refused": search.refusals,
        "too_large": search.by_memory(),
        "fits": len(search.fits),
        "ranked": [
            {"seconds": fit.seconds, "low": fit.step.low, "high": fit.step.high, "bytes": fit.bytes}
            | {"words": words(fit.layout), "layout": vars(fit.layout)}
            for fit in search.fits[:10]
        ],
    }
