"""The planner as a form: its inputs, and an answer as HTML and as numbers.

The book's page (in the browser, by Pyodide), the widget and the tests call the same functions. Pure.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any, get_args

from helpers.planner import cluster as clusters
from helpers.planner import model as models
from helpers.planner.layout import Layout
from helpers.planner.plan import Plan, plan
from helpers.planner.records import PlanError, refuse
from helpers.planner.report import of_time, search_tables, tables
from helpers.planner.search import GIB, Search, search, words
from helpers.planner.step_time import COVERAGE

Values = Mapping[str, str]


@dataclass(frozen=True)
class Input:
    """A field of a record, with what it may be. Without choices it is a whole number."""

    name: str
    label: str
    value: str = ""  # at first; empty: as in the preset
    choices: tuple[str, ...] = ()
    smallest: int = 1


def literals(name: str) -> tuple[str, ...]:
    """The values that a field of Layout may have."""
    return tuple(map(str, get_args(Layout.__annotations__[name])))


GROUPS: dict[str, tuple[Input, ...]] = {
    "Model": (
        Input("model", "preset", "llama3-8b", tuple(models.PRESETS)),
        Input("layers", "layers"),
        Input("width", "width"),
        Input("heads", "heads"),
        Input("kv_heads", "key/value heads"),
        Input("ffn", "MLP width"),
        Input("vocab", "vocabulary"),
        Input("experts", "experts"),
        Input("active_experts", "active experts"),
        Input("seq", "tokens a sample"),
    ),
    "Cluster and step": (
        Input("cluster", "GPU", "h100", tuple(clusters.PRESETS)),
        Input("gpus", "GPUs", "64"),
        Input("batch", "samples a step", "256"),
        Input("dtype", "precision", "bfloat16", ("bfloat16", "float8", "float16", "float32")),
    ),
    "Layout": (
        Input("zero", "ZeRO stage", "3", literals("zero")),
        Input("tp", "tensor parallel", "1"),
        Input("pp", "pipeline stages", "1"),
        Input("cp", "context parallel", "1"),
        Input("ep", "expert parallel", "1"),
        Input("micro_batch", "micro-batch", "1"),
        Input("shard", "HSDP shard (0: all)", "0", smallest=0),
        Input("interleave", "pieces on a stage", "1"),
        Input("sequence_parallel", "sequence parallel", "false", ("false", "true")),
        Input("recompute", "recompute", "none", literals("recompute")),
    ),
}
INPUTS = {entry.name: entry for group in GROUPS.values() for entry in group}
MODEL = tuple(entry.name for entry in GROUPS["Model"][1:])
LAYOUT = (*(entry.name for entry in GROUPS["Layout"]), "batch", "dtype")
COUNTS = [name for name in LAYOUT if not INPUTS[name].choices]
DEFAULTS = {name: entry.value for name, entry in INPUTS.items()}


@dataclass(frozen=True)
class Question:
    """What the inputs ask for, as the planner takes it."""

    model: dict[str, Any]
    cluster: clusters.Cluster
    layout: dict[str, Any]
    command: str  # that prints the same plan


@dataclass(frozen=True)
class Answer:
    """``html`` for a reader, ``numbers`` for a test, ``sizes`` of the model; both are empty for what cannot be."""

    html: str
    numbers: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def number(values: Values, name: str) -> int:
    text = values[name].strip()
    if not text.isdecimal() or int(text) < INPUTS[name].smallest:
        refuse(f"{INPUTS[name].label}: {text!r}", f"a whole number from {INPUTS[name].smallest} on")
    return int(text)


def word(text: str) -> Any:
    """A choice as the record has it: true, false, a digit or a word."""
    return json.loads(text) if text in ("true", "false") or text.isdecimal() else text


def ask(values: Values) -> Question:
    """The question of some inputs; those that are not given have their defaults. PlanError for a wrong one."""
    values = DEFAULTS | {name: value for name, value in values.items() if name in INPUTS}
    sizes = {name: number(values, name) for name in MODEL if values[name].strip()}
    model = {"preset": values["model"], **sizes}
    layout = {name: number(values, name) if name in COUNTS else word(values[name]) for name in LAYOUT}
    gpus, ranks = number(values, "gpus"), layout["tp"] * layout["pp"] * layout["cp"]
    if gpus % ranks:
        refuse(f"{gpus} GPUs do not divide by tp x pp x cp = {ranks}", f"a multiple of {ranks} as GPUs, or less of one")
    layout = {"dp": gpus // ranks, **layout}
    usual = vars(Layout())
    fields = {name: value for name, value in layout.items() if name == "dp" or value != usual[name]}
    line = ["python", "-m", "helpers", "plan", values["model"], values["cluster"], f"--gpus={gpus}"]
    line += [f"--sizes={joined(sizes)}"] * bool(sizes) + [f"--layout={joined(fields)}"]
    return Question(model, clusters.cluster_of(values["cluster"], gpus), layout, shlex.join(line))


def joined(fields: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={str(value).lower()}" for name, value in fields.items())


def button(layout: Layout, label: str) -> str:
    """A button that puts a layout into the inputs."""
    fields = escape(joined({name: getattr(layout, name) for name in LAYOUT}))
    return f'<button type="button" data-layout="{fields}">{label}</button>'


def answer(values: Values) -> Answer:
    """The plan of some inputs."""
    try:
        question = ask(values)
        result = plan(question.model, question.cluster, question.layout)
        sizes = {name: getattr(result.model, name) for name in MODEL}
        return Answer(plan_html(result, question.command), tables(result), sizes)
    except (PlanError, ArithmeticError) as error:
        return Answer(error_html(error))


def best(values: Values) -> Answer:
    """The fastest layouts for a model, its GPUs and its batch, whatever the layout's inputs are."""
    try:
        question = ask({**values, **{name: INPUTS[name].value for name in LAYOUT if name not in ("batch", "dtype")}})
        model, batch, dtype = models.model_of(question.model), question.layout["batch"], question.layout["dtype"]
        return ranked(model, question.cluster, batch, dtype)
    except (PlanError, ArithmeticError) as error:
        return Answer(error_html(error))


@lru_cache(8)  # the page asks again after each change, also of a layout, which changes nothing here
def ranked(model: models.Model, cluster: clusters.Cluster, batch: int, dtype: str) -> Answer:
    result = search(model, cluster, batch, dtype=dtype)
    return Answer(search_html(result), search_tables(result))


def error_html(error: Exception) -> str:
    text = str(error) if isinstance(error, PlanError) else "A number is too large or too small.\nGive a real job's."
    what, _, hint = text.partition("\n")
    return f'<p class="planner-error" role="alert"><strong>{escape(what)}</strong> {escape(hint)}</p>'


def table_html(head: list[str], rows: list[list[str]]) -> str:
    """A table; cells are HTML. All columns but the first are numbers."""
    lines = [
        "".join(f"<th>{cell}</th>" for cell in head),
        *("".join(f"<td>{cell}</td>" for cell in row) for row in rows),
    ]
    return f"<table><thead><tr>{lines[0]}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines[1:])}</tr></tbody></table>"


def bar_html(kinds: Mapping[str, float], limit: float) -> str:
    """Memory by kind, drawn against the GPU's limit: a strip of pieces, and a mark where the memory ends."""
    scale = 100 / max(sum(kinds.values()), limit)
    pieces = "".join(
        f'<i class="kind-{place}" style="width:{size * scale:.3f}%" title="{escape(kind)}"></i>'
        for place, (kind, size) in enumerate(kinds.items())
    )
    mark = f'<b style="left:{limit * scale:.3f}%"></b>'
    return f'<div class="planner-bar" aria-hidden="true">{pieces}{mark}</div>'


def plan_html(result: Plan, command: str) -> str:
    """Whether it fits, memory by kind, the step, what binds, and the command that prints all of it."""
    kinds = {kind: size for kind, size in result.stages[result.fullest].items() if kind != "total" and size}
    size, limit, step = result.bytes / GIB, result.cluster.memory / GIB, result.step
    digits = 2 if size >= 1 else 6
    largest = max(kinds, key=kinds.__getitem__)
    verdict = f"{'Fits' if result.fits else 'Does not fit'}: {size:.1f} of {limit:.1f} GiB"
    rows = [
        [f'<i class="kind-{place}"></i>{escape(kind)}', f"{kinds[kind] / GIB:.{digits}f}"]
        for place, kind in enumerate(kinds)
    ]
    between = f"between {of_time(step.low)} and {of_time(step.high)}"
    sure = "extrapolated from steps of A100s" if step.extrapolated else f"{COVERAGE:.0%} of measured steps lie there"
    speed = f"{result.tokens / step.seconds:,.0f} tokens a second, MFU {result.utilization.mfu:.1%}"
    binds = f"{result.binds[0]}, most of it {result.binds[1]}"
    following, use = result.next.words.capitalize(), ""
    if result.next.layout:
        seconds = f" ({of_time(result.next.seconds)} a step)" if result.next.seconds else ""
        following, use = f"Try next: {result.next.words}{seconds}", button(result.next.layout, "try it")
    where = f" of stage {result.fullest}, the fullest" if result.layout.pp > 1 else ""
    lines = [
        f'<p class="{"fits" if result.fits else "too-large"}"><strong>{verdict}</strong>, most of it {largest}.</p>',
        bar_html(kinds, result.cluster.memory),
        f"<p><strong>{of_time(step.seconds)} a step</strong>, {between}: {sure}. {speed}.</p>",
        f"<p>What binds: {escape(binds)}. {escape(following)}. {use}</p>",
        table_html([f"memory of a rank{where}", "GiB"], [*rows, ["total", f"{size:.{digits}f}"]]),
        f"<pre><code>{escape(command)}</code></pre>",
    ]
    return "\n".join(lines)


def search_html(result: Search) -> str:
    """The ten fastest layouts that fit, each with a button that takes it over, and why not their neighbours."""
    if not result.fits:
        return error_html(result.none())
    rows = [
        [
            escape(words(fit.layout)),
            *(of_time(seconds) for seconds in (fit.seconds, fit.step.low, fit.step.high)),
            f"{fit.bytes / GIB:.1f}",
            button(fit.layout, "use"),
        ]
        for fit in result.fits[:10]
    ]
    first, _, *reasons = result.explain()
    items = "".join(f"<li>{escape(line)}</li>" for line in reasons)
    head = ["layout", "a step", "from", "to", "GiB", "take over"]
    return f"<p>{escape(first)}</p>{table_html(head, rows)}<ul>{items}</ul>"
