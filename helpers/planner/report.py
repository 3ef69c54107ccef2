"""What a plan says, as sections of rows: as lines of text for a terminal, as tables for the book's page. Pure.

Programs, such as the doctor, get the same records as JSON.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from helpers.command_line import aligned, of_bytes
from helpers.planner.conventions import GIGA
from helpers.planner.layout import Layout
from helpers.planner.memory import NOT_COUNTED
from helpers.planner.plan import Plan, largest
from helpers.planner.records import PlanError
from helpers.planner.search import GIB, Search
from helpers.planner.step_time import COVERAGE

ALWAYS_SHOWN = ("dp", "tp", "pp", "cp", "micro_batch", "batch")  # fields of a layout


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


# --- The sections -----------------------------------------------------------------------------------------------------


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
    """Whether the job fits, how long a step takes, and what limits it."""
    unit = plan.conventions.memory
    giga = GIGA[unit]
    verdict = "fits" if plan.fits else "does not fit"
    memory = f"of {plan.cluster.memory / giga:.1f} {unit} of a GPU, most of it {largest(plan.kinds)}"
    step = plan.step
    coverage = f"which covers {COVERAGE:.0%} of measured steps"
    if step.extrapolated:
        coverage = f"which covers {COVERAGE:.0%} of published steps of other programs"
    rows = [
        Row(verdict, f"{plan.bytes / giga:.1f}", unit, memory),
        time_row("a step", step.seconds, f"{of_time(step.low)} to {of_time(step.high)}, {coverage}"),
        Row("speed", f"{plan.tokens / step.seconds:,.0f}", "tokens/s"),
        percent_row("MFU", plan.utilization.mfu, f"FLOPs counted by {plan.conventions.flops}"),
        percent_row("HFU", plan.utilization.hfu, "with what is recomputed"),
        Row("what binds", reason=f"{plan.bottleneck.limit}, most of it {plan.bottleneck.largest}"),
    ]
    return Section(f"{plan.model.name} on {plan.cluster.gpus} x {plan.cluster.gpu}", rows)


def assumptions(plan: Plan) -> Section:
    """What the plan was asked, and by which conventions it answers."""
    model = plan.model
    cluster = plan.cluster
    flops = plan.conventions.flops
    rows = [Row("parameters", f"{model.parameters():,}")]
    active = model.parameters(active=True)
    if active != model.parameters():
        rows.append(Row("active parameters", f"{active:,}", reason="of one token"))
    limit = ""
    if cluster.power_limit:
        limited = cluster.limited_peak(plan.layout.dtype)
        limit = f"{limited / 1e12:.4g} at {cluster.power_limit:g} W"
    rows += [
        Row("FLOPs a token", f"{model.flops_per_token(flops):.4g}", reason=f"by {flops}"),
        Row("nodes", f"{cluster.nodes}", reason=f"of {cluster.gpus_per_node} GPUs"),
        Row("peak of a GPU", f"{plan.peak / 1e12:.4g}", "TFLOP/s", limit),
        Row("not counted", reason=NOT_COUNTED),
        Row("layout", reason=in_words(settings(plan.layout))),
        Row("conventions", reason=in_words(asdict(plan.conventions))),
    ]
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
        size = f"{group.count} of {of_bytes(group.size)} among {group.ranks} ranks"
        rows.append(time_row(label, group.seconds(), f"{size}; {of_bytes(group.sent)} sent in all"))
    return Section(f"collectives of a step on a rank of stage {plan.fullest}, at the links' full speed", rows)


def parts_of_step(plan: Plan) -> Section:
    """Seconds of a step by what takes them, the longest first."""
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
        rows.append(Row("without failures", f"{run.days:,.1f}", "days"))
    if run.mttf_hours is not None and run.checkpoint_every_seconds is not None and run.goodput is not None:
        costs = f"a save takes {of_time(plan.job.save_seconds)}, a restart {of_time(plan.job.restart_seconds)}"
        rows.append(time_row("a failure in", run.mttf_hours * 3600))
        rows.append(time_row("save every", run.checkpoint_every_seconds, costs))
        rows.append(percent_row("goodput", run.goodput))
    if run.days_with_failures is not None:
        failures = f"with about {run.failures:.0f} failures"
        rows.append(Row("with failures", f"{run.days_with_failures:,.1f}", "days", failures))
    if run.cost is not None:
        rows.append(Row("cost", f"{run.cost:,.0f}", reason="in the price's currency"))
    return Section("the whole run", rows)


# --- For a terminal ---------------------------------------------------------------------------------------------------


def lines(plan: Plan) -> Iterator[str]:
    """The report of a plan, line by line."""
    for section in describe(plan):
        yield section.title
        rows = [[row.label, row.value, row.unit, row.reason] for row in section.rows]
        for line in aligned(rows, left=[0, 2, 3]):
            yield f"  {line}"


# --- For programs -----------------------------------------------------------------------------------------------------


def tables(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it: numbers in base units, seconds, bytes, FLOP/s and shares in 0..1."""
    return {
        "model": {**asdict(plan.model), "parameters": plan.model.parameters()},
        "cluster": {**asdict(plan.cluster), "gpus": plan.cluster.gpus, "peak": plan.peak},
        "layout": asdict(plan.layout),
        "conventions": asdict(plan.conventions),
        "memory": {"stages": plan.stages, "fits": plan.fits, "limit": plan.cluster.memory},
        "collectives": [asdict(group) for group in plan.collectives],
        "step": {**asdict(plan.step), **asdict(plan.utilization), "bubble": plan.bubble, "tokens": plan.tokens},
        "run": asdict(plan.run),
    }


def search_tables(search: Search) -> dict[str, Any]:
    """A search as JSON has it, with the ten fastest layouts."""
    return {
        "conventions": asdict(search.conventions),
        "tried": search.tried,
        "refused": search.refusals.total(),
        "too_large": len(search.too_large),
        "fits": len(search.fits),
        "ranked": [asdict(fit) for fit in search.fits[:10]],
    }


# --- For the book's page ----------------------------------------------------------------------------------------------


def plan_html(plan: Plan, command: str) -> str:
    """The answer, memory by kind, and the command that prints all of the plan."""
    css_class = "fits" if plan.fits else "too-large"
    items = ""
    for row in answer(plan).rows:
        items += f"<li>{row_html(row)}</li>"
    memory = memory_of_stage(plan, plan.fullest)
    rows = []
    for number, row in enumerate(memory.rows):
        color = "" if row.label == "total" else f'<i class="kind-{number}"></i>'
        rows.append([color + escape(row.label), row.value])
    return (
        f'{bar_html(plan)}<ul class="{css_class}">{items}</ul>'
        f"{table_html([memory.title, plan.conventions.memory], rows)}<pre><code>{escape(command)}</code></pre>"
    )


def search_html(search: Search) -> str:
    """The ten fastest layouts that fit, each with a button that takes it over, and why not their neighbours."""
    if not search.fits:
        return error_html(search.error())
    rows = []
    for fit in search.fits[:10]:
        times = [of_time(seconds) for seconds in (fit.seconds, fit.step.low, fit.step.high)]
        # The page fills its inputs with these fields, and ignores those for which it has none.
        button = f'<button type="button" data-layout="{escape(as_argument(asdict(fit.layout)))}">use</button>'
        rows.append([escape(fit.layout.summary), *times, f"{fit.bytes / GIB:.1f}", button])
    table = table_html(["layout", "a step", "from", "to", "GiB", "take over"], rows)
    items = "".join(f"<li>{escape(line)}</li>" for line in (*search.reasons(), search.margin))
    return f"<p>{escape(search.counts)}</p>{table}<ul>{items}</ul>"


def error_html(error: Exception) -> str:
    """What is wrong, and the next step."""
    message = "A number is too large or too small.\nGive a real job's."
    if isinstance(error, PlanError):
        message = str(error)
    problem, _, hint = message.partition("\n")
    return f'<p class="planner-error" role="alert"><strong>{escape(problem)}</strong> {escape(hint)}</p>'


def row_html(row: Row) -> str:
    if not row.value:
        return f"<strong>{escape(row.label)}:</strong> {escape(row.reason)}"
    return f"<strong>{escape(row.label)}: {escape(row.value)} {escape(row.unit)}</strong> {escape(row.reason)}"


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """A table. The cells of its rows are HTML; all columns but the first are numbers."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def bar_html(plan: Plan) -> str:
    """Memory by kind, drawn against the GPU's limit: a strip for each kind, and a mark where the memory ends."""
    kinds = {kind: size for kind, size in plan.kinds.items() if size}
    percent = 100 / max(plan.bytes, plan.cluster.memory)
    strips = ""
    for number, (kind, size) in enumerate(kinds.items()):
        strips += f'<i class="kind-{number}" style="width:{size * percent:.3f}%" title="{escape(kind)}"></i>'
    mark = f'<b style="left:{plan.cluster.memory * percent:.3f}%"></b>'
    return f'<div class="planner-bar" aria-hidden="true">{strips}{mark}</div>'


# --- Numbers and settings as text -------------------------------------------------------------------------------------


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


def settings(layout: Layout) -> dict[str, Any]:
    """{field: value} of a layout where it differs from the defaults, and always its sizes."""
    result = {}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in ALWAYS_SHOWN or value != field.default:
            result[field.name] = value
    return result


def in_words(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {setting(value)}" for name, value in values.items())


def as_argument(values: dict[str, Any]) -> str:
    """The values as text for a command's argument or a button of the page: a=1,b=true."""
    return ",".join(f"{name}={setting(value)}" for name, value in values.items())


def setting(value: object) -> str:
    """A value as TOML and JSON write it, without quotation marks."""
    return str(value).lower() if isinstance(value, bool) else str(value)
