"""A plan in words: sections of rows, as lines of text for a terminal, and as HTML for the book's page.

Programs, such as the doctor, get the numbers as JSON.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import Any

from helpers.command_line import aligned, of_bytes
from helpers.planner.layout import Layout
from helpers.planner.memory import NOT_COUNTED, SAFE_SHARE
from helpers.planner.plan import Plan, largest
from helpers.planner.records import PlanError
from helpers.planner.search import GIB, Search
from helpers.planner.step_time import COVERAGE

# Fields of a layout that are shown even if they have their defaults.
ALWAYS_SHOWN = ("dp", "tp", "pp", "cp", "micro_batch", "batch")
LAYOUTS_SHOWN = 10  # of a search, the fastest ones


@dataclass(frozen=True)
class Row:
    """One thing that a plan says. A row may have only a label and a reason."""

    label: str
    value: str = ""
    unit: str = ""
    reason: str = ""  # what it depends on, or how sure it is


@dataclass(frozen=True)
class Section:
    """A title, and the rows below it."""

    title: str
    rows: list[Row]


# --- The sections -----------------------------------------------------------------------------------------------------


def describe(plan: Plan) -> list[Section]:
    """All that a plan says, as sections for a terminal, the answer first. A section without rows is left out.

    The memory of a rank is shown for three pipeline stages, if there are as many: the first one, the last one, and the
    one that needs most.
    """
    first_stage = 0
    last_stage = plan.layout.pp - 1
    sections = [answer(plan), assumptions(plan)]
    for stage in sorted({first_stage, plan.fullest, last_stage}):
        sections.append(memory_of_stage(plan, stage))
    sections += [messages(plan), parts_of_step(plan), whole_run(plan)]
    return [section for section in sections if section.rows]


def answer(plan: Plan) -> Section:
    """What most readers want to know of a plan: whether the job fits, how long a step takes, and what limits it."""
    step = plan.step
    tokens_per_second = plan.tokens / step.seconds
    if step.extrapolated:  # The planner's factors were not fitted on measurements of such a job.
        known_steps = "published steps of other programs"
    else:
        known_steps = "measured steps"
    # COVERAGE is the share of known steps whose time is within the range that the planner gives for them.
    time_range = f"{of_time(step.low)} to {of_time(step.high)}, which covers {COVERAGE:.0%} of {known_steps}"
    rows = [
        memory_row(plan),
        time_row("a step", step.seconds, reason=time_range),
        Row("speed", value=f"{tokens_per_second:,.0f}", unit="tokens/s"),
        percent_row("MFU", plan.utilization.mfu, reason=f"FLOPs counted by {plan.conventions.flops}"),
        percent_row("HFU", plan.utilization.hfu, reason="with what is recomputed"),
        Row("what binds", reason=f"{plan.bottleneck.limit}, most of it {plan.bottleneck.largest}"),
    ]
    return Section(f"{plan.model.name} on {plan.cluster.gpus} x {plan.cluster.gpu}", rows)


def memory_row(plan: Plan) -> Row:
    """Whether the fullest rank fits into its GPU's memory, how much it needs, and what takes most of it.

    A plan that fills more than SAFE_SHARE of the memory "may not fit", because real jobs need up to 18 % more memory
    than is planned.
    """
    available = f"{plan.cluster.memory / GIB:.1f} GiB"
    share = plan.bytes / plan.cluster.memory
    if share <= SAFE_SHARE:
        label = "fits"
        warning = ""
    else:
        warning = f"; a plan is safe up to {SAFE_SHARE:.0%}"
        if plan.fits:
            label = "may not fit"
        else:
            label = "does not fit"
    return Row(
        label=label,
        value=f"{plan.bytes / GIB:.1f}",
        unit="GiB",
        reason=f"{share:.0%} of the {available} of a GPU, most of it {largest(plan.kinds)}{warning}",
    )


def assumptions(plan: Plan) -> Section:
    """What the plan was asked, and by which conventions it answers."""
    model = plan.model
    cluster = plan.cluster
    parameters = model.parameters()
    active = model.parameters(active=True)
    rows = [Row("parameters", f"{parameters:,}")]
    if active != parameters:
        rows.append(Row("active parameters", f"{active:,}", reason="of one token"))

    flops = plan.conventions.flops
    limit = ""
    if cluster.power_limit:
        limited_peak = cluster.limited_peak(plan.layout.dtype)
        limit = f"{limited_peak / 1e12:.4g} at {cluster.power_limit:g} W"
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
    """Bytes that a rank of a pipeline stage needs, by kind, with their sum."""
    bytes_of_kind = plan.stages[stage]
    if bytes_of_kind["total"] < GIB:
        digits = 6  # With two digits, most rows of such a small model would be 0.00.
    else:
        digits = 2
    rows = []
    for kind, size in bytes_of_kind.items():
        if size != 0:
            rows.append(Row(kind, f"{size / GIB:.{digits}f}", "GiB"))

    title = "memory of a rank"
    if plan.layout.pp > 1:
        title += f" of stage {stage}"
        if stage == plan.fullest:
            title += ", the fullest"
    return Section(title, rows)


def messages(plan: Plan) -> Section:
    """The collectives of a step on a rank of the fullest stage: how many, how large, and how long they take."""
    rows = []
    for collective in plan.collectives:
        # Such as "dp all_gather, forward: layers", and "32 of 436 MB among 8 ranks; 12.2 GB sent in all".
        label = f"{collective.dimension} {collective.kind}, {collective.phase}: {collective.what}"
        size = of_bytes(collective.size)
        sent = of_bytes(collective.sent)
        reason = f"{collective.count} of {size} among {collective.ranks} ranks; {sent} sent in all"
        rows.append(time_row(label, collective.seconds(), reason))
    title = f"collectives of a step on a rank of stage {plan.fullest}, at the links' full speed"
    return Section(title, rows)


def parts_of_step(plan: Plan) -> Section:
    """Seconds of a step by what takes them, the longest first, and the pipeline's bubble."""
    seconds_of_part = plan.step.parts
    longest_first = sorted(seconds_of_part, key=lambda part: seconds_of_part[part], reverse=True)
    rows = []
    for part in longest_first:
        if seconds_of_part[part] > 0:
            rows.append(time_row(part, seconds_of_part[part]))
    if plan.step.extrapolated:
        rows.append(Row("not fitted", reason=plan.step.extrapolated))
    rows.append(percent_row("bubble", plan.bubble, "of the ideal time"))
    return Section("parts of a step", rows)


def whole_run(plan: Plan) -> Section:
    """Days, failures, checkpoints and cost of the whole run. What is not known, which is None in a Run, has no row."""
    run = plan.run
    rows = []
    if run.days is not None:
        rows.append(Row("tokens", f"{run.tokens:.4g}", reason=f"in {run.steps:,.0f} steps"))
        rows.append(Row("without failures", f"{run.days:,.1f}", "days"))
    # These three are either all known or all unknown.
    if run.mttf_hours is not None and run.checkpoint_every_seconds is not None and run.goodput is not None:
        seconds_to_failure = run.mttf_hours * 3600
        rows.append(time_row("a failure in", seconds_to_failure))
        save = of_time(plan.job.save_seconds)
        restart = of_time(plan.job.restart_seconds)
        cost_of_failure = f"a save takes {save}, a restart {restart}"
        rows.append(time_row("save every", run.checkpoint_every_seconds, cost_of_failure))
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
    """The plan as tables for JSON. Numbers are in base units: seconds, bytes, FLOP/s, and shares in 0..1."""
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
    """A search as a table for JSON, with the fastest layouts."""
    return {
        "conventions": asdict(search.conventions),
        "tried": search.tried,
        "refused": search.refusals.total(),
        "too_large": len(search.too_large),
        "fits": len(search.fits),
        "ranked": [asdict(fit) for fit in search.fits[:LAYOUTS_SHOWN]],
    }


# --- For the book's page ----------------------------------------------------------------------------------------------


def plan_html(plan: Plan, command: str) -> str:
    """A plan as HTML for the book's page: a bar of memory, the answer as a list, and memory by kind as a table.

    Below them is ``command``, the line for a terminal that prints the whole plan.
    """
    if plan.fits:
        css_class = "fits"
    else:
        css_class = "too-large"
    items = "".join(f"<li>{row_html(row)}</li>" for row in answer(plan).rows)
    answer_list = f'<ul class="{css_class}">{items}</ul>'

    memory = memory_of_stage(plan, plan.fullest)
    table_rows = []
    for number, row in enumerate(memory.rows):
        label = escape(row.label)
        if row.label != "total":
            spot_in_colour_of_bar = f'<i class="kind-{number}"></i>'
            label = spot_in_colour_of_bar + label
        table_rows.append([label, row.value])
    memory_table = table_html(head=[memory.title, "GiB"], rows=table_rows)

    command_block = f"<pre><code>{escape(command)}</code></pre>"
    return bar_html(plan) + answer_list + memory_table + command_block


def search_html(search: Search) -> str:
    """A search as HTML for the book's page: a table of the fastest layouts, and why not other ones.

    Each layout has a button, which puts it into the inputs of the page.
    """
    if not search.fits:
        return error_html(search.error())
    table_rows = []
    for fit in search.fits[:LAYOUTS_SHOWN]:
        # The page fills its inputs with these fields, and ignores those for which it has none.
        fields_of_layout = escape(as_argument(asdict(fit.layout)))
        table_rows.append(
            [
                escape(fit.layout.summary),
                of_time(fit.seconds),
                of_time(fit.step.low),
                of_time(fit.step.high),
                f"{fit.bytes / GIB:.1f}",
                f'<button type="button" data-layout="{fields_of_layout}">use</button>',
            ]
        )
    table = table_html(["layout", "a step", "from", "to", "GiB", "take over"], table_rows)
    sentences = [*search.reasons(), search.margin]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<p>{escape(search.counts)}</p>{table}<ul>{items}</ul>"


def error_html(error: Exception) -> str:
    """What is wrong with the inputs and what to do next, as HTML. The error is a PlanError or an ArithmeticError."""
    if isinstance(error, PlanError):
        message = str(error)
    else:
        message = "A number is too large or too small.\nGive a real job's."
    problem, _, hint = message.partition("\n")
    return f'<p class="planner-error" role="alert"><strong>{escape(problem)}</strong> {escape(hint)}</p>'


def row_html(row: Row) -> str:
    """A row as the content of a list item in HTML. A row without a value shows only its label and its reason."""
    label = escape(row.label)
    reason = escape(row.reason)
    if not row.value:
        return f"<strong>{label}:</strong> {reason}"
    return f"<strong>{label}: {escape(row.value)} {escape(row.unit)}</strong> {reason}"


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """A table in HTML. The cells of its head are text, and those of its rows are HTML already."""
    header = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f"<table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def bar_html(plan: Plan) -> str:
    """A bar in HTML of what a rank's memory holds: a strip for each kind, and a mark at the GPU's limit."""
    bytes_of_full_width = max(plan.bytes, plan.cluster.memory)
    percent_of_byte = 100 / bytes_of_full_width
    kinds = [kind for kind, size in plan.kinds.items() if size != 0]
    strips = ""
    for number, kind in enumerate(kinds):
        width = f"{plan.kinds[kind] * percent_of_byte:.3f}%"
        strips += f'<i class="kind-{number}" style="width:{width}" title="{escape(kind)}"></i>'
    limit = f"{plan.cluster.memory * percent_of_byte:.3f}%"
    return f'<div class="planner-bar" aria-hidden="true">{strips}<b style="left:{limit}"></b></div>'


# --- Numbers and settings as text -------------------------------------------------------------------------------------


def time_row(label: str, seconds: float, reason: str = "") -> Row:
    """A row whose value is a time, in a unit in which it is easy to read."""
    value, unit = of_time(seconds).split(" ")
    return Row(label, value, unit, reason)


def percent_row(label: str, share: float, reason: str = "") -> Row:
    """A row whose value is a share in 0..1, in percent."""
    return Row(label, f"{100 * share:.1f}", "%", reason)


def of_time(seconds: float) -> str:
    """Seconds as a number and a unit in which it is easy to read: "90 s", "3.5 h", "12 ms".

    A larger unit is taken from two of it on: 90 s are 90 s, and 120 s are 2 min.
    """
    seconds_of_unit = {"days": 86400, "h": 3600, "min": 60}  # the largest first
    for unit, size in seconds_of_unit.items():
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"


def settings(layout: Layout) -> dict[str, Any]:
    """{field: value} of a layout: the fields that differ from the defaults, and those of ALWAYS_SHOWN."""
    result = {}
    for field in fields(layout):
        value = getattr(layout, field.name)
        if field.name in ALWAYS_SHOWN or value != field.default:
            result[field.name] = value
    return result


def in_words(values: dict[str, Any]) -> str:
    """{name: value} as text for a reader: "a 1, b true"."""
    return ", ".join(f"{name} {setting(value)}" for name, value in values.items())


def as_argument(values: dict[str, Any]) -> str:
    """{name: value} as text for a command's argument or a button of the page: "a=1,b=true"."""
    return ",".join(f"{name}={setting(value)}" for name, value in values.items())


def setting(value: object) -> str:
    """A value as text, as TOML and JSON write it but without quotation marks: True is "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
