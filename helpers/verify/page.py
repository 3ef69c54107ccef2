"""The page of a verification, as Markdown: a function of the record, of what is left, and of the tolerances."""

from collections.abc import Iterator, Mapping, Sequence

from helpers.export.facts import Script
from helpers.verify.compare import UNCOMPARED
from helpers.verify.record import Figure, Prediction, Probe, Record, Step


def page(record: Record, missing: Sequence[str], tolerances: Mapping[str, float]) -> str:
    """The page. ``missing`` are names of steps that have not run; ``tolerances`` has that of each chapter's result."""
    rehearsed = "rehearsed" in record.facts
    title = "rehearsed, not run on a GPU"
    if not rehearsed:
        title = record.facts["machine"].partition(";")[0]
    lines = [f"# The book on GPUs: {title}", "", "| what | value |", "|---|---|"]
    lines += [f"| {name} | {cell(value)} |" for name, value in record.facts.items()]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    lines += ["", "## Predicted before the run, and measured", "", *predicted_table(record)]
    lines += ["", "## What differed from gloo, the pages' backend, and from the rehearsal", ""]
    lines += differences(record)
    lines += ["", "## What agreed", ""]
    lines += agreements(record)
    lines += ["", f"{about(tolerances)} {UNCOMPARED}", "## Scripts", ""]
    lines += ["The observer's counting takes some of the seconds.", "", *scripts_table(record.steps)]
    for name, probe in record.probes.items():
        lines += ["", *section_of(name, probe)]
    for name, step in record.steps.items():
        if step.printed:
            lines += ["", f"## {name}", "", f"`{step.command}`", "", fenced(step.printed)]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """A text as it may stand in a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def fenced(text: str, head: str = "text") -> str:
    """A text in a fence that it cannot close. ``head`` is its language or, for the book, its directive."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{head}\n{text.strip()}\n{fence}"


def rounded(number: float | None) -> str:
    """A number with four digits that say something, as people write it; "" for None."""
    if number is None:
        return ""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


def ratio_of(figure: Figure) -> str:
    """Measured over predicted, as ``0.94``; "" without a prediction."""
    if figure.ratio is None:
        return ""
    return f"{figure.ratio:.2f}"


def expected(value: float, low: float | None, high: float | None) -> str:
    """A prediction, and between which numbers: ``124.6 (105.6 to 199.3)``."""
    if low is None or high is None:
        return rounded(value)
    return f"{rounded(value)} ({rounded(low)} to {rounded(high)})"


def predicted_table(record: Record) -> list[str]:
    """All predictions, each with what came out, if it has been measured."""
    rows = []
    for name, predictions in record.predictions.items():
        measured: dict[str, Figure] = {}
        if name in record.probes:
            measured = {figure.name: figure for figure in record.probes[name].figures}
        rows += [predicted_row(name, prediction, measured.get(prediction.name)) for prediction in predictions]
    if not rows:
        return ["Nothing: the planner does not know this GPU."]
    return ["| what | predicted | measured | unit | measured / predicted |", "|---|---|---|---|---|", *rows]


def predicted_row(probe: str, prediction: Prediction, figure: Figure | None) -> str:
    """A row of that table."""
    value = "not measured"
    ratio = ""
    if figure is not None:
        value = rounded(figure.value)
        ratio = ratio_of(figure)
    wanted = expected(prediction.value, prediction.low, prediction.high)
    return f"| {probe}: {prediction.name} | {wanted} | {value} | {prediction.unit} | {ratio} |"


def differences(record: Record) -> list[str]:
    """A line for each difference of a step, and for each probe that did not end well."""
    lines = [f"- {name}: {line}" for name, step in record.steps.items() for line in step.differences]
    lines += [f"- {name}: {probe.trouble}" for name, probe in record.probes.items() if probe.trouble]
    if not lines:
        return ["Nothing."]
    return lines


def agreements(record: Record) -> list[str]:
    """A line for each step in which nothing differed."""
    lines = [f"- {name}: {step.summary}" for name, step in record.steps.items() if not step.differences]
    if not lines:
        return ["Nothing yet."]
    return lines


def scripts_table(steps: Mapping[str, Step]) -> Iterator[str]:
    """Yields the lines of the table of scripts."""
    yield "| command | result on GPUs | seconds on GPUs, on gloo | peak MB of the ranks |"
    yield "|---|---|---|---|"
    for step in steps.values():
        if step.script_seconds:
            result = ", ".join(f"{name} {number:g}" for name, number in step.result.items())
            seconds = ", ".join(f"{each:.1f}" for each in step.script_seconds)
            memory = ", ".join(f"{peak / 1e6:.0f}" for peak in step.memory)
            yield f"| `{step.command}` | {result} | {seconds} | {memory} |"


def section_of(name: str, probe: Probe) -> list[str]:
    """A probe's figures and texts, under its title."""
    lines = [f"## {probe.title}", "", f"`{name}`, {probe.seconds:.0f} s."]
    if probe.trouble:
        lines += ["", f"It {probe.trouble}."]
    if probe.figures:
        lines += ["", *figures_table(probe.figures)]
    for title, text in probe.texts.items():
        lines += ["", f"### {title}", "", fenced(text or "(nothing)")]
    return lines


def figures_table(figures: Sequence[Figure]) -> list[str]:
    """Figures as a table. It has columns for predictions if there are any."""
    if all(figure.predicted is None for figure in figures):
        rows = [f"| {figure.name} | {rounded(figure.value)} | {figure.unit} |" for figure in figures]
        return ["| what | measured | unit |", "|---|---|---|", *rows]
    lines = ["| what | measured | unit | predicted | measured / predicted |", "|---|---|---|---|---|"]
    for figure in figures:
        wanted = ""
        if figure.predicted is not None:
            wanted = expected(figure.predicted, figure.predicted_low, figure.predicted_high)
        lines.append(f"| {figure.name} | {rounded(figure.value)} | {figure.unit} | {wanted} | {ratio_of(figure)} |")
    return lines


def about(tolerances: Mapping[str, float]) -> str:
    """A sentence: the tolerance of results, and which chapters have another."""
    usual = Script.tolerance
    others = [f"{tolerance:g} in {name}" for name, tolerance in tolerances.items() if tolerance != usual]
    if not others:
        return f"The tolerance of results is {usual:g}."
    return f"The tolerance of results is {usual:g}, and {', '.join(others)}."
