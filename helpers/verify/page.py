"""The page of a verification, as Markdown: a function of the record and of what is left."""

from collections.abc import Iterable, Sequence

from helpers.verify.compare import UNCOMPARED
from helpers.verify.order import PROBES
from helpers.verify.record import Figure, Prediction, Probe, Record, Step

COLUMNS = ("what", "measured", "unit", "predicted", "measured / predicted")
COLUMNS_WITHOUT_PREDICTIONS = 3  # the first ones of these


def page(record: Record, missing: Sequence[str]) -> str:
    """The page about a verification, whose ``record`` may be incomplete. ``missing`` names the steps that have not run.

    First come the probes for which there are predictions, then what differed and what agreed, then the other probes.
    """
    title, _, _ = record.facts["machine"].partition(";")  # the GPUs, without the versions
    if "rehearsed" in record.facts:
        title = "rehearsed, not run on a GPU"
    sections = [f"# The book on GPUs: {title}", table(["what", "value"], record.facts.items())]
    if missing:
        sections.append(f"Not run yet: {', '.join(missing)}.")
    for name, predictions in record.predictions.items():
        not_run = Probe(PROBES[name].title)
        sections += sections_of_probe(record.probes.get(name, not_run), predictions)
    sections += [
        "## What differed from gloo, the pages' backend, and from the rehearsal",
        differences(record),
        "## What agreed",
        agreements(record),
        UNCOMPARED.strip(),
        "## Scripts",
        "The observer's counting takes some of the seconds.",
        scripts_table(record.steps.values()),
    ]
    for name, probe in record.probes.items():
        if name not in record.predictions:
            sections += sections_of_probe(probe, predictions=[])
    return "\n\n".join(sections) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. Its cells may hold any text: what would end a cell or a row is written otherwise."""
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    for row in rows:
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in row]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def bullets(lines: Sequence[str], without: str) -> str:
    """The lines as a list, or the text ``without`` if there are none."""
    if not lines:
        return without
    return "\n".join(f"- {line}" for line in lines)


def fenced(text: str, head: str = "text") -> str:
    """A text as a block of code, which is fenced with more backticks than the text has in a row.

    ``head`` stands behind the first fence: the language, or for a page of the book a directive.
    """
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{head}\n{text.strip()}\n{fence}"


def rounded(number: float) -> str:
    """A number with four significant digits, and with commas from 1,000 on."""
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


# --- figures beside their predictions ---------------------------------------------------------------------------------


def figures_table(figures: Sequence[Figure], predictions: Sequence[Prediction]) -> str:
    """A table in Markdown of measured figures: first those that were predicted, each beside its prediction.

    Predictions that nothing was measured for have a row, too. If there are no predictions, their columns are left out.
    """
    measured = {figure.name: figure.value for figure in figures}
    rows = []
    for prediction in predictions:
        value = "not measured"
        ratio = ""
        if prediction.name in measured:
            value = rounded(measured[prediction.name])
            ratio = f"{measured[prediction.name] / prediction.value:.2f}"
        what = prediction.name
        if prediction.version:
            what = f"{prediction.name}, {prediction.version}"
        rows.append([what, value, prediction.unit, interval_of(prediction), ratio])
    predicted_names = {prediction.name for prediction in predictions}
    for figure in figures:
        if figure.name not in predicted_names:
            rows.append([figure.name, rounded(figure.value), figure.unit, "", ""])
    if predictions:
        return table(COLUMNS, rows)
    without_predictions = slice(COLUMNS_WITHOUT_PREDICTIONS)
    return table(COLUMNS[without_predictions], [row[without_predictions] for row in rows])


def interval_of(prediction: Prediction) -> str:
    """A prediction, and between which numbers: ``124.6 (105.6 to 199.3)``."""
    if prediction.low is None or prediction.high is None:
        return rounded(prediction.value)
    return f"{rounded(prediction.value)} ({rounded(prediction.low)} to {rounded(prediction.high)})"


# --- the page's other sections ----------------------------------------------------------------------------------------


def differences(record: Record) -> str:
    """A line for each difference of a step, and for each probe that did not end well."""
    lines = []
    for name, step in record.steps.items():
        lines += [f"{name}: {difference}" for difference in step.differences]
    for name, probe in record.probes.items():
        if probe.trouble:
            lines.append(f"{name}: {probe.trouble}")
    return bullets(lines, without="Nothing.")


def agreements(record: Record) -> str:
    """A line for each step in which nothing differed."""
    lines = [f"{name}: {step.summary}" for name, step in record.steps.items() if not step.differences]
    return bullets(lines, without="Nothing yet.")


def scripts_table(steps: Iterable[Step]) -> str:
    """A table of what each chapter's script came to, how long it took, and how much memory. Other steps have no row."""
    rows = []
    for step in steps:
        is_script = bool(step.script_seconds)
        if is_script:
            result = ", ".join(f"{name} {number:g}" for name, number in step.result.items())
            seconds = ", ".join(f"{number:.1f}" for number in step.script_seconds)
            memory = ", ".join(f"{peak / 1e6:.0f}" for peak in step.memory)
            rows.append([f"`{step.command}`", result, seconds, memory])
    return table(["command", "result on GPUs", "seconds on GPUs, on gloo", "peak MB of the ranks"], rows)


def sections_of_probe(probe: Probe, predictions: Sequence[Prediction]) -> list[str]:
    """A probe's figures and texts, under its title."""
    sections = [f"## {probe.title}"]
    if probe.trouble:
        sections.append(f"It {probe.trouble}.")
    if probe.figures or predictions:
        sections.append(figures_table(probe.figures, predictions))
    for title, text in probe.texts.items():
        sections += [f"### {title}", fenced(text or "(nothing)")]
    return sections
