"""The page of a verification, as Markdown: a function of the record, of what is left, and of the tolerances."""

from collections.abc import Iterable, Mapping, Sequence

from helpers.export.facts import Script as ScriptFacts
from helpers.verify.compare import UNCOMPARED
from helpers.verify.record import Figure, Probe, Record, Step


def page(record: Record, missing: Sequence[str], tolerances: Mapping[str, float]) -> str:
    """The page. ``missing`` are names of steps that have not run; ``tolerances`` has that of each chapter's result."""
    title = record.facts["machine"].partition(";")[0]
    if "rehearsed" in record.facts:
        title = "rehearsed, not run on a GPU"
    sections = [
        f"# The book on GPUs: {title}",
        table(["what", "value"], record.facts.items()),
        "## Predicted before the run, and measured",
        predicted_table(record),
        "## What differed from gloo, the pages' backend, and from the rehearsal",
        differences(record),
        "## What agreed",
        agreements(record),
        f"{tolerance_of_results(tolerances)} {UNCOMPARED.strip()}",
        "## Scripts",
        "The observer's counting takes some of the seconds.",
        scripts_table(record.steps),
    ]
    if missing:
        sections.insert(2, f"Not run yet: {', '.join(missing)}.")
    for name, probe in record.probes.items():
        sections += sections_of_probe(name, probe)
    for name, step in record.steps.items():
        if step.printed:
            sections += [f"## {name}", f"`{step.command}`", fenced(step.printed)]
    return "\n\n".join(sections) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells may hold any text."""
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    for row in rows:
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in row]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def bullets(lines: Sequence[str], without: str) -> str:
    """The lines as a list, or a text that says there are none."""
    if not lines:
        return without
    return "\n".join(f"- {line}" for line in lines)


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


# --- the page's sections ----------------------------------------------------------------------------------------------


def predicted_table(record: Record) -> str:
    """All predictions, each with what came out, if it has been measured."""
    rows = []
    for name, predictions in record.predictions.items():
        measured: dict[str, Figure] = {}
        if name in record.probes:
            measured = {figure.name: figure for figure in record.probes[name].figures}
        for prediction in predictions:
            value = "not measured"
            ratio = ""
            figure = measured.get(prediction.name)
            if figure is not None:
                value = rounded(figure.value)
                ratio = ratio_of(figure)
            interval = expected(prediction.value, prediction.low, prediction.high)
            rows.append([f"{name}: {prediction.name}", interval, value, prediction.unit, ratio])
    if not rows:
        return "Nothing: the planner does not know this GPU."
    return table(["what", "predicted", "measured", "unit", "measured / predicted"], rows)


def differences(record: Record) -> str:
    """A line for each difference of a step, and for each probe that did not end well."""
    lines = []
    for name, step in record.steps.items():
        lines += [f"{name}: {difference}" for difference in step.differences]
    lines += [f"{name}: {probe.trouble}" for name, probe in record.probes.items() if probe.trouble]
    return bullets(lines, without="Nothing.")


def agreements(record: Record) -> str:
    """A line for each step in which nothing differed."""
    lines = [f"{name}: {step.summary}" for name, step in record.steps.items() if not step.differences]
    return bullets(lines, without="Nothing yet.")


def scripts_table(steps: Mapping[str, Step]) -> str:
    """What each chapter's script came to, how long it took, and how much memory."""
    rows = []
    for step in steps.values():
        if step.script_seconds:
            result = ", ".join(f"{name} {number:g}" for name, number in step.result.items())
            seconds = ", ".join(f"{number:.1f}" for number in step.script_seconds)
            memory = ", ".join(f"{peak / 1e6:.0f}" for peak in step.memory)
            rows.append([f"`{step.command}`", result, seconds, memory])
    return table(["command", "result on GPUs", "seconds on GPUs, on gloo", "peak MB of the ranks"], rows)


def sections_of_probe(name: str, probe: Probe) -> list[str]:
    """A probe's figures and texts, under its title."""
    sections = [f"## {probe.title}", f"`{name}`, {probe.seconds:.0f} s."]
    if probe.trouble:
        sections.append(f"It {probe.trouble}.")
    if probe.figures:
        sections.append(figures_table(probe.figures))
    for title, text in probe.texts.items():
        sections += [f"### {title}", fenced(text or "(nothing)")]
    return sections


def figures_table(figures: Sequence[Figure]) -> str:
    """Figures as a table. It has columns for predictions if there are any."""
    head = ["what", "measured", "unit"]
    rows = [[figure.name, rounded(figure.value), figure.unit] for figure in figures]
    if any(figure.predicted is not None for figure in figures):
        head += ["predicted", "measured / predicted"]
        for row, figure in zip(rows, figures, strict=True):
            interval = ""
            if figure.predicted is not None:
                interval = expected(figure.predicted, figure.predicted_low, figure.predicted_high)
            row += [interval, ratio_of(figure)]
    return table(head, rows)


def tolerance_of_results(tolerances: Mapping[str, float]) -> str:
    """A sentence: the tolerance of results, and which chapters have another."""
    usual = ScriptFacts.tolerance
    unusual = [f"{tolerance:g} in {name}" for name, tolerance in tolerances.items() if tolerance != usual]
    if not unusual:
        return f"The tolerance of results is {usual:g}."
    return f"The tolerance of results is {usual:g}, and {', '.join(unusual)}."
