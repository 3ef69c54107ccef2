"""What a plan says, as sections of rows: report.py writes them as text, html_report.py for a page or a notebook."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from helpers.command_line import of_bytes
from helpers.planner.conventions import GIGA
from helpers.planner.layout import Layout
from helpers.planner.memory import NOT_COUNTED
from helpers.planner.plan import MESH, Plan, largest
from helpers.planner.step_time import COVERAGE


@dataclass(frozen=True)
class Row:
    """One thing that a plan says. A row may have only a label and a reason."""

    label: str
    value: str = ""
    unit: str = ""
    reason: str = ""  # what it depends on, or how sure it is


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[Row]


def describe(plan: Plan) -> list[Section]:
    """All that a plan says, the answer first."""
    shown_stages = sorted({0, plan.fullest, plan.layout.pp - 1})
    sections = [
        answer(plan),
        assumptions(plan),
        *(memory_of_stage(plan, stage) for stage in shown_stages),
        messages(plan),
        parts_of_step(plan),
        whole_run(plan),
    ]
    return [section for section in sections if section.rows]


def answer(plan: Plan) -> Section:
    """Whether the job fits, how long a step takes, and what to try."""
    unit = plan.conventions.memory
    limit = f"{plan.cluster.memory / GIGA[unit]:.1f} {unit}"
    kinds = {kind: size for kind, size in plan.stages[plan.fullest].items() if kind != "total"}
    memory = f"of {limit} of a GPU, most of it {largest(kinds)}"
    step = plan.step
    coverage = f"which covers {COVERAGE:.0%} of measured steps"
    if step.extrapolated:
        coverage = "with unknown coverage because it is extrapolated"
    rows = [
        Row("fits" if plan.fits else "does not fit", f"{plan.bytes / GIGA[unit]:.1f}", unit, memory),
        time_row("a step", step.seconds, f"{of_time(step.low)} to {of_time(step.high)}, {coverage}"),
        Row("speed", f"{plan.tokens / step.seconds:,.0f}", "tokens/s"),
        percent_row("MFU", plan.utilization.mfu, f"FLOPs counted by {plan.conventions.flops}"),
        percent_row("HFU", plan.utilization.hfu, "with what is recomputed"),
    ]
    measured = plan.measured
    if measured:
        use = measured.utilization
        rows += [
            time_row("measured step", measured.seconds, f"the prediction is {measured.error:+.1%} off"),
            Row("measured MFU", f"{100 * use.mfu:.2f}", "%"),
            Row("measured HFU", f"{100 * use.hfu:.2f}", "%"),
            Row("measured speed", f"{use.achieved / 1e12:.4g}", "TFLOP/s", "of a GPU"),
        ]
    rows.append(Row("what binds", reason=f"{plan.bottleneck.limit}, most of it {plan.bottleneck.largest}"))
    following = plan.next.words
    if plan.next.seconds:
        following += f" ({of_time(plan.next.seconds)} a step)"
    rows.append(Row("try next", reason=following))
    return Section(f"{plan.model.name} on {plan.cluster.gpus} x {plan.cluster.gpu}", rows)


def assumptions(plan: Plan) -> Section:
    """What the plan was asked, and by which conventions it answers."""
    model = plan.model
    cluster = plan.cluster
    rows = [Row("parameters", f"{model.parameters():,}")]
    active = model.parameters(active=True)
    if active != model.parameters():
        rows.append(Row("active parameters", f"{active:,}", reason="of one token"))
    flops = plan.conventions.flops
    rows.append(Row("FLOPs a token", f"{model.flops_per_token(flops):.4g}", reason=f"by {flops}"))
    peak_reason = ""
    if cluster.power_limit:
        limited = cluster.limited_peak(plan.layout.dtype)
        peak_reason = f"{limited / 1e12:.4g} at {cluster.power_limit:g} W"
    rows.append(Row("nodes", f"{cluster.nodes}", reason=f"of {cluster.gpus_per_node} GPUs"))
    rows.append(Row("peak of a GPU", f"{plan.peak / 1e12:.4g}", "TFLOP/s", peak_reason))
    rows.append(Row("not counted", reason=NOT_COUNTED))
    rows.append(Row("layout", reason=in_words(settings(plan.layout))))
    rows.append(Row("conventions", reason=in_words(asdict(plan.conventions))))
    return Section("planned for", rows)


def memory_of_stage(plan: Plan, stage: int) -> Section:
    """Bytes of a rank by kind."""
    unit = plan.conventions.memory
    kinds = plan.stages[stage]
    digits = 2 if kinds["total"] >= GIGA[unit] else 6
    rows = []
    for kind, size in kinds.items():
        if size:
            rows.append(Row(kind, f"{size / GIGA[unit]:.{digits}f}", unit))
    title = "memory of a rank"
    if plan.layout.pp > 1:
        title += f" of stage {stage}"
        if stage == plan.fullest:
            title += ", the fullest"
    return Section(title, rows)


def messages(plan: Plan) -> Section:
    """The collectives of a step."""
    rows = []
    for group in plan.collectives:
        label = f"{group.dimension} {group.kind}, {group.phase}: {group.what}"
        reason = (
            f"{group.count} of {of_bytes(group.size)} among {group.ranks} ranks; {of_bytes(group.sent)} sent in all"
        )
        rows.append(time_row(label, group.seconds(), reason))
    return Section(f"collectives of a step on a rank of stage {plan.fullest}, at the links' full speed", rows)


def parts_of_step(plan: Plan) -> Section:
    parts = sorted(plan.step.parts.items(), key=lambda part: -part[1])
    rows = [time_row(name, seconds) for name, seconds in parts if seconds]
    if plan.step.extrapolated:
        rows.append(Row("not fitted", reason=plan.step.extrapolated))
    rows.append(percent_row("bubble", plan.bubble, f"of the {plan.conventions.bubble} time"))
    return Section("parts of a step", rows)


def whole_run(plan: Plan) -> Section:
    """Days, failures, checkpoints and cost, where they are known."""
    run = plan.run
    rows = []
    if run.days is not None:
        rows.append(Row("tokens", f"{run.tokens:.4g}", reason=f"in {run.steps:,.0f} steps"))
        rows.append(Row("without failures", of_days(run.days), "days"))
    if run.mttf_hours is not None and run.checkpoint_every_seconds is not None and run.goodput is not None:
        save = of_time(plan.job.save_seconds)
        restart = of_time(plan.job.restart_seconds)
        rows.append(time_row("a failure in", run.mttf_hours * 3600))
        rows.append(time_row("save every", run.checkpoint_every_seconds, f"a save takes {save}, a restart {restart}"))
        rows.append(Row("goodput", f"{100 * run.goodput:.1f}", "%"))
    if run.failures_between is not None and run.days_with_failures is not None:
        low, high = run.failures_between
        reason = f"with about {run.failures:.0f} failures ({low} to {high} in 95 %)"
        rows.append(Row("with failures", of_days(run.days_with_failures), "days", reason))
    if run.cost is not None:
        rows.append(Row("cost", f"{run.cost:,.0f}", reason="in the price's currency"))
    return Section("the whole run", rows)


# --- Numbers as text --------------------------------------------------------------------------------------------------


def time_row(label: str, seconds: float, reason: str = "") -> Row:
    value, unit = of_time(seconds).split(" ")
    return Row(label, value, unit, reason)


def percent_row(label: str, share: float, reason: str = "") -> Row:
    return Row(label, f"{100 * share:.1f}", "%", reason)


def of_time(seconds: float) -> str:
    """Seconds as a number and a unit in which it is easy to read."""
    units = (("days", 86400), ("h", 3600), ("min", 60))
    for name, size in units:
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def of_days(days: float) -> str:
    """Days to three digits."""
    return f"{float(f'{days:.3g}'):,g}"


def settings(layout: Layout) -> dict[str, Any]:
    """{field: value} of a layout where it differs from the defaults, and always its sizes."""
    always = (*MESH, "micro_batch", "batch")
    result = {}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in always or value != field.default:
            result[field.name] = value
    return result


def in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {setting(value)}" for name, value in values.items())


def as_argument(values: dict[str, Any]) -> str:
    """As a command's argument has them, and a button of the page: a=1,b=true."""
    return ",".join(f"{name}={setting(value)}" for name, value in values.items())


def setting(value: object) -> str:
    """As TOML and JSON write it, without quotation marks."""
    return str(value).lower() if isinstance(value, bool) else str(value)
